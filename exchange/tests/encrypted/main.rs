//! Encrypted links: the right bytes land, nobody on the way reads or changes any, and who is not encrypted is told.
//!
//! A relay stands between the two processes, on sockets of its own, and does to each byte what a case asks for. `pulls.rs` and
//! `links.rs` run once more, with nodes that encrypt their links; and real processes are stopped.

// Each of the files brings its own.
#![allow(clippy::duplicate_mod)]

#[path = "../shared/children.rs"]
#[expect(dead_code, reason = "children of this program are always told what to encrypt")]
mod children;
#[path = "../common/mod.rs"]
mod common;
#[path = "../links.rs"]
mod links;
// A part of it is for rows in arenas.
#[allow(dead_code)]
#[path = "../shared/pair.rs"]
mod pair;
mod processes;
#[path = "../pulls.rs"]
mod pulls;

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use cadre_exchange::{Buffer, Encryption, Limits, PeerId, Provider, TcpConfig};
use common::{KEY, Node, SERVER, TRAINER, config, connect, noise_disturbs_nobody, until};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn encrypted(me: PeerId) -> TcpConfig {
    TcpConfig { encryption: Encryption::Tcp, ..config(me) }
}

fn plain(me: PeerId) -> TcpConfig {
    TcpConfig { encryption: Encryption::Off, ..config(me) }
}

fn cases(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

/// Somebody on the way between who connects to it and `target`.
struct Relay {
    listener: TcpListener,
    target: SocketAddr,
    links: Vec<[TcpStream; 2]>,
    /// Bytes that it takes at a time.
    portion: usize,
    /// All bytes that came by, whichever way.
    seen: Vec<u8>,
    /// Which byte of the way back, to who connected, is changed.
    changes: Option<usize>,
    back: usize,
    /// After how many bytes of both ways every link ends.
    cuts: Option<usize>,
}

impl Relay {
    fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        listener.set_nonblocking(true).expect("a socket of ours");
        let target = target.parse().expect("an address");
        let (links, seen, portion) = (Vec::new(), Vec::new(), 1 << 16);
        Self { listener, target, links, portion, seen, changes: None, back: 0, cuts: None }
    }

    fn address(&self) -> String {
        self.listener.local_addr().expect("bound").to_string()
    }

    /// Carries what there is, at most a portion a way and link. A link ends as soon as one side of it has.
    fn carry(&mut self) {
        if let Ok((one, _)) = self.listener.accept() {
            let two = TcpStream::connect(self.target).expect("it listens");
            for stream in [&one, &two] {
                stream.set_nonblocking(true).expect("a socket of ours");
            }
            self.links.push([one, two]);
        }
        let mut links = std::mem::take(&mut self.links);
        links.retain_mut(|[one, two]| self.pass(one, two, false) && self.pass(two, one, true));
        self.links = links;
    }

    fn pass(&mut self, from: &mut TcpStream, to: &mut TcpStream, is_back: bool) -> bool {
        let left = self.cuts.map_or(usize::MAX, |it| it - self.seen.len());
        if left == 0 {
            return false;
        }
        let mut bytes = vec![0; self.portion.min(left)];
        // What does not fit stays where it is.
        let Ok(room) = from.peek(&mut bytes).or_else(nothing) else { return false };
        let bytes = &mut bytes[..room];
        let changed = self.changes.and_then(|it| it.checked_sub(self.back)).filter(|_| is_back);
        if let Some(byte) = changed.and_then(|it| bytes.get_mut(it)) {
            *byte ^= 1;
        }
        let Ok(passed) = to.write(bytes).or_else(nothing) else { return false };
        self.seen.extend_from_slice(&bytes[..passed]);
        self.back += if is_back { passed } else { 0 };
        let mut taken = vec![0; passed];
        from.read_exact(&mut taken).expect("it was there");
        // Nothing came and nothing is to come: the end.
        passed > 0 || !matches!(from.peek(&mut [0]), Ok(0))
    }
}

fn nothing(error: std::io::Error) -> std::io::Result<usize> {
    if error.kind() == ErrorKind::WouldBlock { Ok(0) } else { Err(error) }
}

/// A server with a link through a relay to the trainer.
fn through(mut relay: Relay, server: &mut Node, trainer: &mut Node) -> Relay {
    server.tcp.connect(TRAINER, &relay.address());
    until(&mut [server, trainer], |nodes| {
        relay.carry();
        nodes[0].is_connected(TRAINER) || nodes[0].closed(TRAINER).is_some()
    });
    relay
}

