//! Why a pool is as it is.
//!
//! In: a pool. Out: its conditions that are bad news, the jobs that have its servers, these, the trainers that serve in place.

use cadre_crds::{AttentionPool, Holder, ScalingMode};

use super::{Finding, Verdict, of_condition, operator, pod, remedy, worst};
use crate::facts::condition;
use crate::seen::{Seen, name, namespace};

/// Conditions, the truth that is bad news, and how bad.
const NEWS: [(&str, &str, Verdict); 5] = [
    ("Degraded", "True", Verdict::Bad),
    ("Available", "False", Verdict::Waiting),
    ("PlacementSatisfied", "False", Verdict::Waiting),
    ("Balanced", "False", Verdict::Waiting),
    ("ScalingActive", "False", Verdict::Waiting),
];

pub(super) fn explain(seen: &Seen, pool: &AttentionPool) -> Finding {
    let trainers = pod::all(seen, "trainers with this pool", &seen.trainers_of_pool(pool));
    alone(seen, pool, trainers)
}

/// A pool with what is known about its trainers.
pub(super) fn alone(seen: &Seen, pool: &AttentionPool, trainers: Vec<Finding>) -> Finding {
    let meta = &pool.metadata;
    let what = format!("attnpool {}/{}", namespace(meta), name(meta));
    let status = pool.status.clone().unwrap_or_default();
    let mut below: Vec<Finding> =
        operator::behind(seen, meta, status.observed_generation).into_iter().collect();
    let servers = pod::all(seen, "servers", &seen.servers(pool));
    let troubled = [&servers, &trainers].into_iter().any(|it| worst(it) == Verdict::Bad);
    for (name, bad, verdict) in NEWS {
        let Some(it) = condition(&status.conditions, name).filter(|it| it.status == bad) else {
            continue;
        };
        // A fixed pool does not scale, and that is as it should be.
        if it.reason == "Fixed" {
            continue;
        }
        // The pods below explain these reasons better.
        let about_pods = ["Unschedulable", "NotStarting", "ServerFailed"].contains(&&*it.reason);
        let verdict = if about_pods && troubled { Verdict::Waiting } else { verdict };
        below.push(of_condition(it, verdict));
    }
    below.extend(unheard(seen, pool));
    below.extend(status.holders.iter().map(held));
    below.extend(servers);
    below.extend(trainers);
    if let Some(it) = seen.warnings("AttentionPool", meta).first()
        && remedy::of_reason(it.reason.as_deref().unwrap_or_default()).is_some()
        && status.ready < status.desired
    {
        let reason = it.reason.clone().unwrap_or_default();
        let says = it.message.clone().unwrap_or_default();
        let finding = Finding::new(format!("event {reason}"), Verdict::Bad, says);
        below.push(finding.with(remedy::of_reason(&reason)));
    }
    let says = if meta.deletion_timestamp.is_some() {
        format!("is being deleted; {} servers drain", status.draining)
    } else {
        format!(
            "{} of {} dedicated servers are ready, {} registered, {} serve in place",
            status.ready, status.desired, status.registered, status.in_place_servers
        )
    };
    Finding::new(what, worst(&below), says).over(below)
}

/// A job that has some of the servers.
fn held(holder: &Holder) -> Finding {
    let Holder { namespace, name, since, servers, lent } = holder;
    let lends = lent.map(|it| format!("; {it} of its share are lent while it uses none"));
    let (count, lends) = (servers.len(), lends.unwrap_or_default());
    let says = format!("has {count} of the servers since {}{lends}", since.0);
    Finding::new(format!("cadjob {namespace}/{name}"), Verdict::Fine, says)
}

/// Autoscalers that write the number that the operator writes in mode `Auto`.
fn unheard(seen: &Seen, pool: &AttentionPool) -> Vec<Finding> {
    if pool.spec.scaling.mode != ScalingMode::Auto {
        return Vec::new();
    }
    let meta = &pool.metadata;
    let of_pool = seen.autoscalers.iter().filter(|it| {
        let target = &it.spec.scale_target_ref;
        target.kind == "AttentionPool"
            && target.name == name(meta)
            && namespace(&it.metadata) == namespace(meta)
    });
    let says = "writes spec.replicas, and with spec.scaling.mode Auto so does the operator";
    let remedy = "set spec.scaling.mode to External, or delete the autoscaler";
    of_pool
        .map(|it| {
            let what = format!("horizontalpodautoscaler {}", name(&it.metadata));
            Finding::new(what, Verdict::Bad, says).with(Some(remedy))
        })
        .collect()
}
