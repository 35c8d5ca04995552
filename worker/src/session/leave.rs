//! How a rank leaves its job, and what it tells the controller until then.
//!
//! In: notices, and an [`Outcome`]. Out: messages to the controller, the end of the session's threads. It decides no exit code.

use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cadre_control::proto;
use cadre_step::envelope::Ending;

use super::Session;
use crate::io::{After, Request};

/// Least time between two messages that say that a rank is busy.
const BUSY_EVERY: Duration = Duration::from_secs(1);
/// Exit code of bad input, and that of a rank in a pod whose job was stopped: that of a process ended by SIGTERM.
const BAD_INPUT: u8 = 2;
const ENDED_BY_SIGTERM: u8 = 143;
/// Longest wait for the controller to read the last words.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(2);
/// That of a rank in a pod that is done: an operator that takes over a lease (15 to 18 s) learns the last figures too, also
/// where the rank meets the address of the dead one once more before (5 s).
const POD_LAST_WORDS_WITHIN: Duration = Duration::from_secs(30);

/// What a rank leaves behind.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How it ended.
    pub kind: proto::finished::Outcome,
    /// Why, in one line; empty after a good end.
    pub message: String,
    /// What its process will exit with: 0 after a good end, 2 for bad input, 3 where the job cannot go on.
    pub exit_code: u8,
    /// A sample of what was learnt; may be empty.
    pub sample: String,
}

impl Outcome {
    /// A good end.
    pub fn completed() -> Self {
        let kind = proto::finished::Outcome::Completed;
        Self { kind, message: String::new(), exit_code: 0, sample: String::new() }
    }

    /// What it is where the job has ended otherwise.
    fn unless(self, other: Option<&LeaveError>, is_pod: bool) -> Self {
        let (kind, message, exit_code) = match other {
            Some(LeaveError::Failed { reason, bad_input }) => {
                let code = if *bad_input { 2 } else { 3 };
                (proto::finished::Outcome::Failed, reason.clone(), code)
            }
            Some(LeaveError::Stopped { .. }) => {
                let code = if is_pod { ENDED_BY_SIGTERM } else { 0 };
                (proto::finished::Outcome::Stopped, String::new(), code)
            }
            Some(LeaveError::Panicked { .. }) | None => return self,
        };
        Self { kind, message, exit_code, ..self }
    }
}

/// How a job has ended that is not complete.
fn otherwise(ending: Option<Ending>) -> Option<LeaveError> {
    match ending? {
        Ending::Failed { reason, bad_input } => Some(LeaveError::Failed { reason, bad_input }),
        Ending::Stopped { checkpoint } => Some(LeaveError::Stopped { checkpoint }),
        Ending::Completed => None,
    }
}

/// When the controller was last told that this rank is busy.
#[derive(Debug, Default)]
pub(super) struct BusyTold(Mutex<Option<Instant>>);

impl BusyTold {
    /// Whether it is to be told again; then it counts as told.
    fn is_due(&self, now: Instant) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|it| now.saturating_duration_since(it) >= BUSY_EVERY);
        if due {
            *last = Some(now);
        }
        due
    }
}

/// Why a rank that leaves does not leave as it says.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// Its IO thread panicked: a bug.
    #[error("the io thread of rank {rank} panicked; its log says where")]
    Panicked {
        /// Which rank.
        rank: u16,
    },
    /// It says that the job is complete, and the job has failed: the controller was told so.
    #[error("{reason}")]
    Failed {
        /// Why the job has failed.
        reason: String,
        /// Another attempt would fail in the same way.
        bad_input: bool,
    },
    /// It says that the job is complete, and the job was stopped: the controller was told so.
    #[error("the job was stopped")]
    Stopped {
        /// A checkpoint is wanted.
        checkpoint: bool,
    },
}

