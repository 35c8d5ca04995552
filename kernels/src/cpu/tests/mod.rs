//! The engine against the f64 reference, and the promises about bits as properties.

mod launches;

use std::ops::Range;

use proptest::prelude::*;

use launches::task;

use super::engine::Engine;
use super::{backward, forward, product};
use crate::matmul::{Accumulate, Matrix};
use crate::reference::{self, Document};
use crate::{Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, Threads, key_tiles};

/// A document with numbers made from a seed.
#[derive(Clone, Debug)]
struct Case {
    heads: Heads,
    mask: Mask,
    softcap: Option<f32>,
    rows: u32,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

/// How a case is computed: what must not show in the bits.
#[derive(Clone, Debug)]
struct Way {
    /// Ends of the tasks' rows.
    cuts: Vec<u32>,
    threads: usize,
    engine: usize,
    /// Key tiles of the first backward launch.
    first_tiles: u32,
    /// Workspace of the heads in flight of a backward launch.
    space: usize,
}

#[derive(Clone, Debug, PartialEq)]
struct Bits {
    out: Vec<u32>,
    lse: Vec<u32>,
    dq: Vec<u32>,
    dk: Vec<u32>,
    dv: Vec<u32>,
}

const SCALE: f32 = 0.2;

impl Case {
    fn new(heads: Heads, mask: Mask, rows: u32, seed: u64) -> Self {
        let mut state = seed | 1;
        let mut numbers = |heads: usize, dim: usize| -> Vec<f32> {
            let number = |_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 3.4
            };
            (0..rows as usize * heads * dim).map(number).collect()
        };
        let Heads { query, kv, dim } = heads;
        let (q, k, v) = (numbers(query, dim), numbers(kv, dim), numbers(kv, dim));
        Self { heads, mask, softcap: None, rows, q, k, v, dout: numbers(query, dim) }
    }

    fn document(&self) -> Document<'_> {
        let Self { heads, mask, rows, q, k, v, .. } = self;
        let (rows, keys) = (0..*rows, 0..*rows);
        let (heads, mask, softcap, document_rows) = (*heads, *mask, self.softcap, self.rows);
        Document { heads, mask, scale: SCALE, softcap, document_rows, rows, keys, q, k, v }
    }

    /// Computes everything one way; tasks hold only the keys that they need.
    fn compute(&self, way: &Way) -> (Vec<f32>, Vec<f32>, [Vec<f32>; 3]) {
        let Heads { query, kv, dim } = self.heads;
        let engine = Engine::all()[way.engine % Engine::all().len()];
        let threads = Threads::new(way.threads);
        let (mut out, mut lse) = (vec![f32::NAN; self.q.len()], vec![f32::NAN; self.q.len() / dim]);
        let mut ranges = Vec::new();
        let mut start = 0;
        for &end in way.cuts.iter().chain([&self.rows]) {
            ranges.push(start..end);
            start = end;
        }
        let cut = |rows: &Range<u32>, per_row: usize| {
            rows.start as usize * per_row..rows.end as usize * per_row
        };
        let (mut outs, mut lses) = (&mut out[..], &mut lse[..]);
        let mut tasks = Vec::new();
        for rows in &ranges {
            let keys = self.mask.keys_of(rows, self.rows);
            let (out, rest) = outs.split_at_mut(rows.len() * query * dim);
            outs = rest;
            let (lse, rest) = lses.split_at_mut(rows.len() * query);
            lses = rest;
            tasks.push(Forward {
                heads: self.heads,
                mask: self.mask,
                scale: SCALE,
                softcap: self.softcap,
                document_rows: self.rows,
                rows: rows.clone(),
                q: Rows::F32(&self.q[cut(rows, query * dim)]),
                k: Rows::F32(&self.k[cut(&keys, kv * dim)]),
                v: Rows::F32(&self.v[cut(&keys, kv * dim)]),
                keys,
                out: RowsMut::F32(out),
                lse,
            });
        }
        forward::run(engine, &mut tasks, threads, forward::SEGMENT);

        let delta = self.delta(&out);
        let mut gradients = [
            vec![f32::NAN; self.q.len()],
            vec![f32::NAN; self.k.len()],
            vec![f32::NAN; self.k.len()],
        ];
        let tiles = key_tiles(&(0..self.rows));
        let middle = way.first_tiles.min(tiles);
        for key_tiles in [0..middle, middle..tiles] {
            if key_tiles.is_empty() && middle > 0 {
                continue;
            }
            let [dq, dk, dv] = &mut gradients;
            let mut rest = &mut dq[..];
            let mut parts = Vec::new();
            for rows in &ranges {
                let (dq, after) = rest.split_at_mut(rows.len() * query * dim);
                rest = after;
                parts.push(BackwardRows {
                    rows: rows.clone(),
                    q: Rows::F32(&self.q[cut(rows, query * dim)]),
                    dout: Rows::F32(&self.dout[cut(rows, query * dim)]),
                    lse: &lse[cut(rows, query)],
                    delta: &delta[cut(rows, query)],
                    dq,
                });
            }
            let bundle = Backward {
                heads: self.heads,
                mask: self.mask,
                scale: SCALE,
                softcap: self.softcap,
                document_rows: self.rows,
                keys: 0..self.rows,
                k: Rows::F32(&self.k),
                v: Rows::F32(&self.v),
                parts,
                dk,
                dv,
                key_tiles,
            };
            backward::run(engine, &mut [bundle], threads, way.space);
        }
        (out, lse, gradients)
    }

    /// Δ = rowsum(dO∘O).
    fn delta(&self, out: &[f32]) -> Vec<f32> {
        let dim = self.heads.dim;
        (out.chunks_exact(dim).zip(self.dout.chunks_exact(dim)))
            .map(|(o, d)| o.iter().zip(d).map(|(o, d)| o * d).sum())
            .collect()
    }

    fn bits(&self, way: &Way) -> Bits {
        let (out, lse, [dq, dk, dv]) = self.compute(way);
        let bits = |rows: Vec<f32>| rows.into_iter().map(f32::to_bits).collect();
        Bits { out: bits(out), lse: bits(lse), dq: bits(dq), dk: bits(dk), dv: bits(dv) }
    }
}

