//! The `cadre` command.
//!
//! In: the command line. Out: an exit code: 0, 1 where a check found something, 2 for bad input, 3 when the job failed, 130
//! when it was interrupted. Errors are one line on stderr that starts with `error: `.
//!
//! Subcommands do the work; here is only who is called and how it ends.

mod arguments;
mod calibrate;
mod check;
mod choices;
#[cfg(feature = "cluster")]
mod cluster;
mod command;
mod doctor;
mod face;
mod launch;
mod manifests;
mod model_options;
mod observe;
mod out;
mod plan;
mod printed;
mod ranks;
mod run;
mod simulate;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use cadre_trainer::{TrainArgs, trainer_main};
use cadre_worker::process::{arm_parent_death, last_words};
use cadre_worker::{ServerArgs, server_main};
use clap::{CommandFactory, Parser};
use tracing_subscriber::EnvFilter;

use command::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            let printed = error.print();
            return if printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(BAD_INPUT) };
        }
        Err(error) => return complain(&arguments::one_line(&error), BAD_INPUT),
    };
    match cli.command {
        Command::Run(options) => match run::run(&options) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                for line in error.log() {
                    let _ = writeln!(std::io::stderr(), "  {line}");
                }
                complain(&error.to_string(), error.exit_code())
            }
        },
        Command::Plan(options) => match plan::plan(&options) {
            Ok(text) => print(&text),
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        Command::Calibrate(options) => match calibrate::calibrate(&options) {
            Ok(text) => print(&text),
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        Command::Simulate(options) => match simulate::simulate(&options) {
            Ok(text) => print(&text),
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        Command::Check(options) => match check::check(&options) {
            Ok((text, is_clean)) => {
                let printed = print(&text);
                if is_clean { printed } else { ExitCode::from(CHECK_FAILED) }
            }
            Err(error) => {
                for line in error.log() {
                    let _ = writeln!(std::io::stderr(), "  {line}");
                }
                complain(&error.to_string(), BAD_INPUT)
            }
        },
        Command::Doctor(options) => match doctor::doctor(&options) {
            Ok((text, missing)) => {
                let printed = print(&text);
                missing.map_or(printed, |it| complain(&it, BAD_INPUT))
            }
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        Command::Observe { command } => match observe::observe(&command) {
            Ok(text) => print(&text),
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        #[cfg(feature = "cluster")]
        Command::Status(options) => answer(cluster::status(&options)),
        #[cfg(feature = "cluster")]
        Command::Explain(options) => answer(cluster::explain_object(&options)),
        #[cfg(feature = "cluster")]
        Command::Top(options) => answer(cluster::top(&options)),
        #[cfg(feature = "cluster")]
        Command::Logs(options) => answer(cluster::logs(&options)),
        #[cfg(feature = "cluster")]
        Command::Bundle(options) => answer(cluster::bundle(&options)),
        Command::Train(options) => match ranks::Ranks::of_this_pod() {
            Ok(None) => worker(|| trainer_main(TrainArgs::from(options))),
            Ok(Some(ranks)) => in_all(ranks),
            Err(error) => complain(&error.to_string(), BAD_INPUT),
        },
        Command::Serve(options) => worker(|| server_main(ServerArgs::from(options))),
        Command::Launch { words } => complain(&launch::launch(&words).to_string(), BAD_INPUT),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "cadre", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Version => print(&format!("cadre {}\n", env!("CARGO_PKG_VERSION"))),
    }
}

const BAD_INPUT: u8 = 2;
/// A check found something.
const CHECK_FAILED: u8 = 1;

/// Runs this command once for each of these ranks.
fn in_all(ranks: ranks::Ranks) -> ExitCode {
    if let Err(error) = arm_parent_death() {
        return complain(&error.to_string(), BAD_INPUT);
    }
    let program = std::env::current_exe().map_err(ranks::Error::Runtime);
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let ended = program.and_then(|it| ranks.run(it.as_os_str(), &arguments));
    ended.map_or_else(|error| complain(&error.to_string(), 3), ExitCode::from)
}

/// Prints what a cluster said, or why it did not.
#[cfg(feature = "cluster")]
fn answer(text: Result<String, cluster::Error>) -> ExitCode {
    match text {
        Ok(text) => print(&text),
        Err(error) => complain(&error.to_string(), BAD_INPUT),
    }
}

/// Runs a worker whose log is its stderr.
fn worker(main: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // The subscriber would panic where the log is on a full disk.
        .log_internal_errors(false)
        .with_env_filter(EnvFilter::try_from_env("CADRE_LOG").unwrap_or_else(|_| "info".into()))
        .init();
    main().unwrap_or_else(|error| complain(&account(&error), 3))
}

/// An error with its causes, but for those that it names itself.
fn account(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{colon}{cause}");
        }
    }
    text
}

fn complain(message: &str, code: u8) -> ExitCode {
    last_words(message);
    ExitCode::from(code)
}

/// Prints to stdout; a reader that has gone away is no fault of ours.
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => complain(&format!("stdout: {error}"), BAD_INPUT),
    }
}
