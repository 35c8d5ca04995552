//! A phase of many small bundles.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::{
    BundleShape, Filler, ParcelShape, PullFailure, Round, ServerId, Shape, Slot, WorkShape,
};

const SERVERS: [ServerId; 2] =
    [ServerId { index: 0, incarnation: 0 }, ServerId { index: 1, incarnation: 0 }];
const AT: At = At::new(0, 0);
/// Of a bundle: its rows and its result.
const BYTES: u64 = 2 * 8;

/// Server 1 of a step of one phase and one trainer, with so many bundles in slot `slot`.
fn server(bundles: u32, slot: u16, memory: u64) -> Server {
    let parcel = |it| ParcelShape { bundle: Bundle(it), from: TrainerId(0), bytes: BYTES / 2 };
    let work = |it| WorkShape {
        bundle: Bundle(it),
        needs: vec![Parcel(it)],
        results: vec![(TrainerId(0), BYTES / 2)],
    };
    let all = vec![BundleShape { slot: Slot(slot) }; bundles as usize];
    let parcels = (0..bundles).map(parcel).collect();
    let shape = Shape::new(all, (0..bundles).map(work).collect(), parcels).unwrap();
    let first = table(0, SERVERS.map(|it| Some(Filler::Server(it))), bundles, slot);
    let step = Step::new(1, 7, vec![Arc::new(shape)], vec![0], first).unwrap();
    let host = Host::Dedicated(SERVERS[1]);
    let mut server = Server::new(host, memory, Settings::default(), Nanos(0));
    handle(&mut server, Event::Begin(Arc::new(step)));
    server
}

fn table(round: u32, fillers: [Option<Filler>; 2], bundles: u32, slot: u16) -> RoundTable {
    let assignments = vec![vec![Some(Slot(slot)); bundles as usize]];
    RoundTable { step: 0, round: Round(round), fillers: fillers.to_vec(), assignments }
}

/// The pulls that an event begins.
fn handle(server: &mut Server, event: Event) -> Vec<Parcel> {
    let mut commands = Vec::new();
    server.handle(Nanos(0), event, &mut commands);
    let pulled = |it| match it {
        Command::Pull { parcel, .. } => Some(parcel),
        _ => None,
    };
    commands.into_iter().filter_map(pulled).collect()
}

fn ring(server: &mut Server) -> Vec<Parcel> {
    let message = Message::Doorbell { at: AT, round: Round(0), acks: Acks::default(), digest: 7 };
    handle(server, Event::Message { from: Peer::Trainer(TrainerId(0)), message })
}

#[test]
fn pulls_begin_slice_by_slice_however_many_events_come() {
    let bundles = 3 * SLICE as u32 - 1;
    let mut server = server(bundles, 1, u64::MAX);
    assert!(server.rooms.is_admitting(), "bundles become active slice by slice");
    while server.rooms.is_admitting() {
        handle(&mut server, Event::Tick);
    }
    let mut all = BTreeSet::new();
    let mut begun = ring(&mut server);
    for left in [2, 1, 0] {
        // The trainer says the same again and again.
        (0..10).for_each(|_| begun.extend(ring(&mut server)));
        assert!(begun.len() <= SLICE);
        all.extend(begun);
        assert_eq!(server.next_deadline() == Some(Nanos(0)), left > 0, "{left} slices are left");
        begun = handle(&mut server, Event::Tick);
    }
    assert_eq!((begun.len(), all.len()), (0, bundles as usize), "each is pulled once");
}

#[test]
fn small_bundles_that_move_have_room_beside_each_other() {
    let memory = 80 * BYTES;
    let mut server = server(100, 0, memory);
    let fillers = [None, Some(Filler::Server(SERVERS[1]))];
    handle(&mut server, Event::Round(Arc::new(table(1, fillers, 100, 1))));
    // One after the other, each would wait until the one before it is acknowledged.
    assert_eq!(ring(&mut server).len(), 10, "an eighth of the memory");
    assert!(server.budget() <= memory);
}

#[test]
fn bundles_that_move_become_active_slice_by_slice() {
    let bundles = 3 * SLICE as u32;
    let mut server = server(bundles, 0, u64::MAX);
    let fillers = [None, Some(Filler::Server(SERVERS[1]))];
    handle(&mut server, Event::Round(Arc::new(table(1, fillers, bundles, 1))));
    let mut all = BTreeSet::new();
    let mut begun = ring(&mut server);
    for left in [2, 1, 0] {
        assert_eq!(begun.len(), SLICE);
        // Each was looked at once, not those before it again.
        let last = *begun.last().unwrap();
        assert_eq!(server.rooms.first, (AT, Bundle(last.0)));
        all.extend(begun);
        assert_eq!(server.active.len(), all.len());
        assert_eq!(server.next_deadline(), Some(Nanos(0)), "{left} slices are left, or a look");
        begun = handle(&mut server, Event::Tick);
    }
    assert_eq!((begun.len(), all.len()), (0, bundles as usize), "each is pulled once");
    assert_ne!(server.next_deadline(), Some(Nanos(0)), "nothing is left");
}

#[test]
fn a_server_in_place_says_whose_rows_it_cannot_pull_as_long_as_that_lasts() {
    let parcel = ParcelShape { bundle: Bundle(0), from: TrainerId(0), bytes: BYTES / 2 };
    let results = vec![(TrainerId(0), BYTES / 2)];
    let work = WorkShape { bundle: Bundle(0), needs: vec![Parcel(0)], results };
    let shape = Shape::new(vec![BundleShape { slot: Slot(1) }], vec![work], vec![parcel]).unwrap();
    let first = table(0, [0, 1].map(|it| Some(Filler::InPlace(TrainerId(it)))), 1, 1);
    let step = Step::new(2, 7, vec![Arc::new(shape)], vec![0], first).unwrap();
    let host = Host::InPlace(TrainerId(1));
    let mut server = Server::new(host, u64::MAX, Settings::default(), Nanos(0));
    handle(&mut server, Event::Begin(Arc::new(step)));
    let message = Message::Doorbell { at: AT, round: Round(0), acks: Acks::default(), digest: 7 };
    let mut events = vec![Event::Message { from: Peer::Trainer(TrainerId(0)), message }];
    let mut said = Vec::new();
    for millis in (0..2_000).step_by(100) {
        let mut commands = Vec::new();
        for event in events.drain(..).chain([Event::Tick]) {
            server.handle(Nanos::from_millis(millis), event, &mut commands);
        }
        // In the second second the path is good again.
        let result = if millis < 1_000 { Err(PullFailure::PeerFailed) } else { Ok(0) };
        for command in commands {
            match command {
                Command::Pull { pull, .. } => events.push(Event::Pulled { pull, result }),
                Command::Send { to: Peer::CONDUCTOR, message: Message::Unreached { trainers } } => {
                    said.push((millis, trainers));
                }
                _ => {}
            }
        }
    }
    let is_it = |it: &(u64, Vec<(TrainerId, Nanos)>)| it.1.len() == 1 && it.1[0].0 == TrainerId(0);
    assert!(said.iter().all(is_it) && said.is_sorted_by_key(|it| it.1[0].1), "{said:?}");
    assert!(said.len() >= 4 && said.iter().all(|it| it.0 <= 1_200), "{said:?}");
}
