//! Rows of bundles on their way to a server: pulled into one landing a bundle, tried again, let go.
//!
//! In: pulls that the machine begins, and how they end. Out: pulls of the exchange; works that go out behind copies of a device.
//!
//! Invariant: the landing of a bundle stays as long as the machine tries its pulls again, where the exchange goes on then.

use std::sync::Arc;

use cadre_planner::BundleId;
use cadre_protocol::{At, Nanos, Parcel, Peer, PullFailure, PullId, TrainerId, Work as WorkId};
use cadre_step::phases::Direction;

use super::super::exchange::Exchange;
use super::super::gather;
use super::super::output::Side;
use super::super::shared::{Shared, rows_key};
use super::{Brings, Tasks};
use crate::memory::Memory;

impl<M: Memory> Tasks<M> {
    pub(super) fn pull(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        pull: PullId,
        (from, deadline): (TrainerId, Nanos),
        at: At,
        parcel: Parcel,
    ) {
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let (nano, direction) = planned.nano_of(at.phase);
        let (bundle, source) = nano.lists.parcel(parcel, direction);
        let held = self.held.entry((at, bundle)).or_default();
        held.parcels += 1;
        let mine = Peer::Trainer(from) == shared.me;
        let all = source.bytes;
        self.pulls.insert(pull, Brings { at, bundle, bytes: if mine { 0 } else { all } });
        if mine {
            let here = shared.rows.contains_key(&at);
            if here {
                held.early.begin(pull);
            }
            let result = if here { Ok(shared.me.incarnation()) } else { Err(PullFailure::Gone) };
            return shared.ended(Side::Server, pull, result);
        }
        let landed = held
            .landing
            .map_or_else(|| shared.provider.land(nano.lists.inputs(bundle, direction).bytes), Ok);
        let landing = match landed {
            Ok(landing) => landing,
            Err(why) => {
                shared.broke(&why);
                return shared.ended(Side::Server, pull, Err(PullFailure::Gone));
            }
        };
        held.landing = Some(landing);
        let parts = source
            .tensors()
            .map(|(tensor, pieces)| (rows_key(at, tensor), pieces.to_vec(), landing));
        shared.pull((Side::Server, pull), Peer::Trainer(from), parts.collect(), deadline);
    }

    /// A pull of a bundle failed. The machine tries it again unless the phase is passed: until then what has landed stays.
    pub(super) fn brought_nothing(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        at: At,
        bundle: BundleId,
    ) {
        let again = self.machine.watermark() < Some(at) && shared.provider.resumes();
        match self.held.get_mut(&(at, bundle)) {
            Some(held) if again => held.parcels -= 1,
            Some(_) | None => self.let_go(shared, at, bundle),
        }
    }

    /// One parcel of a bundle is needed no more.
    pub(super) fn let_go(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        at: At,
        bundle: BundleId,
    ) {
        let Some(held) = self.held.get_mut(&(at, bundle)) else { return };
        held.parcels -= 1;
        if held.parcels == 0 {
            let held = self.held.remove(&(at, bundle)).expect("it was there a moment ago");
            if let Some(landing) = held.landing {
                shared.provider.discard(landing);
            }
        }
    }

    /// All copies of a pull are under way: if it was the last of its bundle's, works can be put behind them.
    pub fn begun(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, pull: PullId) {
        let Some(&Brings { at, bundle, .. }) = self.pulls.get(&pull) else { return };
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let (nano, direction) = planned.nano_of(at.phase);
        let held = self.held.get_mut(&(at, bundle)).expect("a pull has a bundle that is held");
        held.early.begin(pull);
        let Some(landing) = held.landing else { return };
        if !held.early.is_due(nano.lists.inputs(bundle, direction).sources.len()) {
            return;
        }
        let rows = match gather::early(shared, &planned, at, bundle, landing) {
            Ok(Some(rows)) => rows,
            Ok(None) => return,
            Err(why) => return shared.broke(&why),
        };
        held.rows = Some(rows.clone());
        let works: Vec<_> = match direction {
            Direction::Forward => nano.plan.bundles()[bundle.0 as usize].tasks.clone().collect(),
            Direction::Backward => vec![bundle.0],
        };
        for (work, promise) in held.early.go(works.into_iter().map(WorkId)) {
            self.hand_out(shared, (&planned, at), (work, rows.clone()), Some(promise));
        }
    }

    /// A pull brought nothing: what was put behind its copies counts no more.
    pub(super) fn spoil(&mut self, of: (At, BundleId), pull: PullId) {
        let Some(held) = self.held.get_mut(&of) else { return };
        if held.early.spoil(pull) {
            held.rows = None;
            tracing::debug!(
                "works on rows of {of:?} went out early for nothing: rows are pulled anew"
            );
        }
    }
}
