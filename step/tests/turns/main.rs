//! Steps of any turns: numbers of phases, and the machines of the protocol that go through them.
//!
//! In: drawn turns, documents, windows. Out: every phase once, a forward before its backward, rows kept until every trainer has
//! what is made of them, a server's memory that is planned for.
//!
//! `job.rs` has the machines.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic, too")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what no calm job has is a failure")]

mod job;
#[path = "../../../testing/turns.rs"]
mod turns;

use std::collections::BTreeSet;
use std::sync::Arc;

use cadre_planner::{DocumentId, Mask, Slot, Stretch};
use cadre_protocol::Phase;
use cadre_step::header::{Header, Member};
use cadre_step::layers::{Kind, Layers};
use cadre_step::packing::Packing;
use cadre_step::phases::{Direction, PhaseAt, PhaseOrder};
use cadre_step::planned::{PlannedStep, needed};
use cadre_step::turns::{Turn, Turns, Which};
use proptest::prelude::*;

use crate::job::Job;

/// A source of numbers that a seed begins.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Layers of two kinds, over documents that span trainers, on servers with room for two phases and the largest bundle.
fn planned(draw: &mut Draw, trainers: u16, servers: u16) -> PlannedStep {
    let any: Header = serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    let (layers, nanos) = (1 + draw.below(3) as u16, 1 + draw.below(4) as u16);
    let turns = turns::drawn(layers, nanos, &mut |bound| draw.below(bound));
    let near = Kind { mask: Mask::Window { left: 60 }, ..Kind::CAUSAL };
    let kind = |_| if draw.below(2) == 0 { near } else { Kind::CAUSAL };
    let layers = Layers::new((0..layers).map(kind)).unwrap();
    let nano = |_| {
        let rows = u32::from(trainers) * (40 + draw.below(300) as u32);
        let part = rows / u32::from(trainers);
        let own =
            |rank| Stretch { document: DocumentId(0), start: rank * part, end: (rank + 1) * part };
        Packing::new(&[rows], (0..trainers.into()).map(|it| vec![own(it)]).collect()).unwrap()
    };
    let nanos = (0..nanos).map(nano).collect();
    let server = |index| Member::Server { index, incarnation: 0, address: String::new() };
    let fillers = (0..servers).map(|it| Some(server(it))).collect();
    let slot = |memory| Slot { weight: 100, head_start: 0, home: None, memory };
    let slots = vec![slot(1 << 30); servers.into()];
    let header = Header { layers, turns, nanos, fillers, slots, ..any };
    let roomy = PlannedStep::new(Arc::new(header.clone())).unwrap();
    let needed = needed(roomy.plans.iter().map(|it| (&it.problem, &it.plan)));
    // A slot without work is not asked, but takes part.
    let header = Header { slots: needed.into_iter().map(|it| slot(it.max(1))).collect(), ..header };
    // Plans of slots that just fit may be others, which fit as well.
    PlannedStep::new(Arc::new(header)).unwrap_or(roomy)
}

proptest! {
    #[test]
    fn every_phase_comes_once_and_forward_before_backward(
        layers in 1_u16..7, nanos in 1_u16..7, seed: u64,
    ) {
        let mut draw = Draw(seed);
        let turns = turns::drawn(layers, nanos, &mut |bound| draw.below(bound));
        let order = PhaseOrder::new(&turns, layers, nanos.into()).unwrap();
        let phases: Vec<PhaseAt> = order.iter().collect();
        prop_assert_eq!(phases.iter().collect::<BTreeSet<_>>().len(), order.count());
        for (number, at) in (0..).map(Phase).zip(&phases) {
            prop_assert_eq!(order.index(*at), Some(number));
            if at.direction == Direction::Backward {
                let forward = order.index(PhaseAt { direction: Direction::Forward, ..*at });
                prop_assert!(forward.is_some_and(|it| it < number), "{:?} of {}", at, turns);
            }
        }
        for direction in [Direction::Forward, Direction::Backward] {
            for nano in 0..usize::from(nanos) {
                let own = phases.iter().filter(|it| it.nano == nano && it.direction == direction);
                let mut through: Vec<_> = own.map(|it| it.layer).collect();
                if direction == Direction::Backward {
                    through.reverse();
                }
                prop_assert!(through.is_sorted(), "{through:?}: layers follow each other");
            }
            // Whatever does not come has no number.
            for layer in 0..=usize::from(layers) {
                for nano in 0..=usize::from(nanos) {
                    let at = PhaseAt { layer, nano, direction };
                    prop_assert_eq!(order.index(at).is_some(), phases.contains(&at));
                }
            }
        }
    }

    #[test]
    fn turns_that_are_spoilt_are_refused(layers in 1_u16..5, nanos in 1_u16..5, seed: u64) {
        let mut draw = Draw(seed);
        let good = turns::drawn(layers, nanos, &mut |bound| draw.below(bound));
        let mut list = good.list().to_vec();
        let number = draw.below(list.len() as u64) as usize;
        let turn = list.remove(number);
        match draw.below(6) {
            // What went forward comes backward, or never.
            0 => {}
            1 => list.extend([turn.clone(), turn.clone()]),
            2 => list.insert(number, Turn { nanos: Vec::new(), ..turn.clone() }),
            3 => list.insert(number, Turn { layers: Which::Only(Vec::new()), ..turn.clone() }),
            4 => list.insert(number, Turn { layers: Which::Only(vec![layers]), ..turn.clone() }),
            _ => list.insert(number, Turn { direction: Direction::Backward, ..turn.clone() }),
        }
        let order = Turns::new(list.clone())
            .and_then(|it| PhaseOrder::new(&it, layers, nanos.into()));
        let is_good = list == good.list()
            || list.len() < good.list().len() && turn.direction == Direction::Backward;
        prop_assert_eq!(order.is_ok(), is_good, "{} became {:?}", good, list);
    }

    #[test]
    fn machines_go_through_any_turns_within_window_watermark_and_memory(
        trainers in 1_u16..4, servers in 1_u16..4, window in 1_usize..5, seed: u64,
    ) {
        let mut draw = Draw(seed);
        let planned = planned(&mut draw, trainers, servers);
        let mut job = Job::new(&planned, window);
        job.run(&mut draw);
        let works = (0..).map(Phase).zip(planned.order.iter()).map(|(phase, at)| {
            let nano = &planned.plans[planned.plan_index(at)];
            // Each phase asks for what its own nano-batch, kind of layers and direction need.
            let shape = nano.lists.shape(&nano.problem, &nano.plan, at.direction).unwrap();
            assert_eq!(**job.step.shape(phase), shape, "{at:?}");
            planned.works(phase)
        });
        prop_assert_eq!(job.ran.len(), works.sum::<usize>(), "each work ran once");
        prop_assert_eq!(job.held, vec![0; servers.into()]);
    }
}
