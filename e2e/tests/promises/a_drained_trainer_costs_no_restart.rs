//! Each of two nodes is drained while two jobs train: a drained trainer costs no restart, the jobs go on elsewhere from the
//! last step, and their losses have the bits of a run that nobody disturbed.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{TrainingJob, TrainingJobStatus};
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;

use crate::objects::{find, of_job};
use crate::training::{MIDDLE, Training};

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    let mut one = Training::prepare(cluster, "drained").await?;
    let mut other = one.beside("drained-too").await?;
    one.longer(8);
    other.longer(8);
    let expected = one.alone(1)?;
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
            // On a fast machine the second drain may find a job that is over.
            training.at((training.steps() + MIDDLE).min(training.length())).await?;
        }
        let drained = drain(&one, &other, node).await;
        one.cluster.kubectl(&["uncordon", node])?;
        let drained = one.explained(drained)?;
        println!("{node}: {drained} trainers were drained");
    }
    for training in [&mut one, &mut other] {
        training.complete().await?;
        let status = training.look().await?.status.unwrap_or_default();
        ensure!(status.attempt > 1, "no trainer of {} was drained: {status:?}", training.here);
        ensure!(status.restarts == 0, "{}: {status:?}", training.here);
        // Logs of pods that were drained are gone with them.
        training.attempted(&format!("j-{}", status.attempt));
        let losses = training.losses()?;
        let known = losses.iter().position(|it| !it.is_empty()).context("steps in the logs")?;
        ensure!(losses[known..] == expected[known..], "other bits than by itself from {known}");
    }
    other.remove_objects()?;
    one.remove()
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
        let goes_on = |job: &TrainingJob| {
            let complete = find(of_job(job), "Complete").is_some_and(|it| it.status == "True");
            let next = |it: &TrainingJobStatus| it.attempt > *attempt && it.restarts == 0;
            complete || job.status.as_ref().is_some_and(next)
        };
        training.status("the next attempt", goes_on).await?;
        let what = format!("steps of {} elsewhere", training.here);
        until(&what, async || Ok((training.steps() > *before).then_some(()))).await?;
    }
    Ok(moved.iter().map(|it| it.1).sum())
}
