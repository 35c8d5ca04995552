//! The steps of a trainer, from joining the ring to the ending that the conductor names.
//!
//! In: a prepared process. Out: an [`Ending`]; checkpoints on the way. It does not decide that the job is
//! over: the conductor does, or a failure.
//!
//! Invariant: the state counts a step only after the step has succeeded here, so a checkpoint never holds
//! half a step.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_worker::session::{
    ALL_JOIN_WITHIN, Activity, DocumentId, Ending, Lengths as Told, NanoLengths, Next, PlannedStep,
    StepDone, Stretch, Tracer, links::PeerId, notice,
};

use super::Process;
use crate::Pool;
use crate::checkpoint::{self, Last, Values, Writer};
use crate::ring::{Members, Ring, RingError};
use crate::step::{StepError, Track};

/// Longest wait for the reason of a failure that showed in the all-reduce first.
const REASON_WITHIN: Duration = Duration::from_secs(3);

impl Process {
    /// Joins the ring of the all-reduce.
    pub(super) fn connect_ring(&mut self) -> Result<Ring, Ending> {
        let failed = |reason: String| Ending::Failed { reason, bad_input: false };
        // All of it takes no longer than this: a rank has as long, and `stalledAfterSeconds`, until its first call.
        let begun = Instant::now();
        let left = || ALL_JOIN_WITHIN.saturating_sub(begun.elapsed());
        let rings = self.session.addresses(left()).map_err(|ended| {
            let late = || {
                failed(format!("not all trainers were there after {} s", ALL_JOIN_WITHIN.as_secs()))
            };
            ended.unwrap_or_else(late)
        })?;
        let parse = |(peer, address): &(PeerId, String)| {
            let parsed = address.parse::<SocketAddr>();
            parsed.map(|it| (*peer, it)).map_err(|_| {
                failed(format!("{address:?} is no address of {peer} for the all-reduce"))
            })
        };
        let trainers = rings.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        // Closed when this function returns: once the ring stands, nobody may connect.
        let Some(listener) = self.listener.take() else {
            return Err(failed("the all-reduce was joined twice".into()));
        };
        let (greeter, settings) = (self.session.greeter(), self.session.settings());
        let (world, listed) = (usize::from(settings.trainers), trainers.len());
        if listed != world || trainers[usize::from(self.session.rank())].0 != greeter.me() {
            let me = greeter.me();
            return Err(failed(format!(
                "the controller's list of {listed} trainers is not one of {world} with {me}; restart the job"
            )));
        }
        let interrupt = self.session.interrupt();
        let (listener, trainers, job) = (&listener, &trainers[..], self.state.digest());
        let members = Members { greeter, listener, trainers, job, interrupt };
        Ring::connect(&members, left(), self.patience()).map_err(|error| self.broken(&error))
    }

    /// Longest wait in the ring. A step may wait for the pool, for a trainer that computes bundles
    /// of lost servers, or for one whose main thread is busy elsewhere. The wait is long enough
    /// that the conductor names a trainer that stands still before the ring breaks.
    fn patience(&self) -> Duration {
        let settings = self.session.settings();
        patience(settings.pool_wait_seconds, settings.stalled_after_seconds)
    }

    /// Runs steps until the conductor says that no further one follows, or until one fails.
    pub(super) fn train(&mut self, ring: &mut Ring) -> Ending {
        let steps = self.args.steps.get();
        let mut since = Instant::now();
        let first = self.state.step;
        if first < steps
            && let Err(ending) = self.announce(first)
        {
            return ending;
        }
        loop {
            let step = self.state.step;
            let planned = match self.session.begin(step) {
                Next::Step(planned) => planned,
                Next::End(ending) => return ending,
            };
            if step + 1 < steps
                && let Err(ending) = self.announce(step + 1)
            {
                return ending;
            }
            if step == first {
                since = Instant::now();
            }
            if let Err(ending) = self.step(&planned, ring, &mut since) {
                return ending;
            }
        }
    }

