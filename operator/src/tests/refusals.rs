//! What the API server refuses is told in its words, and holds up nothing else.

use std::path::PathBuf;

use cadre_crds::contract::ANNOTATION_ENDED;
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_desired::{Action, Kind, Object, Reference};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::server::{Objects, Refused, Server};
use super::{job, name, operator, operator_with, pool, reason, running, said};
use crate::apply;
use crate::issuer::Issuer;
use crate::metrics::Seen;

const QUOTA: &str =
    "pods \"NAME\" is forbidden: exceeded quota: team, used: pods=2, limited: pods=2";

/// The names of two servers that the operator has made; both run.
async fn two_that_run(server: &Server) -> Vec<String> {
    let pods = server
        .until("two servers", |all| {
            let pods: Vec<_> = all.of("pods").into_iter().map(name).collect();
            (pods.len() == 2).then_some(pods)
        })
        .await;
    for pod in &pods {
        server.put("pods", pod, &running());
    }
    pods
}

#[tokio::test]
async fn a_quota_for_some_servers_is_told_and_the_others_serve() {
    let server = Server::new();
    server.limit("pods", 2, 403, QUOTA);
    let context = operator(&server).await;
    server.put("attentionpools", "p", &pool(4));
    two_that_run(&server).await;
    let message = server
        .until("the quota's words", |all| {
            let pool = all.get("attentionpools", "p")?;
            assert_ne!(reason(pool, "Progressing"), "Settled", "two are missing");
            let told = pool["status"]["ready"] == 2 && reason(pool, "Degraded") == "Forbidden";
            told.then(|| said(pool, "Degraded", "message"))
        })
        .await;
    // Which slot is refused is known; what the try in it is called is other each second.
    let slot = message.strip_prefix("create Pod p-").and_then(|it| it.split_once('-'));
    let (slot, _) = slot.unwrap_or_else(|| panic!("{message}"));
    let words = QUOTA.replace("NAME", &format!("p-{slot}-*"));
    assert_eq!(message, format!("create Pod p-{slot}-*: {words}"));
    let facts = context.known.take().remove(&("n".to_owned(), "p".to_owned()));
    let facts = facts.expect("the control service knows the pool");
    assert_eq!((facts.slots.len(), facts.servers.len()), (4, 2));

    server.put("attentionpools", "p", &json!({"spec": {"replicas": 1}}));
    server
        .until("one server", |all| {
            let pool = all.get("attentionpools", "p")?;
            let rest = (pool["status"]["ready"] == 1, reason(pool, "Degraded"));
            (rest == (true, "AsItShould".to_owned())).then_some(())
        })
        .await;
}

#[tokio::test]
async fn who_has_to_leave_leaves_though_nobody_may_come() {
    let server = Server::new();
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &pool(2));
    let pods = two_that_run(&server).await;
    server.limit("services", 0, 422, "services are refused");
    server.limit("pods", 0, 403, QUOTA);
    // The Service is gone, one server has failed, and the pool is to have other servers.
    server.remove_object("services", "p-servers");
    server.put("pods", &pods[1], &json!({"status": {"phase": "Failed"}}));
    let image = json!([{"name": "server", "image": "another"}]);
    let change = json!({"spec": {"replicas": 1, "template": {"spec": {"containers": image}}}});
    server.put("attentionpools", "p", &change);
    server
        .until("the end of both", |all| {
            let pool = all.get("attentionpools", "p")?;
            let told = said(pool, "Degraded", "message");
            (all.of("pods").is_empty() && told == "create Service p-servers: services are refused")
                .then_some(())
        })
        .await;
    server.lift_limits();
    server.until("a successor", |all| (all.of("pods").len() == 1).then_some(())).await;
}

/// Every refusal that there is, of everything that is made for either kind.
#[tokio::test]
async fn every_refusal_is_a_condition_with_the_words_of_who_refuses() {
    let failed = [401, 404, 409, 429, 500, 503].map(|it| (it, "ApiServerFailed"));
    let codes = [(403, "Forbidden"), (422, "Refused"), (400, "Refused")].into_iter().chain(failed);
    let made = [
        ("attentionpools", "services", "create Service p-servers"),
        ("attentionpools", "poddisruptionbudgets", "create PodDisruptionBudget p-servers"),
        ("attentionpools", "pods", "create Pod p-0-*"),
        ("trainingjobs", "services", "create Service p-trainers"),
        ("trainingjobs", "jobs", "create Job p-1"),
    ];
    for (kind, resource, what) in made {
        for (code, expected) in codes.clone() {
            let message = format!("{what}: words of {code}");
            let told = told(kind, Issuer::default(), |server| {
                server.limit(resource, 0, code, &format!("words of {code}"));
            });
            assert_eq!(told.await, (expected.to_owned(), message));
        }
    }
    for kind in ["attentionpools", "trainingjobs"] {
        let theirs = if kind == "attentionpools" { "p-servers" } else { "p-trainers" };
        let (reason, message) = told(kind, Issuer::default(), |server| {
            let theirs_is = json!({"apiVersion": "v1", "kind": "Service", "spec": {}});
            server.put("services", theirs, &theirs_is);
        })
        .await;
        assert_eq!(reason, "NameTaken");
        assert!(message.starts_with(&format!("Service {theirs} is there")), "{message}");
        let nowhere = Issuer::new(Some(PathBuf::from("/nowhere")));
        let (reason, message) = told(kind, nowhere, |_| {}).await;
        assert_eq!(reason, "NoCertificate");
        assert!(message.starts_with("certificate file /nowhere/ca.crt"), "{message}");
    }
}

