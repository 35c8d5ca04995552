//! Pulls over real sockets: the right bytes land, or the pull says why not.

mod common;

use std::cell::RefCell;
use std::time::Duration;

use cadre_exchange::{Buffer, Error, Limits, PeerId, Provider, PullError, RegionKey, TcpConfig};
use common::{KEY, Node, SERVER, TRAINER, config, connect, pair, until};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Pieces as (remote, gap before it in the landing, bytes), and the order in which they are pulled.
fn pieces() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    let piece = (0_u64..60_000, 0_u64..3, prop_oneof![0_u64..9, 100_u64..5_000]);
    let piece = piece.prop_map(|(remote, gap, bytes)| (remote, u64::from(gap == 0) * 7, bytes));
    prop::collection::vec(piece, 0..40)
}

#[test]
fn any_pieces_of_two_peers_land_where_they_belong() {
    let (mut server, mut trainer) = pair();
    let mut other = Node::new(PeerId::trainer(1, 0));
    connect(&mut server, &mut other);
    let regions = [trainer.publish(KEY, 65_000, 1), other.publish(KEY, 65_000, 2)];
    let nodes = RefCell::new((server, trainer, other));
    let lists = (pieces().prop_shuffle(), pieces(), any::<bool>());
    let check = |(one, two, reversed): (Vec<_>, Vec<_>, bool)| {
        let (server, trainer, other) = &mut *nodes.borrow_mut();
        let mut room = 0;
        let mut lay = |list: &[(u64, u64, u64)]| -> Vec<(u64, u64, u64)> {
            let place = |&(remote, gap, bytes): &(u64, u64, u64)| {
                let local = room + gap;
                room = local + bytes;
                (remote, local, bytes)
            };
            list.iter().map(place).collect()
        };
        let mut lists = [lay(&one), lay(&two)];
        if reversed {
            for list in &mut lists {
                list.reverse();
            }
        }
        let landing = server.tcp.land(Buffer::zeroed(room as usize));
        let pulls = [
            server.pull(trainer.id, KEY, &lists[0], landing),
            server.pull(other.id, KEY, &lists[1], landing),
        ];
        until(&mut [server, trainer, other], |nodes| {
            pulls.iter().all(|&it| nodes[0].result(it).is_some())
        });
        let landed = server.tcp.take(landing).expect("both pulls ended");
        let mut expected = vec![0; room as usize];
        for ((pull, list), region) in pulls.iter().zip(&lists).zip(&regions) {
            let total = list.iter().map(|it| it.2).sum();
            prop_assert_eq!(server.result(*pull), Some(Ok(total)));
            for &(remote, local, bytes) in list {
                let from = &region.bytes()[remote as usize..(remote + bytes) as usize];
                expected[local as usize..(local + bytes) as usize].copy_from_slice(from);
            }
        }
        prop_assert!(landed.bytes() == expected, "the bytes differ");
        server.events.clear();
        Ok(())
    };
    let mut runner =
        TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    runner.run(&lists, check).expect("every list of pieces lands");
}

#[test]
fn pulls_beyond_every_window_and_buffer_land() {
    let limits = Limits { window_bytes: 1 << 20, peer_window_bytes: 1 << 19, ..Limits::default() };
    let mut server = Node::with(TcpConfig { limits, ..config(SERVER) });
    let mut trainer = Node::new(TRAINER);
    connect(&mut server, &mut trainer);
    let region = trainer.publish(KEY, 24 << 20, 3);
    let landing = server.tcp.land(Buffer::zeroed(24 << 20));
    // One of 8 MiB, and 256 of 64 KiB behind it: more than a window, and more than a link may have outstanding.
    let mut pulls = vec![server.pull(TRAINER, KEY, &[(0, 0, 8 << 20)], landing)];
    pulls.extend((128..384).map(|it: u64| {
        let at = it << 16;
        server.pull(TRAINER, KEY, &[(at, at, 1 << 16)], landing)
    }));
    let last = pulls[256];
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(last).is_some());
    assert!(pulls.iter().all(|&it| matches!(server.result(it), Some(Ok(_)))));
    assert!(server.tcp.take(landing).expect("all ended") == *region, "the bytes differ");
}

