//! Attention within pieces (documents, or chunks of one) that lie one behind the other in one memory.
//!
//! In: what the layer's scores are, the rows of each piece (a document, or a chunk of one), Q, K and V of all of them. Out: O
//! and LSE, or dQ, dK and dV, in f32.
//!
//! Invariant: one task, and one bundle, per piece. So O, LSE and dQ have the bits of any plan, dK and dV those of a plan that
//! cuts nothing.

use crate::{
    Backward, BackwardRows, Error, Forward, Heads, Mask, Rows, RowsMut, Threads, backward, forward,
    key_tiles,
};

/// Pieces that do not attend to each other, and the attention within each.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    /// Heads of all rows.
    pub heads: Heads,
    /// Which keys of its piece a row attends to.
    pub mask: Mask,
    /// Factor of the scores.
    pub scale: f32,
    /// Bounds the scores, as in [`Forward::softcap`].
    pub softcap: Option<f32>,
    /// Rows of each piece.
    pub rows: &'a [u32],
    /// Threads that compute.
    pub threads: Threads,
}

/// The inputs of the backward pass of all pieces: rows `[rows, heads, dim]`, LSE and Δ `[rows, query heads]`.
#[derive(Clone, Copy, Debug)]
pub struct PiecesBackward<'a> {
    /// Q, K and V.
    pub qkv: [Rows<'a>; 3],
    /// dO.
    pub dout: Rows<'a>,
    /// LSE of the forward.
    pub lse: &'a [f32],
    /// rowsum(dO∘O), less dLSE if there is any.
    pub delta: &'a [f32],
}

impl Pieces<'_> {
    /// Computes O and LSE of all pieces.
    ///
    /// # Errors
    ///
    /// Those of [`forward`].
    ///
    /// # Panics
    ///
    /// If a tensor has fewer rows than the pieces.
    pub fn forward(
        &self,
        [mut q, mut k, mut v]: [Rows<'_>; 3],
        mut out: &mut [f32],
        mut lse: &mut [f32],
    ) -> Result<(), Error> {
        let &Self { heads, mask, scale, softcap, rows, threads } = self;
        let mut tasks = Vec::with_capacity(rows.len());
        for &rows in rows {
            let [query, kv, each] = self.numbers(rows);
            tasks.push(Forward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                rows: 0..rows,
                keys: 0..rows,
                q: take(&mut q, query),
                k: take(&mut k, kv),
                v: take(&mut v, kv),
                out: RowsMut::F32(out.split_off_mut(..query).expect(LENGTHS)),
                lse: lse.split_off_mut(..each).expect(LENGTHS),
            });
        }
        forward(&mut tasks, threads)
    }

    /// Computes dQ, dK and dV of all pieces.
    ///
    /// # Errors
    ///
    /// Those of [`backward`].
    ///
    /// # Panics
    ///
    /// If a tensor has fewer rows than the pieces.
    pub fn backward(
        &self,
        from: PiecesBackward<'_>,
        [mut dq, mut dk, mut dv]: [&mut [f32]; 3],
    ) -> Result<(), Error> {
        let &Self { heads, mask, scale, softcap, rows, threads } = self;
        let PiecesBackward { qkv: [mut q, mut k, mut v], mut dout, mut lse, mut delta } = from;
        let mut bundles = Vec::with_capacity(rows.len());
        for &rows in rows {
            let [query, kv, each] = self.numbers(rows);
            bundles.push(Backward {
                heads,
                mask,
                scale,
                softcap,
                document_rows: rows,
                keys: 0..rows,
                k: take(&mut k, kv),
                v: take(&mut v, kv),
                parts: vec![BackwardRows {
                    rows: 0..rows,
                    q: take(&mut q, query),
                    dout: take(&mut dout, query),
                    lse: lse.split_off(..each).expect(LENGTHS),
                    delta: delta.split_off(..each).expect(LENGTHS),
                    dq: dq.split_off_mut(..query).expect(LENGTHS),
                }],
                dk: dk.split_off_mut(..kv).expect(LENGTHS),
                dv: dv.split_off_mut(..kv).expect(LENGTHS),
                key_tiles: 0..key_tiles(&(0..rows)),
            });
        }
        backward(&mut bundles, threads)
    }

    /// Elements of Q, of K and of LSE in `rows` rows.
    fn numbers(&self, rows: u32) -> [usize; 3] {
        let (rows, heads) = (rows as usize, self.heads);
        [rows * heads.query * heads.dim, rows * heads.kv * heads.dim, rows * heads.query]
    }
}

const LENGTHS: &str = "the tensors have the rows of the pieces";

/// Splits off the first `count` elements.
fn take<'a>(rows: &mut Rows<'a>, count: usize) -> Rows<'a> {
    match rows {
        Rows::F32(it) => Rows::F32(it.split_off(..count).expect(LENGTHS)),
        Rows::Bf16(it) => Rows::Bf16(it.split_off(..count).expect(LENGTHS)),
    }
}
