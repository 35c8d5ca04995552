//! Tests that need a driver; `device.rs` runs each in a process of its own.
//!
//! In: whatever libcuda the process finds. Out: the host's results against f64, over random documents. All outputs are NaN
//! before a launch.

mod arenas;
mod cases;
mod engine;
mod graphs;
mod lent;
mod linear;
mod portable;
mod rows;
mod sinks;
mod softcap;
mod uploads;

use cadre_kernels::device::host::HostRows;
use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, Buffer, Error, Event, ForwardPlan, ForwardTask,
    ForwardTensors, Gpu, Keys, Order, QueryGradients, Refusal, Shape, Stream, TaskRows,
};
use cadre_kernels::reference;
use cadre_kernels::{Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, key_tiles};
use half::bf16;

use cases::{Case, HEADS, Random, cases, close, wide};

struct Output {
    out: Vec<bf16>,
    lse: Vec<f32>,
}

/// Forward of all cases in one call, each cut before `cut` rows.
fn forward_of(host: &mut HostRows, cases: &[Case], cut: usize) -> Result<Vec<Output>, Error> {
    let poison = |it: &Case| Output {
        out: vec![bf16::NAN; it.q.len()],
        lse: vec![f32::NAN; it.rows.len() * it.heads.query],
    };
    let mut outputs: Vec<Output> = cases.iter().map(poison).collect();
    let mut tasks = Vec::new();
    for (it, output) in cases.iter().zip(&mut outputs) {
        let width = it.heads.query * it.heads.dim;
        let cut = cut.min(it.rows.len());
        let (first, second) = output.out.split_at_mut(cut * width);
        let (first_lse, second_lse) = output.lse.split_at_mut(cut * it.heads.query);
        let middle = it.rows.start + cut as u32;
        for (rows, out, lse, q) in [
            (it.rows.start..middle, first, first_lse, &it.q[..cut * width]),
            (middle..it.rows.end, second, second_lse, &it.q[cut * width..]),
        ] {
            tasks.push(Forward {
                heads: it.heads,
                mask: it.mask,
                scale: it.scale(),
                softcap: it.softcap,
                document_rows: it.document_rows,
                rows,
                keys: it.keys.clone(),
                q: Rows::Bf16(q),
                k: Rows::Bf16(&it.k),
                v: Rows::Bf16(&it.v),
                out: RowsMut::Bf16(out),
                lse,
            });
        }
    }
    host.forward(&mut tasks)?;
    drop(tasks);
    Ok(outputs)
}

fn host() -> HostRows {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    HostRows::new(&gpu, Order::Fixed).expect("a stream")
}

