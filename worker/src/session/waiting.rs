//! The half of a session that waits: computes what is planned for this rank, merges what has landed.
//!
//! In: notices of the IO thread. Out: the next step, whole phases written where the caller wants them, the end of the job.
//!
//! Parts of dK and dV are added as they come ([`Sums`]).
//!
//! Invariant: a whole phase is written once all its parts are added.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::PeerId;
use cadre_kernels::device;
use cadre_planner::RankId;
use cadre_protocol::{At, Filler, TrainerId};
use cadre_step::envelope::Ending;
use cadre_step::planned::PlannedStep;

use super::call::{Error, Outputs, Sizes, name};
use super::rows::RowsMut;
use super::{Next, PhaseAt};
use crate::compute::{Compute, FLYING, Progress};
use crate::heads::HeadByHead;
use crate::io::queues::{Notices, Owed, lost};
use crate::io::rows::{Landed, Part, Whole};
use crate::io::{Handle, Notice, Request};
use crate::memory::{Memory, Place as _};
use crate::merge::{self, NotFinite};
use crate::sums::Sums;
use crate::trace::{Activity, Tracer};
use crate::wire::from_wire;

/// See the module.
pub(super) struct Waiting<M: Memory> {
    me: TrainerId,
    handle: Handle<M>,
    notices: Notices<M>,
    compute: Compute<M>,
    place: M::Place,
    tracer: Tracer,
    /// Steps that were announced and not yet begun.
    coming: BTreeMap<u64, Arc<PlannedStep>>,
    /// Where the ranks listen for each other, once known.
    addresses: Option<Vec<(PeerId, String)>>,
    whole: BTreeMap<At, Whole<M>>,
    /// dK and dV of phases so far, or why the GPU did not give a part of them.
    sums: BTreeMap<At, Result<Sums<M>, device::Error>>,
    exposed: Duration,
    /// Between the last two steps.
    header_wait: Duration,
    /// When a poll for the next header found none, for the first time.
    polled: Option<Instant>,
    has_begun: bool,
    ended: Option<Ending>,
}

impl<M: Memory> Waiting<M> {
    pub(super) fn new(
        me: TrainerId,
        (handle, notices): (Handle<M>, Notices<M>),
        (compute, place): (Compute<M>, M::Place),
        tracer: Tracer,
    ) -> Self {
        Self {
            me,
            handle,
            notices,
            compute,
            place,
            tracer,
            coming: BTreeMap::new(),
            addresses: None,
            whole: BTreeMap::new(),
            sums: BTreeMap::new(),
            exposed: Duration::ZERO,
            header_wait: Duration::ZERO,
            polled: None,
            has_begun: false,
            ended: None,
        }
    }

    pub(super) fn begin(&mut self, step: u64) -> Next {
        let before = self.exposed;
        loop {
            let waited = self.exposed.saturating_sub(before);
            if let Some(next) = self.next(step, waited) {
                return next;
            }
            self.progress();
        }
    }

    /// The header of `step` or the end of the job, if one is there.
    pub(super) fn poll_begin(&mut self, step: u64) -> Option<Next> {
        let waited = self.polled.map_or(Duration::ZERO, |it| it.elapsed());
        let next = self.next(step, waited);
        if next.is_none() {
            self.polled.get_or_insert_with(Instant::now);
        }
        next
    }

    /// The header of `step`, for which this rank has waited so long, or the end of the job.
    fn next(&mut self, step: u64, waited: Duration) -> Option<Next> {
        if let Some(ending) = &self.ended {
            return Some(Next::End(ending.clone()));
        }
        let planned = self.coming.remove(&step)?;
        self.header_wait = if self.has_begun { waited } else { Duration::ZERO };
        self.has_begun = true;
        self.polled = None;
        self.exposed = Duration::ZERO;
        // Of phases that nobody waited for.
        self.whole = self.whole.split_off(&At::new(step, 0));
        self.sums = self.sums.split_off(&At::new(step, 0));
        Some(Next::Step(planned))
    }

    pub(super) fn exposed(&self) -> Duration {
        self.exposed
    }

    pub(super) fn header_wait(&self) -> Duration {
        self.header_wait
    }

    pub(super) fn addresses(
        &mut self,
        deadline: Duration,
    ) -> Result<Vec<(PeerId, String)>, Option<Ending>> {
        let found = self.until(deadline, |it| it.addresses.is_some() || it.ended.is_some());
        match self.addresses.take() {
            Some(addresses) if found => Ok(addresses),
            Some(_) | None => Err(self.ended.clone()),
        }
    }

