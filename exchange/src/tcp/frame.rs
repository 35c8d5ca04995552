//! Frames of the `tcp` provider, byte by byte.
//!
//! In: requests and replies as values. Out: bytes, and back. All integers are little endian. The one who opened
//! a link sends requests (rings and pulls), the other one only replies. No socket here.
//!
//! Invariant: whatever bytes come in, parsing ends in a value or a [`FrameError`], and nothing larger than
//! [`MAX_BODY_BYTES`] is ever asked for.

use crate::peer::RegionKey;
use crate::provider::{MAX_MESSAGE_BYTES, MAX_PIECES};

/// Kind and body length of a request.
pub(super) const REQUEST_HEADER_BYTES: usize = 8;
/// Part, status, data length, publication.
pub(super) const REPLY_HEADER_BYTES: usize = 32;
/// Maximum parts that one link may have outstanding; a peer that requests more breaks the rules and
/// its link is closed.
pub(super) const MAX_OUTSTANDING_PULLS: usize = 64;
/// Most spans of one part, so that a request stays short.
pub(super) const MAX_PART_SPANS: usize = 4096;

const RING: u32 = 1;
const PULL: u32 = 2;
const SPAN_BYTES: usize = 16;
const PULL_HEAD_BYTES: usize = 24;
/// Longest body of a request.
pub(super) const MAX_BODY_BYTES: usize = PULL_HEAD_BYTES + MAX_PIECES * SPAN_BYTES;
const _: () = assert!(MAX_MESSAGE_BYTES <= MAX_BODY_BYTES, "a message fits the body of a request");

/// Bytes of a region, one after the other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Span {
    /// The byte behind the last one, if it can be counted.
    pub(super) fn end(self) -> Option<u64> {
        self.start.checked_add(self.bytes)
    }
}

/// Joins spans that continue one another, in their order, and drops empty ones.
pub(super) fn merged(spans: impl Iterator<Item = Span>) -> Vec<Span> {
    let mut all: Vec<Span> = Vec::new();
    for span in spans.filter(|it| it.bytes > 0) {
        match all.last_mut() {
            Some(last) if last.end() == Some(span.start) => {
                last.bytes = last.bytes.saturating_add(span.bytes);
            }
            _ => all.push(span),
        }
    }
    all
}

/// What the opener of a link asks for.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Request<'a> {
    Ring(&'a [u8]),
    Pull(PullRequest),
}

/// Spans of a region that the opener wants.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct PullRequest {
    pub(super) pull: u64,
    pub(super) key: RegionKey,
    pub(super) spans: Vec<Span>,
}

/// Appends a ring.
pub(super) fn put_ring(out: &mut Vec<u8>, message: &[u8]) {
    put_header(out, RING, message.len());
    out.extend_from_slice(message);
}

/// Appends a request to pull.
pub(super) fn put_pull(out: &mut Vec<u8>, pull: u64, key: RegionKey, spans: &[Span]) {
    put_header(out, PULL, PULL_HEAD_BYTES + spans.len() * SPAN_BYTES);
    out.extend_from_slice(&pull.to_le_bytes());
    key.0.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    for span in spans {
        out.extend_from_slice(&span.start.to_le_bytes());
        out.extend_from_slice(&span.bytes.to_le_bytes());
    }
}

fn put_header(out: &mut Vec<u8>, kind: u32, body: usize) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(body as u32).to_le_bytes());
}

/// Length of the request that `input` begins with, header included; `None` while the header is incomplete.
pub(super) fn request_bytes(input: &[u8]) -> Result<Option<usize>, FrameError> {
    let Some(header) = input.first_chunk::<REQUEST_HEADER_BYTES>() else { return Ok(None) };
    let (kind, body) = (word(header, 0), word(header, 4) as usize);
    let limit = match kind {
        RING => MAX_MESSAGE_BYTES,
        PULL => MAX_BODY_BYTES,
        _ => return Err(FrameError::Kind { kind }),
    };
    if body > limit {
        return Err(FrameError::TooLong { bytes: body, limit });
    }
    Ok(Some(REQUEST_HEADER_BYTES + body))
}

/// Reads one whole request, as measured by [`request_bytes`].
pub(super) fn request(frame: &[u8]) -> Result<Request<'_>, FrameError> {
    let (header, body) = frame.split_at(REQUEST_HEADER_BYTES);
    if word(header, 0) == RING {
        return Ok(Request::Ring(body));
    }
    if body.len() < PULL_HEAD_BYTES || !(body.len() - PULL_HEAD_BYTES).is_multiple_of(SPAN_BYTES) {
        return Err(FrameError::Pull { bytes: body.len() });
    }
    let (head, spans) = body.split_at(PULL_HEAD_BYTES);
    let key = RegionKey([word(head, 8), word(head, 12), word(head, 16), word(head, 20)]);
    let spans = spans
        .chunks_exact(SPAN_BYTES)
        .map(|it| Span { start: long(it, 0), bytes: long(it, 8) })
        .collect();
    Ok(Request::Pull(PullRequest { pull: long(head, 0), key, spans }))
}

