//! The control service: what `cadre run`'s supervisor says to workers, said to pods, over TLS.
//!
//! In: pods with projected tokens, and facts about pools from the reconciles. Out: welcomes, rosters, views
//! and drains to workers; [`Told`](crate::told::Told) to the reconciles.
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
mod parting;
mod saved;
mod service;
mod vanished;
mod waiting;
mod welcome;
mod words;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use cadre_control::server;
use cadre_control::tls::{self, Certificate, Files};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::context::Context;
use gate::Reviewer;
use service::Service;

/// Events of workers that wait for the service; while it is full, workers are not read from.
const QUEUE: usize = 4096;

/// Where the service listens, and with which files.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) address: SocketAddr,
    /// Folder with `tls.crt`, `tls.key` and `ca.crt`.
    pub(crate) certificates: PathBuf,
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
    let gate = Reviewer::new(context.clone());
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
