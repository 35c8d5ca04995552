//! Processes that have shared memory and UCX: the better one is taken, and the other one costs nothing until it is needed.
//!
//! Over shared memory of UCX; without UCX they say that they were skipped.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::paths::remote::Remote;
use crate::paths::{Path, Paths, PathsConfig, Sharing, Traffic};
use crate::peer::{PeerId, Piece, RegionKey, Role};
use crate::pool::Pool;
use crate::provider::{Event, LandingId, Provider as _, PullRequest};
use crate::tcp::{Encryption, Limits, TcpConfig};
use crate::ucx::Transports;

const OWNER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };
const KEY: RegionKey = RegionKey([7; 4]);
const BYTES: usize = 64;

/// As one opens on a machine with network cards; none where this machine has no UCX.
fn open(me: PeerId) -> Option<Paths> {
    if let Err(why) = crate::ucx::ucx_here() {
        println!("skipped: {why}");
        return None;
    }
    let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
    let encryption = Encryption::Tcp;
    let tcp = TcpConfig { bind, me, secret: [3; 32], data_version: 1, encryption, limits };
    let mut paths = Paths::open(PathsConfig { tcp, sharing: Sharing::Auto }).unwrap();
    let remote = Remote::open(&mut paths.tcp, Transports::SharedMemory, false, limits);
    paths.remote = Some(remote.unwrap());
    Some(paths)
}

fn until(reader: &mut Paths, owner: &mut Paths, mut is_there: impl FnMut(&mut Paths) -> bool) {
    for _ in 0..20_000 {
        if is_there(reader) {
            return;
        }
        owner.poll(Duration::from_millis(1), &mut Vec::new());
    }
    panic!("it never came to it");
}

fn until_path(reader: &mut Paths, owner: &mut Paths, path: Path) {
    until(reader, owner, |it| {
        it.poll(Duration::from_millis(1), &mut Vec::new());
        it.path(OWNER) == path
    });
}

/// Until the owner's shared memory can be mapped.
fn until_shared(reader: &mut Paths, owner: &mut Paths) {
    until(reader, owner, |it| {
        it.poll(Duration::from_millis(1), &mut Vec::new());
        it.sharing.as_ref().unwrap().ways.path(OWNER) == Path::Shared
    });
}

/// Pulls the region: what that added to the reader's traffic.
fn fetch(reader: &mut Paths, owner: &mut Paths) -> Traffic {
    let landing = reader.land(Buffer::zeroed(BYTES));
    fetch_into(reader, owner, landing, 0)
}

fn fetch_into(reader: &mut Paths, owner: &mut Paths, landing: LandingId, at: usize) -> Traffic {
    let before = reader.traffic();
    let pieces = vec![Piece { remote: 0, local: at as u64, bytes: BYTES as u64 }];
    let patience = Duration::from_mins(1);
    let wanted = reader.pull(PullRequest { peer: OWNER, key: KEY, pieces, landing, patience });
    let mut events = Vec::new();
    until(reader, owner, |it| {
        it.poll(Duration::from_millis(1), &mut events);
        events.contains(&Event::Pulled { pull: wanted, result: Ok(BYTES as u64) })
    });
    let now = reader.traffic();
    Traffic {
        shared_bytes: now.shared_bytes - before.shared_bytes,
        ucx_bytes: now.ucx_bytes - before.ucx_bytes,
        tcp_bytes: now.tcp_bytes - before.tcp_bytes,
        sent_anew: now.sent_anew - before.sent_anew,
    }
}

fn lose_shared_memory(reader: &mut Paths) {
    let now = reader.tcp.now();
    let ways = &mut reader.sharing.as_mut().unwrap().ways;
    let answer = ways.shut(OWNER, "a test".to_owned(), false, now);
    reader.take_answer(answer);
}

#[test]
fn where_shared_memory_failed_that_is_why_rows_come_by_tcp() {
    let (Some(mut owner), Some(mut reader)) = (open(OWNER), open(READER)) else { return };
    reader.remote = None;
    reader.connect(OWNER, &owner.address());
    until_shared(&mut reader, &mut owner);
    let now = reader.tcp.now();
    let ways = &mut reader.sharing.as_mut().unwrap().ways;
    let answer = ways.shut(OWNER, "no descriptor is left".to_owned(), true, now);
    reader.take_answer(answer);
    assert_eq!(reader.path(OWNER), Path::Tcp);
    assert_eq!(reader.why_tcp(OWNER), Some("no descriptor is left"));
}

#[test]
fn rows_are_held_for_network_cards_only_when_a_peer_has_no_shared_memory() {
    let (Some(mut owner), Some(mut reader)) = (open(OWNER), open(READER)) else { return };
    let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
    owner.publish(KEY, Arc::new(pool.take(BYTES)));
    reader.connect(OWNER, &owner.address());
    until_shared(&mut reader, &mut owner);
    // The first one may find that the arena is not mapped yet.
    fetch(&mut reader, &mut owner);
    until(&mut reader, &mut owner, |it| {
        it.poll(Duration::from_millis(1), &mut Vec::new());
        it.sharing.as_mut().unwrap().ways.find(OWNER, KEY, 8).is_ok_and(|it| !it.is_coming())
    });
    let bytes = BYTES as u64;
    let shared = Traffic { shared_bytes: bytes, ..Traffic::default() };
    assert_eq!(fetch(&mut reader, &mut owner), shared);
    assert!(reader.remote.as_ref().unwrap().is_unused(), "no card was asked for");
    assert_eq!(owner.remote.as_ref().unwrap().memories(), [1, 0], "its board alone is registered");

    lose_shared_memory(&mut reader);
    until_path(&mut reader, &mut owner, Path::Ucx);
    assert_eq!(reader.why_tcp(OWNER), None);
    assert_eq!(owner.remote.as_ref().unwrap().memories(), [2, 0], "what was published before, too");
    let by_ucx = Traffic { ucx_bytes: bytes, ..Traffic::default() };
    assert_eq!(fetch(&mut reader, &mut owner), by_ucx);
    owner.publish(KEY, Arc::new(pool.take(BYTES)));
    assert_eq!(fetch(&mut reader, &mut owner), by_ucx, "and what is published after");
}

