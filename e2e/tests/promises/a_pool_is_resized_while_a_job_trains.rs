//! A pool goes from two servers to four and to one while a job trains: no trainer restarts, the losses stay beside those
//! of a pool of two, and the header log makes the same bits again anywhere.

use anyhow::{Result, ensure};
use cadre_e2e::Cluster;

use crate::release::ready;
use crate::training::{MIDDLE, Training, loss};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "resized").await?;
    training.endless();
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;
    let scale = |to: &str| {
        let target = ["scale", "attnpool/p", to, "--namespace", training.here];
        training.cluster.kubectl(&target)
    };
    scale("--replicas=4")?;
    let four = ready(training.cluster, training.here, 4).await;
    training.explained(four)?;
    training.at(training.steps() + MIDDLE).await?;
    scale("--replicas=1")?;
    let one = ready(training.cluster, training.here, 1).await;
    training.explained(one)?;
    let left = training.steps();
    training.at(left + MIDDLE).await?;
    println!("one server is left after step {left}");
    ensure!(training.trainers().await? == trainers, "no trainer was touched");

    let losses = training.losses()?;
    let servers = training.servers()?;
    ensure!(servers.contains(&2) && servers.contains(&4), "plans were for {servers:?} servers");
    // The job goes before the same is made by itself, which wants its processors.
    training.remove()?;
    let fixed = training.alone(2, losses.len())?;
    for (step, (one, other)) in losses.iter().zip(&fixed).enumerate() {
        let apart = (loss(one)? - loss(other)?).abs();
        ensure!(apart <= 1e-4, "step {step}: {one} and {other} are {apart} apart");
    }
    ensure!(training.replayed(4, losses.len())? == losses, "a replay has other bits");
    Ok(())
}
