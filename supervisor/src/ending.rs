//! Decides how a job ends: trainers that finish, fail or die, restarts, interrupts.
//!
//! ```text
//!           all trainers say so                   all gone
//! Running ───────────────────────────► Farewell ──────────────────► Done(Ok)
//!  │  │  first failure      all gone                     all gone
//!  │  └───────────► Survivors ──┬──► Killing(Restart) ──────────► Running, next attempt
//!  │ interrupt                  └──► Killing(Done(JobFailed)) ──► Done; interrupted meanwhile: as below
//!  └───────────► Interrupted ──────► Killing(Done(Interrupted)) ► Done
//! ```
//!
//! Every state but Running has a deadline, at which everything that lives is killed. A trainer that reports work on its
//! checkpoint has longer: until it has been silent about it for as long as an interrupt waits. A job is done once all its
//! trainers have reported so. What their processes do then changes nothing.

use std::time::Duration;

use cadre_control::proto::{Drain, Stop};
use cadre_crds::FailureAction;

use super::action::{Action, Overdue, Worker};
use super::event::{Level, Outcome, Role, RunError, RunEvent, WorkerName};
use super::exit::{BAD_INPUT, Exit};
use super::mode::{Cause, Mode, Next};
use super::state::State;

/// Maximum steps in progress when the user interrupts.
const MAX_STEPS_OUT: u32 = 2;

/// Exit code of a trainer that cannot go on without a peer.
const GAVE_UP: i32 = 3;

impl State {
    /// Handles the end of a trainer, which is no longer in `workers`.
    pub(crate) fn trainer_ended(
        &mut self,
        now: Duration,
        name: WorkerName,
        worker: &Worker,
        exit: Exit,
        out: &mut Vec<Action>,
    ) {
        // A program without a control connection reports by its exit code.
        let completed = worker.has_completed().unwrap_or(exit.code == Some(0));
        if completed {
            if !worker.killed && exit.code != Some(0) {
                let text = format!(
                    "{name} had said that it is done, and then ended otherwise: {exit}; see its log"
                );
                self.notice(Level::Warning, text, out);
            }
            self.completed += 1;
            return;
        }
        // Torchrun exits with a code of its own, whatever the codes of its ranks.
        let said = worker.account.as_ref().map(|it| it.exit_code);
        let is_bad =
            exit.code.is_some_and(|it| it == BAD_INPUT || it != 0 && said == Some(BAD_INPUT));
        if is_bad && !matches!(self.mode, Mode::Killing(_)) {
            let message = exit.last_words(name, worker.account.as_ref());
            // The other trainers may have steps to save. After a user's interrupt only trainer 0 has them.
            if self.reported.is_none() || matches!(self.mode, Mode::Interrupted { .. }) {
                self.kill_all_then(Err(RunError::BadInput { message }), out);
                return;
            }
            self.refused.get_or_insert(message);
            self.survive(now, name, &exit, out);
            return;
        }
        if worker.killed && worker.overdue.is_none() {
            return;
        }
        let words = if worker.overdue == Some(Overdue::AtStart) {
            "it did not register with the supervisor in time".to_owned()
        } else if worker.overdue == Some(Overdue::Since) {
            format!("nothing was heard from it for {:?}", self.config.limits.register)
        } else {
            exit.last_words(name, worker.account.as_ref())
        };
        let dead = exit.code.is_none();
        self.survive(now, name, &exit, out);
        // A trainer that was killed is the cause. One that exited may have failed only because of
        // its peer, and one that gave up did.
        let gave_up = |it: &Exit| it.code == Some(GAVE_UP);
        let failed = exit.code.is_some_and(|it| it != 0) && !gave_up(&exit);
        let is_better = |it: &Cause| dead && it.exit.code.is_some() || failed && gave_up(&it.exit);
        if self.cause.as_ref().is_none_or(is_better) {
            self.cause = Some(Cause { worker: name, exit, words });
        }
    }

