//! Options of `cadre run`, `plan`, `calibrate`, and of workers.
//!
//! In: words. Out: options, every number within its range. Nothing is read or started here. Those of other commands are beside
//! what carries these out; [`crate::command`] has all commands.
//!
//! The arguments of a trainer's container are read by the same [`TrainOptions`] as `cadre train`'s,
//! so that a manifest with a wrong argument is refused before anything starts.

mod worker;

use std::num::{NonZeroU16, NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use cadre_planner::Tolerance;
use cadre_supervisor::Fault;
use cadre_trainer::model::Pattern;
use clap::{Args, ValueEnum};

use crate::choices::{EngineChoice, ExchangeChoice, Place};

pub(crate) use worker::{Container, ServeOptions, TrainOptions, one_line};

/// Options of `cadre run`; those for trainers override the manifest's.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunOptions {
    /// Manifest with a pool, a job or both; may be repeated.
    #[arg(short, long = "file", value_name = "FILE", required = true, num_args = 1..)]
    pub(crate) files: Vec<PathBuf>,
    /// Steps of the job.
    #[arg(long)]
    pub(crate) steps: Option<NonZeroU64>,
    /// Seed of weights and data.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Directory of documents: one a file, or one a line of .jsonl files.
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Memory of each trainer for rows of others, as it serves in place or stands by.
    #[arg(long, value_name = "MIB", value_parser = up_to::<16_777_216>)]
    pub(crate) memory_mib: Option<NonZeroU32>,
    /// Time without a call although it is its turn after which a trainer stands still, and the attempt ends; above
    /// spec.failurePolicy.suspectAfterSeconds. Default: what the job's spec.failurePolicy.stalledAfterSeconds says.
    #[arg(long, value_name = "SECONDS", value_parser = up_to::<86_400>)]
    pub(crate) stalled_after_seconds: Option<NonZeroU32>,
    /// Calibration that plans are made with: a file of `cadre calibrate`, or h200-hopper, h100-hopper or h200-fa2;
    /// default: what the job's spec.attention.profile says, or nominal costs. A file may also say where the job's workers are
    /// and how fast their links are.
    #[arg(long, value_name = "NAME")]
    pub(crate) profile: Option<String>,
    /// How uneven plans may be, the last finish over the mean of all, for less work of the busiest link: 1 to 2; default: what
    /// the job's spec.attention.tolerance says, or 1.002.
    #[arg(long, value_name = "RATIO")]
    pub(crate) tolerance: Option<Tolerance>,
    /// Directory for results, by default runs/JOB. Where a run has finished, the next free one of DIR-2, DIR-3, … is taken.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome trace of all processes (opens in Perfetto).
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Go on from the newest checkpoint under the directory for results.
    #[arg(long)]
    pub(crate) resume: bool,
    /// Where core attention is computed.
    #[arg(long, value_enum, default_value_t = Place::Pool)]
    pub(crate) attention: Place,
    /// What moves rows between the processes of the job.
    #[arg(long, value_enum)]
    pub(crate) exchange: Option<ExchangeChoice>,
    /// Replay the headers.jsonl of an earlier run.
    #[arg(long, value_name = "FILE")]
    pub(crate) headers: Option<PathBuf>,
    /// What to break, and when.
    // Brackets would be links in documentation.
    #[arg(
        long = "fault",
        value_name = "FAULT",
        help = "Break something: kill-server[:I]@STEP[:fwd|bwd], stop-server…, add-server@…, \
                kill-trainer…; may be repeated"
    )]
    pub(crate) faults: Vec<Fault>,
    /// Leave the slots of dead servers vacant.
    #[arg(long)]
    pub(crate) no_replace: bool,
}

/// A number from 1 to `MOST`, as the field for which an option stands.
fn up_to<const MOST: u32>(text: &str) -> Result<NonZeroU32, String> {
    let number = text.parse().ok().filter(|it: &NonZeroU32| it.get() <= MOST);
    number.ok_or_else(|| format!("write a number from 1 to {MOST}"))
}

