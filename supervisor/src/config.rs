//! What `cadre run` hands to the supervisor.
//!
//! In: the pool and job objects with the command line's options merged. Out: a [`RunConfig`], and by
//! [`RunConfig::check`] the refusal of what can be seen to be impossible before anything starts.

use std::path::PathBuf;
use std::time::Duration;

use cadre_crds::{AttentionPool, TrainingJob};

use super::event::RunError;
use super::fault::{self, Fault, Reach};
use cadre_control::AttentionPlace;

/// A run on this machine.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The pool.
    pub pool: AttentionPool,
    /// The job; options for the trainers (`--steps`, `--seed`, `--data` …) are already in the
    /// arguments of its container.
    pub job: TrainingJob,
    /// Steps of the job, from its arguments; `None` where only its own program knows them.
    pub steps: Option<u64>,
    /// Where files go. Must exist.
    pub out: PathBuf,
    /// Workers write time spans to `OUT/trace/`.
    pub trace: bool,
    /// Goes on from the newest checkpoint under `OUT/checkpoints`.
    pub resume: bool,
    /// Where core attention is computed. `Local` starts no dedicated servers.
    pub attention: AttentionPlace,
    /// Header log to replay.
    pub headers: Option<PathBuf>,
    /// What to break.
    pub faults: Vec<Fault>,
    /// Whether dead servers are replaced.
    pub replace: bool,
    /// What `cadre` in a container's command means: this executable.
    pub program: PathBuf,
    /// Deadlines of the supervisor.
    pub limits: Limits,
}

/// Deadlines of the supervisor.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// From a worker's start until it is registered, and the longest a live worker may be detached.
    pub register: Duration,
    /// Time of survivors that know of a dead trainer to write their checkpoint and leave. One that reports that it is at work
    /// gets as long as after an interrupt, from each report on.
    pub survivors: Duration,
    /// Time from the first interrupt until everything is killed, beyond the time of the steps in progress. It begins again at the
    /// end of each of these steps.
    pub interrupt: Duration,
    /// Time for a trainer to exit after its last words.
    pub last_words: Duration,
    /// Time of workers to leave once the job is done.
    pub farewell: Duration,
    /// Window of the crash loop: a server that dies, or ends before it has joined, three times within it is not started again.
    pub crash_loop: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            register: Duration::from_secs(30),
            survivors: Duration::from_secs(10),
            interrupt: Duration::from_secs(30),
            last_words: Duration::from_secs(10),
            farewell: Duration::from_secs(3),
            crash_loop: Duration::from_secs(10),
        }
    }
}

impl RunConfig {
    /// A run of this pool and job that breaks nothing, writes no trace and replaces dead servers.
    pub fn new(pool: AttentionPool, job: TrainingJob, out: PathBuf, program: PathBuf) -> Self {
        Self {
            pool,
            job,
            steps: None,
            out,
            trace: false,
            resume: false,
            attention: AttentionPlace::Pool,
            headers: None,
            faults: Vec::new(),
            replace: true,
            program,
            limits: Limits::default(),
        }
    }

    /// Trainers of the job.
    pub fn trainers(&self) -> u16 {
        u16::try_from(self.job.spec.trainers()).unwrap_or(u16::MAX)
    }

    /// Dedicated servers that the run starts with.
    pub fn servers(&self) -> u16 {
        match self.attention {
            AttentionPlace::Pool => u16::try_from(self.pool.spec.replicas).unwrap_or(u16::MAX),
            AttentionPlace::Local => 0,
        }
    }

    /// Whether trainers serve in their own processes.
    pub fn in_place(&self) -> bool {
        self.pool.spec.in_place || self.attention == AttentionPlace::Local
    }

    /// Refuses what cannot run, before anything is started. `first_step` is above 0 for a resumed
    /// run.
    pub fn check(&self, first_step: u64) -> Result<(), RunError> {
        let refuse = |message: String| Err(RunError::BadInput { message });
        if self.trainers() == 0 {
            return refuse(
                "the job has no trainer; set spec.nodes and spec.procsPerNode to 1 or more".into(),
            );
        }
        if self.servers() == 0 && !self.in_place() {
            return refuse(
                "the pool has no server; set spec.replicas to 1 or more, or spec.inPlace to true"
                    .into(),
            );
        }
        if let AttentionPlace::Local = self.attention
            && let Some(fault) = self.faults.iter().find(|it| matches!(it, Fault::AddServer { .. }))
        {
            return refuse(format!(
                "fault {fault} can never fire: --attention local uses no server; drop one of the two"
            ));
        }
        let reach = Reach {
            first_step,
            steps: self.steps,
            trainers: self.trainers(),
            servers: self.servers(),
            replace: self.replace,
        };
        fault::check(&self.faults, reach).or_else(|refusal| refuse(refusal.to_string()))
    }
}
