//! Pulls over slow, silent and broken links: late is who sends nothing, and what has landed need not come again.
//!
//! The owner is a raw peer that answers one part when the test says so; time is a clock that the test drives. So a transfer of
//! an hour takes no time, and every byte that crosses the link is counted.

mod common;

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use cadre_exchange::{
    Buffer, Clock, Error, Hand, LandingId, Limits, PeerId, Provider, PullError, TcpConfig,
};
use common::{KEY, Node, config, connect, pattern, raw_accept, receive, until};

const OWNER: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: cadre_exchange::Role::Server, index: 0, incarnation: 0 };
const PATIENCE: Duration = Duration::from_secs(10);
/// Nearly too long.
const SLOW: Duration = Duration::from_millis(9_900);
const PART: u64 = 64 << 10;

/// A request for a part: its number and spans.
struct Asked {
    number: u64,
    spans: Vec<(u64, u64)>,
}

impl Asked {
    fn bytes(&self) -> u64 {
        self.spans.iter().map(|it| it.1).sum()
    }
}

/// A reader whose clock is driven, and the owner's end of its link.
struct Pair {
    reader: Node,
    hand: Hand,
    listener: TcpListener,
    stream: TcpStream,
    /// Bytes of data that the owner has sent.
    sent: u64,
}

impl Pair {
    fn new(limits: Limits) -> Self {
        let (clock, hand) = Clock::driven();
        let mut reader = Node::at(TcpConfig { limits, ..config(READER) }, clock);
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let stream = open(&mut reader, &listener);
        Self { reader, hand, listener, stream, sent: 0 }
    }

    /// The next request of the reader.
    fn asked(&mut self) -> Asked {
        let head = receive(&mut self.reader, &mut self.stream, 8);
        assert_eq!(head[..4], [2, 0, 0, 0], "a request to pull");
        let length = u32::from_le_bytes(*head[4..].first_chunk().expect("8 bytes"));
        let body = receive(&mut self.reader, &mut self.stream, length as usize);
        let word = |at: usize| u64::from_le_bytes(*body[at..].first_chunk().expect("8 bytes"));
        assert_eq!(body[8..24], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0], "of the key");
        let spans = (24..body.len()).step_by(16).map(|at| (word(at), word(at + 8))).collect();
        Asked { number: word(0), spans }
    }

    /// Answers a request with the bytes of `region`, but not with the last `held` of them.
    fn answer(&mut self, asked: &Asked, region: &Buffer, publication: u64, held: u64) {
        let bytes = asked.bytes();
        let mut reply = [asked.number, 0, bytes, publication].map(u64::to_le_bytes).concat();
        for &(start, bytes) in &asked.spans {
            reply.extend_from_slice(&region.bytes()[start as usize..(start + bytes) as usize]);
        }
        reply.truncate(reply.len() - held as usize);
        self.stream.write_all(&reply).expect("there is room");
        self.sent += bytes - held;
    }

    /// Answers requests, each after a time that is nearly too long, until the pull has ended.
    fn answer_slowly(&mut self, parts: u64, region: &Buffer, publication: u64) {
        for _ in 0..parts {
            let asked = self.asked();
            self.hand.advance(SLOW);
            self.answer(&asked, region, publication, 0);
        }
    }

    /// The link breaks behind what was sent, and opens anew.
    fn cut(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Write).expect("a socket of ours");
        until(&mut [&mut self.reader], |nodes| nodes[0].closed(OWNER).is_some());
        self.reader.events.retain(|it| matches!(it, cadre_exchange::Event::Pulled { .. }));
        self.stream = open(&mut self.reader, &self.listener);
    }

    fn land(&mut self, bytes: u64) -> LandingId {
        self.reader.tcp.land(Buffer::zeroed(bytes as usize))
    }

    fn pull(&mut self, pieces: &[(u64, u64, u64)], to: LandingId) -> cadre_exchange::PullId {
        self.reader.pull_until(OWNER, KEY, pieces, to, PATIENCE)
    }
}

fn open(reader: &mut Node, listener: &TcpListener) -> TcpStream {
    reader.tcp.connect(OWNER, &listener.local_addr().expect("bound").to_string());
    raw_accept(reader, OWNER, listener)
}

