//! Nodes of one process over memory in files: the right bytes land, or the pull says why not.
//!
//! In: an arena is a file of the system, a copy reads it when the test says so. Out: what a node makes of places, publications,
//! lifetimes and ends. It sees no GPU; two processes over an emulated one are the worker's test.

mod common;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Device, Error, Event, LandingId, Node, NodeConfig, PeerId, Piece, Place, Provider, PullError,
    PullId, RegionKey,
};
use common::{KEY, config, wish};

const OTHER: RegionKey = RegionKey([9; 4]);

/// A part of a file.
#[derive(Debug)]
struct Rows {
    arena: Arc<(u64, File)>,
    at: u64,
    bytes: u64,
}

const ARENA: u64 = 10_000;

fn arena(number: u64) -> Arc<(u64, File)> {
    let file = tempfile::tempfile().expect("a folder for files");
    let pattern = |at: u64| ((at * 31) ^ ((at >> 8) * 17) ^ (number * 101)) as u8;
    file.write_all_at(&(0..ARENA).map(pattern).collect::<Vec<_>>(), 0).expect("room");
    Arc::new((number, file))
}

impl Rows {
    fn of(arena: &Arc<(u64, File)>, at: u64, bytes: u64) -> Self {
        Self { arena: Arc::clone(arena), at, bytes }
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes as usize];
        self.arena.1.read_exact_at(&mut bytes, self.at).expect("inside the file");
        bytes
    }
}

/// What the device is told by the test, and tells it.
#[derive(Default)]
struct Orders {
    /// Copies stay under way.
    held: Cell<bool>,
    /// Copies fail when they are over.
    broken: Cell<bool>,
    /// The length that arenas are said to have, where it is not their own.
    lie: Cell<Option<u64>>,
    imports: Cell<usize>,
    begun: Cell<usize>,
}

struct Files(Rc<Orders>);

type Copied = RefCell<Option<Box<dyn FnOnce()>>>;

impl Device for Files {
    type Memory = Rows;
    type Imported = Rc<File>;
    type Copy = Copied;
    type Error = std::io::Error;

    fn place(&self, memory: &Rows) -> Place {
        let Rows { arena, at, bytes } = memory;
        let arena_bytes = self.0.lie.get().unwrap_or(ARENA);
        Place { arena: arena.0, arena_bytes, at: *at, bytes: *bytes }
    }

    fn export(&self, memory: &Rows) -> Result<OwnedFd, std::io::Error> {
        memory.arena.1.try_clone().map(Into::into)
    }

    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Rc<File>, std::io::Error> {
        self.0.imports.set(self.0.imports.get() + 1);
        assert_eq!(bytes, ARENA, "the length of the arena");
        descriptor.try_clone().map(|it| Rc::new(it.into()))
    }

    fn copy(
        &mut self,
        from: &Rc<File>,
        to: &Rows,
        pieces: &[Piece],
    ) -> Result<Copied, std::io::Error> {
        if pieces.iter().any(|it| it.remote + it.bytes > ARENA) {
            return Err(std::io::Error::other("the copy ends behind the arena"));
        }
        self.0.begun.set(self.0.begun.get() + 1);
        let (from, arena, at, pieces) =
            (Rc::clone(from), Arc::clone(&to.arena), to.at, pieces.to_vec());
        let copy = move || {
            for Piece { remote, local, bytes } in pieces {
                let mut rows = vec![0; bytes as usize];
                from.read_exact_at(&mut rows, remote).expect("inside the arena");
                arena.1.write_all_at(&rows, at + local).expect("room");
            }
        };
        Ok(RefCell::new(Some(Box::new(copy))))
    }

    fn is_over(&self, copy: &Copied) -> Result<bool, std::io::Error> {
        if self.0.held.get() {
            return Ok(false);
        }
        if self.0.broken.get() {
            return Err(std::io::Error::other("the device has failed"));
        }
        if let Some(copy) = copy.take() {
            copy();
        }
        Ok(true)
    }
}

