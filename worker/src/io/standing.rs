//! Whether a rank's main thread stands still: it is its turn, and for too long it makes no call.
//!
//! In: what the main thread asks for and is told, and the time. Out: that it stands still, with what it has not done, or that it moves
//! again ([`Standing::look`]). A main thread that is at work elsewhere says for how long ([`Standing::busy`]).
//!
//! ```text
//! its turn:      to submit the next phase: all that it has submitted are over, which is when a wait for them ends
//!                to wait: something was told that it has not taken, or works that it has taken are not computed
//!                to say that the step is done: the watermark has passed all of it
//!                to announce the next step, or that none comes
//! not its turn:  it waits for results, for a header, for the end of the job
//!                a launch runs in this thread, which may take longer than the patience
//! ```
//!
//! A rank that waits for others is thus never one that stands still, whatever they wait for. Between the last phase of a step and
//! its end ranks wait for each other in ways that are not seen here. If one stands still there, all do: the conductor names all.
//!
//! Invariant: time in which the whole process did nothing does not count.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cadre_protocol::{At, Filler, Nanos, Phase, TrainerId};
use cadre_step::envelope::Stands;
use cadre_step::planned::PlannedStep;

use super::queues::Owed;

/// The longest time between two looks that counts: the IO thread looks five times as often.
const LONGEST_LOOK: Nanos = Nanos::from_millis(1_000);

