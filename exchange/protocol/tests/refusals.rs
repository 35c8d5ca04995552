//! What is refused, and how it is said; and that messages survive their encoding.

use std::sync::Arc;

use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::{
    Acks, At, Bundle, BundleShape, End, Filler, Message, Nanos, Parcel, ParcelShape, Peer, Round,
    RoundTable, ServerId, Settings, Shape, ShapeError, Slot, Step, StepError, TrainerId, Work,
    WorkShape,
};

const SERVER: ServerId = ServerId { index: 0, incarnation: 0 };

fn bundle() -> BundleShape {
    BundleShape { slot: Slot(0) }
}

fn work(bundle: u32, needs: &[u32], reader: u16) -> WorkShape {
    let needs = needs.iter().map(|&it| Parcel(it)).collect();
    WorkShape { bundle: Bundle(bundle), needs, results: vec![(TrainerId(reader), 10)] }
}

fn parcel(bundle: u32, from: u16) -> ParcelShape {
    ParcelShape { bundle: Bundle(bundle), from: TrainerId(from), bytes: 100 }
}

fn shape() -> Shape {
    Shape::new(vec![bundle()], vec![work(0, &[0], 0)], vec![parcel(0, 0)]).expect("it is well made")
}

fn table() -> RoundTable {
    RoundTable {
        step: 7,
        round: Round(0),
        fillers: vec![Some(Filler::Server(SERVER))],
        assignments: vec![vec![Some(Slot(0))]],
    }
}

fn step() -> Arc<Step> {
    Arc::new(
        Step::new(1, 5, vec![Arc::new(shape())], vec![0; 40], table()).expect("it is well made"),
    )
}

#[test]
fn shapes_that_the_machines_could_not_run_are_refused() {
    #[track_caller]
    fn check(works: Vec<WorkShape>, parcels: Vec<ParcelShape>, expected: &ShapeError) {
        assert_eq!(Shape::new(vec![bundle()], works, parcels).as_ref(), Err(expected));
    }
    let (zero, one) = (Bundle(0), Bundle(1));
    let error = ShapeError::ParcelBundle { parcel: Parcel(0), bundle: one };
    check(vec![work(0, &[0], 0)], vec![parcel(1, 0)], &error);
    let error = ShapeError::WorkBundle { work: Work(0), bundle: one };
    check(vec![work(1, &[0], 0)], vec![parcel(0, 0)], &error);
    let error = ShapeError::Needs { work: Work(0), parcel: Parcel(3) };
    check(vec![work(0, &[3], 0)], vec![parcel(0, 0)], &error);
    let error = ShapeError::Needs { work: Work(0), parcel: Parcel(0) };
    check(vec![work(0, &[0, 0], 0)], vec![parcel(0, 0)], &error);
    let error = ShapeError::Reader { work: Work(0), trainer: TrainerId(1) };
    check(vec![work(0, &[0], 1)], vec![parcel(0, 0)], &error);
    check(vec![], vec![], &ShapeError::Idle { bundle: zero });
    let error = ShapeError::Unused { parcel: Parcel(1) };
    check(vec![work(0, &[0], 0)], vec![parcel(0, 0), parcel(0, 0)], &error);
}

#[test]
fn steps_that_do_not_fit_together_are_refused() {
    #[track_caller]
    fn check(trainers: u16, phases: &[u16], table: RoundTable, expected: &StepError) {
        let step = Step::new(trainers, 0, vec![Arc::new(shape())], phases.to_vec(), table);
        assert_eq!(step.as_ref(), Err(expected));
    }
    check(1, &[], table(), &StepError::Empty { step: 7 });
    check(1, &[0, 1], table(), &StepError::NoShape { step: 7, shape: 1 });
    check(0, &[0], table(), &StepError::NoTrainer { step: 7, trainer: TrainerId(0) });
    let short = RoundTable { assignments: vec![vec![]], ..table() };
    check(1, &[0], short, &StepError::Table { step: 7, round: Round(0) });
    let beyond = RoundTable { assignments: vec![vec![Some(Slot(9))]], ..table() };
    check(1, &[0], beyond, &StepError::Table { step: 7, round: Round(0) });
}

fn server_end(memory: u64, events: Vec<server::Event>) -> Option<End> {
    let mut server = Server::new(Host::Dedicated(SERVER), memory, Settings::default(), Nanos(0));
    let mut commands = Vec::new();
    for event in events {
        server.handle(Nanos(1), event, &mut commands);
    }
    match commands.pop() {
        Some(server::Command::End(end)) => Some(end),
        Some(_) | None => None,
    }
}

fn doorbell(phase: u32, digest: u64) -> server::Event {
    let at = At::new(7, phase);
    let message = Message::Doorbell { at, round: Round(0), acks: Acks::default(), digest };
    server::Event::Message { from: Peer::Trainer(TrainerId(0)), message }
}

#[test]
fn a_step_larger_than_the_memory_ends_the_server() {
    // Two phases and the largest bundle, each of 100 bytes of rows and 10 of results.
    let begin = || vec![server::Event::Begin(step())];
    assert_eq!(server_end(330, begin()), None);
    let end = End::Memory { step: 7, needed: 330, memory: 329 };
    assert_eq!(server_end(329, begin()), Some(end));
}

