//! `cadre doctor`: what this machine has for a job, which path each pair of processes would take, what is missing and how to get
//! it.
//!
//! In: manifests, if there are any. Out: a report, and one line where they ask for what is not there. Paths are found by trying
//! them, the GPU by opening it, limits by asking the system. No process is started, nothing stays.

mod devices;
mod machine;
mod pairs;

use std::fmt::Write as _;
use std::path::PathBuf;

use cadre_crds::validate::Refusal;
use cadre_crds::{Encryption, TrainingJob};
use clap::Args;
use serde::Serialize;

use self::pairs::Pair;
use crate::choices::{EngineChoice, ExchangeChoice};
use crate::manifests::{Declared, DeclaredError, declared};
use crate::printed;
use crate::run::exchange;

/// Options of `cadre doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorOptions {
    /// Manifest with a pool and a job: say whether this machine has what they ask for; may be repeated.
    #[arg(short, long = "file", value_name = "FILE", num_args = 1..)]
    files: Vec<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What manifests ask of the machine; without manifests, what workers choose by default.
struct Asked {
    trainers: u64,
    /// Choice of the trainers, then that of the servers.
    exchange: [ExchangeChoice; 2],
    engine: [EngineChoice; 2],
    encryption: Option<Encryption>,
}

impl Asked {
    fn engine(&self, engine: EngineChoice) -> bool {
        self.engine.contains(&engine)
    }

    fn exchange(&self, exchange: ExchangeChoice) -> bool {
        self.exchange.contains(&exchange)
    }
}

/// One thing that a machine has or has not.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// The machine has it.
    Ok,
    /// The machine has it not, and no manifest asks for it.
    Absent,
    /// The machine has it not, and a manifest asks for it.
    Missing,
}

/// A setting that somebody has made.
#[derive(Debug, Serialize)]
struct Setting {
    name: String,
    value: String,
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    pairs: Vec<Pair>,
    settings: Vec<Setting>,
}

/// Looks at the machine. Returns what to print; and, in one line, what a manifest asks for that is missing.
pub(crate) fn doctor(options: &DoctorOptions) -> Result<(String, Option<String>), DeclaredError> {
    let asked = asked(&options.files)?;
    let findings = machine::findings(&asked);
    let is_there = |name: &str| findings.iter().any(|it| it.name == name && it.state == State::Ok);
    let pairs = pairs::pairs(&asked, is_there);
    let report = Report { findings, pairs, settings: settings(&asked, !options.files.is_empty()) };
    let missing = report.findings.iter().find(|it| it.state == State::Missing);
    let missing = missing.map(|it| {
        let remedy = it.remedy.as_deref().unwrap_or("ask for something else");
        format!("the manifest asks for {}, which is not there: {}; {remedy}", it.name, it.what)
    });
    let text = if options.json { printed::json(&report) } else { draw(&report) };
    Ok((text, missing))
}

fn asked(files: &[PathBuf]) -> Result<Asked, DeclaredError> {
    let (auto, exchange) = ([EngineChoice::Auto; 2], [ExchangeChoice::Auto; 2]);
    if files.is_empty() {
        return Ok(Asked { trainers: 1, exchange, engine: auto, encryption: None });
    }
    let Declared { job, trainer, server, .. } = declared(files)?;
    exchange::check_exchange(&job, trainer.as_ref(), server.as_ref())
        .map_err(|it| refused(&job, it))?;
    let trained = match trainer {
        Some(it) => (it.engine, it.process.exchange),
        None => (auto[0], exchange::of_another(&job).map_err(|it| refused(&job, it))?),
    };
    let served = server.map_or((auto[0], exchange[0]), |it| (it.engine, it.process.exchange));
    Ok(Asked {
        trainers: u64::from(job.spec.nodes) * u64::from(job.spec.procs_per_node),
        exchange: [trained.1, served.1],
        engine: [trained.0, served.0],
        encryption: job.spec.attention.encryption,
    })
}

fn refused(job: &TrainingJob, refusal: Refusal) -> DeclaredError {
    let name = job.metadata.name.clone().unwrap_or_default();
    DeclaredError::Refused { kind: TrainingJob::KIND, name, refusal }
}

/// What the manifests say, and the environment; secrets by name alone.
fn settings(asked: &Asked, has_manifests: bool) -> Vec<Setting> {
    let mut all = Vec::new();
    let mut say = |name: &str, value: String| all.push(Setting { name: name.to_owned(), value });
    if has_manifests {
        let [trainers, servers] = asked.exchange.map(exchange::name);
        say("--exchange of trainers", trainers.to_owned());
        say("--exchange of servers", servers.to_owned());
        let [trainers, servers] = asked.engine.map(machine::engine_name);
        say("--engine of trainers", trainers.to_owned());
        say("--engine of servers", servers.to_owned());
        let encryption = asked.encryption.map(Encryption::word);
        let encryption = encryption.unwrap_or("Off with `cadre run`, Tcp in a cluster");
        say("spec.attention.encryption", encryption.to_owned());
    }
    let mut set: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with("CADRE_"))
        .collect();
    set.sort();
    for (name, value) in set {
        let is_secret = name.contains("TOKEN") || name.contains("SECRET");
        let value = if is_secret { "(not shown)".into() } else { value };
        say(&name, value.to_string_lossy().into_owned());
    }
    all
}

/// Why nothing that is written to a string fails.
const GROWS: &str = "a string takes what is written to it";

fn draw(report: &Report) -> String {
    let Report { findings, pairs, settings } = report;
    let mut text = String::new();
    let mut table = printed::table();
    for Finding { name, state, what, .. } in findings {
        let state = match state {
            State::Ok => "ok",
            State::Absent => "absent",
            State::Missing => "MISSING",
        };
        table.add_row([*name, state, what.as_str()]);
    }
    writeln!(text, "{table}").expect(GROWS);
    for Finding { name, state, remedy, .. } in findings {
        if let (Some(remedy), State::Absent | State::Missing) = (remedy, state) {
            writeln!(text, "{name}: {remedy}").expect(GROWS);
        }
    }
    let mut table = printed::table();
    table.set_header(["rows between", "come by"]);
    for Pair { between, path } in pairs {
        table.add_row([*between, path.as_str()]);
    }
    writeln!(text, "{table}").expect(GROWS);
    if !settings.is_empty() {
        let mut table = printed::table();
        table.set_header(["setting", "in force"]);
        for Setting { name, value } in settings {
            table.add_row([name, value]);
        }
        writeln!(text, "{table}").expect(GROWS);
    }
    text
}