impl Session {
    /// Tells the controller something for its log.
    pub fn tell(&self, level: proto::notice::Level, text: String, event: proto::notice::Event) {
        let (level, event) = (level.into(), event.into());
        let notice = proto::Notice { level, text, event, server: None };
        if let Err(error) = self.control.send(notice) {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// Tells the controller that this rank has written a checkpoint that holds so many steps. The job restarts from it, so
    /// that earlier restarts count no more.
    pub fn saved(&self, steps: u64) {
        if let Err(error) = self.control.send(proto::Saved { steps }) {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// As [`Rank::busy`], of which the controller hears too: it gives a rank that leaves a failed job more time for what it leaves
    /// behind.
    ///
    /// [`Rank::busy`]: super::Rank::busy
    pub fn busy(&self, lease: Duration) {
        self.rank.busy(lease);
        if self.busy.is_due(Instant::now())
            && let Err(error) = self.control.send(proto::Busy {})
        {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// Ends the job everywhere as one with bad input, for what a user has to correct first, such as a disk that is full.
    pub fn correct(&self, reason: String) {
        self.rank.line().send(Request::Refuse(reason));
    }

    /// Leaves the job: tells the controller how, and ends the session's threads. *io* has ended when it returns. *rescue*, *plan* and
    /// *copies* begin nothing more, and end with the launch, plan or copy that they are in: none of them is waited for, since a launch
    /// may take long. A rank that says that the job is complete, and whose steps are all done, waits first for the end of the job, as
    /// [`Rank::begin`] does: others may still need its rows. Rank 0 stays until the others have left, too, or know that it has.
    ///
    /// # Errors
    ///
    /// The IO thread had panicked. After a good end: the job has failed or was stopped all the same, such as where all ranks leave
    /// in the middle of a step. The controller is told that instead by rank 0, and by others that know it before they say how they
    /// end. The process of a rank in a pod whose job was stopped exits with 143 then, as one that SIGTERM has ended.
    ///
    /// [`Rank::begin`]: super::Rank::begin
    pub fn leave(mut self, outcome: Outcome) -> Result<(), LeaveError> {
        let (rank, is_pod) = (self.rank.rank(), self.pod);
        let is_good = outcome.kind == proto::finished::Outcome::Completed;
        let is_bad = outcome.kind == proto::finished::Outcome::Failed;
        if let Some(step) = self.rank.behind_the_last().filter(|_| !is_bad) {
            self.rank.begin(step);
        }
        // Who knows the end says it at once, since last words take their time.
        let known = self.rank.ending(Duration::ZERO);
        if known.is_none() && is_bad {
            let said = Some(outcome.message.clone()).filter(|it| !it.is_empty());
            let reason = said.unwrap_or_else(|| format!("rank {rank} failed"));
            if outcome.exit_code == BAD_INPUT {
                self.rank.fail_for_good(reason);
            } else {
                self.rank.fail(reason);
            }
        }
        // The conductor may know better.
        let waits = rank == 0 && is_good && known.is_none();
        let io = self.io.take();
        self.rank.leave(is_good);
        if !waits {
            let other = otherwise(known.filter(|_| is_good));
            self.say_how(outcome.clone().unless(other.as_ref(), is_pod));
        }
        let joined = io.map_or(Ok(After::Leave), JoinHandle::join);
        let other = otherwise(self.rank.ending(Duration::ZERO).filter(|_| is_good));
        if waits {
            self.say_how(outcome.unless(other.as_ref(), is_pod));
        }
        joined.map_err(|_| LeaveError::Panicked { rank })?;
        other.map_or(Ok(()), Err)
    }

    /// Tells the controller how this rank has ended, as far as it is there.
    fn say_how(&mut self, outcome: Outcome) {
        let Outcome { kind, message, exit_code, sample } = outcome;
        let finished =
            proto::Finished { outcome: kind.into(), message, exit_code: exit_code.into(), sample };
        if self.control.send(finished).is_ok() {
            // The exit code says it too, if the controller is away.
            let is_done = self.pod && exit_code == 0;
            self.control
                .leave(if is_done { POD_LAST_WORDS_WITHIN } else { LAST_WORDS_WITHIN })
                .ok();
        }
    }
}

/// A session that is dropped ends the job everywhere, so that no other rank waits for this one.
impl Drop for Session {
    fn drop(&mut self) {
        let Some(io) = self.io.take() else { return };
        let rank = self.rank.rank();
        self.rank.fail(format!("rank {rank} dropped its session; call leave at the end"));
        // The reason has to be out first.
        self.rank.ending(LAST_WORDS_WITHIN);
        self.rank.leave(false);
        if io.join().is_err() {
            tracing::error!("{}", LeaveError::Panicked { rank });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_hears_of_a_busy_rank_at_once_and_then_every_second() {
        let (told, start) = (BusyTold::default(), Instant::now());
        let due = |milliseconds| told.is_due(start + Duration::from_millis(milliseconds));
        let said: Vec<_> =
            [0, 1, 999, 1000, 1500, 2500].into_iter().filter(|it| due(*it)).collect();
        assert_eq!(said, [0, 1000, 2500]);
    }
}