    /// Handles the first failure of a trainer: the others write their checkpoint.
    fn survive(&mut self, now: Duration, name: WorkerName, exit: &Exit, out: &mut Vec<Action>) {
        if let Mode::Running = self.mode {
            let until = now + self.survivors_learn() + self.config.limits.survivors;
            self.mode = Mode::Survivors { until, interrupted: false };
            self.notice(Level::Error, format!("{name}: {exit}; the other trainers stop"), out);
        }
    }

    /// Longest time until survivors know that a trainer is dead. The conductor believes it after one suspicion, and takes one
    /// more to see whether others are dead too.
    fn survivors_learn(&self) -> Duration {
        let suspicion = self.config.pool.spec.health.suspect_after_milliseconds;
        Duration::from_millis(2 * u64::from(suspicion))
    }

    /// Extends the deadline of a trainer that reports work, by as long as after an interrupt.
    pub(crate) fn busy(&mut self, now: Duration, name: WorkerName) {
        if let Mode::Survivors { .. } | Mode::Interrupted { .. } = self.mode {
            let until = now + self.config.limits.interrupt.saturating_add(self.steps_out());
            if let Some(worker) = self.workers.get_mut(&name) {
                worker.busy_until = Some(until);
            }
        }
    }

    /// Whether the job trains and is not ending.
    pub(crate) fn trains(&self) -> bool {
        matches!(self.mode, Mode::Running)
    }

    /// Time that the steps in progress may take.
    fn steps_out(&self) -> Duration {
        self.step_took.saturating_mul(MAX_STEPS_OUT)
    }

    /// After a process has ended, takes the next step of the job's end if it is due.
    pub(crate) fn settle(&mut self, now: Duration, out: &mut Vec<Action>) {
        let trainers = || self.workers.iter().filter(|(name, _)| name.role == Role::Trainer);
        let said = trainers().filter(|(_, it)| it.has_completed() == Some(true)).count();
        let all_completed =
            said + usize::from(self.completed) == usize::from(self.config.trainers());
        let trainers = trainers().count() > 0;
        match &self.mode {
            Mode::Running | Mode::Interrupted { .. } if all_completed => self.farewell(now, out),
            Mode::Interrupted { .. } | Mode::Survivors { interrupted: true, .. } if !trainers => {
                self.kill_all_then(Err(self.interrupted()), out);
            }
            Mode::Survivors { .. } if !trainers => self.judge(out),
            Mode::Running
            | Mode::Survivors { .. }
            | Mode::Interrupted { .. }
            | Mode::Farewell { .. }
            | Mode::Killing(_) => {}
        }
        if !self.workers.is_empty() {
            return;
        }
        match std::mem::replace(&mut self.mode, Mode::Running) {
            Mode::Farewell { .. } => done(Ok(self.outcome()), out),
            Mode::Killing(Next::Done(result)) => done(result, out),
            Mode::Killing(Next::Restart) => self.begin(now, out),
            // Workers are replaced, or trainers are still there, in every other mode.
            mode @ (Mode::Running | Mode::Survivors { .. } | Mode::Interrupted { .. }) => {
                self.mode = mode;
            }
        }
    }

    fn outcome(&self) -> Outcome {
        Outcome { attempts: self.attempt, sample: self.sample.clone() }
    }

    /// All trainers are done: tells servers and trainers to leave.
    fn farewell(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.mode = Mode::Farewell { until: now + self.config.limits.farewell };
        let servers = self.workers.iter_mut().filter(|(name, _)| name.role == Role::Server);
        for (name, worker) in servers {
            match worker.link {
                Some(link) if worker.hit.is_none() => {
                    out.push(Action::Send { link, message: Drain::default().into() });
                }
                _ if worker.killed => {}
                _ => {
                    worker.killed = true;
                    out.push(Action::Kill(*name));
                }
            }
        }
    }

