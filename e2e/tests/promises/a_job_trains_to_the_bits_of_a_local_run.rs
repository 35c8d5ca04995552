//! A job trains as pods on two nodes, through the operator that helm has installed: with the bits of a local run, while
//! one of the servers is killed in the middle and replaced.

use anyhow::{Context as _, Result, ensure};
use cadre_e2e::{Cluster, until};

use crate::objects::{SERVERS, cadre, pods};
use crate::release::ready;
use crate::training::{MIDDLE, STEPS, Training};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "trains").await?;
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;
    let servers = pods(training.cluster, training.here, SERVERS).await?;
    let busy = until("both servers in `cadre top`", async || {
        let (fine, text) = cadre(training.cluster, training.here, &["top"])?;
        let all = servers
            .iter()
            .all(|it| text.lines().any(|line| line.contains(&it.0) && line.contains('%')));
        Ok((fine && all).then_some(()))
    });
    let busy = busy.await;
    training.explained(busy)?;
    let victim = &servers.last().context("two servers")?.0;
    training.kill(victim).await?;
    training.complete().await?;
    let failed_over = |job: &cadre_crds::TrainingJob| {
        job.status.as_ref().is_some_and(|it| it.failovers >= 1 && it.attempt == 1)
    };
    training.status("the failover in the status", failed_over).await?;
    ensure!(training.trainers().await? == trainers, "no trainer was touched");
    let replaced = ready(training.cluster, training.here, 2).await?;
    ensure!(replaced.iter().all(|it| &it.0 != victim), "{victim} is replaced: {replaced:?}");
    training.are_those_of(2, &training.losses()?)?;
    let (fine, said) = cadre(training.cluster, training.here, &["logs", "cadjob/j"])?;
    let last = format!("step {0} of {0}", *STEPS);
    ensure!(fine && said.contains(&last), "cadre logs cadjob/j: {said}");
    training.remove()
}