/// An owner and a reader that knows it, the orders of both, and what both have reported.
struct Pair {
    owner: Node<Files>,
    reader: Node<Files>,
    theirs: Rc<Orders>,
    orders: Rc<Orders>,
    events: [Vec<Event>; 2],
    sockets: tempfile::TempDir,
}

const OWNER: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 0, incarnation: 0 };

impl Pair {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder for sockets");
        let [theirs, orders] = [(); 2].map(|()| Rc::<Orders>::default());
        let open = |me, orders| {
            let config = NodeConfig { tcp: config(me), sockets: folder.path().into() };
            Node::open(config, Files(orders)).expect("loopback and a folder")
        };
        let owner = open(OWNER, Rc::clone(&theirs));
        let mut reader = open(PeerId::server(0, 0), Rc::clone(&orders));
        reader.connect(OWNER, &owner.address());
        let events = Default::default();
        Self { owner, reader, theirs, orders, events, sockets: folder }
    }

    /// Polls both by turns until `done`.
    fn until(&mut self, done: impl Fn(&Self) -> bool) {
        let limit = Instant::now() + Duration::from_mins(1);
        while !done(self) {
            assert!(Instant::now() < limit, "it never came to it: {:?}", self.events);
            self.owner.poll(Duration::ZERO, &mut self.events[0]);
            self.reader.poll(Duration::from_millis(1), &mut self.events[1]);
        }
    }

    fn pull(&mut self, key: RegionKey, pieces: &[(u64, u64, u64)], to: LandingId) -> PullId {
        self.reader.pull(wish((OWNER, key), pieces, to, Duration::from_mins(1)))
    }

    /// How the pull ended, if it did. It may not have ended twice, and begins once at most, before its end.
    fn result(&self, wanted: PullId) -> Option<Result<u64, PullError>> {
        let ends = self.events[1].iter().filter_map(|event| match event {
            Event::Pulled { pull, result } if *pull == wanted => Some(result.clone()),
            Event::Begun { .. }
            | Event::Pulled { .. }
            | Event::Connected(_)
            | Event::Closed { .. }
            | Event::Message { .. }
            | Event::Room { .. }
            | Event::Refused { .. }
            | Event::Unfit { .. }
            | Event::Broken { .. } => None,
        });
        let ends: Vec<_> = ends.collect();
        assert!(ends.len() <= 1, "a pull ends once: {ends:?}");
        let events = || self.events[1].iter();
        let end =
            events().position(|it| matches!(it, Event::Pulled { pull, .. } if *pull == wanted));
        let begin = events().position(|it| *it == Event::Begun { pull: wanted });
        let last = events().rposition(|it| *it == Event::Begun { pull: wanted });
        assert!(
            begin == last && (end.is_none() || begin < end),
            "a pull begins once, before its end"
        );
        if let [Ok(_)] = ends[..] {
            assert!(begin.is_some(), "what landed was begun");
        }
        ends.into_iter().next()
    }

    fn end(&mut self, pull: PullId) -> Result<u64, PullError> {
        self.until(|it| it.result(pull).is_some());
        self.result(pull).expect("just seen")
    }

    /// Until `pull` copies, and stays at it; false if it has ended before.
    fn hold(&mut self, pull: PullId) -> bool {
        self.orders.held.set(true);
        let begun = self.orders.begun.get();
        self.until(|it| it.orders.begun.get() > begun || it.result(pull).is_some());
        self.orders.begun.get() > begun
    }
}

