//! A trainer's main thread: the steps that a model would make of its rows, on the real session.
//!
//! In: a moment at which the thread runs. Out: what it wants next ([`Want`]). It compares every result with the truth.
//!
//! ```text
//! header ─▶ phases in their order, up to two under way; at one of them it announces the next step ─▶ all-reduce ─▶ done ─▶ next header
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cadre_protocol::Phase;
use cadre_step::envelope::{Ending, StepDone};
use cadre_step::phases::{Direction, PhaseAt};
use cadre_step::planned::PlannedStep;
use cadre_worker::session::{
    self, Inputs, Next, Outputs, PerHead, PerHeadMut, Rank, Rows, RowsMut, Ticket,
};

use crate::job::Job;
use crate::truth::Truth;

/// Phases that it has submitted and not waited for, at most.
const IN_FLIGHT: usize = 2;
const IN_TURN: &str = "calls come in their order";

/// What the thread does after its turn.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Want {
    /// It computes attention in place, then runs again.
    Launch,
    /// The model computes, then it runs again.
    Linear,
    /// Nothing before the IO thread says something.
    News,
    /// All trainers have to be here.
    Reduce(u64),
    /// It leaves, though there are further steps.
    Quit,
    /// It is over.
    Left(Ending),
}

#[derive(Debug)]
enum State {
    /// The other trainers are not there yet.
    Joining,
    Header,
    /// Next phase to submit, next to wait for.
    Phases(Arc<PlannedStep>, u32, u32),
    Reducing,
    /// Nothing follows; the controller has to say so.
    Idle,
}

/// See the module.
pub(crate) struct Main {
    pub(crate) session: Rank,
    pub(crate) rank: u16,
    pub(crate) step: u64,
    /// It has announced the step behind the one that runs, or that there is none.
    announced: bool,
    /// Phases of the step that it has submitted.
    submitted: u32,
    /// Of phases that were submitted and not yet waited for.
    tickets: VecDeque<Ticket>,
    state: State,
}

impl Main {
    /// Of a trainer whose IO thread runs.
    pub(crate) fn new(session: Rank) -> Self {
        let rank = session.rank();
        let (tickets, state) = (VecDeque::new(), State::Joining);
        Self { session, rank, step: 0, announced: false, submitted: 0, tickets, state }
    }

    /// Whether all steps are done here.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    /// Whether it is between the header of a step and its end.
    pub(crate) fn is_in_a_step(&self) -> bool {
        matches!(self.state, State::Phases(..) | State::Reducing)
    }

    /// Whether the step cannot end without phases that it has not submitted: while it is busy nobody else stands still.
    pub(crate) fn is_awaited(&self) -> bool {
        match &self.state {
            State::Header => true,
            State::Phases(planned, next, _) => self.next_own(planned, *next).is_some(),
            State::Joining | State::Reducing | State::Idle => false,
        }
    }

    /// The next phase from `next` on of which it has rows: of the others the session speaks itself.
    fn next_own(&self, planned: &PlannedStep, next: u32) -> Option<u32> {
        let mut rest = next..planned.order.count() as u32;
        rest.find(|&it| planned.has_rows(planned.order.at(Phase(it)).nano, self.rank))
    }

    /// The next step is announced, or that there is none; where the controller stops the job, neither.
    fn announce(&self, job: &Job, step: u64) {
        if step < job.steps {
            self.session.announce(job.lengths(step, self.rank)).expect(IN_TURN);
        } else if job.open_ended && !job.stopped {
            self.session.announce_end(job.steps).expect(IN_TURN);
        }
    }

    /// Where it is, in words.
    pub(crate) fn state(&self) -> String {
        match &self.state {
            State::Joining => "joining".into(),
            State::Header => format!("step {}, waiting for its header", self.step),
            State::Phases(_, next, done) => {
                format!("step {}, {next} phases submitted, {done} done", self.step)
            }
            State::Reducing => format!("step {}, all-reduce", self.step),
            State::Idle => "nothing to do".into(),
        }
    }

    /// All trainers are in the all-reduce.
    pub(crate) fn reduced(&mut self, job: &Job) {
        let step = self.step;
        let tokens = u64::from(job.tokens);
        let done = StepDone {
            step,
            loss: 1.0,
            gradient_norm: 1.0,
            validation_loss: None,
            learning_rate: 1.0,
            tokens,
            seconds: 1.0,
            exposed_wait_seconds: 0.0,
            header_wait_seconds: 0.0,
        };
        self.session.done(done).expect(IN_TURN);
        self.step += 1;
        self.state = State::Header;
    }

