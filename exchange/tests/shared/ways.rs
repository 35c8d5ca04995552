//! Which path pulls take: shared memory where it can be had, tcp else, and what is said of it.

use std::io::Read as _;
use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Clock, Event, Path, PeerId, Provider, PullError, RegionKey, Sharing, TcpConfig, Traffic,
};

use crate::common::{KEY, Node, config, connect, pattern, raw_welcome, until};
use crate::pair::{
    BYTES, OWNER, READER, landed, node, only_rows_in_arenas, published_anew_in_the_middle, whole,
};

const OFFER: RegionKey = RegionKey([u32::MAX, 0, 0x7368_6d00, u32::MAX]);

fn by(shared: usize, tcp: usize, sent_anew: u64) -> Traffic {
    Traffic { shared_bytes: shared as u64, ucx_bytes: 0, tcp_bytes: tcp as u64, sent_anew }
}

#[test]
fn rows_in_arenas_are_copied_and_all_others_are_sent() {
    let (mut owner, mut reader) = (node(OWNER, Sharing::Auto), node(READER, Sharing::Required));
    connect(&mut reader, &mut owner);
    only_rows_in_arenas((&mut reader, &mut owner), [by(BYTES, 0, 0), by(BYTES, BYTES, 0)]);
}

#[test]
fn rows_are_said_to_come_by_tcp_until_their_memory_is_mapped() {
    let (mut owner, mut reader) = (node(OWNER, Sharing::Auto), node(READER, Sharing::Auto));
    let region = owner.publish(KEY, BYTES, 1);
    connect(&mut reader, &mut owner);
    until(&mut [&mut reader, &mut owner], |nodes| nodes[0].tcp.path(OWNER) != Path::Asked);
    assert_eq!(reader.tcp.path(OWNER), Path::Tcp);
    assert_eq!(reader.tcp.why_tcp(OWNER), Some("its shared memory is not mapped yet"));
    while reader.tcp.traffic().shared_bytes == 0 {
        assert!(whole(&mut reader, &mut owner, KEY).expect("published") == *region);
    }
    assert_eq!((reader.tcp.path(OWNER), reader.tcp.why_tcp(OWNER)), (Path::Shared, None));
}

#[test]
fn a_region_that_is_published_anew_while_it_is_copied_comes_anew() {
    let (mut owner, mut reader) = (node(OWNER, Sharing::Auto), node(READER, Sharing::Required));
    connect(&mut reader, &mut owner);
    let bytes = 32 << 20;
    published_anew_in_the_middle((&mut reader, &mut owner), bytes, |reader, owner, landing| {
        // The owner's arena is mapped first: then a turn of many copies some of it.
        let pull = reader.pull(OWNER, KEY, &[(0, 0, 10)], landing);
        until(&mut [reader, owner], |nodes| nodes[0].result(pull).is_some());
        let pull = reader.pull(OWNER, KEY, &[(0, 0, bytes as u64)], landing);
        reader.poll();
        pull
    });
}

#[test]
fn a_peer_without_shared_memory_is_pulled_by_tcp_or_refused_by_name() {
    let mut owner = node(OWNER, Sharing::Off);
    let region = owner.publish(KEY, BYTES, 5);
    let mut reader = node(READER, Sharing::Auto);
    reader.tcp.connect(OWNER, &owner.tcp.address());
    assert!(whole(&mut reader, &mut owner, KEY).expect("published") == *region);
    assert_eq!(
        (reader.tcp.traffic().shared_bytes, reader.tcp.traffic().tcp_bytes),
        (0, BYTES as u64)
    );
    let mut strict = node(PeerId::server(1, 0), Sharing::Required);
    strict.tcp.connect(OWNER, &owner.tcp.address());
    let landing = strict.tcp.land(Buffer::zeroed(BYTES));
    let pull = strict.pull(OWNER, KEY, &[(0, 0, 10)], landing);
    until(&mut [&mut strict, &mut owner], |nodes| nodes[0].closed(OWNER).is_some());
    let said = strict.closed(OWNER).expect("just seen");
    assert_eq!(
        said,
        "it offers no shared memory; run both on one machine, or without requiring shared memory (--exchange auto)"
    );
    assert_eq!(strict.unfit(OWNER), Some(said), "what it lacks it will lack the next time, too");
    assert_eq!(strict.result(pull), Some(Err(PullError::PeerFailed)), "and its pulls before");
    assert!(!strict.is_connected(OWNER));
}

#[test]
fn a_link_that_breaks_before_an_offer_came_is_closed_once_and_for_that_reason() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback");
    let address = listener.local_addr().expect("it listens");
    let mut reader = node(READER, Sharing::Required);
    reader.tcp.connect(OWNER, &address.to_string());
    drop(raw_welcome(&mut reader, OWNER, &listener));
    until(&mut [&mut reader], |nodes| nodes[0].closed(OWNER).is_some());
    reader.poll();
    let closed = reader.events.iter().filter(|it| matches!(it, Event::Closed { .. }));
    assert_eq!(closed.count(), 1, "{:?}", reader.events);
    let why = reader.closed(OWNER).expect("just seen");
    assert!(why.contains("closed the link") || why.contains("link broke"), "{why}");
    assert!(!why.contains("--exchange"), "{why}");
}