#[test]
fn a_pull_that_better_paths_have_missed_is_counted_once_and_one_that_ucx_brings_is_not() {
    let (Some(mut owner), Some(mut reader)) = (open(OWNER), open(READER)) else { return };
    let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
    owner.publish(KEY, Arc::new(pool.take(BYTES)));
    reader.connect(OWNER, &owner.address());
    until_shared(&mut reader, &mut owner);
    lose_shared_memory(&mut reader);
    until_path(&mut reader, &mut owner, Path::Ucx);
    let bytes = BYTES as u64;
    // Its shared memory is tried again.
    reader.sharing.as_mut().unwrap().ways.ask(OWNER, false);
    let by_ucx = Traffic { ucx_bytes: bytes, ..Traffic::default() };
    assert_eq!(fetch(&mut reader, &mut owner), by_ucx);
    reader.ask_card(OWNER);
    let anew = Traffic { tcp_bytes: bytes, sent_anew: 1, ..Traffic::default() };
    assert_eq!(fetch(&mut reader, &mut owner), anew, "both are being asked for");
    until(&mut reader, &mut owner, |it| {
        it.poll(Duration::from_millis(1), &mut Vec::new());
        it.remote.as_ref().unwrap().path(OWNER) == Some(Path::Ucx)
    });
    reader.lose_way(OWNER);
    reader.sharing.as_mut().unwrap().ways.forget(OWNER);
    assert_eq!((reader.path(OWNER), reader.why_tcp(OWNER)), (Path::Tcp, Some("a test")));
    assert_eq!(reader.failed_ways(), 2, "one of each kind");
    reader.close(OWNER);
    assert_eq!(reader.failed_ways(), 2, "a link that is closed is no failure");
}

#[test]
fn landings_in_arenas_are_registered_once_and_their_bytes_arrive_across_stretches() {
    let (Some(mut owner), Some(mut reader)) = (open(OWNER), open(READER)) else { return };
    let pool = Pool::shared_and_poisoned(200 << 20).unwrap();
    let mut rows = pool.take(BYTES);
    rows.bytes_mut().fill(5);
    owner.publish(KEY, Arc::new(rows));
    reader.connect(OWNER, &owner.address());
    until_shared(&mut reader, &mut owner);
    lose_shared_memory(&mut reader);
    until_path(&mut reader, &mut owner, Path::Ucx);
    let landings = Pool::shared_and_poisoned(200 << 20).unwrap();
    let held = |reader: &Paths| reader.remote.as_ref().unwrap().memories()[1];
    for expected in [1, 1] {
        let landing = reader.land(landings.take(BYTES));
        fetch_into(&mut reader, &mut owner, landing, 0);
        assert_eq!(held(&reader), expected);
        assert!(reader.take(landing).unwrap().bytes().iter().all(|it| *it == 5));
    }
    // It begins in the first stretch and ends in the second one, and the rows lie over the edge.
    let edge = 64 << 20;
    let landing = reader.land(landings.take(edge + BYTES));
    fetch_into(&mut reader, &mut owner, landing, edge - BYTES / 2);
    assert_eq!(held(&reader), 2);
    let landed = reader.take(landing).unwrap();
    assert!(landed.bytes()[edge - BYTES / 2..][..BYTES].iter().all(|it| *it == 5));
    assert!(landed.bytes()[edge + BYTES / 2..].iter().all(|it| *it == 255), "nothing beside it");
}

#[test]
fn a_landing_that_cannot_be_registered_is_filled_over_the_link_and_the_way_stays() {
    let (Some(mut owner), Some(mut reader)) = (open(OWNER), open(READER)) else { return };
    let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
    owner.publish(KEY, Arc::new(pool.take(BYTES)));
    reader.connect(OWNER, &owner.address());
    until_shared(&mut reader, &mut owner);
    lose_shared_memory(&mut reader);
    until_path(&mut reader, &mut owner, Path::Ucx);
    let landing = reader.land(pool.take(BYTES));
    reader.remote.as_mut().unwrap().rest_from(reader.tcp.now());
    let by_tcp = Traffic { tcp_bytes: BYTES as u64, sent_anew: 1, ..Traffic::default() };
    assert_eq!(fetch_into(&mut reader, &mut owner, landing, 0), by_tcp);
    assert_eq!(reader.path(OWNER), Path::Tcp, "what rows take is told");
    assert_eq!(reader.why_tcp(OWNER), Some("a test says so"));
    let own = Traffic { ucx_bytes: BYTES as u64, ..Traffic::default() };
    assert_eq!(fetch(&mut reader, &mut owner), own, "memory in no arena is left to UCX");
    assert_eq!((reader.path(OWNER), reader.why_tcp(OWNER)), (Path::Ucx, None), "and told");
    // The rest after the failure is not over.
    assert_eq!(fetch_into(&mut reader, &mut owner, landing, 0), by_tcp);
    assert_eq!(reader.path(OWNER), Path::Tcp);
}
