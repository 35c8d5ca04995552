//! Core attention of a trainer through the pool.
//!
//! In: rows of the model's calls ([`Attention`]). Out: whole phases, merged. What the plan gives to this
//! trainer's own processor (in place) is computed inside the calls, on the calling thread.
//!
//! Invariant: a call returns only when its rows are complete and every work of the phase that was planned
//! for this trainer's in-place server has run, so no other trainer waits for this one's next call. Parts
//! of dK and dV are added in the order of bundles: slot, then document, then KV head.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use cadre_exchange::Buffer;
use cadre_kernels::device;
use cadre_planner::{BundleId, RankId};
use cadre_protocol::{At, Bundle, Filler, TrainerId};

use super::{Attention, AttentionError, Gradients};
use crate::compute::{Compute, FLYING, Progress};
use crate::io::envelope::{Ending, Lengths, StepDone};
use crate::io::rows::{Landed, Whole};
use crate::io::{Handle, Notice, Request};
use crate::launch::{PhaseRows, Results};
use crate::memory::{Memory, Place};
use crate::merge;
use crate::phases::{Direction, PhaseAt};
use crate::planned::{PlannedStep, filler};
use crate::trace::{Activity, Tracer};
use crate::wire::{from_wire, to_wire};

/// What a phase keeps from its forward to its backward.
#[derive(Debug)]
struct Kept {
    q: Memory,
    k: Memory,
    v: Memory,
    lse: Option<Memory>,
}

/// See the module.
pub struct Session {
    me: TrainerId,
    handle: Handle,
    notices: Receiver<Notice>,
    compute: Compute,
    place: Place,
    tracer: Tracer,
    planned: Option<Arc<PlannedStep>>,
    /// Steps that were announced and not yet begun.
    coming: BTreeMap<u64, Arc<PlannedStep>>,
    /// Where the trainers listen for the all-reduce, once known.
    rings: Option<Vec<String>>,
    whole: BTreeMap<At, Whole>,
    kept: BTreeMap<(usize, usize), Kept>,
    exposed: Duration,
    ended: Option<Ending>,
}

/// What the conductor wants next.
#[derive(Debug)]
pub enum Next {
    /// Run this step.
    Step(Arc<PlannedStep>),
    /// No step follows.
    End(Ending),
}

/// The job ended while attention was computed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Ended(String);

impl Session {
    /// Of trainer `me`; `compute` runs what is planned for it in place, its rows live in `place`.
    pub fn new(
        me: TrainerId,
        handle: Handle,
        notices: Receiver<Notice>,
        (compute, place): (Compute, Place),
        tracer: Tracer,
    ) -> Self {
        Self {
            me,
            handle,
            notices,
            compute,
            place,
            tracer,
            planned: None,
            coming: BTreeMap::new(),
            rings: None,
            whole: BTreeMap::new(),
            kept: BTreeMap::new(),
            exposed: Duration::ZERO,
            ended: None,
        }
    }

    /// Waits until all trainers listen: where, for the all-reduce, by rank.
    ///
    /// # Errors
    ///
    /// The job ended before, or `deadline` is over.
    pub fn rings(&mut self, deadline: Duration) -> Result<Vec<String>, Option<Ending>> {
        let until = Instant::now() + deadline;
        loop {
            if let Some(rings) = self.rings.take() {
                return Ok(rings);
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.notices.recv_timeout(left) {
                Ok(notice) => self.take(notice),
                Err(_) => return Err(self.ended.clone()),
            }
            if self.ended.is_some() {
                return Err(self.ended.clone());
            }
        }
    }

    /// The IO thread of this process.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Tells the conductor what this trainer holds of a step to come.
    pub fn announce(&self, lengths: Lengths) {
        self.handle.send(Request::Lengths(lengths));
    }

    /// Waits for the header of `step`, or for the end of the job.
    pub fn next(&mut self, step: u64) -> Next {
        loop {
            if let Some(ending) = &self.ended {
                return Next::End(ending.clone());
            }
            if let Some(planned) = self.coming.remove(&step) {
                self.planned = Some(Arc::clone(&planned));
                self.kept.clear();
                self.exposed = Duration::ZERO;
                return Next::Step(planned);
            }
            self.progress();
        }
    }

    /// Time in attention calls of this step in which nothing was computed.
    pub fn exposed_wait(&self) -> Duration {
        self.exposed
    }

    /// Tells the conductor that a step is over here.
    pub fn step_done(&self, done: StepDone) {
        self.handle.send(Request::StepDone(done));
    }

    /// Waits for the reason why the job ends, at most for `deadline`.
    pub fn ending(&mut self, deadline: Duration) -> Option<Ending> {
        let until = Instant::now() + deadline;
        while self.ended.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            match self.notices.recv_timeout(left) {
                Ok(notice) => self.take(notice),
                Err(_) => break,
            }
        }
        self.ended.clone()
    }

