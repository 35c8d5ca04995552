//! Attention in f64, straight from its definition: what tests compare with.
//!
//! In: the rows of one document, or of a part of it. Out: O, LSE, and the gradients. Slow on purpose:
//! one loop a sum, no tiles, no order to know. No checks beyond slice bounds.

use std::ops::Range;

use crate::{Heads, Mask};

/// Rows of a document; layouts as in [`crate::Forward`].
#[derive(Clone, Debug)]
pub struct Document<'a> {
    /// Heads of all rows.
    pub heads: Heads,
    /// Which keys a row attends to.
    pub mask: Mask,
    /// Factor of the scores.
    pub scale: f32,
    /// Bound of the scores: softcap · tanh(score / softcap).
    pub softcap: Option<f32>,
    /// Rows of the whole document.
    pub document_rows: u32,
    /// Positions of the query rows.
    pub rows: Range<u32>,
    /// Positions of the keys held.
    pub keys: Range<u32>,
    /// `[rows, query, dim]`.
    pub q: &'a [f32],
    /// `[keys, kv, dim]`.
    pub k: &'a [f32],
    /// `[keys, kv, dim]`.
    pub v: &'a [f32],
}

/// Results of the forward pass.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[rows, query, dim]`.
    pub out: Vec<f64>,
    /// Natural log, −∞ without keys, `[rows, query]`.
    pub lse: Vec<f64>,
}

/// Results of the backward pass.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// rowsum(dO∘O), `[rows, query]`.
    pub delta: Vec<f64>,
    /// `[rows, query, dim]`.
    pub dq: Vec<f64>,
    /// `[keys, kv, dim]`.
    pub dk: Vec<f64>,
    /// `[keys, kv, dim]`.
    pub dv: Vec<f64>,
}

/// O and LSE.
pub fn forward(document: &Document<'_>) -> Output {
    forward_with_sinks(document, &[])
}

/// As [`forward`], where each query head has a sink: a score that takes part in the softmax without
/// a value. No sinks if `sinks` is empty.
pub fn forward_with_sinks(document: &Document<'_>, sinks: &[f32]) -> Output {
    let Heads { query, dim, .. } = document.heads;
    let mut out = vec![0.0; document.rows.len() * query * dim];
    let mut lse = vec![f64::NEG_INFINITY; document.rows.len() * query];
    for row in 0..lse.len() {
        let (probabilities, sum) = document.probabilities(row, sinks);
        lse[row] = sum;
        for (key, p) in probabilities {
            let v = &document.v[key * dim..][..dim];
            for (o, &v) in out[row * dim..][..dim].iter_mut().zip(v) {
                *o += p * f64::from(v);
            }
        }
    }
    Output { out, lse }
}

/// The gradients for dO `dout`, `[rows, query, dim]`.
pub fn backward(document: &Document<'_>, dout: &[f32]) -> Gradients {
    backward_with_sinks(document, &[], dout).0
}

/// As [`backward`] with sinks; also returns the gradient of the sinks.
pub fn backward_with_sinks(
    document: &Document<'_>,
    sinks: &[f32],
    dout: &[f32],
) -> (Gradients, Vec<f64>) {
    let Heads { query, kv, dim } = document.heads;
    let scale = f64::from(document.scale);
    let mut delta = vec![0.0; document.rows.len() * query];
    let mut dq = vec![0.0; delta.len() * dim];
    let mut dk = vec![0.0; document.keys.len() * kv * dim];
    let mut dv = dk.clone();
    let mut of_sinks = vec![0.0; sinks.len()];
    for row in 0..delta.len() {
        let (q, dout) = (&document.q[row * dim..][..dim], &dout[row * dim..][..dim]);
        let (probabilities, lse) = document.probabilities(row, sinks);
        let pairs: Vec<_> = (probabilities.into_iter())
            .map(|(key, p)| (key, p, dot(dout, &document.v[key * dim..][..dim])))
            .collect();
        delta[row] = pairs.iter().map(|&(_, p, dp)| p * dp).sum();
        if let Some(&sink) = sinks.get(row % query) {
            // A sink has no value, so dP of it is 0.
            of_sinks[row % query] -= (f64::from(sink) - lse).exp() * delta[row];
        }
        for (key, p, dp) in pairs {
            let ds = p * (dp - delta[row]) * scale * document.score(q, key).1;
            for i in 0..dim {
                dv[key * dim + i] += p * f64::from(dout[i]);
                dk[key * dim + i] += ds * f64::from(q[i]);
                dq[row * dim + i] += ds * f64::from(document.k[key * dim + i]);
            }
        }
    }
    (Gradients { delta, dq, dk, dv }, of_sinks)
}

