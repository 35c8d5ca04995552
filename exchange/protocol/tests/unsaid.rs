//! What a full queue has swallowed is said again as soon as there is room, and nobody is suspect for it; whom a trainer cannot reach
//! it says.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one command out of many")]

use std::sync::Arc;

use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    Acks, At, Bundle, BundleShape, Filler, Message, Nanos, Parcel, ParcelShape, Peer, PullFailure,
    Round, RoundTable, ServerId, Settings, Shape, Slot, Step, TrainerId, Why, Work, WorkShape,
};

const SERVER: ServerId = ServerId { index: 0, incarnation: 0 };
const TRAINER: TrainerId = TrainerId(1);

/// One bundle on one server, with a work of trainer 1's rows, and one of both trainers' rows, all of whose
/// results are for trainer 1.
fn step() -> Arc<Step> {
    step_of(Filler::Server(SERVER))
}

fn step_of(filler: Filler) -> Arc<Step> {
    let work = |needs| WorkShape { bundle: Bundle(0), needs, results: vec![(TRAINER, 10)] };
    let works = vec![work(vec![Parcel(0)]), work(vec![Parcel(0), Parcel(1)])];
    let parcel = |from| ParcelShape { bundle: Bundle(0), from, bytes: 100 };
    let parcels = vec![parcel(TRAINER), parcel(TrainerId(0))];
    let shape = Shape::new(vec![BundleShape { slot: Slot(0) }], works, parcels);
    let table = RoundTable {
        step: 0,
        round: Round(0),
        fillers: vec![Some(filler)],
        assignments: vec![vec![Some(Slot(0))]],
    };
    let shapes = vec![Arc::new(shape.expect("it is well made"))];
    Arc::new(Step::new(2, 5, shapes, vec![0; 4], table).expect("it is well made"))
}

