//! What the planning thread of a process does next.
//!
//! In: rounds, headers in any order, long words, and what nobody needs any more. Out: one thing to do at a time
//! ([`Backlog::take`]). This module does nothing of it.
//!
//! ```text
//! first   rounds: until the bundles of a lost server are dealt out, its step stands
//!         long words: they take little, and others wait behind them
//!         headers, the earliest step first
//!         the conductor's next header
//! last    what is finished is dropped; but first, where more of it than two steps leave waits
//! ```
//!
//! Invariant: a header is planned once, and a round dealt out once for all machines of the process, however often it comes; of
//! rounds that wait only the newest one of a step is kept, and the newest proposal.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cadre_protocol::conductor::LIVE_STEPS;
use cadre_step::conduct::Making;
use cadre_step::header::Header;

use super::rounds::{Reassign, Reassigning};
use super::{Finished, Wanted};
use crate::io::encoded::Unread;

/// Maximum of what is finished and waits until nothing else is to be done; with more of it the thread drops it first. A step leaves
/// up to four.
const MAX_FINISHED: usize = 8;

/// See the module. So many steps are live as [`LIVE_STEPS`] says: what is older than the newest ones is over, so its header is not
/// planned any more.
#[derive(Debug, Default)]
pub struct Backlog {
    /// Of the steps that may be live, those whose headers came.
    known: BTreeSet<u64>,
    /// Headers of these steps that are not planned yet.
    waiting: BTreeMap<u64, Wanted>,
    /// The conductor's next one, which is to be made.
    making: Option<Box<Making>>,
    /// Words that are to be read, of each peer one.
    unread: VecDeque<Box<Unread>>,
    finished: Vec<Finished>,
    rounds: VecDeque<Reassign>,
    doing: Doing,
}

/// What the thread is doing.
#[derive(Debug, Default, Eq, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// The thread deals out a round.
    Round(Reassign),
    /// The thread reads a word, or drops what is finished.
    Other,
    /// The thread makes or plans the header of a step.
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
            Wanted::Reassign(it) => unreachable!("{:?} is no header", it.asked),
        }
    }

    /// A round is to be dealt out, unless it is known or a newer one is.
    pub fn reassign(&mut self, asked: Reassign) {
        if let Doing::Round(it) = &self.doing
            && asked.age(it).is_some_and(Ordering::is_le)
        {
            return;
        }
        match self.rounds.iter_mut().find_map(|it| Some((asked.age(it)?, it))) {
            Some((Ordering::Greater, older)) => *older = asked,
            Some((Ordering::Less | Ordering::Equal, _)) => {}
            None => self.rounds.push_back(asked),
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

    /// What is to be done now, if anything is. `lend` gives what a round is dealt out from; nothing where its step is over, so that
    /// nobody wants it.
    pub fn take(
        &mut self,
        mut lend: impl FnMut(Reassign) -> Option<Reassigning>,
    ) -> Option<Wanted> {
        if self.doing != Doing::Nothing {
            return None;
        }
        while let Some(asked) = self.rounds.pop_front() {
            if let Some(reassigning) = lend(asked) {
                self.doing = Doing::Round(reassigning.asked.clone());
                return Some(Wanted::Reassign(Box::new(reassigning)));
            }
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
            Doing::Nothing | Doing::Round(_) | Doing::Other => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cadre_protocol::{AssignedRounds, Fillers};

    use super::*;
    use crate::io::planning::Asker;
    use crate::io::planning::tests::header;

    fn come(backlog: &mut Backlog, step: u64) {
        backlog.came(Box::new(header(step)));
    }

    fn steps(backlog: &mut Backlog) -> Vec<u64> {
        let mut steps = Vec::new();
        while let Some(wanted) = backlog.take(|_| None) {
            assert!(backlog.take(|_| None).is_none(), "one is planned at a time");
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
        let first = backlog.take(|_| None).unwrap();
        come(&mut backlog, 3);
        come(&mut backlog, 4);
        assert!(backlog.take(|_| None).is_none());
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
            let wanted = backlog.take(|_| None).expect("something is to be done");
            backlog.done();
            if let Wanted::Finished(all) = wanted { all.len() } else { 0 }
        };
        finish(&mut backlog, MAX_FINISHED);
        (1..3).for_each(|it| come(&mut backlog, it));
        assert_eq!(taken(&mut backlog), 0);
        finish(&mut backlog, 1);
        assert_eq!(taken(&mut backlog), MAX_FINISHED + 1);
        finish(&mut backlog, 1);
        assert_eq!([taken(&mut backlog), taken(&mut backlog)], [0, 1]);
        assert!(backlog.take(|_| None).is_none());
    }

    #[test]
    fn a_round_is_dealt_out_once_before_all_else_and_newer_ones_supersede_those_that_wait() {
        let ready = crate::io::planning::ready(header(5)).unwrap();
        let round = |asker, count| Reassign { step: 5, tables: vec![Fillers::new(); count], asker };
        let taken = |backlog: &mut Backlog| {
            let lend = |asked| {
                let rounds = AssignedRounds::new(ready.first.clone());
                Some(Reassigning { asked, planned: Arc::clone(&ready.planned), rounds })
            };
            let wanted = backlog.take(lend)?;
            let Wanted::Reassign(it) = wanted else { panic!("{wanted:?}") };
            Some(it.asked)
        };
        let mut backlog = Backlog::default();
        come(&mut backlog, 5);
        let [first, second, third] = [1, 2, 3].map(|it| round(Asker::Members, it));
        // The trainer asks, and the server of its process.
        (0..2).for_each(|_| backlog.reassign(first.clone()));
        assert_eq!(taken(&mut backlog), Some(first.clone()));
        // Said again while it is dealt out; two servers are lost meanwhile, and the older news comes late.
        let proposals = [7, 9, 8].map(|it| round(Asker::Conductor(it), 4));
        for it in [&first, &third, &second].into_iter().chain(&proposals) {
            backlog.reassign(it.clone());
        }
        assert_eq!(taken(&mut backlog), None);
        backlog.done();
        assert_eq!(taken(&mut backlog), Some(third.clone()));
        backlog.reassign(third);
        backlog.done();
        assert_eq!(taken(&mut backlog), Some(proposals[1].clone()));
        backlog.done();
        assert!(backlog.rounds.is_empty());
        // Its step is over.
        backlog.reassign(first);
        assert_eq!(steps(&mut backlog), [5]);
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
