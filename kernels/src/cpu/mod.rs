//! The CPU engine.

use crate::matmul::{Accumulate, Matrix};
use crate::{Backward, Forward, Threads, key_tiles, reference, wire};
use crate::{Rows, RowsMut};

fn widen(rows: Rows<'_>) -> Vec<f32> {
    match rows {
        Rows::F32(rows) => rows.to_vec(),
        Rows::Bf16(rows) => {
            let mut wide = vec![0.0; rows.len()];
            wire::to_f32(&mut wide, rows);
            wide
        }
    }
}

pub(crate) fn forward(tasks: &mut [Forward<'_>], _threads: Threads) {
    for it in tasks {
        let (q, k, v) = (widen(it.q), widen(it.k), widen(it.v));
        let answer = reference::forward(&reference::Document {
            heads: it.heads,
            mask: it.mask,
            scale: it.scale,
            document_rows: it.document_rows,
            rows: it.rows.clone(),
            keys: it.keys.clone(),
            q: &q,
            k: &k,
            v: &v,
        });
        let out: Vec<f32> = answer.out.iter().map(|&x| x as f32).collect();
        match &mut it.out {
            RowsMut::F32(to) => to.copy_from_slice(&out),
            RowsMut::Bf16(to) => wire::to_bf16(to, &out),
        }
        for (to, &from) in it.lse.iter_mut().zip(&answer.lse) {
            *to = from as f32;
        }
    }
}

pub(crate) fn backward(bundles: &mut [Backward<'_>], _threads: Threads) {
    for it in bundles {
        assert_eq!(it.key_tiles, 0..key_tiles(&it.keys));
        let (k, v) = (widen(it.k), widen(it.v));
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
        for part in &mut it.parts {
            let (q, dout) = (widen(part.q), widen(part.dout));
            let document = reference::Document {
                heads: it.heads,
                mask: it.mask,
                scale: it.scale,
                document_rows: it.document_rows,
                rows: part.rows.clone(),
                keys: it.keys.clone(),
                q: &q,
                k: &k,
                v: &v,
            };
            let answer = reference::backward(&document, &dout);
            for (to, from) in part.dq.iter_mut().zip(answer.dq) {
                *to = from as f32;
            }
            for (to, from) in dk.iter_mut().zip(answer.dk).chain(dv.iter_mut().zip(answer.dv)) {
                *to += from;
            }
        }
        for (to, from) in it.dk.iter_mut().zip(dk).chain(it.dv.iter_mut().zip(dv)) {
            *to = from as f32;
        }
    }
}

pub(crate) fn matmul(
    c: &mut [f32],
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: Accumulate,
    _threads: Threads,
) {
    for r in 0..a.rows {
        for j in 0..b.columns {
            let mut sum = match accumulate {
                Accumulate::Replace => 0.0,
                Accumulate::Add => c[r * b.columns + j],
            };
            for i in 0..a.columns {
                sum += a.data[r * a.row_stride + i * a.column_stride]
                    * b.data[i * b.row_stride + j * b.column_stride];
            }
            c[r * b.columns + j] = sum;
        }
    }
}

pub(crate) fn arithmetic() -> &'static str {
    "f32"
}

pub(crate) fn instruction_set() -> &'static str {
    "plain"
}
