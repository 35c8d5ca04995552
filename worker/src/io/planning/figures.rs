//! What the controller is told of a step's plans, computed where the step is planned: it takes as long as the step has documents.
//!
//! In: a planned step. Out: [`Figures`], which [`crate::io::conducting`] reports when the step is over.
//!
//! Invariant: the same plans give the same figures.

use cadre_planner::imbalance_at_home;
use cadre_step::certificate::Certificate;
use cadre_step::planned::PlannedStep;

/// What the controller is told of a step's plans.
#[derive(Clone, Debug)]
pub struct Figures {
    pub(in crate::io) header: String,
    pub(in crate::io) plans: u64,
    pub(in crate::io) imbalance_unplanned: f64,
    pub(in crate::io) certificate: Certificate,
}

impl Figures {
    /// Takes as long as the step has documents.
    pub fn of(planned: &PlannedStep) -> Self {
        let (most, mean) = at_home(planned);
        Self {
            header: planned.header.to_line(),
            plans: planned.plans_digest(),
            imbalance_unplanned: if mean > 0 { most as f64 / mean as f64 } else { 1.0 },
            certificate: Certificate::of(planned),
        }
    }
}

/// The most and the mean of the ranks' own attention cost in all phases of a step, if no row moved; in pairs times their head dim.
fn at_home(planned: &PlannedStep) -> (u128, u128) {
    planned.plans.iter().zip(planned.phases_of_plans()).fold((0, 0), |sum, (plan, phases)| {
        let cost = imbalance_at_home(&plan.problem).expect("a planned problem is sound");
        let phases = u128::from(phases) * u128::from(plan.dim());
        let all_phases = |it: u64| u128::from(it) * phases;
        (sum.0 + all_phases(cost.0), sum.1 + all_phases(cost.1))
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use cadre_planner::{Costs, DocumentId, Heads, Mask, Stretch};
    use cadre_step::header::Header;
    use cadre_step::layers::{Kind, Layers};
    use cadre_step::packing::Packing;
    use cadre_step::phases::Direction;
    use cadre_step::turns::{Turn, Turns, Which};

    use super::*;

    #[test]
    fn imbalance_without_a_pool_is_of_all_phases_by_their_own_kinds() {
        let any: Header =
            serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
        let causal = any.layers.kind_of(0);
        let near = Kind { mask: Mask::Window { left: 9 }, ..causal };
        let wide = Heads { query: 6, kv: 3, dim: 32 };
        let chunk = Kind { chunk: NonZeroU32::new(50), ..Kind::causal(wide) };
        let stretch = |start, end| vec![Stretch { document: DocumentId(0), start, end }];
        let nano =
            |rows: u32| Packing::new(&[rows], vec![stretch(0, 80), stretch(80, rows)]).unwrap();
        // The second nano-batch goes forward alone.
        let turn = |direction, nanos| Turn { direction, nanos, layers: Which::All };
        let both = [turn(Direction::Forward, vec![0, 1]), turn(Direction::Backward, vec![0])];
        let turns = Turns::new(both.to_vec()).unwrap();
        let header = Header {
            layers: Layers::new([near, causal, near, near, chunk]).unwrap(),
            nanos: vec![nano(200), nano(100)],
            turns,
            costs: vec![Costs { task_rows: any.costs[0].task_rows, ..Costs::pairs_only() }; 3],
            ..any
        };
        let planned = PlannedStep::new(Arc::new(header)).unwrap();
        let (mut most, mut mean) = (0, 0);
        for (end, ways) in [(200_u128, 2), (100, 1)] {
            // Keys of each row, one by one.
            let keys: [fn(u128) -> u128; 3] = [|it| it.min(9) + 1, |it| it + 1, |it| it % 50 + 1];
            // Query heads times their dim.
            for ((layers, heads), keys) in [(3, 32), (1, 32), (1, 192)].into_iter().zip(keys) {
                let of = |rows: std::ops::Range<u128>| heads * rows.map(keys).sum::<u128>();
                let (one, other) = (of(0..80), of(80..end));
                most += ways * layers * one.max(other);
                mean += ways * layers * one.midpoint(other);
            }
        }
        assert_eq!(at_home(&planned), (most, mean));
    }
}
