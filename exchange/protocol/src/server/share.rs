//! What a table gives to this server: its bundles of every phase.
//!
//! In: tables of a step, when it begins and after every round. Out: bundles that wait for room.
//!
//! A bundle that alone is larger than the memory would wait for ever. It comes only if the planner was told of
//! more memory than there is: the server ends and says so.
//!
//! Guarantees: a table is asked once for each bundle of a shape, however many phases run that shape. What
//! follows is in proportion to this server's own bundles, not to those of all.

use super::Server;
use crate::{At, Bundle, End, RoundTable, Step};

impl Server {
    /// Takes on every bundle that `table` gives to this server and `before` did not. Only what the header
    /// gives has planned room.
    pub(super) fn take(
        &mut self,
        step: &Step,
        before: Option<&RoundTable>,
        table: &RoundTable,
    ) -> Result<(), End> {
        let me = self.host.peer();
        let first = match self.watermark {
            // A round may come for a step that is passed and still held.
            Some(at) if at.step > step.number() => step.phases(),
            Some(at) if at.step == step.number() => at.phase.0.saturating_add(1),
            Some(_) | None => 0,
        };
        let is_new = |index, bundle| {
            let mine = |it: &RoundTable| it.executor(index, bundle) == Some(me);
            mine(table) && !before.is_some_and(mine)
        };
        for (at, bundle) in new_bundles(step, first, is_new) {
            let (index, shape) = (step.shape_index(at.phase), step.shape(at.phase));
            let slot = shape.bundles()[bundle.0 as usize].slot;
            let home = table.assignments[index][bundle.0 as usize] == Some(slot);
            let planned = before.is_none() && home;
            self.rooms.expect(at, bundle, shape.bundle_bytes(bundle), planned)?;
        }
        Ok(())
    }
}

/// Bundles of the phases from `first` on that `is_new`, which is asked by the index of a shape and a bundle of it.
fn new_bundles(
    step: &Step,
    first: u32,
    is_new: impl Fn(usize, Bundle) -> bool,
) -> impl Iterator<Item = (At, Bundle)> {
    let of_shape = |(index, shape): (usize, &std::sync::Arc<crate::Shape>)| {
        shape.bundle_ids().filter(|&it| is_new(index, it)).collect::<Vec<_>>()
    };
    let by_shape: Vec<_> = step.shapes().iter().enumerate().map(of_shape).collect();
    (first..step.phases()).flat_map(move |phase| {
        let at = At::new(step.number(), phase);
        let bundles = by_shape[step.shape_index(at.phase)].clone();
        bundles.into_iter().map(move |bundle| (at, bundle))
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::{BundleShape, Parcel, ParcelShape, Round, Shape, Slot, TrainerId, WorkShape};

    /// A step whose phases take turns at shapes of so many bundles, each on the slot of its number modulo `slots`.
    fn step(bundles: &[u32], phases: u32, slots: u32) -> Step {
        let shape = |&count: &u32| {
            let bundle = |it| BundleShape { slot: Slot((it % slots) as u16) };
            let parcel = |it| ParcelShape { bundle: Bundle(it), from: TrainerId(0), bytes: 8 };
            let work = |it| WorkShape {
                bundle: Bundle(it),
                needs: vec![Parcel(it)],
                results: vec![(TrainerId(0), 8)],
            };
            let (all, parcels) = ((0..count).map(bundle), (0..count).map(parcel));
            let works = (0..count).map(work).collect();
            Arc::new(Shape::new(all.collect(), works, parcels.collect()).unwrap())
        };
        let shapes: Vec<_> = bundles.iter().map(shape).collect();
        let at_home = |it: &Arc<Shape>| it.bundles().iter().map(|it| Some(it.slot)).collect();
        let assignments = shapes.iter().map(at_home).collect();
        let fillers = vec![None; slots as usize];
        let table = RoundTable { step: 3, round: Round(0), fillers, assignments };
        let phases = (0..phases).map(|it| (it as usize % shapes.len()) as u16).collect();
        Step::new(1, 0, shapes, phases, table).unwrap()
    }

    #[test]
    fn a_table_is_asked_once_for_each_bundle_of_a_shape_however_many_phases_run_it() {
        let shapes = [7, 40, 12];
        for (phases, first) in [(3, 0), (3, 2), (24, 5), (1_536, 0), (1_536, 1_000)] {
            let step = step(&shapes, phases, 5);
            let asked = Cell::new(0_u32);
            let mine = |index: usize, bundle: Bundle| {
                asked.set(asked.get() + 1);
                step.shapes()[index].bundles()[bundle.0 as usize].slot == Slot(2)
            };
            let found: Vec<_> = new_bundles(&step, first, mine).collect();
            assert_eq!(asked.get(), shapes.iter().sum::<u32>(), "{phases} phases");
            // What a walk over all bundles of all phases finds.
            let all = (first..phases).map(|it| At::new(3, it)).flat_map(|at| {
                let bundles = step.shape(at.phase).bundles().iter().zip((0..).map(Bundle));
                bundles.filter(|it| it.0.slot == Slot(2)).map(move |it| (at, it.1))
            });
            assert_eq!(found, all.collect::<Vec<_>>(), "{phases} phases");
        }
    }
}
