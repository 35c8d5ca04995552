//! Whether a rank's main thread stands still: it is its turn, and for too long it makes no call.
//!
//! In: what the main thread asks for and is told, and the time. Out: that it stands still, with what it has not done, or that it moves
//! again ([`Standing::look`]). A main thread that is at work elsewhere says for how long ([`Standing::busy`]).
//!
//! ```text
//! its turn:      to submit the next phase: all that it has submitted are whole
//!                to wait: something was told that it has not taken, or works that it has taken are not computed
//!                to say that the step is done: the watermark has passed all of it
//!                to announce the next step, or that none comes
//! not its turn:  it waits for results, for a header, for the end of the job
//! ```
//!
//! A rank that waits for others is thus never one that stands still, whatever they wait for. Between the last phase of a step and
//! its end ranks wait for each other in ways that are not seen here. If one stands still there, all do: the conductor names all.
//!
//! Invariant: time in which the whole process did nothing does not count.

use std::collections::VecDeque;
use std::sync::Arc;

use cadre_protocol::{Nanos, Phase, TrainerId};
use cadre_step::envelope::Stands;
use cadre_step::planned::PlannedStep;

use super::queues::Owed;

/// The longest time between two looks that counts: the IO thread looks five times as often.
const LONGEST_LOOK: Nanos = Nanos::from_millis(1_000);

/// See the module.
#[derive(Clone, Debug)]
pub struct Standing {
    me: TrainerId,
    /// Until its first call, and between two calls.
    patience: [Nanos; 2],
    has_called: bool,
    /// The step to announce next, and the one behind the last, once that is known.
    announce: u64,
    steps: Option<u64>,
    /// The step that runs or comes next, and those that were told.
    next: u64,
    told: VecDeque<Arc<PlannedStep>>,
    /// Phases of the step that runs.
    submitted: u32,
    whole: u32,
    /// The last step that the watermark has passed.
    passed: Option<u64>,
    /// How long it has been its turn.
    idle: Nanos,
    /// How long it may be, whatever the patience is, until its next call.
    lease: Nanos,
    last: Nanos,
    is_still: bool,
}

impl Standing {
    /// Of rank `me`, which begins with step `first`. It may take as long as `patience` says: until its first call, and between
    /// two of them.
    pub fn new((me, first): (TrainerId, u64), patience: [Nanos; 2], now: Nanos) -> Self {
        Self {
            me,
            patience,
            has_called: false,
            announce: first,
            steps: None,
            next: first,
            told: VecDeque::new(),
            submitted: 0,
            whole: 0,
            passed: None,
            idle: Nanos(0),
            lease: Nanos(0),
            last: now,
            is_still: false,
        }
    }

    /// It has announced a step.
    pub fn announced(&mut self, step: u64) {
        self.announce = step + 1;
        self.has_called = true;
        self.called();
    }

    /// It has said how many steps there are.
    pub fn ends(&mut self, steps: u64) {
        self.steps = Some(steps);
        self.called();
    }

    /// It is told a step.
    pub fn begins(&mut self, planned: &Arc<PlannedStep>) {
        self.told.push_back(Arc::clone(planned));
    }

    /// It has submitted the next phase.
    pub fn submitted(&mut self) {
        self.submitted += 1;
        self.called();
    }

    /// It has no rows of the next phase: nobody calls for it, and nobody waits for it.
    pub fn skipped(&mut self) {
        self.submitted += 1;
        self.whole += 1;
    }

    /// A phase of the step that runs is whole.
    pub fn whole(&mut self) {
        self.whole += 1;
    }

    /// Every rank has all results of a step.
    pub fn passed(&mut self, step: u64) {
        self.passed = self.passed.max(Some(step));
    }

    /// It has said that its step is done.
    pub fn done(&mut self) {
        self.told.pop_front();
        self.next += 1;
        (self.submitted, self.whole) = (0, 0);
        self.called();
    }

    /// It is at work elsewhere, and may be for so long from now on until its next call; for no less than without these words.
    pub fn busy(&mut self, lease: Nanos) {
        self.lease = lease;
        self.moved();
    }

    /// It did something.
    pub fn moved(&mut self) {
        self.idle = Nanos(0);
    }

