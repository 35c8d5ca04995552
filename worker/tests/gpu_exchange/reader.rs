//! The process that pulls, and all that is expected of it.
//!
//! In: the owner's address. Out: rows that are the published ones, or an end that says why not; gates that open either way.

use std::rc::Rc;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Error, Event, LandingId, Node, NodeConfig, Piece, Provider as _, PullError, PullId,
    PullRequest, RegionKey,
};
use cadre_kernels::device::{Arena, ArenaMemory, CopyPiece, Gate, Gpu, Imported, Opener, Stream};
use cadre_worker::gpu_memory::GpuMemory;

use super::slow::{Slow, Switch};
use super::{ADDRESS, BYTES, KEY, OWNER, READER, links, pattern, sockets};

/// Code of a gate whose pull brought nothing.
const FAILED: u32 = 2;

struct Reader {
    gpu: Gpu,
    arena: Arena,
    node: Node<Slow>,
    switch: Rc<Switch>,
    events: Vec<Event>,
}

fn soon() -> Duration {
    Duration::from_mins(1)
}

impl Reader {
    fn new() -> Self {
        let gpu = Gpu::open(0).expect("the driver has a GPU");
        let switch = Rc::new(Switch::default());
        let memory = GpuMemory::new(&gpu).expect("a stream");
        let device = Slow { gpu: memory, switch: Rc::clone(&switch) };
        let config = NodeConfig { tcp: links(READER), sockets: sockets() };
        let mut node = Node::open(config, device).expect("loopback and a folder are there");
        let arena = Arena::new(&gpu, 1 << 20).expect("memory");
        node.connect(OWNER, &std::env::var(ADDRESS).expect("the other test sets it"));
        let mut reader = Self { gpu, arena, node, switch, events: Vec::new() };
        reader.until("a link", |it| it.events.contains(&Event::Connected(OWNER)));
        let hello = format!("hello {}", reader.node.address());
        reader.say(&hello);
        reader
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let limit = Instant::now() + soon();
        while !done(self) {
            self.node.poll(Duration::from_millis(20), &mut self.events);
            assert!(Instant::now() < limit, "{what} never came: {:?}", self.events);
        }
    }

    /// Rings, and waits until the owner has done it.
    fn say(&mut self, message: &str) {
        self.events.clear();
        self.node.ring(OWNER, message.as_bytes()).expect("a link");
        self.until(message, |it| {
            it.events.iter().any(|event| matches!(event, Event::Message { .. }))
        });
    }

    fn land(&mut self) -> LandingId {
        let memory = self.arena.take(BYTES).expect("room");
        self.node.land(memory)
    }

    fn pull(
        &mut self,
        key: RegionKey,
        pieces: &[Piece],
        to: LandingId,
        patience: Duration,
    ) -> PullId {
        let (peer, pieces, landing) = (OWNER, pieces.to_vec(), to);
        self.node.pull(PullRequest { peer, key, pieces, landing, patience })
    }

    fn end(&mut self, wanted: PullId) -> Result<u64, PullError> {
        self.until("the end of a pull", |it| it.result(wanted).is_some());
        self.result(wanted).expect("it just came")
    }

    fn result(&self, wanted: PullId) -> Option<Result<u64, PullError>> {
        let mut results = self.events.iter().filter_map(|event| {
            let Event::Pulled { pull, result } = event else { return None };
            (*pull == wanted).then(|| result.clone())
        });
        let first = results.next();
        assert_eq!(results.next(), None, "a pull ends once");
        first
    }

    /// Waits until a copy has begun that is held.
    fn begun(&mut self, before: u32) {
        self.until("a copy", |it| it.switch.begun.get() > before);
    }