/// Reason and message of what keeps an object from being whole.
async fn told(kind: &str, issuer: Issuer, prepare: impl Fn(&Server)) -> (String, String) {
    let server = Server::new();
    prepare(&server);
    let _context = operator_with(&server, issuer).await;
    let (own, condition) = match kind {
        "trainingjobs" => {
            let mut other = pool(1);
            other["spec"] = json!({"inPlace": true});
            other["metadata"]["name"] = "p".into();
            server.put("attentionpools", "p", &other);
            (job(), "Running")
        }
        _ => (pool(1), "Degraded"),
    };
    server.put(kind, "p", &own);
    let usual = |it: &Value| reason(it, "Degraded") == "AsItShould" || it["status"].is_null();
    server
        .until("a reason", |all| {
            let object = all.get(kind, "p")?;
            // A job's workers are what it waits for; a pool has them or not.
            (!usual(object)).then(|| {
                assert_eq!(reason(object, "Degraded"), reason(object, condition));
                (reason(object, condition), said(object, condition, "message"))
            })
        })
        .await
}

#[tokio::test]
async fn words_that_are_too_long_for_a_condition_are_told_as_far_as_it_goes() {
    for kind in ["attentionpools", "trainingjobs"] {
        let resource = if kind == "attentionpools" { "pods" } else { "jobs" };
        let (reason, message) = told(kind, Issuer::default(), |server| {
            server.limit(resource, 0, 422, &"é".repeat(40_000));
        })
        .await;
        assert_eq!((reason.as_str(), message.chars().count()), ("Refused", 32_768), "{kind}");
        assert!(message.starts_with("create "), "{kind}");
    }
}

#[tokio::test]
async fn definitions_of_an_earlier_build_lose_what_they_do_not_know_and_that_is_told() {
    let server = Server::new();
    let unknown = "failed to create typed patch object (n/p; cadre.dev/v1alpha1, Kind=AttentionPool): errors:\n  \
                   .status.selector: field not declared in schema\n  .status.holders: field not declared in schema";
    server.refuse(Refused {
        verb: "status",
        resource: "attentionpools",
        with: "/status/selector",
        code: 500,
        words: unknown.into(),
    });
    let context = operator(&server).await;
    server.put("attentionpools", "p", &pool(2));
    two_that_run(&server).await;
    let told = |all: &Objects<'_>| {
        let pool = all.get("attentionpools", "p")?;
        (reason(pool, "Degraded") == "OldDefinitions" && pool["status"]["ready"] == 2)
            .then(|| pool.clone())
    };
    let pool = server.until("what is wrong", told).await;
    assert_eq!(pool["status"]["selector"], Value::Null);
    assert_eq!(
        said(&pool, "Degraded", "message"),
        "the definitions in the cluster are of another build and do not know status.holders, status.selector: apply those \
         of this build (charts/cadre/crds)"
    );
    let text = context.metrics.text(&Seen::default());
    assert!(!text.contains("result=\"error\""), "{text}");
}

#[tokio::test]
async fn a_quota_that_lets_no_trainer_start_is_told_by_the_job() {
    let server = Server::new();
    server.limit("pods", 1, 403, QUOTA);
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &pool(1));
    server.until("a server", |all| all.of("pods").into_iter().next().map(drop)).await;
    // Nobody makes pods of Jobs here, as where all are refused.
    server.put("trainingjobs", "j", &job());
    let message = server
        .until("the quota's words", |all| {
            let job = all.get("trainingjobs", "j")?;
            (reason(job, "Running") == "Forbidden").then(|| said(job, "Running", "message"))
        })
        .await;
    let words = QUOTA.replace("NAME", "j-1-try");
    assert_eq!(message, format!("0 of 2 pods are made; try a pod of Job j-1: {words}"));
    server.until("no pod", |all| (all.of("pods").len() == 1).then_some(())).await;
}

/// What the API server says of a pod that it does not admit, by who refuses it.
const NOT_ADMITTED: [(u16, &str, &str); 5] = [
    (403, QUOTA, "Forbidden"),
    (
        403,
        "pods \"NAME\" is forbidden: violates PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false",
        "Forbidden",
    ),
    (
        403,
        "pods \"NAME\" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi",
        "Forbidden",
    ),
    (
        422,
        "pods \"NAME\" is forbidden: ValidatingAdmissionPolicy 'cadre-servers' with binding 'cadre-servers' denied request: \
         only the operator of Cadre makes servers",
        "Refused",
    ),
    (
        500,
        "Internal error occurred: failed calling webhook \"pods.example.com\": no endpoints",
        "ApiServerFailed",
    ),
];

