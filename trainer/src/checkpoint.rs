//! Checkpoints: what a run needs to go on with the same bits.
//!
//! In: parameters, the optimizer's moments, a [`State`]. Out: a folder `step-N` with
//! `model.safetensors` (tensors by name) and, if all layers are those of a Llama, `config.json`, named as transformers names a
//! Llama's, which loads the folder (`python/tests/test_checkpoint.py`),
//! `optimizer.safetensors` (both moments of each), `last.json` ([`Last`]) and `state.json`; back from it the same.
//!
//! Does not decide when to write, nor which headers the resumed run uses.
//!
//! # Guarantees
//!
//! A folder `step-N` is whole: it is written under another name, made durable, then renamed. After a
//! failure, a full disk too, nothing half written is left; what a writer that was killed has left goes with
//! [`sweep`]. As many of the newest stay as the job says.

mod error;
mod last;
mod state;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

pub use self::error::CheckpointError;
use self::last::LAST;
pub use self::last::Last;
pub use self::state::State;
use super::model::Parameters;

/// Parameters and moments, each in the flat layout of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Values<T> {
    /// Parameters.
    pub parameters: T,
    /// Means of gradients.
    pub first: T,
    /// Means of squared gradients.
    pub second: T,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    format: u32,
    state: State,
    /// xxh3 of each file, 16 hex digits.
    model: String,
    optimizer: String,
    /// xxh3 of all the above.
    seal: String,
}

/// The fields that states of every format have.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

const FORMAT: u32 = 6;
const MODEL: &str = "model.safetensors";
/// Sizes, for other programs.
const CONFIG: &str = "config.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
/// Start of the name of a folder that is still being written; step, `-` and rank follow. [`DYING`]
/// is that of a folder that is being removed.
const DRAFT: &str = ".step-";
/// See [`DRAFT`].
const DYING: &str = ".old-step-";

/// A writer of checkpoints into one folder, and how many it keeps there.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// Keeps several writers apart.
    pub rank: u32,
    /// The newest checkpoints that stay; 0 is as good as 1.
    pub keep: usize,
}

/// Writes the checkpoint `root/step-N`, then removes the oldest ones beyond those that stay. A
/// whole checkpoint of this step, and those of later steps, are left as they are. Calls `busy`
/// after each part, so that the trainer does not count as standing still.
pub fn save(
    root: &Path,
    (state, last): (&State, Option<&Last>),
    layout: &Parameters,
    values: &Values<&[f32]>,
    writer: Writer,
    busy: &dyn Fn(),
) -> Result<PathBuf, CheckpointError> {
    let Writer { rank, keep } = writer;
    let target = root.join(format!("step-{}", state.step));
    let draft = root.join(format!("{DRAFT}{}-{rank}", state.step));
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| CheckpointError::Write { path, source }
    };
    fs::create_dir_all(root).map_err(failed(root))?;
    remove(&draft).map_err(failed(&draft))?;
    let written = write_draft(&draft, (state, last), layout, values, busy)
        .and_then(|()| match fs::rename(&draft, &target) {
            Err(_) if target.join(STATE).is_file() => remove(&draft),
            renamed => renamed,
        })
        .and_then(|()| File::open(root)?.sync_all());
    if let Err(source) = written {
        // The error of the write is reported, not one of the clean-up.
        let _ = remove(&draft);
        return Err(failed(&target)(source));
    }
    // Only checkpoints of earlier steps count: later ones belong to another run and are left alone.
    let older = steps(root)?.into_iter().rev().filter(|it| *it < state.step);
    for old in older.skip(keep.saturating_sub(1)) {
        busy();
        let dying = root.join(format!("{DYING}{old}-{rank}"));
        let path = root.join(format!("step-{old}"));
        match fs::rename(&path, &dying).and_then(|()| remove(&dying)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed(&path)(error));
            }
            _ => {}
        }
    }
    Ok(target)
}