    /// Makes this trainer's share of a step, and tells the conductor what it holds.
    fn announce(&mut self, step: u64) -> Result<(), Ending> {
        let nanos = 0..u32::from(self.turns.nanos());
        let shares: Vec<_> =
            nanos.map(|nano| self.loader.share(step, nano, self.session.rank().into())).collect();
        let told = shares.iter().map(|share| {
            let stretches = share.stretches.iter().map(|it| Stretch {
                document: DocumentId(it.document),
                start: it.start,
                end: it.end,
            });
            NanoLengths { documents: share.documents.clone(), stretches: stretches.collect() }
        });
        let told = Told { step, turns: Some(self.turns.clone()), nanos: told.collect() };
        self.session.announce(told).map_err(|error| self.failed(&error.into()))?;
        self.shares.insert(step, shares);
        Ok(())
    }

    fn step(
        &mut self,
        planned: &PlannedStep,
        ring: &mut Ring,
        since: &mut Instant,
    ) -> Result<(), Ending> {
        let step = self.state.step;
        let shares = self.shares.remove(&step).expect("a step that begins was announced");
        let targets = shares.iter().map(|it| it.targets).sum();
        let batch = shares.into_iter().map(|it| it.rows).collect();
        let mut track = Spans(self.session.tracer().clone());
        let mut pool = Pool::new(&self.session, planned, self.args.threads);
        let result =
            self.trainer.step((step, &planned.order), batch, targets, &mut pool, ring, &mut track);
        let result = match result {
            Ok(result) => result,
            Err(error) => return Err(self.failed(&error)),
        };
        self.state.step = step + 1;
        self.state.loss_bits = format!("{:08x}", result.loss.to_bits());
        self.state.header = format!("{:016x}", planned.header.digest());
        self.state.slots = slots_in_words(planned);
        let tokens = u64::from(self.args.tokens.get())
            * u64::from(self.turns.nanos())
            * u64::from(self.session.settings().trainers);
        let mut done = StepDone {
            step,
            loss: result.loss,
            gradient_norm: result.update.norm,
            learning_rate: result.update.rate,
            validation_loss: None,
            tokens,
            seconds: since.elapsed().as_secs_f64(),
            exposed_wait_seconds: self.session.exposed_wait().as_secs_f64(),
            header_wait_seconds: self.session.header_wait().as_secs_f64(),
        };
        // Before anything that may fail: the checkpoint of a survivor tells of the step where trainer 0 cannot.
        self.last = Some(Last { header: Arc::clone(&planned.header), done: done.clone() });
        let recorded = self.record.as_mut().map_or(Ok(()), |it| it.add(&planned.header));
        recorded.map_err(|error| self.cannot_write(&error))?;
        done.validation_loss = self.validate(step, ring, &mut track)?;
        *since = Instant::now();
        if let Some(last) = &mut self.last {
            last.done.validation_loss = done.validation_loss;
        }
        self.session.done(done).map_err(|error| self.failed(&error.into()))?;
        // Told first: a process that is killed while it writes the checkpoint has said what it did.
        let every = self.args.checkpoint_every;
        if every > 0
            && self.state.step.is_multiple_of(every)
            && self.state.step < self.args.steps.get()
            && self.session.rank() == 0
        {
            self.save().map_err(|error| self.cannot_write(&error))?;
        }
        Ok(())
    }

    /// Loss of the held-out documents, in the last step and every `--validate-every` steps; none in
    /// other steps.
    fn validate(
        &mut self,
        step: u64,
        ring: &mut Ring,
        track: &mut Spans,
    ) -> Result<Option<f32>, Ending> {
        let (done, every) = (step + 1, self.args.validate_every);
        let Some(validation) = self
            .validation
            .as_ref()
            .filter(|_| done == self.args.steps.get() || every > 0 && done.is_multiple_of(every))
        else {
            return Ok(None);
        };
        let begin = Instant::now();
        let (session, rank) = (&self.session, self.session.rank().into());
        // At the end it waits for the slowest of them in the ring.
        let patience = self.patience();
        let noticed = &self.noticed;
        let busy = || {
            session.busy(patience);
            noticed.busy();
        };
        let loss = validation.loss((step, rank), &mut self.trainer, ring, &busy);
        let loss = loss.map_err(|error| self.failed(&error))?;
        track.span("validation", begin, Instant::now());
        tracing::info!("validation loss after {done} steps: {loss}");
        Ok(Some(loss))
    }