    /// Takes notices until something is so; whether it is before the deadline.
    fn until(&mut self, deadline: Duration, so: impl Fn(&Self) -> bool) -> bool {
        let until = Instant::now().checked_add(deadline);
        while !so(self) {
            let left =
                until.map_or(deadline, |until| until.saturating_duration_since(Instant::now()));
            match self.notices.recv_timeout(left) {
                Ok(notice) => self.take(notice),
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits for a phase and writes its results; which of them is not finite, if any.
    pub(super) fn finish(
        &mut self,
        planned: &PlannedStep,
        (at, phase): (At, PhaseAt),
        sizes: &Sizes,
        outputs: Outputs<'_>,
    ) -> Result<Option<Error>, Error> {
        let whole = self.whole(planned, at)?;
        let device = |source| {
            let source = Box::new(source);
            Error::Device { rank: self.me.0, phase: name(at.step, phase), source }
        };
        let not_finite = |source: NotFinite| Error::NotFinite {
            rank: self.me.0,
            phase: name(at.step, phase),
            source: Box::new(source),
        };
        let (nano, _) = planned.nano_of(at.phase);
        let (rank, place) = (RankId(self.me.0.into()), &self.place);
        let form = HeadByHead::of(nano, rank);
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
                let values = from_wire(sizes.wire, &landed);
                let values_lse = place.unload(landed_lse).map_err(device)?;
                let both = [&values[..], values_lse.f32s()];
                o.write_turned(&values, &form, sizes.query());
                RowsMut::f32(lse).write_turned(values_lse.f32s(), &form, sizes.query_heads);
                merge::check_forward(planned, at, rank, both, &whole.makers)
            }
            (Landed::Backward { dq: mut landed, own }, Outputs::Backward { dq, dk, dv }) => {
                for (bundle, own) in &own {
                    let of = (*bundle, rank);
                    merge::own_backward(place, nano, of, own, &mut landed).map_err(device)?;
                }
                let sums = self.sums.remove(&at).unwrap_or_else(|| Ok(Sums::new(nano, rank)));
                let (sum_k, sum_v) = sums.map_err(device)?.finish();
                let landed = place.unload(landed).map_err(device)?;
                let values = from_wire(sizes.wire, &landed);
                let all = [&values[..], &sum_k, &sum_v];
                dq.write_turned(&values, &form, sizes.query());
                dk.write(&sum_k, sizes.kv());
                dv.write(&sum_v, sizes.kv());
                merge::check_backward(planned, at, rank, all, &whole.makers)
            }
            (Landed::Forward { .. } | Landed::Backward { .. }, _) => {
                unreachable!("the phase's direction was checked, and it lands what it is")
            }
        };
        Ok(checked.err().map(not_finite))
    }

    /// Waits until a phase is whole and this rank's own part of it has run.
    fn whole(&mut self, planned: &PlannedStep, at: At) -> Result<Whole<M>, Error> {
        let own = self.planned_here(planned, at);
        loop {
            if self.is_over(at, own)
                && let Some(whole) = self.whole.remove(&at)
            {
                return Ok(whole);
            }
            if let Some(ending) = &self.ended {
                let reason = match ending {
                    Ending::Failed { reason, .. } => reason.clone(),
                    Ending::Completed | Ending::Stopped { .. } => "the job was ended".into(),
                };
                return Err(Error::Ended { reason });
            }
            self.progress();
        }
    }

    /// Whether waiting for a phase would not block: it is whole, or the job has ended.
    pub(super) fn is_ready(&self, planned: &PlannedStep, at: At) -> bool {
        let own = self.planned_here(planned, at);
        self.ended.is_some() || self.is_over(at, own) && self.whole.contains_key(&at)
    }

    /// Whether all `own` works of a phase have run that were planned for this rank, or nobody wants them any more.
    fn is_over(&self, at: At, own: usize) -> bool {
        self.compute.ran(at) >= own || self.compute.is_cancelled(at)
    }

    /// Works of a phase that the plan gives to this rank's in-place server.
    fn planned_here(&self, planned: &PlannedStep, at: At) -> usize {
        planned.works_of(at.phase, Filler::InPlace(self.me))
    }

    /// Takes what came and computes what is queued, up to one launch; waits for nothing. Ran: something came or was computed,
    /// the caller looks whether it is what it waits for.
    pub(super) fn advance(&mut self) -> Progress {
        let mut any = false;
        while let Ok(notice) = self.notices.try_recv() {
            self.take(notice);
            any = true;
        }
        // Whoever waits for these works waits for this thread, wherever it stands.
        let owed = self.compute.owed();
        self.notices.owe(if owed == Owed::Works { Owed::Computing } else { owed });
        let progress = self.compute.run();
        self.notices.owe(self.compute.owed());
        if let (Progress::Ran, Some(why)) = (progress, self.compute.lost()) {
            self.handle.send(Request::Fail(why.to_owned()));
        }
        if any || self.ended.is_some() { Progress::Ran } else { progress }
    }

    /// Computes what is queued, or waits for something to happen.
    fn progress(&mut self) {
        let progress = self.advance();
        if progress == Progress::Ran {
            return;
        }
        if progress == Progress::Flying {
            if let Ok(notice) = self.notices.recv_timeout(FLYING) {
                self.take(notice);
            }
            return;
        }
        let start = Instant::now();
        let notice = self.notices.recv();
        self.exposed += start.elapsed();
        self.tracer.span("main", Activity::Wait, start, String::new);
        match notice {
            Ok(notice) => self.take(notice),
            Err(_) => {
                self.ended = Some(lost(&format!("the io thread of rank {} ended", self.me.0)));
            }
        }
    }

    fn take(&mut self, notice: Notice<M>) {
        match notice {
            Notice::Trainers(addresses) => self.addresses = Some(addresses),
            Notice::Step(planned) => {
                self.coming.insert(planned.header.step, planned);
            }
            Notice::Part(part) => self.add(*part),
            Notice::Whole(whole) => {
                self.whole.insert(whole.at, *whole);
            }
            Notice::Work(work) => self.compute.push(*work),
            Notice::Cancelled(at) => self.compute.cancel(at),
            Notice::Lost(reason) => self.ended = Some(lost(&reason)),
            Notice::End(ending) => self.ended = Some(ending),
        }
    }

    /// Adds a part of dK and dV, or keeps it until those before it have come.
    fn add(&mut self, part: Part<M>) {
        let Part { planned, phase, bundle, values } = part;
        let at = At { step: planned.header.step, phase };
        let (nano, _) = planned.nano_of(phase);
        let new = || Ok(Sums::new(nano, RankId(self.me.0.into())));
        let sums = self.sums.entry(at).or_insert_with(new);
        if let Ok(it) = sums
            && let Err(why) = it.put((&self.place, nano), bundle, values)
        {
            *sums = Err(why);
        }
    }
}
