//! Core attention in this process, by the kernels that servers run: no pool, no session.
//!
//! In: rows of whole documents, one behind the other, and how many rows each has. Out: O and LSE, or dQ, dK and dV, written
//! into tensors of the caller's in f32.
//!
//! Invariant: one task, and one bundle, per document, or chunk of it; so O, LSE and dQ have the bits of every pool.

use cadre_kernels::{Heads, Pieces, PiecesBackward, Threads, delta};
use cadre_worker::session::{Factor, Kind};
use pyo3::prelude::*;

use crate::refusal::refused;
use crate::tensor::{Given, Side, Tensor, check_apart};

/// Kind of the layer, threads, and rows of each document.
type Batch = (String, usize, Vec<u32>);

/// What all documents of a call have in common.
pub(crate) struct Common {
    pub(crate) heads: Heads,
    pub(crate) kind: Kind,
    /// Rows of the pieces that attention does not cross, in order: of whole documents, or of their chunks.
    pub(crate) rows: Vec<u32>,
    threads: Threads,
}

impl Common {
    fn pieces(&self) -> Pieces<'_> {
        let &Self { heads, kind, ref rows, threads } = self;
        let mask = cadre_worker::launch::mask(kind.mask);
        let (scale, softcap) = (kind.scale_of(), kind.softcap.map(Factor::get));
        Pieces { heads, mask, scale, softcap, rows, threads }
    }

    /// Refuses rows that are not those of the documents.
    fn new((kind, threads, documents): &Batch, qkv: &[Tensor; 3]) -> PyResult<Self> {
        let [q, k, v] = qkv;
        let refuse = |message: String| Err(refused(message));
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
        let heads = Heads { query, kv, dim };
        let [Ok(query), Ok(kv), Ok(dim)] = [query, kv, dim].map(u16::try_from) else {
            return refuse(format!("Q is {:?}; give at most 65,535 heads of 256", q.shape()));
        };
        let kind = Kind::read(kind, cadre_planner::Heads { query, kv, dim }).map_err(refused)?;
        Ok(Self {
            heads,
            rows: documents.iter().flat_map(|&it| kind.pieces(it)).collect(),
            kind,
            threads: Threads::new(*threads),
        })
    }
}

/// Tensors of a forward pass that fit each other.
pub(crate) struct ForwardCall {
    pub(crate) common: Common,
    pub(crate) qkv: [Tensor; 3],
    pub(crate) o: Tensor,
    pub(crate) lse: Tensor,
}

impl ForwardCall {
    /// Refuses results that share memory with what is read, and shapes that are not Q's.
    pub(crate) fn new(
        side: Side,
        batch: &Batch,
        qkv: &Given<'_, 3>,
        results: &Given<'_, 2>,
    ) -> PyResult<Self> {
        let qkv = Tensor::all(["Q", "K", "V"], side, qkv)?;
        let [o, lse] = Tensor::all(["O", "LSE"], side, results)?;
        check_apart(&[&o, &lse], &qkv.each_ref())?;
        let common = Common::new(batch, &qkv)?;
        o.check_shape(qkv[0].shape())?;
        lse.check_shape(&qkv[0].shape()[..2])?;
        Ok(Self { common, qkv, o, lse })
    }
}

/// Tensors of a backward pass that fit each other, but for those that its two sides have apart.
pub(crate) struct BackwardCall {
    pub(crate) common: Common,
    pub(crate) qkv: [Tensor; 3],
    /// dQ, dK and dV.
    pub(crate) results: [Tensor; 3],
}

impl BackwardCall {
    /// Refuses as [`ForwardCall::new`]. What else is read: `rows` have the shape of Q, `heads` a number a head.
    pub(crate) fn new(
        side: Side,
        batch: &Batch,
        qkv: &Given<'_, 3>,
        results: &Given<'_, 3>,
        (rows, heads): (&[&Tensor], &[&Tensor]),
    ) -> PyResult<Self> {
        let qkv = Tensor::all(["Q", "K", "V"], side, qkv)?;
        let results = Tensor::all(["dQ", "dK", "dV"], side, results)?;
        let read: Vec<&Tensor> = qkv.iter().chain([rows, heads].concat()).collect();
        check_apart(&results.each_ref(), &read)?;
        let common = Common::new(batch, &qkv)?;
        for it in rows {
            it.check_shape(qkv[0].shape())?;
        }
        for it in heads {
            it.check_shape(&qkv[0].shape()[..2])?;
        }
        for (result, of) in results.iter().zip(&qkv) {
            result.check_shape(of.shape())?;
        }
        Ok(Self { common, qkv, results })
    }
}

/// O and LSE of whole documents, from Q, K and V.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn local_forward(
    py: Python<'_>,
    batch: Batch,
    qkv: Given<'_, 3>,
    results: Given<'_, 2>,
) -> PyResult<()> {
    let call = ForwardCall::new(Side::Host, &batch, &qkv, &results)?;
    let ForwardCall { common, qkv, mut o, mut lse } = call;
    py.detach(|| {
        let qkv = [qkv[0].dense()?, qkv[1].dense()?, qkv[2].dense()?];
        common.pieces().forward(qkv, o.f32s_mut()?, lse.f32s_mut()?).map_err(refused)
    })
}

/// dQ, dK and dV of whole documents, from Q, K, V and from O, LSE, dO, dO in the type of Q, and dLSE if it is not zero. As on a pool Δ comes
/// from O and dO in f32, and the kernel reads dO as it is on the wire.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "Python's tuples come by value")]
pub(crate) fn local_backward(
    py: Python<'_>,
    batch: Batch,
    qkv: Given<'_, 3>,
    gradients: Given<'_, 5>,
    results: Given<'_, 3>,
) -> PyResult<()> {
    let [o, lse, wide, dout, dlse] = gradients;
    let names = ["O", "LSE", "dO", "dO on the wire"];
    let [o, lse, wide, dout] = Tensor::all(names, Side::Host, &[o, lse, wide, dout])?;
    let dlse = Tensor::optional("dLSE", Side::Host, &dlse)?;
    let heads: Vec<&Tensor> = [&lse].into_iter().chain(&dlse).collect();
    let read = (&[&o, &wide, &dout][..], &heads[..]);
    let call = BackwardCall::new(Side::Host, &batch, &qkv, &results, read)?;
    let BackwardCall { common, qkv, mut results } = call;
    py.detach(|| {
        let Common { heads, threads, .. } = common;
        let mut delta = delta(threads, heads.dim, wide.f32s()?, o.f32s()?);
        if let Some(dlse) = &dlse {
            for (delta, dlse) in delta.iter_mut().zip(dlse.f32s()?) {
                *delta -= dlse;
            }
        }
        let qkv = [qkv[0].dense()?, qkv[1].dense()?, qkv[2].dense()?];
        let (dout, lse) = (dout.dense()?, lse.f32s()?);
        let [dq, dk, dv] = results.each_mut().map(Tensor::f32s_mut);
        let from = PiecesBackward { qkv, dout, lse, delta: &delta };
        common.pieces().backward(from, [dq?, dk?, dv?]).map_err(refused)
    })
}
