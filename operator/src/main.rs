//! `cadre-operator`: keeps the pools and jobs of a cluster as their objects say.
//!
//! In: the chart's settings, and access to the API server. Out: pods, Jobs, Services and statuses.
//!
//! ```text
//! caches ──────────────▶ ready (a standby is warm)
//! lease ──held──▶ controllers ──lost or not renewed──▶ the process ends
//!            │         └─asked to end─▶ the lease is given back
//!            └─▶ the mark of the pod that leads, by which workers find it
//! ```
//!
//! Pods do not notice when it is away. It decides nothing itself: that is `cadre-desired`.

mod api;
mod apply;
mod caches;
mod context;
mod control;
mod controllers;
mod error;
mod http;
mod issuer;
mod job;
mod known;
mod lacks;
mod leader;
mod looked;
mod mark;
mod metrics;
mod observe;
mod pace;
mod pool;
mod prune;
mod recent;
mod release;
mod report;
#[cfg(test)]
mod tests;
mod told;
mod tries;
mod triggers;
mod troubles;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use cadre_desired::Settings;
use clap::Parser;
use kube::Config;
use tracing_subscriber::EnvFilter;

use crate::caches::Scope;
use crate::context::Context;
use crate::issuer::Issuer;
use crate::leader::Patience;

/// Keeps the pools and jobs of a cluster as their objects say.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// File with the chart's settings, YAML; left out, all have their defaults.
    #[arg(long)]
    settings: Option<PathBuf>,
    /// Namespace to look after; left out, all. Nodes are looked at only when it is left out.
    #[arg(long)]
    namespace: Option<String>,
    /// Class of the pools and jobs to look after, as their spec.class says; left out, those without one.
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    class: Option<String>,
    /// Where metrics and health are served.
    #[arg(long, default_value = "0.0.0.0:8080")]
    address: SocketAddr,
    /// Where the control service listens for workers, over TLS.
    #[arg(long, default_value = "0.0.0.0:9443")]
    control: SocketAddr,
    /// Folder with the control service's tls.crt and tls.key and its issuer's ca.crt; left out, there is no
    /// control service.
    #[arg(long)]
    certificates: Option<PathBuf>,
    /// Namespace of the lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "cadre-system")]
    lease_namespace: String,
    /// Name of the lease.
    #[arg(long, default_value = "cadre-operator")]
    lease: String,
    /// Who holds the lease: the pod's name.
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Do not mark the pod that leads: the Service leads workers to all pods.
    #[arg(long)]
    unmarked: bool,
    /// Objects of one kind that are worked on at the same time.
    #[arg(long, default_value_t = 8)]
    concurrency: u16,
    /// Take our finalizers off all pools of the class and end, once no operator leads: after an uninstall.
    #[arg(long)]
    release_finalizers: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).init();
    let settings = match &arguments.settings {
        None => Settings::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("settings {}: cannot be read", path.display()))?;
            serde_saphyr::from_str::<Settings>(&text)
                .with_context(|| format!("settings {}: correct that field", path.display()))?
        }
    };
    let config = Config::infer()
        .await
        .context("no access to an API server; run in a cluster or set KUBECONFIG")?;
    let client = api::client(config.clone()).context("access to the API server")?;
    // The lease has connections of its own, which wait for nothing else.
    let leases = api::client(config).context("access to the API server")?;
    let scope = Scope { namespace: arguments.namespace.clone(), class: arguments.class.clone() };
    let place = leader::Place {
        namespace: arguments.lease_namespace.clone(),
        name: arguments.lease.clone(),
        identity: arguments
            .identity
            .clone()
            .unwrap_or_else(|| format!("pid-{}", std::process::id())),
    };
    if arguments.release_finalizers {
        return release::all(&client, leases, &scope, &place).await;
    }
    let issuer = Issuer::new(arguments.certificates.clone());
    let context = Arc::new(Context::new(client, settings, &scope, issuer));
    let serving = tokio::spawn(http::serve(arguments.address, context.clone()));
    let work = async {
        let leading = async {
            context.caches.ready().await?;
            if !arguments.unmarked {
                mark::take_off(&context.client, &place).await;
            }
            tracing::info!("caches are filled; waiting for the lease {}", place.name);
            anyhow::Ok(leader::acquire(leases, &place, Patience::default()).await)
        };
        // One listener from the start: a signal between two of them would be lost.
        let mut ended = std::pin::pin!(terminated());
        let mut lease = tokio::select! {
            lease = leading => lease?,
            result = &mut ended => return result,
        };
        context.metrics.leader.set(1);
        tracing::info!("this process leads");
        let control = serve_workers(&context, &arguments, lease.term());
        tokio::select! {
            ended = control => ended,
            () = mark::keep_on(&context, &place), if !arguments.unmarked => Ok(()),
            () = controllers::run(&context, arguments.concurrency) => Ok(()),
            () = lease.lost() => {
                anyhow::bail!("the lease {} is lost; another operator may lead", place.name)
            }
            result = &mut ended => {
                // Nothing is written any more, so the next one need not wait.
                lease.give_back().await;
                result
            }
        }
    };
    tokio::select! {
        result = work => result,
        result = serving => result.context("metrics and health")?,
    }
}

/// The control service, if there are certificates for it.
async fn serve_workers(
    context: &Arc<Context>,
    arguments: &Arguments,
    term: u64,
) -> anyhow::Result<()> {
    let Some(certificates) = arguments.certificates.clone() else {
        tracing::warn!("no --certificates: workers cannot join");
        return std::future::pending().await;
    };
    let place = control::Place { address: arguments.control, certificates };
    let listener = control::listen(&place).await?;
    tracing::info!("workers join at {}, term {term}", arguments.control);
    control::run(context.clone(), listener, term).await
}

/// Waits until the process is asked to end.
async fn terminated() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("signals cannot be handled")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    tracing::info!("asked to end; pods keep running without an operator");
    Ok(())
}
