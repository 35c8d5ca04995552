//! `cadre status`, `explain`, `top`, `logs` and `bundle`: what a cluster says about pools and jobs.
//!
//! In: options, a kubeconfig. Out: text. Changes nothing in the cluster. The answers are `cadre-cluster`'s; here is only
//! where they go. Installed as `kubectl-cadre` it is `kubectl cadre`.

mod options;

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;

use cadre_cluster::explain::explain;
use cadre_cluster::logs::Wanted;
use cadre_cluster::read::{Cluster, Scope};
use cadre_cluster::{Target, bundle, logs, status, top};

pub(crate) use self::options::{
    BundleOptions, ClusterOptions, ExplainOptions, LogsOptions, StatusOptions, TopOptions,
};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The cluster does not say.
    #[error(transparent)]
    Read(#[from] cadre_cluster::Error),
    /// There is no such object.
    #[error("{0}")]
    Missing(String),
    /// The archive cannot be written.
    #[error("{}: {source}; choose another file with --out", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// No threads for requests.
    #[error("cannot start: {0}")]
    Runtime(std::io::Error),
}

pub(crate) fn status(options: &StatusOptions) -> Result<String, Error> {
    run(async {
        let cluster = connect(&options.cluster, options.all_namespaces).await?;
        Ok(status::text(&cluster.read().await?))
    })
}

pub(crate) fn explain_object(options: &ExplainOptions) -> Result<String, Error> {
    run(async {
        let cluster = connect(&options.cluster, false).await?;
        let seen = cluster.read().await?;
        let found = explain(&seen, &cluster.namespace, &options.object).map_err(Error::Missing)?;
        let unread = seen.unread.iter().map(|it| format!("not read: {it}\n"));
        Ok(found.text() + &unread.collect::<String>())
    })
}

pub(crate) fn top(options: &TopOptions) -> Result<String, Error> {
    run(async {
        let cluster = connect(&options.cluster, options.all_namespaces).await?;
        let home = (!options.all_namespaces).then_some(cluster.namespace.as_str());
        loop {
            let text = top::table(&top::read(&cluster).await?, home);
            let Some(seconds) = options.watch else { return Ok(text) };
            // Clears the screen; a reader that has gone away wants no more.
            if write!(std::io::stdout(), "\x1b[2J\x1b[H{text}").is_err() {
                return Ok(String::new());
            }
            tokio::time::sleep(std::time::Duration::from_secs(seconds.get().into())).await;
        }
    })
}

pub(crate) fn logs(options: &LogsOptions) -> Result<String, Error> {
    run(async {
        let cluster = connect(&options.cluster, false).await?;
        let seen = cluster.read().await?;
        let home = &cluster.namespace;
        let wanted =
            Wanted { follow: options.follow, tail: options.tail, previous: options.previous };
        let mut pods = logs::pods(&seen, home, &options.object, wanted);
        if let Some(name) = &options.pod {
            pods.retain(|it| it.metadata.name.as_ref() == Some(name));
        }
        if pods.is_empty() {
            return Err(Error::Missing(no_pods(&seen, home, &options.object)));
        }
        logs::print(&cluster, &pods, wanted, &mut std::io::stdout().lock()).await?;
        Ok(String::new())
    })
}

fn no_pods(seen: &cadre_cluster::Seen, home: &str, target: &Target) -> String {
    let why = explain(seen, home, target);
    why.err().unwrap_or_else(|| {
        format!(
            "{target} has no pod with a log in namespace {home}; `cadre explain {target}` says why"
        )
    })
}

pub(crate) fn bundle(options: &BundleOptions) -> Result<String, Error> {
    run(async {
        let cluster = connect(&options.cluster, options.all_namespaces).await?;
        let seen = cluster.read().await?;
        let logs = bundle::logs(&cluster, &seen).await;
        let path = options.out.clone();
        let wrong = |source| Error::Write { path: path.clone(), source };
        // Never over an older report.
        let mut file = File::create_new(&path).map_err(wrong)?;
        bundle::write(&seen, logs, &mut file).map_err(wrong)?;
        file.flush().map_err(wrong)?;
        Ok(format!("written: {}\n", path.display()))
    })
}

async fn connect(options: &ClusterOptions, all: bool) -> Result<Cluster, Error> {
    let scope =
        Scope { context: options.context.clone(), namespace: options.namespace.clone(), all };
    Ok(Cluster::connect(&scope).await?)
}

fn run<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.map_err(Error::Runtime)?.block_on(work)
}