    /// Computes what is queued, or waits for something to happen.
    fn progress(&mut self) {
        let mut any = false;
        while let Ok(notice) = self.notices.try_recv() {
            self.take(notice);
            any = true;
        }
        // Something came, or was computed: the caller looks whether it is what it waits for.
        let progress = self.compute.run();
        if let (Progress::Ran, Some(why)) = (progress, self.compute.lost()) {
            self.handle.send(Request::Fail(why.to_owned()));
        }
        if progress == Progress::Ran || any || self.ended.is_some() {
            return;
        }
        if progress == Progress::Flying {
            if let Ok(notice) = self.notices.recv_timeout(FLYING) {
                self.take(notice);
            }
            return;
        }
        let start = Instant::now();
        if let Ok(notice) = self.notices.recv() {
            self.take(notice);
        } else {
            let reason = "the io thread of this trainer ended".to_owned();
            self.ended = Some(Ending::Failed { reason, bad_input: false });
        }
        self.exposed += start.elapsed();
        self.tracer.span("main", Activity::Wait, start, String::new);
    }

    fn take(&mut self, notice: Notice) {
        match notice {
            Notice::Trainers(rings) => self.rings = Some(rings),
            Notice::Step(planned) => {
                self.coming.insert(planned.header.step, planned);
            }
            Notice::Whole(whole) => {
                self.whole.insert(whole.at, *whole);
            }
            Notice::Work(work) => self.compute.push(*work),
            Notice::Cancelled(at) => self.compute.cancel(at),
            Notice::Lost(reason) => self.ended = Some(Ending::Failed { reason, bad_input: false }),
            Notice::End(ending) => self.ended = Some(ending),
        }
    }

    fn running(&self, layer: usize, nano: usize) -> Result<&Arc<PlannedStep>, AttentionError> {
        let order = |what: &str| AttentionError::Order { layer, nano, what: what.into() };
        let planned = self.planned.as_ref().ok_or_else(|| order("used before a step began"))?;
        let (layers, nanos) = (planned.order.layers, planned.order.nanos);
        if layer < layers && nano < nanos {
            Ok(planned)
        } else {
            Err(order("named: no such phase"))
        }
    }

    fn at(
        &self,
        direction: Direction,
        layer: usize,
        nano: usize,
    ) -> Result<(Arc<PlannedStep>, At), AttentionError> {
        let planned = Arc::clone(self.running(layer, nano)?);
        let phase = planned.order.index(PhaseAt { layer, nano, direction });
        let step = planned.header.step;
        Ok((planned, At { step, phase }))
    }

    /// Waits until a phase is whole and this trainer's own part of it has run.
    fn wait(&mut self, planned: &PlannedStep, at: At) -> Result<Whole, AttentionError> {
        let own = self.planned_here(planned, at);
        loop {
            if (self.compute.ran(at) >= own || self.compute.is_cancelled(at))
                && let Some(whole) = self.whole.remove(&at)
            {
                return Ok(whole);
            }
            if let Some(ending) = &self.ended {
                let reason = match ending {
                    Ending::Failed { reason, .. } => reason.clone(),
                    Ending::Completed | Ending::Stopped { .. } => "the job was ended".into(),
                };
                return Err(AttentionError::Failed(Box::new(Ended(reason))));
            }
            self.progress();
        }
    }

    /// Works of a phase that the plan gives to this trainer's in-place server.
    fn planned_here(&self, planned: &PlannedStep, at: At) -> usize {
        let mine = |slot: cadre_protocol::Slot| {
            let member = planned.header.fillers[usize::from(slot.0)].as_ref().map(filler);
            member == Some(Filler::InPlace(self.me))
        };
        (0..planned.works(at.phase) as u32)
            .filter(|&work| {
                let bundle = planned.bundle_of(at.phase, work);
                mine(planned.slot_of(at.phase, Bundle(bundle.0)))
            })
            .count()
    }

    fn announce_rows(&self, at: At, rows: PhaseRows) {
        let start = Instant::now();
        self.handle.send(Request::Submit(at, rows));
        self.tracer.span("main", Activity::Doorbell, start, || {
            format!("step {} phase {}", at.step, at.phase.0)
        });
    }
}

