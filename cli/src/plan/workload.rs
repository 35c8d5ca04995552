//! Workload files: document lengths that trainers drew, as JSON.
//!
//! ```json
//! {"name": "…", "tokens_per_rank": 131072, "num_ranks": 2, "ranks": [[131072], [65536, 65536]]}
//! ```
//!
//! In: a file. Out: a [`Workload`] whose documents fill all ranks exactly; other fields are ignored.
//! `ranks` holds document lengths in tokens, in lists of any number; only their order counts.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Lengths of documents and the ranks that they fill.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) tokens_per_rank: u32,
    pub(crate) num_ranks: u16,
    ranks: Vec<Vec<u32>>,
}

/// Why a workload cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("workload {}: {source}; give a readable file", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("workload {}: {source}; expected name, tokens_per_rank, num_ranks, ranks", path.display())]
    Malformed { path: PathBuf, source: serde_json::Error },
    #[error("workload {}: {field} is 0; give at least 1", path.display())]
    Zero { path: PathBuf, field: &'static str },
    #[error("workload {}: ranks[{list}][{index}] is 0; every document has a token", path.display())]
    EmptyDocument { path: PathBuf, list: usize, index: usize },
    #[error(
        "workload {}: ranks hold {found} tokens, but num_ranks * tokens_per_rank is {expected}; make them equal",
        path.display()
    )]
    Tokens { path: PathBuf, found: u64, expected: u64 },
}

impl Workload {
    /// Reads and checks a file.
    pub(crate) fn read(path: &Path) -> Result<Self, WorkloadError> {
        let at = || path.to_owned();
        let text = std::fs::read(path)
            .map_err(|source| WorkloadError::Unreadable { path: at(), source })?;
        let workload: Self = serde_json::from_slice(&text)
            .map_err(|source| WorkloadError::Malformed { path: at(), source })?;
        let Self { name: _, tokens_per_rank, num_ranks, ranks } = &workload;
        for (field, value) in
            [("tokens_per_rank", *tokens_per_rank), ("num_ranks", (*num_ranks).into())]
        {
            if value == 0 {
                return Err(WorkloadError::Zero { path: at(), field });
            }
        }
        for (list, lengths) in ranks.iter().enumerate() {
            if let Some(index) = lengths.iter().position(|it| *it == 0) {
                return Err(WorkloadError::EmptyDocument { path: at(), list, index });
            }
        }
        let found = ranks.iter().flatten().map(|it| u64::from(*it)).sum();
        let expected = u64::from(*tokens_per_rank) * u64::from(*num_ranks);
        if found != expected {
            return Err(WorkloadError::Tokens { path: at(), found, expected });
        }
        Ok(workload)
    }

    /// Lengths of all documents, in file order.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks.iter().flatten().copied()
    }
}
