//! What is seen of ways by UCX from inside alone: rests, memory that is not shown, ends that are not watched.
//!
//! Over shared memory of UCX; without UCX they say that they were skipped.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use super::card::LONGEST_KEY;
use super::way::{Onward, Stage};
use crate::buffer::Buffer;
use crate::clock::Clock;
use crate::paths::{Path, Paths, PathsConfig, Sharing};
use crate::peer::{PeerId, Piece, RegionKey, Role};
use crate::pool::Pool;
use crate::provider::{Event, Provider as _, PullRequest};
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
        (remote.net.memories()[0], remote.resting.map(|it| it.1.as_secs()))
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

#[test]
fn a_way_that_is_closed_with_another_one_is_opened_anew_and_its_pulls_wait_for_it() {
    let [Some(mut owner), Some(mut second), Some(mut reader)] =
        [OWNER, SECOND, READER].map(|it| open(it, Clock::system()))
    else {
        return;
    };
    reader.remote.as_mut().unwrap().required = true;
    let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
    let key = RegionKey([5; 4]);
    let mut events = Vec::new();
    for (id, it) in [(OWNER, &mut owner), (SECOND, &mut second)] {
        it.publish(key, Arc::new(pool.take(64)));
        reader.connect(id, &it.address());
    }
    for _ in 0..20_000 {
        poll(&mut owner);
        poll(&mut second);
        reader.poll(Duration::from_millis(1), &mut events);
        if [OWNER, SECOND].map(|it| reader.path(it)) == [Path::Ucx; 2] {
            break;
        }
    }
    // Looks at both are under way, and the close of one takes too long.
    let [_, waits] = [OWNER, SECOND].map(|peer| {
        let landing = reader.land(Buffer::zeroed(64));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: 64 }];
        let patience = Duration::from_mins(1);
        reader.pull(PullRequest { peer, key, pieces, landing, patience })
    });
    poll(&mut reader);
    reader.remote.as_mut().unwrap().net.closing = Duration::ZERO;
    let reading = &reader.remote.as_ref().unwrap().reading;
    let late: BTreeSet<_> = reading.keys().take(1).copied().collect();
    reader.leave(OWNER, "a test", false, &Onward::Link(late));
    assert_eq!(reader.remote.as_ref().unwrap().net.ends(), 0, "the end of the other went with it");
    let ended = |events: &[Event]| {
        events.iter().any(|it| matches!(it, Event::Pulled { pull, .. } if *pull == waits))
    };
    for _ in 0..20_000 {
        if ended(&events) {
            break;
        }
        poll(&mut owner);
        poll(&mut second);
        reader.poll(Duration::from_millis(1), &mut events);
    }
    assert!(events.contains(&Event::Pulled { pull: waits, result: Ok(64) }), "{events:?}");
    let ends = |it: &&Event| matches!(it, Event::Connected(_) | Event::Closed { .. });
    assert_eq!(events.iter().filter(ends).count(), 2, "both connected once: {events:?}");
    assert_eq!((reader.path(SECOND), reader.traffic().ucx_bytes), (Path::Ucx, 64));
}
