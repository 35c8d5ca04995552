//! Two processes: one that is stopped or killed takes no byte from the other, and gives none that is wrong.
//!
//! Over shared memory of UCX, where the owner's processor answers reads: so an owner that is stopped gives nothing, and an owner that
//! goes on after its reader has given it up answers reads that nobody waits for any more. Over RDMA (`scripts/rdma`) nobody asks the
//! owner's processor: rows of one that is stopped can be had.

use std::time::Duration;

use cadre_exchange::{
    Buffer, Clock, Event, LandingId, PeerId, Provider as _, PullError, PullId, Sharing,
};

use crate::children::{Told, say, word};
use crate::common::{KEY, Node, config, connect, is_rdma, pattern, sharing, until};
use crate::pair::{
    self, OWNER, READER, kill_in_the_middle, landed, own_as_told, reach, reader_of, serve,
    stop_over_reused_rows,
};

/// The child that is told `CADRE_SECOND_OWNER`.
const SECOND: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 1, incarnation: 0 };
const OWNS: &str = "processes::a_child_that_owns";
/// More than the windows.
const BYTES: usize = 40 << 20;

fn node(me: PeerId) -> Node {
    pair::node(me, sharing())
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_owns() {
    let is_second = std::env::var("CADRE_SECOND_OWNER").is_ok();
    own_as_told(node(if is_second { SECOND } else { OWNER }), BYTES);
}

/// A reader whose owner is a child, and publishes rows of seed 1.
fn reader(owner: &mut Told) -> Node {
    reader_of(owner, node(READER))
}

fn begin(reader: &mut Node, patience: Duration) -> (PullId, LandingId) {
    begin_from(reader, OWNER, patience)
}

fn begin_from(reader: &mut Node, owner: PeerId, patience: Duration) -> (PullId, LandingId) {
    let landing = reader.tcp.land(Buffer::zeroed(BYTES));
    let whole = [(0, 0, BYTES as u64)];
    (reader.pull_until(owner, KEY, &whole, landing, patience), landing)
}

fn whole(reader: &mut Node) -> Result<Buffer, PullError> {
    let (pull, landing) = begin(reader, Duration::from_mins(1));
    landed(&mut [reader], pull, landing)
}

/// Polls until rows land.
fn until_in_the_middle(reader: &mut Node, (pull, landing): (PullId, LandingId)) {
    let reads = |it: &Node| it.tcp.landed(landing).expect("it is there").bytes()[1000] != 0;
    until(&mut [reader], |nodes| reads(nodes[0]));
    assert_eq!(reader.result(pull), None, "more than a window");
}

#[test]
fn an_owner_that_is_stopped_and_goes_on_changes_no_byte_of_ours() {
    if sharing() == Sharing::Off {
        return;
    }
    let mut owner = Told::start(OWNS);
    let mut reader = reader(&mut owner);
    let (pull, landing) = begin(&mut reader, Duration::from_millis(300));
    until_in_the_middle(&mut reader, (pull, landing));
    owner.stop();
    until(&mut [&mut reader], |nodes| nodes[0].result(pull).is_some());
    let first = if is_rdma() { Ok(BYTES as u64) } else { Err(PullError::Deadline) };
    assert_eq!(reader.result(pull), Some(first.clone()));
    let mut ours = reader.tcp.take(landing).expect("it ended");
    assert!(first.is_err() || ours == pattern(BYTES, 1));
    ours.bytes_mut().fill(9);
    owner.tell("2");
    owner.go_on();
    assert_eq!(owner.hear(), "published");
    // The owner has answered all that it was asked; and what it publishes now can be had.
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 2));
    assert!(ours.bytes().iter().all(|it| *it == 9), "ours is ours");
    assert_eq!(reader.tcp.traffic().ucx_bytes, first.unwrap_or(0) + BYTES as u64);
    assert!(reader.closed(OWNER).is_none());
}

