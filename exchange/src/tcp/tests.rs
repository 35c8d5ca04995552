//! What a link does with bytes that no peer should send ([`crate::fuzz`] says which).

use std::cell::Cell;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::{MAX_BODY_BYTES, MAX_OUTSTANDING_PULLS, REQUEST_HEADER_BYTES, Span};
use super::greeting::{self, ANSWER_BYTES, HELLO_BYTES, Hello, Identity, Purpose, Verdict};
use super::incoming::{Incoming, Published, Regions};
use super::ledger::Ledger;
use super::pull::{Pull, Wish};
use super::pulls::Pulls;
use super::replies::Replies;
use super::stream::Stream;
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};
use crate::provider::Event;
use crate::tests::{Random, all};

const SERVER: PeerId = PeerId { role: crate::peer::Role::Server, index: 0, incarnation: 0 };
const TRAINER: PeerId = PeerId { role: crate::peer::Role::Trainer, index: 0, incarnation: 0 };

/// Two ends of a link; ours does not block.
fn link() -> (TcpStream, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let theirs = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (ours, _) = listener.accept().expect("just connected");
    ours.set_nonblocking(true).expect("a socket of ours");
    theirs.set_nodelay(true).expect("a socket of ours");
    (theirs, Stream::acceptor(ours, None))
}

/// Writes the input in portions, with a turn of the reader after each, until that one refuses.
fn feed(theirs: &mut TcpStream, input: &[u8], random: &mut Random, mut turn: impl FnMut() -> bool) {
    let mut rest = input;
    while !rest.is_empty() {
        let (portion, others) = rest.split_at(1 + random.below(rest.len()));
        theirs.write_all(portion).expect("there is room");
        rest = others;
        if !turn() {
            return;
        }
    }
}

#[test]
fn greetings_are_read_or_refused() {
    let purpose = Purpose::Exchange;
    let me = Identity { me: SERVER, secret: [3; 32], data_version: 7, purpose, tls: None };
    let sent = Hello { data_version: 7, from: SERVER, to: TRAINER, purpose, nonce: [1; 32] };
    all("greeting", |input, _| {
        greeting::may_begin(input);
        if let Some(first) = input.first_chunk::<HELLO_BYTES>()
            && let Ok(hello) = Hello::decode(first)
        {
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello), "what it means is what it says");
            let _ = greeting::check_opener(&me, &hello);
        }
        if let Some(answer) = input.first_chunk::<ANSWER_BYTES>() {
            let checked = greeting::check_acceptor(&me, &sent, answer, &None);
            assert!(checked.is_err(), "nobody here knows the secret");
        }
        let _ = Verdict::check(input, SERVER);
    });
}

#[test]
fn requests_are_read_or_refused_within_bounded_memory() {
    let memory = Arc::new(Buffer::zeroed(1 << 12));
    let published = Published { memory, number: 6, is_read: Cell::default() };
    let regions = Regions::from([(RegionKey([1, 2, 3, 4]), published)]);
    all("requests", |input, random| {
        let (mut theirs, ours) = link();
        let (mut link, mut heard) = (Incoming::new(TRAINER, ours), 0);
        feed(&mut theirs, input, random, || {
            let read = link.read(|message| heard += message.len());
            let (bytes, requests) = link.held();
            assert!(bytes <= REQUEST_HEADER_BYTES + MAX_BODY_BYTES, "{bytes} bytes are held");
            assert!(requests <= MAX_OUTSTANDING_PULLS);
            read.and_then(|()| link.write(&regions)).is_ok()
        });
        assert!(heard <= input.len(), "more was heard than said");
    });
}

#[test]
fn replies_land_where_they_belong_or_nowhere() {
    const ROOM: usize = 1024;
    /// What pulls write to; there is as much before, between and behind.
    const RUNS: [(u64, u64); 2] = [(256, 256), (640, 100)];
    all("replies", |input, random| {
        let (mut theirs, mut ours) = link();
        let (mut ledger, mut pulls, mut replies) =
            (Ledger::default(), Pulls::default(), Replies::default());
        let mut memory = Buffer::zeroed(ROOM);
        memory.bytes_mut().fill(0xee);
        let landing = ledger.land(memory);
        let run = |(start, bytes): (u64, u64)| vec![Span { start, bytes }];
        for at in RUNS {
            let (peer, key, bytes) = (TRAINER, RegionKey::default(), at.1);
            let wish = Wish { peer, key, spans: run(at), runs: run(at), bytes };
            let id = ledger.new_pull();
            let pull = Pull::new(id, wish, (landing, 2), Duration::from_secs(1), Instant::now());
            pulls.add(ledger.begin(pull).expect("free"));
        }
        pulls.ask(1 << 20, u64::MAX, 1 << 20, &mut Vec::new());
        feed(&mut theirs, input, random, || {
            let read = replies.read(&mut ours, &mut pulls, &mut ledger);
            pulls.ask(1 << 20, u64::MAX, 1 << 20, &mut Vec::new());
            read.is_ok()
        });
        pulls.end_all(&crate::provider::PullError::PeerFailed, &mut ledger);
        let ends = ledger.events.iter().filter(|it| matches!(it, Event::Pulled { .. })).count();
        assert_eq!(ends, RUNS.len(), "every pull ends once");
        let landed = ledger.take(landing).expect("all ended");
        let inside = |at: u64| RUNS.iter().any(|it| (it.0..it.0 + it.1).contains(&at));
        let foreign = landed.bytes().iter().zip(0..).filter(|it| !inside(it.1));
        assert!(foreign.into_iter().all(|it| *it.0 == 0xee), "foreign memory was written");
    });
}
