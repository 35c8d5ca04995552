//! The trainer's side of the IO thread: its rows go out, its results come in.
//!
//! In: phases that the trainer's main thread submits, events of the exchange. Out: whole phases
//! ([`Whole`]) to the main thread, and before them each [`Part`] of dK and dV as soon as it counts. It merges nothing: that is
//! for the thread that computes.
//!
//! Invariant: the landing of a phase is reserved before its rows are announced, and handed on only when
//! no pull can write to it any more. Where a device copies on for a pull that was given up, since another process has made the
//! result, the phase waits for that copy.

mod queued;

use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;

use cadre_exchange::LandingId;
use cadre_kernels::device;
use cadre_planner::{BundleId, RankId};
use cadre_protocol::trainer::{Command, Event, Trainer};
use cadre_protocol::{At, Nanos, Peer, PullId, Settings, TrainerId, Work};
use cadre_step::lowering::{BackwardResult, Tensor};
use cadre_step::phases::Direction;
use cadre_step::planned::wire_bytes;

use self::queued::Queued;
pub use self::queued::TooMany;
use super::exchange::Exchange;
use super::output::{Output, Side};
use super::planning::Asker;
use super::shared::{Shared, result_key, rows_key};
use super::standing::Standing;
use super::whole::{Landed, Part, Values, Whole};
use crate::launch::{PhaseRows, Results};
use crate::memory::Memory;

/// Between two looks at landings that are still copied to.
const LOOK_EVERY: Nanos = Nanos::from_millis(2);

/// Landings of a phase, with what the own server computed of it.
#[derive(Debug)]
enum Landing<M> {
    Forward {
        o: LandingId,
        lse: LandingId,
        own: Vec<(Work, [M; 2])>,
    },
    Backward {
        dq: LandingId,
        own: Vec<(BundleId, M)>,
        /// Of parts that were not given away yet.
        parts: BTreeMap<BundleId, (LandingId, BackwardResult)>,
    },
}

impl<M> Landing<M> {
    fn ids(&self) -> impl Iterator<Item = LandingId> {
        let (all, parts) = match self {
            Self::Forward { o, lse, .. } => (vec![*o, *lse], None),
            Self::Backward { dq, parts, .. } => (vec![*dq], Some(parts)),
        };
        all.into_iter().chain(parts.into_iter().flat_map(|it| it.values().map(|it| it.0)))
    }
}

#[derive(Debug)]
struct Open<M> {
    landing: Landing<M>,
    makers: BTreeMap<Work, Peer>,
}

/// See the module.
pub struct Rows<M> {
    me: TrainerId,
    machine: Trainer,
    /// Submitted by the main thread, waiting for the window.
    queued: Queued<M>,
    open: BTreeMap<At, Open<M>>,
    /// Phases that have all results, and landings that are still copied to; looked at then.
    late: Vec<At>,
    look_at: Nanos,
    /// Pulls of results from this process's own server.
    own: BTreeMap<PullId, Arc<Results<M>>>,
    /// Whether its main thread does what it has to.
    pub standing: Standing,
}

