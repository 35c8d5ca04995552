//! Which path pulls take: UCX where both ends have it, else links, and what is said of it.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Event, LandingId, Path, PeerId, Provider as _, PullError, RegionKey, Sharing, Traffic,
    Transports,
};

use crate::common::{KEY, Node, connect, pattern, sharing, until};
use crate::pair::{BYTES, OWNER, READER, node, only_rows_in_arenas, published_anew_in_the_middle};

const CARD: RegionKey = RegionKey([u32::MAX, 0, 0x7563_7800, u32::MAX]);

/// An owner and a reader with a way between them; none where this machine has no UCX.
fn pair() -> Option<(Node, Node)> {
    if sharing() == Sharing::Off {
        return None;
    }
    let (mut owner, mut reader) = (node(OWNER, sharing()), node(READER, sharing()));
    connect(&mut reader, &mut owner);
    Some((owner, reader))
}

/// Polls until rows land.
fn until_some_landed(reader: &mut Node, owner: &mut Node, landing: LandingId) {
    let reads = |it: &Node| it.tcp.landed(landing).expect("it is there").bytes()[1000] != 0;
    until(&mut [reader, owner], |nodes| reads(nodes[0]));
}

fn by(ucx: usize, tcp: usize, sent_anew: u64) -> Traffic {
    Traffic { shared_bytes: 0, ucx_bytes: ucx as u64, tcp_bytes: tcp as u64, sent_anew }
}

#[test]
fn the_cases_of_tcp_hold_over_sockets_of_ucx_too() {
    if sharing() == Sharing::Off || std::env::var("CADRE_UCX_OVER").is_ok() {
        return;
    }
    // What closes a link by force in the middle of a read ends the owner there: docs/exchange.md.
    let cases = ["pulls::", "rows_in_arenas", "rows_of_two_stretches"];
    let run = Command::new(std::env::current_exe().expect("this program"))
        .args(cases)
        .env("CADRE_UCX_OVER", "tcp")
        .output()
        .expect("it is executable");
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}");
    assert!(said.contains("rows_of_some_heads_land_densely ... ok"), "{said}");
}

#[test]
fn rows_in_arenas_are_read_and_all_others_are_sent() {
    let Some((mut owner, mut reader)) = pair() else { return };
    assert_eq!(reader.tcp.path(OWNER), Path::Ucx);
    only_rows_in_arenas((&mut reader, &mut owner), [by(BYTES, 0, 0), by(BYTES, BYTES, 1)]);
}

#[test]
fn rows_of_two_stretches_are_one_region() {
    let Some((mut owner, mut reader)) = pair() else { return };
    // An arena of its own, of which a second stretch is shown.
    let bytes = (64 << 20) + 1000;
    // The pattern alone would be the same in both.
    let mut rows = pattern(bytes, 3);
    rows.bytes_mut()[64 << 20..].copy_from_slice(pattern(1000, 8).bytes());
    let region = Arc::new(rows);
    owner.tcp.publish(KEY, Arc::clone(&region));
    let around = (64 << 20) - 500_u64;
    let landing = reader.tcp.land(Buffer::zeroed(1500));
    let pull = reader.pull(OWNER, KEY, &[(around, 500, 1000), (around + 900, 0, 500)], landing);
    until(&mut [&mut reader, &mut owner], |nodes| nodes[0].result(pull).is_some());
    let landed = reader.tcp.take(landing).expect("it ended");
    let from = |at: u64, bytes: usize| &region.bytes()[at as usize..][..bytes];
    assert_eq!(landed.bytes()[500..], *from(around, 1000));
    assert_eq!(landed.bytes()[..500], *from(around + 900, 500));
    assert_eq!(reader.tcp.traffic(), by(1500, 0, 0));
}

#[test]
fn a_region_that_is_published_anew_while_it_is_read_comes_anew() {
    let Some((mut owner, mut reader)) = pair() else { return };
    let bytes = 40 << 20;
    published_anew_in_the_middle((&mut reader, &mut owner), bytes, |reader, owner, landing| {
        // More than a window.
        let pull = reader.pull(OWNER, KEY, &[(0, 0, bytes as u64)], landing);
        until_some_landed(reader, owner, landing);
        pull
    });
}

#[test]
fn a_peer_without_ucx_is_refused_by_name() {
    if sharing() == Sharing::Off {
        return;
    }
    let mut owner = node(OWNER, Sharing::Off);
    owner.publish(KEY, BYTES, 5);
    // One that offers nothing, and one whose card is none.
    for said in [
        "it offers no UCX; run where both reach each other by UCX, or without requiring it (--exchange auto)",
        "its card is none of this build; run where both reach each other by UCX, or without requiring it (--exchange auto)",
    ] {
        let mut strict = node(READER, sharing());
        strict.tcp.connect(OWNER, &owner.tcp.address());
        let landing = strict.tcp.land(Buffer::zeroed(BYTES));
        let pull = strict.pull(OWNER, KEY, &[(0, 0, 10)], landing);
        until(&mut [&mut strict, &mut owner], |nodes| nodes[0].closed(OWNER).is_some());
        assert_eq!(strict.closed(OWNER), Some(said));
        assert_eq!(strict.result(pull), Some(Err(PullError::PeerFailed)), "and its pulls before");
        assert!(!strict.is_connected(OWNER));
        // What it lacks it will lack the next time, too.
        assert_eq!(strict.unfit(OWNER), Some(said).filter(|it| it.starts_with("it offers no UCX")));
        owner.tcp.publish(CARD, Arc::new(Buffer::zeroed(8192)));
    }
}

