//! The lease that one operator holds, and the end of who does not hold it any more.
//!
//! In: a lease's name. Out: [`acquire`] returns when this process leads; [`Lease::lost`] when it does no longer, or
//! cannot be sure; [`Lease::give_back`] ends it in good order.
//!
//! ```text
//! wait ──free, or unchanged for `lease`──▶ held ──renewed every `renew`──▶ held
//!   ▲                                       │ another's, deleted, or not renewed for `sure`
//!   └──── the process ends, its pod's next one begins here ◀──── lost
//! ```
//!
//! Guarantees: each call to the API server has a deadline, and a client that waits for nothing else should be given. Each
//! write names the version that it read, so of two that write one is refused. Who waits counts the time since it saw the
//! lease change by its own clock, the holder the time since it asked for its last renewal: a holder gives up before
//! another one takes over, whatever the machines' clocks say. Each process that leads has a higher [`Lease::term`] than
//! all before it, also a second one of the same pod. Writes of leaders that overlap nevertheless are safe, as
//! `cadre-desired` says.

use std::time::Duration;

use cadre_desired::MANAGER;
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::error::is_code;

/// Which lease, and who asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) identity: String,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// How long a lease that does not change keeps others out.
    pub(crate) lease: Duration,
    /// How long after it asked for its last renewal a holder is sure that nobody else leads.
    pub(crate) sure: Duration,
    /// Between two renewals.
    pub(crate) renew: Duration,
    /// Between two looks of who waits.
    pub(crate) look: Duration,
    /// Longest wait for an answer of the API server.
    pub(crate) call: Duration,
}

impl Default for Patience {
    /// As Kubernetes' own controllers have it, but who waits looks twice as often.
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            sure: Duration::from_secs(10),
            renew: Duration::from_secs(2),
            look: Duration::from_secs(1),
            call: Duration::from_secs(5),
        }
    }
}

/// A lease that is held. It is renewed until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    asked: Asked,
    term: i32,
    renewing: JoinHandle<()>,
}

/// Waits until this process holds the lease.
pub(crate) async fn acquire(client: Client, place: &Place, patience: Patience) -> Lease {
    let api = Api::namespaced(client, &place.namespace);
    let asked = Asked { api, place: place.clone(), patience };
    let mut seen = None;
    let mut trouble = String::new();
    loop {
        match asked.take(&mut seen).await {
            Ok(Some(held)) => return Lease::renewed(asked, held),
            Ok(None) => trouble.clear(),
            Err(error) => asked.complain("cannot be asked for", &error, &mut trouble),
        }
        sleep(patience.look).await;
    }
}

impl Lease {
    fn renewed(asked: Asked, held: Held) -> Self {
        let (own, term) = (asked.clone(), held.term);
        Self { asked, term, renewing: tokio::spawn(async move { own.renew(held).await }) }
    }

    /// How often the lease has changed hands: orders the views of leaders that overlap.
    pub(crate) fn term(&self) -> u64 {
        u64::try_from(self.term).unwrap_or_default()
    }

    /// Returns when this process must not lead any more. Not to be called again then.
    pub(crate) async fn lost(&mut self) {
        // The end of the renewals is all that is waited for, whatever it is.
        let _ = (&mut self.renewing).await;
    }

