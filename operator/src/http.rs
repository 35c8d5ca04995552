//! Metrics and health over HTTP.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | what Prometheus reads |
//! | `/healthz` | 200 while the process serves |
//! | `/readyz` | 200 once all caches are filled, on a standby too; 503 before |

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::OnceCell;

use crate::context::Context;
use crate::metrics::Seen;

/// The type of the text that Prometheus reads.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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
    let caches = &context.caches;
    let leads = context.metrics.leader.get() == 1;
    let seen = || Seen {
        servers: context.told.live(),
        pools: caches.pools.state(),
        jobs: caches.trainings.state(),
    };
    // One alone tells of the objects, so that sums are right.
    let seen = leads.then(seen).unwrap_or_default();
    ([(header::CONTENT_TYPE, METRICS)], context.metrics.text(&seen))
}
