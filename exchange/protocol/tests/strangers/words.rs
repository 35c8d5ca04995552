//! Random words of random peers: numbers that exist, the next ones, and the largest.

use cadre_protocol::{
    Acks, At, Filler, Fillers, Heartbeat, Message, Nanos, Peer, PullFailure, PullResult, Round,
    ServerId, TrainerId, Why, Work,
};

use crate::job::{PHASES, SERVER, TRAINERS};
use crate::random::Random;

/// Small numbers, mostly ones that exist, and the largest.
pub(crate) fn number(random: &mut Random, below: u64, most: u64) -> u64 {
    match random.within(0, 10) {
        0 => most,
        1 => below,
        _ => random.within(0, below - 1),
    }
}

pub(crate) fn at(random: &mut Random) -> At {
    let step = number(random, 4, u64::MAX);
    let phase = number(random, PHASES.into(), u32::MAX.into()) as u32;
    At::new(step, phase)
}

pub(crate) fn works(random: &mut Random) -> Vec<Work> {
    (0..random.within(0, 4)).map(|_| Work(number(random, 6, u32::MAX.into()) as u32)).collect()
}

pub(crate) fn server_id(random: &mut Random) -> ServerId {
    let index = number(random, 3, u16::MAX.into()) as u16;
    ServerId { index, incarnation: number(random, 2, u32::MAX.into()) as u32 }
}

fn trainer(random: &mut Random) -> TrainerId {
    TrainerId(number(random, TRAINERS.into(), u16::MAX.into()) as u16)
}

pub(crate) fn peer(random: &mut Random) -> Peer {
    if random.chance(50) { Peer::Trainer(trainer(random)) } else { Peer::Server(server_id(random)) }
}

pub(crate) fn filler(random: &mut Random) -> Option<Filler> {
    let trainer = trainer(random);
    let server = server_id(random);
    *random.pick(&[
        None,
        Some(Filler::Server(SERVER)),
        Some(Filler::Server(server)),
        Some(Filler::InPlace(trainer)),
        Some(Filler::Standby(trainer)),
    ])
}

pub(crate) fn tables(random: &mut Random) -> Vec<Fillers> {
    let slots = |random: &mut Random| if random.chance(70) { 3 } else { random.within(0, 5) };
    let row = |random: &mut Random| (0..slots(random)).map(|_| filler(random)).collect();
    let rounds = if random.chance(3) { 100 } else { random.within(0, 3) };
    (0..rounds).map(|_| row(random)).collect()
}

pub(crate) fn span(random: &mut Random) -> Nanos {
    *random.pick(&[Nanos(0), Nanos::from_millis(900), Nanos::from_millis(60_000), Nanos(u64::MAX)])
}

pub(crate) fn message(random: &mut Random) -> Message {
    match random.within(0, 11) {
        0 => Message::Doorbell {
            at: at(random),
            round: Round(number(random, 3, u32::MAX.into()) as u32),
            acks: acks(random),
            // The digest of a step is its number: a wrong one ends the job, as it should.
            digest: number(random, 4, u64::MAX),
        },
        1 => Message::Finished { at: at(random), works: works(random) },
        2 => Message::Ack { acks: acks(random) },
        3 => Message::PhaseDone { at: at(random) },
        4 => Message::Watermark { at: at(random) },
        5 => {
            let tables = tables(random);
            let round = if random.chance(80) { tables.len() as u64 } else { u32::MAX.into() };
            let step = number(random, 4, u64::MAX);
            Message::Round { step, round: Round(round as u32), tables }
        }
        6 => Message::Heartbeat(Box::new(Heartbeat {
            watermark: random.chance(50).then(|| at(random)),
            done: random.chance(50).then(|| at(random)),
            rounds: vec![(number(random, 4, u64::MAX), Round(random.within(0, 3) as u32))],
            owes: random.chance(50).then(|| (at(random), span(random))),
            unreached: (0..random.within(0, 2)).map(|_| (trainer(random), span(random))).collect(),
            reached: (0..random.within(0, 2)).map(|_| server_id(random)).collect(),
            leaves: random.chance(20),
        })),
        7 => Message::Pulse {
            watermark: random.chance(50).then(|| at(random)),
            ask: (0..random.within(0, 2)).map(|_| server_id(random)).collect(),
        },
        8 => {
            let At { step, phase } = at(random);
            let why = *random.pick(&[Why::Broken, Why::Late { step, phase }]);
            Message::Suspect { server: server_id(random), why, lasting: span(random) }
        }
        9 => {
            let trainers = (0..random.within(1, 2)).map(|_| (trainer(random), span(random)));
            Message::Unreached { trainers: trainers.collect() }
        }
        10 => Message::Spare { watermark: random.chance(50).then(|| at(random)) },
        _ => Message::Leave { server: server_id(random) },
    }
}

pub(crate) fn acks(random: &mut Random) -> Acks {
    let works = works(random).into_iter().map(|it| (at(random), it)).collect();
    Acks { through: random.chance(30).then(|| at(random)), works }
}

pub(crate) fn result(random: &mut Random) -> PullResult {
    let failure = *random.pick(&[PullFailure::Gone, PullFailure::Deadline, PullFailure::Cancelled]);
    if random.chance(60) { Ok(0) } else { Err(failure) }
}
