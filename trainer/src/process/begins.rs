//! Which checkpoint a job in pods goes on from.
//!
//! In: the environment contract of trainer 0. Out: the newest checkpoint in the job's own folder; where it has none yet, what
//! the job names of another one, or nothing: then it begins at step 0. What a checkpoint holds is not looked at here.
//!
//! Invariant: a job that names another's checkpoint never begins at step 0.

use std::path::{Path, PathBuf};

use cadre_worker::session::Contract;

use crate::checkpoint::{self, CheckpointError};

/// Field of the job that names the checkpoint.
const FIELD: &str = "spec.checkpoint.resumeFrom";

/// See the module. An attempt after the first has checkpoints of its own.
pub(super) fn with(contract: &Contract) -> Result<Option<PathBuf>, String> {
    let newest = |it: &Path| checkpoint::newest(it).map_err(|it| it.to_string());
    if contract.attempt > 1
        && let Some(own) = newest(&contract.checkpoints)?
    {
        return Ok(Some(own));
    }
    let Some(other) = &contract.resume else { return Ok(None) };
    let is_one = other.file_name().is_some_and(|it| it.as_encoded_bytes().starts_with(b"step-"));
    let found = if is_one { Some(other.clone()).filter(|it| it.is_dir()) } else { newest(other)? };
    let missing = || {
        let (path, what) =
            (other.display(), if is_one { "is no folder" } else { "holds no checkpoint" });
        format!(
            "{FIELD}: {path} {what}; create a new job that names the folder of a job, NAME-UID, in the same storage"
        )
    };
    found.map(Some).ok_or_else(missing)
}

/// Why a checkpoint cannot be gone on from; one of another job with the field that names it.
pub(super) fn refused(contract: &Contract, resume: Option<&Path>, why: &CheckpointError) -> String {
    let of_another =
        contract.resume.as_ref().zip(resume).is_some_and(|(it, path)| path.starts_with(it));
    if of_another { format!("{FIELD}: {why}") } else { why.to_string() }
}

#[cfg(test)]
mod tests {
    use std::fs::create_dir_all;

    use cadre_worker::session::{Endpoint, ExchangeChoice, Tolerance, links::PeerId};

    use super::*;

    #[test]
    fn a_job_begins_with_what_it_names_and_goes_on_from_its_own() {
        let place = tempfile::tempdir().unwrap();
        let path = |it: &str| place.path().join(it);
        let check = |attempt: u32, resume: Option<&str>, expected: Result<Option<&str>, &str>| {
            let contract = Contract {
                control: Endpoint::Unix("/nowhere".into()),
                me: PeerId::trainer(0, 0),
                trace: None,
                host: [127, 0, 0, 1].into(),
                attempt,
                trainers: 1,
                local_rank: 0,
                memory_mib: 1,
                exchange: ExchangeChoice::Auto,
                profile: None,
                tolerance: Tolerance::USUAL,
                checkpoints: path("own"),
                resume: resume.map(path),
            };
            match (with(&contract), expected) {
                (Ok(found), Ok(wanted)) => {
                    assert_eq!(found, wanted.map(path), "{attempt} {resume:?}");
                }
                (Err(said), Err(words)) => {
                    assert!(said.starts_with(FIELD) && said.contains(words), "{said}");
                }
                (found, _) => panic!("{attempt} {resume:?}: {found:?}"),
            }
        };
        for it in ["other/step-5", "other/step-40", "empty"] {
            create_dir_all(path(it)).unwrap();
        }
        check(1, None, Ok(None));
        check(2, None, Ok(None));
        for attempt in [1, 2] {
            check(attempt, Some("other"), Ok(Some("other/step-40")));
            check(attempt, Some("other/step-5"), Ok(Some("other/step-5")));
            check(
                attempt,
                Some("other/step-6"),
                Err("other/step-6 is no folder; create a new job"),
            );
            for nothing in ["empty", "nowhere"] {
                check(attempt, Some(nothing), Err("holds no checkpoint; create a new job"));
            }
        }
        create_dir_all(path("own/step-7")).unwrap();
        check(1, None, Ok(None));
        check(1, Some("other"), Ok(Some("other/step-40")));
        for resume in [None, Some("other"), Some("nowhere")] {
            check(2, resume, Ok(Some("own/step-7")));
        }
    }
}