    /// Whether it stands still, each time that this changes; `owed` by it of what it was told.
    pub fn look(&mut self, now: Nanos, owed: Owed) -> Option<Stands> {
        let since = now.since(self.last).min(LONGEST_LOOK);
        self.last = now;
        self.idle = if self.is_its_turn(owed) { self.idle.after(since) } else { Nanos(0) };
        let [first, later] = self.patience;
        let patience = if self.has_called { later } else { first }.max(self.lease);
        let is_still = self.idle >= patience;
        if is_still == std::mem::replace(&mut self.is_still, is_still) {
            return None;
        }
        let seconds = self.idle.millis() / 1000;
        let what = || format!("rank {} has not {} for {seconds} s", self.me.0, self.due());
        Some(if is_still { Stands::Still(what()) } else { Stands::No })
    }

    /// Whether it stood still at the last look.
    pub fn is_still(&self) -> bool {
        self.is_still
    }

    fn called(&mut self) {
        self.lease = Nanos(0);
        self.moved();
    }

    fn is_its_turn(&self, owed: Owed) -> bool {
        let untaken = owed > Owed::Nothing;
        match self.told.front() {
            Some(_) if self.whole < self.submitted => untaken,
            Some(it) if (self.submitted as usize) < it.order.count() => true,
            // Its own results are all here, but others may wait for what it computes for them. In an all-reduce it takes no notice.
            Some(it) => owed == Owed::Works || self.passed >= Some(it.header.step),
            None => untaken || self.has_to_announce(),
        }
    }

    fn has_to_announce(&self) -> bool {
        self.announce <= self.next && self.steps.is_none_or(|it| self.next < it)
    }

