//! The job that strangers talk to: three trainers, two servers, and steps of three phases.

use std::sync::Arc;

use cadre_protocol::{
    Bundle, BundleShape, Filler, Fillers, Parcel, ParcelShape, Round, RoundTable, ServerId, Shape,
    Slot, Step, TrainerId, WorkShape, alive,
};

pub(crate) const TRAINERS: u16 = 3;
pub(crate) const PHASES: u32 = 3;
pub(crate) const ME: TrainerId = TrainerId(1);
pub(crate) const SERVER: ServerId = ServerId { index: 0, incarnation: 0 };

pub(crate) fn fillers() -> Fillers {
    let other = ServerId { index: 1, incarnation: 0 };
    vec![Some(Filler::Server(SERVER)), Some(Filler::Server(other)), Some(Filler::InPlace(ME))]
}

/// A step of three bundles, one a slot, each with rows and results of two trainers.
pub(crate) fn step(number: u64) -> Arc<Step> {
    let (mut parcels, mut works, mut bundles) = (Vec::new(), Vec::new(), Vec::new());
    for bundle in (0..3).map(Bundle) {
        bundles.push(BundleShape { slot: Slot(bundle.0 as u16) });
        let first = parcels.len() as u32;
        let trainers = [TrainerId(bundle.0 as u16), TrainerId((bundle.0 as u16 + 1) % TRAINERS)];
        parcels.extend(trainers.map(|from| ParcelShape { bundle, from, bytes: 10 }));
        let needs = vec![Parcel(first), Parcel(first + 1)];
        works.push(WorkShape { bundle, needs, results: trainers.map(|it| (it, 5)).to_vec() });
        works.push(WorkShape {
            bundle,
            needs: vec![Parcel(first)],
            results: vec![(trainers[0], 5)],
        });
    }
    let shape = Arc::new(Shape::new(bundles, works, parcels).expect("it is well made"));
    let table = table(number, &[]);
    let phases = vec![0; PHASES as usize];
    Arc::new(Step::new(TRAINERS, number, vec![shape], phases, table).expect("it is well made"))
}

/// What a shell makes of a round: every bundle in its slot, or in the first that is alive.
pub(crate) fn table(step: u64, tables: &[Fillers]) -> RoundTable {
    let fillers = tables.last().cloned().unwrap_or_else(fillers);
    let alive = alive(&fillers);
    let first = alive.iter().position(|it| *it).map(|it| Slot(it as u16));
    let slot = |it: usize| if alive[it] { Some(Slot(it as u16)) } else { first };
    let assignments = vec![(0..3).map(slot).collect()];
    RoundTable { step, round: Round(tables.len() as u32), fillers, assignments }
}