#[test]
fn rows_of_some_heads_land_densely() {
    let (mut server, mut trainer) = pair();
    let region = trainer.publish(KEY, 4096 * 1024, 4);
    // The second quarter of every row of 1 KiB: more pieces than one system call takes.
    let pieces: Vec<_> = (0..4096).map(|row| (row * 1024 + 256, row * 256, 256)).collect();
    let landing = server.tcp.land(Buffer::zeroed(4096 * 256));
    let pull = server.pull(TRAINER, KEY, &pieces, landing);
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(pull).is_some());
    let landed = server.tcp.take(landing).expect("it ended");
    for (row, expected) in landed.bytes().chunks(256).zip(region.bytes().chunks(1024)) {
        assert_eq!(row, &expected[256..512]);
    }
}

#[test]
fn withdrawn_and_unknown_regions_are_gone() {
    let (mut server, mut trainer) = pair();
    let memory = trainer.publish(KEY, 100, 5);
    assert!(trainer.tcp.withdraw(KEY).is_some_and(|it| *it == *memory));
    assert!(trainer.tcp.withdraw(KEY).is_none());
    let landing = server.tcp.land(Buffer::zeroed(100));
    let pulls = [
        server.pull(TRAINER, KEY, &[(0, 0, 10)], landing),
        server.pull(TRAINER, RegionKey([9; 4]), &[(0, 10, 10)], landing),
    ];
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(pulls[1]).is_some());
    assert_eq!(
        pulls.map(|it| server.result(it)),
        [Some(Err(PullError::Gone)), Some(Err(PullError::Gone))]
    );
    assert!(server.tcp.take(landing).is_ok());
}

#[test]
fn pulls_out_of_bounds_are_refused_on_both_sides() {
    let (mut server, mut trainer) = pair();
    let region = trainer.publish(KEY, 100, 7);
    let landing = server.tcp.land(Buffer::zeroed(50));
    let all = [
        (0, 41, 10),
        (0, u64::MAX, 2),
        (0, 0, u64::MAX),
        (91, 0, 10),
        (u64::MAX, 20, 10),
        (100, 30, 1),
    ];
    let pulls = all.map(|piece| server.pull(TRAINER, KEY, &[piece], landing));
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(pulls[5]).is_some());
    for (pull, piece) in pulls.iter().zip(all) {
        let result = server.result(*pull);
        assert!(matches!(result, Some(Err(PullError::Refused { .. }))), "{piece:?}: {result:?}");
    }
    // Nothing has moved, and the link is as good as before.
    let pull = server.pull(TRAINER, KEY, &[(0, 0, 50)], landing);
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(server.tcp.take(landing).expect("all ended").bytes(), &region.bytes()[..50]);
}

#[test]
fn bytes_of_a_landing_are_the_target_of_one_pull() {
    let (mut server, mut trainer) = pair();
    trainer.publish(KEY, 100, 8);
    let landing = server.tcp.land(Buffer::zeroed(100));
    let first = server.pull(TRAINER, KEY, &[(0, 0, 60)], landing);
    let second = server.pull(TRAINER, KEY, &[(0, 50, 20)], landing);
    assert!(matches!(server.tcp.take(landing), Err(Error::Busy { outstanding: 1, .. })));
    until(&mut [&mut server, &mut trainer], |nodes| nodes[0].result(first).is_some());
    assert_eq!(server.result(first), Some(Ok(60)));
    assert!(matches!(server.result(second), Some(Err(PullError::Refused { .. }))));
    assert!(server.tcp.take(landing).is_ok());
    assert!(matches!(server.tcp.take(landing), Err(Error::UnknownLanding { .. })));
}

#[test]
fn a_pull_that_was_never_sent_frees_its_landing_at_its_deadline() {
    let (mut server, trainer) = pair();
    let stranger = PeerId::trainer(5, 0);
    // A listener whose owner never accepts: the link is never open.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    server.tcp.connect(stranger, &silent.local_addr().expect("bound").to_string());
    let landing = server.tcp.land(Buffer::zeroed(8));
    let pull = server.pull_until(stranger, KEY, &[(0, 0, 8)], landing, Duration::ZERO);
    let unknown = server.pull(PeerId::server(9, 0), KEY, &[], landing);
    until(&mut [&mut server], |nodes| nodes[0].result(pull).is_some());
    assert_eq!(server.result(pull), Some(Err(PullError::Deadline)));
    assert_eq!(server.result(unknown), Some(Err(PullError::PeerFailed)));
    assert!(server.tcp.take(landing).is_ok());
    drop(trainer);
}
