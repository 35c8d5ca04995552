//! A link that a peer opened to us: its rings and pull requests come in, our replies go out.
//!
//! In: bytes of the peer, and the published regions. Out: messages, and data straight from published memory.
//! Requests are answered in their order. Never pulls, never rings.
//!
//! Invariants: sizes and offsets are checked before a byte is sent; a reply keeps its memory alive until it is
//! written; a peer can make us hold at most [`MAX_OUTSTANDING_PULLS`] requests.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::sync::Arc;

use super::frame::{
    self, MAX_OUTSTANDING_PULLS, PullRequest, REPLY_HEADER_BYTES, ReplyHeader, Request, Span,
    Status,
};
use super::socket::{self, LinkError};
use super::stream::Stream;
use crate::buffer::Buffer;
use crate::peer::{PeerId, RegionKey};

/// Memory that peers may read.
pub(super) type Regions = BTreeMap<RegionKey, Published>;

/// A publication.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) memory: Arc<Buffer>,
    /// Number of the publication. No other publication has it, in this process or another.
    pub(super) number: u64,
    /// Whether a peer has pulled of it.
    pub(super) is_read: Cell<bool>,
}

/// What one link reads or writes before others have their turn, in bytes.
pub(super) const TURN_BYTES: usize = 4 << 20;

const INPUT_BYTES: usize = 64 << 10;
/// The most slices that the system takes in one call.
const MAX_SLICES: usize = 1024;

/// The link.
pub(super) struct Incoming {
    pub(super) peer: PeerId,
    pub(super) stream: Stream,
    /// Whether the poll watches the socket for room to write.
    pub(super) wants_write: bool,
    input: Input,
    requests: VecDeque<PullRequest>,
    reply: Option<Reply>,
}

impl Incoming {
    pub(super) fn new(peer: PeerId, stream: Stream) -> Self {
        let (requests, reply) = (VecDeque::new(), None);
        Self { peer, stream, wants_write: false, input: Input::default(), requests, reply }
    }

    /// Reads what has arrived, passes messages to `message`, and queues pulls.
    pub(super) fn read(&mut self, mut message: impl FnMut(Vec<u8>)) -> Result<(), LinkError> {
        let mut turn = 0;
        while turn < TURN_BYTES || self.stream.has_unread() {
            let space = self.input.space();
            let room = space.len();
            let Some(bytes) = socket::read(&mut self.stream, space)? else { break };
            self.input.end += bytes;
            turn += bytes;
            while let Some(request) = self.input.next()? {
                match request {
                    Request::Ring(bytes) => message(bytes.to_vec()),
                    Request::Pull(_) if self.requests.len() >= MAX_OUTSTANDING_PULLS => {
                        return Err(LinkError::TooManyPulls);
                    }
                    Request::Pull(pull) => self.requests.push_back(pull),
                }
            }
            if !self.stream.may_have_more(bytes, room) {
                break;
            }
        }
        Ok(())
    }

    /// Bytes and requests that this process holds for the peer.
    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize) {
        (self.input.bytes.len(), self.requests.len())
    }

    /// Whether replies wait to be written.
    pub(super) fn has_output(&self) -> bool {
        self.reply.is_some() || !self.requests.is_empty() || self.stream.has_unsent()
    }

    /// Writes replies until the socket is full or the turn is over.
    pub(super) fn write(&mut self, regions: &Regions) -> Result<(), LinkError> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            if self.reply.is_none() {
                self.reply = self.requests.pop_front().map(|it| Reply::new(it, regions));
            }
            let Some(reply) = &mut self.reply else { break };
            let Some(bytes) = socket::write_vectored(&mut self.stream, &reply.slices())? else {
                break;
            };
            turn += bytes;
            if reply.advance(bytes) {
                self.reply = None;
            }
        }
        socket::flush(&mut self.stream)?;
        Ok(())
    }
}

/// Bytes of the peer that are not yet whole requests.
struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Default for Input {
    fn default() -> Self {
        Self { bytes: vec![0; INPUT_BYTES], start: 0, end: 0 }
    }
}

impl Input {
    /// Where to read to; never empty.
    fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// The next whole request; makes room for one that is longer than the room.
    fn next(&mut self) -> Result<Option<Request<'_>>, LinkError> {
        let Some(length) = frame::request_bytes(&self.bytes[self.start..self.end])? else {
            return Ok(None);
        };
        if self.end - self.start < length {
            if length > self.bytes.len() {
                self.bytes.resize(length, 0);
            }
            return Ok(None);
        }
        let start = self.start;
        self.start += length;
        Ok(Some(frame::request(&self.bytes[start..start + length])?))
    }
}

