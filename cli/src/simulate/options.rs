//! Options of `cadre simulate`.
//!
//! In: words. Out: [`SimulateOptions`], every number within its range. Files are not read here.

use std::num::NonZeroU16;
use std::path::PathBuf;

use cadre_simulator::LengthSet;
use clap::{Args, ValueEnum};

/// Options of `cadre simulate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateOptions {
    /// What to simulate.
    #[arg(long, value_enum)]
    pub(crate) table: TableKind,
    /// Document lengths, as a JSON list.
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,
    /// Rules by which documents are drawn from them.
    #[arg(long, value_enum, default_value_t = Set::Pretrain)]
    pub(crate) set: Set,
    /// Seed of the draw.
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,
    /// Batches of a row; times are their mean.
    #[arg(long, default_value = "4")]
    pub(crate) batches: NonZeroU16,
    /// Nodes of eight processors, for `ours`.
    #[arg(long, value_delimiter = ',', default_value = "8,16,32,64", value_name = "N,…")]
    pub(crate) nodes: Vec<NonZeroU16>,
    /// Most slots, for `scale`.
    #[arg(long, default_value = "8192")]
    pub(crate) slots: NonZeroU16,
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
    /// Its name in files.
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
