//! A cluster that somebody names by a kubeconfig serves as well as one of our own: the operator gets its rights there, too,
//! leads, and makes what a pool asks for.

use anyhow::{Context as _, Result, ensure};
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{SERVERS, pods, pool};

const HERE: &str = "borrowed";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let folder = cluster.folder().join(HERE);
    std::fs::create_dir_all(&folder).context("a folder")?;
    let same = Cluster::of_user(&folder, cluster.config()).await?;
    ensure!(!same.is_ours(), "it has a control plane of its own");
    same.namespace(HERE).await?;
    let operator = Operator::leading(&same, 8083).await?;
    same.apply(HERE, &pool(2))?;
    let two = || async { Ok((pods(&same, HERE, SERVERS).await?.len() == 2).then_some(())) };
    until("two servers", two).await?;
    same.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    ensure!(!operator.log().contains("Forbidden"), "the role suffices:\n{}", operator.log());
    operator.stop()
}
