//! The order of phases in a step.
//!
//! A phase is (layer, nano-batch, direction). The [`Turns`] of the header say which phases come, and when. Everyone asks
//! [`PhaseOrder`] for it: the trainer's calls, the protocol, the shapes of its phases and the messages.
//!
//! In: turns, numbers of layers and nano-batches. Out: numbers of phases, and back.
//!
//! Invariant: a phase has one number and a number one phase, and the forward of a layer and nano-batch comes before its backward.

pub use cadre_planner::Direction;
use cadre_protocol::Phase;

use crate::turns::{Error, Turn, Turns, Which, word};

/// One phase, as the model sees it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct PhaseAt {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Nano-batch, counted from 0.
    pub nano: usize,
    /// Way through the model.
    pub direction: Direction,
}

impl PhaseAt {
    /// The phase of a step in words, for messages.
    pub fn in_words(self, step: u64) -> String {
        let Self { layer, nano, direction } = self;
        format!("step {step}, layer {layer}, nano-batch {nano}, {}", word(direction))
    }
}

/// Numbers the phases of a step.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PhaseOrder {
    turns: Vec<Placed>,
    /// By nano-batch, forward and backward: the index of its turn, and its position in the turn.
    taken: Vec<[Option<(usize, usize)>; 2]>,
    layers: u16,
    count: u32,
}

/// A turn and its position in the step.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Placed {
    /// Number of its first phase.
    first: u32,
    turn: Turn,
}

impl PhaseOrder {
    /// The order of a step of `layers` layers and `nanos` nano-batches.
    ///
    /// # Errors
    ///
    /// Turns that name other layers or nano-batches, or go backward through a layer without having gone forward.
    pub fn new(turns: &Turns, layers: u16, nanos: usize) -> Result<Self, Error> {
        if usize::from(turns.nanos()) != nanos {
            return Err(Error::Nanos { turns: turns.nanos(), held: nanos });
        }
        let mut order = Self { turns: Vec::new(), taken: vec![[None; 2]; nanos], layers, count: 0 };
        for (number, turn) in turns.list().iter().enumerate() {
            order.check(number, turn)?;
            for (place, &nano) in turn.nanos.iter().enumerate() {
                order.taken[usize::from(nano)][way(turn.direction)] = Some((number, place));
            }
            let phases = turn.layers.count(layers) as u64 * turn.nanos.len() as u64;
            let count = u64::from(order.count) + phases;
            let first = order.count;
            order.count = u32::try_from(count).map_err(|_| Error::TooMany)?;
            order.turns.push(Placed { first, turn: turn.clone() });
        }
        Ok(order)
    }

    /// Checks of a turn what depends on the layers.
    fn check(&self, turn: usize, it: &Turn) -> Result<(), Error> {
        let layers = self.layers;
        if let Which::Only(some) = &it.layers {
            match some.last() {
                Some(&layer) if layer >= layers => {
                    return Err(Error::NoSuchLayer { turn, layer, layers });
                }
                Some(_) if some.len() == usize::from(layers) => {
                    return Err(Error::All { turn, layers });
                }
                Some(_) | None => {}
            }
        }
        if it.direction == Direction::Forward {
            return Ok(());
        }
        for &nano in &it.nanos {
            let (forward, _) = self.taken[usize::from(nano)][0].expect("turns were checked");
            let has = &self.turns[forward].turn.layers;
            let missing = (0..layers).find(|&it_| {
                it.layers.place(it_, layers).is_some() && has.place(it_, layers).is_none()
            });
            if let Some(layer) = missing {
                return Err(Error::NotForward { turn, nano, layer });
            }
        }
        Ok(())
    }

    /// Phases in a step.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// Nano-batches of a step.
    pub fn nanos(&self) -> usize {
        self.taken.len()
    }

    /// Place of a phase in the step's order; none if it does not come.
    pub fn index(&self, at: PhaseAt) -> Option<Phase> {
        let (number, nano) = (*self.taken.get(at.nano)?)[way(at.direction)]?;
        let Placed { first, turn } = &self.turns[number];
        let layer = turn.layers.place(u16::try_from(at.layer).ok()?, self.layers)?;
        let layer = match at.direction {
            Direction::Forward => layer,
            Direction::Backward => turn.layers.count(self.layers) - 1 - layer,
        };
        Some(Phase(first + (layer * turn.nanos.len() + nano) as u32))
    }

    /// The phase at a place of the step's order.
    ///
    /// # Panics
    ///
    /// There is no such place.
    pub fn at(&self, phase: Phase) -> PhaseAt {
        assert!(phase.0 < self.count, "phase {} of {}", phase.0, self.count);
        let number = self.turns.partition_point(|it| it.first <= phase.0) - 1;
        let Placed { first, turn: Turn { direction, nanos, layers } } = &self.turns[number];
        let within = (phase.0 - first) as usize;
        let (layer, nano) = (within / nanos.len(), within % nanos.len());
        let layer = match direction {
            Direction::Forward => layers.nth(layer),
            Direction::Backward => layers.nth(layers.count(self.layers) - 1 - layer),
        };
        PhaseAt { layer, nano: nanos[nano].into(), direction: *direction }
    }

