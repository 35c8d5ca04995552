//! Core attention in this process, by the kernels that servers run: no pool, no session.
//!
//! In: rows of whole documents, one behind the other, and how many rows each has. Out: O and LSE, or dQ, dK and dV, written
//! into tensors of the caller's in f32.
//!
//! Invariant: one task, and one bundle, per document, or chunk of it; so O, LSE and dQ have the bits of every pool.

use cadre_kernels::{
    Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, Threads, backward, delta, forward,
    key_tiles,
};
use cadre_worker::session::{Factor, Kind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::tensor::{Given, Tensor, check_apart};

/// Kind of the layer, and threads.
type Settings = (String, usize);

/// What all documents of a call have in common.
struct Common {
    heads: Heads,
    mask: Mask,
    scale: f32,
    softcap: Option<f32>,
    /// Rows of the pieces that attention does not cross, in order: of whole documents, or of their chunks.
    pieces: Vec<u32>,
    threads: Threads,
    /// Elements of a row of Q, and of K.
    query: usize,
    kv: usize,
}

impl Common {
    /// Refuses rows that are not those of the documents.
    fn new(settings: &Settings, documents: &[u32], qkv: &[Tensor; 3]) -> PyResult<Self> {
        let (kind, threads) = settings;
        let [q, k, v] = qkv;
        let refuse = |message: String| Err(PyValueError::new_err(message));
        let (&[rows, query, dim], &[_, kv, _]) = (q.shape(), k.shape()) else {
            return refuse("Q, K or V has not 3 dimensions; give [rows, heads, dim]".into());
        };
        k.check_shape(&[rows, kv, dim])?;
        v.check_shape(&[rows, kv, dim])?;
        let told: usize = documents.iter().map(|&it| it as usize).sum();
        if told != rows {
            return refuse(format!(
                "documents have {told} rows and Q has {rows}; give each its rows"
            ));
        }
        let kind: Kind = kind.parse().map_err(refused)?;
        Ok(Self {
            heads: Heads { query, kv, dim },
            mask: cadre_worker::launch::mask(kind.mask),
            scale: kind.scale_of(dim),
            softcap: kind.softcap.map(Factor::get),
            pieces: documents.iter().flat_map(|&it| kind.pieces(it)).collect(),
            threads: Threads::new(*threads),
            query: query * dim,
            kv: kv * dim,
        })
    }
}

/// O and LSE of whole documents, from Q, K and V.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn local_forward(
    py: Python<'_>,
    settings: Settings,
    documents: Vec<u32>,
    qkv: Given<'_, 3>,
    results: Given<'_, 2>,
) -> PyResult<()> {
    let qkv = Tensor::all(["Q", "K", "V"], &qkv)?;
    let [mut o, mut lse] = Tensor::all(["O", "LSE"], &results)?;
    check_apart(&[&o, &lse], &qkv.each_ref())?;
    let common = Common::new(&settings, &documents, &qkv)?;
    o.check_shape(qkv[0].shape())?;
    lse.check_shape(&qkv[0].shape()[..2])?;
    py.detach(|| {
        let Common { heads, mask, scale, softcap, pieces, threads, query, kv } = common;
        let [mut q, mut k, mut v] = [qkv[0].dense()?, qkv[1].dense()?, qkv[2].dense()?];
        let (mut out, mut lse) = (o.f32s_mut()?, lse.f32s_mut()?);
        let mut tasks = Vec::with_capacity(pieces.len());
        for rows in pieces {
            let count = rows as usize;
            tasks.push(Forward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                rows: 0..rows,
                keys: 0..rows,
                q: take(&mut q, count * query),
                k: take(&mut k, count * kv),
                v: take(&mut v, count * kv),
                out: RowsMut::F32(out.split_off_mut(..count * query).expect(LENGTHS)),
                lse: lse.split_off_mut(..count * heads.query).expect(LENGTHS),
            });
        }
        forward(&mut tasks, threads).map_err(refused)
    })
}

/// dQ, dK and dV of whole documents, from Q, K, V and from O, LSE, dO, dO in the type of Q, and dLSE. As on a pool Δ comes
/// from O and dO in f32, and the kernel reads dO as it is on the wire.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn local_backward(
    py: Python<'_>,
    settings: Settings,
    documents: Vec<u32>,
    qkv: Given<'_, 3>,
    gradients: Given<'_, 5>,
    results: Given<'_, 3>,
) -> PyResult<()> {
    let qkv = Tensor::all(["Q", "K", "V"], &qkv)?;
    let gradients = Tensor::all(["O", "LSE", "dO", "dO on the wire", "dLSE"], &gradients)?;
    let mut results = Tensor::all(["dQ", "dK", "dV"], &results)?;
    let read: Vec<&Tensor> = qkv.iter().chain(&gradients).collect();
    check_apart(&results.each_ref(), &read)?;
    let common = Common::new(&settings, &documents, &qkv)?;
    let [o, lse, wide, dout, dlse] = &gradients;
    for rows in [o, wide, dout] {
        rows.check_shape(qkv[0].shape())?;
    }
    for heads in [lse, dlse] {
        heads.check_shape(&qkv[0].shape()[..2])?;
    }
    for (result, of) in results.iter().zip(&qkv) {
        result.check_shape(of.shape())?;
    }
    py.detach(|| {
        let Common { heads, mask, scale, softcap, pieces, threads, query, kv } = common;
        let mut delta = delta(threads, heads.dim, wide.f32s()?, o.f32s()?);
        for (delta, dlse) in delta.iter_mut().zip(dlse.f32s()?) {
            *delta -= dlse;
        }
        let [mut q, mut k, mut v] = [qkv[0].dense()?, qkv[1].dense()?, qkv[2].dense()?];
        let (mut dout, mut lse, mut delta) = (dout.dense()?, lse.f32s()?, &delta[..]);
        let [dq, dk, dv] = results.each_mut().map(Tensor::f32s_mut);
        let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
        let mut bundles = Vec::with_capacity(pieces.len());
        for rows in pieces {
            let count = rows as usize;
            bundles.push(Backward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                keys: 0..rows,
                k: take(&mut k, count * kv),
                v: take(&mut v, count * kv),
                parts: vec![BackwardRows {
                    rows: 0..rows,
                    q: take(&mut q, count * query),
                    dout: take(&mut dout, count * query),
                    lse: lse.split_off(..count * heads.query).expect(LENGTHS),
                    delta: delta.split_off(..count * heads.query).expect(LENGTHS),
                    dq: dq.split_off_mut(..count * query).expect(LENGTHS),
                }],
                dk: dk.split_off_mut(..count * kv).expect(LENGTHS),
                dv: dv.split_off_mut(..count * kv).expect(LENGTHS),
                key_tiles: 0..key_tiles(&(0..rows)),
            });
        }
        backward(&mut bundles, threads).map_err(refused)
    })
}

const LENGTHS: &str = "the tensors have the rows of the documents";

/// Splits the first `count` off.
fn take<'a>(rows: &mut Rows<'a>, count: usize) -> Rows<'a> {
    match rows {
        Rows::F32(it) => Rows::F32(it.split_off(..count).expect(LENGTHS)),
        Rows::Bf16(it) => Rows::Bf16(it.split_off(..count).expect(LENGTHS)),
    }
}

fn refused(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
