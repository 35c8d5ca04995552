//! Options of the commands that ask a cluster.

use std::path::PathBuf;

use cadre_cluster::Target;
use clap::Args;

/// Which cluster, and where in it.
#[derive(Args, Clone, Debug)]
pub(crate) struct ClusterOptions {
    /// Namespace; default: the kubeconfig's.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Context of the kubeconfig; default: the current one.
    #[arg(long, value_name = "CONTEXT")]
    pub(crate) context: Option<String>,
}

/// Options of `cadre status`.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatusOptions {
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
    /// All namespaces.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
}

/// Options of `cadre explain`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainOptions {
    /// `attnpool/NAME` or `cadjob/NAME`.
    pub(crate) object: Target,
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
}

/// Options of `cadre logs`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogsOptions {
    /// `attnpool/NAME` for its servers, `cadjob/NAME` for the trainers of its newest attempt.
    pub(crate) object: Target,
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
    /// Only this pod.
    #[arg(long, value_name = "POD")]
    pub(crate) pod: Option<String>,
    /// Go on with what comes.
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Last lines of each pod.
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) tail: Option<i64>,
    /// The run before the present one; of a job, the attempt before the newest, whose pods stay until another one ends.
    #[arg(short, long, conflicts_with = "follow")]
    pub(crate) previous: bool,
}

/// Options of `cadre bundle`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BundleOptions {
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
    /// All namespaces.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    /// The archive.
    #[arg(short, long, value_name = "FILE", default_value = "cadre-bundle.tar.gz")]
    pub(crate) out: PathBuf,
}

/// Options of `cadre top`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TopOptions {
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
    /// All namespaces.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    /// Again every so many seconds, until it is interrupted.
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    pub(crate) watch: Option<std::num::NonZeroU32>,
}