#[test]
fn pieces_of_two_regions_of_two_arenas_land_where_they_belong() {
    let mut pair = Pair::new();
    let (arenas, target) = ([arena(1), arena(2)], arena(3));
    let regions = [Rows::of(&arenas[0], 700, 3000), Rows::of(&arenas[1], 100, 2000)].map(Arc::new);
    pair.owner.publish(KEY, Arc::clone(&regions[0]));
    pair.owner.publish(OTHER, Arc::clone(&regions[1]));
    let beside = Rows::of(&target, 0, ARENA).read();
    let landing = pair.reader.land(Rows::of(&target, 1000, 500));
    let pulls = [
        pair.pull(KEY, &[(2900, 0, 100), (0, 400, 100)], landing),
        pair.pull(OTHER, &[(1, 100, 200)], landing),
    ];
    let refused = pair.pull(KEY, &[(0, 250, 100)], landing);
    assert!(matches!(pair.reader.take(landing), Err(Error::Busy { outstanding: 2, .. })));
    assert_eq!(pulls.map(|it| pair.end(it)), [Ok(200), Ok(200)]);
    assert!(matches!(pair.end(refused), Err(PullError::Refused { .. })));
    let landed = pair.reader.take(landing).expect("all ended").read();
    let [first, second] = regions.map(|it| it.read());
    let expected = [&first[2900..], &second[1..201], &beside[1300..1400], &first[..100]].concat();
    assert!(landed == expected, "the bytes differ");
    let all = Rows::of(&target, 0, ARENA).read();
    assert!(all[..1000] == beside[..1000] && all[1500..] == beside[1500..], "others' bytes");
    // Another region of an arena that is known: it is not asked for again.
    let more = Arc::new(Rows::of(&arenas[0], 50, 60));
    pair.owner.publish(RegionKey([5; 4]), Arc::clone(&more));
    let landing = pair.reader.land(Rows::of(&target, 0, 60));
    let pull = pair.pull(RegionKey([5; 4]), &[(0, 0, 60)], landing);
    assert_eq!(pair.end(pull), Ok(60));
    assert!(pair.reader.take(landing).expect("it ended").read() == more.read(), "the bytes differ");
    assert_eq!(pair.orders.imports.get(), 2);
}

#[test]
fn what_is_not_published_or_not_inside_does_not_land() {
    let mut pair = Pair::new();
    let region = Arc::new(Rows::of(&arena(1), 700, 300));
    pair.owner.publish(KEY, Arc::clone(&region));
    pair.owner.publish(OTHER, region);
    assert!(pair.owner.withdraw(OTHER).is_some() && pair.owner.withdraw(OTHER).is_none());
    let landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
    let gone = pair.pull(OTHER, &[(0, 0, 10)], landing);
    assert_eq!(pair.end(gone), Err(PullError::Gone));
    // The arena goes on behind the region, but it is not this region's.
    for piece in [(291, 0, 10), (u64::MAX, 20, 10), (0, 91, 10)] {
        let pull = pair.pull(KEY, &[piece], landing);
        let result = pair.end(pull);
        assert!(matches!(result, Err(PullError::Refused { .. })), "{piece:?}: {result:?}");
    }
    assert_eq!(pair.orders.begun.get(), 0);
    assert!(pair.reader.take(landing).is_ok());
}

#[test]
fn an_owner_that_gives_an_arena_another_length_is_refused_and_no_device_is_broken() {
    let mut pair = Pair::new();
    let arena = arena(1);
    pair.owner.publish(KEY, Arc::new(Rows::of(&arena, 700, 300)));
    let landing = pair.reader.land(Rows::of(&self::arena(2), 0, 100));
    let pull = pair.pull(KEY, &[(0, 0, 10)], landing);
    assert_eq!(pair.end(pull), Ok(10));
    pair.theirs.lie.set(Some(1 << 40));
    pair.owner.publish(KEY, Arc::new(Rows::of(&arena, 1 << 39, 300)));
    let pull = pair.pull(KEY, &[(0, 10, 10)], landing);
    let result = pair.end(pull);
    assert!(matches!(result, Err(PullError::Refused { .. })), "{result:?}");
    assert!(!pair.events[1].iter().any(|it| matches!(it, Event::Broken { .. })));
}