    /// All trainers of a failed attempt are gone: restarts the job or ends it.
    fn judge(&mut self, out: &mut Vec<Action>) {
        if let Some(message) = self.refused.take() {
            return self.kill_all_then(Err(RunError::BadInput { message }), out);
        }
        let cause = self.cause.take().expect("an attempt only fails with a cause");
        let policy = &self.config.job.spec.failure_policy;
        let code = cause.exit.code.and_then(|code| u32::try_from(code).ok());
        let rule = policy
            .rules
            .iter()
            .find(|rule| code.is_some_and(|code| rule.exit_codes.contains(&code)));
        let allowed = policy.max_restarts.unwrap_or(0);
        // The limit is for restarts in a row: a newer checkpoint resets the count.
        if self.saved > self.counted_from {
            (self.restarts, self.counted_from) = (0, self.saved);
        }
        let (again, counts) = match rule.map(|rule| rule.action) {
            Some(FailureAction::FailJob) => (false, true),
            Some(FailureAction::RestartUncounted) => (true, false),
            Some(FailureAction::Restart) | None => (self.restarts < allowed, true),
        };
        let Cause { worker, exit, words } = cause;
        if again {
            self.restarts += u32::from(counts);
            let text = format!("{worker}: {exit}; restarting from the newest checkpoint");
            self.notice(Level::Warning, text, out);
            self.mode = Mode::Killing(Next::Restart);
            self.kill_all(out);
            return;
        }
        let said = format!("{worker}: {exit}");
        let words = if words == said { said } else { format!("{said}: {words}") };
        let remedy = if self.resumes() == Some(true) { ", go on with --resume" } else { "" };
        let message = format!(
            "the job failed: {words}; {} of {allowed} restarts used \
             without a newer checkpoint (spec.failurePolicy.maxRestarts){remedy}",
            self.restarts
        );
        self.kill_all_then(Err(RunError::JobFailed { message, log: exit.log }), out);
    }

    /// Whether there is a checkpoint to resume from; none where the program, which is not `cadre train`, has its own.
    fn resumes(&self) -> Option<bool> {
        self.config.steps.map(|_| self.saved > 0 || self.config.resume)
    }

    fn interrupted(&self) -> RunError {
        RunError::Interrupted { resumes: self.resumes() }
    }

    /// Kills everything, then ends the run with `result`.
    pub(crate) fn kill_all_then(
        &mut self,
        result: Result<Outcome, RunError>,
        out: &mut Vec<Action>,
    ) {
        self.kill_all(out);
        self.mode = Mode::Killing(Next::Done(result));
        if self.workers.is_empty() {
            self.settle(Duration::ZERO, out);
        }
    }

    /// A step has ended: after an interrupt the next one in progress may take as long.
    pub(crate) fn wait_on(&mut self, now: Duration) {
        let again = now + self.config.limits.interrupt.saturating_add(self.step_took);
        if let Mode::Interrupted { until } = &mut self.mode {
            *until = again.max(*until);
        }
    }

    /// The first interrupt asks for a checkpoint, the second kills.
    pub(crate) fn interrupt(&mut self, now: Duration, out: &mut Vec<Action>) {
        let conductor = self.conductor().filter(|(_, worker)| worker.listening);
        let link = conductor.and_then(|(_, worker)| worker.link);
        match (&mut self.mode, link) {
            (Mode::Survivors { interrupted, .. }, _) if !*interrupted => {
                *interrupted = true;
                let text = "interrupted: the other trainers write their checkpoint; once more ends it at once";
                self.notice(Level::Warning, text.to_owned(), out);
            }
            (Mode::Running, Some(link)) => {
                out.push(Action::Send { link, message: Stop { checkpoint: true }.into() });
                // The time for a stop begins after the last step in progress.
                let until = now + self.config.limits.interrupt.saturating_add(self.steps_out());
                self.mode = Mode::Interrupted { until };
                let text = "interrupted: waiting for a checkpoint; once more ends it at once";
                self.notice(Level::Warning, text.to_owned(), out);
            }
            (Mode::Farewell { .. }, _) => self.kill_all(out),
            (Mode::Killing(Next::Done(_)), _) => {}
            (
                Mode::Running
                | Mode::Survivors { .. }
                | Mode::Interrupted { .. }
                | Mode::Killing(Next::Restart),
                _,
            ) => self.kill_all_then(Err(self.interrupted()), out),
        }
    }
}

fn done(result: Result<Outcome, RunError>, out: &mut Vec<Action>) {
    if let Ok(outcome) = &result {
        out.push(Action::Emit(RunEvent::Finished(outcome.clone())));
    }
    out.push(Action::Done(result));
}
