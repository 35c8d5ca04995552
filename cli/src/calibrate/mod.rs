//! `cadre calibrate`: measures this machine's attention, linear layers and loopback, and writes a calibration.
//!
//! In: [`CalibrateOptions`]. Out: a [`Profile`] as JSON, checked, on stdout or as a file, and a line a table on stderr. The file
//! grows row by row, and says that it is partial until it is whole.
//!
//! Times are those of the kernels that an attention server runs, of all threads together, divided by the query heads.
//! Of several runs the fastest counts: what a machine does beside only adds. A measured time that falls where rows or keys
//! grow is raised to the one before it, since scatter is all that can make it fall.
//!
//! Where the engine is a GPU, attention is measured there, on a grid of longer tasks. Linear layers are not Cadre's there:
//! their speed is told, or taken from the table `h200-hopper`, and the source says which.

mod attention;
mod file;
mod gpu;
mod machine;

use std::path::PathBuf;

use cadre_kernels::device::{self, Gpu};
use cadre_kernels::{Engine, WhichGpu};
use cadre_planner::{Direction, Kept, Profile, ProfileError, Table};

use crate::arguments::CalibrateOptions;
use crate::printed;
use attention::Case;
use file::File;

/// Query rows of the grid.
const ROWS: [u32; 4] = [32, 128, 512, 2_048];
/// Keys beside those of the rows themselves.
const KEYS: [u32; 4] = [0, 512, 2_048, 8_192];

/// Why there is no calibration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CalibrateError {
    #[error("--head-dim {dim}: {source}")]
    Kernel { dim: u16, source: cadre_kernels::Error },
    #[error("head dim {dim} on the GPU: {source}")]
    OnGpu { dim: u16, source: device::Error },
    #[error("--engine gpu: {0}")]
    NoGpu(device::Error),
    #[error("loopback: {0}; allow connections to 127.0.0.1")]
    Loopback(std::io::Error),
    #[error("the calibration: {0}")]
    Profile(#[from] ProfileError),
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
    #[error("--linear-tflops is a GPU's, and attention is measured on the CPU; leave it out")]
    LinearOnCpu,
}

/// Where attention is measured.
enum Place {
    Cpu(cadre_kernels::Threads),
    Gpu(Gpu),
}

impl Place {
    fn axes(&self) -> ([u32; 4], [u32; 4]) {
        match self {
            Self::Cpu(_) => (ROWS, KEYS),
            Self::Gpu(_) => (gpu::ROWS, gpu::KEYS),
        }
    }

    fn measure(&self, case: &Case) -> Result<[u64; 2], CalibrateError> {
        let dim = case.head_dim;
        match self {
            Self::Cpu(threads) => {
                case.measure(*threads).map_err(|source| CalibrateError::Kernel { dim, source })
            }
            Self::Gpu(it) => gpu::measure(it, dim, case.kept, (case.rows, case.keys))
                .map_err(|source| CalibrateError::OnGpu { dim, source }),
        }
    }
}

