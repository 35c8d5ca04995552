//! One point of the grid: a task forward, and as a bundle backward.

use std::time::Instant;

use cadre_kernels::{
    Backward, BackwardRows, Error, Forward, Heads, Mask, Rows, RowsMut, Threads, backward, forward,
    key_tiles,
};
use cadre_planner::Kept;

/// Seconds that the runs of a point take together, within the limits below.
const POINT_SECONDS: f64 = 0.2;
const RUNS_OF_A_POINT: std::ops::RangeInclusive<usize> = 3..=25;

/// Rows behind keys, under two KV heads for each thread and twice as many query heads.
pub(super) struct Case {
    pub(super) head_dim: u16,
    pub(super) kept: Kept,
    pub(super) rows: u32,
    /// Keys before the first row.
    pub(super) keys: u32,
}

impl Case {
    /// Picoseconds of a query head, forward and backward: the fastest of several runs.
    pub(super) fn measure(&self, threads: Threads) -> Result<[u64; 2], Error> {
        let kv = 2 * threads.0.get();
        let heads = Heads { query: 2 * kv, kv, dim: self.head_dim.into() };
        let mut point = Point::new(self, heads);
        let mut best = [f64::INFINITY; 2];
        let first = point.run(threads)?;
        let turns = (POINT_SECONDS / (first[0] + first[1])) as usize;
        for _ in 0..turns.clamp(*RUNS_OF_A_POINT.start(), *RUNS_OF_A_POINT.end()) {
            for (best, seconds) in best.iter_mut().zip(point.run(threads)?) {
                *best = best.min(seconds);
            }
        }
        Ok(best.map(|it| (it * 1e12 / heads.query as f64) as u64))
    }
}

struct Point {
    heads: Heads,
    mask: Mask,
    document_rows: u32,
    rows: std::ops::Range<u32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Point {
    fn new(case: &Case, heads: Heads) -> Self {
        let keys = case.keys + case.rows;
        let rows = case.keys..keys;
        let mask = match case.kept {
            Kept::Causal => Mask::Causal,
            Kept::Full => Mask::Full,
        };
        let (queries, all) =
            (rows.len() * heads.query * heads.dim, keys as usize * heads.kv * heads.dim);
        Self {
            heads,
            mask,
            document_rows: keys,
            q: numbers(1, queries),
            k: numbers(2, all),
            v: numbers(3, all),
            out: vec![0.0; queries],
            lse: vec![0.0; rows.len() * heads.query],
            dq: vec![0.0; queries],
            dk: vec![0.0; all],
            dv: vec![0.0; all],
            rows,
        }
    }

    /// Seconds forward and backward.
    fn run(&mut self, threads: Threads) -> Result<[f64; 2], Error> {
        let Self { heads, mask, document_rows, rows, q, k, v, out, lse, dq, dk, dv } = self;
        let scale = (heads.dim as f32).powf(-0.5);
        let keys = 0..*document_rows;
        let start = Instant::now();
        forward(
            &mut [Forward {
                heads: *heads,
                mask: *mask,
                scale,
                softcap: None,
                document_rows: *document_rows,
                rows: rows.clone(),
                keys: keys.clone(),
                q: Rows::F32(q),
                k: Rows::F32(k),
                v: Rows::F32(v),
                out: RowsMut::F32(out),
                lse,
            }],
            threads,
        )?;
        let middle = Instant::now();
        // Any gradient takes as long; O serves as dO, LSE as Δ.
        let part = BackwardRows {
            rows: rows.clone(),
            q: Rows::F32(q),
            dout: Rows::F32(out),
            lse,
            delta: lse,
            dq,
        };
        backward(
            &mut [Backward {
                heads: *heads,
                mask: *mask,
                scale,
                softcap: None,
                document_rows: *document_rows,
                key_tiles: 0..key_tiles(&keys),
                keys,
                k: Rows::F32(k),
                v: Rows::F32(v),
                parts: vec![part],
                dk,
                dv,
            }],
            threads,
        )?;
        let end = Instant::now();
        Ok([(middle - start).as_secs_f64(), (end - middle).as_secs_f64()])
    }
}

/// Numbers within ±1, the same for the same seed.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
