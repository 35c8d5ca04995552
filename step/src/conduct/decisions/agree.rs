//! What trainers have to agree on: which steps there are, and that each of them goes on.
//!
//! In: what they tell of their steps, and that they stand still. Out: the end of the job, by name, where some would wait for others
//! for ever.

use std::collections::{BTreeMap, BTreeSet};

use cadre_protocol::{Nanos, TrainerId, conductor};

use super::{Acts, Decisions};
use crate::envelope::{Ending, Lengths};

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

/// How many steps the trainers have, and which of them they have announced. All say the same, or the job ends: so one of them
/// speaks for all, and no word is compared with those of each other trainer.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Who has told how many steps there are.
    told: BTreeSet<u16>,
    /// The first of them, and what it told.
    pub(super) steps: Option<(u16, u64)>,
    /// The last step that each trainer has announced.
    announced: BTreeMap<u16, u64>,
    /// The last of these, and a trainer that has announced it.
    furthest: Option<(u64, u16)>,
}

impl Counts {
    /// A trainer announces a step. Out: whether that is news.
    fn announced(&mut self, from: u16, step: u64) -> bool {
        let is_news = self.announced.get(&from).is_none_or(|it| *it < step);
        if is_news {
            self.announced.insert(from, step);
            self.furthest = self.furthest.max(Some((step, from)));
        }
        is_news
    }

    /// A trainer tells how many steps it has. Out: another one that has told another number, and that number.
    fn counted(&mut self, from: u16, steps: u64) -> Option<(u16, u64)> {
        self.told.insert(from);
        self.steps.get_or_insert((from, steps));
        self.steps.filter(|it| it.1 != steps)
    }
}

/// Trainers that have left while a step was out that was not over there.
#[derive(Debug, Default)]
pub(super) struct Leavers {
    ranks: BTreeSet<u16>,
    /// One of them had begun to submit that step.
    in_mid_step: bool,
    /// One of them says that the job is complete.
    as_done: bool,
}

impl Leavers {
    pub(super) fn has(&self, rank: u16) -> bool {
        self.ranks.contains(&rank)
    }
}

impl Decisions {
    /// A trainer tells what it holds of a step: of each once, in their order. Whoever counts the steps otherwise than the job
    /// would wait for ever, so the job ends by its name.
    pub(super) fn lengths(
        &mut self,
        acts: &mut Acts<'_>,
        TrainerId(from): TrainerId,
        lengths: Lengths,
    ) {
        let step = lengths.step;
        if self.ending.is_some() || !self.counts.announced(from, step) {
            return;
        }
        if let Some((other, steps)) = self.counts.steps.filter(|it| it.1 <= step) {
            let reason = format!(
                "trainer {from} announced step {step}, trainer {other} has {steps} steps; {SAME_STEPS}"
            );
            return self.close(acts, Ending::Failed { reason, bad_input: true });
        }
        if (self.next..self.next + LENGTHS_AHEAD).contains(&step) {
            self.lengths.entry(step).or_default().insert(from, lengths);
            return self.proceed(acts);
        }
        let reason = format!(
            "trainer {from} announced step {step}, and the job is at step {}; give all ranks the same checkpoint",
            self.next
        );
        self.close(acts, Ending::Failed { reason, bad_input: true });
    }

    /// A trainer tells how many steps it has. All have the same number, or some would wait for ever for those that are done.
    pub(super) fn counted(&mut self, acts: &mut Acts<'_>, from: u16, steps: u64) {
        let other = self.counts.counted(from, steps);
        let ahead = self.counts.furthest.filter(|it| it.0 >= steps);
        let what = match (other, ahead) {
            (Some((other, theirs)), _) => format!("trainer {other} has {theirs}"),
            (None, Some((step, other))) => format!("trainer {other} announced step {step}"),
            (None, None) => return self.proceed(acts),
        };
        let reason = format!("trainer {from} has {steps} steps, {what}; {SAME_STEPS}");
        self.close(acts, Ending::Failed { reason, bad_input: true });
    }

    /// Whether all trainers have told that there is no step as the next one.
    pub(super) fn is_last_step_out(&self) -> bool {
        let all = self.counts.told.len() == usize::from(self.draft.trainers);
        all && self.counts.steps.is_some_and(|it| it.1 <= self.next)
    }

    /// A trainer has left, and a step is out that is not over there. If all do so before any has submitted a phase of it, the job is
    /// over. Others may leave seconds later: until then nobody is called dead for it.
    pub(super) fn left(
        &mut self,
        acts: &mut Acts<'_>,
        (from, what): (u16, String),
        (in_mid_step, as_done): (bool, bool),
    ) {
        self.left.ranks.insert(from);
        self.left.in_mid_step |= in_mid_step;
        self.left.as_done |= as_done;
        self.standing.insert(from, what);
        if self.left.ranks.len() == usize::from(self.draft.trainers) {
            self.standing_until = None;
            if self.left.in_mid_step {
                self.stalled(acts);
            } else {
                self.tell_all_over(acts);
            }
        } else {
            self.standing_until.get_or_insert(acts.now.after(STANDING_TOGETHER));
        }
        self.run(acts, conductor::Event::Left(TrainerId(from)));
    }

    /// Whether the job is about to end by the names of those who left it.
    pub fn names_leavers(&self) -> bool {
        !self.left.ranks.is_empty() && self.standing_until.is_some()
    }

    /// Ends the job because of trainers that stand still, unless they move again, or all wait for the pool; or because of those who
    /// left a step that others run.
    pub(super) fn stalled(&mut self, acts: &mut Acts<'_>) {
        self.standing_until = None;
        // What is decided holds, though it may wait to be told.
        if self.standing.is_empty() || self.ending.is_some() {
            return;
        }
        let has_leavers = !self.left.ranks.is_empty();
        if !has_leavers && self.waits_for_the_pool() {
            self.standing_until = Some(acts.now.after(STANDING_TOGETHER));
            return;
        }
        let mut named: Vec<_> = self.standing.values().take(MAX_NAMED_TRAINERS).cloned().collect();
        if self.standing.len() > MAX_NAMED_TRAINERS {
            named.push(format!(
                "{} others stand still, too",
                self.standing.len() - MAX_NAMED_TRAINERS
            ));
        }
        let remedy = if has_leavers {
            TO_ITS_END
        } else {
            "look where the main thread of its process is, or raise spec.failurePolicy.stalledAfterSeconds"
        };
        let reason = format!("{}; {remedy}", named.join("; "));
        // A program that counts the steps otherwise would do it again.
        let bad_input = self.left.as_done;
        self.close(acts, Ending::Failed { reason, bad_input });
    }
}
