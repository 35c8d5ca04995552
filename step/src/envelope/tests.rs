//! Whatever bytes a peer rings or publishes, they are read as what they say or refused; and a header that is read is planned or
//! refused, whatever stands in it.
//!
//! In: what is said in a job, by hand and from `testing/header.json`; changes of its bytes, and of the header's values, that
//! proptest draws. `scripts/properties` draws others.

use std::sync::Arc;

use cadre_protocol::{Acks, At, Heartbeat, Nanos, Round, ServerId, TrainerId, Why, Work};
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::planned::PlannedStep;
use crate::words::Published;

fn header() -> Header {
    serde_json::from_str(include_str!("../../../testing/header.json")).unwrap()
}

fn envelopes() -> Vec<Vec<u8>> {
    let (at, works) = (At::new(3, 7), vec![Work(1), Work(300)]);
    let acks = Acks { through: Some(at), works: vec![(at, Work(2))] };
    let server = ServerId { index: 2, incarnation: 1 };
    let doorbell = Message::Doorbell { at, round: Round(1), acks: acks.clone(), digest: u64::MAX };
    let beat = Heartbeat {
        watermark: Some(at),
        done: None,
        rounds: vec![(3, Round(1))],
        owes: Some((at, Nanos::from_millis(9))),
        unreached: vec![(TrainerId(1), Nanos(5))],
        reached: vec![server],
        leaves: true,
    };
    let messages = [
        doorbell,
        Message::Finished { at, works },
        Message::Ack { acks },
        Message::Round { step: 3, round: Round(1), tables: vec![vec![None; 3]] },
        Message::Heartbeat(Box::new(beat.clone())),
        Message::Suspect { server, why: Why::Broken, lasting: Nanos(7) },
        Message::Unreached { trainers: vec![(TrainerId(3), Nanos(7))] },
        Message::Spare { watermark: Some(at) },
    ];
    let stream = Stream { life: Life(7), era: 1 };
    let there = Published { publication: 4, bytes: 1 << 20, digest: 5 };
    let words = [Body::Here(vec![1, 2, 3]), Body::There(there)].map(|body| Envelope::Word {
        stream,
        number: 300,
        body,
    });
    let beat = Envelope::Beat { by: Life(9), beat: Box::new(beat) };
    let all = messages.map(Envelope::Protocol).into_iter().chain(words).chain([beat]);
    all.map(|it| postcard::to_stdvec(&it).unwrap()).collect()
}

fn said() -> Vec<Vec<u8>> {
    let peer = PeerId::server(1, 2);
    let stretch = Stretch { document: cadre_planner::DocumentId(0), start: 0, end: 300 };
    let nano = NanoLengths { documents: vec![(0, 300)], stretches: vec![stretch] };
    let all = [
        Said::Lengths(Lengths { step: 1, turns: None, nanos: vec![nano] }),
        Said::Header { header: Box::new(header()), trainers: vec![(peer, "h:1".to_owned())] },
        Said::StepDone(StepDone::default()),
        Said::End(Ending::Failed { reason: "why".to_owned(), bad_input: true }),
        Said::Standing(Stands::Still("waits".to_owned())),
    ];
    all.iter().map(|it| postcard::to_stdvec(it).unwrap()).collect()
}

/// Changes of an input: where, how, to what.
fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), 0..4_u8, any::<u8>()), 0..5)
}

fn changed(mut input: Vec<u8>, changes: &[(prop::sample::Index, u8, u8)]) -> Vec<u8> {
    for (at, how, byte) in changes {
        let at = at.index(input.len() + 1);
        match how {
            0 => input.truncate(at),
            1 => input.insert(at, *byte),
            // A long number.
            2 => drop(input.splice(at..at, [0xff; 4])),
            _ => {
                if let Some(it) = input.get_mut(at) {
                    *it = *byte;
                }
            }
        }
    }
    input
}

/// Every value of a JSON text that is no object and no list.
fn leaves<'a>(value: &'a mut Value, out: &mut Vec<&'a mut Value>) {
    match value {
        Value::Array(all) => all.iter_mut().for_each(|it| leaves(it, out)),
        Value::Object(all) => all.iter_mut().for_each(|it| leaves(it.1, out)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => out.push(value),
    }
}

/// Values that stand at the ends of ranges, or in none.
fn edge() -> impl Strategy<Value = Value> {
    let numbers = [0, 1, 2, 3, 255, 256, 300, 65_535, 65_536, u64::from(u32::MAX), 1 << 32];
    prop_oneof![
        4 => prop::sample::select(numbers.to_vec()).prop_map(Value::from),
        1 => prop::sample::select(vec![u64::MAX, 1 << 63, i64::MAX as u64]).prop_map(Value::from),
        1 => prop::sample::select(vec![-1.0, 0.5, 1e300]).prop_map(Value::from),
        1 => prop::sample::select(vec!["", "all", "backward", "local", "Bf16", "Full", "none"])
            .prop_map(Value::from),
        1 => Just(Value::Null),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn whatever_is_rung_is_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in changes(),
    ) {
        let input = changed(which.get(&envelopes()).clone(), &changes);
        if let Ok(envelope) = postcard::from_bytes::<Envelope>(&input) {
            let again = postcard::to_stdvec(&envelope).unwrap();
            prop_assert!(again.len() <= input.len(), "{envelope:?}");
            if let Envelope::Protocol(message) = &envelope {
                let _ = speaker(message);
            }
        }
    }

    #[test]
    fn whatever_is_said_is_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in changes(),
    ) {
        let input = changed(which.get(&said()).clone(), &changes);
        if let Ok(said) = postcard::from_bytes::<Said>(&input) {
            let again = postcard::to_stdvec(&said).unwrap();
            let read = postcard::from_bytes::<Said>(&again).unwrap();
            prop_assert_eq!(format!("{:?}", read), format!("{:?}", said));
            let _ = (said.speaker(), said.name());
        }
    }

    /// As a conductor of another mind, or a `headers.jsonl` that somebody has edited, may have it.
    #[test]
    fn whatever_stands_in_a_header_it_is_planned_or_refused(
        edits in prop::collection::vec((any::<prop::sample::Index>(), edge()), 1..4),
    ) {
        let mut value = serde_json::to_value(header()).unwrap();
        for (at, edge) in edits {
            let mut all = Vec::new();
            leaves(&mut value, &mut all);
            let at = at.index(all.len());
            *all.swap_remove(at) = edge;
        }
        if let Ok(header) = serde_json::from_value::<Header>(value)
            && let Ok(planned) = PlannedStep::new(Arc::new(header))
            && let Ok(first) = planned.assign(None, &vec![true; planned.header.slots.len()])
        {
            let _ = planned.protocol_step(&first);
        }
    }
}