fn bits(rows: &[bf16]) -> Vec<u16> {
    rows.iter().map(|it| it.to_bits()).collect()
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn forward() {
    let mut host = host();
    for heads in HEADS {
        let cases = cases(heads);
        let together = forward_of(&mut host, &cases, 0).expect("good tasks");
        for (case, output) in cases.iter().zip(&together) {
            let right = case.with_document(reference::forward);
            close("O", &wide(&output.out), &right.out, 4e-3);
            close("LSE", &output.lse, &right.lse, 1e-5);
        }
        for (index, case) in cases.iter().enumerate() {
            let alone = forward_of(&mut host, std::slice::from_ref(case), 37).expect("good tasks");
            assert_eq!(bits(&alone[0].out), bits(&together[index].out), "{heads:?}, case {index}");
            assert_eq!(alone[0].lse, together[index].lse, "{heads:?}, case {index}");
        }
    }
}

struct Gradients {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

fn backward_of(host: &mut HostRows, cases: &[Case]) -> Result<Vec<Gradients>, Error> {
    let forward: Vec<_> = cases.iter().map(|it| it.with_document(reference::forward)).collect();
    let lse: Vec<Vec<f32>> =
        forward.iter().map(|it| it.lse.iter().map(|&it| it as f32).collect()).collect();
    let delta: Vec<Vec<f32>> = cases
        .iter()
        .map(|it| {
            let right = it.with_document(|document| reference::backward(document, &wide(&it.dout)));
            right.delta.iter().map(|&it| it as f32).collect()
        })
        .collect();
    let poison = |it: &Case| Gradients {
        dq: vec![f32::NAN; it.q.len()],
        dk: vec![f32::NAN; it.k.len()],
        dv: vec![f32::NAN; it.k.len()],
    };
    let mut outputs: Vec<Gradients> = cases.iter().map(poison).collect();
    let mut bundles = Vec::new();
    for (index, (it, output)) in cases.iter().zip(&mut outputs).enumerate() {
        // Two parts of a bundle.
        let (width, heads) = (it.heads.query * it.heads.dim, it.heads.query);
        let cut = it.rows.len() / 3;
        let (first, second) = output.dq.split_at_mut(cut * width);
        let middle = it.rows.start + cut as u32;
        let parts = [
            (it.rows.start..middle, 0..cut, first),
            (middle..it.rows.end, cut..it.rows.len(), second),
        ];
        let part = |(rows, at, dq): (_, std::ops::Range<usize>, _)| BackwardRows {
            rows,
            q: Rows::Bf16(&it.q[at.start * width..at.end * width]),
            dout: Rows::Bf16(&it.dout[at.start * width..at.end * width]),
            lse: &lse[index][at.start * heads..at.end * heads],
            delta: &delta[index][at.start * heads..at.end * heads],
            dq,
        };
        bundles.push(Backward {
            heads: it.heads,
            mask: it.mask,
            scale: it.scale(),
            softcap: it.softcap,
            document_rows: it.document_rows,
            keys: it.keys.clone(),
            k: Rows::Bf16(&it.k),
            v: Rows::Bf16(&it.v),
            parts: parts.into_iter().map(part).collect(),
            dk: &mut output.dk,
            dv: &mut output.dv,
            key_tiles: 0..key_tiles(&it.keys),
        });
    }
    host.backward(&mut bundles)?;
    drop(bundles);
    Ok(outputs)
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn backward() {
    let mut host = host();
    for heads in HEADS {
        let cases = cases(heads);
        let together = backward_of(&mut host, &cases).expect("good bundles");
        for (index, (case, output)) in cases.iter().zip(&together).enumerate() {
            let right = case.with_document(|it| reference::backward(it, &wide(&case.dout)));
            close("dQ", &output.dq, &right.dq, 5e-3);
            close("dK", &output.dk, &right.dk, 5e-3);
            close("dV", &output.dv, &right.dv, 5e-3);
            let alone = backward_of(&mut host, std::slice::from_ref(case)).expect("good bundles");
            assert_eq!(alone[0].dq, output.dq, "{heads:?}, case {index}");
            assert_eq!(alone[0].dk, output.dk, "{heads:?}, case {index}");
            assert_eq!(alone[0].dv, output.dv, "{heads:?}, case {index}");
        }
    }
}

/// dQ as rows that stay on the GPU have it.
fn dq_in_bf16(
    plan: &mut BackwardPlan,
    stream: &Stream,
    [q, dout, k, v]: [&Buffer<bf16>; 4],
    [lse, delta]: [&Buffer<f32>; 2],
) -> Vec<bf16> {
    let mut rows = vec![bf16::NAN; q.len()];
    let mut dq = Buffer::of(stream, &rows, "dQ").expect("memory");
    let [mut dk, mut dv] =
        [0; 2].map(|_| Buffer::of(stream, &vec![0.0; k.len()], "gradients").expect("memory"));
    let [q, dout, k, v] = [q, dout, k, v].map(Buffer::slice);
    let [lse, delta] = [lse, delta].map(Buffer::slice);
    let ([dk, dv], to) = ([&mut dk, &mut dv].map(Buffer::slice_mut), dq.slice_mut());
    let to = QueryGradients::Bf16(to);
    plan.run(stream, BackwardTensors { q, dout, k, v, lse, delta, dq: to, dk, dv })
        .expect("a launch");
    dq.read(stream, 0, &mut rows).expect("dQ");
    rows
}

/// dQ, dK and dV of a run, as many numbers as there are of Q, K and V.
fn gradients_of(
    plan: &mut BackwardPlan,
    stream: &Stream,
    [q, dout, k, v]: [&Buffer<bf16>; 4],
    [lse, delta]: [&Buffer<f32>; 2],
) -> [Vec<f32>; 3] {
    let mut buffers = [q, k, v]
        .map(|it| Buffer::<f32>::new(stream.gpu(), it.len(), "gradients").expect("memory"));
    let [dq, dk, dv] = buffers.each_mut().map(Buffer::slice_mut);
    let [q, dout, k, v] = [q, dout, k, v].map(Buffer::slice);
    let [lse, delta] = [lse, delta].map(Buffer::slice);
    let dq = QueryGradients::F32(dq);
    plan.run(stream, BackwardTensors { q, dout, k, v, lse, delta, dq, dk, dv }).expect("a launch");
    buffers.map(|it| {
        let mut rows = vec![f32::NAN; it.len()];
        it.read(stream, 0, &mut rows).expect("gradients");
        rows
    })
}

/// A document of 400 rows on the GPU, forward and backward, cut in two tasks.
#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn plans() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    let heads = Heads { query: 2, kv: 1, dim: 64 };
    let case = Case::new(&mut Random(5), heads, Mask::Causal, 0..400, 400);
    let keys = Keys { document_rows: 400, keys: 0..400, kv_row: 0 };
    let parts =
        [(0..150, 0), (150..400, 150)].map(|(rows, q_row)| TaskRows { rows, q_row }).to_vec();
    let tasks: Vec<_> = parts
        .iter()
        .map(|rows| ForwardTask { mask: case.mask, keys: keys.clone(), rows: rows.clone() })
        .collect();
    let upload = |rows: &[bf16]| Buffer::of(&stream, rows, "rows").expect("memory");
    let (q, k, v, dout) = (upload(&case.q), upload(&case.k), upload(&case.v), upload(&case.dout));
    let right = case.with_document(reference::forward);

    // Segments of 128 keys: parts are merged. Twice, on another stream the second time.
    let shape = Shape { segment: 128, blocks: Some(2), ..Shape::new(heads, case.scale()) };
    let mut plan = ForwardPlan::new(&stream, shape, &tasks).expect("good tasks");
    assert!(plan.tile_pairs() >= 2 * 400 * 401 / 2);
    let second = Stream::new(&gpu).expect("a stream");
    second.wait_for(&Event::record(&stream).expect("an event")).expect("an order");
    for on in [&stream, &second] {
        // Fresh ones: what the second run leaves out must not be the first one's.
        let mut out = Buffer::of(&stream, &vec![bf16::NAN; case.q.len()], "O").expect("memory");
        let mut lse = Buffer::of(&stream, &[f32::NAN; 800], "LSE").expect("memory");
        stream.wait().expect("copies");
        let start = Event::timed(on).expect("an event");
        let [q, k, v] = [&q, &k, &v].map(Buffer::slice);
        let tensors = ForwardTensors { q, k, v, out: out.slice_mut(), lse: lse.slice_mut() };
        plan.run(on, tensors).expect("a launch");
        let end = Event::timed(on).expect("an event");
        end.wait().expect("it ends");
        let order = Event::record(on).expect("an event");
        on.wait().expect("no error");
        assert!(order.seconds_since(&start).is_err(), "it has no time");
        assert!(end.seconds_since(&start).expect("both are over") > 0.0);
        let (mut o, mut l) = (vec![bf16::NAN; case.q.len()], vec![f32::NAN; 800]);
        out.read(on, 0, &mut o).expect("O");
        lse.read(on, 0, &mut l).expect("LSE");
        close("O", &wide(&o), &right.out, 4e-3);
        close("LSE", &l, &right.lse, 1e-5);
    }

    // One launch or three, twice each: dK and dV differ in nothing, and dQ neither.
    let gradients = case.with_document(|it| reference::backward(it, &wide(&case.dout)));
    let narrow = |it: &[f64]| it.iter().map(|&it| it as f32).collect::<Vec<_>>();
    let lse = Buffer::of(&stream, &narrow(&right.lse), "LSE").expect("memory");
    let delta = Buffer::of(&stream, &narrow(&gradients.delta), "Δ").expect("memory");
    let bundle = BackwardBundle { mask: case.mask, keys, dkv_row: 0, parts };
    let mut first: Option<[Vec<f32>; 3]> = None;
    for launches in [1, 3] {
        let shape = Shape::new(heads, case.scale());
        let mut plan = BackwardPlan::new(
            &stream,
            shape,
            std::slice::from_ref(&bundle),
            Order::Fixed,
            launches,
        )
        .expect("a good bundle");
        for _ in 0..2 {
            let rows = gradients_of(&mut plan, &stream, [&q, &dout, &k, &v], [&lse, &delta]);
            close("dQ", &rows[0], &gradients.dq, 5e-3);
            close("dK", &rows[1], &gradients.dk, 5e-3);
            close("dV", &rows[2], &gradients.dv, 5e-3);
            assert_eq!(first.get_or_insert_with(|| rows.clone()), &rows, "{launches} launches");
        }
        // In bf16: within f64's bounds, and what dQ in f32 is when it is rounded.
        let rows = dq_in_bf16(&mut plan, &stream, [&q, &dout, &k, &v], [&lse, &delta]);
        close("dQ in bf16", &wide(&rows), &gradients.dq, 5e-3);
        let [in_f32, ..] = first.as_ref().expect("runs in f32");
        let rounded: Vec<_> = in_f32.iter().map(|it| bf16::from_f32(*it)).collect();
        assert_eq!(bits(&rows), bits(&rounded), "{launches} launches");
    }
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn refusals() {
    let mut host = host();
    let heads = Heads { query: 2, kv: 1, dim: 64 };
    let case = || Case::new(&mut Random(1), heads, Mask::Causal, 0..20, 20);
    let mut refused = |change: &dyn Fn(&mut Case)| {
        let mut case = case();
        change(&mut case);
        forward_of(&mut host, &[case], 0).map(|_| ()).unwrap_err()
    };
    let dim = refused(&|it| it.heads = Heads { query: 4, kv: 2, dim: 32 });
    assert_eq!(dim, Error::Refused(Refusal::Dim { dim: 32 }));
    let shape = refused(&|it| it.keys = 0..19);
    assert!(matches!(shape, Error::Refused(Refusal::Shape(_))), "{shape}");
    // f32 rows.
    let (numbers, mut out, mut lse) = (vec![0.0; 2560], vec![0.0; 2560], vec![0.0; 40]);
    let task = Forward {
        heads,
        mask: Mask::Causal,
        scale: 1.0,
        softcap: None,
        document_rows: 20,
        rows: 0..20,
        keys: 0..20,
        q: Rows::F32(&numbers),
        k: Rows::F32(&numbers[..1280]),
        v: Rows::F32(&numbers[..1280]),
        out: RowsMut::F32(&mut out),
        lse: &mut lse,
    };
    let dtype = host.forward(&mut [task]).unwrap_err();
    assert_eq!(dtype, Error::Refused(Refusal::Dtype { task: 0, field: "q" }));
    assert!(dtype.to_string().contains("f32"));
    // An address that the copy engine cannot read from, and a tensor that is too short.
    let gpu = host.stream().gpu().clone();
    let keys = Keys { document_rows: 20, keys: 0..20, kv_row: 0 };
    let rows = TaskRows { rows: 0..20, q_row: 0 };
    let tasks = [ForwardTask { mask: Mask::Causal, keys, rows }];
    let mut plan = ForwardPlan::new(host.stream(), Shape::new(heads, 1.0), &tasks).expect("good");
    let buffer = || Buffer::<bf16>::new(&gpu, 2560, "rows").expect("memory");
    let (q, mut out) = (buffer(), buffer());
    let mut lse = Buffer::new(&gpu, 39, "LSE").expect("memory");
    let (k, v) = (q.slice(), q.slice());
    let tensors = ForwardTensors { q: q.slice(), k, v, out: out.slice_mut(), lse: lse.slice_mut() };
    let short = Refusal::Length { field: "lse", expected: 40, actual: 39 };
    assert_eq!(plan.run(host.stream(), tensors), Err(Error::Refused(short)));
    // A device that does not exist.
    assert_eq!(Gpu::open(7).unwrap_err(), Error::NoDevice { ordinal: 7, count: 1 });
}

#[test]
#[ignore = "breaks the emulated GPU"]
fn short_memory() {
    let mut host = host();
    let heads = Heads { query: 4, kv: 2, dim: 64 };
    let random = &mut Random(9);
    let cases: Vec<_> =
        (0..4).map(|_| Case::new(random, heads, Mask::Causal, 0..130, 130)).collect();
    let outputs = forward_of(&mut host, &cases, 0).expect("half of the batch fits");
    for (case, output) in cases.iter().zip(&outputs) {
        close("O", &wide(&output.out), &case.with_document(reference::forward).out, 4e-3);
    }
    let large = Case::new(random, heads, Mask::Causal, 0..900, 900);
    let error = forward_of(&mut host, &[large], 0).map(|_| ()).unwrap_err();
    assert!(
        error.is_out_of_memory() && error.to_string().contains("hand in fewer rows"),
        "{error}"
    );
}

#[test]
#[ignore = "breaks the emulated GPU"]
fn lost() {
    let mut host = host();
    let heads = Heads { query: 1, kv: 1, dim: 64 };
    let case = Case::new(&mut Random(1), heads, Mask::Causal, 0..20, 20);
    forward_of(&mut host, std::slice::from_ref(&case), 0).expect("the first launch");
    for _ in 0..2 {
        let error = forward_of(&mut host, std::slice::from_ref(&case), 0).map(|_| ()).unwrap_err();
        assert!(error.is_lost(), "{error}");
    }
    let error = backward_of(&mut host, &[case]).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("the GPU is lost") && error.contains("CUDA_ERROR_LAUNCH_FAILED"),
        "{error}"
    );
}
