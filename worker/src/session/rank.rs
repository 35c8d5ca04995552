//! A rank's phases: what it submits, in which order, and what it waits for.
//!
//! In: calls of the rank's threads. Out: requests to the IO thread, results. It knows no controller, no network and no clock
//! but that of its own waits, so the simulation drives the same code.
//!
//! Invariant: nothing of a call that is refused is sent, but the reason.

mod ends;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cadre_exchange::PeerId;
use cadre_kernels::Threads;
use cadre_planner::RankId;
use cadre_protocol::{At, Peer, TrainerId};
use cadre_step::envelope::{Ending, Lengths, Said, StepDone};
use cadre_step::phases::{Direction, PhaseAt, PhaseOrder};
use cadre_step::planned::PlannedStep;

use super::call::{Error, Inputs, Outputs, Sizes};
use super::model::Model;
use super::side::{Awaited, Keeping, Side};
use super::turn::{OutOfTurn, Turn};
use super::{Next, Ticket, lock};
use crate::compute::{Compute, Progress};
use crate::heads::HeadByHead;
use crate::io::encoded::Encoded;
use crate::io::queues::{End, Notices};
use crate::io::{Handle, Line, Request};
use crate::memory::Memory;
use crate::trace::Tracer;

/// See the module. [`super::Session`] is one with its threads and its controller.
pub struct Rank {
    me: TrainerId,
    line: Line,
    tracer: Tracer,
    model: Model,
    /// Never held while rows are copied: who waits for another phase asks it, too.
    turn: Mutex<Turn>,
    /// Held by the one thread that submits: phases go in their order.
    pub(super) submits: Mutex<()>,
    pub(super) side: Box<dyn Side>,
    end: End,
}

/// A phase whose turn it is, and the form of its rows.
pub(super) struct Due {
    planned: Arc<PlannedStep>,
    pub(super) at: At,
    pub(super) sizes: Sizes,
    pub(super) form: HeadByHead,
}

impl Rank {
    /// Rank `me`, whose IO thread is behind `handle` and `notices`. `compute` runs what is planned for it in place and merges
    /// into the first of `places`; rows are copied into the second, with `threads`. The job begins with step
    /// `first`, and has `steps` steps if that is known.
    pub fn new<M: Memory>(
        me: TrainerId,
        (handle, notices): (Handle<M>, Notices<M>),
        using: (Compute<M>, Threads),
        places: [M::Place; 2],
        (model, first, steps): (Model, u64, Option<u64>),
        tracer: Tracer,
    ) -> Self {
        let end = notices.end();
        if let Some(steps) = steps {
            handle.send(Request::Steps(steps));
        }
        let turn = Mutex::new(Turn::new(me.0, first, steps));
        let line = handle.line();
        let side = Keeping::new(me, (handle, notices), using, places, tracer.clone());
        let submits = Mutex::default();
        Self { me, line, tracer, model, turn, submits, side: Box::new(side), end }
    }

    /// Tells the conductor what this rank holds of a step to come, and in which order its phases come: of the first one, then of
    /// each one while the one before it runs.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfTurn`], [`Error::Turns`].
    pub fn announce(&self, lengths: Lengths) -> Result<(), Error> {
        if let Some(turns) = &lengths.turns {
            let order = PhaseOrder::new(turns, self.model.layers.count(), lengths.nanos.len());
            order.map_err(|source| {
                self.refuse(Error::Turns { rank: self.me.0, step: lengths.step, source })
            })?;
        }
        // Here, since it takes as long as there are documents.
        let encoded = || Encoded::of(&Said::Lengths(lengths.clone()));
        let encoded = (Peer::Trainer(self.me) != Peer::CONDUCTOR).then(encoded);
        let mut turn = lock(&self.turn);
        turn.announce(lengths.step).map_err(|it| self.out_of_turn(it))?;
        self.line.send(Request::Lengths(lengths, encoded));
        Ok(())
    }

    /// Tells the conductor that no step follows those that were announced, from step 0 on `steps` in all. Not where
    /// [`super::Join::steps`] has said it. Every rank says the same, or the job ends and names two that differ.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfTurn`].
    pub fn announce_end(&self, steps: u64) -> Result<(), Error> {
        let mut turn = lock(&self.turn);
        turn.end(steps).map_err(|it| self.out_of_turn(it))?;
        self.line.send(Request::Steps(steps));
        drop(turn);
        Ok(())
    }

    /// Waits for `step` to be planned, or for the end of the job. Computes for others meanwhile. A call out of turn, or a step
    /// of another model than this rank's, ends the job, which is what it returns then.
    pub fn begin(&self, step: u64) -> Next {
        if let Err(ending) = self.check_begin(step) {
            return Next::End(ending);
        }
        // Not with the lock, which others take to submit.
        match self.side.begin(step) {
            Some(next) => self.turn_to(next),
            None => Next::End(self.cannot_begin(Turn::taken(step))),
        }
    }

