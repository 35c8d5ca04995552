//! A phase of many small bundles.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::{
    BundleShape, Filler, ParcelShape, PullFailure, Round, ServerId, Shape, Slot, Work, WorkShape,
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

/// A document over many trainers: a parcel of each, and works that read two of them and have results for both.
#[test]
fn no_event_looks_at_parts_of_a_bundle_that_it_does_not_touch() {
    const PARTS: u32 = 300;
    let parts = |it| [it, (it + 1) % PARTS];
    let parcel = |it| ParcelShape { bundle: Bundle(0), from: TrainerId(it as u16), bytes: 8 };
    let work = |it| WorkShape {
        bundle: Bundle(0),
        needs: parts(it).map(Parcel).to_vec(),
        results: parts(it).map(|it| (TrainerId(it as u16), 8)).to_vec(),
    };
    let (works, parcels) = ((0..PARTS).map(work).collect(), (0..PARTS).map(parcel).collect());
    let shape = Shape::new(vec![BundleShape { slot: Slot(1) }], works, parcels).unwrap();
    let first = table(0, SERVERS.map(|it| Some(Filler::Server(it))), 1, 1);
    let shapes = vec![Arc::new(shape)];
    let step = Step::new(PARTS as u16, 7, shapes, vec![0, 0], first).unwrap();
    let settings = Settings::default();
    let mut server = Server::new(Host::Dedicated(SERVERS[1]), u64::MAX, settings, Nanos(0));
    let mut events = std::collections::VecDeque::from([Event::Begin(Arc::new(step))]);
    let ring = |it: u32, at, acks| {
        let message = Message::Doorbell { at, round: Round(0), acks, digest: 7 };
        Event::Message { from: Peer::Trainer(TrainerId(it as u16)), message }
    };
    events.extend((0..PARTS).map(|it| ring(it, AT, Acks::default())));
    events.extend([Event::Tick, Event::Tick]);
    let (mut counts, mut looked, freed) = (Vec::new(), 0, std::cell::Cell::new(0));
    let mut handle = |server: &mut Server, event: Event| {
        let name: String = format!("{event:?}").chars().take(120).collect();
        let mut commands = Vec::new();
        listed::looks();
        server.handle(Nanos(0), event, &mut commands);
        let looks = listed::looks();
        looked += looks;
        counts.push((looks, name));
        let frees = |it: &&Command| matches!(it, Command::FreeResult { .. });
        freed.set(freed.get() + commands.iter().filter(frees).count());
        commands
    };
    let mut work_left = PARTS;
    while let Some(event) = events.pop_front() {
        for command in handle(&mut server, event) {
            match command {
                Command::Pull { pull, .. } => {
                    events.push_back(Event::Pulled { pull, result: Ok(0) });
                }
                Command::Ready { at, work } => {
                    events.push_back(Event::Ran { at, works: vec![work] });
                    work_left -= 1;
                }
                Command::Ahead { at, works } => {
                    work_left -= works.len() as u32;
                    events.extend(works.into_iter().map(|it| Event::Ran { at, works: vec![it] }));
                }
                _ => {}
            }
        }
    }
    assert_eq!((work_left, freed.get()), (0, 0), "all ran, nobody has a result");
    // A link breaks, some results are acknowledged one by one, the others with the doorbells of the next phase.
    handle(&mut server, Event::Closed(Peer::Trainer(TrainerId(7))));
    for it in 0..PARTS / 2 {
        let acks = Acks { through: None, works: vec![(AT, Work(it))] };
        for reader in parts(it) {
            let from = Peer::Trainer(TrainerId(reader as u16));
            let message = Message::Ack { acks: acks.clone() };
            handle(&mut server, Event::Message { from, message });
        }
    }
    for it in 0..PARTS {
        let acks = Acks { through: Some(AT), works: Vec::new() };
        handle(&mut server, ring(it, At::new(0, 1), acks));
    }
    assert_eq!(freed.get(), PARTS as usize, "everybody has all results");
    assert!(server.active.keys().all(|it| it.0 > AT), "nothing of the phase is left");
    // Once, when it gets room, all of a bundle is looked at, and once more when all of it is ready.
    counts.sort();
    let (rest, most) = counts.split_at(counts.len() - 4);
    let last = rest.last().unwrap();
    assert!(last.0 <= 16, "{last:?}, after {most:?}");
    assert!(looked <= 30 * PARTS as usize, "{looked} looks for {PARTS} parcels and works");
}