fn whole() -> Way {
    Way { cuts: Vec::new(), threads: 1, engine: 0, first_tiles: u32::MAX, space: backward::SPACE }
}

/// Largest difference, relative to the largest number if that is above 1.
fn error(actual: &[f32], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0.0, |a: f64, b| a.max(b.abs())).max(1.0);
    let differences = actual.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).abs());
    let worst = differences.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a });
    worst / largest
}

#[test]
fn results_are_those_of_the_reference() {
    for (query, kv, dim) in [(4, 2, 64), (1, 1, 128), (3, 1, 24), (6, 2, 256), (70, 1, 8)] {
        for mask in [Mask::Causal, Mask::Full, Mask::Window { left: 70 }] {
            for rows in [1, 63, 128, 300] {
                let softcap = match rows {
                    63 => Some(0.7),
                    128 => Some(30.0),
                    _ => None,
                };
                for softcap in [None, softcap] {
                    let heads = Heads { query, kv, dim };
                    let case = Case { softcap, ..Case::new(heads, mask, rows, rows.into()) };
                    agrees_with_the_reference(&case);
                }
            }
        }
    }
}

fn agrees_with_the_reference(case: &Case) {
    let expected = reference::forward(&case.document());
    let gradients = reference::backward(&case.document(), &case.dout);
    let (out, lse, [dq, dk, dv]) = case.compute(&whole());
    let Case { heads, mask, softcap, rows, .. } = case;
    for (name, error, bound) in [
        ("out", error(&out, &expected.out), 5e-6),
        ("lse", error(&lse, &expected.lse), 2e-6),
        ("dq", error(&dq, &gradients.dq), 2e-5),
        ("dk", error(&dk, &gradients.dk), 2e-5),
        ("dv", error(&dv, &gradients.dv), 2e-5),
    ] {
        let what = format!("{heads:?} {mask:?} softcap {softcap:?} rows {rows}");
        assert!(error < bound, "{what}: {name} is off by {error:e}");
    }
}

fn ways(rows: u32) -> impl Strategy<Value = Way> {
    let cuts = prop::collection::btree_set(0..=rows, 0..4);
    let space = prop::sample::select(vec![0, 40_000, backward::SPACE]);
    (cuts, 1_usize..4, 0_usize..4, 0_u32..4, space).prop_map(
        |(cuts, threads, engine, first_tiles, space)| {
            let cuts = cuts.into_iter().collect();
            Way { cuts, threads, engine, first_tiles, space }
        },
    )
}