impl<M: Memory> Rows<M> {
    /// Of trainer `me`, whose main thread is watched by `standing`.
    pub fn new(me: TrainerId, settings: Settings, standing: Standing, now: Nanos) -> Self {
        Self {
            me,
            standing,
            machine: Trainer::new(me, settings, now),
            queued: Queued::new(),
            open: BTreeMap::new(),
            late: Vec::new(),
            look_at: now,
            own: BTreeMap::new(),
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let late = (!self.late.is_empty()).then_some(self.look_at);
        self.machine.next_deadline().into_iter().chain(late).min()
    }

    /// Whether a step runs here.
    pub fn runs(&self, step: u64) -> bool {
        self.machine.runs(step)
    }

    /// Takes rows of a phase, if this trainer has any; they go out as soon as the window allows.
    ///
    /// # Errors
    ///
    /// [`TooMany`]: nothing was taken.
    pub fn submit(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        at: At,
        rows: Option<PhaseRows<M>>,
    ) -> Result<(), TooMany> {
        if rows.is_none() {
            self.standing.skipped();
        } else if self.queued.is_full() {
            let phase = shared.steps[&at.step].planned.order.at(at.phase);
            let phase = phase.in_words(at.step);
            return Err(TooMany { rank: self.me.0, phase });
        } else {
            self.standing.submitted();
        }
        self.queued.push(at, rows);
        self.announce(shared);
        Ok(())
    }

    fn announce(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>) {
        while self.machine.may_submit() {
            let Some((at, rows)) = self.queued.pop() else { return };
            if let Some(rows) = rows {
                if let Err(why) = self.reserve(shared, at) {
                    return shared.broke(&why);
                }
                publish(shared, at, *rows);
            }
            self.handle(shared, Event::Submitted(at));
        }
    }

    /// Reserves the landing of a phase's results.
    fn reserve(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        at: At,
    ) -> Result<(), device::Error> {
        let running = shared.steps.get(&at.step).expect("a step runs while it is submitted to");
        let planned = Arc::clone(&running.planned);
        let (nano, direction) = planned.nano_of(at.phase);
        let heads = nano.problem.heads;
        let rows = nano.problem.layout.rank_rows(RankId(self.me.0.into())) as usize;
        let scalars = rows * usize::from(heads.query);
        let wire = usize::from(wire_bytes(planned.header.wire));
        let wide = scalars * usize::from(heads.dim) * wire;
        let landing = match direction {
            Direction::Forward => Landing::Forward {
                o: shared.provider.land(wide)?,
                lse: shared.provider.land(scalars * 4)?,
                own: Vec::new(),
            },
            Direction::Backward => {
                let dq = shared.provider.land(wide)?;
                Landing::Backward { dq, own: Vec::new(), parts: BTreeMap::new() }
            }
        };
        self.open.insert(at, Open { landing, makers: BTreeMap::new() });
        Ok(())
    }

    /// Runs the machine on an event and does what it commands.
    pub fn handle(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, event: Event) {
        let mut commands = Vec::new();
        self.machine.handle(shared.now(), event, &mut commands);
        for command in commands {
            self.obey(shared, command);
        }
        if self.look_at <= shared.now() {
            for at in std::mem::take(&mut self.late) {
                self.complete(shared, at);
            }
        }
        self.announce(shared);
    }

    fn obey(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, command: Command) {
        tracing::trace!("trainer side: {command:?}");
        match command {
            Command::Send { to, message } => shared.send(to, message),
            Command::Pull { pull, peer, at, work, deadline } => {
                if peer == shared.me {
                    self.pull_own(shared, pull, at, work);
                } else {
                    let pulled = self.pull(shared, pull, (peer, deadline), at, work);
                    if let Err(why) = pulled {
                        shared.broke(&why);
                    }
                }
            }
            Command::Accept { pull, at, work, from } => self.accept(shared, pull, (at, work), from),
            Command::Discard { pull } => {
                self.own.remove(&pull);
            }
            Command::Complete(at) => self.complete(shared, at),
            Command::Release(at) => release(shared, at),
            Command::StepOver(step) => {
                self.standing.passed(step);
                shared.outputs.put(Output::Over(step));
            }
            Command::Reassign { step, round: _, tables } => {
                shared.reassign(step, tables, Asker::Members);
            }
            Command::Close(peer) => shared.close(peer),
            Command::End(end) => shared.outputs.put(Output::End(Side::Trainer, end)),
        }
    }

    fn pull_own(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        pull: PullId,
        at: At,
        work: Work,
    ) {
        let result = match shared.results.get(&(at, work)) {
            Some(results) => {
                self.own.insert(pull, Arc::clone(results));
                Ok(shared.me.incarnation())
            }
            None => Err(cadre_protocol::PullFailure::Gone),
        };
        shared.ended(Side::Trainer, pull, result);
    }

    fn pull(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        pull: PullId,
        (peer, deadline): (Peer, Nanos),
        at: At,
        work: Work,
    ) -> Result<(), device::Error> {
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let (nano, _) = planned.nano_of(at.phase);
        let rank = RankId(self.me.0.into());
        let open = self.open.get_mut(&at).expect("results are pulled in an open phase");
        let key = |tensor| result_key(at, tensor, work);
        let parts = match &mut open.landing {
            Landing::Forward { o, lse, .. } => {
                let (problem, plan) = (&nano.problem, &nano.plan);
                let (o_pieces, lse_pieces) =
                    nano.lists.forward_result(problem, plan, work.0 as usize, rank);
                vec![(key(Tensor::O), o_pieces, *o), (key(Tensor::OLse), lse_pieces, *lse)]
            }
            Landing::Backward { dq, parts, .. } => {
                let bundle = BundleId(work.0);
                let (part, result) = match parts.entry(bundle) {
                    Entry::Occupied(it) => it.into_mut(),
                    Entry::Vacant(it) => {
                        let result =
                            nano.lists.backward_result(&nano.problem, &nano.plan, bundle, rank);
                        let landing = shared.provider.land(2 * result.part_bytes as usize)?;
                        it.insert((landing, result))
                    }
                };
                let behind = |it: &cadre_exchange::Piece| cadre_exchange::Piece {
                    local: it.local + result.part_bytes,
                    ..*it
                };
                let dv = result.part.iter().map(behind).collect();
                vec![
                    (key(Tensor::DQ), result.dq.clone(), *dq),
                    (key(Tensor::DK), result.part.clone(), *part),
                    (key(Tensor::DV), dv, *part),
                ]
            }
        };
        shared.pull((Side::Trainer, pull), peer, parts, deadline);
        Ok(())
    }

    /// The result of a work counts. A part of dK and dV goes on at once.
    fn accept(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        pull: PullId,
        (at, work): (At, Work),
        from: Peer,
    ) {
        let own = self.own.remove(&pull);
        let Open { landing, makers } =
            self.open.get_mut(&at).expect("results count only in an open phase");
        makers.insert(work, from);
        match (landing, own.as_deref()) {
            (Landing::Forward { own, .. }, Some(Results::Forward(results))) => {
                own.push((work, results.clone()));
            }
            (Landing::Backward { own, parts, .. }, Some(Results::Backward([dq, dk, dv]))) => {
                let bundle = BundleId(work.0);
                own.push((bundle, dq.clone()));
                if let Some((landing, _)) = parts.remove(&bundle) {
                    shared.provider.discard(landing);
                }
                give(shared, at, bundle, Values::Own([dk.clone(), dv.clone()]));
            }
            (Landing::Backward { parts, .. }, None) => {
                let bundle = BundleId(work.0);
                // Where a device copies on for an older pull, it waits until the phase is whole.
                let free = |it: &mut (LandingId, _)| !shared.provider.is_busy(it.0);
                if parts.get_mut(&bundle).is_some_and(free)
                    && let Some((landing, result)) = parts.remove(&bundle)
                {
                    let room = take(&mut shared.provider, landing);
                    give(shared, at, bundle, Values::Landed(room, result));
                }
            }
            (Landing::Forward { .. }, _) | (Landing::Backward { .. }, Some(_)) => {}
        }
    }

    fn complete(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, at: At) {
        let busy = |it: &Open<M>| it.landing.ids().any(|it| shared.provider.is_busy(it));
        if self.open.get(&at).is_some_and(busy) {
            self.late.push(at);
            self.look_at = shared.now().after(LOOK_EVERY);
            return;
        }
        // Where it has no rows, nobody waits for it here.
        let Some(Open { landing, makers }) = self.open.remove(&at) else { return };
        let landed = match landing {
            Landing::Forward { o, lse, own } => {
                let provider = &mut shared.provider;
                Landed::Forward { o: take(provider, o), lse: take(provider, lse), own }
            }
            Landing::Backward { dq, own, parts } => {
                for (bundle, (landing, result)) in parts {
                    let room = take(&mut shared.provider, landing);
                    give(shared, at, bundle, Values::Landed(room, result));
                }
                Landed::Backward { dq: take(&mut shared.provider, dq), own }
            }
        };
        let whole = Whole { at, landed, makers };
        shared.outputs.put(Output::Whole(Box::new(whole)));
    }
}

/// Hands a part on to the thread that adds it.
fn give<M: Memory>(
    shared: &mut Shared<impl Exchange<Memory = M>>,
    at: At,
    bundle: BundleId,
    values: Values<M>,
) {
    let planned = Arc::clone(&shared.steps[&at.step].planned);
    let part = Part { planned, phase: at.phase, bundle, values };
    shared.outputs.put(Output::Part(Box::new(part)));
}

/// The memory of a landing whose pulls have all ended.
fn take<M: Memory>(provider: &mut impl Exchange<Memory = M>, landing: LandingId) -> M::Room {
    provider.take(landing).expect("no pull of a result that counts is outstanding")
}

fn publish<M: Memory>(shared: &mut Shared<impl Exchange<Memory = M>>, at: At, rows: PhaseRows<M>) {
    for (tensor, memory) in tensors(&rows) {
        shared.provider.publish(rows_key(at, tensor), memory);
    }
    shared.rows.insert(at, rows);
}

fn release(shared: &mut Shared<impl Exchange>, at: At) {
    if let Some(rows) = shared.rows.remove(&at) {
        for (tensor, _) in tensors(&rows) {
            shared.provider.withdraw(rows_key(at, tensor));
        }
    }
}

/// The tensors of a phase's rows, by name.
pub fn tensors<M>(rows: &PhaseRows<M>) -> impl Iterator<Item = (Tensor, &M)> {
    let PhaseRows { q, k, v, gradients } = rows;
    let gradients = gradients.iter().flat_map(|[dout, lse, delta]| {
        [(Tensor::DOut, dout), (Tensor::Lse, lse), (Tensor::Delta, delta)]
    });
    [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v)].into_iter().chain(gradients)
}