    /// One turn of the thread.
    pub(crate) fn run(&mut self, job: &Job, truth: &mut Truth) -> Result<Want, String> {
        if matches!(self.state, State::Joining) {
            return Ok(match self.session.addresses(Duration::ZERO) {
                Ok(_) => {
                    self.announce(job, 0);
                    self.state = State::Header;
                    Want::Linear
                }
                Err(Some(ending)) => Want::Left(ending),
                Err(None) => Want::News,
            });
        }
        if matches!(self.state, State::Header) && job.stopped && self.step == job.steps {
            self.state = State::Idle;
        }
        if matches!(self.state, State::Reducing | State::Idle) {
            // Nothing is computed in the all-reduce; the ring of a job that is over breaks.
            if let Some(ending) = self.session.ending(Duration::ZERO) {
                return Ok(Want::Left(ending));
            }
            let ran = self.is_idle() && self.session.advance();
            return Ok(if ran { Want::Launch } else { Want::News });
        }
        let ran = self.session.advance();
        let idle = if ran { Want::Launch } else { Want::News };
        match &self.state {
            State::Joining | State::Header | State::Reducing | State::Idle => {
                match self.session.poll_begin(self.step) {
                    Some(Next::End(ending)) => Ok(Want::Left(ending)),
                    Some(Next::Step(_)) if job.quits == Some(self.step) && job.quits_after == 0 => {
                        Ok(Want::Quit)
                    }
                    Some(Next::Step(planned)) => {
                        if !job.is_hostile
                            && job.turns(self.step).is_some_and(|it| it != planned.header.turns)
                        {
                            return Err(format!("the turns are {}", planned.header.turns));
                        }
                        if job.is_hostile && !job.has_layouts(&planned) {
                            // Somebody has announced other rows than it has.
                            self.session
                                .fail("trainers announced other rows than there are".into());
                            self.state = State::Idle;
                            return Ok(idle);
                        }
                        (self.announced, self.submitted) = (false, 0);
                        self.state = State::Phases(planned, 0, 0);
                        Ok(Want::Linear)
                    }
                    None => Ok(idle),
                }
            }
            State::Phases(planned, next, done) => {
                let (planned, next, done) = (Arc::clone(planned), *next, *done);
                match self.phase(job, truth, &planned, (next, done)) {
                    Ok(Some(Want::Reduce(step))) => {
                        // Who hears of the end on the way into the ring finds it broken.
                        let ending = self.session.ending(Duration::ZERO);
                        Ok(ending.map_or(Want::Reduce(step), Want::Left))
                    }
                    Ok(Some(want)) => Ok(want),
                    Ok(None) => Ok(idle),
                    Err(Wrong::Call(session::Error::Ended { .. })) => {
                        let ending = self.session.ending(Duration::ZERO);
                        ending.map(Want::Left).ok_or_else(|| "an end without a reason".into())
                    }
                    Err(Wrong::Call(_)) if job.is_hostile => {
                        // It is refused, and so the job ends.
                        self.state = State::Idle;
                        Ok(idle)
                    }
                    Err(Wrong::Call(error)) => Err(format!("trainer {}: {error}", self.rank)),
                    Err(Wrong::Bits(what)) => {
                        Err(format!("trainer {} has wrong bits of {what}", self.rank))
                    }
                }
            }
        }
    }

    fn phase(
        &mut self,
        job: &Job,
        truth: &mut Truth,
        planned: &Arc<PlannedStep>,
        (next, done): (u32, u32),
    ) -> Result<Option<Want>, Wrong> {
        let phases = planned.order.count() as u32;
        let own = self.next_own(planned, next);
        if !self.announced
            && own.unwrap_or(phases) >= job.announces_at(self.step, self.rank, phases)
        {
            self.announced = true;
            self.announce(job, self.step + 1);
        }
        let depth = IN_FLIGHT.min(job.nanos);
        if let Some(next) = own.filter(|_| self.tickets.len() < depth) {
            let phase = planned.order.at(Phase(next));
            let own = truth.own((self.step, phase.layer, phase.nano), self.rank);
            let Apart { wide, narrow, scalars } = Apart::of(job, phase.layer);
            let [q, o, dout] = [&own.q, &own.o, &own.dout].map(|it| wide.spread(it));
            let [k, v] = [&own.k, &own.v].map(|it| narrow.spread(it));
            let [lse, dlse] = [&own.lse, &own.dlse].map(|it| scalars.spread(it));
            let (q, k, v) = (wide.rows(&q), narrow.rows(&k), narrow.rows(&v));
            let inputs = match phase.direction {
                Direction::Forward => Inputs::Forward { q, k, v },
                Direction::Backward => {
                    let (o, dout) = (wide.rows(&o), wide.rows(&dout));
                    let scalar = |it| PerHead::f32(it).every(scalars.distance());
                    let (lse, dlse) = (scalar(&lse), job.uses_lse.then(|| scalar(&dlse)));
                    Inputs::Backward { q, k, v, o, lse, dout, dlse }
                }
            };
            self.tickets.push_back(self.session.submit(phase, inputs)?);
            self.state = State::Phases(Arc::clone(planned), next + 1, done);
            self.submitted += 1;
            let quits = job.quits == Some(self.step) && job.quits_after == self.submitted;
            return Ok(Some(if quits { Want::Quit } else { Want::Linear }));
        }
        let Some(ticket) = self.tickets.pop_front() else {
            self.state = State::Reducing;
            return Ok(Some(Want::Reduce(self.step)));
        };
        if !self.session.is_ready(&ticket) {
            self.tickets.push_front(ticket);
            return Ok(None);
        }
        self.finish((job, truth), planned, ticket)?;
        self.state = State::Phases(Arc::clone(planned), next, done + 1);
        Ok(Some(Want::Linear))
    }