fn cases() -> impl Strategy<Value = (Case, Way)> {
    let heads = prop::sample::select(vec![(4, 2, 16), (1, 1, 64), (3, 1, 8), (2, 2, 72)]);
    let mask = prop_oneof![
        Just(Mask::Causal),
        Just(Mask::Full),
        (0_u32..300).prop_map(|left| Mask::Window { left })
    ];
    let softcap = prop::sample::select(vec![None, Some(1.5)]);
    (heads, mask, softcap, 1_u32..400, any::<u64>()).prop_flat_map(
        |((query, kv, dim), mask, softcap, rows, seed)| {
            let case = Case { softcap, ..Case::new(Heads { query, kv, dim }, mask, rows, seed) };
            (Just(case), ways(rows))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    /// Cuts, threads, vector width and launches do not show in the bits. Engines that round
    /// multiply-adds twice are another arithmetic and compared with themselves alone.
    #[test]
    fn bits_do_not_depend_on_the_way((case, way) in cases()) {
        let engines = Engine::all();
        let mine = engines[way.engine % engines.len()].arithmetic;
        let same = engines.iter().position(|it| it.arithmetic == mine).expect("it is one of them");
        let base = case.bits(&Way { engine: same, ..whole() });
        prop_assert_eq!(case.bits(&way), base);
    }

    #[test]
    fn product_elements_depend_on_their_row_and_column_alone(
        (m, n, k) in (1_usize..40, 1_usize..70, 0_usize..600),
        (row, column) in (0_usize..40, 0_usize..70),
        threads in 1_usize..4,
        engine in 0_usize..4,
        (left, right) in (any::<bool>(), any::<bool>()),
    ) {
        let case = Case::new(Heads { query: 1, kv: 1, dim: 8 }, Mask::Full, 6000, 3);
        let (a, b) = (&case.q[..m * k], &case.k[..k * n]);
        let a = if left { Matrix::new(a, m, k) } else { Matrix::new(a, k, m).transposed() };
        let b = if right { Matrix::new(b, k, n) } else { Matrix::new(b, n, k).transposed() };
        let engine = Engine::all()[engine % Engine::all().len()];
        let mut c = vec![1.5; m * n];
        product::run(engine, &mut c, (a, b), Accumulate::Add, Threads::new(threads));
        let (row, column) = (row % m, column % n);
        let of_a: Vec<f32> =
            (0..k).map(|i| a.data[row * a.row_stride + i * a.column_stride]).collect();
        let of_b: Vec<f32> =
            (0..k).map(|i| b.data[i * b.row_stride + column * b.column_stride]).collect();
        let mut one = [1.5];
        let vectors = (Matrix::new(&of_a, 1, k), Matrix::new(&of_b, k, 1));
        product::run(engine, &mut one, vectors, Accumulate::Add, Threads::ONE);
        prop_assert_eq!(one[0].to_bits(), c[row * n + column].to_bits());
        let exact: f64 = of_a.iter().zip(&of_b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        prop_assert!((f64::from(one[0]) - 1.5 - exact).abs() < 1e-4);
        product::run(engine, &mut one, vectors, Accumulate::Replace, Threads::ONE);
        prop_assert!((f64::from(one[0]) - exact).abs() < 1e-4);
    }
}

#[test]
fn segments_are_merged_in_key_order_and_rows_are_cut_freely() {
    let case = Case::new(Heads { query: 2, kv: 1, dim: 16 }, Mask::Causal, 500, 9);
    let expected = reference::forward(&case.document());
    let run = |segment| {
        let (mut out, mut lse) = (vec![0.0; case.q.len()], vec![0.0; 1000]);
        forward::run(Engine::best(), &mut [task(&case, &mut out, &mut lse)], Threads::ONE, segment);
        (out, lse)
    };
    let (out, lse) = run(64);
    assert!(error(&out, &expected.out) < 2e-6 && error(&lse, &expected.lse) < 1e-6);
    assert_ne!(run(64), run(forward::SEGMENT), "the segments are really closed");
    // Rows 400.. alone have their first keys in the first segment all the same.
    let (mut tail, mut tail_lse) = (vec![0.0; 100 * 32], vec![0.0; 200]);
    let mut part = task(&case, &mut tail, &mut tail_lse);
    (part.rows, part.q) = (400..500, Rows::F32(&case.q[400 * 32..]));
    forward::run(Engine::best(), &mut [part], Threads::ONE, 64);
    assert_eq!((&tail[..], &tail_lse[..]), (&out[400 * 32..], &lse[800..]));
}

#[test]
fn rows_without_keys_are_zero_and_have_no_gradient() {
    let case = Case::new(Heads { query: 2, kv: 1, dim: 8 }, Mask::Causal, 3, 5);
    let (mut out, mut lse) = (vec![f32::NAN; 48], vec![f32::NAN; 6]);
    let mut empty = task(&case, &mut out, &mut lse);
    (empty.keys, empty.k, empty.v) = (0..0, Rows::F32(&[]), Rows::F32(&[]));
    crate::forward(&mut [empty], Threads::ONE).unwrap();
    assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));

    let (mut dq, mut dk, mut dv) = (vec![f32::NAN; 48], vec![f32::NAN; 24], vec![f32::NAN; 24]);
    let rows = BackwardRows {
        rows: 0..3,
        q: Rows::F32(&case.q),
        dout: Rows::F32(&case.dout),
        lse: &lse,
        delta: &[0.0; 6],
        dq: &mut dq,
    };
    let bundle = Backward {
        heads: case.heads,
        mask: Mask::Causal,
        scale: SCALE,
        softcap: None,
        document_rows: 3,
        keys: 0..3,
        k: Rows::F32(&case.k),
        v: Rows::F32(&case.v),
        parts: vec![rows],
        dk: &mut dk,
        dv: &mut dv,
        key_tiles: 0..1,
    };
    crate::backward(&mut [bundle], Threads::ONE).unwrap();
    assert!(dq.iter().chain(&dk).chain(&dv).all(|&x| x == 0.0));
}

#[test]
fn nan_comes_out_as_nan() {
    let mut case = Case::new(Heads { query: 1, kv: 1, dim: 8 }, Mask::Causal, 200, 5);
    case.q[150 * 8] = f32::NAN;
    let (out, lse, [dq, dk, dv]) = case.compute(&Way { threads: 2, ..whole() });
    assert!(out[150 * 8].is_nan() && lse[150].is_nan() && dq[150 * 8].is_nan());
    assert!(dk[0].is_nan() && dv[0].is_nan() && !out[149 * 8].is_nan());
}
