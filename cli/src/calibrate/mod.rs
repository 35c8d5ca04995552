//! `cadre calibrate`: measures this machine's attention, linear layers and loopback, and writes a calibration.
//!
//! In: [`CalibrateOptions`]. Out: a [`Profile`] as JSON, checked, on stdout or as a file, and a line a table on stderr.
//!
//! Times are those of the kernels that an attention server runs, of all threads together, divided by the query heads.
//! Of several runs the fastest counts: what a machine does beside only adds. A measured time that falls where rows or keys
//! grow is raised to the one before it, since scatter is all that can make it fall.

mod attention;
mod machine;

use std::path::PathBuf;

use cadre_planner::{Direction, Kept, Profile, ProfileError, Table};

use crate::arguments::CalibrateOptions;
use attention::Case;

/// Query rows of the grid.
const ROWS: [u32; 4] = [32, 128, 512, 2_048];
/// Keys beside those of the rows themselves.
const KEYS: [u32; 4] = [0, 512, 2_048, 8_192];

/// Why there is no calibration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CalibrateError {
    #[error("--head-dim {dim}: {source}")]
    Kernel { dim: u16, source: cadre_kernels::Error },
    #[error("loopback: {0}; allow connections to 127.0.0.1")]
    Loopback(std::io::Error),
    #[error("the calibration: {0}")]
    Profile(#[from] ProfileError),
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
}

/// Measures; returns what to print.
pub(crate) fn calibrate(options: &CalibrateOptions) -> Result<String, CalibrateError> {
    let threads = cadre_kernels::Threads(options.threads);
    let mut kernels = Vec::new();
    for &dim in &options.head_dim {
        for kept in [Kept::Causal, Kept::Full] {
            let [forward, backward] = tables(dim.get(), kept, threads)?;
            for table in [forward, backward] {
                eprintln!("{}", line(&table));
                kernels.push(table);
            }
        }
    }
    let (rate, latency) = machine::loopback().map_err(CalibrateError::Loopback)?;
    let profile = Profile {
        version: 1,
        processor: format!("cpu-{}-{}", cadre_kernels::instruction_set(), options.threads),
        source: format!("measured with {}", cadre_kernels::numerics_id()),
        // A launch of this machine does its tasks one after the other; a call is what it costs.
        task_nanoseconds: machine::call(threads),
        linear_operations: machine::linear(threads),
        kernels,
        links: vec![cadre_planner::LinkTimes { distance: "node".into(), rate, latency }],
    };
    profile.check()?;
    let text = serde_json::to_string(&profile).expect("numbers and names are JSON") + "\n";
    let Some(path) = &options.out else { return Ok(text) };
    std::fs::write(path, text)
        .map_err(|source| CalibrateError::Unwritable { path: path.clone(), source })?;
    let costs = profile.costs(options.head_dim[0].get())?;
    Ok(format!(
        "written: {}, digest {:016x}; a tile costs {} pairs, a task {}, backward {} % of forward\n",
        path.display(),
        profile.digest(),
        costs.tile,
        costs.task,
        costs.backward_percent
    ))
}

/// Forward and backward of a head dim and mask over the grid.
fn tables(
    head_dim: u16,
    kept: Kept,
    threads: cadre_kernels::Threads,
) -> Result<[Table; 2], CalibrateError> {
    let mut times = [vec![vec![0; KEYS.len()]; ROWS.len()], vec![vec![0; KEYS.len()]; ROWS.len()]];
    for (row, &rows) in ROWS.iter().enumerate() {
        for (key, &keys) in KEYS.iter().enumerate() {
            let case = Case { head_dim, kept, rows, keys };
            let measured = case
                .measure(threads)
                .map_err(|source| CalibrateError::Kernel { dim: head_dim, source })?;
            for (times, measured) in times.iter_mut().zip(measured) {
                let above = row.checked_sub(1).map_or(1, |row| times[row][key]);
                let before = key.checked_sub(1).map_or(1, |key| times[row][key]);
                times[row][key] = measured.max(above).max(before);
            }
        }
    }
    let [forward, backward] = times;
    let table = |direction, picoseconds| Table {
        head_dim,
        direction,
        kept,
        rows: ROWS.to_vec(),
        keys: KEYS.to_vec(),
        picoseconds,
    };
    Ok([table(Direction::Forward, forward), table(Direction::Backward, backward)])
}

fn line(table: &Table) -> String {
    let (rows, keys) = (ROWS[ROWS.len() - 1], KEYS[KEYS.len() - 1]);
    let time = table.picoseconds(rows, keys);
    format!(
        "head dim {}, {:?}, {:?}: {rows} rows with {keys} keys before them take {:.2} ms a head",
        table.head_dim,
        table.direction,
        table.kept,
        time as f64 / 1e9
    )
}
