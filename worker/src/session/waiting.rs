//! The half of a session that waits: computes what is planned for this rank, and has merged what has landed.
//!
//! In: notices of the IO thread. Out: the next step, whole phases written where the caller wants them ([`Merging`]), the end of the job.
//!
//! ```text
//! the first thread that waits ── takes notices, computes, sleeps ──▶ state ──▶ every thread that waits looks whether its own is there
//!                               └ through: the next one takes
//! ```
//!
//! Any number of threads may wait. One of them takes notices and computes, and holds nothing else meanwhile. So who polls or asks
//! ([`Waiting::is_ready`], [`Waiting::advance`], [`Waiting::poll_begin`], [`Waiting::exposed`]) never waits for one that waits.
//! Parts of dK and dV are added as they come.
//!
//! Invariant: a whole phase is written once all its parts are added.

use std::collections::BTreeMap;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use cadre_exchange::PeerId;
use cadre_protocol::{At, Filler, TrainerId};
use cadre_step::envelope::Ending;
use cadre_step::planned::PlannedStep;

use super::call::{Error, Outputs, Sizes};
use super::lock;
use super::merging::Merging;
use super::{Next, PhaseAt};
use crate::compute::{Account, Compute, LAUNCH_LOOK_EVERY, Progress};
use crate::io::queues::{Notices, Owed, lost};
use crate::io::whole::Whole;
use crate::io::{Handle, Notice, Request};
use crate::memory::Memory;
use crate::trace::{Activity, Tracer};

/// See the module.
pub(super) struct Waiting<M: Memory> {
    me: TrainerId,
    tracer: Tracer,
    /// Never held while anybody waits or computes.
    state: Mutex<State<M>>,
    /// The state has changed, or nobody takes notices any more.
    changed: Condvar,
    /// Of the one thread that takes notices and computes.
    taking: Mutex<Taking<M>>,
    account: Account,
    merging: Merging<M>,
}

/// What has come and is not fetched yet, and the times of the step.
struct State<M: Memory> {
    /// Steps that were announced and not yet begun.
    coming: BTreeMap<u64, Arc<PlannedStep>>,
    /// Where the ranks listen for each other, once known.
    addresses: Option<Vec<(PeerId, String)>>,
    whole: BTreeMap<At, Whole<M>>,
    exposed: Duration,
    /// Between the last two steps.
    header_wait: Duration,
    /// What was exposed when a thread began to wait for the next header, by [`Waiting::await_step`].
    awaited: Option<Duration>,
    /// When a poll for the next header found none, for the first time.
    polled: Option<Instant>,
    /// The last step that has begun.
    begun: Option<u64>,
    ended: Option<Ending>,
}

struct Taking<M: Memory> {
    handle: Handle<M>,
    notices: Notices<M>,
    compute: Compute<M>,
}

/// This thread takes notices and computes, as long as it holds this.
struct Takes<'a, M: Memory> {
    // Given back first: whoever is woken then may take it.
    taking: MutexGuard<'a, Taking<M>>,
    waiting: Waking<'a, M>,
}

/// Wakes all who wait when it is dropped.
struct Waking<'a, M: Memory>(&'a Waiting<M>);

impl<M: Memory> Drop for Waking<'_, M> {
    fn drop(&mut self) {
        self.0.wake();
    }
}

impl<M: Memory> Waiting<M> {
    pub(super) fn new(
        me: TrainerId,
        (handle, notices): (Handle<M>, Notices<M>),
        (compute, place): (Compute<M>, M::Place),
        tracer: Tracer,
    ) -> Self {
        let account = compute.account().clone();
        let state = State {
            coming: BTreeMap::new(),
            addresses: None,
            whole: BTreeMap::new(),
            exposed: Duration::ZERO,
            header_wait: Duration::ZERO,
            awaited: None,
            polled: None,
            begun: None,
            ended: None,
        };
        Self {
            me,
            tracer,
            state: Mutex::new(state),
            changed: Condvar::new(),
            taking: Mutex::new(Taking { handle, notices, compute }),
            account,
            merging: Merging::new(me, place),
        }
    }

    pub(super) fn begin(&self, step: u64) -> Option<Next> {
        let before = lock(&self.state).since_when();
        let next = self.until(None, |it| {
            let waited = it.exposed.saturating_sub(before);
            let next = it.next(step, waited);
            // Another thread may have it.
            if next.is_some() || it.begun >= Some(step) { Some(next) } else { None }
        });
        next.expect("without a deadline it waits until there is one")
    }

