//! A cluster that somebody names by a kubeconfig serves as well as one of our own: the operator gets its rights there, too.

use anyhow::{Context as _, Result};
use cadre_e2e::Cluster;

use crate::another_operator_takes_over_and_changes_no_pod;

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    let folder = cluster.folder().join("borrowed");
    std::fs::create_dir_all(&folder).context("a folder")?;
    let mut same = Cluster::of_user(&folder, cluster.config()).await?;
    another_operator_takes_over_and_changes_no_pod::keep(&mut same).await
}