    /// As [`Self::begin`], if it would not block now.
    pub fn poll_begin(&self, step: u64) -> Option<Next> {
        match self.check_begin(step) {
            Ok(()) => Some(self.turn_to(self.side.poll_begin(step)?)),
            Err(ending) => Some(Next::End(ending)),
        }
    }

    /// Waits for at most `longest` until [`Self::begin`] would not block, and computes for others meanwhile; whether that is
    /// so. For callers that look after something else in between, such as signals.
    pub fn await_step(&self, step: u64, longest: Duration) -> bool {
        lock(&self.turn).check_begin(step).is_err() || self.side.await_step(step, longest)
    }

    /// As [`Self::await_step`], until [`Self::wait`] would not block.
    pub fn await_ready(&self, ticket: &Ticket, longest: Duration) -> bool {
        let Ticket { planned, at, phase } = ticket;
        let is_due = lock(&self.turn).check_wait(planned, *phase).is_ok();
        !is_due || self.side.await_ready(planned, *at, longest)
    }

    /// Why `step` cannot begin.
    fn check_begin(&self, step: u64) -> Result<(), Ending> {
        let checked = lock(&self.turn).check_begin(step);
        checked.map_err(|why| self.cannot_begin(why))
    }

    /// How the job ends for it. After a failure nobody has to call [`Self::done`] before he learns how the job ended.
    fn cannot_begin(&self, why: OutOfTurn) -> Ending {
        let own = |reason| Ending::Failed { reason, bad_input: true };
        let ended = self.ending(Duration::ZERO);
        ended.unwrap_or_else(|| own(self.out_of_turn(why).to_string()))
    }

    fn turn_to(&self, next: Next) -> Next {
        let Next::Step(planned) = &next else { return next };
        if let Some(other) = self.model.differs(self.me.0, &planned.header) {
            let reason = self.refuse(other).to_string();
            return Next::End(Ending::Failed { reason, bad_input: true });
        }
        // With the lock, so that no phase is submitted before those that are skipped.
        let mut turn = lock(&self.turn);
        turn.begun(planned);
        self.skip(turn.skip());
        drop(turn);
        next
    }

    /// Submits the phases up to the next one of which this rank has rows: others wait for its word of each, and nobody calls for
    /// them.
    fn skip(&self, skipped: Option<(At, u32)>) {
        if let Some((first, count)) = skipped {
            self.side.skip(first, count);
        }
    }

    /// Starts a phase. Blocks for no peer: only for the copy of the rows, after which they are the caller's again.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfTurn`], [`Error::Rows`], [`Error::Device`].
    pub fn submit(&self, phase: PhaseAt, inputs: Inputs<'_>) -> Result<Ticket, Error> {
        let _one = lock(&self.submits);
        let due = self.due(phase, inputs.direction())?;
        let step = due.at.step;
        inputs
            .check(&due.sizes)
            .map_err(|(tensor, what)| self.refuse(self.rows(step, phase, tensor, what)))?;
        let submitted = self.side.submit((due.at, phase), &inputs, (&due.sizes, &due.form));
        submitted.map_err(|source| self.refuse(self.device(step, phase, source)))?;
        Ok(self.submitted(due, phase))
    }

    /// The phase that is submitted with rows of a direction, if its turn has come.
    pub(super) fn due(&self, phase: PhaseAt, direction: Direction) -> Result<Due, Error> {
        let next = lock(&self.turn).check_submit(phase, direction == phase.direction);
        let (planned, number) = next.map_err(|it| self.out_of_turn(it))?;
        let at = At { step: planned.header.step, phase: number };
        let sizes = Sizes::of(&planned, phase, RankId(self.me.0.into()));
        let nano = &planned.plans[planned.plan_index(phase)];
        let form = HeadByHead::of(nano, RankId(self.me.0.into()));
        Ok(Due { planned, at, sizes, form })
    }

    /// A phase is under way, and those behind it that this rank has no rows of.
    pub(super) fn submitted(&self, due: Due, phase: PhaseAt) -> Ticket {
        let skipped = {
            let mut turn = lock(&self.turn);
            turn.submitted();
            turn.skip()
        };
        // Not with the lock: behind lent rows this may wait for the GPU, and other threads take results meanwhile.
        self.skip(skipped);
        Ticket { planned: due.planned, at: due.at, phase }
    }

    /// Waits until a phase is whole and writes its results. Computes for others meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfTurn`], [`Error::Rows`], [`Error::NotFinite`], [`Error::Device`], [`Error::Ended`].
    pub fn wait(&self, ticket: Ticket, outputs: Outputs<'_>) -> Result<(), Error> {
        match self.wait_reporting(ticket, outputs)? {
            None => Ok(()),
            Some(not_finite) => Err(self.refuse(not_finite)),
        }
    }

