//! Merges what has landed for a rank: adds parts of dK and dV, writes whole phases where the caller wants them.
//!
//! In: parts of dK and dV as they come, phases that are whole. Out: results in the rows of the caller, and which of them is not
//! finite. It waits for nothing; [`super::waiting`] knows when a phase is whole. Invariant: the lock is free while results are
//! written, so parts of other phases are added meanwhile.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cadre_kernels::device;
use cadre_planner::RankId;
use cadre_protocol::{At, TrainerId};
use cadre_step::phases::PhaseAt;
use cadre_step::planned::PlannedStep;

use super::call::{Error, Outputs, Sizes};
use super::lock;
use crate::heads::HeadByHead;
use crate::io::whole::{Landed, Part, Whole};
use crate::memory::{Memory, Place as _};
use crate::merge::{self, NotFinite};
use crate::sums::Sums;
use crate::wire::Values;

/// See the module.
pub(super) struct Merging<M: Memory> {
    me: TrainerId,
    kept: Mutex<Kept<M>>,
}

struct Kept<M: Memory> {
    place: M::Place,
    /// dK and dV of phases so far, or why the GPU did not give a part of them.
    sums: BTreeMap<At, Result<Sums<M>, device::Error>>,
}

impl<M: Memory> Merging<M> {
    /// Of rank `me`, whose rows live in `place`.
    pub(super) fn new(me: TrainerId, place: M::Place) -> Self {
        Self { me, kept: Mutex::new(Kept { place, sums: BTreeMap::new() }) }
    }

    /// Writes the results of a whole phase; which of them is not finite, if any.
    ///
    /// # Errors
    ///
    /// [`Error::Device`].
    pub(super) fn write(
        &self,
        planned: &PlannedStep,
        phase: PhaseAt,
        whole: Whole<M>,
        (sizes, outputs): (&Sizes, Outputs<'_>),
    ) -> Result<Option<Error>, Error> {
        let at = whole.at;
        let device = |source| {
            let source = Box::new(source);
            Error::Device { rank: self.me.0, phase: phase.in_words(at.step), source }
        };
        let not_finite = |source: NotFinite| Error::NotFinite {
            rank: self.me.0,
            phase: phase.in_words(at.step),
            source: Box::new(source),
        };
        let (nano, _) = planned.nano_of(at.phase);
        let rank = RankId(self.me.0.into());
        let form = HeadByHead::of(nano, rank);
        let mut kept = lock(&self.kept);
        let Kept { place, sums } = &mut *kept;
        let checked = match (whole.landed, outputs) {
            (
                Landed::Forward { o: mut landed, lse: mut landed_lse, own },
                Outputs::Forward { o, lse },
            ) => {
                for (work, [own, own_lse]) in &own {
                    let task = (work.0 as usize, rank);
                    let to = (&mut landed, &mut landed_lse);
                    merge::own_forward(place, nano, task, (own, own_lse), to).map_err(device)?;
                }
                let landed = place.unload(landed).map_err(device)?;
                let landed_lse = place.unload(landed_lse).map_err(device)?;
                drop(kept);
                let values = Values::of(sizes.wire, &landed);
                let sums = landed_lse.f32s();
                let all = o.write_turned(values, &form, sizes.query());
                if lse.0.write_turned(Values::F32(sums), &form, sizes.query_heads) && all {
                    Ok(())
                } else {
                    let both = [&values.wide()[..], sums];
                    merge::check_forward(planned, at, rank, both, &whole.makers)
                }
            }
            (Landed::Backward { dq: mut landed, own }, Outputs::Backward { dq, dk, dv }) => {
                for (bundle, own) in &own {
                    let of = (*bundle, rank);
                    merge::own_backward(place, nano, of, own, &mut landed).map_err(device)?;
                }
                let sums = sums.remove(&at).unwrap_or_else(|| Ok(Sums::new(nano, rank)));
                let landed = place.unload(landed).map_err(device)?;
                drop(kept);
                let (sum_k, sum_v) = sums.map_err(device)?.finish();
                let values = Values::of(sizes.wire, &landed);
                let all = dq.write_turned(values, &form, sizes.query());
                let all = dk.write(&sum_k, sizes.kv()) && all;
                if dv.write(&sum_v, sizes.kv()) && all {
                    Ok(())
                } else {
                    let all = [&values.wide()[..], &sum_k, &sum_v];
                    merge::check_backward(planned, at, rank, all, &whole.makers)
                }
            }
            (Landed::Forward { .. } | Landed::Backward { .. }, _) => {
                unreachable!("the phase's direction was checked, and it lands what it is")
            }
        };
        Ok(checked.err().map(not_finite))
    }

    /// Adds a part of dK and dV, or keeps it until those before it have come;
    /// `begun` is the last step that has begun.
    pub(super) fn add(&self, part: Part<M>, begun: Option<u64>) {
        let Part { planned, phase, bundle, values } = part;
        let at = At { step: planned.header.step, phase };
        let (nano, _) = planned.nano_of(phase);
        let mut kept = lock(&self.kept);
        let Kept { place, sums } = &mut *kept;
        // Of phases that nobody waited for.
        while sums.first_key_value().is_some_and(|it| Some(it.0.step) < begun) {
            sums.pop_first();
        }
        let new = || Ok(Sums::new(nano, RankId(self.me.0.into())));
        let sums = sums.entry(at).or_insert_with(new);
        if let Ok(it) = sums
            && let Err(why) = it.put((&*place, nano), bundle, values)
        {
            *sums = Err(why);
        }
    }
}