    /// Waits for at most `longest` until [`Self::begin`] would not block; whether that is so.
    pub(super) fn await_step(&self, step: u64, longest: Duration) -> bool {
        let before = lock(&self.state).since_when();
        let found = self.until(Instant::now().checked_add(longest), |it| {
            let is_there = it.ended.is_some() || it.coming.contains_key(&step);
            (is_there || it.begun >= Some(step)).then_some(())
        });
        lock(&self.state).awaited = Some(before);
        found.is_some()
    }

    /// Waits for at most `longest` until a phase is ready, as [`Self::is_ready`] says.
    pub(super) fn await_ready(&self, planned: &PlannedStep, at: At, longest: Duration) -> bool {
        let own = self.planned_here(planned, at);
        let ready = |it: &mut State<M>| self.would_not_block(it, (at, own)).then_some(());
        self.until(Instant::now().checked_add(longest), ready).is_some()
    }

    /// The header of `step` or the end of the job, if one is there.
    pub(super) fn poll_begin(&self, step: u64) -> Option<Next> {
        let mut state = lock(&self.state);
        let waited = state.polled.map_or(Duration::ZERO, |it| it.elapsed());
        let next = state.next(step, waited);
        if next.is_none() {
            state.polled.get_or_insert_with(Instant::now);
        }
        next
    }

    pub(super) fn exposed(&self) -> Duration {
        lock(&self.state).exposed
    }

    pub(super) fn header_wait(&self) -> Duration {
        lock(&self.state).header_wait
    }

    pub(super) fn addresses(
        &self,
        deadline: Duration,
    ) -> Result<Vec<(PeerId, String)>, Option<Ending>> {
        let found = self.until(Instant::now().checked_add(deadline), |it| {
            let ended = it.ended.clone().map(|it| Err(Some(it)));
            it.addresses.clone().map(Ok).or(ended)
        });
        found.unwrap_or(Err(None))
    }

    /// Waits until `so` gives something; nothing if it does not by the deadline.
    fn until<T>(
        &self,
        deadline: Option<Instant>,
        mut so: impl FnMut(&mut State<M>) -> Option<T>,
    ) -> Option<T> {
        // Nothing is left behind the deadline, and what has come by then still counts.
        let left =
            || deadline.map_or(Duration::MAX, |it| it.saturating_duration_since(Instant::now()));
        let mut state = lock(&self.state);
        let mut takes = loop {
            let found = so(&mut state);
            if found.is_some() {
                return found;
            }
            if let Some(takes) = self.takes() {
                break takes;
            }
            let left = left();
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(state);
        loop {
            let left = left();
            takes.progress(left);
            let found = so(&mut lock(&self.state));
            if found.is_some() || left.is_zero() {
                return found;
            }
        }
    }

    /// The right to take notices and to compute, unless another thread has it.
    fn takes(&self) -> Option<Takes<'_, M>> {
        let taking = match self.taking.try_lock() {
            Ok(it) => it,
            Err(TryLockError::Poisoned(it)) => it.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Takes { taking, waiting: Waking(self) })
    }

    /// Has all who wait look again. Who has just looked sleeps already, or holds the state until it does.
    fn wake(&self) {
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits for a phase and writes its results; which of them is not finite, if any.
    pub(super) fn finish(
        &self,
        planned: &PlannedStep,
        (at, phase): (At, PhaseAt),
        sizes: &Sizes,
        outputs: Outputs<'_>,
    ) -> Result<Option<Error>, Error> {
        let whole = self.whole(planned, at)?;
        self.merging.write(planned, phase, whole, (sizes, outputs))
    }

    /// Waits until a phase is whole and this rank's own part of it has run.
    fn whole(&self, planned: &PlannedStep, at: At) -> Result<Whole<M>, Error> {
        let own = self.planned_here(planned, at);
        let found = self.until(None, |state| {
            if self.is_over(at, own)
                && let Some(whole) = state.whole.remove(&at)
            {
                return Some(Ok(whole));
            }
            let reason = match state.ended.as_ref()? {
                Ending::Failed { reason, .. } => reason.clone(),
                Ending::Completed | Ending::Stopped { .. } => "the job was ended".into(),
            };
            Some(Err(Error::Ended { reason }))
        });
        found.expect("without a deadline it waits until there is one")
    }

    /// Whether waiting for a phase would not block: it is whole, or the job has ended.
    pub(super) fn is_ready(&self, planned: &PlannedStep, at: At) -> bool {
        let own = self.planned_here(planned, at);
        self.would_not_block(&lock(&self.state), (at, own))
    }

    fn would_not_block(&self, state: &State<M>, (at, own): (At, usize)) -> bool {
        state.ended.is_some() || self.is_over(at, own) && state.whole.contains_key(&at)
    }

    /// Whether all `own` works of a phase have run that were planned for this rank, or nobody wants them any more.
    fn is_over(&self, at: At, own: usize) -> bool {
        self.account.ran(at) >= own || self.account.is_cancelled(at)
    }

    /// Works of a phase that the plan gives to this rank's in-place server.
    fn planned_here(&self, planned: &PlannedStep, at: At) -> usize {
        planned.works_of(at.phase, Filler::InPlace(self.me))
    }

    /// Takes what came and computes what is queued, up to one launch; waits for nothing, and leaves it to another thread if one
    /// waits. Ran: something came or was computed, the caller looks whether it is what it waits for.
    pub(super) fn advance(&self) -> Progress {
        self.takes().map_or(Progress::Idle, |mut it| it.advance())
    }

    fn take(&self, notice: Notice<M>, compute: &mut Compute<M>) {
        match notice {
            Notice::Trainers(addresses) => lock(&self.state).addresses = Some(addresses),
            Notice::Step(planned) => {
                lock(&self.state).coming.insert(planned.header.step, planned);
            }
            Notice::Part(part) => {
                let begun = lock(&self.state).begun;
                self.merging.add(*part, begun);
            }
            Notice::Whole(whole) => {
                lock(&self.state).whole.insert(whole.at, *whole);
            }
            Notice::Work(work) => compute.push(*work),
            Notice::Cancelled(at) => compute.cancel(at),
            Notice::Lost(reason) => lock(&self.state).ended = Some(lost(&reason)),
            Notice::End(ending) => lock(&self.state).ended = Some(ending),
        }
    }
}

impl<M: Memory> State<M> {
    /// What was exposed when the wait for the next header began.
    fn since_when(&self) -> Duration {
        self.awaited.unwrap_or(self.exposed)
    }

