//! Options of `cadre observe`.
//!
//! In: words. Out: [`ObserveCommand`], every number within its range. Files are not read here.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::{Args, Subcommand};

/// What to do with what was observed.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ObserveCommand {
    /// Say what time a job loses to imbalance, and what a pool would gain.
    Report(ReportOptions),
}

/// Options of `cadre observe report`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportOptions {
    /// Files of all ranks, or the folder that holds them.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Calibration: a file of `cadre calibrate`, or h200-hopper, h100-hopper or h200-fa2; default for a job on GPUs:
    /// h200-hopper.
    #[arg(long, value_name = "NAME")]
    pub(crate) profile: Option<String>,
    /// Dedicated servers of the pool; default: a slot in place at each rank.
    #[arg(long, value_name = "N")]
    pub(crate) servers: Option<NonZeroU16>,
    /// Processors of a rank and of a server.
    #[arg(long, default_value = "1", value_name = "N")]
    pub(crate) lanes: NonZeroU16,
    /// Print one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