/// One part of a peer at a time.
fn one_part() -> Limits {
    Limits { part_bytes: PART, peer_window_bytes: PART, ..Limits::default() }
}

#[test]
fn a_transfer_that_lasts_many_deadlines_ends_well() {
    let mut pair = Pair::new(one_part());
    let region = pattern(40 * PART as usize + 5, 1);
    let landing = pair.land(40 * PART + 5);
    let pull = pair.pull(&[(0, 0, 40 * PART + 5)], landing);
    pair.answer_slowly(41, &region, 7);
    until(&mut [&mut pair.reader], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(pair.reader.result(pull), Some(Ok(40 * PART + 5)));
    assert!(pair.reader.tcp.take(landing).expect("it ended") == region, "the bytes differ");
}

#[test]
fn pulls_that_wait_behind_a_slow_one_are_not_late_while_it_moves() {
    let mut pair = Pair::new(one_part());
    let region = pattern(232 * PART as usize, 2);
    let landing = pair.land(232 * PART);
    let mut pulls = vec![pair.pull(&[(0, 0, 32 * PART)], landing)];
    for at in 32..232 {
        pulls.push(pair.pull(&[(at * PART, at * PART, PART)], landing));
    }
    pair.answer_slowly(232, &region, 7);
    let last = pulls[200];
    until(&mut [&mut pair.reader], |nodes| nodes[0].result(last).is_some());
    assert!(pulls.iter().all(|&it| matches!(pair.reader.result(it), Some(Ok(_)))));
    assert!(pair.reader.tcp.take(landing).expect("all ended") == region, "the bytes differ");
}

#[test]
fn a_peer_that_sends_nothing_ends_at_the_deadline_and_its_late_bytes_land_nowhere() {
    let mut pair = Pair::new(one_part());
    let region = pattern(PART as usize, 3);
    let landing = pair.land(PART);
    let pull = pair.pull(&[(0, 0, PART)], landing);
    let asked = pair.asked();
    pair.hand.advance(SLOW);
    pair.reader.poll();
    assert_eq!(pair.reader.result(pull), None);
    assert!(matches!(pair.reader.tcp.take(landing), Err(Error::Busy { .. })));
    pair.hand.advance(PATIENCE.saturating_sub(SLOW));
    pair.reader.poll();
    assert_eq!(pair.reader.result(pull), Some(Err(PullError::Deadline)));
    assert_eq!(
        pair.reader.tcp.take(landing).expect("free at once").bytes(),
        vec![0; PART as usize]
    );
    // The reply comes late, and the link is as good as before.
    pair.answer(&asked, &region, 7, 0);
    let other = pair.land(8);
    let later = pair.pull(&[(8, 0, 8)], other);
    let asked = pair.asked();
    pair.answer(&asked, &region, 7, 0);
    until(&mut [&mut pair.reader], |nodes| nodes[0].result(later).is_some());
    assert_eq!(pair.reader.tcp.take(other).expect("ended").bytes(), &region.bytes()[8..16]);
    assert_eq!(pair.reader.result(pull), Some(Err(PullError::Deadline)), "and it ended once");
}

#[test]
fn bytes_that_are_there_count_before_the_deadline_of_a_reader_that_stood_still() {
    let mut pair = Pair::new(one_part());
    let region = pattern(8, 4);
    let landing = pair.land(8);
    let pull = pair.pull(&[(0, 0, 8)], landing);
    let asked = pair.asked();
    pair.answer(&asked, &region, 7, 0);
    // On loopback what was written is there.
    pair.hand.advance(100 * PATIENCE);
    pair.reader.poll();
    assert_eq!(pair.reader.result(pull), Some(Ok(8)));
}

#[test]
fn a_pull_that_is_cut_goes_on_at_the_byte_where_it_stopped() {
    let mut pair = Pair::new(one_part());
    let bytes = 4 * PART;
    let region = pattern(bytes as usize, 5);
    // Two pieces that lie apart at both ends.
    let pieces = [(PART, 100, bytes - PART), (0, bytes, PART)];
    let landing = pair.land(bytes + PART);
    let mut pulls = Vec::new();
    for held in [PART - 1, PART / 2, 1, PART / 2, 0] {
        let pull = pair.pull(&pieces, landing);
        pulls.push(pull);
        let asked = pair.asked();
        pair.answer(&asked, &region, 7, held);
        if held > 0 {
            pair.cut();
            assert_eq!(pair.reader.result(pull), Some(Err(PullError::PeerFailed)));
        }
    }
    while pair.sent < bytes {
        let asked = pair.asked();
        pair.answer(&asked, &region, 7, 0);
    }
    until(&mut [&mut pair.reader], |nodes| nodes[0].result(pulls[4]).is_some());
    assert_eq!(pair.reader.result(pulls[4]), Some(Ok(bytes)));
    assert_eq!(pair.sent, bytes, "no byte came twice");
    let landed = pair.reader.tcp.take(landing).expect("it ended");
    let (first, rest) = region.bytes().split_at(PART as usize);
    assert!(landed.bytes()[100..][..rest.len()] == *rest, "the bytes differ");
    assert!(landed.bytes()[bytes as usize..][..first.len()] == *first, "the bytes differ");
}

#[test]
fn a_pull_of_a_region_that_was_published_anew_begins_at_byte_0() {
    let mut pair = Pair::new(one_part());
    let (old, new) = (pattern(3 * PART as usize, 6), pattern(3 * PART as usize, 60));
    let landing = pair.land(3 * PART);
    let pieces = [(0, 0, 3 * PART)];
    pair.pull(&pieces, landing);
    let asked = pair.asked();
    pair.answer(&asked, &old, 7, 0);
    pair.asked();
    pair.cut();
    // Once between two links, and once between two parts of one.
    let pull = pair.pull(&pieces, landing);
    let mut starts = Vec::new();
    for publication in [8, 8, 9, 9, 9, 9] {
        let asked = pair.asked();
        starts.push(asked.spans[0].0 / PART);
        pair.answer(&asked, if publication == 8 { &old } else { &new }, publication, 0);
    }
    assert_eq!(starts, [1, 0, 1, 0, 1, 2]);
    until(&mut [&mut pair.reader], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(pair.reader.result(pull), Some(Ok(3 * PART)));
    assert!(pair.reader.tcp.take(landing).expect("it ended") == new, "bytes of the old rows");
}

#[test]
fn what_was_whole_when_the_link_broke_is_asked_for_its_publication_alone() {
    for (publication, data) in [(7, 0), (8, PART)] {
        let mut pair = Pair::new(one_part());
        let region = pattern(2 * PART as usize, 8);
        let landing = pair.land(2 * PART);
        let pieces = [[(0, 0, PART)], [(PART, PART, PART)]];
        pair.pull(&pieces[0], landing);
        pair.pull(&pieces[1], landing);
        let asked = pair.asked();
        pair.answer(&asked, &region, 7, 0);
        let asked = pair.asked();
        pair.answer(&asked, &region, 7, PART);
        pair.cut();
        let pulls = [0, 1].map(|it| pair.pull(&pieces[it], landing));
        let before = pair.sent;
        while pair.sent < before + data + PART {
            let asked = pair.asked();
            pair.answer(&asked, &region, publication, 0);
        }
        until(&mut [&mut pair.reader], |nodes| {
            pulls.iter().all(|&it| nodes[0].result(it).is_some())
        });
        assert_eq!(pulls.map(|it| pair.reader.result(it)), [Some(Ok(PART)), Some(Ok(PART))]);
        assert_eq!(pair.sent - before, data + PART);
        assert!(pair.reader.tcp.take(landing).expect("ended") == region, "the bytes differ");
    }
}

#[test]
fn a_link_that_was_idle_keeps_the_windows_too() {
    let limits = Limits { part_bytes: 1 << 20, peer_window_bytes: 3 << 20, ..Limits::default() };
    let mut pair = Pair::new(limits);
    let landing = pair.land(8 << 20);
    pair.pull(&[(0, 0, 8 << 20)], landing);
    assert_eq!([0; 3].map(|_| pair.asked().bytes()), [1 << 20; 3]);
    assert_eq!(pair.idle(), 0, "more than the window was asked for");
    // A second peer, when what all may have is asked for.
    let limits = Limits { window_bytes: 3 << 20, ..limits };
    let mut pair = Pair::new(limits);
    let landing = pair.land(16 << 20);
    pair.pull(&[(0, 0, 8 << 20)], landing);
    assert_eq!([0; 3].map(|_| pair.asked().bytes()), [1 << 20; 3]);
    let mut other = Node::new(PeerId::trainer(1, 0));
    connect(&mut pair.reader, &mut other);
    let region = other.publish(KEY, 1 << 20, 9);
    let pull = pair.reader.pull_until(other.id, KEY, &[(0, 8 << 20, 1 << 20)], landing, PATIENCE);
    until(&mut [&mut pair.reader, &mut other], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(
        pair.reader.result(pull),
        Some(Ok(1 << 20)),
        "one that answers goes on all the same"
    );
    pair.reader.tcp.close(OWNER);
    let landed = pair.reader.tcp.take(landing).expect("all ended");
    assert!(landed.bytes()[8 << 20..][..1 << 20] == *region.bytes(), "the bytes differ");
}

impl Pair {
    /// Bytes that the reader has sent meanwhile.
    fn idle(&mut self) -> usize {
        for _ in 0..20 {
            self.reader.poll();
        }
        self.stream.set_nonblocking(true).expect("a socket of ours");
        let sent = self.stream.peek(&mut [0; 64]).unwrap_or(0);
        self.stream.set_nonblocking(false).expect("a socket of ours");
        sent
    }
}

#[test]
fn a_pull_that_was_closed_here_goes_on_with_a_real_owner_unless_it_publishes_anew() {
    let limits = Limits { part_bytes: PART, peer_window_bytes: PART, ..Limits::default() };
    for anew in [false, true] {
        let mut owner = Node::new(OWNER);
        let mut reader = Node::with(TcpConfig { limits, ..config(READER) });
        let bytes = 16 * PART;
        let mut region = owner.publish(KEY, bytes as usize, 10);
        let landing = reader.tcp.land(Buffer::zeroed(bytes as usize));
        let mut interrupted = 0;
        let whole = loop {
            connect(&mut reader, &mut owner);
            let pull = reader.pull_until(OWNER, KEY, &[(0, 0, bytes)], landing, PATIENCE);
            for _ in 0..3 {
                reader.poll();
                owner.poll();
            }
            if interrupted == 2 || reader.result(pull).is_some() {
                break pull;
            }
            interrupted += 1;
            reader.tcp.close(OWNER);
            until(&mut [&mut owner], |nodes| nodes[0].closed(READER).is_some());
            (owner.events, reader.events) = (Vec::new(), Vec::new());
            if anew {
                region = owner.publish(KEY, bytes as usize, 10 + interrupted);
            }
        };
        assert!(interrupted > 0);
        until(&mut [&mut reader, &mut owner], |nodes| nodes[0].result(whole).is_some());
        assert_eq!(reader.result(whole), Some(Ok(bytes)));
        assert!(reader.tcp.take(landing).expect("it ended") == *region, "anew: {anew}");
    }
}

#[test]
fn a_region_withdrawn_while_it_is_sent_is_gone_and_its_memory_free() {
    let (mut server, mut trainer) = (Node::new(READER), Node::new(OWNER));
    connect(&mut server, &mut trainer);
    let bytes = 64 << 20;
    let region = trainer.publish(KEY, bytes, 6);
    let landing = server.tcp.land(Buffer::zeroed(bytes));
    let pull = server.pull(OWNER, KEY, &[(0, 0, bytes as u64)], landing);
    // The request is answered as far as the sockets take it, which is not all.
    until(&mut [&mut server, &mut trainer], |_| Arc::strong_count(&region) == 3);
    drop(trainer.tcp.withdraw(KEY));
    assert_eq!(Arc::strong_count(&region), 2, "the part keeps its memory");
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(server.result(pull), Some(Err(PullError::Gone)));
    assert_eq!(Arc::strong_count(&region), 1, "and frees it");
    assert!(server.tcp.take(landing).is_ok());
}
