//! `cadre plan`: plans recorded documents and says what the plan costs.
//!
//! With `-f` it sizes the pool of a job instead, see [`size`]. In: [`PlanOptions`]. Out: a table or one line of JSON on stdout, and the plan as a file. Nothing is started.
//!
//! Bytes are those of one layer forward, rows that travel alone, all lanes of a slot together. Seconds of links
//! are per lane. A pair is the only cost.

mod file;
mod report;
pub(crate) mod size;
mod workload;

use std::path::PathBuf;
use std::time::Instant;

use cadre_planner::{
    Costs, Document, Heads, Layout, Links, Mask, Plan, Problem, Pulls, RankId, Slot, plan as make,
};

use crate::arguments::{LayoutKind, PlanOptions};
use report::Report;
use workload::{Workload, WorkloadError};

/// Runs of the planner; the median counts.
const MEASURED_RUNS: usize = 5;
/// Memory of a slot: no limit.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(transparent)]
    Size(#[from] size::SizeError),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(
        "--hidden-q is {hidden}, but {heads} heads of dim {dim} are {product}; make them equal"
    )]
    HiddenQ { hidden: u32, heads: u16, dim: u16, product: u32 },
    #[error(
        "--hidden-kv is {hidden}, which is no multiple of --head-dim {dim} up to 65535 of them"
    )]
    HiddenKv { hidden: u32, dim: u16 },
    #[error("--weights has {found} numbers for {slots} slots; give one a slot")]
    Weights { found: usize, slots: usize },
    #[error("--weights: the weight of slot {slot} is 0; give at least 1")]
    NoWeight { slot: usize },
    #[error("workload {name}: {source}")]
    Planner { name: String, source: cadre_planner::Error },
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
}

/// Plans; returns what to print.
pub(crate) fn plan(options: &PlanOptions) -> Result<String, PlanError> {
    let Some(path) = &options.workload else {
        return Ok(size::size(options)?);
    };
    let workload = Workload::read(path)?;
    let refuse = |source| PlanError::Planner { name: workload.name.clone(), source };
    let problem = problem(options, &workload)?;
    let (plan, plan_seconds) = timed(|| make(&problem));
    let plan = plan.map_err(refuse)?;
    let (_, lists_seconds) = timed(|| Pulls::of(&problem, &plan));
    let before = cadre_planner::imbalance_at_home(&problem).map_err(refuse)?;
    let write = |path: &PathBuf, text: String| {
        std::fs::write(path, text)
            .map_err(|source| PlanError::Unwritable { path: path.clone(), source })
    };
    if let Some(path) = &options.out {
        write(path, file::text(&problem, &plan))?;
    }
    if let Some(path) = &options.picture {
        write(path, size::picture::of_plan(&workload.name, &problem, &plan))?;
    }
    let seconds = (plan_seconds, lists_seconds);
    let report = Report::new(&workload, &problem, &plan, before, seconds);
    Ok(if options.json { report.json() } else { report.table() })
}

/// The last result and the median of the seconds of several runs.
fn timed<T>(run: impl Fn() -> T) -> (T, f64) {
    let mut seconds = Vec::new();
    let mut turn = || {
        let start = Instant::now();
        let made = run();
        seconds.push(start.elapsed().as_secs_f64());
        made
    };
    let mut made = turn();
    for _ in 1..MEASURED_RUNS {
        made = turn();
    }
    seconds.sort_by(f64::total_cmp);
    (made, seconds[MEASURED_RUNS / 2])
}

fn problem(options: &PlanOptions, workload: &Workload) -> Result<Problem, PlanError> {
    let refuse = |source| PlanError::Planner { name: workload.name.clone(), source };
    let mask = workload.mask().map_err(refuse)?;
    let causal = |rows| Document { rows, mask: Mask::Causal };
    let documents = workload.lengths().map(causal).collect();
    let lay = match options.layout {
        LayoutKind::EndToEnd => Layout::end_to_end,
        LayoutKind::HeadTail => Layout::head_tail,
    };
    // As jobs lay documents out.
    let layout = lay(documents, workload.tokens_per_rank).map_err(refuse)?.masked(mask);
    Ok(Problem {
        layout,
        heads: heads(options)?,
        element_bytes: 2,
        lanes: options.lanes.get(),
        slots: slots(options, workload.num_ranks)?,
        costs: Costs::pairs_only(),
        links: Links::equal(),
        tolerance: options.job.tolerance.unwrap_or_default(),
    })
}

fn heads(options: &PlanOptions) -> Result<Heads, PlanError> {
    let PlanOptions { hidden_q, hidden_kv, heads, head_dim, .. } = *options;
    let (heads, dim) = (heads.get(), head_dim.get());
    let product = u32::from(heads) * u32::from(dim);
    if product != hidden_q {
        return Err(PlanError::HiddenQ { hidden: hidden_q, heads, dim, product });
    }
    let kv = u16::try_from(hidden_kv / u32::from(dim)).ok();
    let kv = kv.filter(|_| hidden_kv.is_multiple_of(dim.into()));
    let kv = kv.ok_or(PlanError::HiddenKv { hidden: hidden_kv, dim })?;
    Ok(Heads { query: heads, kv, dim })
}

/// One slot in place at each rank, or as many dedicated ones as were asked for.
fn slots(options: &PlanOptions, ranks: u32) -> Result<Vec<Slot>, PlanError> {
    let homes: Vec<Option<RankId>> = match options.slots {
        Some(count) => vec![None; count.get().into()],
        None => (0..ranks).map(|rank| Some(RankId(rank))).collect(),
    };
    let weights = &options.job.weights;
    if !weights.is_empty() && weights.len() != homes.len() {
        return Err(PlanError::Weights { found: weights.len(), slots: homes.len() });
    }
    if let Some(slot) = weights.iter().position(|it| *it == 0) {
        return Err(PlanError::NoWeight { slot });
    }
    let slot = |(index, home)| {
        let weight = weights.get(index).copied().unwrap_or(100);
        Slot { weight, head_start: 0, home, memory: UNLIMITED_BYTES }
    };
    Ok(homes.into_iter().enumerate().map(slot).collect())
}

/// Tasks of which a query row is not at home in the slot's place.
fn moved(problem: &Problem, plan: &Plan) -> usize {
    let is_moved = |task: &&cadre_planner::Task| {
        let home = plan
            .bundle(task.bundle)
            .and_then(|it| problem.slots.get(it.slot.0 as usize))
            .and_then(|it| it.home);
        let mut pieces = problem.layout.locate(task.document, task.rows.clone());
        pieces.any(|it| Some(it.rank) != home)
    };
    plan.tasks().iter().filter(is_moved).count()
}
