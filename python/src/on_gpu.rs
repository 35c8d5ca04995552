//! Core attention of tensors on a GPU by the kernels that servers with GPUs run: no pool, no session.
//!
//! In: bf16 rows of whole documents, how many rows each has, and the caller's stream. Out: O and LSE, or dQ, dK and dV in f32, in tensors
//! of the caller's, in the order of that stream.
//!
//! Lists of tiles are made once for documents and heads, and kept for the layers and batches that have the same. Invariant: all runs of a
//! GPU share one scratch, so they come one behind the other on whichever streams; what would be recorded for a graph is refused, so
//! lists and scratch are never in one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cadre_kernels::Heads;
use cadre_kernels::device::{
    self, BackwardBundle, BackwardPlan, BackwardTensors, CallersContext, ForwardPlan, ForwardTask,
    ForwardTensors, Gpu, Keys, Order, QueryGradients, Scratch, Shape, Stream, TaskRows,
};
use cadre_worker::session::Factor;
use half::bf16;
use pyo3::prelude::*;

use crate::lent::{Behind, stream};
use crate::local::{BackwardCall, Common, ForwardCall};
use crate::refusal::{failed, refused};
use crate::tensor::{Given, Side, Tensor};

/// Plans that are kept: those of the newest batches.
const MOST: usize = 16;

/// Kind of the layer, where, and rows of each document.
type Batch = (String, Behind, Vec<u32>);

/// What a plan is made of: GPU, kind, heads, rows of the documents.
type Key = (usize, String, [usize; 3], Vec<u32>);

/// Of this process.
struct Kept {
    /// By the number of the GPU.
    scratch: BTreeMap<usize, Scratch>,
    forward: VecDeque<(Key, ForwardPlan)>,
    backward: VecDeque<(Key, BackwardPlan)>,
}

fn kept() -> MutexGuard<'static, Kept> {
    static KEPT: Mutex<Kept> = Mutex::new(Kept {
        scratch: BTreeMap::new(),
        forward: VecDeque::new(),
        backward: VecDeque::new(),
    });
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The plan of `key`, which is the newest then.
fn plan_of<P>(
    plans: &mut VecDeque<(Key, P)>,
    key: Key,
    make: impl FnOnce() -> PyResult<P>,
) -> PyResult<&mut P> {
    let found = match plans.iter().position(|it| it.0 == key) {
        Some(at) => plans.remove(at).expect("it was found there"),
        None => (key, make()?),
    };
    plans.truncate(MOST - 1);
    plans.push_front(found);
    Ok(&mut plans[0].1)
}

impl Kept {
    /// The caller's stream, and what its runs need. A recording would keep addresses of lists that are only kept for some batches.
    fn stream(&mut self, behind: Behind) -> PyResult<(Stream, Scratch)> {
        let stream = stream(behind)?;
        device::check_lender(&stream).map_err(|error| {
            let why = "attention in this process";
            refused(format!("{why} {error}"))
        })?;
        let scratch = if let Some(it) = self.scratch.get(&behind.0) {
            it.clone()
        } else {
            let made = Scratch::new(stream.gpu()).map_err(told)?;
            self.scratch.insert(behind.0, made.clone());
            made
        };
        Ok((stream, scratch))
    }
}

/// Documents, or their chunks, one behind the other: where each begins, and its rows.
fn pieces(rows: &[u32]) -> impl Iterator<Item = (Keys, TaskRows)> {
    let mut first = 0;
    rows.iter().map(move |&rows| {
        let at = first;
        first += rows;
        let keys = Keys { document_rows: rows, keys: 0..rows, kv_row: at };
        (keys, TaskRows { rows: 0..rows, q_row: at })
    })
}

fn shape(common: &Common) -> Shape {
    let softcap = common.kind.softcap.map(Factor::get);
    Shape { softcap, ..Shape::new(common.heads, common.kind.scale_of()) }
}

fn key(kind: String, behind: Behind, common: &Common) -> Key {
    let Heads { query, kv, dim } = common.heads;
    (behind.0, kind, [query, kv, dim], common.rows.clone())
}

/// What went wrong, of a kind that says whether the caller can correct it.
fn told(error: device::Error) -> PyErr {
    if error.is_lost() { failed(error) } else { refused(error) }
}