impl Attention for Session {
    fn submit_forward(
        &mut self,
        layer: usize,
        nano: usize,
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
    ) -> Result<(), AttentionError> {
        let (planned, at) = self.at(Direction::Forward, layer, nano)?;
        let kind = planned.header.wire;
        let hold = |it| self.place.hold(to_wire(kind, it)).map_err(failed);
        let (q, k, v) = (hold(q)?, hold(k)?, hold(v)?);
        let rows = PhaseRows { q: q.clone(), k: k.clone(), v: v.clone(), gradients: None };
        self.kept.insert((layer, nano), Kept { q, k, v, lse: None });
        self.announce_rows(at, rows);
        Ok(())
    }

    fn wait_forward(&mut self, layer: usize, nano: usize) -> Result<Vec<f32>, AttentionError> {
        let (planned, at) = self.at(Direction::Forward, layer, nano)?;
        let whole = self.wait(&planned, at)?;
        let (nano_plan, rank, place) = (&planned.nanos[nano], RankId(self.me.0), &self.place);
        let Landed::Forward { mut o, mut lse } = whole.landed else {
            unreachable!("a forward phase lands O and LSE")
        };
        for (work, results) in &whole.own {
            if let Results::Forward([own_o, own_lse]) = results.as_ref() {
                let own = (own_o, own_lse);
                merge::own_forward(
                    place,
                    nano_plan,
                    (work.0 as usize, rank),
                    own,
                    (&mut o, &mut lse),
                )
                .map_err(failed)?;
            }
        }
        let o = from_wire(planned.header.wire, place.unload(o).map_err(failed)?);
        let lse = lse.share();
        let numbers = place.read(&lse).map_err(failed)?;
        merge::check_forward(&planned, at, rank, &o, numbers.f32s(), &whole.makers)?;
        let kept = self.kept.get_mut(&(layer, nano)).ok_or_else(|| AttentionError::Order {
            layer,
            nano,
            what: "waited for: it was not submitted".into(),
        })?;
        kept.lse = Some(lse);
        Ok(o)
    }

    fn submit_backward(
        &mut self,
        layer: usize,
        nano: usize,
        dout: Vec<f32>,
        delta: Vec<f32>,
    ) -> Result<(), AttentionError> {
        let (planned, at) = self.at(Direction::Backward, layer, nano)?;
        let kept = self.kept.remove(&(layer, nano));
        let (Some(kept), Some(lse)) = kept.map_or((None, None), |it| {
            let lse = it.lse.clone();
            (Some(it), lse)
        }) else {
            let what = "submitted backward: its forward is not done".into();
            return Err(AttentionError::Order { layer, nano, what });
        };
        let dout = self.place.hold(to_wire(planned.header.wire, dout)).map_err(failed)?;
        let delta = self.place.hold(Buffer::from(delta)).map_err(failed)?;
        let gradients = Some([dout, lse, delta]);
        let Kept { q, k, v, lse: _ } = kept;
        self.announce_rows(at, PhaseRows { q, k, v, gradients });
        Ok(())
    }

    fn wait_backward(&mut self, layer: usize, nano: usize) -> Result<Gradients, AttentionError> {
        let (planned, at) = self.at(Direction::Backward, layer, nano)?;
        let whole = self.wait(&planned, at)?;
        let (nano_plan, rank, place) = (&planned.nanos[nano], RankId(self.me.0), &self.place);
        let Landed::Backward { mut dq, parts } = whole.landed else {
            unreachable!("a backward phase lands dQ and parts")
        };
        let mut own = BTreeMap::new();
        for (work, results) in &whole.own {
            let bundle = BundleId(work.0);
            if let Results::Backward([own_dq, dk, dv]) = results.as_ref() {
                merge::own_backward(place, nano_plan, (bundle, rank), own_dq, &mut dq)
                    .map_err(failed)?;
                let read = |it| place.read(it).map_err(failed);
                own.insert(bundle, [read(dk)?, read(dv)?]);
            }
        }
        // Sums of parts are the processor's.
        let mut landed = BTreeMap::new();
        for (bundle, (room, result)) in parts {
            landed.insert(bundle, (place.unload(room).map_err(failed)?, result));
        }
        let (dk, dv) = merge::parts(nano_plan, rank, &own, &landed);
        let dq = from_wire(planned.header.wire, place.unload(dq).map_err(failed)?);
        let gradients = Gradients { dq, dk, dv };
        merge::check_backward(&planned, at, rank, &gradients, &whole.makers)?;
        Ok(gradients)
    }
}

fn failed(error: device::Error) -> AttentionError {
    AttentionError::Failed(Box::new(error))
}
