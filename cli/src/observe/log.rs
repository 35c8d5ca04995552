//! What was observed: a file of JSON lines for each rank, as `python/cadre/_observe.py` writes them.
//!
//! ```json
//! {"cadre_observe": 1, "rank": 0, "ranks": 2, "device": "cpu", "layers": ["causal", "none"], "heads": [4, 2, 64]}
//! {"step": 0, "seconds": 0.4, "seconds_before": 0.01, "seconds_forward": 0.1, "documents": [[512, 80], [90]]}
//! ```
//!
//! In: files or folders. Out: a [`Log`] of the steps that every rank has, of the newest start of the job. Documents are by
//! micro-batch. A line that was cut off where a job was killed is left out if it is the last one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cadre_planner::Heads;
use cadre_step::layers::Kind;
use serde::Deserialize;

use crate::plan::size::observed::Documents;

const VERSION: u32 = 1;

/// The first line that a start of a rank logs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(super) struct Head {
    cadre_observe: u32,
    rank: u16,
    pub(super) ranks: u16,
    /// `cpu`, `cuda` or other.
    pub(super) device: String,
    layers: Vec<String>,
    /// Query heads, KV heads, head dim, of layers that say no others.
    pub(super) heads: [u16; 3],
}

/// A step of a rank.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    step: u64,
    /// Seconds from its first forward to the end of the optimizer's step.
    seconds: f64,
    /// Seconds between the end of the step before and this one.
    seconds_before: f64,
    seconds_forward: Option<f64>,
    documents: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Either {
    Head(Head),
    Line(Line),
}

/// A step of all ranks.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Seconds of the slowest rank.
    pub(super) seconds: f64,
    pub(super) seconds_before: f64,
    /// Seconds in forwards, by rank; empty unless all ranks log them.
    pub(super) forward: Option<Vec<f64>>,
    pub(super) documents: Documents,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Log {
    /// Head of rank 0. All ranks have the same but for their number.
    pub(super) head: Head,
    pub(super) layers: Vec<Option<Kind>>,
    pub(super) steps: Vec<Step>,
}

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error("{}: {source}; give the files that cadre.observe wrote, or their folder", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{}: there is no .jsonl file in it; give the folder that cadre.observe was told", path.display())]
    NoFile { path: PathBuf },
    #[error("{} line {line}: {source}; give files that cadre.observe wrote", path.display())]
    Malformed { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{} line {line}: {why}", path.display())]
    Line { path: PathBuf, line: usize, why: String },
    #[error("{}: it has no line with cadre_observe; give files that cadre.observe wrote", path.display())]
    NoHead { path: PathBuf },
    #[error(
        "{}: it is of cadre_observe {found}, this build reads {VERSION}; observe again with this build's package",
        path.display()
    )]
    Version { path: PathBuf, found: u32 },
    #[error("{}: layers: {why}, or none; give `shape` to cadre.observe", path.display())]
    Kind { path: PathBuf, why: String },
    #[error("{}: {what} are others than those of {}; give files of one job", path.display(), other.display())]
    Differs { path: PathBuf, other: PathBuf, what: &'static str },
    #[error("rank {rank} has two files, {} and {}; give one", one.display(), other.display())]
    Twice { rank: u16, one: PathBuf, other: PathBuf },
    #[error("rank {rank} of {ranks} is missing; give its file too")]
    Missing { rank: u16, ranks: u16 },
    #[error(
        "there is no step that all {ranks} ranks have ended after the first one; let the job run for a few steps"
    )]
    NoSteps { ranks: u16 },
}