#[test]
fn an_owner_that_is_stopped_takes_nothing_from_another() {
    // Over RDMA an owner that is stopped makes no pull late.
    if sharing() == Sharing::Off || is_rdma() {
        return;
    }
    let (clock, hand) = Clock::driven();
    let mut reader = Node::on(config(READER), clock, sharing());
    let mut stopped = Told::start(OWNS);
    let mut other = Told::start_by(&["env", "CADRE_SECOND_OWNER=1"], OWNS);
    reach(&mut reader, OWNER, &mut stopped);
    reach(&mut reader, SECOND, &mut other);
    // Reads from both are under way, and one is late. (Both write to one queue of the reader: one that is stopped while it writes
    // there holds up the other, so nothing of the other is waited for.)
    let late = begin(&mut reader, Duration::from_secs(10));
    until_in_the_middle(&mut reader, late);
    stopped.stop();
    other.stop();
    let waits = begin_from(&mut reader, SECOND, Duration::from_mins(1));
    reader.poll();
    assert_eq!(reader.result(waits.0), None);
    hand.advance(Duration::from_secs(11));
    until(&mut [&mut reader], |nodes| nodes[0].result(late.0).is_some());
    assert_eq!(reader.result(late.0), Some(Err(PullError::Deadline)));
    assert_eq!(reader.result(waits.0), None, "of the other nothing has ended");
    // One that is stopped while it writes to the reader's queue holds up what the other answers.
    stopped.go_on();
    other.go_on();
    until(&mut [&mut reader], |nodes| nodes[0].result(waits.0).is_some());
    assert_eq!(reader.result(waits.0), Some(Ok(BYTES as u64)));
    assert!(reader.tcp.take(waits.1).expect("it ended") == pattern(BYTES, 1));
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    let ends = |it: &&Event| matches!(it, Event::Connected(_) | Event::Closed { .. });
    let links: Vec<_> = reader.events.iter().filter(ends).collect();
    assert_eq!(links, [&Event::Connected(OWNER), &Event::Connected(SECOND)], "said once");
    assert_eq!(reader.tcp.traffic().tcp_bytes, 0);
}

#[test]
fn an_owner_that_is_stopped_with_a_full_queue_keeps_a_landing_until_it_goes_on() {
    // Over RDMA no owner holds up the end of a read.
    if sharing() == Sharing::Off || is_rdma() {
        return;
    }
    let (clock, hand) = Clock::driven();
    let mut reader = Node::on(config(READER), clock, sharing());
    let mut stopped = Told::start(OWNS);
    let mut other = Told::start_by(&["env", "CADRE_SECOND_OWNER=1"], OWNS);
    reach(&mut reader, OWNER, &mut stopped);
    reach(&mut reader, SECOND, &mut other);
    let late = begin(&mut reader, Duration::from_secs(10));
    until_in_the_middle(&mut reader, late);
    stopped.stop();
    // More looks at its board than its queue has room for: a close has to wait for it.
    let room = reader.tcp.land(Buffer::zeroed(8 * 100));
    for region in 0..100 {
        let pieces = [(0, 8 * u64::from(region), 8)];
        let key = cadre_exchange::RegionKey([9, region, 0, 0]);
        reader.pull_until(OWNER, key, &pieces, room, Duration::from_secs(10));
    }
    let waits = begin_from(&mut reader, SECOND, Duration::from_mins(1));
    reader.poll();
    hand.advance(Duration::from_secs(11));
    until(&mut [&mut reader], |nodes| nodes[0].result(late.0).is_some());
    assert_eq!(reader.result(late.0), Some(Err(PullError::Deadline)));
    assert!(reader.tcp.is_busy(late.1), "the owner may still answer");
    assert!(reader.tcp.take(late.1).is_err());
    assert_eq!(reader.result(waits.0), None, "of the other nothing has ended");
    stopped.go_on();
    until(&mut [&mut reader], |nodes| !nodes[0].tcp.is_busy(late.1));
    let mut ours = reader.tcp.take(late.1).expect("nothing is written any more");
    ours.bytes_mut().fill(9);
    until(&mut [&mut reader], |nodes| nodes[0].result(waits.0).is_some());
    assert_eq!(reader.result(waits.0), Some(Ok(BYTES as u64)));
    assert!(reader.tcp.take(waits.1).expect("it ended") == pattern(BYTES, 1));
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    assert!(ours.bytes().iter().all(|it| *it == 9), "ours is ours");
    assert_eq!(reader.tcp.traffic().tcp_bytes, 0);
}

