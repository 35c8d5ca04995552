//! The header log of a job in pods: `headers.jsonl` beside the checkpoints, written by trainer 0.
//!
//! In: the header of each step that is done. Out: a line for each. `cadre run` keeps such a log itself; in a
//! cluster nobody else is there to keep it, since nothing raw goes to the API server.
//!
//! Invariant: whole lines only, one for each step before the present one; what a killed process left of a line,
//! and steps after the checkpoint that the job goes on from, are dropped on opening.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use cadre_worker::session::Header;

use crate::checkpoint::Last;

/// Name of the log, in the folder of checkpoints.
const NAME: &str = "headers.jsonl";

/// An open header log.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    file: File,
}

/// The log cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("header log {}: {source}; make room in the checkpoint directory and let the pod's user write there", path.display())]
pub(super) struct Error {
    path: PathBuf,
    source: std::io::Error,
}

impl Record {
    /// Opens the log of headers in `folder`, which it makes if needed, for a job that goes on with
    /// `step`. If the job begins with the checkpoint of another job, the log begins with the lines
    /// of that one. Adds the step before `step` where the trainer 0 of that attempt died before it
    /// wrote the line.
    pub(super) fn open(folder: &Path, step: u64, checkpoint: Option<&Path>) -> Result<Self, Error> {
        let path = folder.join(NAME);
        let opened = || {
            fs::create_dir_all(folder)?;
            let home = checkpoint.and_then(Path::parent).unwrap_or(folder);
            let before = match fs::read_to_string(home.join(NAME)) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
                text => text?,
            };
            let whole = before.split_inclusive('\n').filter(|it| it.ends_with('\n'));
            let earlier = |line: &&str| {
                serde_json::from_str::<Header>(line).is_ok_and(|header| header.step < step)
            };
            let mut kept: String = whole.filter(earlier).collect();
            let newest = kept.lines().last().and_then(|it| serde_json::from_str::<Header>(it).ok());
            let newest = newest.map(|it| it.step);
            if let Some(last) = checkpoint.and_then(Last::of)
                && last.header.step + 1 == step
                && newest < Some(last.header.step)
            {
                kept += &line(&last.header);
            }
            // Under another name first: a process killed here loses nothing.
            let draft = path.with_extension("draft");
            fs::write(&draft, kept)?;
            fs::rename(&draft, &path)?;
            OpenOptions::new().append(true).open(&path)
        };
        match opened() {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(Error { path, source }),
        }
    }

    /// Adds the header of the next step.
    pub(super) fn add(&mut self, header: &Header) -> Result<(), Error> {
        let written = self.file.write_all(line(header).as_bytes());
        written.map_err(|source| Error { path: self.path.clone(), source })
    }
}

fn line(header: &Header) -> String {
    serde_json::to_string(header).expect("a header is plain data") + "\n"
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cadre_worker::session::headers;

    use super::*;

    const ANY: &str = include_str!("../../../testing/header.json");

    fn header(step: u64) -> Header {
        Header { step, ..serde_json::from_str(ANY).unwrap() }
    }

    #[test]
    fn a_job_that_goes_on_drops_later_steps_and_torn_lines() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("checkpoints");
        let mut record = Record::open(&folder, 0, None).unwrap();
        for step in 0..4 {
            record.add(&header(step)).unwrap();
        }
        drop(record);
        let path = folder.join(NAME);
        let torn = fs::read_to_string(&path).unwrap() + "{\"step\":";
        fs::write(&path, torn).unwrap();
        let mut record = Record::open(&folder, 2, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        record.add(&header(2)).unwrap();
        let log = headers::read(&path).unwrap();
        log.covers(0..3).unwrap();
        assert!(log.covers(0..4).is_err());
        drop(record);
        // Trainer 0 died when it had done the step and not written its header; a survivor has.
        let found = folder.join("step-4");
        let last = |step| {
            let header = Arc::new(header(step));
            let done = cadre_worker::session::StepDone { step, ..Default::default() };
            fs::create_dir_all(&found).unwrap();
            fs::write(found.join("last.json"), Last { header, done }.text()).unwrap();
        };
        last(3);
        for _ in 0..2 {
            drop(Record::open(&folder, 4, Some(&found)).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 4);
            headers::read(&path).unwrap().covers(0..4).unwrap();
        }
        // Another job begins with that checkpoint, in a folder of its own; opening twice changes
        // nothing.
        let own = folder.with_file_name("own");
        for _ in 0..2 {
            let mut record = Record::open(&own, 4, Some(&found)).unwrap();
            record.add(&header(4)).unwrap();
            headers::read(&own.join(NAME)).unwrap().covers(0..5).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 4, "not its own to write");
        last(7);
        drop(Record::open(&folder, 5, Some(&found)).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 4, "it is of another step");
    }
}
