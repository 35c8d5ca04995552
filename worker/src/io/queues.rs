//! The queues between the IO thread and the others of its process: bounded, and the IO thread never waits on one.
//!
//! ```text
//! others ──Request, at most MAX_REQUESTS; the sender waits──▶ io
//! others ◀──Notice, at most MAX_NOTICES; then they stay with io, and whoever takes one wakes it── io
//! ```
//!
//! So there is no circle: a thread that computes may wait for the IO thread, which waits for sockets alone. What stays with the
//! IO thread is bounded by what its machines grant: works by the memory for their rows, whole phases by the window.
//!
//! Invariant: notices arrive in the order they were told, each once, whatever was full meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{
    Receiver, RecvError, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel,
};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cadre_exchange::Waker;
use cadre_step::envelope::Ending;

use super::{Asked, Notice, Request};
use crate::memory::Memory;

/// Requests that wait for the IO thread; whoever asks for one more waits until it has taken some.
pub(crate) const MAX_REQUESTS: usize = 4096;
/// Notices that wait for a thread that computes; more stay with the IO thread.
const MAX_NOTICES: usize = 1024;

/// Speaks to the IO thread from others.
#[derive(Clone, Debug)]
pub struct Handle<M> {
    requests: SyncSender<Asked<M>>,
    waker: Waker,
}

/// A [`Handle`] for whoever has no rows, and so need not know where they live.
#[derive(Clone)]
pub struct Line(Arc<dyn Fn(Request) + Send + Sync>);

impl Line {
    /// As [`Handle::send`].
    pub fn send(&self, request: Request) {
        (self.0)(request);
    }
}

impl<M: Memory> Handle<M> {
    /// The same handle without rows.
    pub fn line(&self) -> Line {
        let handle = self.clone();
        Line(Arc::new(move |request| handle.send(request)))
    }

    /// A handle, and the end that its requests come to; they end the polls of `waker`.
    pub fn channel(waker: Waker) -> (Self, Receiver<Asked<M>>) {
        let (requests, receiver) = sync_channel(MAX_REQUESTS);
        (Self { requests, waker }, receiver)
    }

    /// Asks for something; waits while the queue is full. After the thread has ended, nothing happens. Not for the IO thread itself.
    pub fn send(&self, asked: impl Into<Asked<M>>) {
        match self.requests.try_send(asked.into()) {
            Ok(()) => {}
            Err(TrySendError::Full(asked)) => {
                self.waker.wake();
                if self.requests.send(asked).is_err() {
                    return;
                }
            }
            Err(TrySendError::Disconnected(_)) => return,
        }
        self.waker.wake();
    }
}

/// How the job ended, for any thread that asks; clones are of the same job. Known before the notice of it is taken.
#[derive(Clone, Debug, Default)]
pub struct End(Arc<(Mutex<Option<Ending>>, Condvar)>);

impl End {
    fn set(&self, ending: &Ending) {
        let (cell, changed) = &*self.0;
        cell.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| ending.clone());
        changed.notify_all();
    }

    /// Waits for it, at most for `deadline`.
    pub fn wait(&self, deadline: Duration) -> Option<Ending> {
        let (cell, changed) = &*self.0;
        let until = Instant::now().checked_add(deadline);
        let mut ended = cell.lock().unwrap_or_else(PoisonError::into_inner);
        while ended.is_none() {
            let left =
                until.map_or(deadline, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            let waited = changed.wait_timeout(ended, left);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        ended.clone()
    }
}

/// A queue of notices to one thread; its notices end the polls of `waker` only where the queue was full.
pub fn notices<M: Memory>(waker: Waker) -> (Outlet<M>, Notices<M>) {
    let (sender, receiver) = sync_channel(MAX_NOTICES);
    let full = Arc::new(AtomicBool::new(false));
    let end = End::default();
    let (waiting, untaken) = (VecDeque::new(), Arc::<Counts>::default());
    let outlet = Outlet {
        sender,
        waiting,
        full: Arc::clone(&full),
        untaken: Arc::clone(&untaken),
        end: end.clone(),
    };
    (outlet, Notices { receiver, full, untaken, waker, end })
}

/// What a thread was told and has not done.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Owed {
    /// Nothing that holds others up.
    #[default]
    Nothing,
    /// To take a notice.
    Notices,
    /// To compute a work, for others as well.
    Works,
    /// The same, and the thread computes just now: it is not back before the launch is over, however long that takes.
    Computing,
}

