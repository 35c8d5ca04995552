//! Workload files: document lengths that trainers drew, as JSON.
//!
//! ```json
//! {"name": "…", "tokens_per_rank": 131072, "num_ranks": 2, "ranks": [[131072], [65536, 65536]]}
//! ```
//!
//! In: a file. Out: a [`Workload`] whose documents fill all ranks exactly; other fields are ignored.
//! `ranks` holds document lengths in tokens, in lists of any number; only their order counts. `mask`, that of every document,
//! is `causal` where it is left out, `full` or `window:ROWS`.

use std::path::{Path, PathBuf};

use cadre_planner::Mask;
use serde::Deserialize;

/// Lengths of documents and the ranks that they fill.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) tokens_per_rank: u32,
    pub(crate) num_ranks: u32,
    ranks: Vec<Vec<u32>>,
    mask: Option<String>,
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
    #[error("workload {}: {source}", path.display())]
    Mask { path: PathBuf, source: cadre_planner::Error },
    #[error(
        "workload {}: ranks hold {found} tokens, but num_ranks * tokens_per_rank is {expected}; make them equal",
        path.display()
    )]
    Tokens { path: PathBuf, found: u64, expected: u64 },
}

impl Workload {
    /// Reads and checks a file.
    pub(crate) fn read(path: &Path) -> Result<Self, WorkloadError> {
        let text = std::fs::read(path)
            .map_err(|source| WorkloadError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    fn parse(text: &[u8], path: &Path) -> Result<Self, WorkloadError> {
        let at = || path.to_owned();
        let workload: Self = serde_json::from_slice(text)
            .map_err(|source| WorkloadError::Malformed { path: at(), source })?;
        let Self { name: _, tokens_per_rank, num_ranks, ranks, mask: _ } = &workload;
        for (field, value) in [("tokens_per_rank", *tokens_per_rank), ("num_ranks", *num_ranks)] {
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
        workload.mask().map_err(|source| WorkloadError::Mask { path: at(), source })?;
        Ok(workload)
    }

    /// The mask of every document.
    pub(crate) fn mask(&self) -> Result<Mask, cadre_planner::Error> {
        self.mask.as_deref().map_or(Ok(Mask::Causal), str::parse)
    }

    /// Lengths of all documents, in file order.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use cadre_planner::{Costs, Document, Heads, Layout, Links, Problem, Slot, Tolerance, plan};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            (0_u32..5_000).prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 6, |inner| {
            let key = prop_oneof![
                Just("tokens_per_rank".to_owned()),
                Just("ranks".to_owned()),
                Just("num_ranks".to_owned()),
                ".{0,4}"
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(key, inner, 0..5)
                    .prop_map(|it| Value::Object(it.into_iter().collect())),
            ]
        })
    }

    /// Whole ranks of whole documents, of which one thing may be replaced by anything.
    fn nearly_right() -> impl Strategy<Value = Value> {
        let lists = prop::collection::vec(prop::collection::vec(1_u32..3_000, 1..4), 1..4);
        let field = prop::sample::select(vec![
            "/name",
            "/tokens_per_rank",
            "/num_ranks",
            "/ranks",
            "/ranks/0",
            "/ranks/0/0",
        ]);
        (lists, prop::option::of((field, any_json()))).prop_map(|(mut lists, change)| {
            let tokens = 4_096 * lists.len() as u32;
            let rest = tokens.saturating_sub(lists.iter().flatten().sum());
            lists[0].extend((rest > 0).then_some(rest));
            let mut value = json!({"name": "n", "tokens_per_rank": 4_096, "num_ranks": lists.len(), "ranks": lists,
                "mask": "window:600"});
            if let Some((field, other)) = change {
                *value.pointer_mut(field).expect("the field is there") = other;
            }
            value
        })
    }

    proptest! {
        #[test]
        fn any_json_is_planned_or_refused_with_its_file(
            value in prop_oneof![1 => any_json(), 3 => nearly_right()],
            head_tail in any::<bool>(),
        ) {
            let path = Path::new("w.json");
            let workload = match Workload::parse(value.to_string().as_bytes(), path) {
                Ok(workload) => workload,
                Err(error) => {
                    prop_assert!(error.to_string().starts_with("workload w.json: "), "{error}");
                    return Ok(());
                }
            };
            let mask = workload.mask().unwrap();
            let documents = workload.lengths().map(|rows| Document { rows, mask });
            let lay = if head_tail { Layout::head_tail } else { Layout::end_to_end };
            let Ok(layout) = lay(documents.collect(), workload.tokens_per_rank) else { return Ok(()) };
            prop_assert_eq!(layout.ranks().len(), workload.num_ranks as usize);
            let slot = Slot { weight: 100, head_start: 0, home: None, memory: 1 << 50 };
            let problem = Problem {
                layout,
                heads: Heads { query: 4, kv: 2, dim: 64 },
                element_bytes: 2,
                lanes: 1,
                slots: vec![slot; workload.num_ranks as usize],
                costs: Costs::pairs_only(),
                links: Links::equal(),
                tolerance: Tolerance::USUAL,
            };
            let plan = plan(&problem).expect("what was laid out can be planned");
            prop_assert_eq!(plan.check(&problem), Ok(()));
        }
    }
}