/// How a pull is answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Status {
    /// The data follows.
    Data,
    /// The region is not published.
    Gone,
    /// The spans lie outside of the region.
    OutOfBounds,
}

/// Head of a reply; `bytes` of data follow it, none unless the status is [`Status::Data`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ReplyHeader {
    pub(super) pull: u64,
    pub(super) status: Status,
    pub(super) bytes: u64,
    /// Which publication of the region the data is of: another number for every one, of every process.
    pub(super) publication: u64,
}

impl ReplyHeader {
    pub(super) fn encode(self) -> [u8; REPLY_HEADER_BYTES] {
        let status: u32 = match self.status {
            Status::Data => 0,
            Status::Gone => 1,
            Status::OutOfBounds => 2,
        };
        let mut out = [0; REPLY_HEADER_BYTES];
        out[..8].copy_from_slice(&self.pull.to_le_bytes());
        out[8..12].copy_from_slice(&status.to_le_bytes());
        out[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        out[24..].copy_from_slice(&self.publication.to_le_bytes());
        out
    }

    pub(super) fn decode(input: &[u8; REPLY_HEADER_BYTES]) -> Result<Self, FrameError> {
        let (pull, bytes, publication) = (long(input, 0), long(input, 16), long(input, 24));
        let status = match (word(input, 8), word(input, 12), bytes, publication) {
            (0, 0, _, _) => Status::Data,
            (1, 0, 0, 0) => Status::Gone,
            (2, 0, 0, 0) => Status::OutOfBounds,
            (status, ..) => return Err(FrameError::Status { status }),
        };
        Ok(Self { pull, status, bytes, publication })
    }
}

fn word(input: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*input[at..].first_chunk().expect("the caller has measured the frame"))
}

fn long(input: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*input[at..].first_chunk().expect("the caller has measured the frame"))
}

/// How a peer broke the rules of the link.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("request of unknown kind {kind}: the peer does not speak this protocol")]
    Kind { kind: u32 },
    #[error("request of {bytes} bytes is above {limit}: the peer does not speak this protocol")]
    TooLong { bytes: usize, limit: usize },
    #[error(
        "pull request of {bytes} bytes has no whole pieces: the peer does not speak this protocol"
    )]
    Pull { bytes: usize },
    #[error("reply with unknown status {status}: the peer does not speak this protocol")]
    Status { status: u32 },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_read_as_written() {
        let spans = vec![Span { start: 7, bytes: 9 }, Span { start: u64::MAX, bytes: 1 }];
        let mut out = Vec::new();
        put_ring(&mut out, b"go");
        put_pull(&mut out, 5, RegionKey([1, 2, 3, 4]), &spans);
        let first = request_bytes(&out).expect("well formed").expect("complete");
        assert_eq!(request(&out[..first]), Ok(Request::Ring(b"go")));
        assert_eq!(request_bytes(&out[first..]), Ok(Some(out.len() - first)));
        let expected = PullRequest { pull: 5, key: RegionKey([1, 2, 3, 4]), spans };
        assert_eq!(request(&out[first..]), Ok(Request::Pull(expected)));
    }

    #[test]
    fn replies_are_read_as_written() {
        for (status, bytes, publication) in
            [(Status::Data, 1 << 40, 5), (Status::Gone, 0, 0), (Status::OutOfBounds, 0, 0)]
        {
            let header = ReplyHeader { pull: 3, status, bytes, publication };
            assert_eq!(ReplyHeader::decode(&header.encode()), Ok(header));
        }
        let header = ReplyHeader { pull: 3, status: Status::Gone, bytes: 0, publication: 0 };
        let mut bytes = header.encode();
        bytes[16] = 1;
        assert_eq!(ReplyHeader::decode(&bytes), Err(FrameError::Status { status: 1 }));
    }

    #[test]
    fn breaches_are_named() {
        let check = |kind: u32, body: u32, expected| {
            let header = [kind.to_le_bytes(), body.to_le_bytes()].concat();
            assert_eq!(request_bytes(&header), Err(expected));
        };
        check(3, 0, FrameError::Kind { kind: 3 });
        check(RING, 1 << 21, FrameError::TooLong { bytes: 1 << 21, limit: MAX_MESSAGE_BYTES });
        check(PULL, 1 << 21, FrameError::TooLong { bytes: 1 << 21, limit: MAX_BODY_BYTES });
        let mut short = Vec::new();
        put_header(&mut short, PULL, 25);
        short.resize(REQUEST_HEADER_BYTES + 25, 0);
        assert_eq!(request(&short), Err(FrameError::Pull { bytes: 25 }));
    }

    #[test]
    fn neighbours_are_joined() {
        let span = |start, bytes| Span { start, bytes };
        let spans = [span(0, 4), span(4, 4), span(9, 0), span(8, 1), span(0, 1), span(2, 1)];
        assert_eq!(merged(spans.into_iter()), [span(0, 9), span(0, 1), span(2, 1)]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(Some(length)) = request_bytes(&bytes) && length <= bytes.len() {
                let _ = request(&bytes[..length]);
            }
            if let Some(header) = bytes.first_chunk() {
                let _ = ReplyHeader::decode(header);
            }
        }
    }
}
