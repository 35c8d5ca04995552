//! A pool and a job as their manifests say them, with the arguments of their containers.
//!
//! In: files. Out: both objects, which hold against their rules, and what their containers say to `cadre train` and
//! `cadre serve`. Whether the job fits the pool, or this machine, is decided elsewhere.

use std::path::PathBuf;

use cadre_crds::manifest::{self, Manifests};
use cadre_crds::validate::Refusal;
use cadre_crds::{AttentionPool, TrainingJob};

use crate::arguments::{ServeOptions, TrainOptions};
use crate::run::merge;

/// What the manifests of one pool and one job say.
pub(crate) struct Declared {
    pub(crate) pool: AttentionPool,
    pub(crate) job: TrainingJob,
    /// None where the job's container runs another program than `cadre train`.
    pub(crate) trainer: Option<TrainOptions>,
    /// None where the pool has no template, or one with another program.
    pub(crate) server: Option<ServeOptions>,
}

/// Why manifests are refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeclaredError {
    #[error(transparent)]
    Manifests(#[from] manifest::Error),
    #[error("{kind} {name}: {refusal}")]
    Refused { kind: &'static str, name: String, refusal: Refusal },
}

/// Reads manifests.
pub(crate) fn declared(files: &[PathBuf]) -> Result<Declared, DeclaredError> {
    let Manifests { pool, job, .. } = manifest::load(files)?;
    let named = |kind, name: Option<&String>| {
        let name = name.cloned().unwrap_or_default();
        move |refusal| DeclaredError::Refused { kind, name, refusal }
    };
    let of_pool = named(AttentionPool::KIND, pool.metadata.name.as_ref());
    let of_job = named(TrainingJob::KIND, job.metadata.name.as_ref());
    let trainer = merge::read(&job.spec.template, "train").map_err(of_job)?;
    let server = match &pool.spec.template {
        Some(template) => merge::read(template, "serve").map_err(of_pool)?,
        None => None,
    };
    Ok(Declared { pool, job, trainer, server })
}