/// Removes what a writer of this rank has left half written, or half removed, when it was killed: folders of its own
/// names, of which none is a checkpoint. To be called while no such writer lives. Says how many there were.
///
/// # Errors
///
/// [`CheckpointError::Read`] and [`CheckpointError::Write`] of the folder that could not be read, or removed.
pub fn sweep(root: &Path, rank: u32) -> Result<usize, CheckpointError> {
    let is_own = |name: &str| {
        let rest = name.strip_prefix(DRAFT).or_else(|| name.strip_prefix(DYING));
        let (step, writer) = rest.and_then(|it| it.split_once('-')).unwrap_or_default();
        // A name counts only in the form in which this program writes it.
        step.parse().is_ok_and(|it: u64| it.to_string() == step) && writer == rank.to_string()
    };
    let mut swept = 0;
    for entry in entries(root)? {
        let name = entry.file_name();
        if name.to_str().is_some_and(is_own) && entry.path().is_dir() {
            let path = entry.path();
            remove(&path).map_err(|source| CheckpointError::Write { path, source })?;
            swept += 1;
        }
    }
    Ok(swept)
}

/// The newest checkpoint in `root` of an earlier run that was like `wanted`, for a run that starts
/// from the beginning.
///
/// # Errors
///
/// [`CheckpointError::Foreign`] if a checkpoint in `root` is of another run; others if one cannot be
/// read.
pub fn earlier(root: &Path, wanted: &State) -> Result<Option<PathBuf>, CheckpointError> {
    for step in steps(root)? {
        let folder = root.join(format!("step-{step}"));
        load_state(&folder)?.fits(wanted, &folder)?;
    }
    newest(root)
}

/// The newest checkpoint in `root`; `None` when there is none.
pub fn newest(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    Ok(steps(root)?.last().map(|step| root.join(format!("step-{step}"))))
}

/// Reads a checkpoint's state alone.
pub fn load_state(folder: &Path) -> Result<State, CheckpointError> {
    read_state(folder).map(|it| it.state)
}

/// Reads a checkpoint that goes on with a run like `wanted` (whose step, schedule, numerics, slots and digests
/// of the last step do not matter).
pub fn load(
    folder: &Path,
    wanted: &State,
    layout: &Parameters,
) -> Result<(State, Values<Vec<f32>>), CheckpointError> {
    let sealed = read_state(folder)?;
    sealed.state.fits(wanted, folder)?;
    let mut values = Values {
        parameters: vec![0.0; layout.len()],
        first: vec![0.0; layout.len()],
        second: vec![0.0; layout.len()],
    };
    let model = read_sealed(&folder.join(MODEL), &sealed.model)?;
    read_tensors(&folder.join(MODEL), &model, "", layout, &mut values.parameters)?;
    let moments = read_sealed(&folder.join(OPTIMIZER), &sealed.optimizer)?;
    let path = folder.join(OPTIMIZER);
    read_tensors(&path, &moments, "first.", layout, &mut values.first)?;
    read_tensors(&path, &moments, "second.", layout, &mut values.second)?;
    Ok((sealed.state, values))
}

fn write_draft(
    draft: &Path,
    (state, last): (&State, Option<&Last>),
    layout: &Parameters,
    values: &Values<&[f32]>,
    busy: &dyn Fn(),
) -> io::Result<()> {
    fs::create_dir(draft)?;
    let model = tensors(layout, &[("", values.parameters)])?;
    write_durable(File::create_new(draft.join(MODEL))?, &model, busy)?;
    // Written for a Llama only: whatever loaded the tensors of another model as a Llama would
    // compute something else.
    if state.beyond_llama().is_none() {
        let config = serde_json::to_vec_pretty(&state.model.as_llama(state.cap))?;
        write_durable(File::create_new(draft.join(CONFIG))?, &config, busy)?;
    }
    if let Some(last) = last {
        write_durable(File::create_new(draft.join(LAST))?, &last.text(), busy)?;
    }
    let moments = tensors(layout, &[("first.", values.first), ("second.", values.second)])?;
    write_durable(File::create_new(draft.join(OPTIMIZER))?, &moments, busy)?;
    let mut sealed = Sealed {
        format: FORMAT,
        state: state.clone(),
        model: hex(&model),
        optimizer: hex(&moments),
        seal: String::new(),
    };
    sealed.seal = seal(&sealed);
    let text = serde_json::to_vec_pretty(&sealed)?;
    write_durable(File::create_new(draft.join(STATE))?, &text, busy)?;
    File::open(draft)?.sync_all()
}

/// Bytes that are written between two calls of `busy`.
const BUSY_EVERY_BYTES: usize = 16 << 20;

