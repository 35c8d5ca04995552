//! Hands works to the threads that compute, with their rows.
//!
//! In: which works the machine wants to run. Out: [`Output::Ready`]. What a work gave comes back to [`super::Tasks`].
//!
//! Invariant: a work goes out with rows that nobody writes any more (those of its whole bundle, or a copy of its own), or with
//! a promise.

use std::sync::Arc;

use cadre_protocol::server::Host;
use cadre_protocol::{At, Bundle, Filler, Work as WorkId};
use cadre_step::planned::{PlannedStep, filler};

use super::super::exchange::Exchange;
use super::super::gather;
use super::super::output::{Output, Planned};
use super::super::shared::Shared;
use super::Tasks;
use crate::launch::{BundleRows, Promise, Work};
use crate::memory::Memory;

impl<M: Memory> Tasks<M> {
    pub(super) fn run_ahead(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        at: At,
        works: &[WorkId],
    ) {
        let Some(first) = works.first() else { return };
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let bundle = planned.bundle_of(at.phase, first.0);
        let held = self.held.get_mut(&(at, bundle)).expect("a ready work has its parcels");
        let rows = match gather::ahead(shared, &planned, at, (works, held.landing)) {
            Ok(rows) => rows,
            Err(why) => return shared.broke(&why),
        };
        held.ahead.extend(works);
        for &work in works {
            self.hand_out(shared, (&planned, at), (work, rows.clone()), None);
        }
    }

    /// A work reads its rows no more.
    pub(super) fn over(&mut self, planned: &PlannedStep, at: At, work: WorkId) {
        if let Some(held) = self.held.get_mut(&(at, planned.bundle_of(at.phase, work.0))) {
            held.ahead.remove(&work);
        }
    }

    pub(super) fn hand_out(
        &self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        (planned, at): (&Arc<PlannedStep>, At),
        (work, rows): (WorkId, BundleRows<M>),
        promise: Option<Promise>,
    ) {
        let (planned, phase) = (Arc::clone(planned), at.phase);
        let work = Box::new(Work { planned, phase, work: work.0, rows, promise });
        let home = self.planned(&work);
        shared.outputs.put(Output::Ready(work, home));
    }

    /// Whether a work was planned for this server, and so is for the thread that waits in its phase.
    pub fn planned(&self, work: &Work<M>) -> Planned {
        let Work { planned, phase, work, .. } = work;
        let bundle = planned.bundle_of(*phase, *work);
        let slot = planned.slot_of(*phase, Bundle(bundle.0));
        let member = planned.header.fillers[usize::from(slot.0)].as_ref().map(filler);
        let mine = match self.host {
            Host::Dedicated(me) => Filler::Server(me),
            Host::InPlace(me) => Filler::InPlace(me),
        };
        // Nobody waits in a phase of which this rank has no rows.
        let waits = match self.host {
            Host::Dedicated(_) => true,
            Host::InPlace(me) => planned.has_rows(planned.order.at(*phase).nano, me.0),
        };
        if member == Some(mine) && waits { Planned::Here } else { Planned::Elsewhere }
    }
}
