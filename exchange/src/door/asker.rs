//! Questions at the doors of peers, on threads of their own: the process that asks goes on meanwhile.
//!
//! In: doors and tickets. Out: descriptors, each with what it was asked for. Nothing is mapped here.
//!
//! Invariant: at most [`MOST_ASKING`] threads ask, and at most [`MOST_AT_ONE_DOOR`] of them at one door.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::{Site, Ticket, ask};
use crate::waker::Waker;

/// Maximum requests for descriptors in flight; others wait. A request to a stopped peer holds its thread for seconds.
const MOST_ASKING: usize = 16;

/// Maximum of them at one door, so that a stopped owner leaves threads for the others.
const MOST_AT_ONE_DOOR: usize = 4;

/// Fetches descriptors on threads of its own, and wakes a poll for each result.
#[derive(Debug)]
pub(crate) struct Asker<T> {
    waker: Waker,
    wanted: VecDeque<(T, Site, Ticket)>,
    /// Doors at which threads ask, each once for each thread. A thread sends one result, so the queue has room for all of them.
    asking: Vec<Site>,
    answers: Receiver<Answer<T>>,
    answer: SyncSender<Answer<T>>,
}

/// What was asked, at which door, and the result.
type Answer<T> = (T, Site, io::Result<OwnedFd>);

impl<T: Clone + Send + 'static> Asker<T> {
    pub(crate) fn new(waker: Waker) -> Self {
        let (answer, answers) = sync_channel(MOST_ASKING);
        Self { waker, wanted: VecDeque::new(), asking: Vec::new(), answers, answer }
    }

    /// Fetches a descriptor as soon as a thread is free. `what` identifies the request in its result.
    pub(crate) fn ask(&mut self, what: T, site: Site, ticket: Ticket) {
        self.wanted.push_back((what, site, ticket));
        self.go_on();
    }

    /// The next result, if there is one.
    pub(crate) fn answer(&mut self) -> Option<(T, io::Result<OwnedFd>)> {
        let (what, site, result) = self.answers.try_recv().ok()?;
        if let Some(at) = self.asking.iter().position(|it| *it == site) {
            self.asking.swap_remove(at);
        }
        self.go_on();
        Some((what, result))
    }

    /// The oldest request at a door that has not enough of them.
    fn next(&mut self) -> Option<(T, Site, Ticket)> {
        let asking = |site: &Site| self.asking.iter().filter(|it| *it == site).count();
        let at = self.wanted.iter().position(|it| asking(&it.1) < MOST_AT_ONE_DOOR)?;
        self.wanted.remove(at)
    }

    fn go_on(&mut self) {
        while self.asking.len() < MOST_ASKING
            && let Some((what, site, ticket)) = self.next()
        {
            self.asking.push(site.clone());
            let (answer, waker) = (self.answer.clone(), self.waker.clone());
            let (asked, door) = (what.clone(), site.clone());
            let asker = move || {
                let result = ask(&door, &ticket);
                if answer.send((asked, door, result)).is_ok() {
                    waker.wake();
                }
            };
            if let Err(error) = std::thread::Builder::new().name("arena".into()).spawn(asker) {
                // The queue has room for all that ask.
                let _ = self.answer.try_send((what, site, Err(error)));
                self.waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Door, listen};
    use super::*;

    #[test]
    fn more_questions_than_threads_are_all_answered() {
        let site = Site::Name([b'b'; 32]);
        let door = Door::open(site.clone()).unwrap();
        door.show([1; 32], tempfile::tempfile().unwrap().into());
        let waker = Waker::new().unwrap();
        let mut asker = Asker::new(waker);
        let questions = 3 * MOST_ASKING;
        for question in 0..questions {
            asker.ask(question, site.clone(), [(question % 2) as u8; 32]);
        }
        let mut answered = vec![None; questions];
        while answered.contains(&None) {
            if let Some((question, answer)) = asker.answer() {
                assert_eq!(answered[question].replace(answer.is_ok()), None, "answered once");
            }
            std::thread::yield_now();
        }
        assert!(answered.iter().enumerate().all(|(at, it)| *it == Some(at % 2 == 1)));
    }

    #[test]
    fn a_door_that_does_not_answer_leaves_threads_for_others() {
        let silent = Site::Name([b'f'; 32]);
        let _nobody_accepts = listen(&silent).unwrap();
        let site = Site::Name([b'g'; 32]);
        let door = Door::open(site.clone()).unwrap();
        door.show([1; 32], tempfile::tempfile().unwrap().into());
        let waker = Waker::new().unwrap();
        let mut asker = Asker::new(waker);
        for question in 0..2 * MOST_ASKING {
            asker.ask(question, silent.clone(), [1; 32]);
        }
        asker.ask(usize::MAX, site, [1; 32]);
        let first = loop {
            if let Some(first) = asker.answer() {
                break first;
            }
            std::thread::yield_now();
        };
        assert!(matches!(first, (usize::MAX, Ok(_))), "{first:?}");
    }
}
