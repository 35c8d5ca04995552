//! The events that a run reports, and how it ends.
//!
//! Out: [`RunEvent`]s in the order in which things happened, then one [`Outcome`] or [`RunError`].
//! Records serialise with the field names of the files under `OUT`. Nothing is written or drawn here.

use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize, Serializer};

/// What a worker is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A rank of the job.
    Trainer,
    /// A dedicated attention server.
    Server,
}

/// One start of a worker.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Deserialize, Serialize)]
pub struct WorkerName {
    /// What it is.
    pub role: Role,
    /// Rank of a trainer, index of a server.
    pub index: u16,
    /// Starts of this role and index before this one.
    pub incarnation: u32,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trainer => "trainer",
            Self::Server => "server",
        })
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.index)?;
        if self.incarnation > 0 {
            write!(f, " (incarnation {})", self.incarnation)?;
        }
        Ok(())
    }
}

/// Something that happened in a run.
#[derive(Clone, Debug, PartialEq)]
pub enum RunEvent {
    /// The trainers start, for the first time or again.
    Attempt(Attempt),
    /// A process was started, or its address became known: replaces the record of the same name.
    Process(ProcessRecord),
    /// A process is gone.
    ProcessEnded {
        /// Which.
        worker: WorkerName,
        /// A description of its end: `exit code 0`, `killed by SIGKILL`.
        how: String,
    },
    /// A step is done. Its `Header` and `Server` rows come before it.
    Step(StepRecord),
    /// What one server did in a step.
    Server(ServerRecord),
    /// The header of a step, one line of JSON.
    Header {
        /// The step.
        step: u64,
        /// Its header, without a line end.
        line: String,
    },
    /// Live load of a server, about once a second; of one in place while it has work.
    Load(LoadRecord),
    /// A message for the user.
    Notice {
        /// How serious.
        level: Level,
        /// One line.
        text: String,
    },
    /// The job is done; the last event.
    Finished(Outcome),
}

/// A start of all trainers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Attempt {
    /// From 1.
    pub number: u32,
    /// First step that it computes; rows of this and later steps that an earlier attempt has
    /// reported are void.
    pub first_step: u64,
    /// Checkpoint it goes on from.
    pub checkpoint: Option<PathBuf>,
}

/// A process of the run, as in `processes.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProcessRecord {
    /// Role, index and incarnation.
    #[serde(flatten)]
    pub worker: WorkerName,
    /// Process id.
    pub pid: u32,
    /// Where its peers connect; empty until it listens.
    pub address: String,
    /// When it was started, seconds since 1970.
    #[serde(serialize_with = "seconds_since_1970")]
    pub started: SystemTime,
}

/// A step, as in `steps.jsonl`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct StepRecord {
    /// Step, from 0.
    pub step: u64,
    /// Mean loss over all targets of the step.
    pub loss: f32,
    /// Its bits, 8 hex digits.
    pub loss_bits: String,
    /// Learning rate of its update; 0 where it was not told.
    #[serde(default)]
    pub lr: f32,
    /// Norm of the summed gradient before clipping; 0 where it was not told.
    #[serde(default)]
    pub gradient_norm: f32,
    /// Mean loss of the documents that are held out, after its update; none where it was not computed.
    #[serde(default)]
    pub validation_loss: Option<f32>,
    /// Rows of all trainers.
    pub tokens: u64,
    /// Wall time.
    pub seconds: f64,
    /// Time that the worst trainer waited for attention without computing meanwhile.
    pub exposed_wait_seconds: f64,
    /// Time that the worst trainer waited for the header and plan of the step after the one before it; 0 where it was not told.
    #[serde(default)]
    pub header_wait_seconds: f64,
    /// Slots lost in the step.
    pub failovers: u32,
    /// Load of the busiest server, divided by the mean.
    pub imbalance: f64,
    /// The same ratio, if every trainer computed its own rows.
    pub imbalance_unplanned: f64,
    /// By what part the last slot of the plans finishes later than in any plan; none where no bound is known.
    #[serde(default)]
    pub gap_compute: Option<f64>,
    /// By what part the busiest link is busier than in any plan that finishes then.
    #[serde(default)]
    pub gap_link: Option<f64>,
    /// By what part slots pull more bytes of Q, K and V than in any plan that finishes then.
    #[serde(default)]
    pub gap_bytes: Option<f64>,
    /// Digest of the plans, as `cadre plan -f` prints it, 16 hex digits.
    #[serde(default)]
    pub plans: String,
    /// Number of the view, `TERM.COUNTER`.
    pub view: String,
}

/// What a server did in a step, as in `servers.jsonl`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct ServerRecord {
    /// Step.
    pub step: u64,
    /// `server-1`, or `trainer-0` for the in-place server of trainer 0.
    pub server: String,
    /// What kind of server it is.
    pub kind: ServerKind,
    /// Slot that it filled.
    pub slot: u32,
    /// Incarnation of that server.
    pub incarnation: u32,
    /// Tasks it ran.
    pub tasks: u32,
    /// Time it computed.
    pub busy_seconds: f64,
    /// Bytes of rows it pulled.
    pub bytes_pulled: u64,
}

/// Where a server lives.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerKind {
    /// In a process of its own.
    Dedicated,
    /// In a trainer's.
    InPlace,
}

/// Live load of a server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadRecord {
    /// The server, or the trainer that it is in.
    pub worker: WorkerName,
    /// Last step it worked for.
    pub step: u64,
    /// Works that wait for its processor.
    pub queue: u32,
    /// Share of the last second in which it computed, 0 to 1.
    pub busy: f64,
    /// Tasks a second.
    pub tasks_per_second: f64,
    /// Time of its tasks over what the upper median of the run's servers would have taken; 0 without tasks, or without another
    /// server that had some.
    pub observed_over_expected: f64,
    /// Bytes of rows and results that it holds.
    pub memory_bytes: u64,
}

/// How serious a notice is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Normal operation.
    Information,
    /// The job goes on, with less.
    Warning,
    /// The job ends or restarts.
    Error,
}

/// How a job ended that did not fail.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Outcome {
    /// Starts of the trainers.
    pub attempts: u32,
    /// Text that the trained model wrote.
    pub sample: Option<String>,
}

/// How a run ended without success.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RunError {
    /// What the user gave cannot be run. Exit code 2.
    #[error("{message}")]
    BadInput {
        /// One line: what, where, what to do.
        message: String,
    },
    /// The job failed. Exit code 3.
    #[error("{message}")]
    JobFailed {
        /// One line, with the worker's last words.
        message: String,
        /// Last lines of the log of the worker that failed.
        log: Vec<String>,
    },
    /// The user ended it. Exit code 130.
    #[error("interrupted{}", match resumes {
        Some(true) => "; resume with --resume",
        Some(false) => "; there is no checkpoint to resume from",
        None => "",
    })]
    Interrupted {
        /// Whether `--resume` has a checkpoint to go on from; none of a program that has its own.
        resumes: Option<bool>,
    },
}

impl RunError {
    /// Exit code of the command.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::BadInput { .. } => 2,
            Self::JobFailed { .. } => 3,
            Self::Interrupted { .. } => 130,
        }
    }
}

fn seconds_since_1970<S: Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    to.serialize_f64(since.as_millis() as f64 / 1000.0)
}
