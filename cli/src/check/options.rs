//! Options of `cadre check`.
//!
//! In: words. Out: [`CheckOptions`]. Nothing is started here.

use std::num::NonZeroU16;

use clap::Args;

/// Options of `cadre check`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckOptions {
    /// Ranks that the job is tried with.
    #[arg(long, value_name = "N", default_value = "2")]
    pub(crate) ranks: NonZeroU16,
    /// Print one JSON object a check.
    #[arg(long)]
    pub(crate) json: bool,
    /// The command of a rank, such as `python train.py`, or `torchrun train.py`, with its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<String>,
}
