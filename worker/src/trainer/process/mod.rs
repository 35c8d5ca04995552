//! The process of a trainer: joins the job, runs steps, writes checkpoints, leaves.
//!
//! In: the environment contract and [`TrainArgs`]. Out: an exit code: 0, 2 for bad input, 3 when the job
//! cannot go on, in a pod 143 when it was stopped before its last step. Trainer 0 also hosts the conductor,
//! in its IO thread.
//!
//! Invariant: parameters change only at the end of a step that every trainer finished, so after any
//! failure each survivor can write the checkpoint of the last completed step, with the same bytes.

mod closing;
mod prepare;
mod record;
mod steps;

use std::net::TcpListener;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use cadre_control::client;
use cadre_kernels::{Choice, Threads};

use self::prepare::Failure;
use self::record::Record;
use super::checkpoint::State;
use super::loader::Loader;
use super::session::Session;
use super::step::Trainer;
use crate::io::{After, Request, exchange};
use crate::process::{Termination, last_words};
use crate::supervisor::Settings;
use crate::trace::Tracer;

/// What `cadre train` is given.
#[derive(Clone, Debug)]
pub struct TrainArgs {
    /// Folder of documents, one a file.
    pub data: PathBuf,
    /// Name of the model's sizes.
    pub model: String,
    /// Steps of the job.
    pub steps: NonZeroU64,
    /// Rows of this trainer in each nano-batch.
    pub tokens: NonZeroU32,
    /// Longest document, in rows.
    pub cap: NonZeroU32,
    /// Lengths that documents are cut at; the shipped list if absent.
    pub lengths: Option<PathBuf>,
    /// Nano-batches of a step.
    pub nano_batches: NonZeroU32,
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
    /// What moves rows.
    pub exchange: exchange::Choice,
    /// Steps between checkpoints; 0: at the end only.
    pub checkpoint_every: u64,
    /// Start of the sample text.
    pub prompt: String,
}

/// Exit code of a trainer in a pod that was stopped: what a process ended by SIGTERM has.
const STOPPED: u8 = 143;
/// Longest wait for the controller to read the last words.
const FAREWELL: Duration = Duration::from_secs(2);
/// That of a trainer in a pod that is done: an operator that takes over a lease (15 s) learns the last figures too.
const LONG_FAREWELL: Duration = Duration::from_secs(20);

/// Trains until the job ends.
///
/// # Errors
///
/// The job failed, or this process cannot join it: exit code 3. Bad input is printed here: 2.
pub fn trainer_main(args: TrainArgs) -> anyhow::Result<ExitCode> {
    crate::process::arm_parent_death()?;
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
    rank: u16,
    loader: Loader,
    trainer: Trainer,
    state: State,
    settings: Settings,
    session: Session,
    listener: TcpListener,
    io: std::thread::JoinHandle<After>,
    control: client::Sender,
    tracer: Tracer,
    termination: Termination,
    /// Of trainer 0 in a pod.
    record: Option<Record>,
    /// The operator is the controller; where a pod ends before its job, its exit code has to say so.
    pod: bool,
}

impl Process {
    fn run(mut self) -> anyhow::Result<ExitCode> {
        let handle = self.session.handle().clone();
        self.termination.set(move || handle.send(Request::Terminate));
        let ending = match self.connect_ring() {
            Ok(mut ring) => self.train(&mut ring),
            Err(ending) => ending,
        };
        let outcome = self.close(ending);
        self.session.handle().send(Request::Leave);
        let finished = outcome.report();
        if self.control.send(finished).is_ok() {
            // The exit code says it too, if the controller is away.
            let is_done = self.pod && outcome.code == 0;
            self.control.leave(if is_done { LONG_FAREWELL } else { FAREWELL }).ok();
        }
        if self.io.join().is_err() {
            anyhow::bail!("the io thread of trainer {} panicked", self.rank);
        }
        match outcome.error {
            Some(message) if outcome.code == 3 => Err(anyhow!(message)),
            Some(message) => {
                last_words(&message);
                Ok(ExitCode::from(outcome.code))
            }
            None => Ok(ExitCode::from(outcome.code)),
        }
    }
}
