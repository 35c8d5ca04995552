//! What the planning thread of a process does next.
//!
//! In: headers in any order, long words, and what nobody needs any more. Out: one thing to do at a time ([`Backlog::take`]). This
//! module does nothing of it.
//!
//! ```text
//! first   long words: they take little, and others wait behind them
//!         headers, the earliest step first
//!         the conductor's next header
//! last    what is finished is dropped; but first, where more of it than two steps leave waits
//! ```
//!
//! Invariant: a header is planned once, however often it comes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cadre_protocol::conductor::LIVE_STEPS;
use cadre_step::conduct::Making;
use cadre_step::header::Header;

use super::{Finished, Wanted};
use crate::io::telling::Unread;

/// Maximum of what is finished and waits until nothing else is to be done; with more of it the thread drops it first. A step leaves
/// up to four.
const MAX_FINISHED: usize = 8;

/// See the module. So many steps are live as [`LIVE_STEPS`] says: what is older than the newest ones is over, so its header is not
/// planned any more.
#[derive(Debug, Default)]
pub struct Backlog {
    /// Of the steps that may be live, those whose headers came.
    known: BTreeSet<u64>,
    /// Those of them that are not planned yet.
    waiting: BTreeMap<u64, Wanted>,
    /// The conductor's next one, which is to be made.
    making: Option<Box<Making>>,
    /// Words that are to be read, of each peer one.
    unread: VecDeque<Box<Unread>>,
    finished: Vec<Finished>,
    doing: Doing,
}

/// What the thread is doing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// It reads a word, or drops what is finished.
    Other,
    /// It makes or plans the header of a step.
    Header(u64),
}

impl Backlog {
    /// A header came, of whichever live step: a server that joins late hears of the newer one first. One that is known, or of a step that
    /// is over, changes nothing.
    pub fn came(&mut self, header: Box<Header>) {
        self.wait(Wanted::Plan(header));
    }

    /// The conductor's own: of the same step again where other fillers are tried.
    pub fn own(&mut self, wanted: Wanted) {
        match wanted {
            Wanted::Making(it) => self.making = Some(it),
            Wanted::Own(..) | Wanted::Plan(_) => {
                if let Some(step) = wanted.step() {
                    self.known.remove(&step);
                }
                self.wait(wanted);
            }
            Wanted::Read(unread) => self.read(unread),
            Wanted::Finished(all) => self.finished.extend(all),
        }
    }

    /// Nobody needs this any more.
    pub fn finish(&mut self, finished: Finished) {
        self.finished.push(finished);
    }

    /// A long word came.
    pub fn read(&mut self, unread: Box<Unread>) {
        self.unread.push_back(unread);
    }

    fn wait(&mut self, wanted: Wanted) {
        let Some(step) = wanted.step() else { return };
        let newest = self.known.last().copied().max(Some(step)).unwrap_or_default();
        let is_over = |step: u64| newest - step >= LIVE_STEPS as u64;
        if is_over(step) || !self.known.insert(step) {
            return self.finish(Finished::new(wanted));
        }
        self.waiting.insert(step, wanted);
        self.known.retain(|it| !is_over(*it));
        while let Some(first) = self.waiting.first_entry().filter(|it| is_over(*it.key())) {
            self.finished.push(Finished::new(first.remove()));
        }
    }

    /// What is to be done now, if anything is.
    pub fn take(&mut self) -> Option<Wanted> {
        if self.doing != Doing::Nothing {
            return None;
        }
        let wanted = self.next()?;
        self.doing = wanted.step().map_or(Doing::Other, Doing::Header);
        Some(wanted)
    }

    fn next(&mut self) -> Option<Wanted> {
        if self.finished.len() <= MAX_FINISHED {
            if let Some(unread) = self.unread.pop_front() {
                return Some(Wanted::Read(unread));
            }
            if let Some((_, header)) = self.waiting.pop_first() {
                return Some(header);
            }
            if let Some(making) = self.making.take() {
                return Some(Wanted::Making(making));
            }
        }
        let finished = std::mem::take(&mut self.finished);
        (!finished.is_empty()).then_some(Wanted::Finished(finished))
    }