#[test]
fn a_wake_that_comes_with_a_slip_ends_the_poll() {
    let mut pair = Pair::new();
    pair.owner.publish(KEY, Arc::new(Rows::of(&arena(1), 700, 300)));
    pair.until(|it| it.events[1].contains(&Event::Connected(OWNER)));
    // Nobody answers at this door, so no descriptor ends the poll.
    let path = pair.sockets.path().join("silent.sock");
    let _silent = UnixListener::bind(&path).expect("a folder for sockets");
    let address = pair.owner.address();
    let (links, _) = address.split_once('@').expect("links and a door");
    pair.reader.connect(OWNER, &format!("{links}@{}", path.display()));
    let landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
    let pull = pair.pull(KEY, &[(0, 0, 10)], landing);
    pair.reader.poll(Duration::ZERO, &mut pair.events[1]);
    for _ in 0..20 {
        pair.owner.poll(Duration::from_millis(1), &mut pair.events[0]);
    }
    pair.reader.waker().wake();
    pair.reader.poll(Duration::from_secs(20), &mut pair.events[1]);
    assert_eq!(pair.result(pull), None, "it slept on until the question was over");
}

#[test]
fn rows_that_were_published_anew_while_they_were_copied_do_not_count() {
    let mut pair = Pair::new();
    let region = Arc::new(Rows::of(&arena(1), 700, 300));
    pair.owner.publish(KEY, Arc::clone(&region));
    let landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
    // The same place, so that nothing but the publication is another one.
    for anew in [true, false] {
        let pull = pair.pull(KEY, &[(0, 0, 100)], landing);
        assert!(pair.hold(pull));
        pair.owner.withdraw(KEY);
        if anew {
            pair.owner.publish(KEY, Arc::clone(&region));
        }
        pair.orders.held.set(false);
        assert_eq!(pair.end(pull), Err(PullError::Gone), "anew: {anew}");
    }
    pair.owner.publish(KEY, region);
    let pull = pair.pull(KEY, &[(0, 0, 100)], landing);
    assert_eq!(pair.end(pull), Ok(100));
}

#[test]
fn a_landing_is_busy_until_its_copy_is_over_whatever_was_told() {
    let mut pair = Pair::new();
    pair.owner.publish(KEY, Arc::new(Rows::of(&arena(1), 700, 300)));
    for closes in [false, true] {
        let mut landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
        // The deadline is to pass once the copy has begun; on a machine that is slow it is tried again with a later one.
        let mut patience = Duration::from_millis(if closes { 60_000 } else { 100 });
        let (pull, call) = loop {
            let pull = pair.reader.pull(wish((OWNER, KEY), &[(0, 0, 100)], landing, patience));
            let (calls, call) = std::sync::mpsc::channel();
            let tell = move |rows| calls.send(rows).expect("it listens");
            pair.reader.when_ended(pull, Box::new(tell));
            if pair.hold(pull) {
                break (pull, call);
            }
            patience *= 4;
            pair.reader.discard(landing);
            landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
        };
        if closes {
            pair.reader.close(OWNER);
        }
        let right = if closes { PullError::Cancelled } else { PullError::Deadline };
        assert_eq!(pair.end(pull), Err(right));
        assert_eq!(call.try_iter().collect::<Vec<_>>(), [false]);
        let held = pair.reader.take(landing);
        assert!(matches!(held, Err(Error::Busy { outstanding: 1, .. })), "closes: {closes}");
        pair.orders.held.set(false);
        pair.reader.poll(Duration::ZERO, &mut pair.events[1]);
        assert!(pair.reader.take(landing).is_ok(), "closes: {closes}");
    }
}

#[test]
fn a_device_that_fails_refuses_the_pull_and_says_so() {
    let mut pair = Pair::new();
    pair.owner.publish(KEY, Arc::new(Rows::of(&arena(1), 700, 300)));
    let landing = pair.reader.land(Rows::of(&arena(2), 0, 100));
    pair.orders.broken.set(true);
    let pull = pair.pull(KEY, &[(0, 0, 100)], landing);
    assert!(matches!(pair.end(pull), Err(PullError::Refused { .. })));
    assert!(pair.events[1].iter().any(|it| matches!(it, Event::Broken { .. })));
    assert!(pair.reader.take(landing).is_ok());
}
