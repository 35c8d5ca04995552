//! Who leads, while the API server swallows calls and holders die.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::server::{Objects, Server};
use crate::leader::{Lease, Patience, Place, acquire};

/// Ten times faster than usual, so that a test does not wait for long.
const FAST: Patience = Patience {
    lease: Duration::from_millis(1500),
    sure: Duration::from_secs(1),
    renew: Duration::from_millis(100),
    look: Duration::from_millis(50),
    call: Duration::from_millis(200),
};

async fn leads(server: &Server, identity: &str) -> Lease {
    leads_with(server, identity, FAST).await
}

async fn leads_with(server: &Server, identity: &str, patience: Patience) -> Lease {
    let place =
        Place { namespace: "n".into(), name: "cadre-operator".into(), identity: identity.into() };
    let leading = acquire(server.client(), &place, patience);
    let limit = Duration::from_mins(1);
    tokio::time::timeout(limit, leading).await.unwrap_or_else(|_| panic!("{identity} never leads"))
}

fn spec(lease: &Value, field: &str) -> String {
    let value = &lease["spec"][field];
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Each call can be the one that is never answered: when the lease is looked at, taken, renewed or given back.
#[tokio::test]
async fn a_lease_is_taken_over_though_calls_are_never_answered() {
    let server = Server::new();
    for calls in [1, 2, 4] {
        server.swallow("leases", calls);
        let lease = leads(&server, &format!("dies-{calls}")).await;
        server.swallow("leases", calls);
        drop(lease);
        let lease = leads(&server, &format!("ends-{calls}")).await;
        server.swallow("leases", calls.min(2));
        lease.give_back().await;
    }
}

#[tokio::test]
async fn a_leader_outlasts_some_calls_without_an_answer_and_ends_when_there_are_no_others() {
    let server = Server::new();
    // Long enough for the slowest machine.
    let patience = Patience { sure: Duration::from_secs(4), ..FAST };
    let mut lease = leads_with(&server, "a", patience).await;
    server.swallow("leases", 2);
    tokio::select! {
        () = server.has_swallowed("leases") => {}
        () = lease.lost() => panic!("it gives up too soon"),
    }
    let time = |all: &Objects<'_>| Some(spec(all.get("leases", "cadre-operator")?, "renewTime"));
    let before = server.until("the lease", time).await;
    let again = server.until("another renewal", |all| (time(all)? != before).then_some(()));
    tokio::select! {
        () = again => {}
        () = lease.lost() => panic!("it gives up too soon"),
    }
    server.swallow("leases", usize::MAX);
    let limit = Duration::from_mins(1);
    tokio::time::timeout(limit, lease.lost()).await.expect("who cannot renew must end");
}

#[tokio::test]
async fn a_holder_whose_lease_is_taken_or_deleted_ends() {
    let server = Server::new();
    let limit = Duration::from_mins(1);
    let mut first = leads(&server, "pod").await;
    // A process that has followed it in its own pod need not wait, and is newer.
    let mut second = leads(&server, "pod").await;
    assert!(second.term() > first.term(), "{} and {}", first.term(), second.term());
    tokio::time::timeout(limit, first.lost()).await.expect("another process leads");
    server.remove_object("leases", "cadre-operator");
    tokio::time::timeout(limit, second.lost()).await.expect("there is no lease");
}

/// Three pods whose processes die, or end in order, over and over.
#[tokio::test]
async fn no_two_lead_at_once_and_each_has_a_higher_term() {
    let server = Server::new();
    let pods = ["a", "b", "c"].map(|identity| {
        let server = server.clone();
        tokio::spawn(async move {
            let mut terms = Vec::new();
            for turn in 0..3 {
                let mut lease = leads(&server, identity).await;
                terms.push(lease.term());
                let renewals = server.until("a renewal of its own", |all| {
                    let found = all.get("leases", "cadre-operator")?;
                    (spec(found, "renewTime") > spec(found, "acquireTime")).then_some(())
                });
                tokio::select! {
                    () = renewals => {}
                    () = lease.lost() => continue,
                }
                if turn % 2 == 0 { lease.give_back().await } else { drop(lease) }
            }
            terms
        })
    });
    let mut terms = Vec::new();
    for pod in pods {
        terms.extend(pod.await.expect("no panic"));
    }
    terms.sort_unstable();
    let before = terms.len();
    terms.dedup();
    assert_eq!((terms.len(), before), (9, 9), "{terms:?}");

    let history = server.history("leases");
    for ((_, before), (_, after)) in history.iter().zip(&history[1..]) {
        let holders = [before, after].map(|it| spec(it, "holderIdentity"));
        if holders[0] == holders[1] || holders[1] == "null" || holders[0] == "null" {
            continue;
        }
        let at = |it: &Value, field| spec(it, field).parse::<Timestamp>().expect("a time");
        let rest = at(after, "acquireTime").duration_since(at(before, "renewTime"));
        let rest = Duration::try_from(rest).expect("later");
        assert!(rest + Duration::from_millis(5) >= FAST.lease, "{holders:?} after {rest:?}");
    }
}