    /// Takes the results of a phase and compares them.
    fn finish(
        &self,
        (job, truth): (&Job, &mut Truth),
        planned: &PlannedStep,
        ticket: Ticket,
    ) -> Result<(), Wrong> {
        let PhaseAt { layer, nano, direction } = ticket.phase();
        let of = (self.step, layer, nano);
        let what = |tensor| Wrong::Bits(format!("{tensor} of step, layer, nano-batch {of:?}"));
        let own = truth.own(of, self.rank);
        let Apart { wide, narrow, scalars } = Apart::of(job, layer);
        match direction {
            Direction::Forward => {
                let (mut o, mut lse) = (wide.room(&own.o), scalars.room(&own.lse));
                let to = Outputs::Forward {
                    o: RowsMut::f32(&mut o).every(wide.distance()),
                    lse: PerHeadMut::f32(&mut lse).every(scalars.distance()),
                };
                self.session.wait(ticket, to)?;
                same(&o, &wide.spread(&own.o)).ok_or_else(|| what("O"))?;
                same(&lse, &scalars.spread(&own.lse)).ok_or_else(|| what("LSE"))
            }
            Direction::Backward => {
                let right = truth.gradients(of, self.rank, planned);
                let mut q = wide.room(&own.dq);
                let [mut k, mut v] = [&right.dk, &right.dv].map(|it| narrow.room(it));
                let [dk, dv] = [&mut k, &mut v].map(|it| RowsMut::f32(it).every(narrow.distance()));
                let dq = RowsMut::f32(&mut q).every(wide.distance());
                self.session.wait(ticket, Outputs::Backward { dq, dk, dv })?;
                same(&q, &wide.spread(&own.dq)).ok_or_else(|| what("dQ"))?;
                same(&k, &narrow.spread(&right.dk)).ok_or_else(|| what("dK"))?;
                same(&v, &narrow.spread(&right.dv)).ok_or_else(|| what("dV"))
            }
        }
    }
}

/// How far rows of a tensor lie apart: numbers of a row, and those behind it that are nobody's.
#[derive(Clone, Copy)]
struct Gap {
    width: usize,
    gap: usize,
}

impl Gap {
    fn distance(self) -> usize {
        self.width + self.gap
    }

    /// The rows, with numbers between them that nobody may read or write.
    fn spread(self, rows: &[f32]) -> Vec<f32> {
        let behind = std::iter::repeat_n(f32::NAN, self.gap);
        rows.chunks_exact(self.width)
            .flat_map(|it| it.iter().copied().chain(behind.clone()))
            .collect()
    }

    fn rows(self, spread: &[f32]) -> Rows<'_> {
        Rows::f32(spread).every(self.distance())
    }

    /// Room for as many rows.
    fn room(self, rows: &[f32]) -> Vec<f32> {
        self.spread(&vec![0.0; rows.len()])
    }
}

/// Of tensors with query heads, with KV heads, and with a number for each query head.
struct Apart {
    wide: Gap,
    narrow: Gap,
    scalars: Gap,
}

impl Apart {
    fn of(job: &Job, layer: usize) -> Self {
        let heads = job.layers.kind_of(layer).heads;
        let [query, kv, dim] = [heads.query, heads.kv, heads.dim].map(usize::from);
        let of = |width| Gap { width, gap: job.gap };
        Self { wide: of(query * dim), narrow: of(kv * dim), scalars: of(query) }
    }
}

enum Wrong {
    Call(session::Error),
    Bits(String),
}

impl From<session::Error> for Wrong {
    fn from(error: session::Error) -> Self {
        Self::Call(error)
    }
}

fn same(one: &[f32], other: &[f32]) -> Option<()> {
    let bits = |it: &f32| it.to_bits();
    one.iter().map(bits).eq(other.iter().map(bits)).then_some(())
}
