//! Messages that no honest peer sends: none makes a machine panic, and words of the wrong author change
//! nothing.
//!
//! Machines are brought into random states by events of their shell, in any order, and are told random
//! messages by random peers. Every run is made from one number, which a failure prints.

#[path = "../simulation/random.rs"]
#[allow(dead_code, reason = "the simulation uses all of it")]
mod random;

mod job;
mod machines;
mod words;

use cadre_protocol::{Message, Nanos, Peer};

use crate::machines::machine;
use crate::random::Random;
use crate::words::{message, peer};

#[test]
fn no_message_of_any_peer_makes_a_machine_panic() {
    for seed in 0..4_000 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut machine = machine(seed % 4);
        let mut now = Nanos(0);
        for _ in 0..150 {
            now = now.after(Nanos(random.within(0, 20_000_000)));
            if random.chance(50) {
                machine.live(now, &mut random);
            } else {
                // The conductor's peer says the most dangerous things: it is believed.
                let from = if random.chance(30) { Peer::CONDUCTOR } else { peer(&mut random) };
                machine.hear(now, from, message(&mut random));
            }
        }
    }
}

/// Whether a word counts from this author at this machine.
fn may_say(kind: u64, from: Peer, message: &Message) -> bool {
    let trainer = matches!(from, Peer::Trainer(_));
    match message {
        Message::Watermark { .. }
        | Message::Round { .. }
        | Message::Pulse { .. }
        | Message::Leave { .. }
        | Message::Spare { .. } => from == Peer::CONDUCTOR,
        Message::Doorbell { .. } | Message::Ack { .. } => trainer && matches!(kind, 1 | 2),
        // Whoever was rung; who that is depends on the state.
        Message::Finished { .. } => kind == 0,
        Message::PhaseDone { .. } | Message::Suspect { .. } | Message::Unreached { .. } => {
            trainer && kind == 3
        }
        Message::Heartbeat(_) => kind == 3,
    }
}

#[test]
fn words_of_the_wrong_author_change_nothing() {
    let mut checked = 0;
    for seed in 0..1_000 {
        println!("seed {seed}");
        let kind = seed % 4;
        let (mut told, mut untold) = (machine(kind), machine(kind));
        let mut random = Random::new(seed);
        let mut now = Nanos(0);
        for _ in 0..60 {
            now = now.after(Nanos(random.within(0, 20_000_000)));
            let mut again = random.clone();
            told.live(now, &mut random);
            untold.live(now, &mut again);
            let (from, message) = (peer(&mut random), message(&mut random));
            if from == Peer::CONDUCTOR || may_say(kind, from, &message) {
                continue;
            }
            checked += 1;
            let mut answer = told.hear(now, from, message.clone());
            // The conductor takes every word as a sign of life.
            let nothing = if kind == 3 {
                untold.hear(now, from, Message::Pulse { watermark: None, ask: Vec::new() })
            } else {
                // Pulls may begin anew with a tick alone.
                answer += &told.tick(now);
                untold.tick(now) + &untold.tick(now)
            };
            assert_eq!(answer, nothing, "{from} said {message:?}");
            assert_eq!(format!("{told:?}"), format!("{untold:?}"), "{from} said {message:?}");
        }
    }
    assert!(checked > 5_000, "{checked} words were checked");
}
