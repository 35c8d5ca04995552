//! The command line: what can be asked of `cadre`.
//!
//! In: words. Out: [`Cli`], every number within its range. Nothing is read or started here.

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::arguments::{CalibrateOptions, PlanOptions, RunOptions, ServeOptions, TrainOptions};
use crate::check::CheckOptions;
#[cfg(feature = "cluster")]
use crate::cluster::{BundleOptions, ExplainOptions, LogsOptions, StatusOptions, TopOptions};
use crate::doctor::DoctorOptions;
use crate::observe::ObserveCommand;
use crate::simulate::SimulateOptions;

/// Runs core attention of long-context training on a pool of attention servers.
#[derive(Debug, Parser)]
#[command(name = "cadre", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train on this machine: read a pool and a job, start their processes, supervise them.
    Run(Box<RunOptions>),
    /// Plan recorded documents over a pool and say what the plan costs; starts nothing.
    Plan(PlanOptions),
    /// Measure this machine's attention and links, for `cadre plan -f`.
    Calibrate(CalibrateOptions),
    /// Simulate training steps on machines that you do not have; starts nothing.
    Simulate(SimulateOptions),
    /// Try a job of PyTorch with its own script: masks, positions, lengths, gradients and bits; exit code 1 on a finding.
    Check(CheckOptions),
    /// Say what this machine has for a job: paths between its processes, GPUs, limits; exit code 2 where a manifest asks for more.
    Doctor(DoctorOptions),
    /// Say what a pool would gain for a job that ran without one, from what cadre.observe of the Python package logged.
    Observe {
        #[command(subcommand)]
        command: ObserveCommand,
    },
    /// Say how all pools and jobs of a cluster are.
    #[cfg(feature = "cluster")]
    Status(StatusOptions),
    /// Say why a pool or a job is as it is, from the object down to the cause, and what to do.
    #[cfg(feature = "cluster")]
    Explain(ExplainOptions),
    /// Show how busy the servers of pools are, now.
    #[cfg(feature = "cluster")]
    Top(TopOptions),
    /// Print the logs of a pool's servers or a job's trainers.
    #[cfg(feature = "cluster")]
    Logs(LogsOptions),
    /// Collect objects, events and logs in an archive for a report; secrets are left out.
    #[cfg(feature = "cluster")]
    Bundle(BundleOptions),
    /// Be one trainer of a job (started by `cadre run` or in a pod).
    #[command(hide = true, args_override_self = true)]
    Train(TrainOptions),
    /// Be one attention server of a pool (started by `cadre run` or in a pod).
    #[command(hide = true, args_override_self = true)]
    Serve(ServeOptions),
    /// Be a program that starts the trainers of a node (started by `cadre run`), and end with `cadre run`.
    #[command(hide = true)]
    Launch {
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Print the version.
    Version,
}

#[cfg(test)]
mod tests;
