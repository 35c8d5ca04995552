//! What is seen of ways by UCX from inside alone: rests, memory that is not shown, ends that are not watched.
//!
//! Over shared memory of UCX; without UCX they say that they were skipped.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use super::For;
use super::card::LONGEST_KEY;
use super::way::{Onward, Stage};
use crate::buffer::Buffer;
use crate::clock::{Clock, Hand};
use crate::paths::{Path, Paths, PathsConfig, Sharing};
use crate::peer::{PeerId, Piece, RegionKey, Role};
use crate::pool::Pool;
use crate::provider::{Error, Event, LandingId, Provider as _, PullError, PullId, PullRequest};
use crate::tcp::{Encryption, Limits, TcpConfig};
use crate::ucx::Transports;

const OWNER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
const SECOND: PeerId = PeerId { role: Role::Trainer, index: 1, incarnation: 0 };
const READER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };

/// One that takes UCX where it can, and links where it cannot; none where this machine has no UCX.
fn open(me: PeerId, clock: Clock) -> Option<Paths> {
    if let Err(why) = crate::ucx::ucx_here() {
        println!("skipped: {why}");
        return None;
    }
    let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
    let encryption = Encryption::Off;
    let tcp = TcpConfig { bind, me, secret: [3; 32], data_version: 1, encryption, limits };
    let sharing = Sharing::Ucx(Transports::SharedMemory);
    let mut paths = Paths::open_at(PathsConfig { tcp, sharing }, clock).unwrap();
    paths.remote.as_mut().unwrap().required = false;
    Some(paths)
}

fn poll(paths: &mut Paths) {
    paths.poll(Duration::from_millis(1), &mut Vec::new());
}

/// Polls both until the reader's way to the owner is at such a stage.
fn until(reader: &mut Paths, owner: &mut Paths, is_there: impl Fn(&Stage) -> bool) {
    for _ in 0..20_000 {
        let way = reader.remote.as_ref().unwrap().ways.get(&OWNER);
        if way.is_some_and(|it| is_there(&it.stage)) {
            return;
        }
        poll(owner);
        poll(reader);
    }
    panic!("it never came to it");
}

#[test]
fn a_first_look_that_is_late_is_one_failure() {
    let (clock, hand) = Clock::driven();
    let (Some(mut owner), Some(mut reader)) =
        (open(OWNER, Clock::system()), open(READER, clock.clone()))
    else {
        return;
    };
    reader.connect(OWNER, &owner.address());
    until(&mut reader, &mut owner, |it| matches!(it, Stage::Looking { .. }));
    // The owner answers by its link, and stands still before it answers by UCX.
    hand.advance(Duration::from_secs(5));
    poll(&mut reader);
    poll(&mut reader);
    let remote = reader.remote.as_ref().unwrap();
    assert!(matches!(remote.ways[&OWNER].stage, Stage::Shut { .. }));
    assert!(!remote.is_to_be_tried(OWNER, clock.now()));
    hand.advance(Duration::from_secs(30));
    assert!(reader.remote.as_ref().unwrap().is_to_be_tried(OWNER, clock.now()));
}

#[test]
fn memory_that_cannot_be_shown_is_given_back_and_tried_after_a_rest_that_grows() {
    let (clock, hand) = Clock::driven();
    let Some(mut owner) = open(OWNER, clock) else { return };
    let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
    // The board, and what could be shown; registered once more at each publication that tries.
    let publish = |owner: &mut Paths, longest_key: usize| {
        owner.remote.as_mut().unwrap().longest_key = longest_key;
        for region in 0..100 {
            owner.publish(RegionKey([region; 4]), Arc::new(pool.take(64)));
        }
        let remote = owner.remote.as_ref().unwrap();
        (remote.net.memories()[0], remote.resting.as_ref().map(|it| it.1.as_secs()))
    };
    // One try doubles the rest that follows.
    assert_eq!(publish(&mut owner, 0), (1, Some(60)));
    hand.advance(Duration::from_secs(29));
    assert_eq!(publish(&mut owner, LONGEST_KEY), (1, Some(60)));
    hand.advance(Duration::from_secs(1));
    assert_eq!(publish(&mut owner, 0), (1, Some(120)));
    hand.advance(Duration::from_mins(1));
    assert_eq!(publish(&mut owner, LONGEST_KEY), (2, None));
}

