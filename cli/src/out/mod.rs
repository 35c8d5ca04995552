//! What a run leaves under its directory.
//!
//! In: the events of the run. Out: `steps.jsonl`, `servers.jsonl`, `headers.jsonl`, `processes.json`,
//! `summary.json`, `picture.svg`, and a trace where the user wants it.
//!
//! Rows are appended as they come and survive a kill, those before a checkpoint a crash of the machine,
//! too; whole files appear whole or not at all. Rows of
//! steps that a restart computes again are dropped, so every step stands once, in order. A run that goes
//! on after its end takes the summary and the picture away with the first row that it changes.

pub(crate) mod directory;
mod picture;
pub(crate) mod rows;
pub(crate) mod summary;
pub(crate) mod trace;
mod whole;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use cadre_supervisor::{Attempt, ProcessRecord, RunEvent, ServerRecord, StepRecord, WorkerName};
use cadre_trainer::checkpoint::Last;
use serde::{Deserialize, Serialize};

use directory::{Directory, END, PICTURE};
use rows::Rows;
use summary::Summary;

/// The files of a run.
#[derive(Debug)]
pub(crate) struct Output {
    directory: Directory,
    steps: Rows<StepRecord>,
    servers: Rows<ServerRecord>,
    headers: Rows<HeaderStep>,
    processes: BTreeMap<WorkerName, ProcessRecord>,
    started: Vec<WorkerName>,
    /// No summary of an earlier run is left.
    reopened: bool,
}

/// The fields of a header that are read.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HeaderStep {
    step: u64,
}

impl rows::Row for StepRecord {
    fn step(&self) -> u64 {
        self.step
    }
}

impl rows::Row for ServerRecord {
    fn step(&self) -> u64 {
        self.step
    }
}

impl rows::Row for HeaderStep {
    fn step(&self) -> u64 {
        self.step
    }
}

impl Output {
    /// Opens the files of a directory that belongs to this run; takes back what it made if it cannot.
    pub(crate) fn open(directory: Directory) -> Result<Self, Error> {
        let path = |name: &str| directory.path().join(name);
        let files = || {
            Ok((
                Rows::open(path("steps.jsonl"))?,
                Rows::open(path("servers.jsonl"))?,
                Rows::open(path("headers.jsonl"))?,
            ))
        };
        let (steps, servers, headers) = match files() {
            Ok(files) => files,
            Err(error) => {
                directory.withdraw();
                return Err(error);
            }
        };
        let (processes, started) = (BTreeMap::new(), Vec::new());
        let reopened = false;
        let output = Self { directory, steps, servers, headers, processes, started, reopened };
        match output.write_processes() {
            Ok(()) => Ok(output),
            Err(error) => {
                output.withdraw();
                Err(error)
            }
        }
    }

    /// Where the files are.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Steps so far, those before a resume included.
    pub(crate) fn steps(&self) -> &[StepRecord] {
        self.steps.rows()
    }

    /// What servers did in them.
    pub(crate) fn servers(&self) -> &[ServerRecord] {
        self.servers.rows()
    }

    /// Processes that this run has started, in order.
    pub(crate) fn started(&self) -> &[WorkerName] {
        &self.started
    }

    /// Writes down what happened.
    pub(crate) fn record(&mut self, event: &RunEvent) -> Result<(), Error> {
        match event {
            RunEvent::Attempt(attempt) => {
                if self.steps.rows().last().is_some_and(|it| it.step >= attempt.first_step) {
                    self.reopen()?;
                }
                self.steps.drop_from(attempt.first_step)?;
                self.servers.drop_from(attempt.first_step)?;
                self.headers.drop_from(attempt.first_step)?;
                self.fill(attempt)
            }
            RunEvent::Process(process) => {
                if self.processes.insert(process.worker, process.clone()).is_none() {
                    self.started.push(process.worker);
                }
                self.write_processes()
            }
            RunEvent::ProcessEnded { worker, .. } => {
                self.processes.remove(worker);
                self.write_processes()
            }
            RunEvent::Step(step) => {
                self.reopen()?;
                self.steps.push(step.clone())
            }
            RunEvent::Server(server) => {
                self.reopen()?;
                self.servers.push(server.clone())
            }
            RunEvent::Header { step, line } => {
                self.reopen()?;
                self.headers.push_line(HeaderStep { step: *step }, line)
            }
            // One of them, and there are few, says that a checkpoint is written: a crash of the machine must not leave that one
            // without the rows before it.
            RunEvent::Notice { .. } => {
                self.steps.sync()?;
                self.servers.sync()?;
                self.headers.sync()
            }
            RunEvent::Load(_) | RunEvent::Finished(_) => Ok(()),
        }
    }

    /// What a run that goes on with `first_step` lacks of the steps before, in sentences.
    pub(crate) fn lost(&self, first_step: u64) -> Vec<String> {
        [self.steps.lost(first_step), self.headers.lost(first_step)].into_iter().flatten().collect()
    }

    /// Takes away what an earlier run said of its end, once.
    fn reopen(&mut self) -> Result<(), Error> {
        if !self.reopened {
            self.directory.reopen()?;
            self.reopened = true;
        }
        Ok(())
    }

