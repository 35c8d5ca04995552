//! `cadre simulate`: steps of a training job on machines that one does not have.
//!
//! With `-f` one's own job instead, see [`simulated`]. In: [`SimulateOptions`], a file of document lengths. Out: a table or a line of JSON for each row on stdout, and
//! pictures as SVG files. Nothing is started. All numbers but planning times come from the model of `cadre-simulator`.

mod figures;
mod growth;
mod options;
mod tables;

use std::path::{Path, PathBuf};

use cadre_simulator::{SimulationError, churn, ours, published};
use serde::Serialize;

use crate::plan::size::SizeError;
use crate::plan::size::simulated::{self, Asked};
use crate::printed;
pub(crate) use options::SimulateOptions;
use options::TableKind;

/// Where the published lengths are.
const WHERE: &str = "the published sets are dist_wlbllm.json (pretrain) and dist_prolong.json (prolong) \
                     of github.com/hao-ai-lab/DistCA";

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulateError {
    #[error("--lengths is needed: a JSON list of document lengths; {WHERE}")]
    NoLengths,
    #[error("lengths {}: {source}; give a readable file", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("lengths {}: {source}; expected a JSON list of lengths; {WHERE}", path.display())]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error("lengths {}: {source}", path.display())]
    Simulation { path: PathBuf, source: SimulationError },
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Job(#[from] SizeError),
    #[error("--lengths {}: not UTF-8; give another name", path.display())]
    Name { path: PathBuf },
    #[error("cannot draw {name}: {reason}")]
    Picture { name: &'static str, reason: String },
}

/// Simulates; returns what to print.
pub(crate) fn simulate(options: &SimulateOptions) -> Result<String, SimulateError> {
    let Some(table) = options.table else {
        return of_job(options);
    };
    let path = options.lengths.as_deref().ok_or(SimulateError::NoLengths)?;
    let lengths = read(path)?;
    let refuse = |source| SimulateError::Simulation { path: path.to_owned(), source };
    let (set, seed) = (options.set.into(), options.seed);
    let batches = options.batches.get().into();
    let (text, picture) = match table {
        TableKind::Published => {
            let rows: Result<Vec<_>, _> = published::settings(set)
                .into_iter()
                .map(|it| published::row(it, set, &lengths, seed, batches))
                .collect();
            let rows = rows.map_err(refuse)?;
            let shares = tables::shares(set, &lengths, seed, batches).map_err(refuse)?;
            let text = options.text(&rows, || tables::published(set, &rows));
            let more = options.text(&shares, || tables::share_table(&shares));
            (text + &more, ("published", figures::published(set, &rows)))
        }
        TableKind::Ours => {
            let rows: Result<Vec<_>, _> = ours::settings(&options.nodes)
                .into_iter()
                .map(|it| ours::row(it, set, &lengths, seed, batches))
                .collect();
            let rows = rows.map_err(refuse)?;
            (
                options.text(&rows, || tables::ours(&rows) + "\n" + &tables::overlaps(&rows)),
                ("ours", figures::ours(set, &rows)),
            )
        }
        TableKind::Churn => {
            let spreads = churn::spreads(set, &lengths, seed).map_err(refuse)?;
            let rows = churn::churn(set, &lengths, seed).map_err(refuse)?;
            let text = options.text(&spreads, || tables::spreads(&spreads));
            let more = options.text(&rows, || tables::churn(&rows));
            (text + &more, ("churn", figures::churn(&rows)))
        }
        TableKind::Scale => {
            let most = options.slots;
            let rows = growth::rows(set, &lengths, seed, most).map_err(refuse)?;
            (options.text(&rows, || growth::table(&rows)), ("scale", figures::growth(&rows)))
        }
    };
    if let Some(folder) = &options.figures {
        let (name, drawn) = picture;
        let drawn = drawn.map_err(|reason| SimulateError::Picture { name, reason })?;
        let file = folder.join(format!("{name}-{}.svg", options.set.name()));
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&file, drawn))
            .map_err(|source| SimulateError::Unwritable { path: file, source })?;
    }
    Ok(text)
}

/// The job of some manifests.
fn of_job(options: &SimulateOptions) -> Result<String, SimulateError> {
    let name = |path: &PathBuf| {
        let name = path.to_str().ok_or_else(|| SimulateError::Name { path: path.clone() });
        name.map(str::to_owned)
    };
    let lengths = options.lengths.as_ref().map(name).transpose()?;
    let asked = Asked {
        lanes: options.lanes.get(),
        servers: options.servers,
        lose: options.lose.clone(),
        slow_nic: options.slow_nic.get(),
        fsdp: options.fsdp,
        json: options.json,
        figures: options.figures.clone(),
    };
    Ok(simulated::simulate(&options.job, lengths.as_deref(), &asked)?)
}

fn read(path: &Path) -> Result<Vec<u64>, SimulateError> {
    let text = std::fs::read(path)
        .map_err(|source| SimulateError::Unreadable { path: path.to_owned(), source })?;
    serde_json::from_slice(&text)
        .map_err(|source| SimulateError::Malformed { path: path.to_owned(), source })
}

impl SimulateOptions {
    /// Rows as lines of JSON, or as a table.
    fn text<T: Serialize>(&self, rows: &[T], table: impl Fn() -> String) -> String {
        if !self.json {
            return table();
        }
        rows.iter().map(printed::json).collect()
    }
}