/// Step `number`, whose phases have bundles of these bytes, all of trainer 0's rows, in one slot.
fn sized(number: u64, bytes: &[u64], slot: u16, phases: usize) -> Arc<Step> {
    let parcel = |(bundle, &bytes): (u32, &u64)| ParcelShape {
        bundle: Bundle(bundle),
        from: TrainerId(0),
        bytes,
    };
    let work = |bundle: u32| WorkShape {
        bundle: Bundle(bundle),
        needs: vec![Parcel(bundle)],
        results: Vec::new(),
    };
    let count = bytes.len() as u32;
    let bundles = vec![BundleShape { slot: Slot(slot) }; bytes.len()];
    let works = (0..count).map(work).collect();
    let shape = Shape::new(bundles, works, (0..).zip(bytes).map(parcel).collect());
    let other = ServerId { index: 1, incarnation: 0 };
    let table = RoundTable {
        step: number,
        round: Round(0),
        fillers: vec![Some(Filler::Server(SERVER)), Some(Filler::Server(other))],
        assignments: vec![vec![Some(Slot(slot)); bytes.len()]],
    };
    let shapes = vec![Arc::new(shape.expect("it is well made"))];
    Arc::new(Step::new(1, 5, shapes, vec![0; phases], table).expect("it is well made"))
}

#[test]
fn two_steps_that_fit_alone_do_not_end_the_server_together() {
    // Alone: two phases of 100 and a bundle of 10; no phase of its own and a bundle of 210.
    let many = sized(7, &[10; 10], 0, 3);
    let large = sized(8, &[210], 1, 1);
    let events = vec![server::Event::Begin(many), server::Event::Begin(large)];
    assert_eq!(server_end(210, events), None);
}

#[test]
fn a_server_without_work_of_its_own_takes_over_what_it_can_hold() {
    // Both bundles are planned for the other server, and one of them is larger than this one's memory.
    let step = sized(7, &[500, 40], 1, 3);
    let begin = || server::Event::Begin(Arc::clone(&step));
    assert_eq!(server_end(100, vec![begin()]), None);
    let moved = |to: [u16; 2]| {
        let table = RoundTable {
            round: Round(1),
            assignments: vec![to.map(|it| Some(Slot(it))).to_vec()],
            ..RoundTable::clone(step.table())
        };
        server::Event::Round(Arc::new(table))
    };
    assert_eq!(server_end(100, vec![begin(), moved([1, 0])]), None);
    let end = End::Memory { step: 7, needed: 500, memory: 100 };
    assert_eq!(server_end(100, vec![begin(), moved([0, 0])]), Some(end));
}

#[test]
fn different_plans_end_the_server_and_name_both() {
    let end = Some(End::Digest { from: TrainerId(0), ours: 5, theirs: 6 });
    let begin = || server::Event::Begin(step());
    assert_eq!(server_end(330, vec![begin(), doorbell(0, 6)]), end);
    assert_eq!(server_end(330, vec![doorbell(0, 6), begin()]), end, "also when the header is late");
    assert_eq!(server_end(330, vec![doorbell(0, 5), begin()]), None);
}

#[test]
fn doorbells_for_steps_that_have_not_begun_are_bounded() {
    let events = (0..17).map(|it| doorbell(it, 5)).collect();
    assert_eq!(server_end(330, events), Some(End::Flooded { from: TrainerId(0), count: 17 }));
    let again = (0..17).map(|_| doorbell(0, 5)).collect();
    assert_eq!(server_end(330, again), None, "the same doorbell again takes no room");
}

#[test]
fn a_silent_conductor_ends_a_dedicated_server() {
    let mut server = Server::new(Host::Dedicated(SERVER), 0, Settings::default(), Nanos(0));
    let mut commands = Vec::new();
    let mut ended = None;
    while let Some(now) = server.next_deadline() {
        server.handle(now, server::Event::Tick, &mut commands);
        ended = Some(now);
    }
    let silence = Settings::default().conductor_after;
    assert_eq!(commands.pop(), Some(server::Command::End(End::ConductorSilent(silence))));
    assert_eq!(ended, Some(silence));
}

#[test]
fn messages_survive_their_encoding() {
    let acks = Acks { through: Some(At::new(1, 2)), works: vec![(At::new(1, 3), Work(4))] };
    let fillers = vec![Some(Filler::Server(SERVER)), None, Some(Filler::Standby(TrainerId(1)))];
    let messages = [
        Message::Doorbell { at: At::new(1, 3), round: Round(1), acks, digest: u64::MAX },
        Message::Finished { at: At::new(1, 3), works: vec![Work(4), Work(5)] },
        Message::Round { step: 1, round: Round(1), tables: vec![fillers] },
        Message::Heartbeat(Box::default()),
        Message::Leave { server: SERVER },
        Message::Unreached { trainers: vec![(TrainerId(1), cadre_protocol::Nanos(7))] },
    ];
    for message in messages {
        let bytes = postcard::to_stdvec(&message).unwrap();
        assert_eq!(postcard::from_bytes(&bytes), Ok(message));
        assert!(bytes.len() < 64, "messages are small");
    }
}
