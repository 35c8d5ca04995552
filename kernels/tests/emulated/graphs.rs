//! Runs of plans as graphs.
//!
//! In: whatever libcuda the process finds. Out: the bits of plain runs, as often as a graph is run; and refusals of what cannot
//! be recorded.

use cadre_kernels::device::{
    Buffer, Error, ForwardPlan, ForwardTask, ForwardTensors, Gpu, Graph, Keys, Shape, Stream,
    TaskRows,
};
use cadre_kernels::{Heads, Mask};
use half::bf16;

use super::cases::{Case, Random};

const ROWS: u32 = 300;
const HEADS: Heads = Heads { query: 2, kv: 1, dim: 64 };

struct Layer {
    plan: ForwardPlan,
    out: Buffer<bf16>,
    lse: Buffer<f32>,
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn runs() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let (stream, other) = (Stream::new(&gpu).expect("a stream"), Stream::new(&gpu).expect("one"));
    let case = Case::new(&mut Random(6), HEADS, Mask::Causal, 0..ROWS, ROWS);
    let keys = Keys { document_rows: ROWS, keys: 0..ROWS, kv_row: 0 };
    let rows = TaskRows { rows: 0..ROWS, q_row: 0 };
    let tasks = [ForwardTask { mask: case.mask, keys, rows }];
    let upload = |rows: &[bf16]| Buffer::of(&stream, rows, "rows").expect("memory");
    let (q, k, v) = (upload(&case.q), upload(&case.k), upload(&case.v));
    let layer = || {
        // Segments, so that a run is a memset and two launches.
        let shape = Shape { segment: 128, ..Shape::new(HEADS, case.scale()) };
        let plan = ForwardPlan::new(&stream, shape, &tasks).expect("good tasks");
        let out = Buffer::of(&stream, &vec![bf16::NAN; case.q.len()], "O").expect("memory");
        let lse = Buffer::of(&stream, &[f32::NAN; ROWS as usize * 2], "LSE").expect("memory");
        Layer { plan, out, lse }
    };
    let put = |layer: &mut Layer, stream: &Stream| {
        let (out, lse) = (layer.out.slice_mut(), layer.lse.slice_mut());
        let tensors = ForwardTensors { q: q.slice(), k: k.slice(), v: v.slice(), out, lse };
        layer.plan.run(stream, tensors)
    };
    let bits = |layer: &Layer, stream: &Stream| {
        let mut out = vec![bf16::NAN; case.q.len()];
        layer.out.read(stream, 0, &mut out).expect("O");
        let mut lse = vec![f32::NAN; ROWS as usize * 2];
        layer.lse.read(stream, 0, &mut lse).expect("LSE");
        assert!(out.iter().all(|it| it.is_finite()) && lse.iter().all(|it| it.is_finite()));
        let out = out.iter().map(|it| u32::from(it.to_bits()));
        out.chain(lse.iter().map(|it| it.to_bits())).collect::<Vec<_>>()
    };
    let mut plain = layer();
    put(&mut plain, &stream).expect("a launch");
    let right = bits(&plain, &stream);

    // Two layers in one graph; nothing runs while it is recorded. Twice on one stream, then on another.
    let mut layers = [layer(), layer()];
    stream.wait().expect("copies");
    let mut graph = Graph::record(&stream, "two layers", |stream| {
        layers.iter_mut().try_for_each(|it| put(it, stream))
    })
    .expect("launches can be recorded");
    graph.run(&stream).expect("a launch");
    graph.run(&stream).expect("a launch");
    stream.wait().expect("no error");
    graph.run(&other).expect("a launch");
    drop(graph);
    for layer in &layers {
        assert_eq!(bits(layer, &other), right);
    }

    // A copy of the host's memory is none that can be recorded; the stream is good for more.
    let mut layer = layer();
    stream.wait().expect("copies");
    let error = Graph::record(&stream, "a copy", |stream| {
        put(&mut layer, stream)?;
        Buffer::of(stream, &[1.0_f32], "a number").map(|_| ())
    })
    .map(|_| ())
    .expect_err("a copy");
    assert!(matches!(&error, Error::Call { .. }) && !error.is_lost(), "{error}");
    put(&mut layer, &stream).expect("a launch");
    assert_eq!(bits(&layer, &stream), right);
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn first() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    let case = Case::new(&mut Random(7), HEADS, Mask::Causal, 0..ROWS, ROWS);
    let keys = Keys { document_rows: ROWS, keys: 0..ROWS, kv_row: 0 };
    let rows = TaskRows { rows: 0..ROWS, q_row: 0 };
    let tasks = [ForwardTask { mask: case.mask, keys, rows }];
    let upload = |rows: &[bf16]| Buffer::of(&stream, rows, "rows").expect("memory");
    let (q, k, v, mut out) =
        (upload(&case.q), upload(&case.k), upload(&case.v), upload(&vec![bf16::NAN; case.q.len()]));
    let mut lse = Buffer::<f32>::new(&gpu, ROWS as usize * 2, "LSE").expect("memory");
    let mut plan =
        ForwardPlan::new(&stream, Shape::new(HEADS, case.scale()), &tasks).expect("a plan");
    stream.wait().expect("copies");
    // No kernel has run in this process.
    let mut graph = Graph::record(&stream, "the first launch", |stream| {
        let (out, lse) = (out.slice_mut(), lse.slice_mut());
        let tensors = ForwardTensors { q: q.slice(), k: k.slice(), v: v.slice(), out, lse };
        plan.run(stream, tensors)
    })
    .expect("its kernels are loaded");
    graph.run(&stream).expect("a launch");
    drop(graph);
    let mut rows = vec![bf16::NAN; case.q.len()];
    out.read(&stream, 0, &mut rows).expect("O");
    assert!(rows.iter().all(|it| it.is_finite()));
}
