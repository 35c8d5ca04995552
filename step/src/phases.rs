//! The order of phases in a step.
//!
//! A phase is (layer, nano-batch, direction). Forward runs layers upwards, backward downwards; in
//! both, nano-batches take turns, so that one computes while the other travels (ping-pong).
//! Everyone numbers phases by this order: the trainer's calls, the protocol and the messages.

pub use cadre_planner::Direction;
use cadre_protocol::Phase;

/// One phase, as the model sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PhaseAt {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Nano-batch, counted from 0.
    pub nano: usize,
    /// Way through the model.
    pub direction: Direction,
}

/// Numbers the phases of a step of `layers` layers and `nanos` nano-batches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PhaseOrder {
    /// Layers of the model.
    pub layers: usize,
    /// Nano-batches of a step.
    pub nanos: usize,
}

impl PhaseOrder {
    /// Phases in a step.
    pub fn count(self) -> usize {
        2 * self.layers * self.nanos
    }

    /// Place of a phase in the step's order.
    pub fn index(self, at: PhaseAt) -> Phase {
        let turn = match at.direction {
            Direction::Forward => at.layer,
            Direction::Backward => 2 * self.layers - 1 - at.layer,
        };
        Phase((turn * self.nanos + at.nano) as u32)
    }

    /// The phase at a place of the step's order.
    pub fn at(self, phase: Phase) -> PhaseAt {
        let (turn, nano) = (phase.0 as usize / self.nanos, phase.0 as usize % self.nanos);
        if turn < self.layers {
            PhaseAt { layer: turn, nano, direction: Direction::Forward }
        } else {
            PhaseAt { layer: 2 * self.layers - 1 - turn, nano, direction: Direction::Backward }
        }
    }

    /// Number of forward phases; the backward ones follow.
    pub fn forward(self) -> usize {
        self.layers * self.nanos
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbering_and_its_inverse_agree() {
        let order = PhaseOrder { layers: 3, nanos: 2 };
        for index in 0..order.count() as u32 {
            assert_eq!(order.index(order.at(Phase(index))), Phase(index));
        }
        let first_back = order.at(Phase(order.forward() as u32));
        let expected = PhaseAt { layer: 2, nano: 0, direction: Direction::Backward };
        assert_eq!(first_back, expected);
    }
}
