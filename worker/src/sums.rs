//! dK and dV of a trainer's rows in one phase, summed while their parts come.
//!
//! In: one part for each bundle that gives this trainer results, in any order. Out: the sums, once all are there. A part is
//! added, and its memory is free, as soon as the parts of all earlier bundles of its document are: rows of other documents have
//! nothing to do with it.
//!
//! ```text
//! part ──earlier bundles of its document are added──▶ added, dropped
//!   └────one of them is not here yet────▶ waits for it
//! ```
//!
//! Invariant: every row adds its parts in the order of bundles (slot, then first KV head), whatever came first.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use cadre_kernels::device;
use cadre_planner::{BundleId, DocumentId, RankId};
use cadre_protocol::TrainerId;
use cadre_step::lowering::KeyRows;
use cadre_step::phases::Direction;
use cadre_step::planned::NanoPlan;

use crate::io::whole::Values;
use crate::memory::{Memory, Place as _};

/// See the module.
#[derive(Debug)]
pub(crate) struct Sums<M: Memory> {
    rank: RankId,
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// Bundles whose parts are not added, by document, in their order.
    due: BTreeMap<DocumentId, VecDeque<BundleId>>,
    /// Parts that came before an earlier one of their document.
    waiting: BTreeMap<BundleId, Values<M>>,
}

impl<M: Memory> Sums<M> {
    /// Nothing is added yet.
    pub(crate) fn new(nano: &NanoPlan, rank: RankId) -> Self {
        let heads = nano.problem.heads;
        let width = usize::from(heads.kv) * usize::from(heads.dim);
        let numbers = nano.problem.layout.rank_rows(rank) as usize * width;
        let mut due = BTreeMap::<_, VecDeque<_>>::new();
        // Backward a work is a bundle.
        for work in nano.shape(Direction::Backward).wants(TrainerId(rank.0 as u16)) {
            let document = nano.plan.bundles()[work.0 as usize].document;
            due.entry(document).or_default().push_back(BundleId(work.0));
        }
        let (dk, dv) = (vec![0.0; numbers], vec![0.0; numbers]);
        Self { rank, dk, dv, due, waiting: BTreeMap::new() }
    }

