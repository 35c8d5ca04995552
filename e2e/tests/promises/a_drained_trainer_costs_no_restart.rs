//! Each of two nodes is drained while two jobs train: a drained trainer costs no restart, the jobs go on elsewhere from the
//! last step, and their losses have the bits of a run that nobody disturbed.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{TrainingJob, TrainingJobStatus};
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;

use crate::training::{MIDDLE, Training};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut one = Training::prepare(cluster, "drained").await?;
    let mut other = one.beside("drained-too").await?;
    one.endless();
    other.endless();
    // A trainer of each on either node, while there are two.
    let spread = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"cadre.dev/role": "trainer"}}}]);
    for training in [&mut one, &mut other] {
        training.job["spec"]["template"]["spec"]["topologySpreadConstraints"] = spread.clone();
        training.start(1).await?;
        training.attempted("j-1");
    }
    for node in ["node-a", "node-b"] {
        for training in [&one, &other] {
            training.at(training.steps() + MIDDLE).await?;
        }
        let drained = drain(&one, &other, node).await;
        one.cluster.kubectl(&["uncordon", node])?;
        let drained = one.explained(drained)?;
        println!("{node}: {drained} trainers were drained");
    }
    let mut trained = Vec::new();
    for training in [&mut one, &mut other] {
        training.at(training.steps() + MIDDLE).await?;
        let status = training.look().await?.status.unwrap_or_default();
        ensure!(status.attempt > 1, "no trainer of {} was drained: {status:?}", training.here);
        ensure!(status.restarts == 0, "{}: {status:?}", training.here);
        // Logs of pods that were drained are gone with them.
        training.attempted(&format!("j-{}", status.attempt));
        trained.push(training.losses()?);
    }
    // Both jobs go before the same job is made by itself: each would take the other's processors.
    let longest = trained.iter().map(Vec::len).max().context("two jobs")?;
    other.remove()?;
    one.remove()?;
    one.alone(1, longest)?;
    for losses in trained {
        let known = one.are_those_of(1, &losses)?;
        ensure!(known >= MIDDLE as usize, "only {known} steps were seen");
    }
    Ok(())
}

/// Drains a node as administrators do. Out: how many trainers were on it; it returns when their jobs go on.
async fn drain(one: &Training<'_>, other: &Training<'_>, node: &str) -> Result<usize> {
    let mut moved = Vec::new();
    for training in [one, other] {
        let pods: Api<Pod> = Api::namespaced(training.cluster.client(), training.here);
        let trainers = ListParams::default()
            .labels("cadre.dev/role=trainer")
            .fields(&format!("spec.nodeName={node},status.phase=Running"));
        let count = pods.list(&trainers).await?.items.len();
        let attempt = training.look().await?.status.unwrap_or_default().attempt;
        moved.push((training, count, attempt, training.steps()));
    }
    let how = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s"];
    one.cluster.kubectl(&[&["drain", node], &how[..]].concat())?;
    for (training, _, attempt, before) in moved.iter().filter(|it| it.1 > 0) {
        let next = |it: &TrainingJobStatus| it.attempt > *attempt && it.restarts == 0;
        let goes_on = |job: &TrainingJob| job.status.as_ref().is_some_and(next);
        training.status("the next attempt", goes_on).await?;
        let what = format!("steps of {} elsewhere", training.here);
        until(&what, async || Ok((training.steps() > *before).then_some(()))).await?;
    }
    Ok(moved.iter().map(|it| it.1).sum())
}
