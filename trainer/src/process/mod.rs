//! The process of a trainer: joins the job, runs steps, writes checkpoints, leaves.
//!
//! In: the environment contract and [`TrainArgs`]. Out: an exit code: 0, 2 for bad input, 3 when the job
//! cannot go on, in a pod 143 when it was stopped before its last step. Trainer 0 also hosts the conductor,
//! in its IO thread.
//!
//! Invariant: parameters change only at the end of a step that every trainer finished, so after any
//! failure each survivor can write the checkpoint of the last completed step, with the same bytes.

mod begins;
mod closing;
mod prepare;
mod record;
mod steps;
mod stuck;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use cadre_kernels::{Choice, Threads};
use cadre_worker::process::{Termination, last_words};
use cadre_worker::session::{ExchangeChoice, KvHeads, Session, Turns};

use self::prepare::Failure;
use self::record::Record;
use self::stuck::Noticed;
use super::checkpoint::{Last, State};
use super::corpus::HeldOut;
use super::loader::{Loader, Share};
use super::model::Design;
use super::step::Trainer;
use super::validation::Validation;

/// What `cadre train` is given.
#[derive(Clone, Debug)]
pub struct TrainArgs {
    /// Folder of documents, one a file.
    pub data: PathBuf,
    /// Documents that the model is evaluated on, and not trained.
    pub validate: Option<HeldOut>,
    /// Steps between two evaluations; 0: after the last step only.
    pub validate_every: u64,
    /// Rows of an evaluation, about.
    pub validate_tokens: NonZeroU32,
    /// The model.
    pub design: Design,
    /// Steps of the job.
    pub steps: NonZeroU64,
    /// Rows of this trainer in each nano-batch.
    pub tokens: NonZeroU32,
    /// Longest document, in rows.
    pub cap: NonZeroU32,
    /// Lengths that documents are cut at; the shipped list if absent.
    pub lengths: Option<PathBuf>,
    /// Nano-batches that go through the model together.
    pub nano_batches: NonZeroU32,
    /// How often they do in a step, each time forward and backward; gradients are summed.
    pub accumulate: NonZeroU16,
    /// Highest learning rate.
    pub lr: f32,
    /// Steps until it is reached.
    pub warmup: u64,
    /// Seed of weights and data.
    pub seed: u64,
    /// Threads that compute.
    pub threads: Threads,
    /// What computes linear layers, and core attention in place.
    pub engine: Choice,
    /// The number of the GPU that does, of those that the process may see; none: it follows from the process's number.
    pub gpu: Option<usize>,
    /// Memory for rows of other trainers, in MiB; if absent, the controller's setting counts.
    pub memory_mib: Option<NonZeroU32>,
    /// What moves rows.
    pub exchange: ExchangeChoice,
    /// Whether the KV heads of a document may go to different servers.
    pub kv_heads: KvHeads,
    /// Steps between checkpoints; 0: at the end only.
    pub checkpoint_every: u64,
    /// Start of the sample text.
    pub prompt: String,
}

/// Exit code of a trainer in a pod that was stopped: what a process ended by SIGTERM has.
const ENDED_BY_SIGTERM: u8 = 143;

/// Trains until the job ends.
///
/// # Errors
///
/// The job failed, or this process cannot join it: exit code 3. Bad input is printed here: 2.
pub fn trainer_main(args: TrainArgs) -> anyhow::Result<ExitCode> {
    cadre_worker::process::arm_parent_death()?;
    match Process::prepare(args) {
        Ok(process) => process.run(),
        Err(Failure::BadInput(message)) => {
            last_words(&message);
            Ok(ExitCode::from(2))
        }
        Err(Failure::Other(error)) => Err(error),
    }
}

struct Process {
    args: TrainArgs,
    loader: Loader,
    /// Turns of every step.
    turns: Turns,
    /// This trainer's shares of steps that are announced and have not begun, by step and
    /// nano-batch; two steps at most.
    shares: BTreeMap<u64, Vec<Share>>,
    trainer: Trainer,
    validation: Option<Validation>,
    state: State,
    /// The step that was done last.
    last: Option<Last>,
    session: Session,
    noticed: Noticed,
    /// Socket to which the previous trainer of the ring connects; none once the ring stands.
    listener: Option<TcpListener>,
    termination: Termination,
    /// Log of headers, which trainer 0 writes in a pod.
    record: Option<Record>,
}

impl Process {
    fn run(mut self) -> anyhow::Result<ExitCode> {
        self.termination.set(self.session.ender());
        let wait = self.session.watcher();
        let ended = move || while wait(Duration::MAX).is_none() {};
        let patience = Duration::from_secs(self.session.settings().stalled_after_seconds.into());
        stuck::watch(ended, patience, &self.noticed, || {
            last_words("the job has ended and the main thread stands still");
            std::process::exit(3);
        })?;
        let ending = match self.connect_ring() {
            Ok(mut ring) => self.train(&mut ring),
            Err(ending) => ending,
        };
        self.noticed.set();
        let outcome = self.close(ending);
        let (message, code) = (outcome.message.clone(), outcome.exit_code);
        self.session.leave(outcome)?;
        if code == 3 {
            return Err(anyhow!(message));
        }
        if !message.is_empty() {
            last_words(&message);
        }
        Ok(ExitCode::from(code))
    }
}
