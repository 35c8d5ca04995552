//! What the planning thread of a process does next.
//!
//! In: headers, in any order, and long words. Out: one thing to do at a time ([`Headers::take`]). It does nothing of it.
//!
//! Invariant: a header is planned once, however often it comes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cadre_protocol::conductor::LIVE_STEPS;
use cadre_step::header::Header;

use super::Wanted;
use crate::io::telling::Unread;

/// The headers of a process. So many steps are live as [`LIVE_STEPS`] says: what is older than the newest ones is over, so its header
/// is not planned any more.
#[derive(Debug, Default)]
pub struct Headers {
    /// Of the steps that may be live, those whose headers came.
    known: BTreeSet<u64>,
    /// Those of them that are not planned yet.
    waiting: BTreeMap<u64, Wanted>,
    /// The conductor's next one, which is to be made.
    making: Option<Box<Making>>,
    /// Words that are to be read, of each peer one.
    unread: VecDeque<Box<Unread>>,
    doing: Doing,
}

/// What the thread is doing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// It reads a word.
    Word,
    /// It makes or plans the header of a step.
    Header(u64),
}

impl Headers {
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
        }
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
            return;
        }
        self.waiting.insert(step, wanted);
        self.known.retain(|it| !is_over(*it));
        self.waiting.retain(|it, _| !is_over(*it));
    }

    /// What is to be done now, if anything is.
    pub fn take(&mut self) -> Option<Wanted> {
        if self.doing != Doing::Nothing {
            return None;
        }
        // Words take little, and others wait behind them.
        let word = self.unread.pop_front().map(Wanted::Read);
        let header = || self.waiting.pop_first().map(|it| it.1);
        let wanted = word.or_else(header).or_else(|| self.making.take().map(Wanted::Making))?;
        self.doing = wanted.step().map_or(Doing::Word, Doing::Header);
        Some(wanted)
    }

    /// What was taken is done. Which step it was of, if of any.
    pub fn done(&mut self) -> Option<u64> {
        match std::mem::take(&mut self.doing) {
            Doing::Header(step) => Some(step),
            Doing::Nothing | Doing::Word => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::planning::tests::header;

    fn come(headers: &mut Headers, step: u64) {
        headers.came(Box::new(header(step)));
    }

    fn steps(headers: &mut Headers) -> Vec<u64> {
        let mut steps = Vec::new();
        while let Some(wanted) = headers.take() {
            assert!(headers.take().is_none(), "one is planned at a time");
            assert_eq!(headers.done(), wanted.step());
            steps.extend(wanted.step());
        }
        steps
    }

    #[test]
    fn a_header_is_planned_once_however_often_it_comes() {
        let mut headers = Headers::default();
        // Before it was planned, while it is, and after.
        come(&mut headers, 3);
        come(&mut headers, 3);
        let first = headers.take().unwrap();
        come(&mut headers, 3);
        come(&mut headers, 4);
        assert!(headers.take().is_none());
        assert_eq!(headers.done(), first.step());
        come(&mut headers, 3);
        come(&mut headers, 4);
        assert_eq!(steps(&mut headers), [4]);
        come(&mut headers, 2);
        assert!(steps(&mut headers).is_empty());
    }

    #[test]
    fn headers_of_live_steps_are_planned_in_whichever_order_they_come() {
        let mut headers = Headers::default();
        come(&mut headers, 8);
        assert_eq!(steps(&mut headers), [8]);
        come(&mut headers, 7);
        assert_eq!(steps(&mut headers), [7], "a server that joined late is asked for both");
        come(&mut headers, 6);
        come(&mut headers, 7);
        assert!(steps(&mut headers).is_empty());
        come(&mut headers, 10);
        come(&mut headers, 9);
        assert_eq!(steps(&mut headers), [9, 10], "the older one is wanted first");
    }

    #[test]
    fn who_falls_behind_plans_the_newest_headers_alone() {
        let mut headers = Headers::default();
        for step in 0..100 {
            come(&mut headers, step);
        }
        come(&mut headers, u64::MAX);
        come(&mut headers, u64::MAX - 1);
        assert_eq!(headers.waiting.len(), LIVE_STEPS);
        assert_eq!(steps(&mut headers), [u64::MAX - 1, u64::MAX]);
    }

    #[test]
    fn the_conductor_tries_the_same_step_with_other_fillers() {
        let mut headers = Headers::default();
        for _ in 0..2 {
            headers.own(Wanted::Plan(Box::new(header(0))));
            assert_eq!(steps(&mut headers), [0]);
        }
        come(&mut headers, 0);
        assert!(steps(&mut headers).is_empty());
    }
}
