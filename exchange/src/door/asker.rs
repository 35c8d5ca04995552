//! Questions at the doors of peers, on threads of their own: the process that asks goes on meanwhile.
//!
//! In: doors and tickets. Out: descriptors, each with what it was asked for. Nothing is mapped here.
//!
//! Invariant: at most [`MOST_ASKING`] threads ask.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::{Site, Ticket, ask};
use crate::waker::Waker;

/// Maximum requests for descriptors in flight; others wait. A request to a stopped peer holds its thread for seconds.
const MOST_ASKING: usize = 16;

/// Fetches descriptors on threads of its own, and wakes a poll for each result.
#[derive(Debug)]
pub(crate) struct Asker<T> {
    waker: Waker,
    wanted: VecDeque<(T, Site, Ticket)>,
    /// Threads that fetch. Each sends one result, so the queue has room for all of them.
    asking: usize,
    answers: Receiver<(T, io::Result<OwnedFd>)>,
    answer: SyncSender<(T, io::Result<OwnedFd>)>,
}

impl<T: Clone + Send + 'static> Asker<T> {
    pub(crate) fn new(waker: Waker) -> Self {
        let (answer, answers) = sync_channel(MOST_ASKING);
        Self { waker, wanted: VecDeque::new(), asking: 0, answers, answer }
    }

    /// Fetches a descriptor as soon as a thread is free. `what` identifies the request in its result.
    pub(crate) fn ask(&mut self, what: T, site: Site, ticket: Ticket) {
        self.wanted.push_back((what, site, ticket));
        self.go_on();
    }

    /// The next result, if there is one.
    pub(crate) fn answer(&mut self) -> Option<(T, io::Result<OwnedFd>)> {
        let answer = self.answers.try_recv().ok()?;
        self.asking -= 1;
        self.go_on();
        Some(answer)
    }

    fn go_on(&mut self) {
        while self.asking < MOST_ASKING
            && let Some((what, site, ticket)) = self.wanted.pop_front()
        {
            self.asking += 1;
            let (answer, waker, asked) = (self.answer.clone(), self.waker.clone(), what.clone());
            let asker = move || {
                if answer.send((asked, ask(&site, &ticket))).is_ok() {
                    waker.wake();
                }
            };
            if let Err(error) = std::thread::Builder::new().name("arena".into()).spawn(asker) {
                // The queue has room for all that ask.
                let _ = self.answer.try_send((what, Err(error)));
                self.waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Door;
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
}