/// How much of each.
#[derive(Debug, Default)]
struct Counts {
    /// Notices but works that were told and not taken.
    notices: AtomicUsize,
    /// Works that were told and not taken.
    works: AtomicUsize,
    /// What the thread has taken and not done, as it says: an [`Owed`].
    taken: AtomicU8,
}

impl Counts {
    /// The count that a notice belongs to. A part of a phase is for the thread alone, which may wait for others until the phase is
    /// whole.
    fn of<M: Memory>(&self, notice: &Notice<M>) -> Option<&AtomicUsize> {
        match notice {
            Notice::Part(_) => None,
            Notice::Work(_) => Some(&self.works),
            Notice::Trainers(_)
            | Notice::Step(_)
            | Notice::Whole(_)
            | Notice::Cancelled(_)
            | Notice::Lost(_)
            | Notice::End(_) => Some(&self.notices),
        }
    }

    fn owed(&self) -> Owed {
        let is = |it: &AtomicUsize| it.load(Ordering::SeqCst) > 0;
        let taken = self.taken.load(Ordering::SeqCst);
        if taken == Owed::Computing as u8 {
            Owed::Computing
        } else if is(&self.works) || taken == Owed::Works as u8 {
            Owed::Works
        } else if is(&self.notices) || taken == Owed::Notices as u8 {
            Owed::Notices
        } else {
            Owed::Nothing
        }
    }
}

/// The IO thread's end of a queue of notices.
#[derive(Debug)]
pub struct Outlet<M: Memory> {
    sender: SyncSender<Notice<M>>,
    waiting: VecDeque<Notice<M>>,
    /// Whoever takes a notice is to wake the IO thread.
    full: Arc<AtomicBool>,
    untaken: Arc<Counts>,
    end: End,
}

impl<M: Memory> Outlet<M> {
    /// What the thread was told and has not taken yet, or has taken and not computed, and that holds others up.
    pub fn owed(&self) -> Owed {
        self.untaken.owed()
    }

    /// Tells the thread, sooner or later. Nothing happens if it has ended.
    pub fn tell(&mut self, notice: Notice<M>) {
        match &notice {
            Notice::End(ending) => self.end.set(ending),
            Notice::Lost(reason) => self.end.set(&lost(reason)),
            Notice::Trainers(_)
            | Notice::Step(_)
            | Notice::Part(_)
            | Notice::Whole(_)
            | Notice::Work(_)
            | Notice::Cancelled(_) => {}
        }
        if let Some(count) = self.untaken.of(&notice) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        self.waiting.push_back(notice);
        self.flush();
    }

    /// Hands on what waits here, as far as there is room.
    pub fn flush(&mut self) {
        while let Some(notice) = self.waiting.pop_front() {
            match self.sender.try_send(notice) {
                Ok(()) => {}
                Err(TrySendError::Full(notice)) => {
                    self.waiting.push_front(notice);
                    // Once more after the flag is up: the thread may have emptied the queue just before.
                    if self.full.swap(true, Ordering::SeqCst) {
                        return;
                    }
                }
                Err(TrySendError::Disconnected(_)) => self.waiting.clear(),
            }
        }
    }
}

/// The end of a job for whoever can do nothing more.
pub fn lost(reason: &str) -> Ending {
    Ending::Failed { reason: reason.to_owned(), bad_input: false }
}

/// The other end: of the thread that computes.
#[derive(Debug)]
pub struct Notices<M: Memory> {
    receiver: Receiver<Notice<M>>,
    full: Arc<AtomicBool>,
    untaken: Arc<Counts>,
    waker: Waker,
    end: End,
}

impl<M: Memory> Notices<M> {
    /// Says what this thread has taken and not done.
    pub fn owe(&self, owed: Owed) {
        self.untaken.taken.store(owed as u8, Ordering::SeqCst);
    }

    /// How the job ended, once it has.
    pub fn end(&self) -> End {
        self.end.clone()
    }

    /// The next notice; waits for it.
    ///
    /// # Errors
    ///
    /// The IO thread has ended.
    pub fn recv(&self) -> Result<Notice<M>, RecvError> {
        self.receiver.recv().inspect(|it| self.taken(it))
    }