    /// The call that comes next.
    fn due(&self) -> String {
        let step = self.next;
        match self.told.front() {
            Some(it) if (self.submitted as usize) < it.order.count() => {
                let phase = it.order.at(Phase(self.submitted));
                format!("submitted {}", crate::session::phase_name(step, phase))
            }
            Some(_) => format!("said that step {step} is done"),
            None if self.has_to_announce() => format!("announced step {step}"),
            None => format!("asked for step {step}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_step::header::Header;

    use super::*;

    const PATIENCE: u64 = 7_000;

    fn planned(step: u64) -> Arc<PlannedStep> {
        let any: Header =
            serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
        Arc::new(PlannedStep::new(Arc::new(Header { step, ..any })).unwrap())
    }

    /// Rank 3 from step 5 on, at a time that is counted in fifths of seconds.
    struct Watched(Standing, u64);

    impl Watched {
        fn new() -> Self {
            let patience = [2 * PATIENCE, PATIENCE].map(Nanos::from_millis);
            Self(Standing::new((TrainerId(3), 5), patience, Nanos(0)), 0)
        }

        /// What is said within so many milliseconds.
        fn look(&mut self, milliseconds: u64, untaken: bool) -> Option<Stands> {
            self.owing(milliseconds, if untaken { Owed::Notices } else { Owed::Nothing })
        }

        fn owing(&mut self, milliseconds: u64, owed: Owed) -> Option<Stands> {
            let mut said = None;
            for _ in 0..milliseconds / 200 {
                self.1 += 200;
                said = said.or(self.0.look(Nanos::from_millis(self.1), owed));
            }
            said
        }

        /// It is its turn: it may take nearly as long as it is allowed, and is named when it takes longer, once until it moves.
        fn due(&mut self, patience: u64, expected: &str) {
            assert_eq!(self.look(patience - 200, false), None, "{expected}");
            let mut other = Self(self.0.clone(), self.1);
            let text = format!("rank 3 has not {expected} for {} s", patience / 1000);
            assert_eq!(other.look(200, false), Some(Stands::Still(text)));
            assert_eq!(other.look(10 * patience, true), None, "it was said");
            other.0.moved();
            assert_eq!(other.look(200, false), Some(Stands::No));
        }

        fn waits(&mut self) {
            assert_eq!(self.look(10 * PATIENCE, false), None);
        }
    }

    #[test]
    fn whose_turn_it_is_is_named_by_the_call_that_is_due_and_who_waits_is_not() {
        let mut rank = Watched::new();
        rank.due(2 * PATIENCE, "announced step 5");
        rank.0.announced(5);
        rank.waits();
        rank.0.begins(&planned(5));
        rank.due(PATIENCE, "submitted step 5, layer 0, nano-batch 0, forward");
        rank.0.announced(6);
        rank.due(PATIENCE, "submitted step 5, layer 0, nano-batch 0, forward");
        rank.0.submitted();
        rank.waits();
        rank.0.whole();
        rank.due(PATIENCE, "submitted step 5, layer 1, nano-batch 0, forward");
        for _ in 1..4 {
            rank.0.submitted();
            rank.waits();
            rank.0.whole();
        }
        // The header of the next step may come before this one is done.
        rank.0.begins(&planned(6));
        rank.waits();
        rank.0.passed(5);
        rank.due(PATIENCE, "said that step 5 is done");
        rank.0.done();
        rank.due(PATIENCE, "submitted step 6, layer 0, nano-batch 0, forward");
        (0..4).for_each(|_| rank.0.submitted());
        rank.waits();
        (0..4).for_each(|_| rank.0.whole());
        rank.0.done();
        rank.due(PATIENCE, "announced step 7");
        rank.0.ends(7);
        rank.waits();
    }

    #[test]
    fn who_leaves_what_it_is_told_stands_still_though_it_could_wait() {
        let mut rank = Watched::new();
        rank.0.announced(5);
        assert_eq!(rank.look(PATIENCE - 200, true), None);
        assert_eq!(rank.look(200, false), None);
        rank.0.begins(&planned(5));
        rank.0.submitted();
        rank.waits();
        let expected = "rank 3 has not submitted step 5, layer 1, nano-batch 0, forward for 7 s";
        assert_eq!(rank.look(PATIENCE, true), Some(Stands::Still(expected.into())));
        // All its results are here, and others wait for works of it.
        (1..4).for_each(|_| rank.0.submitted());
        (0..4).for_each(|_| rank.0.whole());
        assert_eq!(rank.look(200, false), Some(Stands::No));
        rank.waits();
        // In an all-reduce it takes nothing, however long others are busy.
        assert_eq!(rank.look(10 * PATIENCE, true), None);
        let expected = "rank 3 has not said that step 5 is done for 7 s";
        assert_eq!(rank.owing(PATIENCE, Owed::Works), Some(Stands::Still(expected.into())));
    }

    #[test]
    fn who_says_that_it_is_busy_has_so_long_until_its_next_call() {
        let mut rank = Watched::new();
        rank.0.busy(Nanos::from_millis(9 * PATIENCE));
        rank.due(9 * PATIENCE, "announced step 5");
        rank.0.announced(5);
        rank.0.begins(&planned(5));
        (0..4).for_each(|_| rank.0.submitted());
        (0..4).for_each(|_| rank.0.whole());
        rank.0.passed(5);
        // As it saves a checkpoint: no single part takes long.
        for _ in 0..20 {
            assert_eq!(rank.look(PATIENCE - 200, false), None);
            rank.0.busy(Nanos(0));
        }
        rank.due(PATIENCE, "said that step 5 is done");
        rank.0.busy(Nanos::from_millis(3 * PATIENCE));
        // What it computes for others meanwhile is no call.
        rank.0.moved();
        rank.due(3 * PATIENCE, "said that step 5 is done");
        rank.0.done();
        rank.due(PATIENCE, "announced step 6");
    }

    #[test]
    fn a_phase_without_rows_is_whole_at_once_and_leaves_nothing_for_the_next_step() {
        let mut rank = Watched::new();
        rank.0.announced(5);
        rank.0.begins(&planned(5));
        rank.0.announced(6);
        (0..2).for_each(|_| rank.0.submitted());
        (0..2).for_each(|_| rank.0.skipped());
        rank.waits();
        (0..2).for_each(|_| rank.0.whole());
        rank.0.passed(5);
        rank.0.done();
        rank.0.begins(&planned(6));
        rank.0.submitted();
        rank.waits();
    }

    #[test]
    fn a_pause_of_the_process_does_not_count() {
        let mut rank = Watched::new();
        for _ in 0..2 * PATIENCE / 1000 - 1 {
            rank.1 += 1_000_000;
            assert_eq!(rank.0.look(Nanos::from_millis(rank.1), Owed::Nothing), None);
        }
        assert!(rank.look(1_000, false).is_some());
    }
}