    /// Takes the part of a bundle, and adds all parts whose turn has come.
    ///
    /// # Errors
    ///
    /// Those of memory on the GPU.
    ///
    /// # Panics
    ///
    /// The bundle gives this trainer nothing, or its part has come before.
    pub(crate) fn put(
        &mut self,
        (place, nano): (&M::Place, &NanoPlan),
        bundle: BundleId,
        values: Values<M>,
    ) -> Result<(), device::Error> {
        let document = nano.plan.bundles()[bundle.0 as usize].document;
        // They ascend.
        let due = self.due.get(&document).is_some_and(|it| it.binary_search(&bundle).is_ok());
        assert!(due && self.waiting.insert(bundle, values).is_none(), "each part comes once");
        while let Some(&next) = self.due.get(&document).and_then(VecDeque::front)
            && let Some(values) = self.waiting.remove(&next)
        {
            self.add((place, nano), next, values)?;
            if let Some(due) = self.due.get_mut(&document) {
                due.pop_front();
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        (place, nano): (&M::Place, &NanoPlan),
        bundle: BundleId,
        values: Values<M>,
    ) -> Result<(), device::Error> {
        let heads = nano.problem.heads;
        let dim = usize::from(heads.dim);
        let group = &nano.plan.bundles()[bundle.0 as usize].kv_heads;
        let first = usize::from(group.start) * dim;
        let (kv_heads, width) = (group.len(), usize::from(heads.kv) * dim);
        // A row of dK or dV has its KV heads side by side; a part has all rows of a head before those of the next.
        let add = |to: &mut [f32], local: &Range<u32>, from: &[f32], (at, distance)| {
            for head in 0..kv_heads {
                let from = from[(at + head * distance) * dim..].chunks_exact(dim);
                for (row, from) in local.clone().zip(from) {
                    let to = &mut to[row as usize * width + first + head * dim..][..dim];
                    for (to, from) in to.iter_mut().zip(from) {
                        *to += from;
                    }
                }
            }
        };
        // Sums are the processor's.
        match values {
            Values::Landed(room, result) => {
                let landed = place.unload(room)?;
                let (dk, dv) = landed.f32s().split_at(landed.f32s().len() / 2);
                let mut at = 0;
                for KeyRows { local, .. } in &result.keys {
                    add(&mut self.dk, local, dk, (at, local.len()));
                    add(&mut self.dv, local, dv, (at, local.len()));
                    at += local.len() * kv_heads;
                }
            }
            Values::Own([dk, dv]) => {
                let result =
                    nano.lists.backward_result(&nano.problem, &nano.plan, bundle, self.rank);
                let keys = nano.plan.bundles()[bundle.0 as usize].keys.len();
                for (to, from) in [(&mut self.dk, dk), (&mut self.dv, dv)] {
                    let from = place.read(&from)?;
                    for KeyRows { local, first } in &result.keys {
                        add(to, local, from.f32s(), (*first as usize, keys));
                    }
                }
            }
        }
        Ok(())
    }

    /// dK and dV, once every part has come.
    ///
    /// # Panics
    ///
    /// One has not.
    pub(crate) fn finish(self) -> (Vec<f32>, Vec<f32>) {
        let all = self.due.values().all(VecDeque::is_empty) && self.waiting.is_empty();
        assert!(all, "a phase is whole when all its parts have come");
        (self.dk, self.dv)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::sync::Arc;

    use cadre_crds::Wire;
    use cadre_exchange::{Buffer, Piece};
    use cadre_planner::{Costs, Document, Heads, Layout, Links, Mask, Slot, Tolerance};
    use cadre_step::header::{Header, KvHeads, Placement, ViewNumber};
    use cadre_step::layers::{Kind, Layers};
    use cadre_step::packing::Packing;
    use cadre_step::planned::PlannedStep;
    use cadre_step::turns::Turns;
    use proptest::prelude::*;

    use super::*;
    use crate::memory::{Host, HostRows, copy};

    const HEADS: Heads = Heads { query: 4, kv: 2, dim: 4 };

    /// Documents end to end over trainers of so many rows, on three servers.
    fn planned(documents: &[u32], rows: u32) -> PlannedStep {
        let document = |&rows| Document { rows, mask: Mask::Causal };
        let layout = Layout::end_to_end(documents.iter().map(document).collect(), rows).unwrap();
        let slot = Slot { weight: 100, head_start: 0, home: None, memory: 1 << 30 };
        let header = Header {
            step: 5,
            layers: Layers::alike(Kind::causal(HEADS), 1).unwrap(),
            kv_heads: KvHeads::Apart,
            wire: Wire::F32,
            seed: 0,
            numerics: "test".into(),
            placement: Placement::Pool,
            slots: vec![slot; 3],
            costs: vec![Costs { task_rows: 128, ..Costs::default() }],
            tolerance: Tolerance::USUAL,
            links: Links::equal(),
            turns: Turns::together(NonZeroU16::MIN),
            nanos: vec![Packing::from(&layout)],
            view: ViewNumber::default(),
            fillers: vec![None; 3],
        };
        PlannedStep::new(Arc::new(header)).unwrap()
    }

    /// dK or dV that a bundle's server would give: other numbers in every bundle, row and `scale`.
    fn made(nano: &NanoPlan, bundle: BundleId, scale: f32) -> Buffer {
        let whole = &nano.plan.bundles()[bundle.0 as usize];
        let dim = usize::from(HEADS.dim);
        let mut buffer = Buffer::zeroed(whole.keys.len() * whole.kv_heads.len() * dim * 4);
        for (index, value) in buffer.f32s_mut().iter_mut().enumerate() {
            *value = scale * (1.0 + bundle.0 as f32 * 7.0) / (1.0 + index as f32);
        }
        buffer
    }

    fn part(nano: &NanoPlan, rank: RankId, bundle: BundleId, landed: bool) -> Values<HostRows> {
        let (dk, dv) = (made(nano, bundle, 1.0), made(nano, bundle, -3.0));
        if !landed {
            return Values::Own([dk, dv].map(Arc::new));
        }
        let result = nano.lists.backward_result(&nano.problem, &nano.plan, bundle, rank);
        let mut room = Buffer::zeroed(2 * result.part_bytes as usize);
        let behind = |it: &Piece| Piece { local: it.local + result.part_bytes, ..*it };
        copy(&dk, &result.part, &mut room);
        copy(&dv, &result.part.iter().map(behind).collect::<Vec<_>>(), &mut room);
        Values::Landed(room, result)
    }

    /// The sum of what all bundles give to a trainer's rows, bundle after bundle and number after number.
    fn one_by_one(nano: &NanoPlan, rank: RankId, scale: f32) -> Vec<u32> {
        let (dim, all) = (usize::from(HEADS.dim), usize::from(HEADS.kv));
        let rows = nano.problem.layout.rank_rows(rank) as usize;
        let mut sums = vec![0.0_f32; rows * all * dim];
        for (index, bundle) in (0..).map(BundleId).zip(nano.plan.bundles()) {
            let values = made(nano, index, scale);
            let mut values = values.f32s().iter();
            for head in bundle.kv_heads.clone() {
                for key in bundle.keys.clone() {
                    let at =
                        nano.problem.layout.locate(bundle.document, key..key + 1).next().unwrap();
                    for (column, value) in values.by_ref().take(dim).enumerate() {
                        if at.rank == rank {
                            let row = at.local.start as usize;
                            sums[(row * all + usize::from(head)) * dim + column] += value;
                        }
                    }
                }
            }
        }
        sums.into_iter().map(f32::to_bits).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn parts_in_any_order_give_the_bits_of_one_by_one_and_none_waits_that_could_be_added(
            documents in prop::collection::vec(1_u32..1_200, 1..5),
            order in prop::collection::vec(any::<u32>(), 64),
            landed in any::<u64>(),
        ) {
            let rows = documents.iter().sum::<u32>().div_ceil(3);
            let planned = planned(&documents, rows);
            let nano = &planned.plans[0];
            let with = (&Host, nano);
            for rank in (0..nano.problem.layout.ranks().len() as u32).map(RankId) {
                let mut sums = Sums::new(nano, rank);
                let mut coming: Vec<BundleId> = sums.due.values().flatten().copied().collect();
                coming.sort_by_key(|it| order.get(it.0 as usize).copied());
                let mut here = Vec::new();
                for &bundle in &coming {
                    let from = part(nano, rank, bundle, landed >> (bundle.0 % 64) & 1 == 1);
                    sums.put(with, bundle, from).unwrap();
                    here.push(bundle);
                    let document = |it: &BundleId| nano.plan.bundles()[it.0 as usize].document;
                    let lacks = |it: &BundleId| {
                        let before = |other: &&BundleId| {
                            **other < *it && document(other) == document(it)
                        };
                        coming.iter().filter(before).any(|it| !here.contains(it))
                    };
                    let waiting: Vec<_> = sums.waiting.keys().copied().collect();
                    let mut expected: Vec<_> = here.iter().copied().filter(lacks).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(waiting, expected);
                }
                let (dk, dv) = sums.finish();
                let bits = |it: Vec<f32>| it.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                prop_assert!(bits(dk) == one_by_one(nano, rank, 1.0), "dK of {rank:?}");
                prop_assert!(bits(dv) == one_by_one(nano, rank, -3.0), "dV of {rank:?}");
            }
        }
    }
}