/// A phase that was submitted. It is over when it is whole and the works that were planned for this rank have run: so long does
/// [`crate::session::Session::wait`] wait.
#[derive(Clone, Debug)]
struct Open {
    is_whole: bool,
    /// Works that were planned for this rank.
    planned: usize,
}

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
    /// Phases of the step that runs, and those of them that are not over.
    submitted: u32,
    open: BTreeMap<Phase, Open>,
    /// Works that ran of those that were planned for this rank, by phase. Those of a phase may run before it is submitted here.
    ran: BTreeMap<At, usize>,
    /// Up to here nobody wants works any more.
    cancelled: Option<At>,
    /// The last step that the watermark has passed.
    passed: Option<u64>,
    /// How long it has been its turn.
    idle: Nanos,
    /// How long it may be, whatever the patience is, until its next call: the one behind as many as it had made then.
    lease: Nanos,
    leased_at: u64,
    /// Calls that have come here.
    calls: u64,
    last: Nanos,
    is_still: bool,
    /// How long it may be its turn until that is said, and whether it was.
    slow_after: Nanos,
    is_slow: bool,
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
            open: BTreeMap::new(),
            ran: BTreeMap::new(),
            cancelled: None,
            passed: None,
            idle: Nanos(0),
            lease: Nanos(0),
            leased_at: 0,
            calls: 0,
            last: now,
            is_still: false,
            slow_after: Nanos(u64::MAX),
            is_slow: false,
        }
    }

    /// The same, of which [`Self::slow`] speaks as soon as it has been its turn for so long.
    #[must_use]
    pub fn slow_after(self, slow_after: Nanos) -> Self {
        Self { slow_after, ..self }
    }

    /// The main thread has announced a step.
    pub fn announced(&mut self, step: u64) {
        self.announce = step + 1;
        self.has_called = true;
        self.called();
    }

    /// The main thread has said how many steps there are.
    pub fn ends(&mut self, steps: u64) {
        self.steps = Some(steps);
        self.called();
    }

    /// The main thread is told a step.
    pub fn begins(&mut self, planned: &Arc<PlannedStep>) {
        self.told.push_back(Arc::clone(planned));
    }

    /// The main thread has submitted the next phase.
    pub fn submitted(&mut self) {
        if let Some(it) = self.told.front() {
            let phase = Phase(self.submitted);
            let planned = it.works_of(phase, Filler::InPlace(self.me));
            self.open.insert(phase, Open { is_whole: false, planned });
        }
        self.submitted += 1;
        self.called();
    }

    /// The rank has no rows of the next phase: nobody calls for it, and nobody waits for it.
    pub fn skipped(&mut self) {
        self.submitted += 1;
    }

    /// A phase that it has submitted is whole.
    pub fn whole(&mut self, at: At) {
        if at.step == self.next {
            self.open.entry(at.phase).and_modify(|it| it.is_whole = true);
        }
        self.settle(at);
    }

    /// A work of a phase ran that was planned for this rank.
    pub fn ran(&mut self, at: At) {
        *self.ran.entry(at).or_insert(0) += 1;
        self.settle(at);
    }

    /// Nobody wants works of phases up to this one any more.
    pub fn cancelled(&mut self, through: At) {
        self.cancelled = self.cancelled.max(Some(through));
        let step = self.next;
        let open: Vec<_> = self.open.keys().map(|&phase| At { step, phase }).collect();
        for it in open {
            self.settle(it);
        }
    }

    /// Lets a phase go that is over.
    fn settle(&mut self, at: At) {
        let Some(open) = self.open.get(&at.phase).filter(|_| at.step == self.next) else { return };
        let ran = self.ran.get(&at).copied().unwrap_or(0) >= open.planned;
        if open.is_whole && (ran || self.cancelled >= Some(at)) {
            self.open.remove(&at.phase);
        }
    }

    /// Every rank has all results of a step.
    pub fn passed(&mut self, step: u64) {
        self.passed = self.passed.max(Some(step));
    }

    /// The main thread has said that its step is done. Out: that step, which is not looked at any more.
    pub fn done(&mut self) -> Option<Arc<PlannedStep>> {
        let over = self.told.pop_front();
        self.next += 1;
        self.submitted = 0;
        self.open.clear();
        self.ran = self.ran.split_off(&At::new(self.next, 0));
        self.called();
        over
    }

    /// The main thread is at work elsewhere, and may be for so long from now on until its next call; for no less than without these
    /// words. Of the `calls` that it had made before, some may come later than this.
    pub fn busy(&mut self, lease: Nanos, calls: u64) {
        self.lease = lease;
        self.leased_at = calls.max(self.calls);
        self.moved();
    }

    /// The main thread did something.
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

    /// What is said of it, once until it moves, long before it stands still: the call that others wait for. Between the last phase
    /// of a step and its end all ranks wait for one of them, so nothing is said there.
    pub fn slow(&mut self) -> Option<String> {
        let is_slow = self.idle >= self.slow_after.max(self.lease) && !self.is_between_steps();
        let was_slow = std::mem::replace(&mut self.is_slow, is_slow);
        let (rank, seconds) = (self.me.0, self.idle.millis() / 1000);
        let what = || {
            format!("rank {rank} has not {} for {seconds} s, and others wait for it", self.due())
        };
        (is_slow && !was_slow).then(what)
    }

    fn is_between_steps(&self) -> bool {
        self.told.front().is_some_and(|it| self.submitted as usize == it.order.count())
    }

    /// Whether it stood still at the last look.
    pub fn is_still(&self) -> bool {
        self.is_still
    }

    fn called(&mut self) {
        self.calls += 1;
        if self.calls > self.leased_at {
            self.lease = Nanos(0);
        }
        self.moved();
    }

    fn is_its_turn(&self, owed: Owed) -> bool {
        if owed == Owed::Computing {
            return false;
        }
        let untaken = owed > Owed::Nothing;
        match self.told.front() {
            Some(_) if self.open.values().any(|it| !it.is_whole) => untaken,
            // The main thread waits for rows of others, to compute what was planned for it; what it has not taken is its own.
            Some(_) if !self.open.is_empty() => owed == Owed::Works,
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
                format!("submitted {}", phase.in_words(step))
            }
            Some(_) => format!("said that step {step} is done"),
            None if self.has_to_announce() => format!("announced step {step}"),
            None => format!("asked for step {step}"),
        }
    }
}

#[cfg(test)]
mod tests;