#[test]
fn ends_that_nothing_wakes_are_closed_and_later_ones_are_watched() {
    let (clock, hand) = Clock::driven();
    let (Some(mut owner), Some(mut reader)) = (open(OWNER, Clock::system()), open(READER, clock))
    else {
        return;
    };
    // The system refuses to watch a descriptor that it watches already.
    let Paths { remote, tcp, .. } = &mut reader;
    let net = &mut remote.as_mut().unwrap().net;
    let own = net.address().unwrap();
    net.connect(&own).unwrap();
    let refused = net.watch_reading(|it| {
        tcp.watch_device(it)?;
        Err(std::io::ErrorKind::Other.into())
    });
    assert!(refused.is_err());
    reader.connect(OWNER, &owner.address());
    until(&mut reader, &mut owner, |it| matches!(it, Stage::Shut { .. }));
    let Paths { remote, tcp, .. } = &mut reader;
    let net = &mut remote.as_mut().unwrap().net;
    assert!(net.ends() <= 1, "that to itself");
    let _ = net.watch_reading(|it| {
        tcp.forget_device(it);
        Err(std::io::ErrorKind::Other.into())
    });
    hand.advance(Duration::from_secs(30));
    reader.ask_card(OWNER);
    until(&mut reader, &mut owner, |it| matches!(it, Stage::Open { .. }));
    let mut is_asked = false;
    let net = &mut reader.remote.as_mut().unwrap().net;
    net.watch_reading(|_| {
        is_asked = true;
        Ok(())
    })
    .unwrap();
    assert!(!is_asked, "it is watched");
}

/// A reader with ways to two owners, each of which publishes `KEY`.
struct Three {
    reader: Paths,
    owners: [Paths; 2],
    hand: Hand,
    events: Vec<Event>,
}

const KEY: RegionKey = RegionKey([5; 4]);
/// More than one part.
const BYTES: usize = 4 << 20;

impl Three {
    /// None where this machine has no UCX.
    fn open(required: bool) -> Option<Self> {
        let (clock, hand) = Clock::driven();
        let mut reader = open(READER, clock)?;
        reader.remote.as_mut().unwrap().required = required;
        let mut owners = [open(OWNER, Clock::system())?, open(SECOND, Clock::system())?];
        let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
        for (id, it) in [OWNER, SECOND].into_iter().zip(&mut owners) {
            let mut rows = pool.take(BYTES);
            rows.bytes_mut().fill(5);
            it.publish(KEY, Arc::new(rows));
            reader.connect(id, &it.address());
        }
        let mut three = Self { reader, owners, hand, events: Vec::new() };
        three.until(2, |it| [OWNER, SECOND].map(|id| it.reader.path(id)) == [Path::Ucx; 2]);
        Some(three)
    }

    /// Polls the reader and the last `owners` owners.
    fn until(&mut self, owners: usize, is_there: impl Fn(&Self) -> bool) {
        for _ in 0..20_000 {
            if is_there(self) {
                return;
            }
            self.owners.iter_mut().rev().take(owners).for_each(poll);
            self.reader.poll(Duration::from_millis(1), &mut self.events);
        }
        panic!("it never came to it: {:?}", self.events);
    }

    fn pull(&mut self, peer: PeerId, key: RegionKey, bytes: usize) -> (PullId, LandingId) {
        let landing = self.reader.land(Buffer::zeroed(bytes));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: bytes as u64 }];
        let patience = Duration::from_mins(1);
        (self.reader.pull(PullRequest { peer, key, pieces, landing, patience }), landing)
    }

    fn end_of(&self, wanted: PullId) -> Option<Result<u64, PullError>> {
        let end = |it: &Event| {
            if let Event::Pulled { pull, result } = it
                && *pull == wanted
            {
                return Some(result.clone());
            }
            None
        };
        let ends: Vec<_> = self.events.iter().filter_map(end).collect();
        assert!(ends.len() <= 1, "a pull ends once");
        ends.into_iter().next()
    }

    /// A pull from the first owner, which stands still in the middle of it with a full queue: then a close has to wait for it.
    fn stuck(&mut self) -> (PullId, LandingId) {
        let wanted = self.pull(OWNER, KEY, BYTES);
        self.until(2, |it| {
            let gets = &it.reader.remote.as_ref().unwrap().gets;
            gets.values().any(|it| matches!(it, For::Rows(..)))
        });
        for region in 0..100 {
            self.pull(OWNER, RegionKey([6, region, 0, 0]), 8);
        }
        self.reader.poll(Duration::from_millis(1), &mut self.events);
        wanted
    }

    fn leave(&mut self, late: &[PullId]) {
        let late = late.iter().copied().collect();
        self.reader.leave(OWNER, "a test", false, &Onward::Link(late));
        assert_eq!(self.reader.remote.as_ref().unwrap().left.len(), 1, "it lingers");
    }

    fn is_whole(&mut self, (pull, landing): (PullId, LandingId)) {
        assert_eq!(self.end_of(pull), Some(Ok(BYTES as u64)));
        assert!(self.reader.take(landing).unwrap().bytes().iter().all(|it| *it == 5));
    }
}

