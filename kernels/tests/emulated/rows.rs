//! Copies of rows and of pieces, many in one launch.
//!
//! In: whatever libcuda the process finds; lists drawn by seed. Out: what a loop on the host copies, and not a byte beside it.

use std::sync::Arc;

use cadre_kernels::device::{
    Buffer, CopyPiece, Error, Event, Gpu, Imported, PieceCopier, Refusal, Rooms, RowCopier,
    RowCopy, Stream,
};

use super::cases::Random;

fn below(random: &mut Random, end: u64) -> u64 {
    random.below(end as u32).into()
}

/// Bytes of which no two near each other are alike.
fn source(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|it| (it.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Copies one behind the other in the target, with gaps; in lengths and distances of `word` bytes.
fn drawn(random: &mut Random, word: u64, source: u64, target: u64) -> Vec<RowCopy> {
    let (mut copies, mut to) = (Vec::new(), 0);
    loop {
        let kind = below(random, 8);
        // Rows that are longer than a unit, many short ones, single ones.
        let bytes = word * (1 + below(random, if kind == 0 { 9000 } else { 40 }));
        let rows = if kind < 3 { 1 + below(random, 3) } else { below(random, 400) + 1 };
        let rows = if kind == 7 { 1 } else { rows };
        let [from_stride, gap] = [0, 1].map(|_| word * below(random, 20));
        let (from_stride, to_stride) = (bytes + from_stride, bytes + gap);
        let end = to + to_stride * rows;
        if end > target || from_stride * rows > source {
            return copies;
        }
        let from = below(random, (source - from_stride * rows) / word + 1) * word;
        copies.push(RowCopy { from, to, rows: rows as u32, bytes, from_stride, to_stride });
        to = end + word * below(random, 5);
    }
}

fn on_host(copies: &[RowCopy], from: &[u8], to: &mut [u8]) {
    for it in copies {
        for row in 0..u64::from(it.rows) {
            let [from_at, to_at] = [it.from + row * it.from_stride, it.to + row * it.to_stride];
            let bytes = it.bytes as usize;
            to[to_at as usize..][..bytes].copy_from_slice(&from[from_at as usize..][..bytes]);
        }
    }
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn copies() {
    const BYTES: u64 = 1 << 20;
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let mut copier = RowCopier::new(Stream::new(&gpu).expect("a stream")).expect("memory");
    let from = source(BYTES);
    let put = |copier: &mut RowCopier, copies: &[RowCopy]| {
        let stream = Stream::new(&gpu).expect("a stream");
        let there = Buffer::of(&stream, &from, "a source").expect("memory");
        let mut landing = Buffer::of(&stream, &vec![0xAB; from.len()], "a target").expect("memory");
        stream.wait().expect("both are there");
        let done = copier.put((there.slice(), landing.slice_mut()), copies);
        let mut back = vec![0; from.len()];
        landing.read(copier.stream(), 0, &mut back).expect("a copy");
        done.map(|()| back)
    };
    for (seed, word) in (0..12).zip([16, 4, 16, 4, 4, 16, 4, 16, 16, 4, 16, 4]) {
        let copies = drawn(&mut Random(seed), word, BYTES, BYTES);
        let mut expected = vec![0xAB; from.len()];
        on_host(&copies, &from, &mut expected);
        let back = put(&mut copier, &copies).expect("good copies");
        assert!(back == expected, "seed {seed}, {} copies of words of {word}", copies.len());
    }
    assert_eq!(put(&mut copier, &[]).map(|it| it[0]), Ok(0xAB));

    // One that cannot be done, and nothing of its list is.
    let good = RowCopy { from: 0, to: 0, rows: 2, bytes: 64, from_stride: 64, to_stride: 128 };
    let refused = put(&mut copier, &[good, RowCopy { to: 254, ..good }]).expect_err("askew");
    assert!(matches!(refused, Error::Refused(Refusal::RowCopy { copy: 1, .. })), "{refused}");
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn pieces() {
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let rooms = Rooms::new(&gpu, 1 << 24);
    let stream = Stream::new(&gpu).expect("a stream");
    let bytes = source(5 << 20);
    let mut owned = rooms.take(bytes.len() as u64).expect("room");
    owned.write(&stream, &bytes).expect("a copy");
    let (at, arena) = (owned.memory().at(), owned.memory().arena());
    let descriptor = arena.export().expect("a descriptor");
    let arena = Imported::new(&gpu, &descriptor, arena.len_bytes()).expect("the same memory");
    let urgent = Stream::urgent(&gpu).expect("a stream");
    let mut copier = PieceCopier::new(urgent).expect("memory");
    let piece = |from: u64, to: u64, bytes: u64| CopyPiece { from: at + from, to, bytes };
    let random = &mut Random(8);
    // More than a list holds, at no even distances; and whose words are of 4 bytes only, in part.
    let scattered: Vec<_> = (0..5000)
        .map(|it| {
            let word = if it % 3 == 0 { 4 } else { 16 };
            piece(below(random, 200_000) * word, it * 256, word * (1 + below(random, 12)))
        })
        .collect();
    let heads: Vec<_> = (0..700).map(|row| piece(64 + row * 512, row * 128, 128)).collect();
    // Large, odd, and empty ones beside them.
    let beside = [
        piece(1 << 20, 2 << 20, (1 << 20) + 7),
        piece(3, 1 << 20, 5),
        piece(40, (1 << 20) + 5, 3),
        piece(0, 0, 0),
    ];
    let with = |pieces: &[CopyPiece]| [pieces, &beside].concat();
    for (name, pieces, launches) in [
        ("scattered", scattered, 1),
        ("rows of some heads", heads.clone(), 1),
        ("with large and odd ones", with(&heads), 1),
        ("apart in the target alone", (0..200).map(|it| piece(it * 64, it * 256, 64)).collect(), 1),
        (
            "another distance from the middle on",
            (0..200).map(|it| piece(it * 512 + it / 100 * it * 64, it * 128, 64)).collect(),
            1,
        ),
        ("few", heads[..50].to_vec(), 0),
        ("whole rows", (0..700).map(|row| piece(row * 128, row * 128, 128)).collect(), 0),
        ("none", vec![], 0),
    ] {
        let before = copier.launches();
        let mut room = rooms.take(4 << 20).expect("room");
        let mut expected = vec![0xCD; 4 << 20];
        room.write(&stream, &expected).expect("a copy");
        copier.copy(&arena, &pieces, room.memory()).expect("inside both");
        room.copied_behind(Arc::new(Event::record(copier.stream()).expect("an event")));
        for it in &pieces {
            let (from, to) = ((it.from - at) as usize, it.to as usize);
            expected[to..][..it.bytes as usize]
                .copy_from_slice(&bytes[from..][..it.bytes as usize]);
        }
        // Another stream waits for the copies, of either kind.
        let mut back = vec![0; expected.len()];
        room.share().read(&stream, &mut back).expect("a copy");
        assert!(back == expected, "{name}");
        assert_eq!(copier.launches() - before, launches, "{name}");
    }
    // One piece outside, and nothing is copied.
    let mut room = rooms.take(4096).expect("room");
    room.write(&stream, &[7; 4096]).expect("a copy");
    for outside in [piece(0, 4093, 4), piece(0, u64::MAX, 4), piece(1 << 40, 0, 4)] {
        let pieces = [&heads[..10], &[outside]].concat();
        let refused = copier.copy(&arena, &pieces, room.memory()).expect_err("outside");
        assert!(matches!(refused, Error::Refused(Refusal::Length { .. })), "{refused}");
        copier.stream().wait().expect("nothing is on it");
        let mut back = [0; 4096];
        room.early().read(&stream, &mut back).expect("a copy");
        assert_eq!(back, [7; 4096]);
    }
}
