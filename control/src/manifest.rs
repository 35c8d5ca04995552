//! What manifests say of a job, as the settings of its workers: the same for each controller.
//!
//! In: the spec of the job and the health of its pool, and what a controller alone knows. Out: [`Settings`]. So `cadre run` and the
//! operator cannot read a manifest differently.

use std::path::PathBuf;

use cadre_crds::{Encryption, Health, TrainingJobSpec, Wire};
use cadre_planner::Tolerance;

use crate::settings::{AttentionPlace, Moment, Settings};

/// What manifests do not say of a job.
#[derive(Clone, Debug)]
pub struct BesideManifest {
    /// Name of the job.
    pub job: String,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Trainers of the job.
    pub trainers: u16,
    /// Where core attention is computed.
    pub attention: AttentionPlace,
    /// What the attempt encrypts: a manifest that says nothing means one thing on a machine, another in a cluster.
    pub encryption: Encryption,
    /// Folder of checkpoints; empty if the worker's environment names it.
    pub checkpoints: PathBuf,
    /// Slots lost in the job before this worker came.
    pub failovers: u32,
    /// Checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Header log to replay.
    pub headers: Option<PathBuf>,
    /// Moments of faults.
    pub faults: Vec<Moment>,
}

impl Settings {
    /// Settings of a job. No spec: no manifest describes the job. Then it has the values of one that says nothing, and plans as
    /// the environment of its rank 0 says.
    ///
    /// # Errors
    ///
    /// The spec's tolerance is no ratio from 1 to 2.
    pub fn of(
        spec: Option<&TrainingJobSpec>,
        health: &Health,
        own: BesideManifest,
    ) -> Result<Self, BadTolerance> {
        let attention = spec.map(|it| it.attention.clone()).unwrap_or_default();
        let policy = spec.map(|it| it.failure_policy.clone()).unwrap_or_default();
        let checkpoint = spec.map(|it| it.checkpoint.clone()).unwrap_or_default();
        let ratio = attention.tolerance.as_deref().map_or(Ok(Tolerance::USUAL), str::parse);
        let tolerance = ratio.map_err(|why| BadTolerance { why })?;
        let BesideManifest {
            job,
            attempt,
            trainers,
            attention: place,
            encryption,
            checkpoints,
            failovers,
            resume,
            headers,
            faults,
        } = own;
        Ok(Self {
            job,
            attempt,
            trainers,
            attention: place,
            wire: attention.wire.unwrap_or(Wire::F32),
            reproducible: attention.reproducible,
            encryption,
            on_pool_loss: attention.on_pool_loss,
            pool_wait_seconds: attention.pool_wait_seconds,
            suspect_after_milliseconds: health.suspect_after_milliseconds,
            trainer_suspect_after_seconds: policy.suspect_after_seconds,
            stalled_after_seconds: policy.stalled_after_seconds,
            checkpoints,
            checkpoints_kept: checkpoint.keep,
            failovers,
            resume,
            headers,
            profile: attention.profile,
            tolerance: spec.map(|_| tolerance),
            faults,
        })
    }
}

/// A manifest whose tolerance is no ratio.
#[derive(Debug, thiserror::Error)]
#[error("spec.attention.tolerance: {why}")]
pub struct BadTolerance {
    why: <Tolerance as std::str::FromStr>::Err,
}