#[test]
fn pulls_and_messages_of_any_size_arrive_in_any_portions() {
    let run = |(portion, sizes, parts): (usize, Vec<usize>, u64)| {
        let limits = Limits { part_bytes: parts, ..Limits::default() };
        let mut server = Node::with(TcpConfig { limits, ..encrypted(SERVER) });
        let mut trainer = Node::with(encrypted(TRAINER));
        let mut relay = Relay { portion, ..Relay::to(&trainer.tcp.address()) };
        relay = through(relay, &mut server, &mut trainer);
        connect(&mut trainer, &mut server);
        let total = sizes.iter().sum::<usize>();
        let region = trainer.publish(KEY, total, portion);
        let landing = server.tcp.land(Buffer::zeroed(total));
        let (mut at, mut pulls) = (0, Vec::new());
        for &bytes in &sizes {
            let bytes = bytes as u64;
            pulls.push(server.pull(TRAINER, KEY, &[(at, at, bytes)], landing));
            at += bytes;
            let message = vec![bytes as u8; bytes as usize % 70_000];
            server.tcp.ring(TRAINER, &message).expect("there is room");
        }
        until(&mut [&mut server, &mut trainer], |nodes| {
            relay.carry();
            pulls.iter().all(|&it| nodes[0].result(it).is_some())
                && nodes[1].messages().len() == sizes.len()
        });
        for (pull, &bytes) in pulls.iter().zip(&sizes) {
            prop_assert_eq!(server.result(*pull), Some(Ok(bytes as u64)));
        }
        prop_assert!(server.tcp.take(landing).expect("all ended").bytes() == region.bytes());
        let lengths = trainer.messages().iter().map(Vec::len).collect::<Vec<_>>();
        prop_assert_eq!(lengths, sizes.iter().map(|it| it % 70_000).collect::<Vec<_>>());
        Ok(())
    };
    let sizes = prop::collection::vec(prop_oneof![1..40_usize, 1..90_000_usize], 1..8);
    let portion = prop_oneof![400..4000_usize, Just(1 << 16)];
    cases(16).run(&(portion, sizes, 500..1_u64 << 20), run).expect("all arrives");
}

#[test]
fn transfers_beyond_every_window_and_buffer_arrive_both_ways() {
    const BYTES: usize = 40 << 20;
    let (mut server, mut trainer) = (Node::with(encrypted(SERVER)), Node::with(encrypted(TRAINER)));
    connect(&mut server, &mut trainer);
    connect(&mut trainer, &mut server);
    let regions = [trainer.publish(KEY, BYTES, 1), server.publish(KEY, BYTES, 2)];
    let landings = [Buffer::zeroed(BYTES), Buffer::zeroed(BYTES)];
    let [one, two] = landings;
    let landings = [server.tcp.land(one), trainer.tcp.land(two)];
    let whole = [(0, 0, BYTES as u64)];
    let pulls = [
        server.pull(TRAINER, KEY, &whole, landings[0]),
        trainer.pull(SERVER, KEY, &whole, landings[1]),
    ];
    until(&mut [&mut server, &mut trainer], |nodes| {
        nodes[0].result(pulls[0]).is_some() && nodes[1].result(pulls[1]).is_some()
    });
    assert!(server.tcp.take(landings[0]).expect("ended").bytes() == regions[0].bytes());
    assert!(trainer.tcp.take(landings[1]).expect("ended").bytes() == regions[1].bytes());
}

/// Whether somebody on the way sees 64 bytes of a row, or of a message.
fn is_seen(encryption: Encryption) -> [bool; 2] {
    let mut server = Node::with(TcpConfig { encryption, ..config(SERVER) });
    let mut trainer = Node::with(TcpConfig { encryption, ..config(TRAINER) });
    let relay = Relay::to(&trainer.tcp.address());
    let mut relay = through(relay, &mut server, &mut trainer);
    let region = trainer.publish(KEY, 10_000, 3);
    let message = [77; 64];
    server.tcp.ring(TRAINER, &message).expect("there is room");
    let landing = server.tcp.land(Buffer::zeroed(10_000));
    let pull = server.pull(TRAINER, KEY, &[(0, 0, 10_000)], landing);
    until(&mut [&mut server, &mut trainer], |nodes| {
        relay.carry();
        nodes[0].result(pull).is_some() && !nodes[1].messages().is_empty()
    });
    let sees = |bytes: &[u8]| relay.seen.windows(bytes.len()).any(|it| it == bytes);
    [sees(&region.bytes()[5000..5064]), sees(&message)]
}

#[test]
fn nobody_on_the_way_sees_a_row_or_a_message() {
    assert_eq!(is_seen(Encryption::Off), [true; 2], "the relay looks at the right bytes");
    assert_eq!(is_seen(Encryption::Tcp), [false; 2]);
}

