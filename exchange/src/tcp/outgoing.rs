//! A link that we opened to a peer: our rings and pull requests go out, its replies come in.
//!
//! In: messages, pulls, bytes of the peer. Out: data straight into landings, ended pulls. Never answers pulls.
//!
//! ```text
//! Opening ─▶ Open
//!   ▲   │ closed without a word
//!   └─ Resting
//! ```
//!
//! Invariants: a message never waits behind data, only behind earlier messages and requests; at most the
//! window's bytes are asked for, but always one small part; a reply that is not the next one closes the link.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use super::frame::{self, REQUEST_HEADER_BYTES};
use super::greeting::Identity;
use super::ledger::Ledger;
use super::opening::{Opened, Opening};
use super::pulls::Pulls;
use super::replies::Replies;
use super::socket::{self, LinkError};
use super::stream::Stream;
use crate::peer::PeerId;
use crate::provider::RingError;

/// The link.
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    /// Address that the peer listens on.
    pub(super) target: SocketAddr,
    pub(super) stream: Stream,
    /// When it was first dialled.
    pub(super) since: Instant,
    /// How often it was turned away.
    tries: u32,
    /// Whether the poll waits for room to write.
    pub(super) wants_write: bool,
    /// Its turn among the links that lack room; none if it does not.
    pub(super) turn: Option<u64>,
    stage: Stage,
    outbox: Outbox,
    /// A message was refused since the outbox last had room.
    refused: bool,
    pub(super) pulls: Pulls,
    replies: Replies,
    /// When the peer last sent something.
    pub(super) heard: Instant,
}

enum Stage {
    /// Waits to be dialled, or dialled again.
    Resting,
    /// The greeting is in progress.
    Opening(Box<Opening>),
    Open,
}

/// What one advance brought.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Progress {
    /// The peer has let us in.
    Opened,
    Other,
}

impl Outgoing {
    /// `stream` is one that is being connected.
    pub(super) fn new(
        (peer, target): (PeerId, SocketAddr),
        stream: Stream,
        since: Instant,
    ) -> Self {
        Self {
            peer,
            target,
            stream,
            since,
            tries: 0,
            wants_write: true,
            turn: None,
            stage: Stage::Opening(Box::new(Opening::new(peer))),
            outbox: Outbox::default(),
            refused: false,
            pulls: Pulls::default(),
            replies: Replies::default(),
            heard: since,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    pub(super) fn tries(&self) -> u32 {
        self.tries
    }

    /// Whether the peer has closed the link before it said a word, or before it let us in although it had proved itself: it had no
    /// room, or it died, which the next try tells apart.
    pub(super) fn was_turned_away(&self, error: &LinkError) -> bool {
        let Stage::Opening(opening) = &self.stage else { return false };
        let cut = match error {
            LinkError::Ended => true,
            LinkError::Io(error) => {
                matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
            }
            LinkError::NoRoom
            | LinkError::Silent
            | LinkError::Crowded { .. }
            | LinkError::WrongReply
            | LinkError::TooManyPulls
            | LinkError::Frame(_)
            | LinkError::Greeting(_) => false,
        };
        !opening.is_in_a_word() && cut
    }

    /// Waits to be dialled.
    pub(super) fn rest(&mut self) {
        (self.stage, self.wants_write) = (Stage::Resting, false);
    }

    /// Waits to be dialled again.
    pub(super) fn rest_again(&mut self) {
        self.rest();
        self.tries += 1;
    }

    /// Begins again with another stream.
    pub(super) fn try_again(&mut self, stream: Stream) {
        let opening = Opening::new(self.peer);
        (self.stream, self.stage) = (stream, Stage::Opening(Box::new(opening)));
        self.wants_write = true;
    }

    /// Why it is not open when its time is over.
    pub(super) fn silence(&self) -> LinkError {
        match self.tries {
            0 => LinkError::Silent,
            tries => LinkError::Crowded { tries },
        }
    }

    /// Queues a message.
    pub(super) fn ring(&mut self, message: &[u8], limit: usize) -> Result<(), RingError> {
        let queued = self.outbox.waiting().len();
        if queued + REQUEST_HEADER_BYTES + message.len() > limit {
            self.refused = true;
            return Err(RingError::Full { peer: self.peer, queued });
        }
        frame::put_ring(self.outbox.end(), message);
        Ok(())
    }

    /// Continues its stage, after the socket became readable or writable.
    pub(super) fn advance(
        &mut self,
        me: &Identity,
        nonce: impl FnOnce() -> [u8; 32],
        ledger: &mut Ledger,
        now: Instant,
    ) -> Result<Progress, LinkError> {
        match &mut self.stage {
            Stage::Resting => {}
            Stage::Opening(opening) => {
                if !opening.is_connecting() {
                    socket::flush(&mut self.stream)?;
                }
                if opening.advance(&mut self.stream, me, nonce)? == Opened::Yes {
                    (self.stage, self.heard) = (Stage::Open, now);
                    return Ok(Progress::Opened);
                }
            }
            Stage::Open => {
                if self.replies.read(&mut self.stream, &mut self.pulls, ledger)? > 0 {
                    self.heard = now;
                }
            }
        }
        Ok(Progress::Other)
    }

    /// Requests the parts that there is room for, and writes what is queued.
    ///
    /// `room` is the number of bytes that all links together may still request, `window` the number
    /// that this link may have outstanding. Returns whether the link would ask for more if there were more `room`.
    pub(super) fn send(&mut self, room: u64, window: u64, part: u64) -> Result<bool, LinkError> {
        if !self.is_open() {
            return Ok(false);
        }
        let lacks_room = self.pulls.ask(room, window, part, self.outbox.end());
        while !self.outbox.waiting().is_empty() {
            let Some(bytes) = socket::write(&mut self.stream, self.outbox.waiting())? else {
                break;
            };
            self.outbox.written(bytes);
        }
        socket::flush(&mut self.stream)?;
        Ok(lacks_room)
    }

    /// Whether there is room again after a message was refused; said once.
    pub(super) fn has_room_again(&mut self, limit: usize) -> bool {
        self.refused
            && self.outbox.waiting().len() <= limit / 2
            && std::mem::take(&mut self.refused)
    }

    /// Whether bytes wait for room in the socket.
    pub(super) fn has_output(&self) -> bool {
        match &self.stage {
            Stage::Resting => false,
            Stage::Opening(opening) => opening.is_connecting() || self.stream.has_unsent(),
            Stage::Open => !self.outbox.waiting().is_empty() || self.stream.has_unsent(),
        }
    }
}

/// Bytes to write, in order.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    written: usize,
}

impl Outbox {
    /// Above this, memory of a burst is given back.
    const KEPT_BYTES: usize = 1 << 20;

    fn waiting(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Where to append.
    fn end(&mut self) -> &mut Vec<u8> {
        if self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
        &mut self.bytes
    }

    fn written(&mut self, bytes: usize) {
        self.written += bytes;
        if self.written == self.bytes.len() {
            self.bytes.clear();
            self.bytes.shrink_to(Self::KEPT_BYTES);
            self.written = 0;
        }
    }
}
