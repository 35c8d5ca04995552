//! One point of the grid on the GPU: a task forward, and as a bundle backward; and what a task costs beside its work.
//!
//! In: an open GPU and a point. Out: picoseconds of a query head, the fastest of several runs, timed by events of the GPU.
//! Rows lie in its memory: copies are the links' matter. Enough heads run at once to fill all processors several times.
//!
//! dQ is summed in one order, as jobs that promise bits have it. Invariant: numbers are random, never zeros.

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, Buffer, Error, Event, ForwardPlan, ForwardTask,
    ForwardTensors, Gpu, Graph, Keys, Order, QueryGradients, Shape, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask};
use cadre_planner::Kept;
use half::bf16;

/// Query rows of the grid.
pub(super) const ROWS: [u32; 4] = [128, 512, 2_048, 8_192];
/// Keys beside those of the rows themselves.
pub(super) const KEYS: [u32; 4] = [0, 2_048, 16_384, 65_536];
const MEASURED_RUNS: usize = 5;
/// Runs are recorded in one graph until they take this many seconds, but at most `MAX_RECORDED_RUNS` of
/// them.
const RECORDED_SECONDS: f64 = 1e-3;
const MAX_RECORDED_RUNS: usize = 32;
/// Query heads a KV head.
const HEADS_OF_A_GROUP: usize = 8;
const TILE_ROWS: usize = 128;
/// Numbers that are drawn; no multiple of a row's, so that rows differ.
const DRAWN_NUMBERS: usize = (1 << 20) + 64 * 7 + 1;
/// Tasks of one row that are enough to tell what one costs.
pub(super) const ENOUGH_TASKS: u32 = 8_192;

/// Picoseconds of a query head, forward and backward.
pub(super) fn measure(
    gpu: &Gpu,
    head_dim: u16,
    kept: Kept,
    (rows, before): (u32, u32),
) -> Result<[u64; 2], Error> {
    let tiles = (rows as usize).div_ceil(TILE_ROWS);
    let kv = (8 * gpu.processors() as usize).div_ceil(tiles * HEADS_OF_A_GROUP).clamp(2, 64);
    let heads = Heads { query: kv * HEADS_OF_A_GROUP, kv, dim: head_dim.into() };
    let mask = match kept {
        Kept::Causal => Mask::Causal,
        Kept::Full => Mask::Full,
    };
    let all = rows + before;
    let keys = Keys { document_rows: all, keys: 0..all, kv_row: 0 };
    let part = TaskRows { rows: before..all, q_row: 0 };
    let scale = f32::from(head_dim).powf(-0.5);
    let (shape, stream) = (Shape::new(heads, scale), Stream::new(gpu)?);
    let (queries, held) =
        (rows as usize * heads.query * heads.dim, all as usize * heads.kv * heads.dim);
    let upload = |seed, count| Buffer::of(&stream, &numbers(seed, count), "rows");
    let (q, dout, k, v) =
        (upload(1, queries)?, upload(2, queries)?, upload(3, held)?, upload(4, held)?);
    let scalars = rows as usize * heads.query;
    let mut out = Buffer::<bf16>::new(gpu, queries, "O")?;
    let mut lse = Buffer::<f32>::new(gpu, scalars, "LSE")?;
    let task = ForwardTask { mask, keys: keys.clone(), rows: part.clone() };
    let mut forward = ForwardPlan::new(&stream, shape, &[task])?;
    let forward = fastest(&stream, |stream| {
        let (q, k, v) = (q.slice(), k.slice(), v.slice());
        let (out, lse) = (out.slice_mut(), lse.slice_mut());
        forward.run(stream, ForwardTensors { q, k, v, out, lse })
    })?;
    let mut dq = Buffer::<f32>::new(gpu, queries, "dQ")?;
    let [mut dk, mut dv] = [Buffer::<f32>::new(gpu, held, "dK")?, Buffer::new(gpu, held, "dV")?];
    // Any Δ takes as long.
    let delta = Buffer::of(&stream, &vec![0.25; scalars], "Δ")?;
    let bundle = BackwardBundle { mask, keys, dkv_row: 0, parts: vec![part] };
    let mut backward = BackwardPlan::new(&stream, shape, &[bundle], Order::Fixed, 1)?;
    let backward = fastest(&stream, |stream| {
        let [q, dout, k, v] = [&q, &dout, &k, &v].map(Buffer::slice);
        let (lse, delta, dq) = (lse.slice(), delta.slice(), QueryGradients::F32(dq.slice_mut()));
        let (dk, dv) = (dk.slice_mut(), dv.slice_mut());
        backward.run(stream, BackwardTensors { q, dout, k, v, lse, delta, dq, dk, dv })
    })?;
    Ok([forward, backward].map(|it| ((it * 1e12 / heads.query as f64) as u64).max(1)))
}

