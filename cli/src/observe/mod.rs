//! `cadre observe`: says what a pool would gain for a job that was observed without one.
//!
//! In: the files that `cadre.observe(model, folder)` of the Python package wrote, a calibration. Out: a table or one line of
//! JSON on stdout: time lost to imbalance, what a pool makes of it, or that there is no gain, and why. Nothing is started.
//!
//! Step times are the job's own. What attention takes of them, where the rows are and on a pool, is asked of the planner with
//! the job's own lengths (`plan::size::observed`).

mod log;
mod options;
mod report;

use cadre_worker::profile;

use crate::plan::size::{NOMINAL_PROFILE, SizeError, observed::Watched};
use log::{Log, LogError};
pub(crate) use options::ObserveCommand;
use report::Report;

/// Steps that are planned at most, from all over the job.
const MAX_PLANNED_STEPS: usize = 32;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObserveError {
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(
        "--profile is needed: the job ran on a processor of which no table ships with Cadre; measure one there with cadre calibrate --head-dim {head_dim} --out FILE"
    )]
    NoProfile { head_dim: u16 },
    #[error(transparent)]
    Profile(#[from] profile::Error),
    #[error(transparent)]
    Plan(#[from] SizeError),
    #[error(
        "profile {name}: by it attention takes {attention:.3} s of a step, which was observed to take {step:.3} s; calibrate the processor that the job ran on, with as many threads (cadre calibrate --threads)"
    )]
    Slow { name: String, attention: f64, step: f64 },
}

/// Reads and plans; returns what to print.
pub(crate) fn observe(command: &ObserveCommand) -> Result<String, ObserveError> {
    let ObserveCommand::Report(options) = command;
    let log = Log::read(&options.files)?;
    let head_dim = log.head.heads[2];
    let name = match &options.profile {
        Some(name) => name,
        None if log.head.device == "cuda" => NOMINAL_PROFILE,
        None => return Err(ObserveError::NoProfile { head_dim }),
    };
    let profile = profile::read(name)?;
    let watched = Watched {
        ranks: log.head.ranks,
        layers: log.layers.clone(),
        servers: options.servers.map_or(0, |it| it.get().into()),
        lanes: options.lanes.get(),
        wire: if log.head.device == "cpu" { cadre_crds::Wire::F32 } else { cadre_crds::Wire::Bf16 },
    };
    let report = Report::new(&log, &watched, (name, &profile))?;
    Ok(if options.json { report.json() } else { report.table() })
}

#[cfg(test)]
mod tests;
