//! The lease that one operator holds, and the end of who does not hold it any more.
//!
//! In: a lease's name. Out: [`acquire`] returns when this process leads; [`Lease::lost`] when it does no
//! longer, or cannot be sure; [`Lease::give_back`] ends it in good order. The holder must see its own renewal within the lease's time, else
//! another may lead already and this process ends. Writes that overlap nevertheless are safe, as
//! `cadre-desired` says.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::coordination::v1::Lease as LeaseObject;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// How long a lease is good without being renewed.
const LEASE_SECONDS: u64 = 15;
/// How long before its end it is renewed.
const RENEW_SECONDS: u64 = 5;
/// How often the holder looks whether it was.
const LOOK: Duration = Duration::from_secs(2);

/// Which lease, and who asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) identity: String,
}

/// A lease that is held.
pub(crate) struct Lease {
    api: Api<LeaseObject>,
    place: Place,
    held: watch::Receiver<bool>,
    renewing: JoinHandle<Result<LeaseManager, LeaseManagerError>>,
}

/// Waits until this process holds the lease.
pub(crate) async fn acquire(client: Client, place: &Place) -> anyhow::Result<Lease> {
    let api = Api::namespaced(client.clone(), &place.namespace);
    let manager = LeaseManagerBuilder::new(client, &place.name)
        .with_namespace(&place.namespace)
        .with_identity(&place.identity)
        .with_duration(LEASE_SECONDS)
        .with_grace(RENEW_SECONDS)
        .build()
        .await
        .with_context(|| format!("lease {}/{}", place.namespace, place.name))?;
    let (mut held, renewing) = manager.watch().await;
    held.wait_for(|it| *it).await.context("the lease is not asked for any more")?;
    Ok(Lease { api, place: place.clone(), held, renewing })
}

impl Lease {
    /// How often the lease has changed its holder. Orders the views of leaders that overlap.
    ///
    /// # Errors
    ///
    /// The lease cannot be read.
    pub(crate) async fn transitions(&self) -> anyhow::Result<u64> {
        let lease = self.api.get(&self.place.name).await.context("the lease cannot be read")?;
        let transitions = lease.spec.and_then(|it| it.lease_transitions).unwrap_or_default();
        Ok(u64::try_from(transitions).unwrap_or_default())
    }

    /// Returns when this process must not lead any more.
    pub(crate) async fn lost(&mut self) {
        let Self { api, place, held, renewing: _ } = self;
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut renewed = tokio::time::Instant::now();
        loop {
            tokio::select! {
                _ = held.wait_for(|it| !*it) => return,
                _ = looks.tick() => {}
            }
            let found = timeout(LOOK, api.get(&place.name)).await;
            if let Ok(Ok(lease)) = found
                && is_good(&lease, &place.identity, Timestamp::now())
            {
                renewed = tokio::time::Instant::now();
            }
            if renewed.elapsed() > Duration::from_secs(LEASE_SECONDS - RENEW_SECONDS) {
                return;
            }
        }
    }

    /// Gives the lease back, so that another operator can lead at once. The caller has stopped
    /// writing.
    pub(crate) async fn give_back(self) {
        let Self { api: _, place, held, renewing } = self;
        // The renewing task gives the lease back when this receiver is gone.
        drop(held);
        if !matches!(timeout(LOOK, renewing).await, Ok(Ok(Ok(_)))) {
            tracing::warn!(
                "the lease {} could not be given back; it expires by itself",
                place.name
            );
        }
    }
}

/// Whether a lease names this holder and has time left.
fn is_good(lease: &LeaseObject, identity: &str, now: Timestamp) -> bool {
    let Some(spec) = &lease.spec else { return false };
    let holder = spec.holder_identity.as_deref() == Some(identity);
    let seconds = i64::from(spec.lease_duration_seconds.unwrap_or_default());
    let renewed = spec.renew_time.as_ref().map(|it| it.0.as_second());
    holder && renewed.is_some_and(|it| it + seconds > now.as_second())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    #[test]
    fn a_lease_is_good_for_its_holder_until_its_time_is_over() {
        let at = |second| Timestamp::from_second(second).expect("a good second");
        let spec = LeaseSpec {
            holder_identity: Some("a".into()),
            lease_duration_seconds: Some(15),
            renew_time: Some(MicroTime(at(100))),
            ..LeaseSpec::default()
        };
        let lease = LeaseObject { spec: Some(spec), ..LeaseObject::default() };
        assert!(is_good(&lease, "a", at(114)));
        assert!(!is_good(&lease, "a", at(115)), "too old");
        assert!(!is_good(&lease, "b", at(101)), "somebody else's");
        assert!(!is_good(&LeaseObject::default(), "a", at(101)));
    }
}