    /// All phases, in their order.
    pub fn iter(&self) -> impl Iterator<Item = PhaseAt> + '_ {
        (0..self.count).map(|it| self.at(Phase(it)))
    }

    /// The first phase that goes this way, if any does.
    pub fn first(&self, direction: Direction) -> Option<Phase> {
        let turn = self.turns.iter().find(|it| it.turn.direction == direction);
        turn.map(|it| Phase(it.first))
    }

    /// The least number of nano-batches in a turn: if it is above 1, one nano-batch can compute
    /// while another one travels.
    pub fn together(&self) -> usize {
        self.turns.iter().map(|it| it.turn.nanos.len()).min().unwrap_or(0)
    }
}

fn way(direction: Direction) -> usize {
    match direction {
        Direction::Forward => 0,
        Direction::Backward => 1,
    }
}

impl Which {
    /// How many of `layers` they are.
    fn count(&self, layers: u16) -> usize {
        match self {
            Self::All => layers.into(),
            Self::Only(some) => some.len(),
        }
    }

    /// Which of them a layer is, the lowest first.
    fn place(&self, layer: u16, layers: u16) -> Option<usize> {
        match self {
            Self::All => (layer < layers).then_some(layer.into()),
            Self::Only(some) => some.binary_search(&layer).ok(),
        }
    }

    /// The layer at a place.
    fn nth(&self, place: usize) -> usize {
        match self {
            Self::All => place,
            Self::Only(some) => some[place].into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;

    fn order(turns: &Turns, layers: u16) -> PhaseOrder {
        PhaseOrder::new(turns, layers, turns.nanos().into()).unwrap()
    }

    /// As `F0.1`, layer and nano-batch.
    fn written(order: &PhaseOrder) -> String {
        let letter = |it: PhaseAt| if it.direction == Direction::Forward { "F" } else { "B" };
        let one = |it: PhaseAt| format!("{}{}.{}", letter(it), it.layer, it.nano);
        order.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn phases_come_as_their_turns_say() {
        let number = |it| NonZeroU16::new(it).unwrap();
        let two = order(&Turns::together(number(2)), 2);
        assert_eq!(written(&two), "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1");
        assert_eq!((two.first(Direction::Backward), two.together()), (Some(Phase(4)), 2));
        let summed = order(&Turns::accumulated(number(2), number(1)).unwrap(), 2);
        assert_eq!(written(&summed), "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1");
        assert_eq!((summed.first(Direction::Backward), summed.together()), (Some(Phase(2)), 1));
        let forward = order(&Turns::forward(number(1)), 3);
        assert_eq!(written(&forward), "F0.0 F1.0 F2.0");
        let firsts = [Direction::Forward, Direction::Backward].map(|it| forward.first(it));
        assert_eq!(
            firsts,
            [Some(Phase(0)), None],
            "a step that does not go back has no such phase"
        );
        let turn =
            |direction, nanos: &[u16], layers| Turn { direction, nanos: nanos.to_vec(), layers };
        let frozen = Turns::new(vec![
            turn(Direction::Forward, &[1], Which::All),
            turn(Direction::Forward, &[0], Which::Only(vec![0, 2])),
            turn(Direction::Backward, &[0, 1], Which::Only(vec![0, 2])),
        ]);
        let frozen = order(&frozen.unwrap(), 3);
        assert_eq!(written(&frozen), "F0.1 F1.1 F2.1 F0.0 F2.0 B2.0 B2.1 B0.0 B0.1");
        let never = PhaseAt { layer: 1, nano: 0, direction: Direction::Forward };
        assert_eq!(frozen.index(never), None);
    }

    #[test]
    fn turns_of_other_layers_or_nano_batches_are_refused_by_name() {
        let turn = |direction, layers: &[u16]| {
            let layers = if layers.is_empty() { Which::All } else { Which::Only(layers.to_vec()) };
            Turn { direction, nanos: vec![0], layers }
        };
        let check = |forward: &[u16], backward: &[u16], nanos, expected: Error, words: &str| {
            let both = vec![turn(Direction::Forward, forward), turn(Direction::Backward, backward)];
            let refused = PhaseOrder::new(&Turns::new(both).unwrap(), 3, nanos).unwrap_err();
            assert!(refused.to_string().starts_with(words), "{refused}");
            assert_eq!(refused, expected);
        };
        let (turn, layers) = (1, 3);
        let listed = Error::NoSuchLayer { turn, layer: 3, layers };
        check(&[], &[1, 3], 1, listed, "turn 1 lists layer 3, and there are 3");
        let all = Error::All { turn, layers };
        check(
            &[],
            &[0, 1, 2],
            1,
            all,
            "turn 1 lists each of the 3 layers with core attention; say",
        );
        let left = Error::NotForward { turn, nano: 0, layer: 1 };
        check(&[0, 2], &[], 1, left.clone(), "turn 1 takes nano-batch 0 backward through layer 1");
        check(&[0, 2], &[1, 2], 1, left, "turn 1 takes nano-batch 0 backward through layer 1");
        for held in [0, 2] {
            let other = Error::Nanos { turns: 1, held };
            check(&[], &[], held, other, "turns take 1 nano-batches, and ranks announced");
        }
    }
}