/// Nanoseconds that one task of one row adds to a launch of `count` tasks.
pub(super) fn task(gpu: &Gpu, head_dim: u16, count: u32) -> Result<u64, Error> {
    let heads = Heads { query: 1, kv: 1, dim: head_dim.into() };
    let stream = Stream::new(gpu)?;
    let tasks: Vec<_> = (0..count)
        .map(|row| ForwardTask {
            mask: Mask::Causal,
            keys: Keys { document_rows: 1, keys: 0..1, kv_row: row },
            rows: TaskRows { rows: 0..1, q_row: row },
        })
        .collect();
    let elements = count as usize * heads.dim;
    let rows = Buffer::of(&stream, &numbers(1, elements), "rows")?;
    let mut out = Buffer::<bf16>::new(gpu, elements, "O")?;
    let mut lse = Buffer::<f32>::new(gpu, count as usize, "LSE")?;
    let mut plan = ForwardPlan::new(&stream, Shape::new(heads, 1.0), &tasks)?;
    let seconds = fastest(&stream, |stream| {
        let (q, k, v) = (rows.slice(), rows.slice(), rows.slice());
        plan.run(stream, ForwardTensors { q, k, v, out: out.slice_mut(), lse: lse.slice_mut() })
    })?;
    Ok((seconds * 1e9 / f64::from(count)).ceil() as u64)
}

/// The fastest of several runs in seconds, after some that do not count.
///
/// Short runs are recorded as a graph, many of them, so that the GPU does not wait for the host between their launches.
fn fastest(
    stream: &Stream,
    mut run: impl FnMut(&Stream) -> Result<(), Error>,
) -> Result<f64, Error> {
    run(stream)?;
    let once = seconds(stream, || run(stream))?;
    let times = ((RECORDED_SECONDS / once) as usize).clamp(1, MAX_RECORDED_RUNS);
    let all = |stream: &Stream| (0..times).try_for_each(|_| run(stream));
    let mut graph = Graph::record(stream, "runs of one point", all)?;
    let mut best = f64::INFINITY;
    for _ in 0..MEASURED_RUNS {
        best = best.min(seconds(stream, || graph.run(stream))?);
    }
    Ok(best / times as f64)
}

/// Seconds that the GPU takes for what `put` puts on the stream.
fn seconds(stream: &Stream, put: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Event::timed(stream)?;
    put()?;
    let end = Event::timed(stream)?;
    end.wait()?;
    end.seconds_since(&start)
}

/// Numbers within ±1, the same for the same seed; the first of them again and again, as the grid has billions.
fn numbers(seed: u32, count: usize) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    let some: Vec<_> = (0..count.min(DRAWN_NUMBERS)).map(|_| next()).collect();
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        all.extend_from_slice(&some[..some.len().min(count - all.len())]);
    }
    all
}

#[cfg(test)]
#[path = "../../../kernels/emulation/built.rs"]
mod built;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_drawn_once_and_repeated() {
        let all = numbers(3, 2 * DRAWN_NUMBERS + 7);
        assert_eq!(all.len(), 2 * DRAWN_NUMBERS + 7);
        assert!((0..DRAWN_NUMBERS + 7).all(|at| all[at] == all[at + DRAWN_NUMBERS]));
        assert_ne!(all[..64], all[64..128]);
        assert_eq!(numbers(3, 5), all[..5]);
        assert_ne!(numbers(4, 5), all[..5]);
    }

    #[test]
    #[ignore = "needs a GPU; the other test runs it over the emulated one"]
    fn a_point_and_a_task_take_time() {
        let gpu = Gpu::open(0).expect("a GPU");
        let [forward, backward] = measure(&gpu, 64, Kept::Causal, (128, 0)).expect("a point");
        assert!(forward > 1 && backward > 1);
        assert!(task(&gpu, 64, 32).expect("tasks") > 0);
    }

    #[test]
    fn points_are_measured_on_the_emulated_gpu() {
        if cadre_kernels::cubins::CUBINS.is_empty() {
            eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
            return;
        }
        let done = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "a_point_and_a_task_take_time"])
            .env("LD_LIBRARY_PATH", built::driver())
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&done.stderr));
    }
}
