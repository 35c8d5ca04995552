//! A job that is suspended makes room and goes on from its checkpoint, and one whose trainer crashes makes another attempt
//! from its last one: both times with the bits of a run that nobody disturbed. The second attempt encrypts what the first
//! sent in the clear, since the job was changed meanwhile. The status knows the newest checkpoint.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{Encryption, TrainingJob};
use cadre_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use crate::objects::all;
use crate::training::{MIDDLE, STEPS, Training};

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "resumed").await?;
    training.job["spec"]["attention"]["encryption"] = "Off".into();
    training.job["spec"]["failurePolicy"] = serde_json::json!({"maxRestarts": 1});
    training.start(2).await?;
    training.attempted("j-1");
    training.at(MIDDLE).await?;
    patch(&training, r#"{"attention": {"encryption": "Required"}}"#)?;
    links(&training, Encryption::Off).await?;
    suspend(&training, true)?;
    // Trainers on their way out go on with steps until they end.
    let trainers = ListParams::default().labels("cadre.dev/role=trainer");
    let pods = all::<Pod>(training.cluster, training.here);
    until("no trainer", async || Ok(pods.list(&trainers).await?.items.is_empty().then_some(())))
        .await?;
    let stopped = training.steps();
    ensure!(stopped < *STEPS, "suspended before the end");
    suspend(&training, false)?;
    // The pods of the first attempt are gone, and their logs: its steps are known by its checkpoint's losses.
    training.attempted("j-2");
    training.at(stopped + MIDDLE).await?;
    links(&training, Encryption::Required).await?;
    let crashed = training.trainers().await?;
    training.kill(&crashed.first().context("two trainers")?.0).await?;
    let again =
        |job: &cadre_crds::TrainingJob| job.status.as_ref().is_some_and(|it| it.attempt == 3);
    training.status("attempt 3", again).await?;
    training.attempted("j-3");
    training.complete().await?;
    let status = training.look().await?.status.unwrap_or_default();
    ensure!(status.restarts == 1, "suspending counts as no restart: {status:?}");
    let saved = (status.checkpoint_step, status.restarts_without_progress);
    ensure!(saved == (*STEPS, Some(0)), "the last one is newer: {status:?}");
    training.are_those_of(2, &training.losses()?)?;
    training.remove()
}

/// Waits until the status says what the links of the newest attempt are.
async fn links(training: &Training<'_>, said: Encryption) -> Result<()> {
    let has = |job: &TrainingJob| job.status.as_ref().and_then(|it| it.encryption) == Some(said);
    training.status("its links", has).await
}

fn suspend(training: &Training<'_>, to: bool) -> Result<()> {
    patch(training, &format!("{{\"suspend\": {to}}}"))
}

fn patch(training: &Training<'_>, spec: &str) -> Result<()> {
    let patch = format!("{{\"spec\": {spec}}}");
    let target = ["patch", "cadjob/j", "--type=merge", "-p", &patch, "--namespace", training.here];
    training.cluster.kubectl(&target).map(drop)
}
