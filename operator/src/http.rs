//! Metrics and health over HTTP.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | what Prometheus reads |
//! | `/healthz` | 200 while the process serves |
//! | `/readyz` | 200 once all caches are filled, on a standby too; 503 before |

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use cadre_control::expiry::good_until;
use cadre_desired::pool::Report;
use kube::runtime::reflector::ObjectRef;
use tokio::net::TcpListener;
use tokio::sync::OnceCell;

use crate::context::Context;
use crate::metrics::Seen;
use crate::triggers::Key;

/// The type of the text that Prometheus reads.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Files of the control service's certificate and of its issuer's.
const CERTIFICATES: [&str; 2] = ["tls.crt", "ca.crt"];

pub(crate) async fn serve(address: SocketAddr, context: Arc<Context>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("{address}: cannot listen; choose another --address"))?;
    let ready = Arc::new(OnceCell::new());
    let (filled, caches) = (ready.clone(), context.clone());
    tokio::spawn(async move {
        if caches.caches.ready().await.is_ok() {
            // Set once, by this task alone.
            let _ = filled.set(());
        }
    });
    let is_ready = move || {
        let code =
            if ready.initialized() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        std::future::ready(code)
    };
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { StatusCode::OK }))
        .route("/readyz", get(is_ready))
        .with_state(context);
    axum::serve(listener, routes).await.context("metrics and health")
}

async fn metrics(State(context): State<Arc<Context>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, METRICS)], told(&context))
}

/// The text of all metrics.
pub(crate) fn told(context: &Context) -> String {
    let caches = &context.caches;
    let leads = context.metrics.leader.get() == 1;
    // What was told of a pool stays until somebody looks at it, and at one that is gone nobody does.
    let is_there = |(of, _, _): &(Key, String, Report)| {
        caches.pools.get(&ObjectRef::new(&of.1).within(&of.0)).is_some()
    };
    let seen = || Seen {
        servers: context.told.live().into_iter().filter(is_there).collect(),
        gaps: context.told.gaps(),
        pools: caches.pools.state(),
        jobs: caches.trainings.state(),
        certificates: Vec::new(),
    };
    // Only the leader reports objects, so that sums over operators are right.
    let mut seen = leads.then(seen).unwrap_or_default();
    let folder = context.issuer.folder.as_deref();
    let end = |folder: &Path, file| Some((file, good_until(&folder.join(file))?));
    let ends = folder.map(|it| CERTIFICATES.into_iter().filter_map(|file| end(it, file)).collect());
    seen.certificates = ends.unwrap_or_default();
    context.metrics.text(&seen)
}