#[test]
fn a_node_that_goes_in_the_middle_of_reads_leaves_the_other_whole() {
    let Some((mut owner, mut reader)) = pair() else { return };
    if sharing() == Sharing::Ucx(Transports::Sockets) {
        return;
    }
    let bytes = 40 << 20;
    let region = owner.publish(KEY, bytes, 6);
    let landing = reader.tcp.land(Buffer::zeroed(bytes));
    reader.pull(OWNER, KEY, &[(0, 0, bytes as u64)], landing);
    until_some_landed(&mut reader, &mut owner, landing);
    drop(reader);
    // The next one is served as if nothing had been, and so is one whose reader closed it.
    let mut reader = node(PeerId::server(1, 0), sharing());
    connect(&mut reader, &mut owner);
    for closes in [true, false] {
        let landing = reader.tcp.land(Buffer::zeroed(bytes));
        let pull = reader.pull(OWNER, KEY, &[(0, 0, bytes as u64)], landing);
        if closes {
            until_some_landed(&mut reader, &mut owner, landing);
            reader.tcp.close(OWNER);
            assert!(reader.tcp.take(landing).is_ok(), "its landing is free at once");
            reader.poll();
            assert_eq!(reader.result(pull), Some(Err(PullError::Cancelled)));
            reader.events.clear();
            connect(&mut reader, &mut owner);
            continue;
        }
        until(&mut [&mut reader, &mut owner], |nodes| nodes[0].result(pull).is_some());
        assert_eq!(reader.result(pull), Some(Ok(bytes as u64)));
        assert!(reader.tcp.take(landing).expect("it ended") == *region);
    }
}

#[test]
fn a_sleeping_owner_wakes_to_answer_and_a_sleeping_reader_to_be_told() {
    let Some((mut owner, mut reader)) = pair() else { return };
    let region = owner.publish(KEY, BYTES, 7);
    let waker = owner.tcp.waker();
    std::thread::scope(|scope| {
        let owner = scope.spawn(move || {
            // Only what comes by UCX can end its sleep before the reader has all.
            owner.tcp.poll(Duration::from_secs(20), &mut owner.events);
            owner
        });
        let landing = reader.tcp.land(Buffer::zeroed(BYTES));
        let whole = [(0, 0, BYTES as u64)];
        let pull = reader.pull_until(OWNER, KEY, &whole, landing, Duration::from_secs(10));
        while reader.result(pull).is_none() {
            reader.tcp.poll(Duration::from_secs(20), &mut reader.events);
        }
        assert_eq!(reader.result(pull), Some(Ok(BYTES as u64)));
        assert!(reader.tcp.take(landing).expect("it ended") == *region);
        waker.wake();
        drop(owner.join().expect("it polls"));
    });
}

#[test]
fn a_poll_ends_though_many_pulls_are_still_to_be_read() {
    let Some((mut owner, mut reader)) = pair() else { return };
    let (regions, bytes) = (5000, 64);
    for region in 0..regions {
        owner.publish(RegionKey([7, region, 0, 0]), bytes, region as usize);
    }
    let landing = reader.tcp.land(Buffer::zeroed(regions as usize * bytes));
    for region in 0..regions {
        let to = u64::from(region) * bytes as u64;
        reader.pull(OWNER, RegionKey([7, region, 0, 0]), &[(0, to, bytes as u64)], landing);
    }
    let (is_over, limit) = (AtomicBool::new(false), Instant::now() + Duration::from_mins(1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                owner.poll();
            }
        });
        let (mut ended, mut most) = (0, 0);
        while ended < regions as usize && Instant::now() < limit {
            let before = reader.events.len();
            reader.poll();
            let news = &reader.events[before..];
            let whole = |it: &&Event| matches!(it, Event::Pulled { result: Ok(64), .. });
            let now = news.iter().filter(whole).count();
            (ended, most) = (ended + now, most.max(now));
        }
        is_over.store(true, Ordering::Release);
        assert_eq!(ended, regions as usize);
        assert!(most <= 256, "{most} pulls ended in one poll");
    });
    let landed = reader.tcp.take(landing).expect("they ended");
    let right = |region: usize| {
        pattern(bytes, region).bytes() == &landed.bytes()[region * bytes..][..bytes]
    };
    assert!((0..regions as usize).all(right));
}
