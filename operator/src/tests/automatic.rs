//! Mode `Auto` against the API server: the operator writes `spec.replicas`, and numbers of others take no server away.

use cadre_crds::contract::ANNOTATION_TAKEN_OVER;
use cadre_desired::SCALER;
use serde_json::{Value, json};

use super::fields::Way;
use super::server::{Objects, Server};
use super::{name, operator, pool, reason, said};
use crate::metrics::Seen;

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
    let times = pool["metadata"]["annotations"][ANNOTATION_TAKEN_OVER].as_str();
    assert_eq!(times.map(|it| it.split(',').count()), Some(3), "{pool}");
    let words = said(&pool, "ScalingActive", "message");
    assert!(words.starts_with("kubectl writes spec.replicas again and again"), "{words}");
    assert_eq!(servers(&server, 3).await, pods, "nobody was told to leave");
    let text = context.metrics.text(&Seen::default());
    assert!(text.contains("cadre_operator_actions_total{action=\"scale\"}"), "{text}");
    assert!(!text.contains("action=\"drain\""), "{text}");
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
