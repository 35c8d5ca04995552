//! The control service: what `cadre run`'s supervisor says to workers, said to pods, over TLS.
//!
//! In: pods with projected tokens, and facts about pools from the reconciles. Out: welcomes, rosters, views
//! and drains to workers; [`Told`] to the reconciles.
//!
//! ```text
//! pod ──token──▶ gate ──▶ identity ──▶ service ──▶ cadre-views decides
//!                 │ TokenReview          │  ▲ facts          │
//!                 ▼                      ▼  │                ▼
//!             API server               told, triggers    words to workers
//! ```
//!
//! Only the leader listens. Nothing is stored: a new leader learns everything from the workers' hellos, and
//! numbers its views with a higher term.

mod door;
mod figures;
mod gate;
pub(crate) mod issuer;
mod notices;
mod saved;
mod service;
mod told;
mod welcome;
mod words;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cadre_control::server;
use cadre_control::tls::{self, Certificate, Files};
use cadre_views::Facts;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

use crate::context::Context;
use crate::triggers::Key;
use gate::Reviewer;
use service::Service;
pub(crate) use told::{Gaps, JobFigures, Servers, Told};

/// Events of workers that wait for the service; while it is full, workers are not read from.
const QUEUE: usize = 4096;

/// Where the service listens, and with which files.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) address: SocketAddr,
    /// Folder with `tls.crt`, `tls.key` and `ca.crt`.
    pub(crate) certificates: PathBuf,
}

/// What the reconciles have found out about pools, for the service.
#[derive(Debug, Default)]
pub(crate) struct Known {
    facts: Mutex<BTreeMap<Key, Option<Facts>>>,
    news: Notify,
}

impl Known {
    /// Takes the facts of a pool; none when it is gone.
    pub(crate) fn put(&self, key: Key, facts: Option<Facts>) {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).insert(key, facts);
        self.news.notify_one();
    }

    pub(crate) fn take(&self) -> BTreeMap<Key, Option<Facts>> {
        std::mem::take(&mut *self.facts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Listens. Out: a listener for [`run`], so that its address is known before.
pub(crate) async fn listen(place: &Place) -> anyhow::Result<(TcpListener, Certificate)> {
    let folder = &place.certificates;
    let files = Files { certificate: folder.join("tls.crt"), key: folder.join("tls.key") };
    let certificate = Certificate::read(files)?.settling(issuer::SETTLES);
    let listener = TcpListener::bind(place.address)
        .await
        .with_context(|| format!("{}: cannot listen; choose another --control", place.address))?;
    Ok((listener, certificate))
}

/// Serves until the process ends. `term` is the number of lease transitions of this leader.
pub(crate) async fn run(
    context: Arc<Context>,
    (listener, certificate): (TcpListener, Certificate),
    term: u64,
) -> anyhow::Result<()> {
    let gate = Reviewer::new(context.client.clone(), context.settings.audience.clone());
    let (sender, events) = mpsc::channel(QUEUE);
    context.told.start();
    let issuers = issuer::watch(context.clone());
    let service = Service::new(context, term);
    let incoming = tls::accept(listener, certificate);
    // Any data version is let in here: workers of a job are compared with each other.
    let serving =
        server::serve(incoming, None, Some(Arc::new(gate)), sender, std::future::pending());
    tokio::select! {
        ended = serving => ended.context("control service"),
        () = issuers => anyhow::bail!("nobody looks at the control service's issuer any more"),
        () = service.run(events) => anyhow::bail!("the control service has no listener any more"),
    }
}