fn ms(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

#[test]
fn a_doorbell_that_found_no_room_is_rung_as_soon_as_there_is() {
    let mut trainer = Trainer::new(TRAINER, Settings::default(), ms(0));
    let mut handle = |now, event| {
        let mut commands = Vec::new();
        trainer.handle(now, event, &mut commands);
        commands
    };
    let doorbell = |it: &trainer::Command| {
        matches!(
            it,
            trainer::Command::Send { to: Peer::Server(SERVER), message: Message::Doorbell { .. } }
        )
    };
    let suspects = |it: &trainer::Command| {
        matches!(it, trainer::Command::Send { message: Message::Suspect { .. }, .. })
    };
    handle(ms(1), trainer::Event::Begin(step()));
    let commands = handle(ms(1), trainer::Event::Submitted(At::new(0, 0)));
    assert_eq!(commands.iter().filter(|it| doorbell(it)).count(), 1);
    let commands = handle(ms(2), trainer::Event::Unsaid(Peer::Server(SERVER)));
    assert_eq!(commands.iter().filter(|it| doorbell(it)).count(), 1, "{commands:?}");
    assert!(!commands.iter().any(suspects), "{commands:?}");
    assert!(!handle(ms(3), trainer::Event::Tick).iter().any(doorbell), "once");
    // Whoever fills no slot is owed nothing.
    let other = Peer::Server(ServerId { index: 5, incarnation: 0 });
    assert!(handle(ms(4), trainer::Event::Unsaid(other)).is_empty());
}

#[test]
fn a_doorbell_that_vanished_is_rung_again_though_its_trainer_wants_nothing() {
    let settings = Settings::default();
    // Its rows are for results of trainer 1.
    let mut trainer = Trainer::new(TrainerId(0), settings, ms(0));
    let mut handle = |now, event| {
        let mut commands = Vec::new();
        trainer.handle(now, event, &mut commands);
        commands
    };
    let (server, at) = (Peer::Server(SERVER), At::new(0, 0));
    let rung = |it: &trainer::Command| matches!(it, trainer::Command::Send { to, message: Message::Doorbell { .. } } if *to == server);
    handle(ms(1), trainer::Event::Begin(step()));
    let commands = handle(ms(1), trainer::Event::Submitted(at));
    assert!(commands.contains(&trainer::Command::Complete(at)), "nothing is wanted: {commands:?}");
    let mut rings = 0;
    let (mut closed, mut suspected) = (false, Nanos(0));
    for millis in (100..45_000).step_by(100) {
        let (from, message) =
            (Peer::CONDUCTOR, Message::Pulse { watermark: None, ask: Vec::new() });
        let mut commands = handle(ms(millis), trainer::Event::Message { from, message });
        commands.extend(handle(ms(millis), trainer::Event::Tick));
        rings += commands.iter().filter(|it| rung(it)).count();
        closed |= commands.contains(&trainer::Command::Close(server));
        for command in commands {
            if let trainer::Command::Send {
                message: Message::Suspect { lasting, why, .. }, ..
            } = command
            {
                assert_eq!(why, Why::Broken, "nobody is late with what this trainer does not want");
                suspected = lasting;
            }
        }
    }
    assert!(rings > 10 && closed, "{rings} rings, closed: {closed}");
    assert!(suspected > Nanos(5 * settings.suspect_after.0), "{suspected:?}");
}

/// Nobody but this trainer may know that it gets no results: the other one has pulled its rows, and waits for nothing.
#[test]
fn who_gets_no_results_of_a_trainer_in_place_says_that_it_cannot_reach_it() {
    let settings = Settings::default();
    let (other, at) = (Peer::Trainer(TrainerId(0)), At::new(0, 0));
    for refuses_links in [true, false] {
        let mut trainer = Trainer::new(TRAINER, settings, ms(0));
        let mut handle = |now, event| {
            let mut commands = Vec::new();
            trainer.handle(now, event, &mut commands);
            commands
        };
        handle(ms(1), trainer::Event::Begin(step_of(Filler::InPlace(TrainerId(0)))));
        handle(ms(1), trainer::Event::Submitted(at));
        let (mut pulls, mut said) = (Vec::new(), Vec::new());
        for millis in (100..45_000).step_by(100) {
            let heard = |from, message| trainer::Event::Message { from, message };
            let pulse = Message::Pulse { watermark: None, ask: Vec::new() };
            let mut commands = handle(ms(millis), heard(Peer::CONDUCTOR, pulse));
            if refuses_links {
                commands.extend(handle(ms(millis), trainer::Event::Closed(other)));
            } else if pulls.is_empty() {
                // It is heard, and what it has made does not come.
                let works = vec![Work(0)];
                commands.extend(handle(ms(millis), heard(other, Message::Finished { at, works })));
            }
            for pull in pulls.drain(..) {
                let result = Err(PullFailure::Deadline);
                commands.extend(handle(ms(millis), trainer::Event::Pulled { pull, result }));
            }
            for command in commands {
                match command {
                    trainer::Command::Pull { pull, .. } => pulls.push(pull),
                    trainer::Command::Send {
                        to: Peer::CONDUCTOR,
                        message: Message::Unreached { trainers },
                    } => said.extend(trainers),
                    trainer::Command::Send { message: Message::Suspect { .. }, .. } => {
                        panic!("no server is suspect")
                    }
                    _ => {}
                }
            }
        }
        assert!(!said.is_empty() && said.iter().all(|it| it.0 == TrainerId(0)), "{said:?}");
        let longest = said.iter().map(|it| it.1).max();
        assert!(longest >= Some(settings.trainer_after), "{longest:?}");
    }
}

#[test]
fn a_peer_hears_again_what_came_from_it_and_nothing_of_others() {
    let servers = [0, 1].map(|index| ServerId { index, incarnation: 0 });
    let parcel = |it| ParcelShape { bundle: Bundle(it), from: TRAINER, bytes: 100 };
    let work = |it| WorkShape {
        bundle: Bundle(it),
        needs: vec![Parcel(it)],
        results: vec![(TRAINER, 10)],
    };
    let bundles = [0, 1].map(|it| BundleShape { slot: Slot(it) }).to_vec();
    let (works, parcels) = ([0, 1].map(work).to_vec(), [0, 1].map(parcel).to_vec());
    let shape = Arc::new(Shape::new(bundles, works, parcels).expect("it is well made"));
    let fillers = servers.map(|it| Some(Filler::Server(it))).to_vec();
    let assignments = vec![vec![Some(Slot(0)), Some(Slot(1))]];
    let table = RoundTable { step: 0, round: Round(0), fillers, assignments };
    let step = Step::new(2, 5, vec![shape], vec![0], table).expect("it is well made");
    let mut trainer = Trainer::new(TRAINER, Settings::default(), ms(0));
    let mut handle = |now, event| {
        let mut commands = Vec::new();
        trainer.handle(ms(now), event, &mut commands);
        commands
    };
    let at = At::new(0, 0);
    handle(1, trainer::Event::Begin(Arc::new(step)));
    handle(1, trainer::Event::Submitted(at));
    let [one, other] = servers.map(Peer::Server);
    let message = Message::Finished { at, works: vec![Work(0)] };
    let pulls = handle(2, trainer::Event::Message { from: one, message });
    let Some(&trainer::Command::Pull { pull, .. }) = pulls.first() else { panic!("{pulls:?}") };
    handle(3, trainer::Event::Pulled { pull, result: Ok(0) });
    for (peer, expected) in [(one, vec![(at, Work(0))]), (other, Vec::new())] {
        handle(10, trainer::Event::Closed(peer));
        let commands = handle(40, trainer::Event::Tick);
        let acks: Vec<_> = commands
            .into_iter()
            .filter_map(|it| match it {
                trainer::Command::Send { to, message: Message::Doorbell { acks, .. } } => {
                    Some((to, acks.works))
                }
                _ => None,
            })
            .collect();
        assert_eq!(acks, [(peer, expected)]);
    }
}

#[test]
fn results_that_were_announced_into_a_full_queue_are_announced_again() {
    let mut server = Server::new(Host::Dedicated(SERVER), 1 << 20, Settings::default(), ms(0));
    let mut handle = |now, event| {
        let mut commands = Vec::new();
        server.handle(now, event, &mut commands);
        commands
    };
    let at = At::new(0, 0);
    let finished = |it: &server::Command| {
        matches!(
            it,
            server::Command::Send { to: Peer::Trainer(TRAINER), message: Message::Finished { .. } }
        )
    };
    handle(ms(1), server::Event::Begin(step()));
    let (round, acks) = (Round(0), Acks::default());
    let message = Message::Doorbell { at, round, acks, digest: 5 };
    let commands = handle(ms(1), server::Event::Message { from: Peer::Trainer(TRAINER), message });
    let pull = commands.iter().find_map(|it| match it {
        server::Command::Pull { pull, .. } => Some(*pull),
        _ => None,
    });
    let pull = pull.expect("it has room and the rows are readable");
    handle(ms(2), server::Event::Pulled { pull, result: Ok(0) });
    let commands = handle(ms(3), server::Event::Ran { at, works: vec![Work(0)] });
    assert!(commands.iter().any(finished));
    let commands = handle(ms(4), server::Event::Unsaid(Peer::Trainer(TRAINER)));
    assert_eq!(commands.iter().filter(|it| finished(it)).count(), 1, "{commands:?}");
    let other = handle(ms(5), server::Event::Unsaid(Peer::Trainer(TrainerId(0))));
    assert!(!other.iter().any(finished), "{other:?}");
}
