//! Options of `cadre simulate`.
//!
//! In: words. Out: [`SimulateOptions`], every number within its range. Files are not read here.

use std::num::NonZeroU16;
use std::path::PathBuf;

use cadre_simulator::LengthSet;
use clap::{Args, ValueEnum};

use crate::arguments::JobOptions;

/// Options of `cadre simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateOptions {
    /// What to simulate.
    #[arg(
        long,
        value_enum,
        required_unless_present = "files",
        // As for the workload of `cadre plan`.
        conflicts_with_all = [
            "files", "tolerance", "weights", "profile", "model", "layers", "tokens", "cap", "nano_batches", "memory_gib",
            "lanes", "servers", "lose", "slow_nic", "fsdp"
        ]
    )]
    pub(crate) table: Option<TableKind>,
    #[command(flatten)]
    pub(crate) job: JobOptions,
    /// With -f: processors of a rank and of a server.
    #[arg(long, default_value = "1", value_name = "N", requires = "files")]
    pub(crate) lanes: NonZeroU16,
    /// With -f: dedicated servers; default: those of the pool, or as many as keep up if it asks for none.
    #[arg(long, value_name = "N", requires = "files")]
    pub(crate) servers: Option<NonZeroU16>,
    /// With -f: numbers of servers that are lost at once.
    #[arg(long, value_delimiter = ',', value_name = "N,…", requires = "files")]
    pub(crate) lose: Vec<NonZeroU16>,
    /// With -f: how many times slower one place's links are.
    #[arg(long, default_value = "4", value_name = "TIMES", requires = "files")]
    pub(crate) slow_nic: NonZeroU16,
    /// With -f: weights are sharded over all trainers, gathered before each layer, and gradients spread after it.
    #[arg(long, requires = "files")]
    pub(crate) fsdp: bool,
    /// Document lengths, as a JSON list; with -f what documents are cut at, `sampler` for the list that ships with Cadre;
    /// default: the job's.
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,
    /// Rules by which documents are drawn from them.
    #[arg(long, value_enum, default_value_t = Set::Pretrain, conflicts_with = "files")]
    pub(crate) set: Set,
    /// Seed of the draw.
    #[arg(long, default_value = "1", conflicts_with = "files")]
    pub(crate) seed: u64,
    /// Batches of a row; times are their mean.
    #[arg(long, default_value = "4", conflicts_with = "files")]
    pub(crate) batches: NonZeroU16,
    /// Nodes of eight processors, for `ours`: 8 and more, so that its longest sequences fit.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,16,32,64",
        value_name = "N,…",
        conflicts_with = "files",
        value_parser = clap::value_parser!(u16).range(8..)
    )]
    pub(crate) nodes: Vec<u16>,
    /// Most slots, for `scale`, which begins with 64.
    #[arg(long, default_value = "8192", conflicts_with = "files", value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) slots: u32,
    /// Print one JSON object a row.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the table's picture to a directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) figures: Option<PathBuf>,
}

/// Which table.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum TableKind {
    /// The published evaluation, with the error of each row.
    Published,
    /// Cadre beside it, with the gain split by cause.
    Ours,
    /// Slots of unlike speed, and slots that come and go.
    Churn,
    /// Planning time as slots and documents grow; measured on this machine.
    Scale,
}

/// Which rules of drawing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Set {
    /// All lengths grow with the longest document.
    Pretrain,
    /// Some long documents become the longest.
    Prolong,
}

impl Set {
    /// Name of the set in file names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pretrain => "pretrain",
            Self::Prolong => "prolong",
        }
    }
}

impl From<Set> for LengthSet {
    fn from(set: Set) -> Self {
        match set {
            Set::Pretrain => Self::Pretrain,
            Set::Prolong => Self::Prolong,
        }
    }
}