    /// Adds the row of the step before an attempt from the attempt's checkpoint, if the trainer 0
    /// that ran the step died before it reported it. What was measured of the pool in that step is
    /// lost.
    fn fill(&mut self, attempt: &Attempt) -> Result<(), Error> {
        let Some(Last { header, done }) = attempt.checkpoint.as_deref().and_then(Last::of) else {
            return Ok(());
        };
        let step = header.step;
        if step + 1 != attempt.first_step {
            return Ok(());
        }
        if self.headers.rows().last().is_none_or(|it| it.step < step) {
            let line = serde_json::to_string(&*header).expect("a header is plain data");
            self.headers.push_line(HeaderStep { step }, &line)?;
        }
        if self.steps.rows().last().is_none_or(|it| it.step < step) {
            self.steps.push(StepRecord {
                step,
                loss: done.loss,
                loss_bits: format!("{:08x}", done.loss.to_bits()),
                lr: done.learning_rate,
                gradient_norm: done.gradient_norm,
                validation_loss: done.validation_loss,
                tokens: done.tokens,
                seconds: done.seconds,
                exposed_wait_seconds: done.exposed_wait_seconds,
                header_wait_seconds: done.header_wait_seconds,
                failovers: 0,
                imbalance: 1.0,
                imbalance_unplanned: 1.0,
                gap_compute: None,
                gap_link: None,
                gap_bytes: None,
                plans: String::new(),
                view: format!("{}.{}", header.view.term, header.view.counter),
            })?;
        }
        Ok(())
    }

    /// Writes the summary and the picture.
    pub(crate) fn finish(&mut self, summary: &Summary) -> Result<(), Error> {
        self.processes.clear();
        self.write_processes()?;
        let svg = picture::draw(self.steps.rows(), self.servers.rows(), summary.unigram_entropy)
            .map_err(|why| Error::Picture { why })?;
        whole::write(&self.path().join(PICTURE), svg.as_bytes())?;
        whole::write_json(&self.path().join(END), summary)
    }

    /// Whether a trainer has been started.
    pub(crate) fn has_logs_of_trainers(&self) -> bool {
        let logs = std::fs::read_dir(self.path().join("logs"));
        let mut names = logs.into_iter().flatten().flatten().map(|it| it.file_name());
        names.any(|it| it.to_string_lossy().starts_with("trainer-"))
    }

    /// Gives the directory back as it was found, when nothing has come of the run.
    pub(crate) fn withdraw(self) {
        self.directory.withdraw();
    }

    fn write_processes(&self) -> Result<(), Error> {
        let processes: Vec<&ProcessRecord> = self.processes.values().collect();
        whole::write_json(&self.path().join("processes.json"), &processes)
    }
}

/// Refuses to replay the log that a run in `out` writes to: it drops the rows of steps that it computes again.
pub(crate) fn check_headers(log: &Path, out: &Path) -> Result<(), Error> {
    let file = |path: &Path| std::fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    let own = file(&out.join("headers.jsonl"));
    if own.is_some() && own == file(log) {
        return Err(Error::OwnHeaders { path: log.to_path_buf() });
    }
    Ok(())
}

/// Why results cannot be kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file or directory cannot be written or read.
    #[error("cannot {action} {}: {source}; {}", path.display(), remedy(source))]
    File {
        /// The operation that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of rows has one that is not a row.
    #[error("{} line {line}: {source}; restore the file or start anew with another --out", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Line of the file, from 1.
        line: usize,
        /// What the reader said.
        source: serde_json::Error,
    },
    /// The directory has other things in it.
    #[error("{} is not empty and holds no run of cadre; name another --out", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds a run that has not finished.
    #[error("{} holds an unfinished run; add --resume, or name another --out", path.display())]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds a run that cannot be resumed.
    #[error(
        "{} holds a run that has no checkpoint to go on from; name another --out, or remove {}",
        path.display(),
        path.display()
    )]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("{} holds no run to resume; name its directory with --out", path.display())]
    NothingToResume {
        /// The directory.
        path: PathBuf,
    },
    /// Another process is writing there.
    #[error("{} is in use by another run; wait for it or name another --out", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The file for the trace is there already.
    #[error("{} exists; remove it or name another file with --trace", path.display())]
    TraceExists {
        /// The file.
        path: PathBuf,
    },
    /// The trace would take the place of a file of the run.
    #[error("{} is a name that the run itself makes; name another file with --trace", path.display())]
    TraceIsOwn {
        /// The file.
        path: PathBuf,
    },
    /// The headers to replay are in the file that this run writes.
    #[error(
        "--headers {} is the log of this run itself, which drops what it computes again; copy the file and name the copy",
        path.display()
    )]
    OwnHeaders {
        /// The file.
        path: PathBuf,
    },
    /// The picture cannot be drawn.
    #[error("cannot draw the picture: {why}; please report it")]
    Picture {
        /// What the plotter said.
        why: String,
    },
}

impl Error {
    fn file(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::File { action, path: path.to_path_buf(), source }
    }
}

fn remedy(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind as Kind;
    #[expect(clippy::wildcard_enum_match_arm, reason = "the system's list of errors is open")]
    match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => "free space there, or name another --out",
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => "name a directory you may write to",
        Kind::NotFound => "name a directory that exists",
        _ => "name another --out",
    }
}

#[cfg(test)]
mod tests;