fn write_durable(mut file: File, bytes: &[u8], busy: &dyn Fn()) -> io::Result<()> {
    for part in bytes.chunks(BUSY_EVERY_BYTES) {
        file.write_all(part)?;
        // Without this, the last sync would write everything at once, and the trainer would be
        // silent meanwhile.
        file.sync_data()?;
        busy();
    }
    file.sync_all()
}

fn tensors(layout: &Parameters, buffers: &[(&str, &[f32])]) -> io::Result<Vec<u8>> {
    let mut views = Vec::new();
    for (prefix, values) in buffers {
        for tensor in layout.tensors() {
            let shape = shape(tensor.rows, tensor.columns);
            let bytes = bytemuck::cast_slice(&values[tensor.range.clone()]);
            let view = TensorView::new(Dtype::F32, shape, bytes).map_err(io::Error::other)?;
            views.push((format!("{prefix}{}", tensor.name), view));
        }
    }
    // Without it transformers does not know whose tensors these are.
    let writer = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize(views, Some(writer)).map_err(io::Error::other)
}

fn shape(rows: usize, columns: usize) -> Vec<usize> {
    if rows == 1 { vec![columns] } else { vec![rows, columns] }
}

fn read_state(folder: &Path) -> Result<Sealed, CheckpointError> {
    let path = folder.join(STATE);
    let corrupt = |why: String| CheckpointError::Corrupt { path: path.clone(), why };
    let text =
        fs::read(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
    let broken = |source: serde_json::Error| corrupt(source.to_string());
    // The rest of a file of another format cannot be read.
    let Format { format } = serde_json::from_slice(&text).map_err(broken)?;
    if format != FORMAT {
        return Err(CheckpointError::Format { path, format });
    }
    let sealed: Sealed = serde_json::from_slice(&text).map_err(broken)?;
    if seal(&sealed) != sealed.seal {
        return Err(corrupt("its digest is another".into()));
    }
    Ok(sealed)
}

fn read_sealed(path: &Path, digest: &str) -> Result<Vec<u8>, CheckpointError> {
    let path = path.to_path_buf();
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(source) => return Err(CheckpointError::Read { path, source }),
    };
    if hex(&bytes) == digest {
        Ok(bytes)
    } else {
        Err(CheckpointError::Corrupt { path, why: "its digest is another".into() })
    }
}

fn read_tensors(
    path: &Path,
    bytes: &[u8],
    prefix: &str,
    layout: &Parameters,
    values: &mut [f32],
) -> Result<(), CheckpointError> {
    let corrupt = |why: String| CheckpointError::Corrupt { path: path.to_path_buf(), why };
    let file = SafeTensors::deserialize(bytes).map_err(|source| corrupt(source.to_string()))?;
    for tensor in layout.tensors() {
        let name = format!("{prefix}{}", tensor.name);
        let view = file.tensor(&name).map_err(|source| corrupt(source.to_string()))?;
        if view.dtype() != Dtype::F32 || view.shape() != shape(tensor.rows, tensor.columns) {
            return Err(corrupt(format!("{name} has another type or shape")));
        }
        // The file's bytes need not be aligned; copying bytes does not ask for it.
        let place = &mut values[tensor.range.clone()];
        bytemuck::cast_slice_mut::<f32, u8>(place).copy_from_slice(view.data());
    }
    Ok(())
}

/// Steps of the checkpoints in `root`, ascending.
fn steps(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps = Vec::new();
    for entry in entries(root)? {
        let name = entry.file_name();
        let step = name.to_str().and_then(|it| it.strip_prefix("step-")).map(str::parse::<u64>);
        steps.extend(step.and_then(Result::ok));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Entries of a folder; none if there is no such folder.
fn entries(root: &Path) -> Result<Vec<fs::DirEntry>, CheckpointError> {
    let failed = |source| CheckpointError::Read { path: root.to_path_buf(), source };
    match fs::read_dir(root) {
        Ok(entries) => entries.collect::<io::Result<_>>().map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Removes a folder, if it is there.
fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn hex(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

fn seal(sealed: &Sealed) -> String {
    let Sealed { format, state, model, optimizer, seal: _ } = sealed;
    let text = serde_json::to_vec(&(format, state, model, optimizer));
    hex(&text.expect("numbers and strings are JSON"))
}

#[cfg(test)]
mod tests;
