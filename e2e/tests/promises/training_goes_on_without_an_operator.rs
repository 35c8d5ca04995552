//! The operator is killed and stays away while a job trains, then comes back and is upgraded: the job goes on, no pod
//! changes, and the bits are those of a run that nobody disturbed.

use anyhow::{Result, ensure};
use cadre_e2e::{Cluster, SYSTEM_NAMESPACE, until};

use crate::objects::pods;
use crate::release::image;
use crate::training::{MIDDLE, STEPS, Training};

/// Pods of the pool and of the job.
const ALL: &str = "cadre.dev/pool=p";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "unattended").await?;
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let before = pods(training.cluster, training.here, ALL).await?;

    let operators = ["--namespace", SYSTEM_NAMESPACE];
    let scale = |to: &str| {
        let verb = ["scale", "deployment/cadre-operator", to];
        training.cluster.kubectl(&[&verb[..], &operators[..]].concat())
    };
    scale("--replicas=0")?;
    let now = ["delete", "pods", "--all", "--force", "--grace-period=0"];
    training.cluster.kubectl(&[&now[..], &operators[..]].concat())?;
    until("no operator", async || {
        Ok(pods(training.cluster, SYSTEM_NAMESPACE, "").await?.is_empty().then_some(()))
    })
    .await?;
    // Half of the job is made without an operator.
    training.at(*STEPS / 2).await?;
    ensure!(pods(training.cluster, SYSTEM_NAMESPACE, "").await?.is_empty(), "nobody was there");
    scale("--replicas=2")?;
    let upgrade = [&image()[..], &["--set=operator.log=debug"]].concat();
    training.release.upgrade(training.cluster, &upgrade)?;

    training.complete().await?;
    ensure!(pods(training.cluster, training.here, ALL).await? == before, "no pod changes");
    let attempt = training.look().await?.status.map(|it| it.attempt);
    ensure!(attempt == Some(1), "attempt {attempt:?}");
    training.are_those_of(2, &training.losses()?)?;
    training.remove()
}
