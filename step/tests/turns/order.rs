//! Numbers of phases: of any turns each phase has one, in the order of the turns, and turns that contradict themselves are refused.

use std::collections::BTreeSet;

use cadre_protocol::Phase;
use cadre_step::phases::{Direction, PhaseAt, PhaseOrder};
use cadre_step::turns::{Turn, Turns, Which};
use proptest::prelude::*;

use crate::{Draw, turns};

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
}
