//! Decides which versions may talk to each other.
//!
//! In: the versions in a worker's `Hello`. Out: a [`Mismatch`] that names both sides, or nothing. The control version may be one
//! behind, so that an upgrade of the operator restarts no worker. The data version has to be equal among the workers of a job,
//! since their bits and the frames between them depend on it. The controller of a single job compares it here; one of many jobs
//! compares it within each job.

use crate::proto::Hello;

/// Version of the messages of this crate.
pub const CONTROL_VERSION: u32 = 3;

/// Version of planner, exchange, protocol and numerics together. It is raised when any of them changes what workers send each
/// other or what they compute.
pub const DATA_VERSION: u32 = 16;

/// Checks a worker's versions, against the job's data version where it is known.
pub fn check(hello: &Hello, data_version: Option<u32>) -> Result<(), Mismatch> {
    let oldest = CONTROL_VERSION.saturating_sub(1).max(1);
    if !(oldest..=CONTROL_VERSION).contains(&hello.control_version) {
        return Err(Mismatch::Control {
            worker: hello.control_version,
            oldest,
            newest: CONTROL_VERSION,
        });
    }
    match data_version {
        Some(job) if hello.data_version != job => {
            Err(Mismatch::Data { worker: hello.data_version, job })
        }
        Some(_) | None => Ok(()),
    }
}

/// Why a worker is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Mismatch {
    /// The controller does not speak the worker's version.
    #[error(
        "worker speaks control version {worker}, this controller {oldest} to {newest}; \
         run worker and controller of the same release"
    )]
    Control {
        /// What the worker speaks.
        worker: u32,
        /// Oldest version that is spoken here.
        oldest: u32,
        /// Newest version that is spoken here.
        newest: u32,
    },
    /// The worker would compute or send something else than the others.
    #[error(
        "worker has data version {worker}, the job {job}; \
         start all workers of a job from the same build"
    )]
    Data {
        /// The worker's.
        worker: u32,
        /// The job's.
        job: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(control_version: u32, data_version: u32) -> Hello {
        Hello { control_version, data_version, ..Hello::default() }
    }

    #[test]
    fn own_versions_are_accepted() {
        assert_eq!(check(&hello(CONTROL_VERSION, 7), Some(7)), Ok(()));
        assert_eq!(check(&hello(CONTROL_VERSION, 7), None), Ok(()), "compared within each job");
    }

    #[test]
    fn another_data_version_is_refused_with_both_named() {
        let refusal = check(&hello(CONTROL_VERSION, 6), Some(7)).expect_err("6 is not 7");
        assert_eq!(
            refusal.to_string(),
            "worker has data version 6, the job 7; start all workers of a job from the same build"
        );
    }

    #[test]
    fn a_newer_control_version_is_refused() {
        for known in [Some(7), None] {
            let refusal =
                check(&hello(CONTROL_VERSION + 1, 7), known).expect_err("from the future");
            assert!(refusal.to_string().contains("run worker and controller of the same release"));
        }
    }
}