#[test]
fn a_pull_that_is_not_late_waits_on_when_another_of_its_owner_is() {
    // Over RDMA an owner that is stopped makes no pull late.
    if sharing() == Sharing::Off || is_rdma() {
        return;
    }
    let (clock, hand) = Clock::driven();
    let mut reader = Node::on(config(READER), clock, sharing());
    let mut owner = Told::start(OWNS);
    reach(&mut reader, OWNER, &mut owner);
    let late = begin(&mut reader, Duration::from_secs(10));
    let waits = begin(&mut reader, Duration::from_secs(20));
    // Rows come now and then: neither is late.
    for _ in 0..2 {
        let before = landed_mib(&reader, late.1);
        until(&mut [&mut reader], |nodes| landed_mib(nodes[0], late.1) > before + 1);
        hand.advance(Duration::from_secs(9));
    }
    let before = landed_mib(&reader, late.1);
    until(&mut [&mut reader], |nodes| landed_mib(nodes[0], late.1) > before + 1);
    assert_eq!((reader.result(late.0), reader.result(waits.0)), (None, None));
    owner.stop();
    // 11 s after something came last, and 29 s after both were begun.
    hand.advance(Duration::from_secs(11));
    until(&mut [&mut reader], |nodes| nodes[0].result(late.0).is_some());
    assert_eq!(reader.result(late.0), Some(Err(PullError::Deadline)));
    reader.poll();
    assert_eq!(reader.result(waits.0), None);
    owner.go_on();
    until(&mut [&mut reader], |nodes| nodes[0].result(waits.0).is_some());
    assert_eq!(reader.result(waits.0), Some(Ok(BYTES as u64)));
}

/// How many MiB of a landing have begun to land.
fn landed_mib(reader: &Node, landing: LandingId) -> usize {
    let landed = reader.tcp.landed(landing).expect("it is there").bytes();
    landed.chunks(1 << 20).filter(|it| it[1000..1016] != [0; 16]).count()
}

#[test]
fn a_killed_owner_ends_its_pulls() {
    if sharing() == Sharing::Off {
        return;
    }
    let mut owner = Told::start(OWNS);
    let mut reader = reader(&mut owner);
    let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
    until_in_the_middle(&mut reader, (pull, landing));
    kill_in_the_middle(&mut owner, &mut reader, pull);
    let mut ours = reader.tcp.take(landing).expect("it ended");
    ours.bytes_mut().fill(9);
    reader.poll();
    assert!(ours.bytes().iter().all(|it| *it == 9), "nothing comes from the dead");
}

#[test]
#[ignore = "the child of other tests"]
fn a_child_that_reads() {
    let mut reader = node(READER);
    reader.tcp.connect(OWNER, &word());
    until(&mut [&mut reader], |nodes| nodes[0].is_connected(OWNER));
    assert!(whole(&mut reader).expect("published") == pattern(BYTES, 1));
    for _ in 0..2 {
        let reads = begin(&mut reader, Duration::from_mins(1));
        until_in_the_middle(&mut reader, reads);
        say("in the middle");
        assert_eq!(word(), "go on");
        until(&mut [&mut reader], |nodes| nodes[0].result(reads.0).is_some());
        say(&format!("{:?}", reader.result(reads.0).expect("just seen")));
        assert_eq!(word(), "again");
    }
    say(&format!("{:?}", reader.tcp.traffic().ucx_bytes));
}

#[test]
fn a_reader_that_is_stopped_and_goes_on_over_reused_rows_counts_nothing() {
    if sharing() == Sharing::Off {
        return;
    }
    let reader = Told::start("processes::a_child_that_reads");
    stop_over_reused_rows(node(OWNER), reader, BYTES);
}

#[test]
fn a_reader_that_is_killed_leaves_its_owner_to_others() {
    if sharing() == Sharing::Off {
        return;
    }
    let mut owner = node(OWNER);
    let region = owner.publish(KEY, BYTES, 1);
    let mut child = Told::start("processes::a_child_that_reads");
    child.tell(&owner.tcp.address());
    assert_eq!(serve(&mut owner, &mut child), "in the middle");
    child.child.kill().expect("our own child");
    child.child.wait().expect("our own child");
    until(&mut [&mut owner], |nodes| nodes[0].closed(READER).is_some());
    let mut reader = node(PeerId::server(1, 0));
    connect(&mut reader, &mut owner);
    let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
    let came = landed(&mut [&mut reader, &mut owner], pull, landing);
    assert!(came.expect("published") == *region);
    assert_eq!(reader.tcp.traffic().ucx_bytes, BYTES as u64);
}