#[tokio::test]
async fn a_pod_that_is_not_admitted_is_told_in_the_words_of_who_refuses_it() {
    for (code, words, expected) in NOT_ADMITTED {
        let server = Server::new();
        server.limit("pods", 0, code, words);
        let _context = operator(&server).await;
        server.put("attentionpools", "p", &pool(1));
        server.put("trainingjobs", "j", &job());
        for (kind, own, condition, pod) in [
            ("attentionpools", "p", "Degraded", "p-0-*"),
            ("trainingjobs", "j", "Running", "j-1-try"),
        ] {
            let told = |all: &Objects<'_>| {
                let object = all.get(kind, own)?;
                (reason(object, condition) == expected).then(|| said(object, condition, "message"))
            };
            let message = server.until(words, told).await;
            assert!(message.ends_with(&words.replace("NAME", pod)), "{message}");
        }
    }
}

/// Two pods that are made at the same time may meet in the quota's count: the second one has to be tried again.
#[tokio::test]
async fn a_pod_that_meets_another_in_a_quota_is_made_later() {
    let server = Server::new();
    let words =
        "Operation cannot be fulfilled on resourcequotas \"team\": the object has been modified";
    server.limit("pods", 1, 409, words);
    let _context = operator(&server).await;
    server.put("attentionpools", "p", &pool(2));
    let told = |all: &Objects<'_>| {
        let pool = all.get("attentionpools", "p")?;
        (reason(pool, "Degraded") == "ApiServerFailed").then(|| said(pool, "Degraded", "message"))
    };
    let message = server.until("the quota's words", told).await;
    assert!(message.starts_with("create Pod p-") && message.ends_with(words), "{message}");
    server.lift_limits();
    server.until("both", |all| (all.of("pods").len() == 2).then_some(())).await;
}

#[tokio::test]
async fn an_object_that_has_changed_meanwhile_hides_no_refusal() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("attentionpools", "p", &pool(1));
    let mut before = server.until("the pool", |all| all.get("attentionpools", "p").cloned()).await;
    before["metadata"]["resourceVersion"] = "0".into();
    let before: AttentionPool = serde_json::from_value(before).expect("a pool");
    server.limit("services", 0, 403, "services are refused");
    let service = || {
        let mut service = Service::default();
        service.metadata.name = Some("x".into());
        Action::Create(Object::Service(Box::new(service)))
    };
    for actions in [vec![Action::Guard, service()], vec![service(), Action::Guard]] {
        let failed =
            apply::all(&context, &before, actions, Ok(())).await.failed.expect("two of two");
        assert_eq!(failed.reason(), "Forbidden");
    }
    let failed = apply::all(&context, &before, vec![Action::Guard], Ok(())).await.failed;
    assert_eq!(failed.expect("it has changed").reason(), "Stale");
}

/// Its time is over by what the cache has; meanwhile it was given more, or more restarts.
#[tokio::test]
async fn a_job_that_has_changed_since_its_time_was_over_is_not_deleted() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("trainingjobs", "j", &job());
    let before = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let mut before: TrainingJob = serde_json::from_value(before).expect("a job");
    before.metadata.resource_version = Some("0".into());
    let delete = async |job: &TrainingJob| {
        let failed = apply::all(&context, job, vec![Action::DeleteSelf], Ok(())).await.failed;
        failed.map(|it| it.reason())
    };
    assert_eq!(delete(&before).await, Some("Stale"));
    let now = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let now = serde_json::from_value(now).expect("a job");
    assert_eq!(delete(&now).await, None);
    server.until("its end", |all| all.get("trainingjobs", "j").is_none().then_some(())).await;
    assert_eq!(delete(&now).await, None, "it is gone");
}

/// Its name is another object's by now: the API server takes a uid for a field that nobody may change.
#[tokio::test]
async fn what_is_written_on_an_object_is_none_of_the_one_that_has_followed_it() {
    let server = Server::new();
    let context = operator(&server).await;
    server.put("trainingjobs", "j", &job());
    let owner = server.until("the job", |all| all.get("trainingjobs", "j").cloned()).await;
    let owner: TrainingJob = serde_json::from_value(owner).expect("a job");
    server.put("jobs", "x", &json!({"spec": {}}));
    server.put("pods", "x", &running());
    let of = |kind| Reference { kind, name: "x".into(), uid: "former".into() };
    let (annotation, text) = (ANNOTATION_ENDED, "words".to_owned());
    let since = Timestamp::now();
    let actions = vec![
        Action::Note { object: of(Kind::Job), annotation, text },
        Action::Drain { pod: of(Kind::Pod), reason: "ScaledDown", since },
    ];
    let done = apply::all(&context, &owner, actions, Ok(())).await;
    assert!(done.failed.is_none(), "{done:?}");
    let notes = |all: &Objects<'_>, kind: &str| {
        all.get(kind, "x").map(|it| it["metadata"]["annotations"].clone())
    };
    for kind in ["jobs", "pods"] {
        assert_eq!(server.until("it", |all| notes(all, kind)).await, Value::Null, "{kind}");
    }
}
