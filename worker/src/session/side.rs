//! What a rank does with rows, in the kind of memory that its process keeps them in.
//!
//! In: calls whose turn it is, with rows that fit. Out: requests to the IO thread with copies of the rows, and results. [`Rank`] knows
//! a [`Side`] without the kind of memory, which is chosen where the rank joins its job.
//!
//! It checks no turn. Invariant: any thread may submit, wait, poll or ask while others wait; phases reach the IO thread in the order
//! of the calls.
//!
//! [`Rank`]: super::Rank

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cadre_exchange::PeerId;
use cadre_kernels::Threads;
use cadre_kernels::device::{self, Event, Gpu, Stream};
use cadre_protocol::{At, TrainerId};
use cadre_step::envelope::{Ending, StepDone};
use cadre_step::phases::PhaseAt;
use cadre_step::planned::PlannedStep;

use super::call::{Error, Inputs, Outputs, Sizes};
use super::copies::{Copies, NotStarted};
use super::lent_rows::{LentInputs, LentOutputs};
use super::waiting::Waiting;
use super::{Next, lock};
use crate::compute::{Compute, Progress};
use crate::heads::HeadByHead;
use crate::io::queues::Notices;
use crate::io::{Asked, Handle, Request};
use crate::memory::{Memory, Place as _};
use crate::trace::{Activity, Tracer};

/// A phase whose results are waited for.
#[derive(Clone, Copy)]
pub(super) struct Awaited<'a> {
    /// Its step.
    pub(super) planned: &'a PlannedStep,
    pub(super) phase: (At, PhaseAt),
    pub(super) sizes: &'a Sizes,
}

/// See the module.
pub(super) trait Side: Send + Sync {
    /// Copies the rows of a phase and starts it.
    fn submit(
        &self,
        phase: (At, PhaseAt),
        inputs: &Inputs<'_>,
        form: (&Sizes, &HeadByHead),
    ) -> Result<(), device::Error>;

    /// Starts a phase of which the rank has no rows, and those behind it, so many in all.
    fn skip(&self, first: At, count: u32);

    /// Tells that a step is over here, behind all its phases.
    fn done(&self, done: StepDone);

    /// Asks the IO thread to end, behind all that was asked before.
    fn leave(&self, leave: Request);

    /// As [`Self::submit`], of lent rows; when they are the caller's again.
    fn submit_lent(
        &self,
        phase: (At, PhaseAt),
        from: (&LentInputs<'_>, &Stream),
        form: (&Sizes, &HeadByHead),
    ) -> Result<Arc<Event>, Error>;

    /// As [`Self::finish`], into lent memory; when the results are there.
    fn wait_lent(
        &self,
        awaited: &Awaited<'_>,
        to: (LentOutputs<'_>, &Stream),
    ) -> Result<(Arc<Event>, Option<Error>), Error>;

    /// As [`Waiting::begin`].
    fn begin(&self, step: u64) -> Option<Next>;

    /// As [`Waiting::poll_begin`].
    fn poll_begin(&self, step: u64) -> Option<Next>;

    /// As [`Waiting::await_step`].
    fn await_step(&self, step: u64, longest: Duration) -> bool;

    /// As [`Waiting::await_ready`].
    fn await_ready(&self, planned: &PlannedStep, at: At, longest: Duration) -> bool;

    /// As [`Waiting::finish`].
    fn finish(&self, awaited: &Awaited<'_>, outputs: Outputs<'_>) -> Result<Option<Error>, Error>;

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
    me: TrainerId,
    threads: Threads,
    handle: Handle<M>,
    tracer: Tracer,
    /// Where rows are copied to; apart from what waits, so that one thread may submit meanwhile.
    place: Mutex<M::Place>,
    waiting: Waiting<M>,
    /// Once rows were lent.
    copies: Mutex<Option<Arc<Copies<M>>>>,
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
        let waiting = Waiting::new(me, lines, (compute, merged), tracer.clone());
        let (place, copies) = (Mutex::new(copied), Mutex::default());
        Self { me, threads, handle, tracer, place, waiting, copies }
    }

    /// Asks the IO thread for something about a phase, behind those that were submitted before.
    fn ask(&self, asked: Asked<M>) {
        let copies = lock(&self.copies).clone();
        match copies {
            Some(copies) => copies.ask(asked),
            None => self.handle.send(asked),
        }
    }

    /// What copies rows of `gpu`.
    fn copies(&self, gpu: &Gpu, phase: (At, PhaseAt)) -> Result<Arc<Copies<M>>, Error> {
        let mut copies = lock(&self.copies);
        if let Some(copies) = &*copies {
            return Ok(Arc::clone(copies));
        }
        let place = lock(&self.place).another().map_err(|it| self.device(phase, it))?;
        let with = (self.me, self.threads);
        let started = Copies::start(with, gpu, place, self.handle.clone());
        let started = started.map_err(|it| match it {
            NotStarted::Gpu(source) => self.device(phase, source),
            NotStarted::Thread(source) => Error::Thread { rank: self.me.0, source },
        })?;
        Ok(Arc::clone(copies.insert(Arc::new(started))))
    }

    fn device(&self, (at, phase): (At, PhaseAt), source: device::Error) -> Error {
        let (phase, source) = (phase.in_words(at.step), Box::new(source));
        Error::Device { rank: self.me.0, phase, source }
    }
}

impl<M: Memory> Side for Keeping<M> {
    fn submit(
        &self,
        (at, phase): (At, PhaseAt),
        inputs: &Inputs<'_>,
        form: (&Sizes, &HeadByHead),
    ) -> Result<(), device::Error> {
        let rows = inputs.hold(form, &*lock(&self.place), self.threads)?;
        let start = Instant::now();
        self.ask(Asked::Submit(at, rows));
        self.tracer.span("main", Activity::Doorbell, start, || phase.in_words(at.step));
        Ok(())
    }

