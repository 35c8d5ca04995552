//! The visitors of a door: processes that are connected and have not shown a whole ticket yet.
//!
//! In: a listener, tickets with their descriptors. Out: a descriptor for each visitor that shows its ticket; the others are
//! disconnected. One thread serves all visitors and blocks on none of them.
//!
//! Invariants: at most [`PLACES`] visitors are connected, each for at most [`PATIENCE`]. One more visitor displaces the one that
//! has waited longest.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{Arenas, PATIENCE, Ticket, check_user};
use crate::waker::Waker;

/// Maximum connected visitors. An asker shows its ticket as soon as it is connected.
pub(super) const PLACES: usize = 256;

/// Pause after a failed accept, which usually means that the process has no free descriptor.
const DEAF: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(super) struct Hall {
    listener: UnixListener,
    arenas: Arenas,
    /// In order of arrival, the oldest first.
    visitors: VecDeque<Visitor>,
    deaf_until: Option<Instant>,
}

#[derive(Debug)]
struct Visitor {
    stream: UnixStream,
    shown: Ticket,
    filled: usize,
    until: Instant,
}

impl Hall {
    pub(super) fn new(listener: UnixListener, arenas: Arenas) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, arenas, visitors: VecDeque::new(), deaf_until: None })
    }

    /// Waits until a process connects or sends something, the waker is used, or a time limit ends. Then serves all visitors.
    pub(super) fn turn(&mut self, waker: &Waker) {
        let now = Instant::now();
        let listens = self.listens(now);
        let timeout = self.rest(now).and_then(|it| Timespec::try_from(it).ok());
        let mut waited = vec![PollFd::new(waker, PollFlags::IN)];
        if listens {
            waited.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        waited.extend(self.visitors.iter().map(|it| PollFd::new(&it.stream, PollFlags::IN)));
        // An interrupted wait counts as one that ended.
        let _ = poll(&mut waited, timeout.as_ref());
        let now = Instant::now();
        self.hear(now);
        if listens {
            self.let_in(now);
        }
    }

    fn listens(&self, now: Instant) -> bool {
        self.deaf_until.is_none_or(|it| it <= now)
    }

    /// Time until the next limit ends: that of the oldest visitor, or of the pause after a failed accept.
    fn rest(&self, now: Instant) -> Option<Duration> {
        let visitor = self.visitors.front().map(|it| it.until);
        let deaf = self.deaf_until.filter(|it| *it > now);
        let next = visitor.into_iter().chain(deaf).min()?;
        Some(next.saturating_duration_since(now))
    }

    fn let_in(&mut self, now: Instant) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.meet(stream, now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The process has disconnected already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "nobody is let in at the door of shared memory for a while");
                    self.deaf_until = Some(now + DEAF);
                    return;
                }
            }
        }
    }

    fn meet(&mut self, stream: UnixStream, now: Instant) {
        if let Err(error) = check_user(&stream).and_then(|()| stream.set_nonblocking(true)) {
            return tracing::debug!(%error, "somebody was sent away from the door");
        }
        let mut visitor = Visitor { stream, shown: [0; 32], filled: 0, until: now + PATIENCE };
        if visitor.is_heard(&self.arenas) {
            return;
        }
        if self.visitors.len() >= PLACES {
            self.visitors.pop_front();
        }
        self.visitors.push_back(visitor);
    }

    fn hear(&mut self, now: Instant) {
        let arenas = &self.arenas;
        self.visitors.retain_mut(|it| !it.is_heard(arenas) && it.until > now);
    }
}

impl Visitor {
    /// Reads what the visitor has sent. True when it was answered or has disconnected, so that it can be forgotten.
    fn is_heard(&mut self, arenas: &Arenas) -> bool {
        match self.stream.read(&mut self.shown[self.filled..]) {
            Ok(0) => return true,
            Ok(read) => self.filled += read,
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
        if self.filled < self.shown.len() {
            return false;
        }
        if let Err(error) = self.answer(arenas) {
            tracing::debug!(%error, "a descriptor was asked for and not given");
        }
        true
    }

    fn answer(&self, arenas: &Arenas) -> io::Result<()> {
        let arenas = arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let descriptor = arenas.get(&self.shown).map(OwnedFd::try_clone).transpose()?;
        drop(arenas);
        let descriptor = descriptor
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "an unknown ticket"))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        message.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&self.stream, &[IoSlice::new(&[1])], &mut message, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

    use super::*;

    #[test]
    fn a_door_that_can_let_nobody_in_does_not_try_all_the_time() {
        // Every accept of a socket that does not listen fails, as others do without a free descriptor; and it counts as readable.
        let kind = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
        let listener = UnixListener::from(socket);
        let mut hall = Hall::new(listener, Arenas::default()).unwrap();
        let waker = Waker::new().unwrap();
        hall.turn(&waker);
        let until = hall.deaf_until.expect("it does not listen for a while");
        let began = until.checked_sub(DEAF).unwrap();
        assert!(!hall.listens(began) && hall.listens(until));
        assert_eq!(hall.rest(began), Some(DEAF));
        assert_eq!(hall.rest(until), None);
    }
}