/// Bundles of which the first of two parcels lands, one after the other, while so many bytes of the reserve are free. How many bundles
/// and parts each of these events looks at; then the reserve is free, and what is done ahead.
fn landed_beside_a_reserve_with(free: u64, bundles: u32) -> (usize, u32) {
    let parcel = |it: u32| {
        let from = TrainerId((it % 2) as u16);
        ParcelShape { bundle: Bundle(it / 2), from, bytes: 8 }
    };
    let work = |it: u32| WorkShape {
        bundle: Bundle(it / 2),
        needs: if it.is_multiple_of(2) {
            vec![Parcel(it)]
        } else {
            vec![Parcel(it - 1), Parcel(it)]
        },
        results: vec![(TrainerId(0), 8)],
    };
    let all = vec![BundleShape { slot: Slot(1) }; bundles as usize];
    let parts = 0..2 * bundles;
    let (works, parcels) = (parts.clone().map(work).collect(), parts.map(parcel).collect());
    let shape = Shape::new(all, works, parcels).unwrap();
    let first = table(0, SERVERS.map(|it| Some(Filler::Server(it))), bundles, 1);
    let step = Step::new(2, 7, vec![Arc::new(shape)], vec![0], first).unwrap();
    let host = Host::Dedicated(SERVERS[1]);
    let mut server = Server::new(host, u64::MAX, Settings::default(), Nanos(0));
    // Ahead of others a bundle in the reserve took this room; it is of no other concern here.
    let mut commands = Vec::new();
    server.handle(Nanos(0), Event::Begin(Arc::new(step)), &mut commands);
    let taken = 32 - free;
    server.rooms.lend(AT, taken).unwrap();
    let message = Message::Doorbell { at: AT, round: Round(0), acks: Acks::default(), digest: 7 };
    let from = Peer::Trainer(TrainerId(0));
    server.handle(Nanos(0), Event::Message { from, message }, &mut commands);
    for _ in 0..=2 * bundles as usize / SLICE {
        server.handle(Nanos(0), Event::Tick, &mut commands);
    }
    let pulls = commands.iter().filter_map(|it| match it {
        Command::Pull { pull, .. } => Some(*pull),
        _ => None,
    });
    let pulls: Vec<_> = pulls.collect();
    assert_eq!(pulls.len(), bundles as usize);
    let mut most = 0;
    for pull in pulls {
        listed::looks();
        let mut commands = Vec::new();
        server.handle(Nanos(0), Event::Pulled { pull, result: Ok(0) }, &mut commands);
        most = most.max(listed::looks());
        assert!(!commands.iter().any(|it| matches!(it, Command::Ahead { .. })), "no room");
    }
    server.rooms.free(AT, room::Room::Reserve, taken);
    let mut ran = 0;
    let mut events = vec![Event::Tick];
    for _ in 0..3 * bundles {
        let mut commands = Vec::new();
        let event = events.pop().unwrap_or(Event::Tick);
        server.handle(Nanos(0), event, &mut commands);
        for command in commands {
            if let Command::Ahead { at, works } = command {
                ran += works.len() as u32;
                events.push(Event::Ran { at, works });
            }
        }
    }
    (most, ran)
}

#[test]
fn no_event_looks_at_all_bundles_whose_works_could_run_ahead_with_more_room() {
    for bundles in [500, 1_000] {
        // Nothing, and less than the rows of any.
        for free in [0, 15] {
            let (most, ran) = landed_beside_a_reserve_with(free, bundles);
            assert!(most <= 80, "{most} looks with {free} of {bundles}");
            assert_eq!(ran, bundles, "all run when there is room");
        }
    }
}

#[test]
fn a_server_that_gets_on_with_a_phase_is_not_late_with_it() {
    let mut server = server(3, 1, u64::MAX);
    let seconds = |it: u64| Nanos::from_millis(1_000 * it);
    let message = Message::Doorbell { at: AT, round: Round(0), acks: Acks::default(), digest: 7 };
    let mut commands = Vec::new();
    let from = Peer::Trainer(TrainerId(0));
    server.handle(Nanos(0), Event::Message { from, message }, &mut commands);
    for command in commands {
        if let Command::Pull { pull, .. } = command {
            handle(&mut server, Event::Pulled { pull, result: Ok(0) });
        }
    }
    // For how long it owes the phase, as its heartbeat says.
    let owes = |server: &mut Server, now: u64| {
        let mut commands = Vec::new();
        server.handle(seconds(now), Event::Tick, &mut commands);
        let beat = commands.into_iter().find_map(|it| match it {
            Command::Send { message: Message::Heartbeat(beat), .. } => Some(beat),
            _ => None,
        });
        beat.expect("it is time").owes.map(|it| it.1.millis() / 1_000)
    };
    assert_eq!([1, 25].map(|it| owes(&mut server, it)), [Some(0), Some(24)]);
    handle(&mut server, Event::Ran { at: AT, works: vec![Work(0)] });
    assert_eq!([26, 50].map(|it| owes(&mut server, it)), [Some(0), Some(24)]);
    handle(&mut server, Event::Ran { at: AT, works: vec![Work(1), Work(2)] });
    assert_eq!(owes(&mut server, 51), None);
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
