//! Memory that other processes read, and gates in streams.
//!
//! In: whatever libcuda the process finds. Out: what was written comes back through an import, in the order of a stream.

use std::sync::Arc;

use cadre_kernels::device::{
    Arena, CopyPiece, Error, Event, Gate, Gpu, Imported, Refusal, Rooms, Stream,
};

fn gpu() -> Gpu {
    Gpu::open(0).expect("the driver has a GPU")
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn memory() {
    let gpu = gpu();
    let stream = Stream::new(&gpu).expect("a stream");
    let arena = Arena::new(&gpu, 5000).expect("memory");
    assert!(arena.len_bytes() >= 5000);
    let bytes: Vec<u8> = (0..3000_u32).map(|it| (it * 7 % 251) as u8).collect();
    // Something before it, so that the piece is not where the arena begins.
    let before = arena.take(10).expect("room");
    let mut piece = arena.take(3000).expect("room");
    assert!(piece.at() >= 10 && piece.arena().number() == arena.number());
    piece.write(&stream, &bytes).expect("a copy");
    stream.wait().expect("it is there");

    // The descriptor outlives everything of the arena that made it, as when its owner ends.
    let (at, length) = (piece.at(), arena.len_bytes());
    let descriptor = arena.export().expect("a descriptor");
    drop((before, piece, arena));
    let imported = Imported::new(&gpu, &descriptor, length).expect("the same memory");
    drop(descriptor);
    let landing = Arena::new(&gpu, 1).expect("memory").take(4096).expect("room");
    let copy = |pieces: &[CopyPiece]| imported.copy(&stream, pieces, &landing);
    copy(&[
        CopyPiece { from: at + 100, to: 4000, bytes: 90 },
        CopyPiece { from: at, to: 0, bytes: 3000 },
        CopyPiece { from: 0, to: 4096, bytes: 0 },
    ])
    .expect("inside both");
    let copied = Event::record(&stream).expect("an event");
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !copied.is_over().expect("nothing went wrong") {
        assert!(std::time::Instant::now() < until, "the copy does not end");
    }
    let mut back = vec![0; 4096];
    landing.read(&stream, 0, &mut back).expect("a copy");
    assert_eq!(back[..3000], bytes[..]);
    assert_eq!(back[4000..4090], bytes[100..190]);

    // Beyond either end nothing is copied.
    let error =
        copy(&[CopyPiece { from: 0, to: 4000, bytes: 97 }]).expect_err("beyond the landing");
    let expected = Refusal::Length { field: "a landing", expected: 4097, actual: 4096 };
    assert_eq!(error, Error::Refused(expected));
    for from in [length as u64 - 10, u64::MAX] {
        let error = copy(&[CopyPiece { from, to: 0, bytes: 11 }]).expect_err("beyond the arena");
        assert!(matches!(error, Error::Refused(Refusal::Length { .. })), "{error}");
    }
    let error = landing.arena().take(1 << 40).expect_err("too long");
    assert!(error.is_out_of_memory(), "{error}");
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn gates() {
    let gpu = gpu();
    let (stream, other) = (Stream::new(&gpu).expect("a stream"), Stream::new(&gpu).expect("one"));
    let arena = Arena::new(&gpu, 1).expect("memory");
    let descriptor = arena.export().expect("a descriptor");
    let own = Imported::new(&gpu, &descriptor, arena.len_bytes()).expect("the same memory");
    let (mut source, landing) = (arena.take(256).expect("room"), arena.take(256).expect("room"));
    // The work behind the gate is put there first; what it reads is written while it waits.
    let (gate, opener) = Gate::new(&gpu).expect("a word");
    gate.hold(&stream).expect("a wait");
    let pieces = [CopyPiece { from: source.at(), to: 0, bytes: 256 }];
    own.copy(&stream, &pieces, &landing).expect("inside both");
    assert_eq!(gate.code(), None);
    let writer = std::thread::spawn(move || {
        source.write(&other, &[9; 256]).expect("a copy");
        other.wait().expect("it is there");
        opener.open(Gate::DONE);
        source
    });
    let mut back = [0; 256];
    landing.read(&stream, 0, &mut back).expect("the gate opens");
    assert_eq!(back, [9; 256]);
    assert_eq!(gate.code(), Some(Gate::DONE));
    drop(writer.join().expect("it wrote"));

    // An opener that goes away opens, with a code that says so; one that said something keeps its word.
    let (gate, opener) = Gate::new(&gpu).expect("a word");
    gate.hold(&stream).expect("a wait");
    drop(opener);
    stream.wait().expect("the gate is open");
    assert_eq!(gate.code(), Some(Gate::ABANDONED));
    let (gate, opener) = Gate::new(&gpu).expect("a word");
    opener.open(7);
    assert_eq!(gate.code(), Some(7));
}

#[test]
#[ignore = "needs a GPU; the other tests run it over the emulated one"]
fn rooms() {
    let gpu = gpu();
    let (stream, other) = (Stream::new(&gpu).expect("a stream"), Stream::new(&gpu).expect("one"));
    let rooms = Rooms::new(&gpu, 1 << 20);
    let bytes: Vec<u8> = (0..4000_u32).map(|it| (it * 13 % 251) as u8).collect();
    let mut room = rooms.take(4000).expect("room");
    room.write(&stream, &bytes).expect("a copy");
    let rows = room.share();
    let some = rows.part(1000, 3000).part(24, 500);
    assert_eq!((some.at(), some.len_bytes()), (rows.at() + 1024, 500));
    drop(rows);
    let read = |of: &cadre_kernels::device::Part, on: &Stream| {
        let mut back = vec![0; of.len_bytes() as usize];
        of.read(on, &mut back).expect("a copy");
        back
    };
    assert_eq!(read(&some, &other), bytes[1024..1524]);

    // What one stream copies is waited for by whoever reads it on another.
    let mut room = rooms.take(300).expect("room");
    let at = room.memory().at();
    room.copy(&stream, &some, &[CopyPiece { from: 100, to: 50, bytes: 250 }]).expect("inside");
    let copied = room.share();
    assert_eq!(read(&copied, &other)[50..], bytes[1124..1374]);
    drop(copied);

    // What is handed out early is behind the copies to it that were put before, on whichever streams.
    let (third, mut room) = (Stream::new(&gpu).expect("one"), rooms.take(300).expect("room"));
    room.copy(&stream, &some, &[CopyPiece { from: 0, to: 0, bytes: 100 }]).expect("inside");
    let arena = some.memory().arena();
    let descriptor = arena.export().expect("a descriptor");
    let own = Imported::new(&gpu, &descriptor, arena.len_bytes()).expect("the same memory");
    for to in [100, 200] {
        let piece = [CopyPiece { from: some.at() + to, to, bytes: 100 }];
        own.copy(&third, &piece, room.memory()).expect("inside");
        room.copied_behind(Arc::new(Event::record(&third).expect("an event")));
        let early = room.early().part(0, to + 100);
        assert_eq!(read(&early, &other), bytes[1024..][..to as usize + 100]);
    }
    drop((room, own));

    // A room that is dropped while it is copied to is somebody else's afterwards.
    let mut room = rooms.take(300).expect("room");
    assert_eq!(room.memory().at(), at, "the room came back");
    room.copy(&stream, &some, &[CopyPiece { from: 0, to: 0, bytes: 300 }]).expect("inside");
    drop(room);
    let mut room = rooms.take(300).expect("room");
    assert_eq!(room.memory().at(), at);
    room.write(&other, &[7; 300]).expect("a copy");
    stream.wait().expect("the copy is over");
    assert_eq!(read(&room.share(), &other), [7; 300]);

    // Beyond an arena there is another, for a piece of any length.
    let arena = some.memory().arena().number();
    for length in [2 << 20, 5 << 20] {
        let room = rooms.take(length).expect("another arena");
        assert!(room.memory().arena().number() > arena && room.len_bytes() == length);
    }

    // Rooms that become longer step by step find room in those of before.
    let rooms = Rooms::new(&gpu, 1 << 20);
    let longest = 40 << 20;
    for length in (2 << 20..=longest).step_by(1 << 20) {
        rooms.take(length).expect("a room");
    }
    assert!(rooms.len_bytes() <= 4 * longest, "{} for {longest}", rooms.len_bytes());
}

#[test]
#[ignore = "over an emulated GPU with little memory"]
fn a_room_in_what_is_left() {
    let rooms = Rooms::new(&gpu(), 64 << 20);
    let room = rooms.take(4096).expect("a short arena is better than none");
    assert_eq!(room.len_bytes(), 4096);
    let error = rooms.take(16 << 20).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}