    /// Lets somebody else lead at once; whoever writes has to stop before.
    pub(crate) async fn give_back(mut self) {
        self.renewing.abort();
        self.lost().await;
        let Patience { look, call, .. } = self.asked.patience;
        let giving = async {
            let mut trouble = String::new();
            // A renewal that is on its way yet can come between.
            while let Err(error) = self.asked.release(self.term).await {
                self.asked.complain("cannot be given back", &error, &mut trouble);
                sleep(look / 4).await;
            }
        };
        if timeout(call, giving).await.is_err() {
            tracing::warn!("the lease {} runs out by itself", self.asked.place.name);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

/// A lease as it was when this process last wrote it.
#[derive(Debug)]
struct Held {
    object: LeaseObject,
    term: i32,
    /// When that was asked for.
    sent: Instant,
}

/// The lease of somebody else, and since when it is known to be as it is.
struct Seen {
    spec: LeaseSpec,
    since: Instant,
}

/// The lease's place at the API server.
#[derive(Clone, Debug)]
struct Asked {
    api: Api<LeaseObject>,
    place: Place,
    patience: Patience,
}

impl Asked {
    /// Takes the lease if nobody holds it, or its holder has not renewed it in time.
    async fn take(&self, seen: &mut Option<Seen>) -> Result<Option<Held>, Trouble> {
        let found = self.answer(self.api.get_opt(&self.place.name)).await?;
        let spec = found.as_ref().and_then(|it| it.spec.clone()).unwrap_or_default();
        let now = Instant::now();
        let known = seen.take().filter(|it| it.spec == spec);
        let since = seen.insert(known.unwrap_or(Seen { spec: spec.clone(), since: now })).since;
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        // Who has our name was an earlier process of our pod.
        let is_free = holder.is_empty() || holder == self.place.identity;
        if !is_free && now.duration_since(since) < self.patience.lease {
            return Ok(None);
        }
        let term = spec.lease_transitions.unwrap_or_default().saturating_add(1);
        let sent = Instant::now();
        let (time, seconds) = (MicroTime(Timestamp::now()), self.patience.lease.as_secs());
        let taken = json!({
            "holderIdentity": self.place.identity, "acquireTime": time, "renewTime": time,
            "leaseDurationSeconds": seconds.max(1), "leaseTransitions": term,
        });
        let written = match &found {
            Some(found) => self.write(found, taken).await,
            None => self.create(&taken).await,
        };
        match written {
            Ok(object) => Ok(Some(Held { object, term, sent })),
            Err(trouble) if trouble.is(409) => Ok(None),
            Err(trouble) => Err(trouble),
        }
    }

    /// Renews the lease until it is lost, or may be.
    async fn renew(&self, mut held: Held) {
        let mut trouble = String::new();
        loop {
            sleep(self.patience.renew).await;
            let sent = Instant::now();
            let left = (held.sent + self.patience.sure).duration_since(sent);
            if left.is_zero() {
                let sure = self.patience.sure;
                tracing::warn!("the lease {} was not renewed for {sure:?}", self.place.name);
                return;
            }
            match timeout(left, self.renewal(&held)).await {
                Ok(Ok(Some(object))) => {
                    held = Held { object, term: held.term, sent };
                    trouble.clear();
                }
                Ok(Ok(None)) => return,
                Ok(Err(error)) => self.complain("is not renewed", &error, &mut trouble),
                // The next turn finds that no time is left.
                Err(_) => {}
            }
        }
    }

    /// One renewal. Out: none if the lease is not ours any more.
    async fn renewal(&self, held: &Held) -> Result<Option<LeaseObject>, Trouble> {
        let renewed = || json!({"renewTime": MicroTime(Timestamp::now())});
        match self.write(&held.object, renewed()).await {
            Err(trouble) if trouble.is(404) => return Ok(None),
            // Somebody else has taken it; or changed something else; or our last renewal has come late.
            Err(trouble) if trouble.is(409) => {}
            done => return done.map(Some),
        }
        let found = self.answer(self.api.get_opt(&self.place.name)).await?;
        match found.filter(|it| self.is_ours(it, held.term)) {
            Some(found) => self.write(&found, renewed()).await.map(Some),
            None => Ok(None),
        }
    }

    async fn release(&self, term: i32) -> Result<(), Trouble> {
        let found = self.answer(self.api.get_opt(&self.place.name)).await?;
        let Some(found) = found.filter(|it| self.is_ours(it, term)) else { return Ok(()) };
        let nobody = json!({
            "holderIdentity": null, "acquireTime": null, "renewTime": null, "leaseDurationSeconds": null,
        });
        self.write(&found, nobody).await.map(drop)
    }

    fn is_ours(&self, lease: &LeaseObject, term: i32) -> bool {
        lease.spec.as_ref().is_some_and(|it| {
            it.holder_identity.as_ref() == Some(&self.place.identity)
                && it.lease_transitions == Some(term)
        })
    }

    async fn create(&self, spec: &Value) -> Result<LeaseObject, Trouble> {
        let spec = serde_json::from_value(spec.clone()).expect("a lease's fields");
        let metadata = ObjectMeta { name: Some(self.place.name.clone()), ..ObjectMeta::default() };
        let object = LeaseObject { metadata, spec: Some(spec) };
        let manager = Some(MANAGER.to_owned());
        let parameters = PostParams { field_manager: manager, ..PostParams::default() };
        self.answer(self.api.create(&parameters, &object)).await
    }

    /// Changes a lease, if it is as it was read.
    async fn write(&self, read: &LeaseObject, spec: Value) -> Result<LeaseObject, Trouble> {
        let version = read.resource_version();
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": spec});
        let manager = Some(MANAGER.to_owned());
        let parameters = PatchParams { field_manager: manager, ..PatchParams::default() };
        self.answer(self.api.patch(&self.place.name, &parameters, &Patch::Merge(patch))).await
    }

    async fn answer<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, Trouble> {
        let within = self.patience.call;
        let answer = timeout(within, call).await.map_err(|_| Trouble::Silent { within })?;
        answer.map_err(|source| Trouble::Refused { source })
    }

    /// Says what is wrong, once.
    fn complain(&self, what: &str, trouble: &Trouble, last: &mut String) {
        let text = trouble.to_string();
        if *last != text {
            tracing::warn!("the lease {} {what}: {text}; it is tried again", self.place.name);
            *last = text;
        }
    }
}

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("the API server did not answer within {within:?}")]
    Silent { within: Duration },
    #[error("{source}")]
    Refused { source: kube::Error },
}

impl Trouble {
    /// Whether the API server answered with this code.
    fn is(&self, code: u16) -> bool {
        match self {
            Self::Silent { .. } => false,
            Self::Refused { source } => is_code(source, code),
        }
    }
}