/// A job, and what is known of it beside its manifests.
#[derive(Args, Clone, Debug)]
pub(crate) struct JobOptions {
    /// Manifests of a pool and a job: say what pool the job needs and what it gets.
    #[arg(short, long = "file", value_name = "FILE", num_args = 1..)]
    pub(crate) files: Vec<PathBuf>,
    /// With -f: calibration, a file of `cadre calibrate`, or h200-hopper, h100-hopper or h200-fa2; default: the job's.
    /// Without one plans are of nominal costs, and times those of h200-hopper.
    #[arg(long, value_name = "NAME", requires = "files")]
    pub(crate) profile: Option<String>,
    /// How uneven plans may be, the last finish over the mean of all, for less work of the busiest link: 1 to 2; default: with
    /// -f what the job says, or 1.002.
    #[arg(long, value_name = "RATIO")]
    pub(crate) tolerance: Option<Tolerance>,
    /// With -f: sizes of the model, if the job does not run `cadre train`: 8b, 34b, tiny, small, medium.
    #[arg(long, value_name = "NAME", requires = "files")]
    pub(crate) model: Option<String>,
    /// With -f: what the layers are, if the job does not run `cadre train`: full, window:ROWS, chunk:ROWS or none, a list with
    /// commas that repeats over the layers.
    #[arg(long, value_name = "PATTERN", requires = "files")]
    pub(crate) layers: Option<Pattern>,
    /// With -f: rows of each trainer in each nano-batch.
    #[arg(long, requires = "files")]
    pub(crate) tokens: Option<NonZeroU32>,
    /// With -f: longest document.
    #[arg(long, requires = "files")]
    pub(crate) cap: Option<NonZeroU32>,
    /// With -f: nano-batches that go through the model together.
    #[arg(long, requires = "files")]
    pub(crate) nano_batches: Option<NonZeroU32>,
    /// Speed of each slot, 100 the nominal one. With -f: of the servers that the pool asks for, then of the trainers in place;
    /// those left out are nominal.
    #[arg(long, value_delimiter = ',', value_name = "W,…", value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(crate) weights: Vec<u32>,
    /// With -f: memory of a server for rows and results, all lanes together.
    #[arg(long, value_name = "GIB", requires = "files", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) memory_gib: Option<u64>,
}

/// Options of `cadre plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanOptions {
    /// Lengths of documents and the ranks that they fill, as JSON.
    // A requirement is waived where what it asks for cannot be there, so options of a job are named here, too.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present = "files",
        conflicts_with_all = [
            "files", "profile", "model", "layers", "tokens", "cap", "nano_batches", "memory_gib", "nodes", "lengths"
        ]
    )]
    pub(crate) workload: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) job: JobOptions,
    /// With -f: nodes that trainers and servers may have together.
    #[arg(long, value_name = "N", requires = "files")]
    pub(crate) nodes: Option<NonZeroU32>,
    /// With -f: list of lengths that documents are cut at, `sampler` for the list that ships with Cadre; default: the job's.
    #[arg(long, value_name = "FILE", requires = "files")]
    pub(crate) lengths: Option<String>,
    /// Draw slots as bars and documents as colours, before and after, as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,
    /// With --workload: dedicated slots; default: one in place at each rank.
    #[arg(long, value_name = "N", conflicts_with = "files")]
    pub(crate) slots: Option<NonZeroU16>,
    /// Processors of a rank and of a slot; with one, KV heads of a document may part.
    #[arg(long, default_value = "1", value_name = "N")]
    pub(crate) lanes: NonZeroU16,
    /// With --workload: how documents that span ranks are laid out.
    #[arg(long, value_enum, default_value_t = LayoutKind::EndToEnd, conflicts_with = "files")]
    pub(crate) layout: LayoutKind,
    /// With --workload: elements of a row of Q, heads times head dim.
    #[arg(long, default_value_t = 4096, conflicts_with = "files")]
    pub(crate) hidden_q: u32,
    /// With --workload: elements of a row of K, and of V.
    #[arg(long, default_value_t = 1024, conflicts_with = "files")]
    pub(crate) hidden_kv: u32,
    /// With --workload: query heads.
    #[arg(long, default_value = "32", conflicts_with = "files")]
    pub(crate) heads: NonZeroU16,
    /// With --workload: elements of a head.
    #[arg(long, default_value = "128", conflicts_with = "files")]
    pub(crate) head_dim: NonZeroU16,
    /// Print one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// With --workload: write the plan to a file.
    #[arg(long, value_name = "FILE", conflicts_with = "files")]
    pub(crate) out: Option<PathBuf>,
}

/// Options of `cadre calibrate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CalibrateOptions {
    /// Elements of a head; may be repeated.
    #[arg(long, value_name = "DIM", default_value = "64", value_delimiter = ',')]
    pub(crate) head_dim: Vec<NonZeroU16>,
    /// Threads that compute, as many as a server will have.
    #[arg(long, default_value = "1")]
    pub(crate) threads: NonZeroUsize,
    /// What is measured: the GPU where there is one, the CPU otherwise.
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,
    /// The number of the GPU that is measured, of those that the process may see, from 0; default: the first.
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u16>,
    /// On a GPU: speed of the model's linear layers, as measured by your framework.
    #[arg(long, value_name = "TFLOPS")]
    pub(crate) linear_tflops: Option<NonZeroU64>,
    /// Write the calibration to a file instead of stdout.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// How documents that span ranks are laid out.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum LayoutKind {
    /// One piece after the other.
    EndToEnd,
    /// Each rank has a piece of the head and one of the tail.
    HeadTail,
}
