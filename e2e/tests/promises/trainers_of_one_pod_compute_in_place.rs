//! Two trainers in each pod, without a launcher of the user's, compute on a pool that has no servers of its own, and on one that
//! has a server, too: with the bits of a local run.

use anyhow::{Result, ensure};
use cadre_e2e::Cluster;

use crate::release::ready;
use crate::training::Training;

/// Trainers in a pod.
const EACH: u32 = 2;
/// Steps of each job.
const STEPS: u64 = 20;

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut in_place = Training::prepare(cluster, "in-place").await?;
    trains(&mut in_place, 1, 0).await?;
    let mut mixed = in_place.beside("mixed").await?;
    in_place.remove()?;
    trains(&mut mixed, 2, 1).await?;
    mixed.remove()
}

/// A job of so many pods trains on its trainers and so many servers.
async fn trains(training: &mut Training<'_>, pods: u32, servers: u32) -> Result<()> {
    training.ends_after(STEPS);
    training.pool["spec"]["inPlace"] = true.into();
    training.job["spec"]["nodes"] = pods.into();
    training.job["spec"]["procsPerNode"] = EACH.into();
    training.start(servers).await?;
    training.attempted("j-1");
    training.complete().await?;
    let made = training.trainers().await?.len();
    ensure!(made == pods as usize, "{made} pods, not {pods}");
    let slots = training.servers()?;
    let all = (pods * EACH + servers) as usize;
    ensure!(slots.iter().all(|it| *it == all), "slots of steps {slots:?}, not {all}");
    training.are_those_of(servers, &training.losses()?)?;
    ready(training.cluster, training.here, servers).await.map(drop)
}
