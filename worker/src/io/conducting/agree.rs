//! What trainers have to agree on: which steps there are, and that each of them goes on.
//!
//! In: what they tell of their steps, and that they stand still. Out: the end of the job, by name, where some would wait for others
//! for ever.

use cadre_protocol::{Nanos, TrainerId};
use cadre_step::envelope::{Ending, Lengths};

use super::Conducting;
use crate::io::exchange::Exchange;
use crate::io::shared::Shared;

/// What to do where trainers have left a step that others run.
const TO_ITS_END: &str = "have every rank run each step that is out to its end, or none";

/// What to do where trainers count otherwise.
const SAME_STEPS: &str = "give all ranks the same data and number of steps";

/// Steps whose lengths are kept ahead of their headers; trainers tell those of one.
pub(super) const LENGTHS_AHEAD: u64 = 4;

/// From the first trainer that stands still until the job ends: those that stand with it are named, too.
pub(super) const STANDING_TOGETHER: Nanos = Nanos::from_millis(5_000);
/// Trainers that stand still and are named.
const MAX_NAMED_TRAINERS: usize = 8;

impl Conducting {
    /// A trainer tells what it holds of a step: of each once, in their order. Whoever counts the steps otherwise than the job
    /// would wait for ever, so the job ends by its name.
    pub(super) fn lengths(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        TrainerId(from): TrainerId,
        lengths: Lengths,
    ) {
        let step = lengths.step;
        if self.told_lengths.get(&from).is_some_and(|it| step <= *it) || self.ending.is_some() {
            return;
        }
        self.told_lengths.insert(from, step);
        if let Some((other, steps)) = self.steps.iter().find(|it| *it.1 <= step) {
            let reason = format!(
                "trainer {from} announced step {step}, trainer {other} has {steps} steps; {SAME_STEPS}"
            );
            return self.close(shared, Ending::Failed { reason, bad_input: true });
        }
        if (self.next..self.next + LENGTHS_AHEAD).contains(&step) {
            self.lengths.entry(step).or_default().insert(from, lengths);
            return self.proceed(shared);
        }
        let reason = format!(
            "trainer {from} announced step {step}, and the job is at step {}; give all ranks the same checkpoint",
            self.next
        );
        self.close(shared, Ending::Failed { reason, bad_input: true });
    }

    /// A trainer tells how many steps it has. All have the same number, or some would wait for ever for those that are done.
    pub(super) fn counted(&mut self, shared: &mut Shared<impl Exchange>, from: u16, steps: u64) {
        let steps = *self.steps.entry(from).or_insert(steps);
        let other = self.steps.iter().find(|it| *it.1 != steps);
        let ahead = self.told_lengths.iter().find(|it| *it.1 >= steps);
        let what = match (other, ahead) {
            (Some((other, theirs)), _) => format!("trainer {other} has {theirs}"),
            (None, Some((other, step))) => format!("trainer {other} announced step {step}"),
            (None, None) => return self.proceed(shared),
        };
        let reason = format!("trainer {from} has {steps} steps, {what}; {SAME_STEPS}");
        self.close(shared, Ending::Failed { reason, bad_input: true });
    }

    /// Whether all trainers have told that there is no step as the next one.
    pub(super) fn is_last_step_out(&self) -> bool {
        let all = self.steps.len() == usize::from(self.draft.trainers);
        all && self.steps.values().all(|it| *it <= self.next)
    }

    /// A trainer has left, and a step is out that is not over there. If all do so, nobody waits for anybody.
    pub(super) fn left(&mut self, shared: &Shared<impl Exchange>, from: u16, what: String) {
        self.left.insert(from);
        self.standing.insert(from, what);
        if self.left.len() == usize::from(self.draft.trainers) {
            self.standing_until = None;
        } else {
            self.standing_until.get_or_insert(shared.now().after(STANDING_TOGETHER));
        }
    }

    /// Whether the job is about to end by the names of those who left it.
    pub fn names_leavers(&self) -> bool {
        !self.left.is_empty() && self.standing_until.is_some()
    }

    /// Ends the job because of trainers that stand still, unless they move again, or all wait for the pool; or because of those who
    /// left a step that others run.
    pub(super) fn stalled(&mut self, shared: &mut Shared<impl Exchange>) {
        self.standing_until = None;
        if self.standing.is_empty() {
            return;
        }
        if self.left.is_empty() && self.waits_for_the_pool() {
            self.standing_until = Some(shared.now().after(STANDING_TOGETHER));
            return;
        }
        let mut named: Vec<_> = self.standing.values().take(MAX_NAMED_TRAINERS).cloned().collect();
        if self.standing.len() > MAX_NAMED_TRAINERS {
            named.push(format!(
                "{} others stand still, too",
                self.standing.len() - MAX_NAMED_TRAINERS
            ));
        }
        let remedy = if self.left.is_empty() {
            "look where the main thread of its process is, or raise spec.failurePolicy.stalledAfterSeconds"
        } else {
            TO_ITS_END
        };
        let reason = format!("{}; {remedy}", named.join("; "));
        self.close(shared, Ending::Failed { reason, bad_input: false });
    }
}
