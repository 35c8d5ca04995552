//! Attempts that have ended and stay for their logs.

use cadre_cluster::logs::{Wanted, pods};
use cadre_cluster::{Seen, Target};
use serde_json::json;

use super::{at, attempt, condition, job, parsed, pod, pool, ready, scene, serving, text};

/// A job that trains, or is suspended, and the failed attempt before it, whose pod is still there.
fn restarted(suspended: bool) -> Seen {
    let mut seen = scene();
    seen.pools.push(parsed(pool(serving())));
    let said = if suspended {
        [condition("Suspended", "True", "Suspended", "spec.suspend is true")]
    } else {
        [condition("Running", "True", "Running", "1 of 1 pods are ready")]
    };
    seen.jobs.push(parsed(job(json!({"attempt": 2, "observedGeneration": 1, "conditions": said}))));
    let failed = json!({"phase": "Failed", "containerStatuses": [{"name": "trainer", "ready": false,
        "restartCount": 0, "image": "", "imageID": "", "state": {"terminated": {"exitCode": 1}}}]});
    let node = json!({"nodeName": "n1", "containers": []});
    seen.pods = vec![parsed(pod("j-1-0", "trainer", node, failed))];
    seen.attempts = vec![parsed(attempt(json!({"failed": 1}), false))];
    if !suspended {
        let mut second = ready("j-2-0", "trainer");
        second["metadata"]["labels"]["cadre.dev/attempt"] = json!("2");
        seen.pods.push(parsed(second));
        let mut second = attempt(json!({"active": 2, "ready": 2}), false);
        second["metadata"]["name"] = json!("j-2");
        second["metadata"]["labels"]["cadre.dev/attempt"] = json!("2");
        second["metadata"]["creationTimestamp"] = json!(at(-100));
        seen.attempts.push(parsed(second));
    }
    seen
}

#[test]
fn an_attempt_that_stays_for_its_logs_is_asked_for_by_name_and_no_cause_of_anything() {
    let logs = |seen: &Seen, previous| {
        let wanted = Wanted { follow: false, tail: None, previous };
        let target: Target = "cadjob/j".parse().expect("a target");
        let pods = pods(seen, "team", &target, wanted);
        pods.iter().map(|it| it.metadata.name.clone().unwrap_or_default()).collect::<Vec<_>>()
    };
    let seen = restarted(false);
    assert_eq!([logs(&seen, false), logs(&seen, true)], [["j-2-0"], ["j-1-0"]]);
    let suspended = restarted(true);
    assert_eq!(logs(&suspended, false), ["j-1-0"], "no other is there");
    for (seen, is_well) in [(seen, true), (suspended, false)] {
        for target in ["cadjob/j", "attnpool/p"] {
            let text = text(&seen, target);
            assert!(!text.contains("j-1"), "{text}");
            assert!(!text.contains("cause:") || !is_well, "{text}");
        }
    }
}
