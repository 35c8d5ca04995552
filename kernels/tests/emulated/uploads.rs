//! Lists on their way to the GPU; files of kernels.
//!
//! In: whatever libcuda the process finds; over the emulated one, copies that would make their caller wait for a stream are refused.
//! Out: plans and copies of rows that are put while a stream has work, with the bits of plain runs; forms of another build, by name.

use cadre_kernels::cubins::CUBINS;
use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, Buffer, Error, Ferry, ForwardPlan, ForwardTask, ForwardTensors,
    Gpu, Keys, Order, RowCopier, RowCopy, Scratch, Shape, Spread, Stream, TaskRows,
};
use cadre_kernels::{Heads, Mask};
use half::bf16;

use super::cases::{Case, Random};

const ROWS: u32 = 300;
const HEADS: Heads = Heads { query: 2, kv: 1, dim: 64 };

fn keys() -> Keys {
    Keys { document_rows: ROWS, keys: 0..ROWS, kv_row: 0 }
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn lists() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    let scratch = Scratch::new(&gpu).expect("a scratch");
    let case = Case::new(&mut Random(8), HEADS, Mask::Causal, 0..ROWS, ROWS);
    let upload = |rows: &[bf16]| {
        let buffer = Buffer::of(&stream, rows, "rows").expect("memory");
        stream.wait().expect("a copy");
        buffer
    };
    let (q, k, v) = (upload(&case.q), upload(&case.k), upload(&case.v));
    let rows = || TaskRows { rows: 0..ROWS, q_row: 0 };
    let tasks = [ForwardTask { mask: case.mask, keys: keys(), rows: rows() }];
    let shape = Shape { segment: 128, ..Shape::new(HEADS, case.scale()) };
    let attend = |out: &mut Buffer<bf16>| {
        let mut lse = Buffer::<f32>::new(&gpu, ROWS as usize * 2, "LSE").expect("memory");
        let mut plan = ForwardPlan::with(&stream, shape, &tasks, &scratch).expect("a plan");
        let (out, lse_to) = (out.slice_mut(), lse.slice_mut());
        let tensors = ForwardTensors { q: q.slice(), k: k.slice(), v: v.slice(), out, lse: lse_to };
        plan.run(&stream, tensors).expect("a launch");
        (plan, lse)
    };
    let (mut first, mut second) = (upload(&case.q), upload(&case.q));
    // Behind work that nobody waits for: lists of plans, of sinks, and of copies of rows.
    let (mut before, _kept) = attend(&mut first);
    assert!(!stream.is_done().expect("no error"), "nothing is put off here");
    let _also = attend(&mut second);
    before.prepare_sinks(&stream).expect("a list");
    let bundle = BackwardBundle { mask: case.mask, keys: keys(), dkv_row: 0, parts: vec![rows()] };
    BackwardPlan::with(&stream, shape, &[bundle], (Order::Fixed, 1), &scratch).expect("a plan");
    let mut copied = Buffer::<u8>::new(&gpu, case.q.len() * 2, "a copy").expect("memory");
    let from = Buffer::<u8>::new(&gpu, case.q.len() * 2, "rows").expect("memory");
    let mut copier = RowCopier::new(Stream::new(&gpu).expect("a stream")).expect("a list");
    let all = RowCopy { from: 0, to: 0, rows: 1, bytes: 64, from_stride: 0, to_stride: 0 };
    for at in [0, 64, 128] {
        let copy = RowCopy { to: at, ..all };
        copier.put((from.slice(), copied.slice_mut()), &[copy]).expect("a launch");
    }
    copier.stream().wait().expect("no error");
    let read = |it: &Buffer<bf16>| {
        let mut rows = vec![bf16::NAN; case.q.len()];
        it.read(&stream, 0, &mut rows).expect("no error");
        rows
    };
    let (first, second) = (read(&first), read(&second));
    assert!(first == second && first.iter().all(|it| it.is_finite()), "one plan differs");
    assert_ne!(first, case.q, "nothing was computed");
}

#[test]
#[ignore = "needs a driver that pins no memory"]
fn unpinned() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let stream = Stream::new(&gpu).expect("a stream");
    let rows = Buffer::of(&stream, &[1.0_f32; 8], "rows").expect("memory");
    let ferry = Ferry::new(&gpu).expect("a stream");
    let lent = [rows.lend(0, Spread { rows: 2, width: 4, distance: 4 })];
    let error = ferry.down(&lent, &stream).map(|_| ()).expect_err("nothing can be pinned");
    assert!(matches!(error, Error::Unpinned { bytes: 32, .. }), "{error}");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn builds() {
    let place = std::env::temp_dir().join(format!("cadre-builds-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a temporary folder");
    let cubin = CUBINS.iter().find(|it| it.name == "backward").expect("it is built");
    let path = place.join("backward.cubin");
    std::fs::write(&path, cubin.bytes).expect("a file");
    Gpu::open_form(0, &place).expect("the kernels of this build");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("a file");
        Gpu::open_form(0, &place).map(|_| ()).err()
    };
    let name = b"cadre_build\0";
    let at = cubin.bytes.windows(name.len()).position(|it| it == name).expect("it has a name");
    let mut nameless = cubin.bytes.to_vec();
    nameless[at] = b'k';
    let error = refused(&nameless).expect("it has no build").to_string();
    assert!(error.contains("backward.cubin: it is of build no name, this program of "), "{error}");
    assert!(error.contains("scripts/kernels --forms"), "{error}");
    // The number itself: it is what the message says.
    let own =
        error.split("this program of ").nth(1).and_then(|it| it.get(..16)).expect("16 digits");
    let own = u64::from_str_radix(own, 16).expect("a number").to_le_bytes();
    let at = cubin.bytes.windows(8).position(|it| it == own).expect("it is there");
    let mut other = cubin.bytes.to_vec();
    other[at] ^= 1;
    assert!(matches!(refused(&other), Some(Error::Form { .. })), "a form of another build");
    std::fs::remove_dir_all(&place).expect("a folder of ours");
}