impl Log {
    /// Reads the files of all ranks.
    pub(super) fn read(given: &[PathBuf]) -> Result<Self, LogError> {
        let mut by_rank: BTreeMap<u16, (PathBuf, Head, BTreeMap<u64, Line>)> = BTreeMap::new();
        for path in files(given)? {
            let (head, lines) = read(&path)?;
            if let Some((one, ..)) = by_rank.get(&head.rank) {
                return Err(LogError::Twice { rank: head.rank, one: one.clone(), other: path });
            }
            by_rank.insert(head.rank, (path, head, lines));
        }
        let first = by_rank.values().next().map(|it| (it.0.clone(), it.1.clone()));
        let (other, head) = first.expect("a list of files without a file was refused");
        for (path, its, _) in by_rank.values() {
            let what = [
                ("the numbers of ranks", its.ranks == head.ranks),
                ("layers", its.layers == head.layers),
                ("heads", its.heads == head.heads),
            ];
            if let Some((what, _)) = what.into_iter().find(|it| !it.1) {
                return Err(LogError::Differs { path: path.clone(), other, what });
            }
        }
        if let Some(rank) = (0..head.ranks).find(|it| !by_rank.contains_key(it)) {
            return Err(LogError::Missing { rank, ranks: head.ranks });
        }
        let [query, kv, dim] = head.heads;
        let heads = Heads { query, kv, dim };
        let layers = head.layers.iter().map(|it| match it.as_str() {
            "none" => Ok(None),
            kind => Kind::read(kind, heads).map(Some),
        });
        let layers = layers.collect::<Result<_, _>>();
        let layers = layers.map_err(|why| LogError::Kind { path: other, why: why.to_string() })?;
        let lines: Vec<_> = by_rank.into_values().map(|it| it.2).collect();
        // The first step has what happens once: allocation, compilation, the first collectives.
        let common =
            lines[0].keys().filter(|it| **it > 0 && lines.iter().all(|of| of.contains_key(it)));
        let steps: Vec<Step> = common
            .map(|it| Step::of(&lines.iter().map(|of| &of[it]).collect::<Vec<_>>()))
            .collect();
        if steps.is_empty() {
            return Err(LogError::NoSteps { ranks: head.ranks });
        }
        Ok(Self { head, layers, steps })
    }
}

impl Step {
    /// From the lines of all ranks.
    fn of(lines: &[&Line]) -> Self {
        let most = |of: fn(&Line) -> f64| lines.iter().map(|it| of(it)).fold(0.0, f64::max);
        let micro_batches = lines.iter().map(|it| it.documents.len()).max().unwrap_or(0);
        let at = |micro_batch: usize| {
            let own = |it: &&Line| it.documents.get(micro_batch).cloned().unwrap_or_default();
            lines.iter().map(own).collect()
        };
        Self {
            seconds: most(|it| it.seconds),
            seconds_before: most(|it| it.seconds_before),
            forward: lines.iter().map(|it| it.seconds_forward).collect(),
            documents: (0..micro_batches).map(at).collect(),
        }
    }
}

/// The files named, and those in the folders named.
fn files(given: &[PathBuf]) -> Result<Vec<PathBuf>, LogError> {
    let mut all = Vec::new();
    for path in given {
        let unreadable = |source| LogError::Unreadable { path: path.clone(), source };
        if !path.is_dir() {
            all.push(path.clone());
            continue;
        }
        let mut found = Vec::new();
        for entry in path.read_dir().map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            if file.extension().is_some_and(|it| it == "jsonl") {
                found.push(file);
            }
        }
        if found.is_empty() {
            return Err(LogError::NoFile { path: path.clone() });
        }
        found.sort();
        all.append(&mut found);
    }
    Ok(all)
}

/// The newest start of a rank's file.
fn read(path: &Path) -> Result<(Head, BTreeMap<u64, Line>), LogError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| LogError::Unreadable { path: path.to_owned(), source })?;
    let mut newest: Option<(Head, BTreeMap<u64, Line>)> = None;
    let whole = text.ends_with('\n');
    let mut lines = text.lines().enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        let at = index + 1;
        let refuse =
            |why: &str| LogError::Line { path: path.to_owned(), line: at, why: why.into() };
        let either = match serde_json::from_str(line) {
            Ok(either) => either,
            Err(_) if !whole && lines.peek().is_none() => break,
            Err(source) => {
                return Err(LogError::Malformed { path: path.to_owned(), line: at, source });
            }
        };
        match either {
            Either::Head(head) if head.cadre_observe != VERSION => {
                return Err(LogError::Version { path: path.to_owned(), found: head.cadre_observe });
            }
            Either::Head(head) if head.heads.contains(&0) || head.ranks == 0 => {
                return Err(refuse("heads or ranks is 0; give at least 1"));
            }
            Either::Head(head) => newest = Some((head, BTreeMap::new())),
            Either::Line(line) => {
                if line.documents.iter().flatten().any(|it| *it == 0) {
                    return Err(refuse("a document has 0 rows; every document has a token"));
                }
                let Some((_, steps)) = &mut newest else { break };
                steps.insert(line.step, line);
            }
        }
    }
    newest.ok_or_else(|| LogError::NoHead { path: path.to_owned() })
}
