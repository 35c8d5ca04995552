//! Turns the manifests of a job into the settings of its workers, the same way for each controller.
//!
//! In: the spec of the job, the health of its pool, and what only a controller knows. Out: [`Settings`]. So `cadre run` and the
//! operator cannot read a manifest differently.

use std::path::PathBuf;

use cadre_crds::{Encryption, Health, TrainingJobSpec, Wire};
use cadre_planner::Tolerance;

use crate::settings::{AttentionPlace, Moment, Settings};

/// The settings of a job that its manifests do not have.
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
    /// What the attempt encrypts. A manifest without that field has another default on one machine than in a cluster.
    pub encryption: Encryption,
    /// Folder of checkpoints; empty if the worker's environment names it.
    pub checkpoints: PathBuf,
    /// Slots that the job had lost before this worker came.
    pub failovers: u32,
    /// Checkpoint that the job resumes from.
    pub resume: Option<PathBuf>,
    /// Header log to replay.
    pub headers: Option<PathBuf>,
    /// Moments at which faults fire.
    pub faults: Vec<Moment>,
}

impl Settings {
    /// The settings of a job. Without a spec, no manifest describes the job. Then it gets the values of an empty one, and plans
    /// by the environment of its rank 0.
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
            wire_is_open: Some(attention.wire.is_none()),
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
