//! Works of a bundle that went out before their rows were known to count.
//!
//! In: which pulls of the bundle are under way, which brought nothing. Out: when its works may go out, their promises, and whether
//! one of them counts. It moves nothing.
//!
//! ```text
//! waiting ──all pulls under way──▶ out ──a pull brought nothing──▶ over: works go out when their rows are there
//! ```
//!
//! Invariant: works go out early once at most, and once a pull of theirs has brought nothing none of their promises is kept any
//! more; whoever computes waits for no word that never comes.

use std::collections::{BTreeMap, BTreeSet};

use cadre_protocol::{PullId, Work as WorkId};

use crate::launch::Promise;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// Pulls whose rows are here, or will be by what was put on streams.
    begun: BTreeSet<PullId>,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Waiting,
    Out(BTreeMap<WorkId, Promise>),
    Over,
}

impl Early {
    /// A pull is under way.
    pub(super) fn begin(&mut self, pull: PullId) {
        self.begun.insert(pull);
    }

    /// Whether works may go out, if the bundle has so many pulls.
    pub(super) fn is_due(&self, pulls: usize) -> bool {
        matches!(self.state, State::Waiting) && self.begun.len() >= pulls
    }

    /// Works go out: their promises.
    pub(super) fn go(&mut self, works: impl IntoIterator<Item = WorkId>) -> Vec<(WorkId, Promise)> {
        let promises: BTreeMap<_, _> =
            works.into_iter().map(|it| (it, Promise::default())).collect();
        let out = promises.iter().map(|(work, it)| (*work, it.clone())).collect();
        self.state = State::Out(promises);
        out
    }

    /// A pull brought nothing: what was put behind its copies counts no more. Whether works were out.
    pub(super) fn spoil(&mut self, pull: PullId) -> bool {
        self.begun.remove(&pull);
        let was_out = matches!(self.state, State::Out(_));
        if was_out {
            self.break_all();
            self.state = State::Over;
        }
        was_out
    }

    /// The rows of a work count. Whether it is out and will be answered; else it has to go out now.
    pub(super) fn keep(&self, work: WorkId) -> bool {
        match &self.state {
            State::Out(promises) => promises.get(&work).is_some_and(Promise::keep),
            State::Waiting | State::Over => false,
        }
    }

    fn break_all(&self) {
        if let State::Out(promises) = &self.state {
            promises.values().for_each(Promise::break_);
        }
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        // Words that were said stay.
        self.break_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::Word;

    const WORKS: [WorkId; 2] = [WorkId(3), WorkId(4)];

    fn out() -> (Early, Vec<Promise>) {
        let mut early = Early::default();
        early.begin(PullId(1));
        assert!(!early.is_due(2), "one of two is not under way");
        early.begin(PullId(2));
        assert!(early.is_due(2));
        let out = early.go(WORKS);
        assert_eq!(out.iter().map(|it| it.0).collect::<Vec<_>>(), WORKS);
        assert!(!early.is_due(2), "they are out");
        (early, out.into_iter().map(|it| it.1).collect())
    }

    #[test]
    fn works_whose_rows_count_are_answered_and_others_go_out() {
        let (early, promises) = out();
        assert!(early.keep(WORKS[0]));
        assert!(!early.keep(WorkId(9)), "it never went out");
        assert!(!promises[1].refuse(), "nobody waits for it yet");
        assert!(!early.keep(WORKS[1]), "it was refused");
        drop(early);
        assert_eq!([promises[0].word(), promises[1].word()], [Word::Kept, Word::Refused]);
    }

    #[test]
    fn a_pull_that_brought_nothing_breaks_every_promise_that_is_open_and_works_do_not_go_early_again()
     {
        let (mut early, promises) = out();
        assert!(early.keep(WORKS[0]));
        assert!(early.spoil(PullId(2)));
        assert_eq!([promises[0].word(), promises[1].word()], [Word::Kept, Word::Broken]);
        assert!(!early.keep(WORKS[1]), "it has to be computed again");
        early.begin(PullId(5));
        assert!(!early.is_due(2));
        assert!(!early.spoil(PullId(5)), "nothing is out");
    }

    #[test]
    fn a_pull_that_brings_nothing_before_works_are_out_delays_them() {
        let mut early = Early::default();
        early.begin(PullId(1));
        early.begin(PullId(2));
        assert!(!early.spoil(PullId(1)));
        assert!(!early.is_due(2));
        early.begin(PullId(7));
        assert!(early.is_due(2));
    }

    #[test]
    fn a_bundle_that_is_let_go_keeps_nobody_waiting() {
        let (early, promises) = out();
        drop(early);
        assert!(promises.iter().all(|it| it.word() == Word::Broken));
    }
}