/// Refuses memory that the driver does not know as the GPU's.
fn check(gpu: &Gpu, tensors: &[&Tensor]) -> PyResult<()> {
    tensors.iter().try_for_each(|it| it.check_on(gpu))
}

/// Whether tensors on a GPU of this number can be computed there: why not, in words.
#[pyfunction]
pub(crate) fn gpu_refuses(py: Python<'_>, number: usize) -> Option<String> {
    py.detach(|| {
        let _kept = CallersContext::keep();
        stream((number, 0)).err().map(|it| it.to_string())
    })
}

/// O (bf16) and LSE of whole documents, from Q, K and V.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn gpu_forward(
    py: Python<'_>,
    batch: Batch,
    qkv: Given<'_, 3>,
    results: Given<'_, 2>,
) -> PyResult<()> {
    let (kind, behind, documents) = batch;
    let batch = (kind.clone(), 1, documents);
    let call = ForwardCall::new(Side::Gpu, &batch, &qkv, &results)?;
    let ForwardCall { common, qkv, mut o, mut lse } = call;
    py.detach(|| {
        let _kept = CallersContext::keep();
        let mut kept = kept();
        let (stream, scratch) = kept.stream(behind)?;
        let [q, k, v] = &qkv;
        check(stream.gpu(), &[q, k, v, &o, &lse])?;
        let plan = plan_of(&mut kept.forward, key(kind, behind, &common), || {
            let mask = cadre_worker::launch::mask(common.kind.mask);
            let task = |(keys, rows)| ForwardTask { mask, keys, rows };
            let tasks: Vec<_> = pieces(&common.rows).map(task).collect();
            ForwardPlan::with(&stream, shape(&common), &tasks, &scratch).map_err(told)
        })?;
        let (q, k, v) = (q.slice::<bf16>()?, k.slice::<bf16>()?, v.slice::<bf16>()?);
        let tensors =
            ForwardTensors { q, k, v, out: o.slice_mut::<bf16>()?, lse: lse.slice_mut::<f32>()? };
        plan.run(&stream, tensors).map_err(told)
    })
}

/// dQ, dK and dV of whole documents in f32, from Q, K, V and dO (bf16), LSE, and Δ = rowsum(dO∘O) − dLSE.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn gpu_backward(
    py: Python<'_>,
    batch: Batch,
    qkv: Given<'_, 3>,
    gradients: Given<'_, 3>,
    results: Given<'_, 3>,
) -> PyResult<()> {
    let gradients = Tensor::all(["dO", "LSE", "Δ"], Side::Gpu, &gradients)?;
    let [dout, lse, delta] = &gradients;
    let (kind, behind, documents) = batch;
    let batch = (kind.clone(), 1, documents);
    let read = (&[dout][..], &[lse, delta][..]);
    let call = BackwardCall::new(Side::Gpu, &batch, &qkv, &results, read)?;
    let BackwardCall { common, qkv, mut results } = call;
    py.detach(|| {
        let _kept = CallersContext::keep();
        let mut kept = kept();
        let (stream, scratch) = kept.stream(behind)?;
        for tensors in [&qkv, &gradients, &results] {
            check(stream.gpu(), &tensors.each_ref())?;
        }
        let plan = plan_of(&mut kept.backward, key(kind, behind, &common), || {
            let mask = cadre_worker::launch::mask(common.kind.mask);
            let bundle = |(keys, rows): (Keys, TaskRows)| {
                let dkv_row = keys.kv_row;
                BackwardBundle { mask, keys, dkv_row, parts: vec![rows] }
            };
            let bundles: Vec<_> = pieces(&common.rows).map(bundle).collect();
            let cut = (Order::Fixed, 1);
            BackwardPlan::with(&stream, shape(&common), &bundles, cut, &scratch).map_err(told)
        })?;
        let [q, k, v] = qkv.each_ref().map(Tensor::slice::<bf16>);
        let [dq, dk, dv] = results.each_mut().map(Tensor::slice_mut::<f32>);
        let tensors = BackwardTensors {
            q: q?,
            dout: dout.slice::<bf16>()?,
            k: k?,
            v: v?,
            lse: lse.slice::<f32>()?,
            delta: delta.slice::<f32>()?,
            dq: QueryGradients::F32(dq?),
            dk: dk?,
            dv: dv?,
        };
        plan.run(&stream, tensors).map_err(told)
    })
}