#[test]
fn a_door_that_does_not_open_is_tried_again_after_a_rest_that_grows() {
    let (clock, hand) = Clock::driven();
    let mut owner = node(OWNER, Sharing::Off);
    let region = owner.publish(KEY, BYTES, 6);
    // What an owner offers whose door is here: a name, and a ticket that it does not know.
    let offer = *b"cadre-rows-000000000000000000bad00ticket-of-a-board-that-is-gone";
    let mut offered = Buffer::zeroed(64);
    offered.bytes_mut().copy_from_slice(&offer);
    owner.tcp.publish(OFFER, Arc::new(offered));
    let name = SocketAddr::from_abstract_name(&offer[..32]).expect("a short name");
    let listener = UnixListener::bind_addr(&name).expect("nobody else has it");
    listener.set_nonblocking(true).expect("a socket of ours");
    let mut reader = Node::on(config(READER), clock, Sharing::Auto);
    reader.tcp.connect(OWNER, &owner.tcp.address());
    let mut knocks = 0;
    for rest in [0, 30, 60, 120, 240, 480, 600, 600] {
        if rest > 0 {
            hand.advance(Duration::from_secs(rest - 1));
            assert!(whole(&mut reader, &mut owner, KEY).expect("published") == *region);
            // A question would have come before the rows.
            assert!(listener.accept().is_err(), "after {} s of {rest}", rest - 1);
            hand.advance(Duration::from_secs(1));
        }
        assert!(whole(&mut reader, &mut owner, KEY).expect("published") == *region);
        let mut asker = None;
        until(&mut [&mut reader, &mut owner], |_| {
            asker = asker.take().or_else(|| listener.accept().ok());
            asker.is_some()
        });
        let mut ticket = [0; 32];
        let (mut asker, _) = asker.expect("just seen");
        asker.set_nonblocking(false).expect("a socket of ours");
        asker.read_exact(&mut ticket).expect("it shows the ticket");
        assert_eq!(ticket[..], offer[32..]);
        drop(asker);
        knocks += 1;
        // The reader learns that it gets nothing before its rest begins.
        until(&mut [&mut reader, &mut owner], |nodes| nodes[0].tcp.path(OWNER) == Path::Tcp);
    }
    assert_eq!((knocks, reader.tcp.traffic().shared_bytes), (8, 0));
    assert!(
        !reader.events.iter().any(|it| matches!(it, Event::Closed { .. } | Event::Broken { .. }))
    );
}

#[test]
fn rows_of_another_job_are_had_by_no_offer_that_leads_to_its_door() {
    let secret = [77; 32];
    let other = |me| TcpConfig { secret, ..config(me) };
    let mut theirs = Node::on(other(OWNER), Clock::system(), Sharing::Auto);
    theirs.publish(KEY, BYTES, 1);
    // Where the door of the other job is can be seen on the machine; its ticket is known there alone.
    let mut spy = Node::on(other(READER), Clock::system(), Sharing::Off);
    connect(&mut spy, &mut theirs);
    let landing = spy.tcp.land(Buffer::zeroed(64));
    let pull = spy.pull(OWNER, OFFER, &[(0, 0, 64)], landing);
    let offer = landed(&mut [&mut spy, &mut theirs], pull, landing).expect("it offers rows");
    let mut ours = node(OWNER, Sharing::Off);
    let region = ours.publish(KEY, BYTES, 2);
    for ticket in [[0; 32], [1; 32]] {
        let mut lie = Buffer::zeroed(64);
        lie.bytes_mut()[..32].copy_from_slice(&offer.bytes()[..32]);
        lie.bytes_mut()[32..].copy_from_slice(&ticket);
        ours.tcp.publish(OFFER, Arc::new(lie));
        let mut reader = node(READER, Sharing::Auto);
        connect(&mut reader, &mut ours);
        until(&mut [&mut reader, &mut ours, &mut theirs], |nodes| {
            nodes[0].tcp.path(OWNER) == Path::Tcp
        });
        assert!(whole(&mut reader, &mut ours, KEY).expect("published") == *region);
        assert_eq!(reader.tcp.traffic(), by(0, BYTES, 0));
    }
    // The other job is where it was: who has its secret has its rows.
    let mut right = Node::on(other(PeerId::server(1, 0)), Clock::system(), Sharing::Required);
    connect(&mut right, &mut theirs);
    assert!(whole(&mut right, &mut theirs, KEY).expect("published") == pattern(BYTES, 1));
}

#[test]
fn a_wake_that_comes_with_an_answer_for_the_provider_alone_ends_the_poll() {
    // The owner offers nothing, and says so: nothing that a caller is told.
    let (mut owner, mut reader) = (node(OWNER, Sharing::Off), node(READER, Sharing::Auto));
    reader.tcp.connect(OWNER, &owner.tcp.address());
    until(&mut [&mut reader, &mut owner], |nodes| nodes[0].is_connected(OWNER));
    reader.tcp.poll(Duration::ZERO, &mut reader.events);
    for _ in 0..20 {
        owner.poll();
    }
    assert_eq!(reader.tcp.path(OWNER), Path::Asked);
    reader.tcp.waker().wake();
    let limit = Instant::now() + Duration::from_secs(15);
    reader.tcp.poll(Duration::from_secs(20), &mut reader.events);
    assert!(Instant::now() < limit, "it slept on");
    assert_eq!(reader.tcp.path(OWNER), Path::Tcp);
}
