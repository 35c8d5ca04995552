//! Random rows of documents, and how results are compared with f64.
//!
//! In: a seed, heads, a mask. Out: a [`Case`]. Nothing here touches a GPU.

use cadre_kernels::reference::Document;
use cadre_kernels::{Heads, Mask};
use half::bf16;

/// Root mean square of the differences over that of the reference; NaN never passes.
pub(super) fn close(what: &str, result: &[f32], expected: &[f64], tolerance: f64) {
    let (mut difference, mut size) = (0.0, 0.0);
    for (&x, &y) in result.iter().zip(expected) {
        if y.is_finite() || f64::from(x).to_bits() != y.to_bits() {
            difference += (f64::from(x) - y).powi(2);
        }
        size += if y.is_finite() { y * y } else { 0.0 };
    }
    let error = (difference / f64::max(size, 1e-30)).sqrt();
    assert!(difference == 0.0 || error <= tolerance, "{what} is off by {error:.2e}");
    assert_eq!(result.len(), expected.len(), "{what}");
}

/// Numbers by seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % n
    }

    pub(super) fn numbers(&mut self, count: usize) -> Vec<bf16> {
        let sum = |it: &mut Self| (0..4).map(|_| it.below(2001) as f32 / 1000.0 - 1.0).sum::<f32>();
        (0..count).map(|_| bf16::from_f32(sum(self))).collect()
    }
}

/// Exactly, as f32.
pub(super) fn wide(rows: &[bf16]) -> Vec<f32> {
    rows.iter().map(|it| it.to_f32()).collect()
}

/// Rows of one document.
pub(super) struct Case {
    pub(super) heads: Heads,
    pub(super) mask: Mask,
    pub(super) softcap: Option<f32>,
    pub(super) document_rows: u32,
    pub(super) rows: std::ops::Range<u32>,
    pub(super) keys: std::ops::Range<u32>,
    pub(super) q: Vec<bf16>,
    pub(super) dout: Vec<bf16>,
    pub(super) k: Vec<bf16>,
    pub(super) v: Vec<bf16>,
}

impl Case {
    pub(super) fn new(
        random: &mut Random,
        heads: Heads,
        mask: Mask,
        rows: std::ops::Range<u32>,
        document_rows: u32,
    ) -> Self {
        let keys = mask.keys_of(&rows, document_rows);
        let queries = rows.len() * heads.query * heads.dim;
        let held = keys.len() * heads.kv * heads.dim;
        let [q, dout] = [0; 2].map(|_| random.numbers(queries));
        let [k, v] = [0; 2].map(|_| random.numbers(held));
        Self { heads, mask, softcap: None, document_rows, rows, keys, q, dout, k, v }
    }

    pub(super) fn scale(&self) -> f32 {
        (self.heads.dim as f32).powf(-0.5)
    }

    pub(super) fn with_document<T>(&self, run: impl FnOnce(&Document<'_>) -> T) -> T {
        let (q, k, v) = (wide(&self.q), wide(&self.k), wide(&self.v));
        run(&Document {
            heads: self.heads,
            mask: self.mask,
            scale: self.scale(),
            softcap: self.softcap,
            document_rows: self.document_rows,
            rows: self.rows.clone(),
            keys: self.keys.clone(),
            q: &q,
            k: &k,
            v: &v,
        })
    }
}

/// Documents with every mask.
pub(super) fn cases(heads: Heads) -> Vec<Case> {
    let random = &mut Random(heads.dim as u64);
    [
        (Mask::Causal, 0..150, 150),
        (Mask::Causal, 131..200, 200),
        (Mask::Full, 3..40, 129),
        (Mask::Window { left: 70 }, 0..300, 300),
        (Mask::Causal, 7..8, 9),
    ]
    .into_iter()
    .map(|(mask, rows, document_rows)| Case::new(random, heads, mask, rows, document_rows))
    .collect()
}

/// Every head dim.
pub(super) const HEADS: [Heads; 3] = [
    Heads { query: 4, kv: 2, dim: 64 },
    Heads { query: 2, kv: 2, dim: 128 },
    Heads { query: 2, kv: 1, dim: 256 },
];