    /// As [`Self::wait`] for callers that can leave a step out: results that are not finite are written too and the job goes on.
    /// The first of them is an [`Error::NotFinite`], which is returned and told to nobody.
    ///
    /// # Errors
    ///
    /// Those of [`Self::wait`], but for [`Error::NotFinite`].
    pub fn wait_reporting(
        &self,
        ticket: Ticket,
        outputs: Outputs<'_>,
    ) -> Result<Option<Error>, Error> {
        let Ticket { planned, at, phase } = ticket;
        let sizes = self.awaited(&planned, (at, phase), outputs.direction())?;
        outputs
            .check(&sizes)
            .map_err(|(tensor, what)| self.refuse(self.rows(at.step, phase, tensor, what)))?;
        let awaited = Awaited { planned: &planned, phase: (at, phase), sizes: &sizes };
        self.finished(self.side.finish(&awaited, outputs))
    }

    /// Sizes of a phase that is waited for with room of a direction, if that may be.
    pub(super) fn awaited(
        &self,
        planned: &Arc<PlannedStep>,
        (at, phase): (At, PhaseAt),
        direction: Direction,
    ) -> Result<Sizes, Error> {
        lock(&self.turn).check_wait(planned, phase).map_err(|it| self.out_of_turn(it))?;
        if direction != phase.direction {
            let (tensor, what) = ("room for results", "is of the other direction".to_owned());
            return Err(self.refuse(self.rows(at.step, phase, tensor, what)));
        }
        Ok(Sizes::of(planned, phase, RankId(self.me.0.into())))
    }

    /// A phase was waited for.
    pub(super) fn finished<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        match result {
            Ok(_) => lock(&self.turn).waited(),
            Err(Error::Ended { .. }) => {}
            Err(error) => return Err(self.refuse(error)),
        }
        result
    }

    /// Whether [`Self::wait`] would not block now. Computes nothing; see [`Self::advance`].
    pub fn is_ready(&self, ticket: &Ticket) -> bool {
        self.side.is_ready(&ticket.planned, ticket.at)
    }

    /// Computes what is queued for this rank, up to one launch, without waiting; whether anything came or was computed. For
    /// callers that have threads of their own to wait with. While another thread waits, that one does it, and there is nothing
    /// to do here.
    pub fn advance(&self) -> bool {
        self.side.advance() == Progress::Ran
    }

    /// Tells the conductor that a step is over here.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfTurn`].
    pub fn done(&self, done: StepDone) -> Result<(), Error> {
        // Sent with the lock, so that what another thread begins now comes later.
        let mut turn = lock(&self.turn);
        let ends_skipped = turn.done(done.step).map_err(|it| self.out_of_turn(it))?;
        // Behind the phases that were skipped; else at once, so that nothing said later overtakes it.
        if ends_skipped {
            self.side.done(done);
        } else {
            self.line.send(Request::StepDone(done));
        }
        drop(turn);
        Ok(())
    }

    /// Time in [`Self::wait`] since the step began in which nothing was computed, by whichever thread; of a wait that goes on,
    /// what has gone by until something last came.
    pub fn exposed_wait(&self) -> Duration {
        self.side.exposed()
    }

    /// The wait for the last header and its plan; zero for the first step of the session. In [`Self::begin`] it is the time in which
    /// nothing was computed; by [`Self::poll_begin`] that from the first poll that found no header to the one that did.
    pub fn header_wait(&self) -> Duration {
        self.side.header_wait()
    }

    /// This rank.
    pub fn rank(&self) -> u16 {
        self.me.0
    }

    /// The IO thread of this process.
    pub(super) fn line(&self) -> &Line {
        &self.line
    }

    /// Where spans of time go.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Waits until all ranks listen for what they do among themselves: where, by rank.
    ///
    /// # Errors
    ///
    /// The job ended before, or `deadline` is over.
    pub fn addresses(&self, deadline: Duration) -> Result<Vec<(PeerId, String)>, Option<Ending>> {
        self.side.addresses(deadline)
    }

    fn out_of_turn(&self, why: OutOfTurn) -> Error {
        let OutOfTurn { called, expected } = why;
        self.refuse(Error::OutOfTurn { rank: self.me.0, called, expected })
    }

    fn rows(&self, step: u64, phase: PhaseAt, tensor: &'static str, what: String) -> Error {
        Error::Rows { rank: self.me.0, phase: phase.in_words(step), tensor, what }
    }

    pub(super) fn device(
        &self,
        step: u64,
        phase: PhaseAt,
        source: cadre_kernels::device::Error,
    ) -> Error {
        let source = Box::new(source);
        Error::Device { rank: self.me.0, phase: phase.in_words(step), source }
    }

    /// Ends the job everywhere for what this rank did.
    pub(super) fn refuse(&self, error: Error) -> Error {
        let end = if error.is_bad_input() { Request::Refuse } else { Request::Fail };
        self.line.send(end(error.to_string()));
        error
    }
}
