//! Who a caller is, by the labels of its pod, and whether its pool serves it.
//!
//! In: a hello, the pod that its token is bound to, the caches. Out: the pool and the worker, or why not. A
//! pod that the caches do not have yet may come again; what a label contradicts never changes.

use cadre_control::Caller;
use cadre_control::proto::{Hello, Role};
use cadre_crds::{Encryption, OnPoolLoss, TrainingJob};
use cadre_desired::identity::{self, Claim, Identity};
use cadre_desired::job::encryption;
use cadre_views::JobFacts;
use kube::runtime::reflector::ObjectRef;

use crate::caches::Caches;
use crate::triggers::Key;

/// Identifies a caller by the labels of its pod.
///
/// # Errors
///
/// [`Answer`].
pub(super) fn identify(
    caches: &Caches,
    hello: &Hello,
    caller: &Caller,
    is_known: impl Fn(&Key) -> bool,
) -> Result<Known, Answer> {
    let reference = ObjectRef::new(&caller.pod).within(&caller.namespace);
    let pod =
        caches.pods.get(&reference).filter(|it| it.metadata.uid.as_ref() == Some(&caller.uid));
    let Some(pod) = pod else {
        let text = format!("{caller} is not known here; it needs the label cadre.dev/pool");
        return Err(Answer::Later(text));
    };
    let of = identity::job_of(&pod);
    let job = of.as_ref().and_then(|of| {
        let named = ObjectRef::new(&of.name).within(&of.namespace);
        // Of one that cannot be read nothing is known.
        let found = caches.trainings.get(&named).filter(|it| it.unreadable.is_none())?;
        Some(found.object.clone())
    });
    if job.is_none()
        && let Some(of) = of.filter(|_| identity::is_described(&pod))
    {
        let text = format!("TrainingJob {}/{} is not known here yet", of.namespace, of.name);
        return Err(Answer::Later(text));
    }
    let is_server = match hello.role() {
        Role::Server => true,
        Role::Trainer => false,
        Role::Unspecified => {
            return Err(Answer::Never(format!("{caller} says no role; set CADRE_ROLE")));
        }
    };
    let claim = Claim { is_server, index: hello.index, incarnation: hello.incarnation };
    let identity = identity::of(&pod, claim, job.as_ref())
        .map_err(|refusal| Answer::Never(refusal.to_string()))?;
    let encryption =
        encryption(&pod, job.as_ref()).map_err(|why| Answer::Never(format!("{caller}: {why}")))?;
    let key = (identity::home(&pod, job.as_ref()), identity.pool.clone());
    let pool = caches.pools.get(&ObjectRef::new(&key.1).within(&key.0));
    let Some(pool) = pool else {
        return Err(Answer::Later(format!("there is no AttentionPool {}/{}", key.0, key.1)));
    };
    let listed = pool.object.spec.access.namespaces.contains(&caller.namespace);
    if key.0 != caller.namespace && !listed {
        let text = format!(
            "pool {}/{} does not serve namespace {}; add it to its spec.access.namespaces",
            key.0, key.1, caller.namespace
        );
        return Err(Answer::Never(text));
    }
    if is_known(&key) {
        Ok(Known { key, identity, job, encryption })
    } else {
        Err(Answer::Later(format!("pool {}/{} has not been looked at yet", key.0, key.1)))
    }
}

/// A caller that has been identified.
pub(super) struct Known {
    /// The pool that it belongs to.
    pub(super) key: Key,
    pub(super) identity: Identity,
    /// The `TrainingJob`, if the caller is a trainer of one.
    pub(super) job: Option<TrainingJob>,
    /// Whether links of its attempt are encrypted; not read for a server.
    pub(super) encryption: Encryption,
}

/// Why a worker is turned away.
pub(super) enum Answer {
    /// The worker may come again later.
    Later(String),
    /// The worker will never be let in.
    Never(String),
}

/// Facts of a trainer's job; for a job of another kind, as the trainer states them.
pub(super) fn job_facts(job: Option<&TrainingJob>, hello: &Hello) -> JobFacts {
    let attention = job.map(|it| &it.spec.attention);
    // A step may need the memory of several servers. So a job lends only where it says how many it needs, and one that ends with
    // its last server takes no risk.
    let fails = attention.is_some_and(|it| it.on_pool_loss == OnPoolLoss::Fail);
    let keeps = attention.and_then(|it| it.servers).filter(|_| !fails);
    JobFacts {
        trainers: job.map_or(hello.trainers, |it| it.spec.trainers()),
        reproducible: attention.is_some_and(|it| it.reproducible),
        share: attention.map_or(100, |it| it.share),
        keeps,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_lends_only_where_it_says_how_many_servers_it_needs() {
        let keeps = |attention: serde_json::Value| {
            let spec = json!({"template": {}, "nodes": 1, "attention": attention});
            let job = json!({"metadata": {"name": "j"}, "spec": spec});
            let job: TrainingJob = serde_json::from_value(job).expect("a job");
            job_facts(Some(&job), &Hello::default()).keeps
        };
        let pool = || json!({"name": "p"});
        assert_eq!(keeps(json!({"poolRef": pool()})), None);
        assert_eq!(keeps(json!({"poolRef": pool(), "servers": 3})), Some(3));
        let fails = json!({"poolRef": pool(), "servers": 3, "onPoolLoss": "Fail"});
        assert_eq!(keeps(fails), None);
        assert_eq!(job_facts(None, &Hello::default()).keeps, None);
    }
}