    /// The header of `step`, for which this rank has waited so long, or the end of the job.
    fn next(&mut self, step: u64, waited: Duration) -> Option<Next> {
        if let Some(ending) = &self.ended {
            return Some(Next::End(ending.clone()));
        }
        let planned = self.coming.remove(&step)?;
        self.header_wait = if self.begun.is_some() { waited } else { Duration::ZERO };
        self.begun = Some(step);
        (self.awaited, self.polled) = (None, None);
        self.exposed = Duration::ZERO;
        self.whole = self.whole.split_off(&At::new(step, 0));
        Some(Next::Step(planned))
    }
}

impl<M: Memory> Drop for Takes<'_, M> {
    fn drop(&mut self) {
        // What it was to compute is lost, and others wait for it.
        if std::thread::panicking() {
            let Taking { handle, notices, .. } = &mut *self.taking;
            let me = self.waiting.0.me.0;
            let why =
                format!("the thread that computes for rank {me} panicked; its log says where");
            handle.send(Request::Fail(why));
            notices.owe(Owed::Nothing);
        }
    }
}

impl<M: Memory> Takes<'_, M> {
    /// As [`Waiting::advance`].
    fn advance(&mut self) -> Progress {
        let waiting = self.waiting.0;
        let Taking { handle, notices, compute } = &mut *self.taking;
        let mut any = false;
        while let Ok(notice) = notices.try_recv() {
            waiting.take(notice, compute);
            any = true;
        }
        // Whoever waits for these works waits for this thread, wherever it stands.
        let owed = compute.owed();
        notices.owe(if owed == Owed::Works { Owed::Computing } else { owed });
        let progress = compute.run();
        notices.owe(compute.owed());
        if let (Progress::Ran, Some(why)) = (progress, compute.lost()) {
            handle.send(Request::Fail(why.to_owned()));
        }
        if any || progress == Progress::Ran {
            waiting.wake();
        }
        if any { Progress::Ran } else { progress }
    }

    /// Computes what is queued, or waits for something to happen, at most for `longest`.
    fn progress(&mut self, longest: Duration) {
        let progress = self.advance();
        let waiting = self.waiting.0;
        // Of a job that has ended nothing more comes.
        if progress == Progress::Ran || lock(&waiting.state).ended.is_some() {
            return;
        }
        let Taking { notices, compute, .. } = &mut *self.taking;
        if progress == Progress::Flying {
            if let Ok(notice) = notices.recv_timeout(LAUNCH_LOOK_EVERY) {
                waiting.take(notice, compute);
                waiting.wake();
            }
            return;
        }
        let start = Instant::now();
        let notice = notices.recv_timeout(longest);
        lock(&waiting.state).exposed += start.elapsed();
        waiting.tracer.span("main", Activity::Wait, start, String::new);
        match notice {
            Ok(notice) => waiting.take(notice, compute),
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => {
                let why = format!("the io thread of rank {} ended", waiting.me.0);
                lock(&waiting.state).ended = Some(lost(&why));
            }
        }
        waiting.wake();
    }
}