    /// A file cannot be written: the job ends everywhere, for a user to make room.
    fn cannot_write(&self, error: &dyn std::error::Error) -> Ending {
        self.session.correct(error.to_string());
        let own = || Ending::Failed { reason: error.to_string(), bad_input: true };
        self.session.ending(REASON_WITHIN).unwrap_or_else(own)
    }

    /// Ends the job after a step that failed here. The reason is the job's if it has one already;
    /// otherwise it is `error`, which all workers are told.
    fn failed(&self, error: &StepError) -> Ending {
        let own = Ending::Failed { reason: error.to_string(), bad_input: false };
        match error {
            StepError::Ring(error) => self.broken(error),
            StepError::Attention(_)
            | StepError::Session(_)
            | StepError::Linear(_)
            | StepError::NotFinite { .. } => {
                self.session.ending(Duration::ZERO).unwrap_or_else(|| {
                    self.session.fail(error.to_string());
                    self.session.ending(REASON_WITHIN).unwrap_or(own)
                })
            }
        }
    }

    /// Ends the job after a broken ring. Whoever broke it is dead, or has a more precise reason, which is waited for.
    fn broken(&self, error: &RingError) -> Ending {
        self.session.ending(REASON_WITHIN).unwrap_or_else(|| {
            let reason = error.to_string();
            self.session.fail(reason.clone());
            Ending::Failed { reason, bad_input: false }
        })
    }

    /// Writes a checkpoint of the steps so far.
    pub(super) fn save(&self) -> Result<PathBuf, checkpoint::CheckpointError> {
        let (first, second) = self.trainer.optimizer().moments();
        let values = Values { parameters: self.trainer.parameters(), first, second };
        let layout = self.trainer.model().parameters();
        let settings = self.session.settings();
        let keep = settings.checkpoints_kept as usize;
        let writer = Writer { rank: self.session.rank().into(), keep };
        let busy = || {
            self.session.busy(Duration::ZERO);
            self.noticed.busy();
        };
        let root = &settings.checkpoints;
        let of = (&self.state, self.last.as_ref());
        let path = checkpoint::save(root, of, layout, &values, writer, &busy)?;
        let alone = self.state.beyond_llama();
        let alone = alone.map(|why| format!(", for Cadre alone, with no config.json: {why}"));
        let (step, alone) = (self.state.step, alone.unwrap_or_default());
        let text = format!("checkpoint of {step} steps is at {}{alone}", path.display());
        let (level, event) = (notice::Level::Information, notice::Event::CheckpointWritten);
        self.session.tell(level, text, event);
        self.session.saved(step);
        Ok(path)
    }
}

fn slots_in_words(planned: &PlannedStep) -> String {
    let weights: Vec<_> = planned.header.slots.iter().map(|it| it.weight.to_string()).collect();
    format!("{:?} {}", planned.header.placement, weights.join(","))
}

/// Spans of the step, but for waits, which the session times itself.
struct Spans(Tracer);

impl Track for Spans {
    fn span(&mut self, name: &'static str, begin: Instant, end: Instant) {
        if self.0.is_on() && name != "wait" {
            let activity = if name == "reduce" { Activity::Wait } else { Activity::Linear };
            self.0.span_between("main", activity, (begin, end), || name.to_owned());
        }
    }
}

fn patience(pool_wait_seconds: u32, stalled_after_seconds: u32) -> Duration {
    Duration::from_secs(u64::from(pool_wait_seconds) + u64::from(stalled_after_seconds) + 300)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_outlasts_a_rank_that_may_be_busy_in_a_step_that_waits_for_the_pool() {
        for (wait, stalled) in [(0, 1800), (600, 86_400), (u32::MAX, u32::MAX)] {
            let both = Duration::from_secs(u64::from(wait) + u64::from(stalled));
            assert!(patience(wait, stalled) > both);
            assert!(Instant::now().checked_add(patience(wait, stalled)).is_some());
        }
    }
}