#[test]
fn a_close_that_takes_long_costs_its_own_way_alone_and_its_pull_goes_on_by_tcp() {
    let Some(mut three) = Three::open(false) else { return };
    let stuck = three.stuck();
    three.leave(&[]);
    assert_eq!([OWNER, SECOND].map(|it| three.reader.path(it)), [Path::Tcp, Path::Ucx]);
    let other = three.pull(SECOND, KEY, BYTES);
    three.until(1, |it| it.end_of(other.0).is_some());
    three.is_whole(other);
    let traffic = three.reader.traffic();
    assert_eq!((traffic.ucx_bytes, traffic.tcp_bytes), (BYTES as u64, 0));
    assert_eq!(three.end_of(stuck.0), None, "its landing may still be written");
    assert!(matches!(three.reader.take(stuck.1), Err(Error::Busy { outstanding: 1, .. })));
    // The owner goes on.
    three.until(2, |it| it.end_of(stuck.0).is_some());
    three.is_whole(stuck);
    let traffic = three.reader.traffic();
    assert_eq!((traffic.ucx_bytes, traffic.tcp_bytes), (BYTES as u64, BYTES as u64));
    assert_eq!(three.reader.remote.as_ref().unwrap().net.ends(), 1, "nothing is left of it");
}

#[test]
fn a_pull_that_ends_while_its_close_takes_long_keeps_its_landing_until_nothing_is_written() {
    // One that is late, and one whose link is closed here.
    for error in [PullError::Deadline, PullError::Cancelled] {
        let Some(mut three) = Three::open(true) else { return };
        let (pull, landing) = three.stuck();
        if error == PullError::Deadline {
            three.leave(&[pull]);
        } else {
            three.reader.close(OWNER);
        }
        three.until(1, |it| it.end_of(pull).is_some());
        assert_eq!(three.end_of(pull), Some(Err(error)));
        assert!(three.reader.is_busy(landing));
        assert!(matches!(three.reader.take(landing), Err(Error::Busy { outstanding: 1, .. })));
        let other = three.pull(SECOND, KEY, BYTES);
        three.until(1, |it| it.end_of(other.0).is_some());
        three.is_whole(other);
        assert!(three.reader.is_busy(landing));
        three.until(2, |it| !it.reader.is_busy(landing));
        let mut ours = three.reader.take(landing).unwrap();
        ours.bytes_mut().fill(9);
        three.until(2, |it| it.reader.remote.as_ref().unwrap().net.ends() < 3);
        assert!(ours.bytes().iter().all(|it| *it == 9), "ours is ours");
    }
}

#[test]
fn a_close_that_never_ends_takes_all_ways_along_which_are_opened_anew_and_their_pulls_wait() {
    let Some(mut three) = Three::open(true) else { return };
    let (pull, landing) = three.stuck();
    // A look at the other one's board is under way.
    let waits = three.pull(SECOND, KEY, BYTES);
    three.reader.poll(Duration::ZERO, &mut three.events);
    three.leave(&[pull]);
    assert_eq!(three.reader.remote.as_ref().unwrap().net.ends(), 2);
    three.hand.advance(Duration::from_secs(5));
    three.until(0, |it| !it.reader.is_busy(landing));
    assert!(three.reader.take(landing).is_ok());
    assert_eq!(three.end_of(waits.0), None);
    three.until(2, |it| it.end_of(waits.0).is_some());
    three.is_whole(waits);
    // The first one may have been given up meanwhile.
    let ends = |it: &&Event| matches!(it, Event::Connected(peer) | Event::Closed { peer, .. } if *peer == SECOND);
    assert_eq!(three.events.iter().filter(ends).count(), 1, "connected once, and not closed");
    assert_eq!((three.reader.path(SECOND), three.reader.traffic().tcp_bytes), (Path::Ucx, 0));
}