    fn skip(&self, first: At, count: u32) {
        self.ask(Request::Skip(first, count).into());
    }

    fn done(&self, done: StepDone) {
        self.ask(Request::StepDone(done).into());
    }

    fn leave(&self, leave: Request) {
        self.ask(leave.into());
    }

    fn submit_lent(
        &self,
        phase: (At, PhaseAt),
        (inputs, behind): (&LentInputs<'_>, &Stream),
        form: (&Sizes, &HeadByHead),
    ) -> Result<Arc<Event>, Error> {
        let copies = self.copies(behind.gpu(), phase)?;
        copies.submit(phase, inputs, behind, form).map_err(|it| self.device(phase, it))
    }

    fn wait_lent(
        &self,
        awaited: &Awaited<'_>,
        (outputs, behind): (LentOutputs<'_>, &Stream),
    ) -> Result<(Arc<Event>, Option<Error>), Error> {
        let copies = self.copies(behind.gpu(), awaited.phase)?;
        let fill = |outputs: Outputs<'_>| self.finish(awaited, outputs);
        copies.results(outputs, behind, fill, |it| self.device(awaited.phase, it))
    }

    fn begin(&self, step: u64) -> Option<Next> {
        self.waiting.begin(step)
    }

    fn poll_begin(&self, step: u64) -> Option<Next> {
        self.waiting.poll_begin(step)
    }

    fn await_step(&self, step: u64, longest: Duration) -> bool {
        self.waiting.await_step(step, longest)
    }

    fn await_ready(&self, planned: &PlannedStep, at: At, longest: Duration) -> bool {
        self.waiting.await_ready(planned, at, longest)
    }

    fn finish(&self, awaited: &Awaited<'_>, outputs: Outputs<'_>) -> Result<Option<Error>, Error> {
        let Awaited { planned, phase, sizes } = *awaited;
        self.waiting.finish(planned, phase, sizes, outputs)
    }

    fn is_ready(&self, planned: &PlannedStep, at: At) -> bool {
        self.waiting.is_ready(planned, at)
    }

    fn advance(&self) -> Progress {
        self.waiting.advance()
    }

    fn exposed(&self) -> Duration {
        self.waiting.exposed()
    }

    fn header_wait(&self) -> Duration {
        self.waiting.header_wait()
    }

    fn addresses(&self, deadline: Duration) -> Result<Vec<(PeerId, String)>, Option<Ending>> {
        self.waiting.addresses(deadline)
    }
}