/// The reply that is being written.
struct Reply {
    header: [u8; REPLY_HEADER_BYTES],
    header_sent: usize,
    /// Absent for a reply without data.
    memory: Option<Arc<Buffer>>,
    spans: Vec<Span>,
    /// The span that is being written, and how much of it is.
    span: usize,
    span_sent: u64,
}

impl Reply {
    fn new(PullRequest { pull, key, spans }: PullRequest, regions: &Regions) -> Self {
        let region = regions.get(&key);
        let bytes = region.and_then(|it| measure(&spans, it.memory.len_bytes() as u64));
        let (status, bytes, publication) = match (region, bytes) {
            (None, _) => (Status::Gone, 0, 0),
            (Some(_), None) => (Status::OutOfBounds, 0, 0),
            (Some(region), Some(bytes)) => (Status::Data, bytes, region.number),
        };
        if let Some(region) = region {
            region.is_read.set(true);
        }
        let header = ReplyHeader { pull, status, bytes, publication }.encode();
        let memory = region.filter(|_| bytes > 0).map(|it| Arc::clone(&it.memory));
        let spans = if memory.is_some() { spans } else { Vec::new() };
        Self { header, header_sent: 0, memory, spans, span: 0, span_sent: 0 }
    }

    fn slices(&self) -> Vec<IoSlice<'_>> {
        let spans = &self.spans[self.span..];
        let mut slices = Vec::with_capacity((spans.len() + 1).min(MAX_SLICES));
        if self.header_sent < REPLY_HEADER_BYTES {
            slices.push(IoSlice::new(&self.header[self.header_sent..]));
        }
        if let Some(memory) = &self.memory {
            let mut skip = self.span_sent as usize;
            for span in spans.iter().take(MAX_SLICES - slices.len()) {
                let (start, bytes) = (span.start as usize, span.bytes as usize);
                slices.push(IoSlice::new(&memory.bytes()[start + skip..start + bytes]));
                skip = 0;
            }
        }
        slices
    }

    /// Counts bytes as written; whether that was all.
    fn advance(&mut self, bytes: usize) -> bool {
        let header = bytes.min(REPLY_HEADER_BYTES - self.header_sent);
        self.header_sent += header;
        let mut bytes = (bytes - header) as u64;
        while let Some(span) = self.spans.get(self.span) {
            let rest = span.bytes - self.span_sent;
            if bytes < rest {
                self.span_sent += bytes;
                break;
            }
            (self.span, self.span_sent, bytes) = (self.span + 1, 0, bytes - rest);
        }
        self.header_sent == REPLY_HEADER_BYTES && self.span == self.spans.len()
    }
}

/// Bytes of all spans, if each lies inside of `room` bytes.
fn measure(spans: &[Span], room: u64) -> Option<u64> {
    spans.iter().try_fold(0_u64, |total, span| {
        span.end().filter(|&end| end <= room)?;
        total.checked_add(span.bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_outside_of_the_region_are_not_measured() {
        let check = |spans: &[(u64, u64)], expected| {
            let spans: Vec<_> = spans.iter().map(|&(start, bytes)| Span { start, bytes }).collect();
            assert_eq!(measure(&spans, 10), expected);
        };
        check(&[], Some(0));
        check(&[(0, 10), (0, 10)], Some(20));
        check(&[(1, 10)], None);
        check(&[(0, 1), (u64::MAX, 1)], None);
        check(&[(10, 0)], Some(0));
    }

    #[test]
    fn a_reply_is_written_in_any_portions() {
        let memory = Arc::new(Buffer::from((0_u8..40).map(f32::from).collect::<Vec<_>>()));
        let spans = vec![Span { start: 100, bytes: 21 }, Span { start: 3, bytes: 40 }];
        let mut expected = Vec::new();
        for span in &spans {
            expected
                .extend_from_slice(&memory.bytes()[span.start as usize..][..span.bytes as usize]);
        }
        let published = Published { memory, number: 6, is_read: Cell::default() };
        let regions = Regions::from([(RegionKey::default(), published)]);
        for portion in [1, 7, 31, 32, 33, 92, 93] {
            let request = PullRequest { pull: 1, key: RegionKey::default(), spans: spans.clone() };
            let mut reply = Reply::new(request, &regions);
            let mut written = Vec::new();
            loop {
                let slices = reply.slices();
                let flat: Vec<u8> = slices.iter().flat_map(|it| it.iter().copied()).collect();
                let bytes = flat.len().min(portion);
                written.extend_from_slice(&flat[..bytes]);
                if reply.advance(bytes) {
                    break;
                }
            }
            assert_eq!(written[REPLY_HEADER_BYTES..], expected, "portions of {portion}");
        }
    }
}
