//! What a rank does with rows, in the kind of memory that its process keeps them in.
//!
//! In: calls whose turn it is, with rows that fit. Out: requests to the IO thread with copies of the rows, and results. [`Rank`] knows
//! a [`Side`] without the kind of memory, which is chosen where the rank joins its job.
//!
//! It checks no turn. Invariant: one thread may submit while another waits.
//!
//! [`Rank`]: super::Rank

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cadre_exchange::PeerId;
use cadre_kernels::{Threads, device};
use cadre_protocol::{At, TrainerId};
use cadre_step::envelope::Ending;
use cadre_step::phases::PhaseAt;
use cadre_step::planned::PlannedStep;

use super::Next;
use super::call::{Error, Inputs, Outputs, Sizes, name};
use super::waiting::Waiting;
use crate::compute::{Compute, Progress};
use crate::heads::HeadByHead;
use crate::io::queues::Notices;
use crate::io::{Asked, Handle};
use crate::memory::Memory;
use crate::trace::{Activity, Tracer};

/// See the module.
pub(super) trait Side: Send + Sync {
    /// Copies the rows of a phase and starts it.
    fn submit(
        &self,
        phase: (At, PhaseAt),
        inputs: Inputs<'_>,
        form: (&Sizes, &HeadByHead),
    ) -> Result<(), device::Error>;

    /// As [`Waiting::begin`].
    fn begin(&self, step: u64) -> Next;

    /// As [`Waiting::poll_begin`].
    fn poll_begin(&self, step: u64) -> Option<Next>;

    /// As [`Waiting::finish`].
    fn finish(
        &self,
        planned: &PlannedStep,
        phase: (At, PhaseAt),
        sizes: &Sizes,
        outputs: Outputs<'_>,
    ) -> Result<Option<Error>, Error>;

    /// As [`Waiting::is_ready`].
    fn is_ready(&self, planned: &PlannedStep, at: At) -> bool;

    /// As [`Waiting::advance`].
    fn advance(&self) -> Progress;

    /// As [`Waiting::exposed`].
    fn exposed(&self) -> Duration;

    /// As [`Waiting::header_wait`].
    fn header_wait(&self) -> Duration;

    /// As [`Waiting::addresses`].
    fn addresses(&self, deadline: Duration) -> Result<Vec<(PeerId, String)>, Option<Ending>>;
}

/// A [`Side`] whose rows are `M`.
pub(super) struct Keeping<M: Memory> {
    threads: Threads,
    handle: Handle<M>,
    tracer: Tracer,
    /// Where rows are copied to; apart from what waits, so that one thread may submit meanwhile.
    place: Mutex<M::Place>,
    waiting: Mutex<Waiting<M>>,
}

impl<M: Memory> Keeping<M> {
    /// Of rank `me`; the rest is as for [`super::Rank::new`].
    pub(super) fn new(
        me: TrainerId,
        (handle, notices): (Handle<M>, Notices<M>),
        (compute, threads): (Compute<M>, Threads),
        [merged, copied]: [M::Place; 2],
        tracer: Tracer,
    ) -> Self {
        let lines = (handle.clone(), notices);
        let waiting = Mutex::new(Waiting::new(me, lines, (compute, merged), tracer.clone()));
        Self { threads, handle, tracer, place: Mutex::new(copied), waiting }
    }
}

impl<M: Memory> Side for Keeping<M> {
    fn submit(
        &self,
        (at, phase): (At, PhaseAt),
        inputs: Inputs<'_>,
        form: (&Sizes, &HeadByHead),
    ) -> Result<(), device::Error> {
        let rows = inputs.hold(form, &*lock(&self.place), self.threads)?;
        let start = Instant::now();
        self.handle.send(Asked::Submit(at, rows));
        self.tracer.span("main", Activity::Doorbell, start, || name(at.step, phase));
        Ok(())
    }

    fn begin(&self, step: u64) -> Next {
        lock(&self.waiting).begin(step)
    }

    fn poll_begin(&self, step: u64) -> Option<Next> {
        lock(&self.waiting).poll_begin(step)
    }

    fn finish(
        &self,
        planned: &PlannedStep,
        phase: (At, PhaseAt),
        sizes: &Sizes,
        outputs: Outputs<'_>,
    ) -> Result<Option<Error>, Error> {
        lock(&self.waiting).finish(planned, phase, sizes, outputs)
    }

    fn is_ready(&self, planned: &PlannedStep, at: At) -> bool {
        lock(&self.waiting).is_ready(planned, at)
    }

    fn advance(&self) -> Progress {
        lock(&self.waiting).advance()
    }

    fn exposed(&self) -> Duration {
        lock(&self.waiting).exposed()
    }

    fn header_wait(&self) -> Duration {
        lock(&self.waiting).header_wait()
    }

    fn addresses(&self, deadline: Duration) -> Result<Vec<(PeerId, String)>, Option<Ending>> {
        lock(&self.waiting).addresses(deadline)
    }
}

/// A thread that panicked while it held a lock has left nothing half done that a later call would read.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