/// Measures; returns what to print.
pub(crate) fn calibrate(options: &CalibrateOptions) -> Result<String, CalibrateError> {
    let file = options.out.as_deref().map(File::new).transpose()?;
    let threads = cadre_kernels::Threads(options.threads);
    let which = options.gpu.map_or_else(WhichGpu::default, |it| WhichGpu::Number(it.into()));
    let engine =
        Engine::choose_on(which, options.engine.into(), threads).map_err(CalibrateError::NoGpu)?;
    eprintln!("attention is measured on {}", engine.description());
    if options.linear_tflops.is_some() && engine.gpu().is_none() {
        return Err(CalibrateError::LinearOnCpu);
    }
    let place = match engine.gpu() {
        Some(gpu) => Place::Gpu(gpu.clone()),
        None => Place::Cpu(threads),
    };
    let (rate, latency) = machine::loopback().map_err(CalibrateError::Loopback)?;
    let measured = format!("measured with {}", engine.numerics_id());
    let first = options.head_dim[0].get();
    let (processor, source, task_nanoseconds, linear_operations) = match &place {
        // A launch of this machine does its tasks one after the other; a call is what it costs.
        Place::Cpu(_) => (
            cadre_kernels::processor(threads),
            measured,
            machine::call(threads),
            machine::linear(threads),
        ),
        Place::Gpu(it) => {
            let task = gpu::task(it, first, gpu::ENOUGH_TASKS)
                .map_err(|source| CalibrateError::OnGpu { dim: first, source })?;
            let (linear, whence) = match options.linear_tflops {
                Some(rate) => (rate.get() * 1_000, "told"),
                None => (
                    Profile::builtin("h200-hopper").map_or(1, |it| it.linear_operations),
                    "those of h200-hopper, not measured",
                ),
            };
            (it.processor(), format!("{measured}; linear layers: {whence}"), task, linear)
        }
    };
    let mut profile = Profile {
        version: 1,
        partial: None,
        processor,
        source,
        task_nanoseconds,
        linear_operations,
        kernels: Vec::new(),
        links: vec![cadre_planner::LinkTimes { distance: "node".into(), rate, latency }],
        places: Vec::new(),
        unreachable: Vec::new(),
    };
    let dims: Vec<_> = options.head_dim.iter().map(|it| it.get()).collect();
    measure(&dims, &place, &mut profile, file.as_ref())?;
    profile.check()?;
    let (Some(path), Some(file)) = (&options.out, file) else {
        return Ok(printed::json(&profile));
    };
    file.write(&profile)?;
    let costs = profile.costs(first)?;
    Ok(format!(
        "written: {}, digest {:016x}; a tile costs {} pairs, a task {}, backward {} % of forward\n",
        path.display(),
        profile.digest(),
        costs.tile,
        costs.task,
        costs.backward_percent
    ))
}

/// Adds the tables of all `dims`; the file has each row as soon as it is measured.
fn measure(
    dims: &[u16],
    place: &Place,
    profile: &mut Profile,
    file: Option<&File>,
) -> Result<(), CalibrateError> {
    let both = [Kept::Causal, Kept::Full];
    let (mut rows, all) = (0, dims.len() * both.len() * place.axes().0.len());
    for (&dim, kept) in dims.iter().flat_map(|dim| both.map(|kept| (dim, kept))) {
        let before = profile.kernels.len();
        tables(dim, kept, place, |tables| {
            rows += 1;
            profile.kernels.truncate(before);
            profile.kernels.extend(tables);
            file.map_or(Ok(()), |it| it.write_partial(profile, rows, all))
        })?;
        for it in &profile.kernels[before..] {
            eprintln!("{}", line(it));
        }
    }
    Ok(())
}

/// Forward and backward of a head dim and mask over the grid; `grown` gets both behind each of their rows.
fn tables(
    head_dim: u16,
    kept: Kept,
    place: &Place,
    mut grown: impl FnMut([Table; 2]) -> Result<(), CalibrateError>,
) -> Result<(), CalibrateError> {
    let (all_rows, all_keys) = place.axes();
    let mut times = [0; 2].map(|_| Vec::<Vec<u64>>::new());
    for (row, &rows) in all_rows.iter().enumerate() {
        for it in &mut times {
            it.push(vec![0; all_keys.len()]);
        }
        for (key, &keys) in all_keys.iter().enumerate() {
            let measured = place.measure(&Case { head_dim, kept, rows, keys })?;
            for (times, measured) in times.iter_mut().zip(measured) {
                let above = row.checked_sub(1).map_or(1, |row| times[row][key]);
                let before = key.checked_sub(1).map_or(1, |key| times[row][key]);
                times[row][key] = measured.max(above).max(before);
            }
        }
        let table = |direction, picoseconds: &[_]| Table {
            head_dim,
            direction,
            kept,
            rows: all_rows[..=row].to_vec(),
            keys: all_keys.to_vec(),
            picoseconds: picoseconds.to_vec(),
        };
        let [forward, backward] = &times;
        grown([table(Direction::Forward, forward), table(Direction::Backward, backward)])?;
    }
    Ok(())
}

fn line(table: &Table) -> String {
    let (rows, keys) = (table.rows[table.rows.len() - 1], table.keys[table.keys.len() - 1]);
    let time = table.picoseconds(rows, keys);
    format!(
        "head dim {}, {:?}, {:?}: {rows} rows with {keys} keys before them take {:.2} ms a head",
        table.head_dim,
        table.direction,
        table.kept,
        time as f64 / 1e9
    )
}