    /// What was taken is done. Which step it was of, if of any.
    pub fn done(&mut self) -> Option<u64> {
        match std::mem::take(&mut self.doing) {
            Doing::Header(step) => Some(step),
            Doing::Nothing | Doing::Other => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::planning::tests::header;

    fn come(backlog: &mut Backlog, step: u64) {
        backlog.came(Box::new(header(step)));
    }

    fn steps(backlog: &mut Backlog) -> Vec<u64> {
        let mut steps = Vec::new();
        while let Some(wanted) = backlog.take() {
            assert!(backlog.take().is_none(), "one is planned at a time");
            assert_eq!(backlog.done(), wanted.step());
            steps.extend(wanted.step());
        }
        steps
    }

    #[test]
    fn a_header_is_planned_once_however_often_it_comes() {
        let mut backlog = Backlog::default();
        // Before it was planned, while it is, and after.
        come(&mut backlog, 3);
        come(&mut backlog, 3);
        let first = backlog.take().unwrap();
        come(&mut backlog, 3);
        come(&mut backlog, 4);
        assert!(backlog.take().is_none());
        assert_eq!(backlog.done(), first.step());
        come(&mut backlog, 3);
        come(&mut backlog, 4);
        assert_eq!(steps(&mut backlog), [4]);
        come(&mut backlog, 2);
        assert!(steps(&mut backlog).is_empty());
    }

    #[test]
    fn headers_of_live_steps_are_planned_in_whichever_order_they_come() {
        let mut backlog = Backlog::default();
        come(&mut backlog, 8);
        assert_eq!(steps(&mut backlog), [8]);
        come(&mut backlog, 7);
        assert_eq!(steps(&mut backlog), [7], "a server that joined late is asked for both");
        come(&mut backlog, 6);
        come(&mut backlog, 7);
        assert!(steps(&mut backlog).is_empty());
        come(&mut backlog, 10);
        come(&mut backlog, 9);
        assert_eq!(steps(&mut backlog), [9, 10], "the older one is wanted first");
    }

    #[test]
    fn who_falls_behind_plans_the_newest_headers_alone() {
        let mut backlog = Backlog::default();
        for step in 0..100 {
            come(&mut backlog, step);
        }
        come(&mut backlog, u64::MAX);
        come(&mut backlog, u64::MAX - 1);
        assert_eq!(backlog.waiting.len(), LIVE_STEPS);
        assert_eq!(steps(&mut backlog), [u64::MAX - 1, u64::MAX]);
    }

    #[test]
    fn what_is_finished_is_dropped_when_nothing_else_is_to_be_done_or_too_much_of_it_waits() {
        let mut backlog = Backlog::default();
        let finish = |backlog: &mut Backlog, count: usize| {
            (0..count).for_each(|_| backlog.finish(Finished::new(())));
        };
        let taken = |backlog: &mut Backlog| {
            let taken = match backlog.take() {
                Some(Wanted::Finished(all)) => all.len(),
                Some(_) => 0,
                None => panic!("something is to be done"),
            };
            backlog.done();
            taken
        };
        finish(&mut backlog, MAX_FINISHED);
        (1..3).for_each(|it| come(&mut backlog, it));
        assert_eq!(taken(&mut backlog), 0);
        finish(&mut backlog, 1);
        assert_eq!(taken(&mut backlog), MAX_FINISHED + 1);
        finish(&mut backlog, 1);
        assert_eq!([taken(&mut backlog), taken(&mut backlog)], [0, 1]);
        assert!(backlog.take().is_none());
    }

    #[test]
    fn the_conductor_tries_the_same_step_with_other_fillers() {
        let mut backlog = Backlog::default();
        for _ in 0..2 {
            backlog.own(Wanted::Plan(Box::new(header(0))));
            assert_eq!(steps(&mut backlog), [0]);
        }
        come(&mut backlog, 0);
        assert!(steps(&mut backlog).is_empty());
    }
}
