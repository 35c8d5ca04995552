//! Mode `Auto` against the API server: the operator writes `spec.replicas`, and numbers of others take no server away.

use cadre_crds::contract::ANNOTATION_TAKEN_OVER;
use cadre_desired::SCALER;
use cadre_desired::pool::Report;
use serde_json::{Value, json};

use super::fields::Way;
use super::server::{Objects, Server};
use super::{name, operator, pool, reason, running, said};
use crate::metrics::Seen;
use crate::told::Servers;

const FORCED: Way = Way::Apply { is_forced: true };

/// A pool of mode `Auto` whose number nobody has, as after a server-side apply of a manifest without one.
fn automatic(min: u32, max: u32) -> Value {
    let mut pool = pool(0);
    pool["spec"]["scaling"] = json!({"mode": "Auto", "min": min, "max": max});
    pool
}

/// The pool, if its number is this one and the operator's.
fn ours(all: &Objects<'_>, number: u32) -> Option<Value> {
    let pool = all.get("attentionpools", "p")?;
    let has = pool["metadata"]["managedFields"].as_array()?;
    let is_ours = has.iter().any(|it| it["manager"] == SCALER && it["operation"] == "Apply");
    (is_ours && pool["spec"]["replicas"] == number).then(|| pool.clone())
}

async fn servers(server: &Server, count: usize) -> Vec<String> {
    let there = |all: &Objects<'_>| {
        let pods: Vec<_> = all.of("pods").into_iter().map(name).collect();
        (pods.len() == count).then_some(pods)
    };
    server.until("servers", there).await
}

#[tokio::test]
async fn mode_auto_writes_its_number_and_takes_those_of_others_over() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("attentionpools", "p", &automatic(3, 5));
    server.until("the number in the spec", |all| ours(all, 3)).await;
    let pods = servers(&server, 3).await;

    assert!(server.write("kubectl", Way::Scale, Some(1)));
    server.until("the number of those who are there", |all| ours(all, 3)).await;
    let before = server.history("attentionpools").len();
    assert!(server.write("kubectl", FORCED, None), "a manifest without a number");
    assert!(!server.write("kubectl", Way::Apply { is_forced: false }, Some(2)), "a conflict");
    assert!(server.write("flux", FORCED, Some(2)));
    let told = |all: &Objects<'_>| {
        let pool = ours(all, 3)?;
        let decision = &pool["status"]["lastScaleDecision"];
        (decision["from"] == 2 && decision["to"] == 3 && pool["status"]["desired"] == 3)
            .then_some(())
    };
    server.until("what was done", told).await;
    let numbers = server.history("attentionpools").into_iter().skip(before);
    assert!(numbers.map(|it| it.1).all(|it| it["spec"]["replicas"].as_u64() >= Some(2)));

    // The fourth within an hour, with the manifest's own.
    assert!(server.write("kubectl", Way::Scale, Some(1)));
    let left_alone = |all: &Objects<'_>| {
        let pool = all.get("attentionpools", "p")?;
        let is_told = reason(pool, "ScalingActive") == "OthersScale";
        is_told.then(|| pool.clone())
    };
    let pool = server.until("a rival", left_alone).await;
    assert_eq!(pool["spec"]["replicas"], 1);
    assert_eq!(pool["metadata"]["annotations"], Value::Null);
    let noted = |all: &Objects<'_>| {
        let budget = all.get("poddisruptionbudgets", "p-servers")?;
        let times = budget["metadata"]["annotations"][ANNOTATION_TAKEN_OVER].as_str()?;
        (times.split(',').count() == 3).then_some(())
    };
    server.until("three times", noted).await;
    let words = said(&pool, "ScalingActive", "message");
    assert!(words.starts_with("kubectl writes spec.replicas again and again"), "{words}");
    assert_eq!(servers(&server, 3).await, pods, "nobody was told to leave");
    let text = context.metrics.text(&Seen::default());
    assert!(text.contains("cadre_operator_actions_total{action=\"scale\"}"), "{text}");
    assert!(!text.contains("action=\"drain\""), "{text}");
}

#[tokio::test]
async fn a_look_that_scales_guards_or_releases_has_not_failed() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("attentionpools", "p", &automatic(1, 5));
    let scaled = |all: &Objects<'_>| ours(all, 1).filter(|it| it["status"]["desired"] == 1);
    server.until("the number, told", scaled).await;
    let pods = servers(&server, 1).await;
    server.put("pods", &pods[0], &running());

    let key = ("n".to_owned(), "p".to_owned());
    for connected in [true, false] {
        let report = Some((pods[0].clone(), Report::default())).filter(|_| connected);
        let told = Servers { reports: report.into_iter().collect(), ..Servers::default() };
        context.told.tell_pool(&key, told, true);
        context.caches.pool_triggers.put(key.clone());
        let guarded = |all: &Objects<'_>| {
            let pool = all.get("attentionpools", "p")?;
            let finalizers = pool["metadata"]["finalizers"].as_array().map_or(0, Vec::len);
            let registered = pool["status"]["registered"].as_u64();
            let expected = u64::from(connected);
            (finalizers as u64 == expected && registered == Some(expected)).then_some(())
        };
        server.until("guarded, told", guarded).await;
    }
    let text = context.metrics.text(&Seen::default());
    assert!(text.contains("result=\"ok\"") && !text.contains("result=\"error\""), "{text}");
}

#[tokio::test]
async fn its_own_number_makes_a_pool_smaller_as_any_does() {
    let server = Server::new();
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &automatic(3, 5));
    servers(&server, 3).await;
    let fewer = json!({"spec": {"scaling": {"min": 0, "max": 1}}});
    server.put("attentionpools", "p", &fewer);
    server.until("the number in the spec", |all| ours(all, 1)).await;
    servers(&server, 1).await;
}

#[tokio::test]
async fn a_number_is_not_written_where_the_budget_that_goes_before_it_is_refused() {
    let server = Server::new();
    server.limit("poddisruptionbudgets", 0, 403, "budgets are refused");
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &automatic(3, 5));
    let told = |all: &Objects<'_>| {
        let pool = all.get("attentionpools", "p")?;
        let words = said(pool, "Degraded", "message");
        (words == "create PodDisruptionBudget p-servers: budgets are refused").then(|| pool.clone())
    };
    let pool = server.until("the refusal", told).await;
    assert_eq!(pool["spec"]["replicas"], 0);
    server.lift_limits();
    server.until("the number in the spec", |all| ours(all, 3)).await;
    servers(&server, 3).await;
}
