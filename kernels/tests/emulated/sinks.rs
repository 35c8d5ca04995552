//! Attention sinks on the GPU: rows and gradients of a document in two tasks, against f64.
//!
//! In: whatever libcuda the process finds. Out: O, LSE, dQ, dK, dV and the gradient of the sinks, close to the reference;
//! rows beside the tasks stay as they were.

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, Buffer, ForwardPlan, ForwardTask, ForwardTensors, Gpu, Keys,
    Order, Shape, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask, reference, sink_gradient};
use half::bf16;

use super::cases::{Case, Random, close, wide};
use super::gradients_of;

/// Rows in the tensors before the document's.
const BEFORE: usize = 3;

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn sinks() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    for (heads, rows) in [
        (Heads { query: 4, kv: 2, dim: 64 }, 10..200),
        (Heads { query: 2, kv: 1, dim: 128 }, 0..130),
        (Heads { query: 1, kv: 1, dim: 256 }, 64..90),
    ] {
        let stream = Stream::new(&gpu).expect("a stream");
        let case = Case::new(&mut Random(8), heads, Mask::Causal, rows.clone(), 200);
        one(&stream, &case);
    }
}

fn one(stream: &Stream, case: &Case) {
    let Heads { query, dim, .. } = case.heads;
    let count = case.rows.len();
    let sinks: Vec<f32> =
        (0..query).map(|it| [1.5, f32::NEG_INFINITY, -3.0, 8.0][it % 4]).collect();
    let keys = Keys { document_rows: 200, keys: case.keys.clone(), kv_row: 0 };
    let cut = case.rows.start + count as u32 / 3;
    let parts = [
        TaskRows { rows: case.rows.start..cut, q_row: BEFORE as u32 },
        TaskRows { rows: cut..case.rows.end, q_row: BEFORE as u32 + cut - case.rows.start },
    ];
    let task =
        |rows: &TaskRows| ForwardTask { mask: case.mask, keys: keys.clone(), rows: rows.clone() };
    let tasks: Vec<_> = parts.iter().map(task).collect();
    let before = vec![bf16::NAN; BEFORE * query * dim];
    let behind = |rows: &[bf16]| [&before[..], rows].concat();
    let upload = |rows: &[bf16]| Buffer::of(stream, rows, "rows").expect("memory");
    let (q, dout) = (upload(&behind(&case.q)), upload(&behind(&case.dout)));
    let (k, v) = (upload(&case.k), upload(&case.v));
    let all = BEFORE + count;
    let mut out = Buffer::of(stream, &vec![bf16::NAN; all * query * dim], "O").expect("memory");
    let mut lse = Buffer::of(stream, &vec![f32::NAN; all * query], "LSE").expect("memory");
    let of_sinks = Buffer::of(stream, &sinks, "sinks").expect("memory");
    let mut plan =
        ForwardPlan::new(stream, Shape::new(case.heads, case.scale()), &tasks).expect("good tasks");
    let right = case.with_document(|it| reference::forward_with_sinks(it, &sinks));
    let (mut o, mut l) = (vec![bf16::NAN; all * query * dim], vec![f32::NAN; all * query]);
    // Twice: the second run has forgotten the first one's sinks.
    for _ in 0..2 {
        let [q, k, v] = [&q, &k, &v].map(Buffer::slice);
        let tensors = ForwardTensors { q, k, v, out: out.slice_mut(), lse: lse.slice_mut() };
        plan.run(stream, tensors).expect("a launch");
        let rows = (out.slice_mut(), lse.slice_mut());
        plan.sink(stream, of_sinks.slice(), rows).expect("a launch");
        out.read(stream, 0, &mut o).expect("O");
        lse.read(stream, 0, &mut l).expect("LSE");
        let (beside, o) = o.split_at(BEFORE * query * dim);
        assert!(
            beside.iter().all(|it| it.is_nan()) && l[..BEFORE * query].iter().all(|it| it.is_nan())
        );
        close("O", &wide(o), &right.out, 5e-3);
        close("LSE", &l[BEFORE * query..], &right.lse, 1e-5);
    }

    let (expected, expected_of_sinks) =
        case.with_document(|it| reference::backward_with_sinks(it, &sinks, &wide(&case.dout)));
    let mut delta = vec![f32::NAN; BEFORE * query];
    delta.extend(expected.delta.iter().map(|&it| it as f32));
    let gradient = sink_gradient(&l[BEFORE * query..], &delta[BEFORE * query..], &sinks);
    close("ds", &gradient, &expected_of_sinks, 1e-4);
    let delta = Buffer::of(stream, &delta, "Δ").expect("memory");
    let bundle = BackwardBundle { mask: case.mask, keys, dkv_row: 0, parts: parts.to_vec() };
    let shape = Shape::new(case.heads, case.scale());
    let mut plan =
        BackwardPlan::new(stream, shape, &[bundle], Order::Fixed, 1).expect("a good bundle");
    let [dq, dk, dv] = gradients_of(&mut plan, stream, [&q, &dout, &k, &v], [&lse, &delta]);
    close("dQ", &dq[BEFORE * query * dim..], &expected.dq, 5e-3);
    close("dK", &dk, &expected.dk, 5e-3);
    close("dV", &dv, &expected.dv, 5e-3);
}
