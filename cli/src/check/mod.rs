//! `cadre check`: tries a job of PyTorch with the job's own script.
//!
//! In: the command of a rank, or of torchrun. Out: a table, or a line of JSON for each check, on stdout, and whether anything
//! was found. The script is started three times, without a pool: twice with all ranks, then with one that is handed what
//! the others had. What is tried, and how, decides the Python package (`python/cadre/_check.py`), whose hooks are on where
//! `CADRE_CHECK` is set; here processes are started and ended, and what they said is put together.
//!
//! Processes end with this one.

mod options;
mod ranks;

use std::path::{Path, PathBuf};

use cadre_crds::k8s_openapi::api::core::v1::Container;
use cadre_supervisor::launcher;
use serde::{Deserialize, Serialize};

use crate::printed;
pub(crate) use options::CheckOptions;
use ranks::{Pass, RanksError, run};

/// What a script has to have before `cadre check` can try it.
const LINES: &str = "cadre.init(model, steps=N) before the loop, and `for batch in cadre.batches(loader):` for the loop";

/// Why a job cannot be tried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error("the command {problem}; {remedy}")]
    Launcher { problem: String, remedy: &'static str },
    #[error(transparent)]
    Ranks(#[from] RanksError),
    #[error("the job made no step: it lacks the hooks that a check needs; add two lines: {LINES}")]
    NoHooks { log: Vec<String> },
    #[error(
        "the loop over cadre.batches ended in rank {rank} before the check did; let it run as long as there are batches, and give the loader 2 updates or more"
    )]
    Short { rank: u16, log: Vec<String> },
    #[error("rank {rank} ended with {how} before anything was tried, as it may without a check")]
    Broken { rank: u16, how: String, log: Vec<String> },
    #[error("cannot keep what ranks tell in {}: {source}", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}; the package cadre is of another build", path.display())]
    Malformed { path: PathBuf, source: serde_json::Error },
}

impl CheckError {
    /// The last lines of the log of the rank that failed.
    pub(crate) fn log(&self) -> &[String] {
        match self {
            Self::NoHooks { log } | Self::Short { log, .. } | Self::Broken { log, .. } => log,
            Self::Launcher { .. }
            | Self::Ranks(_)
            | Self::Folder { .. }
            | Self::Malformed { .. } => &[],
        }
    }
}

/// The verdict of a check.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Finding {
    check: String,
    verdict: Verdict,
    detail: String,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Found,
    /// Not tried: the job has nothing that the check could be made with.
    #[serde(rename = "not tried")]
    NotTried,
}

/// Tries a job. Returns what to print, and whether all checks found nothing.
pub(crate) fn check(options: &CheckOptions) -> Result<(String, bool), CheckError> {
    let container = Container { command: Some(options.command.clone()), ..Container::default() };
    if let Some((problem, remedy)) = launcher::refused(&container) {
        return Err(CheckError::Launcher { problem, remedy });
    }
    let folder = tempfile::tempdir()
        .map_err(|source| CheckError::Folder { path: std::env::temp_dir(), source })?;
    let findings = try_all(options, folder.path(), launcher::is_launcher(&container))?;
    let is_clean = findings.iter().all(|it| it.verdict != Verdict::Found);
    let text =
        if options.json { findings.iter().map(printed::json).collect() } else { table(&findings) };
    Ok((text, is_clean))
}

fn try_all(
    options: &CheckOptions,
    folder: &Path,
    launches: bool,
) -> Result<Vec<Finding>, CheckError> {
    let ranks = options.ranks.get();
    for pass in [Pass::Base, Pass::Again, Pass::One] {
        let count = if pass == Pass::One { 1 } else { ranks };
        let own = folder.join(pass.name());
        std::fs::create_dir_all(&own)
            .map_err(|source| CheckError::Folder { path: own.clone(), source })?;
        let ended = run(&options.command, pass, (folder, launches), count)?;
        let is_there = |name: &str, rank| own.join(format!("{name}-{rank}")).exists();
        let Some(rank) = (0..count).find(|rank| !is_there("ended", *rank)) else { continue };
        let log = ended.said(rank);
        // What the job does under a probe is a finding, whatever it is.
        if pass == Pass::One
            && let Ok(about) = std::fs::read_to_string(folder.join("trying"))
        {
            let last = log.last().map_or("", |it| it.trim());
            let detail = format!("the job ended with {}: {last}", ended.how(rank));
            let mut findings = read(folder)?;
            findings.push(Finding { check: about, verdict: Verdict::Found, detail });
            return Ok(findings);
        }
        let how = ended.how(rank);
        return Err(match (ended.is_success(), (0..count).any(|rank| is_there("joined", rank))) {
            (true, false) => CheckError::NoHooks { log },
            (true, true) => CheckError::Short { rank, log },
            (false, _) => CheckError::Broken { rank, how, log },
        });
    }
    read(folder)
}

/// What the ranks have found.
fn read(folder: &Path) -> Result<Vec<Finding>, CheckError> {
    let path = folder.join("findings.jsonl");
    let text = std::fs::read_to_string(&path)
        .map_err(|source| CheckError::Folder { path: path.clone(), source })?;
    let line = |it| {
        serde_json::from_str(it)
            .map_err(|source| CheckError::Malformed { path: path.clone(), source })
    };
    text.lines().map(line).collect()
}

fn table(findings: &[Finding]) -> String {
    let mut table = printed::table();
    for Finding { check, verdict, detail } in findings {
        let verdict = match verdict {
            Verdict::Ok => "ok",
            Verdict::Found => "FOUND",
            Verdict::NotTried => "not tried",
        };
        table.add_row([check.as_str(), verdict, detail]);
    }
    let count = |of| findings.iter().filter(|it| it.verdict == of).count();
    let found = match count(Verdict::Found) {
        0 => "nothing was found".to_owned(),
        some => format!("{some} of {} checks found something", findings.len()),
    };
    let not_tried = match count(Verdict::NotTried) {
        0 => String::new(),
        some => format!("; {some} not tried"),
    };
    format!("{table}\n{found}{not_tried}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_that_were_not_tried_are_counted_below_the_table() {
        let last = |verdicts: &[Verdict]| {
            let finding = |verdict: &Verdict| Finding {
                check: "a check".into(),
                verdict: *verdict,
                detail: String::new(),
            };
            let table = table(&verdicts.iter().map(finding).collect::<Vec<_>>());
            table.lines().last().expect("a table has lines").to_owned()
        };
        assert_eq!(last(&[Verdict::Ok]), "nothing was found");
        assert_eq!(last(&[Verdict::Ok, Verdict::NotTried]), "nothing was found; 1 not tried");
        let both = [Verdict::Found, Verdict::NotTried, Verdict::NotTried];
        assert_eq!(last(&both), "1 of 3 checks found something; 2 not tried");
    }
}