#[test]
fn a_byte_that_is_changed_on_the_way_never_counts() {
    const BYTES: usize = 30_000;
    // A changed length makes its reader wait for bytes that never come, as long as it has patience.
    let patience = Duration::from_millis(200);
    let limits = Limits { greeting: patience, ..Limits::default() };
    let mut noticed = 0;
    let run = |at: usize| {
        let mut server = Node::with(TcpConfig { limits, ..encrypted(SERVER) });
        let mut trainer = Node::with(TcpConfig { limits, ..encrypted(TRAINER) });
        let relay = Relay { changes: Some(at), ..Relay::to(&trainer.tcp.address()) };
        let mut relay = through(relay, &mut server, &mut trainer);
        let region = trainer.publish(KEY, BYTES, 3);
        let landing = server.tcp.land(Buffer::zeroed(BYTES));
        let whole = [(0, 0, BYTES as u64)];
        let pull = server.pull_until(TRAINER, KEY, &whole, landing, patience);
        until(&mut [&mut server, &mut trainer], |nodes| {
            relay.carry();
            nodes[0].result(pull).is_some()
        });
        let result = server.result(pull).expect("just seen");
        let said = server.closed(TRAINER).unwrap_or_default();
        noticed += u32::from(said.contains("does somebody change what is sent?"));
        // A record's head has a byte that means nothing.
        let mut taken = || server.tcp.take(landing).expect("the pull has ended");
        let is_right = result.is_err() || taken().bytes() == region.bytes();
        assert!(is_right, "byte {at} was changed: {result:?}");
    };
    // From the first byte of the handshake to the last of the rows.
    let steps = (0..BYTES).step_by(1009).chain(0..30);
    let tries = steps.map(run).count() as u32;
    assert!(noticed > tries / 2, "{noticed} of {tries} said why");
}

#[test]
fn one_that_encrypts_and_one_that_does_not_say_so() {
    let check = |(server, trainer): (TcpConfig, TcpConfig), said: [&str; 2]| {
        let (mut server, mut trainer) = (Node::with(server), Node::with(trainer));
        server.tcp.connect(TRAINER, &trainer.tcp.address());
        until(&mut [&mut server, &mut trainer], |nodes| {
            nodes[0].closed(TRAINER).is_some() && !nodes[1].refusals().is_empty()
        });
        assert!(!server.is_connected(TRAINER));
        let heard = server.closed(TRAINER).expect("just seen");
        assert!(heard.contains(said[0]), "{heard}");
        assert!(trainer.refusals()[0].contains(said[1]), "{:?}", trainer.refusals());
    };
    // Short times, since who is closed without a word tries again.
    let limits = Limits { greeting: Duration::from_secs(3), ..Limits::default() };
    let short = |it: TcpConfig| TcpConfig { limits, ..it };
    let both = (short(plain(SERVER)), encrypted(TRAINER));
    check(both, ["it encrypts the link, and we do not", "is encryption the same in all processes"]);
    let both = (short(encrypted(SERVER)), plain(TRAINER));
    check(both, ["is encryption the same in all processes", "it encrypts the link, and we do not"]);
}

#[test]
fn a_handshake_that_is_cut_opens_nothing_says_so_and_disturbs_nobody() {
    let limits = Limits { greeting: Duration::from_millis(300), ..Limits::default() };
    let mut trainer = Node::with(TcpConfig { limits, ..encrypted(TRAINER) });
    let mut steady = Node::with(encrypted(PeerId::server(1, 0)));
    connect(&mut steady, &mut trainer);
    // Bytes of both ways until the link is open; they are as many each time, but for a few.
    let mut server = Node::with(encrypted(SERVER));
    let relay = Relay::to(&trainer.tcp.address());
    let whole = through(relay, &mut server, &mut trainer).seen.len();
    assert!(server.is_connected(TRAINER) && whole > 600, "{whole} bytes are no handshake");
    drop(server);
    for (incarnation, cut) in (1..).zip((0..whole - 64).step_by(whole / 12)) {
        let me = PeerId::server(0, incarnation);
        let mut server = Node::with(TcpConfig { limits, ..encrypted(me) });
        let relay = Relay { cuts: Some(cut), ..Relay::to(&trainer.tcp.address()) };
        through(relay, &mut server, &mut trainer);
        assert!(!server.is_connected(TRAINER), "after {cut} of {whole} bytes");
        let said = server.closed(TRAINER).expect("it is not connected");
        assert!(!said.is_empty(), "after {cut} bytes");
    }
    steady.tcp.ring(TRAINER, b"undisturbed").expect("there is room");
    until(&mut [&mut steady, &mut trainer], |nodes| !nodes[1].messages().is_empty());
    assert_eq!(trainer.messages(), [b"undisturbed"]);
    let mut server = Node::with(encrypted(PeerId::server(0, 99)));
    connect(&mut server, &mut trainer);
}

#[test]
fn noise_at_an_encrypted_port_disturbs_nobody() {
    let (mut server, mut trainer) = (Node::with(encrypted(SERVER)), Node::with(encrypted(TRAINER)));
    connect(&mut server, &mut trainer);
    let nodes = RefCell::new((server, trainer));
    // What TLS begins with, and other bytes.
    let start = prop_oneof![Just(vec![]), Just(vec![22, 3, 1]), Just(vec![22, 3, 1, 0, 40, 1, 0])];
    let attack = |(start, noise): (Vec<u8>, Vec<u8>)| {
        noise_disturbs_nobody(&mut nodes.borrow_mut(), &[start, noise].concat(), |_| true)
    };
    let noise = prop::collection::vec(any::<u8>(), 1..300);
    cases(64).run(&(start, noise), attack).expect("no bytes disturb others");
}