    /// The next notice, if it is there.
    ///
    /// # Errors
    ///
    /// It is not, or the IO thread has ended.
    pub fn try_recv(&self) -> Result<Notice<M>, TryRecvError> {
        self.receiver.try_recv().inspect(|it| self.taken(it))
    }

    /// The next notice; waits so long for it.
    ///
    /// # Errors
    ///
    /// It did not come, or the IO thread has ended.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Notice<M>, RecvTimeoutError> {
        self.receiver.recv_timeout(timeout).inspect(|it| self.taken(it))
    }

    fn taken(&self, notice: &Notice<M>) {
        if let Some(count) = self.untaken.of(notice) {
            count.fetch_sub(1, Ordering::SeqCst);
        }
        if self.full.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }
}

#[cfg(test)]
#[allow(clippy::wildcard_enum_match_arm, reason = "tests pick one out of many")]
mod tests {
    use std::sync::mpsc::channel;

    use cadre_exchange::{Encryption, Limits, PeerId, Provider as _, Tcp, TcpConfig};
    use cadre_protocol::At;

    use super::*;
    use crate::memory::HostRows;

    fn links() -> Tcp {
        let bind = std::net::Ipv4Addr::LOCALHOST.into();
        let (me, secret, limits) = (PeerId::server(0, 0), [0; 32], Limits::default());
        let encryption = Encryption::Off;
        Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap()
    }

    fn cancelled(notice: &Notice<HostRows>) -> u64 {
        match notice {
            Notice::Cancelled(at) => at.step,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn notices_beyond_the_bound_stay_with_io_and_arrive_in_order() {
        let mut links = links();
        let (mut outlet, notices) = notices::<HostRows>(links.waker());
        let all = 3 * MAX_NOTICES as u64;
        // Nobody takes one meanwhile, and the one who tells does not wait.
        for step in 0..all {
            outlet.tell(Notice::Cancelled(At::new(step, 0)));
        }
        assert_eq!(outlet.waiting.len(), all as usize - MAX_NOTICES);
        let (heard, seen) = channel();
        let reader = std::thread::spawn(move || {
            while let Ok(notice) = notices.recv() {
                heard.send(cancelled(&notice)).unwrap();
            }
        });
        assert_eq!(outlet.owed(), Owed::Notices);
        // As the IO thread does: poll until it is woken, then hand on. Without a wake this takes a minute each time.
        let begun = std::time::Instant::now();
        while !outlet.waiting.is_empty() {
            links.poll(Duration::from_mins(1), &mut Vec::new());
            outlet.flush();
        }
        drop(outlet);
        reader.join().unwrap();
        assert!(begun.elapsed() < Duration::from_mins(1), "nobody woke the io thread");
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), (0..all).collect::<Vec<_>>());
    }

    #[test]
    fn who_asks_waits_for_a_full_queue_and_io_is_woken() {
        let mut links = links();
        let (handle, requests) = Handle::<HostRows>::channel(links.waker());
        let all = 3 * MAX_REQUESTS;
        let (asked, count) = channel();
        let ask = move |_| {
            handle.send(Request::Leave(None));
            asked.send(()).unwrap();
        };
        let asking = std::thread::spawn(move || (0..all).for_each(ask));
        // Nobody takes one: the queue is full, and the next one waits with its caller.
        let queued = (0..MAX_REQUESTS).filter(|_| count.recv().is_ok()).count();
        assert_eq!(queued, MAX_REQUESTS);
        let longer = count.recv_timeout(Duration::from_millis(200));
        assert!(longer.is_err(), "more were asked than the queue has room for");
        let (begun, mut taken) = (std::time::Instant::now(), 0);
        while taken < all {
            links.poll(Duration::from_mins(1), &mut Vec::new());
            taken += requests.try_iter().count();
        }
        asking.join().unwrap();
        assert!(begun.elapsed() < Duration::from_mins(1), "nobody woke the io thread");
    }

    #[test]
    fn nothing_waits_for_a_thread_that_has_ended() {
        let links = links();
        let (mut outlet, notices) = notices::<HostRows>(links.waker());
        drop(notices);
        outlet.tell(Notice::Lost(String::new()));
        assert!(outlet.waiting.is_empty());
        let (handle, requests) = Handle::<HostRows>::channel(links.waker());
        drop(requests);
        handle.send(Request::Leave(None));
    }
}
