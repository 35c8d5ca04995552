//! The steps of a trainer, from joining the ring to the ending that the conductor names.
//!
//! In: a prepared process. Out: an [`Ending`]; checkpoints on the way. It does not decide that the job is
//! over: the conductor does, or a failure.
//!
//! Invariant: the state counts a step only after the step has succeeded here, so a checkpoint never holds
//! half a step.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cadre_control::proto;

use super::Process;
use crate::io::Request;
use crate::io::envelope::{Ending, Lengths as Told, NanoLengths, StepDone};
use crate::planned::PlannedStep;
use crate::trace::{Activity, Tracer};
use crate::trainer::checkpoint::{self, Values};
use crate::trainer::ring::{Place, Ring};
use crate::trainer::session::Next;
use crate::trainer::step::{StepError, Track};

/// Longest wait for all trainers to listen: in a cluster their pods may start minutes apart. The supervisor
/// of `cadre run` ends those that are late itself.
const ASSEMBLE: Duration = Duration::from_mins(15);
/// Longest wait for the reason of a failure that showed in the all-reduce first.
const REASON: Duration = Duration::from_secs(3);

impl Process {
    /// Joins the ring of the all-reduce.
    pub(super) fn connect_ring(&mut self) -> Result<Ring, Ending> {
        let failed = |reason: String| Ending::Failed { reason, bad_input: false };
        let rings = self.session.rings(ASSEMBLE).map_err(|ended| {
            let late =
                || failed(format!("not all trainers were there after {} s", ASSEMBLE.as_secs()));
            ended.unwrap_or_else(late)
        })?;
        let world = usize::from(self.settings.trainers);
        let next = &rings[(usize::from(self.rank) + 1) % world];
        let next: SocketAddr = next
            .parse()
            .map_err(|_| failed(format!("{next:?} is no address for the all-reduce")))?;
        let token = xxhash_rust::xxh3::xxh3_64(self.settings.job.as_bytes())
            .wrapping_add(self.settings.attempt.into());
        let place = Place { rank: self.rank.into(), world, token };
        // A step may wait for the pool, and for a trainer that computes bundles of lost servers.
        let patience = Duration::from_secs(u64::from(self.settings.pool_wait_seconds) + 300);
        Ring::connect(place, &self.listener, next, ASSEMBLE, patience)
            .map_err(|error| failed(error.to_string()))
    }

    /// Runs steps until the conductor says that none follows, or something fails.
    pub(super) fn train(&mut self, ring: &mut Ring) -> Ending {
        let steps = self.args.steps.get();
        let mut since = Instant::now();
        if self.state.step < steps {
            self.announce(self.state.step);
        }
        loop {
            let step = self.state.step;
            let planned = match self.session.next(step) {
                Next::Step(planned) => planned,
                Next::End(ending) => return ending,
            };
            if step + 1 < steps {
                self.announce(step + 1);
            }
            if step == 0 || self.settings.resume.is_some() && self.state.header.is_empty() {
                since = Instant::now();
            }
            if let Err(ending) = self.step(&planned, ring, &mut since) {
                return ending;
            }
        }
    }

    /// Tells the conductor what this trainer's stream of a step holds.
    fn announce(&self, step: u64) {
        let nanos = (0..self.args.nano_batches.get()).map(|nano| {
            let stream = self.loader.stream(step, nano);
            let own = &stream.layout()[usize::from(self.rank)];
            let stretches: Vec<_> = own
                .iter()
                .map(|it| cadre_planner::Stretch {
                    document: cadre_planner::DocumentId(it.document),
                    start: it.start,
                    end: it.end,
                })
                .collect();
            let documents = own.iter().map(|it| it.document);
            let documents = documents.map(|it| (it, stream.documents()[it as usize])).collect();
            NanoLengths { documents, stretches }
        });
        self.session.announce(Told { step, nanos: nanos.collect() });
    }

    fn step(
        &mut self,
        planned: &PlannedStep,
        ring: &mut Ring,
        since: &mut Instant,
    ) -> Result<(), Ending> {
        let step = self.state.step;
        let batch = (0..self.args.nano_batches.get())
            .map(|nano| self.loader.stream(step, nano).rows(self.rank.into()))
            .collect();
        let targets = self.loader.targets(step);
        let mut track = Spans(self.tracer.clone());
        let result = self.trainer.step(step, batch, targets, &mut self.session, ring, &mut track);
        let result = match result {
            Ok(result) => result,
            Err(error) => return Err(self.failed(&error)),
        };
        self.state.step = step + 1;
        self.state.loss_bits = format!("{:08x}", result.loss.to_bits());
        self.state.header = format!("{:016x}", planned.header.digest());
        self.state.slots = slots_in_words(planned);
        let recorded = self.record.as_mut().map_or(Ok(()), |it| it.add(&planned.header));
        recorded.map_err(|error| self.cannot_write(&error))?;
        let every = self.args.checkpoint_every;
        if every > 0
            && self.state.step.is_multiple_of(every)
            && self.state.step < self.args.steps.get()
            && self.rank == 0
        {
            self.save().map_err(|error| self.cannot_write(&error))?;
        }
        let tokens = u64::from(self.args.tokens.get())
            * u64::from(self.args.nano_batches.get())
            * u64::from(self.settings.trainers);
        let exposed_wait_seconds = self.session.exposed_wait().as_secs_f64();
        let seconds = since.elapsed().as_secs_f64();
        *since = Instant::now();
        let loss = result.loss;
        self.session.step_done(StepDone { step, loss, tokens, seconds, exposed_wait_seconds });
        Ok(())
    }

    /// A file cannot be written: the job ends, for a user to make room.
    fn cannot_write(&self, error: &dyn std::error::Error) -> Ending {
        let reason = error.to_string();
        self.session.handle().send(Request::Fail(reason.clone()));
        Ending::Failed { reason, bad_input: true }
    }

    /// A step failed here: the job's own reason if there is one, else this one, told to all.
    fn failed(&mut self, error: &StepError) -> Ending {
        let own = Ending::Failed { reason: error.to_string(), bad_input: false };
        match error {
            // Whoever broke the ring is dead, or has a better reason.
            StepError::Ring(_) => self.session.ending(REASON).unwrap_or_else(|| {
                self.session.handle().send(Request::Fail(error.to_string()));
                own
            }),
            StepError::Attention(_) | StepError::Linear(_) | StepError::NotFinite { .. } => {
                self.session.ending(Duration::ZERO).unwrap_or_else(|| {
                    self.session.handle().send(Request::Fail(error.to_string()));
                    self.session.ending(REASON).unwrap_or(own)
                })
            }
        }
    }

    /// Writes a checkpoint of the steps so far.
    pub(super) fn save(&self) -> Result<PathBuf, checkpoint::CheckpointError> {
        let (first, second) = self.trainer.optimizer().moments();
        let values = Values { parameters: self.trainer.parameters(), first, second };
        let layout = self.trainer.model().parameters();
        let root = &self.settings.checkpoints;
        let path = checkpoint::save(root, &self.state, layout, &values, self.rank.into())?;
        let notice = proto::Notice {
            level: proto::notice::Level::Information.into(),
            text: format!("checkpoint of {} steps is at {}", self.state.step, path.display()),
            event: proto::notice::Event::CheckpointWritten.into(),
            server: None,
        };
        self.control.send(notice).ok();
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
