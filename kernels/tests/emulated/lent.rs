//! Rows that a framework lends: there and back through pinned memory, and what is refused.
//!
//! In: whatever libcuda the process finds. Out: the lender's numbers as they were when its stream came to them, and not a number
//! between rows touched.

use std::sync::Arc;

use cadre_kernels::device::{Buffer, Ferry, Gpu, Lent, LentError, Spread, Stream};
use half::bf16;

const SPREAD: Spread = Spread { rows: 5, width: 3, distance: 7 };
const ALL: usize = 40;
/// Where the rows begin.
const AT: usize = 2;

fn rows_of<T: Copy>(all: &[T]) -> Vec<T> {
    let row = |it: usize| &all[AT + it * SPREAD.distance..][..SPREAD.width];
    (0..SPREAD.rows).flat_map(row).copied().collect()
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn rows() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let (caller, ferry) = (Stream::new(&gpu).expect("a stream"), Ferry::new(&gpu).expect("one"));
    let numbers: Vec<f32> = (0..ALL).map(|it| it as f32 + 0.5).collect();
    let halves: Vec<bf16> = numbers.iter().map(|it| bf16::from_f32(-it)).collect();
    // Enqueued on the caller's stream: nobody has waited for it.
    let mut wide = Buffer::of(&caller, &numbers, "rows").expect("memory");
    let mut narrow = Buffer::of(&caller, &halves, "rows").expect("memory");
    let lent = [wide.lend(AT, SPREAD), narrow.lend(AT, SPREAD)];
    let coming = ferry.down(&lent, &caller).expect("copies");
    let over = Arc::clone(coming.over());
    over.wait().expect("nothing went wrong");
    // The rows are the caller's again.
    wide.write(&caller, 0, &[-1.0; ALL]).expect("a copy");
    narrow.write(&caller, 0, &[bf16::NAN; ALL]).expect("a copy");
    caller.wait().expect("nothing went wrong");
    let landed = coming.land().expect("nothing went wrong");
    assert_eq!(landed[0].slice::<f32>(), rows_of(&numbers));
    assert_eq!(landed[1].slice::<bf16>(), rows_of(&halves));
    drop(landed);
    // Nobody has waited for the copies.
    let halves = [bf16::from_f32(3.5); ALL];
    narrow.write(&caller, 0, &halves).expect("a copy");
    let coming = ferry.down(&[narrow.lend(AT, SPREAD)], &caller).expect("copies");
    let landed = coming.land().expect("nothing went wrong");
    assert_eq!(landed[0].slice::<bf16>(), rows_of(&halves));

    // Back, over numbers that the caller's stream has still to write.
    let mut to = Buffer::of(&caller, &[7.0_f32; ALL], "results").expect("memory");
    let mut room = ferry.room(SPREAD.rows * SPREAD.width * 4).expect("memory");
    room.slice_mut::<f32>().copy_from_slice(&rows_of(&numbers));
    let going = ferry.up(vec![(room, to.lend_mut(AT, SPREAD))], &caller).expect("copies");
    caller.wait_for(going.over()).expect("the same GPU");
    let mut back = [0.0; ALL];
    to.read(&caller, 0, &mut back).expect("a copy");
    assert_eq!(rows_of(&back), rows_of(&numbers));
    assert_eq!(
        back.iter().filter(|it| it.to_bits() == 7.0_f32.to_bits()).count(),
        ALL - SPREAD.rows * SPREAD.width
    );
    // A piece that is taken again is nobody else's meanwhile.
    let rooms: Vec<_> = (0..4).map(|_| ferry.room(60).expect("memory")).collect();
    let places: std::collections::BTreeSet<_> =
        rooms.iter().map(|it| it.bytes().as_ptr()).collect();
    assert_eq!(places.len(), rooms.len());
    drop(going);
    let none = Spread { rows: 0, ..SPREAD };
    let nothing = ferry.down(&[wide.lend(ALL, none)], &caller).expect("no copy");
    assert_eq!(nothing.land().expect("nothing went wrong")[0].slice::<f32>(), [0.0; 0]);
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn refusals() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let buffer = Buffer::<f32>::new(&gpu, ALL, "rows").expect("memory");
    let host = [0.0_f32; ALL];
    let Spread { rows, width, distance } = SPREAD;
    let check = |address: u64, spread: Spread| {
        // SAFETY: nothing is copied of it.
        #[allow(unsafe_code)]
        let lent = unsafe { Lent::f32(address, spread) };
        lent.check(&gpu, rows, width)
    };
    let good = buffer.address();
    assert_eq!(check(good, SPREAD), Ok(()));
    assert_eq!(check(0, SPREAD), Err(LentError::Null));
    let apart = Err(LentError::Apart { distance: 2, width });
    assert_eq!(check(good, Spread { distance: 2, ..SPREAD }), apart);
    let shape = LentError::Shape { rows: 4, width, expected_rows: rows, expected_width: width };
    assert_eq!(check(good, Spread { rows: 4, distance, width }), Err(shape));
    assert_eq!(check(good + 2, SPREAD), Err(LentError::Unaligned { address: good + 2, bytes: 4 }));
    let address = host.as_ptr() as u64;
    assert_eq!(check(address, SPREAD), Err(LentError::NotOnGpu { address }));
    if std::env::var_os("CADRE_EMULATED_ELSEWHERE").is_some() {
        let there = Buffer::<f32>::new(&gpu, ALL + 1, "rows").expect("memory");
        let elsewhere = LentError::Elsewhere { found: 1, expected: 0 };
        assert_eq!(there.lend(0, SPREAD).check(&gpu, rows, width), Err(elsewhere));
    }
}