impl Document<'_> {
    /// Keys that query row `row` (over rows and heads) attends to, as row (over rows and heads) of K,
    /// with their probability; and the row's LSE.
    fn probabilities(&self, row: usize, sinks: &[f32]) -> (Vec<(usize, f64)>, f64) {
        let Heads { query, kv, dim } = self.heads;
        let (position, head) = (self.rows.start + (row / query) as u32, row % query);
        let kept = self.mask.keys(position, self.document_rows);
        let q = &self.q[row * dim..][..dim];
        let scores: Vec<(usize, f64)> = (kept.start.max(self.keys.start)
            ..kept.end.min(self.keys.end))
            .map(|key| {
                let key = (key - self.keys.start) as usize * kv + head / (query / kv);
                (key, self.score(q, key).0)
            })
            .collect();
        let sink = sinks.get(head).map_or(f64::NEG_INFINITY, |&it| f64::from(it));
        let all =
            || scores.iter().map(|it| it.1).chain([sink]).filter(|it| *it > f64::NEG_INFINITY);
        let largest = all().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all().map(|it| (it - largest).exp()).sum();
        let lse = if sum == 0.0 { f64::NEG_INFINITY } else { largest + sum.ln() };
        (scores.into_iter().map(|(key, score)| (key, (score - lse).exp())).collect(), lse)
    }
}

impl Document<'_> {
    /// The score of a row of Q and row `key` (over rows and heads) of K, and its slope: by what it grows with the product.
    fn score(&self, q: &[f32], key: usize) -> (f64, f64) {
        let score = dot(q, &self.k[key * q.len()..][..q.len()]) * f64::from(self.scale);
        let Some(softcap) = self.softcap.map(f64::from) else { return (score, 1.0) };
        let capped = (score / softcap).tanh();
        (softcap * capped, 1.0 - capped * capped)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradients are those of the forward pass: central differences of Σ dO∘O.
    #[test]
    fn gradients_are_the_differences_of_the_output() {
        let heads = Heads { query: 2, kv: 1, dim: 8 };
        let number = |seed: usize| ((seed * 7919 % 101) as f32 - 50.0) / 40.0;
        let numbers =
            |seed: usize, count: usize| (0..count).map(|i| number(seed + i)).collect::<Vec<f32>>();
        let (q, dout) = (numbers(1, 5 * 16), numbers(300, 5 * 16));
        let rows = [q, numbers(100, 5 * 8), numbers(200, 5 * 8)];
        for softcap in [None, Some(0.5)] {
            let loss = |rows: &[Vec<f32>; 3]| -> f64 {
                let output = forward(&document(heads, softcap, rows));
                output.out.iter().zip(&dout).map(|(o, &d)| o * f64::from(d)).sum()
            };
            let gradients = backward(&document(heads, softcap, &rows), &dout);
            for (which, gradient) in [gradients.dq, gradients.dk, gradients.dv].iter().enumerate() {
                for index in 0..gradient.len() {
                    let moved = |by: f32| {
                        let mut rows = rows.clone();
                        rows[which][index] += by;
                        (loss(&rows), f64::from(rows[which][index]))
                    };
                    let ((high, right), (low, left)) = (moved(0.01), moved(-0.01));
                    let difference = (high - low) / (right - left);
                    assert!((difference - gradient[index]).abs() < 1e-4, "{which} {index}");
                }
            }
        }
    }

    fn document(heads: Heads, softcap: Option<f32>, rows: &[Vec<f32>; 3]) -> Document<'_> {
        let [q, k, v] = rows;
        let (mask, document_rows) = (Mask::Window { left: 2 }, 5);
        let (rows, keys) = (0..5, 0..5);
        Document { heads, mask, scale: 0.3, softcap, document_rows, rows, keys, q, k, v }
    }
}
