//! What a full queue has swallowed is said again as soon as there is room, and nobody is suspect for it.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one command out of many")]

use std::sync::Arc;

use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    Acks, At, Bundle, BundleShape, Filler, Message, Nanos, Parcel, ParcelShape, Peer, Round,
    RoundTable, ServerId, Settings, Shape, Slot, Step, TrainerId, Why, Work, WorkShape,
};

const SERVER: ServerId = ServerId { index: 0, incarnation: 0 };
const TRAINER: TrainerId = TrainerId(1);

/// One bundle on one server, with a work of trainer 1's rows, and one of both trainers' rows, all of whose
/// results are for trainer 1.
fn step() -> Arc<Step> {
    let work = |needs| WorkShape { bundle: Bundle(0), needs, results: vec![(TRAINER, 10)] };
    let works = vec![work(vec![Parcel(0)]), work(vec![Parcel(0), Parcel(1)])];
    let parcel = |from| ParcelShape { bundle: Bundle(0), from, bytes: 100 };
    let parcels = vec![parcel(TRAINER), parcel(TrainerId(0))];
    let shape = Shape::new(vec![BundleShape { slot: Slot(0) }], works, parcels);
    let table = RoundTable {
        step: 0,
        round: Round(0),
        fillers: vec![Some(Filler::Server(SERVER))],
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
