//! A cluster that somebody names by a kubeconfig serves as well as one of our own: the operator gets its rights there, too.

use anyhow::{Context as _, Result};
use cadre_e2e::Cluster;

use crate::operators;

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    let folder = cluster.folder().join("borrowed");
    std::fs::create_dir_all(&folder).context("a folder")?;
    let mut same = Cluster::of_user(&folder, cluster.config()).await?;
    operators::keep(&mut same).await
}