    fn take(&mut self, landing: LandingId) -> ArenaMemory {
        let limit = Instant::now() + soon();
        loop {
            match self.node.take(landing) {
                Ok(memory) => return memory,
                Err(Error::Busy { .. }) => {
                    assert!(Instant::now() < limit, "the landing stays busy");
                    self.node.poll(Duration::from_millis(5), &mut self.events);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn bytes(&self, memory: &ArenaMemory) -> Vec<u8> {
        let stream = Stream::new(&self.gpu).expect("a stream");
        let mut bytes = vec![0; memory.len_bytes() as usize];
        memory.read(&stream, 0, &mut bytes).expect("a copy");
        bytes
    }

    fn gate(&mut self, pull: PullId) -> Gate {
        let (gate, opener) = Gate::new(&self.gpu).expect("a word");
        let open = |opener: Opener| move |done| opener.open(if done { Gate::DONE } else { FAILED });
        self.node.when_ended(pull, Box::new(open(opener)));
        gate
    }
}

fn whole() -> Vec<Piece> {
    vec![Piece { remote: 0, local: 0, bytes: BYTES }]
}

#[test]
#[ignore = "is one of two processes that the other test starts"]
fn pulls() {
    let mut it = Reader::new();
    let it = &mut it;
    rows_come_whole(it);
    rows_of_some_heads_come_whole(it);
    rows_come_behind_a_gate(it);
    what_does_not_fit_is_refused(it);
    rows_that_were_reused_meanwhile_do_not_count(it);
    a_deadline_ends_a_pull_and_its_gate(it);
    a_closed_peer_is_connected_again(it);
    the_memory_outlives_its_owner(it);
}

fn rows_come_whole(it: &mut Reader) {
    let landing = it.land();
    let pull = it.pull(KEY, &whole(), landing, soon());
    assert_eq!(it.end(pull), Ok(BYTES));
    // Told of once, before its end.
    let of_it = |event: &&Event| match event {
        Event::Begun { pull: of } | Event::Pulled { pull: of, .. } => *of == pull,
        Event::Connected(_)
        | Event::Message { .. }
        | Event::Closed { .. }
        | Event::Room { .. }
        | Event::Refused { .. }
        | Event::Unfit { .. }
        | Event::Broken { .. } => false,
    };
    let told: Vec<_> = it.events.iter().filter(of_it).collect();
    assert!(matches!(told[..], [Event::Begun { .. }, Event::Pulled { .. }]), "{told:?}");
    let memory = it.take(landing);
    assert!((0..BYTES).zip(it.bytes(&memory)).all(|(at, byte)| byte == pattern(at, 1)));
}

/// So many small pieces are a launch of the reader.
fn rows_of_some_heads_come_whole(it: &mut Reader) {
    const ROWS: u64 = 300;
    let rows = |row| Piece { remote: 32 + row * 320, local: row * 64, bytes: 64 };
    let landing = it.land();
    let pull = it.pull(KEY, &(0..ROWS).map(rows).collect::<Vec<_>>(), landing, soon());
    assert_eq!(it.end(pull), Ok(ROWS * 64));
    let memory = it.take(landing);
    for (at, byte) in (0..ROWS * 64).zip(it.bytes(&memory)) {
        assert_eq!(byte, pattern(32 + at / 64 * 320 + at % 64, 1), "{at}");
    }
}

fn rows_come_behind_a_gate(it: &mut Reader) {
    let pieces = [(10, 500, 90), (70_000, 0, 333), (5, 99_999, 1), (0, 3, 0)]
        .map(|(remote, local, bytes)| Piece { remote, local, bytes });
    let memory = it.arena.take(BYTES).expect("room");
    let copy = it.arena.take(BYTES).expect("room");
    // Work that reads the landing is on its stream before the rows are asked for.
    let stream = Stream::new(&it.gpu).expect("a stream");
    let own = it.arena.export().expect("a descriptor");
    let own = Imported::new(&it.gpu, &own, it.arena.len_bytes()).expect("the same memory");
    let all = [CopyPiece { from: memory.at(), to: 0, bytes: BYTES }];
    let landing = it.node.land(memory);
    let pull = it.pull(KEY, &pieces, landing, soon());
    let gate = it.gate(pull);
    gate.hold(&stream).expect("a wait");
    own.copy(&stream, &all, &copy).expect("inside both");
    assert_eq!(gate.code(), None);
    assert_eq!(it.end(pull), Ok(424));
    let mut bytes = vec![0; BYTES as usize];
    copy.read(&stream, 0, &mut bytes).expect("the gate is open");
    assert_eq!(gate.code(), Some(Gate::DONE));
    for Piece { remote, local, bytes: count } in pieces {
        for at in 0..count {
            assert_eq!(bytes[(local + at) as usize], pattern(remote + at, 1), "{remote} {at}");
        }
    }
    drop(it.take(landing));
}

fn what_does_not_fit_is_refused(it: &mut Reader) {
    let landing = it.land();
    let piece = |remote, local, bytes| [Piece { remote, local, bytes }];
    for pieces in [piece(BYTES - 4, 0, 5), piece(u64::MAX, 0, 1), piece(0, BYTES, 1)] {
        let pull = it.pull(KEY, &pieces, landing, soon());
        let gate = it.gate(pull);
        let end = it.end(pull);
        assert!(matches!(end, Err(PullError::Refused { .. })), "{end:?}");
        assert!(!it.events.contains(&Event::Begun { pull }), "nothing is copied");
        assert_eq!(gate.code(), Some(FAILED));
    }
    let pull = it.pull(RegionKey([9; 4]), &whole(), landing, soon());
    assert_eq!(it.end(pull), Err(PullError::Gone));
    drop(it.take(landing));
}

fn rows_that_were_reused_meanwhile_do_not_count(it: &mut Reader) {
    let landing = it.land();
    let before = it.switch.begun.get();
    it.switch.held.set(true);
    let pull = it.pull(KEY, &whole(), landing, soon());
    it.begun(before);
    // The owner writes other rows to the same place and publishes them under the same key.
    it.say("change");
    it.switch.held.set(false);
    assert_eq!(it.end(pull), Err(PullError::Gone));
    // The next pull gets the new ones.
    let pull = it.pull(KEY, &whole(), landing, soon());
    assert_eq!(it.end(pull), Ok(BYTES));
    let memory = it.take(landing);
    assert!((0..BYTES).zip(it.bytes(&memory)).all(|(at, byte)| byte == pattern(at, 2)));
}

fn a_deadline_ends_a_pull_and_its_gate(it: &mut Reader) {
    let before = it.switch.begun.get();
    it.switch.held.set(true);
    // The deadline is to pass once the copy has begun; where the owner is slow, a later one is tried.
    let mut patience = Duration::from_millis(300);
    let (landing, pull, gate) = loop {
        let landing = it.land();
        let pull = it.pull(KEY, &whole(), landing, patience);
        let gate = it.gate(pull);
        it.until("a copy, or its end", |it| {
            it.switch.begun.get() > before || it.result(pull).is_some()
        });
        if it.switch.begun.get() > before {
            break (landing, pull, gate);
        }
        drop(it.take(landing));
        patience *= 4;
    };
    let stream = Stream::new(&it.gpu).expect("a stream");
    gate.hold(&stream).expect("a wait");
    assert_eq!(it.end(pull), Err(PullError::Deadline));
    stream.wait().expect("the gate is open");
    assert_eq!(gate.code(), Some(FAILED));
    // The copy may still write.
    assert!(matches!(it.node.take(landing), Err(Error::Busy { outstanding: 1, .. })));
    let pull = it.pull(KEY, &whole(), landing, soon());
    assert!(matches!(it.end(pull), Err(PullError::Refused { .. })), "its bytes are spoken for");
    it.switch.held.set(false);
    drop(it.take(landing));
}

fn a_closed_peer_is_connected_again(it: &mut Reader) {
    let landing = it.land();
    let before = it.switch.begun.get();
    it.switch.held.set(true);
    let pull = it.pull(KEY, &whole(), landing, soon());
    it.begun(before);
    it.node.close(OWNER);
    assert_eq!(it.end(pull), Err(PullError::Cancelled));
    assert!(matches!(it.node.take(landing), Err(Error::Busy { .. })));
    it.switch.held.set(false);
    drop(it.take(landing));
    it.events.clear();
    it.node.connect(OWNER, &std::env::var(ADDRESS).expect("the other test sets it"));
    it.until("a link", |it| it.events.contains(&Event::Connected(OWNER)));
    let hello = format!("hello {}", it.node.address());
    it.say(&hello);
    let landing = it.land();
    let pull = it.pull(KEY, &whole(), landing, soon());
    assert_eq!(it.end(pull), Ok(BYTES));
    drop(it.take(landing));
}

fn the_memory_outlives_its_owner(it: &mut Reader) {
    let landing = it.land();
    let before = it.switch.begun.get();
    it.switch.held.set(true);
    let pull = it.pull(KEY, &whole(), landing, soon());
    it.begun(before);
    it.node.ring(OWNER, b"die").expect("a link");
    assert_eq!(it.end(pull), Err(PullError::PeerFailed));
    it.until("the end of the link", |it| {
        it.events.iter().any(|event| matches!(event, Event::Closed { peer, .. } if *peer == OWNER))
    });
    // The copy ends only now, from memory whose owner is dead.
    it.switch.held.set(false);
    let memory = it.take(landing);
    assert!((0..BYTES).zip(it.bytes(&memory)).all(|(at, byte)| byte == pattern(at, 2)));
    let landing = it.node.land(memory);
    let pull = it.pull(KEY, &whole(), landing, soon());
    assert_eq!(it.end(pull), Err(PullError::PeerFailed));
}
