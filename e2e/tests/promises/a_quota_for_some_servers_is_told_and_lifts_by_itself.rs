//! A quota stops a pool while a job trains: the status has its words, the server that fits serves, and once the quota
//! allows more the others come without anybody's doing. No trainer is touched, and the header log makes the same bits.

use anyhow::{Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, until};

use crate::objects::{all, find, of_pool};
use crate::release::ready;
use crate::training::{MIDDLE, Training};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "limited").await?;
    training.endless();
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    let trainers = training.trainers().await?;

    // Two servers and two trainers are there: one more pod fits.
    quota(&training, 5)?;
    let target = ["scale", "attnpool/p", "--replicas=4", "--namespace", training.here];
    training.cluster.kubectl(&target)?;
    let told = until("the quota's words", async || {
        let pool = all::<AttentionPool>(training.cluster, training.here).get("p").await?;
        let said = find(of_pool(&pool), "Degraded").filter(|it| it.reason == "Forbidden").cloned();
        let registered = pool.status.as_ref().map_or(0, |it| it.registered);
        Ok(said.filter(|_| registered == 3))
    })
    .await;
    let told = training.explained(told)?;
    let words = ["create Pod p-", "exceeded quota: team", "limited: pods=5"];
    ensure!(words.iter().all(|it| told.message.contains(it)), "{}", told.message);
    training.at(training.steps() + MIDDLE).await?;

    quota(&training, 6)?;
    let four = ready(training.cluster, training.here, 4).await;
    training.explained(four)?;
    let lifted = until("a pool as it should be", async || {
        let pool = all::<AttentionPool>(training.cluster, training.here).get("p").await?;
        Ok(find(of_pool(&pool), "Degraded").filter(|it| it.reason == "AsItShould").map(drop))
    })
    .await;
    training.explained(lifted)?;
    training.at(training.steps() + MIDDLE).await?;
    ensure!(training.trainers().await? == trainers, "no trainer was touched");
    let servers = training.servers()?;
    ensure!(servers.contains(&3) && servers.contains(&4), "plans were for {servers:?} servers");
    let losses = training.losses()?;
    // The job goes before the same is made by itself, which wants its processors.
    training.remove()?;
    ensure!(training.replayed(4, losses.len())? == losses, "other bits");
    Ok(())
}

/// Lets the namespace have so many pods. It holds when this returns: the API server reads it before it makes a pod.
fn quota(training: &Training<'_>, pods: u32) -> Result<()> {
    let quota = format!(
        "apiVersion: v1\nkind: ResourceQuota\nmetadata: {{name: team}}\nspec: {{hard: {{pods: '{pods}'}}}}\n"
    );
    training.cluster.apply(training.here, &quota)?;
    let hard = format!("--for=jsonpath={{.status.hard.pods}}={pods}");
    let target = ["wait", &hard, "quota/team", "--timeout=60s", "--namespace", training.here];
    training.cluster.kubectl(&target).map(drop)
}
