//! A link that we opened to a peer: our rings and pull requests go out, its replies come in.
//!
//! In: messages, pulls, bytes of the peer. Out: data straight into landings, ended pulls. Never answers pulls.
//!
//! ```text
//! Connecting ─▶ Greeting ─▶ Proving ─▶ Open
//! ```
//!
//! Invariants: a message never waits behind data, only behind earlier messages and requests; at most the
//! window's bytes are asked for, but always one pull; a reply that is not the next one closes the link.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::time::Instant;

use super::frame::{self, MAX_OUTSTANDING_PULLS, REQUEST_HEADER_BYTES};
use super::greeting::{self, ANSWER_BYTES, Hello, Identity, Side, VERDICT_BYTES, Verdict};
use super::ledger::{Ledger, Pull};
use super::replies::Replies;
use super::socket::{self, LinkError};
use crate::peer::PeerId;
use crate::provider::{PullError, PullId, RingError};

/// The link.
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    pub(super) stream: TcpStream,
    pub(super) since: Instant,
    /// Whether the poll waits for room to write.
    pub(super) wants_write: bool,
    stage: Stage,
    input: [u8; ANSWER_BYTES],
    filled: usize,
    outbox: Outbox,
    /// Pulls that are not asked for yet.
    waiting: VecDeque<Pull>,
    /// Pulls that are asked for, in the order of their replies.
    sent: VecDeque<Pull>,
    sent_bytes: u64,
    replies: Replies,
}

enum Stage {
    Connecting,
    /// Our hello is out.
    Greeting(Hello),
    /// Our proof is out.
    Proving,
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
    pub(super) fn new(peer: PeerId, stream: TcpStream, since: Instant) -> Self {
        Self {
            peer,
            stream,
            since,
            wants_write: true,
            stage: Stage::Connecting,
            input: [0; ANSWER_BYTES],
            filled: 0,
            outbox: Outbox::default(),
            waiting: VecDeque::new(),
            sent: VecDeque::new(),
            sent_bytes: 0,
            replies: Replies::default(),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// Queues a message.
    pub(super) fn ring(&mut self, message: &[u8], limit: usize) -> Result<(), RingError> {
        let queued = self.outbox.waiting().len();
        if queued + REQUEST_HEADER_BYTES + message.len() > limit {
            return Err(RingError::Full { peer: self.peer, queued });
        }
        frame::put_ring(self.outbox.end(), message);
        Ok(())
    }

    /// Queues a pull that the ledger has begun.
    pub(super) fn pull(&mut self, pull: Pull) {
        self.waiting.push_back(pull);
    }

    /// Bytes that were asked for and are not there.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Goes on with whatever stage it is in, as the socket is readable or writable.
    pub(super) fn advance(
        &mut self,
        me: &Identity,
        nonce: impl FnOnce() -> [u8; 32],
        ledger: &mut Ledger,
    ) -> Result<Progress, LinkError> {
        match &self.stage {
            Stage::Connecting => {
                if let Some(error) = self.stream.take_error().map_err(LinkError::Io)? {
                    return Err(LinkError::Io(error));
                }
                let (data_version, from, to) = (me.data_version, me.me, self.peer);
                let hello = Hello { data_version, from, to, nonce: nonce() };
                socket::write_whole(&self.stream, &hello.encode())?;
                self.stage = Stage::Greeting(hello);
            }
            Stage::Greeting(sent) => {
                let sent = *sent;
                if self.receive(ANSWER_BYTES)? {
                    let answered = greeting::check_acceptor(me, &sent, &self.input)?;
                    let proof = greeting::proof(&me.secret, Side::Opener, &sent, &answered);
                    socket::write_whole(&self.stream, proof.as_bytes())?;
                    self.stage = Stage::Proving;
                }
            }
            Stage::Proving => {
                if self.receive(VERDICT_BYTES)? {
                    Verdict::check(&self.input[..VERDICT_BYTES], me.me)?;
                    self.stage = Stage::Open;
                    return Ok(Progress::Opened);
                }
            }
            Stage::Open => {
                let ended = &mut self.sent_bytes;
                self.replies
                    .read(&self.stream, &mut self.sent, ledger, |pull| *ended -= pull.bytes)?;
            }
        }
        Ok(Progress::Other)
    }

    /// Reads towards `length` bytes of input; whether they are there.
    fn receive(&mut self, length: usize) -> Result<bool, LinkError> {
        if let Some(bytes) = socket::read(&self.stream, &mut self.input[self.filled..length])? {
            self.filled += bytes;
        }
        if self.filled < length {
            return Ok(false);
        }
        self.filled = 0;
        Ok(true)
    }

    /// Asks for the pulls that the window has room for, and writes what is queued.
    ///
    /// `room` is what all links together may still ask for, `window` what this one may have outstanding.
    pub(super) fn send(&mut self, room: u64, window: u64) -> Result<(), LinkError> {
        if !self.is_open() {
            return Ok(());
        }
        let mut room = room.min(window.saturating_sub(self.sent_bytes));
        while let Some(next) = self.waiting.front() {
            let fits = self.sent.len() < MAX_OUTSTANDING_PULLS && next.bytes <= room;
            if !fits && !self.sent.is_empty() {
                break;
            }
            let pull = self.waiting.pop_front().expect("just seen");
            room = room.saturating_sub(pull.bytes);
            self.sent_bytes += pull.bytes;
            frame::put_pull(self.outbox.end(), pull.id.0, pull.key, &pull.spans);
            self.sent.push_back(pull);
        }
        while !self.outbox.waiting().is_empty() {
            let Some(bytes) = socket::write(&self.stream, self.outbox.waiting())? else { break };
            self.outbox.written(bytes);
        }
        Ok(())
    }

    /// Whether bytes wait for room in the socket.
    pub(super) fn has_output(&self) -> bool {
        matches!(self.stage, Stage::Connecting)
            || (self.is_open() && !self.outbox.waiting().is_empty())
    }

    /// A pull's deadline has passed: it is forgotten if it was not asked for, else what comes only drains.
    pub(super) fn expire(&mut self, id: PullId, ledger: &mut Ledger) {
        if let Some(pull) = self.sent.iter_mut().find(|it| it.id == id) {
            pull.expired = true;
        } else if let Some(at) = self.waiting.iter().position(|it| it.id == id) {
            let mut pull = self.waiting.remove(at).expect("just found");
            pull.expired = true;
            ledger.end(&pull, Err(PullError::Deadline));
        }
    }

    /// Ends every pull, as the link is closed.
    pub(super) fn end(self, result: &PullError, ledger: &mut Ledger) {
        for pull in self.sent.iter().chain(&self.waiting) {
            ledger.end(pull, Err(result.clone()));
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
