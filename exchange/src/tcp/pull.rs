//! One pull of the `tcp` provider: what is wanted, how much was asked for, how much has landed.
//!
//! In: counts of bytes. Out: the spans of its next part. A pull travels in parts, each one request and one reply; all of them
//! are of one publication of the region, else it begins again at byte 0 as its next attempt.
//!
//! ```text
//! stream of the pull   |██████ landed ██████|▒▒▒ asked for ▒▒▒|          |
//!                      0                                              bytes
//! ```
//!
//! Invariant: what has landed is a prefix of the stream, all of it of one publication.

use std::time::{Duration, Instant};

use super::frame::{MAX_PART_SPANS, Span};
use crate::peer::{PeerId, RegionKey};
use crate::provider::{LandingId, PullId};

/// What a pull is to bring.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Wish {
    pub(super) peer: PeerId,
    pub(super) key: RegionKey,
    /// Where the bytes lie in the peer's region, in stream order.
    pub(super) spans: Vec<Span>,
    /// Where they land, in stream order.
    pub(super) runs: Vec<Span>,
    pub(super) bytes: u64,
}

/// A position in the stream: a span or run, and how many of its bytes have passed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Cursor {
    pub(super) index: usize,
    pub(super) within: u64,
}

impl Cursor {
    /// Moves on by `bytes`, at most to the end.
    fn pass(&mut self, mut bytes: u64, spans: &[Span]) {
        while let Some(span) = spans.get(self.index) {
            let rest = span.bytes - self.within;
            if bytes < rest {
                self.within += bytes;
                return;
            }
            (self.index, self.within, bytes) = (self.index + 1, 0, bytes - rest);
        }
    }
}

/// An outstanding pull.
#[derive(Debug)]
pub(crate) struct Pull {
    pub(super) id: PullId,
    pub(super) wish: Wish,
    pub(super) landing: LandingId,
    /// Names the link that it goes over.
    pub(super) link: u64,
    /// How long nothing may come over its link.
    pub(super) patience: Duration,
    pub(super) since: Instant,
    /// Where the ledger looks at it next.
    pub(super) look_at: Instant,
    /// Publication of the bytes that have landed; none while there are none.
    pub(super) publication: Option<u64>,
    landed: u64,
    landed_to: Cursor,
    asked: u64,
    asked_to: Cursor,
    asked_all: bool,
    attempt: u32,
}

impl Pull {
    /// A pull without landed bytes.
    pub(super) fn new(
        id: PullId,
        wish: Wish,
        (landing, link): (LandingId, u64),
        patience: Duration,
        since: Instant,
    ) -> Self {
        Self {
            id,
            wish,
            landing,
            link,
            patience,
            since,
            // An instant that overflows counts as far in the future.
            look_at: since + patience.min(Duration::from_hours(24 * 365)),
            publication: None,
            landed: 0,
            landed_to: Cursor::default(),
            asked: 0,
            asked_to: Cursor::default(),
            asked_all: false,
            attempt: 0,
        }
    }

    /// Goes on behind what an earlier pull has landed.
    pub(super) fn resume(&mut self, publication: u64, landed: u64) {
        self.publication = Some(publication);
        (self.landed, self.asked) = (landed, landed);
        self.landed_to.pass(landed, &self.wish.runs);
        self.asked_to.pass(landed, &self.wish.spans);
    }

    /// Begins again at byte 0. Replies to parts of the earlier attempt no longer count.
    pub(super) fn restart(&mut self) {
        self.publication = None;
        (self.landed, self.landed_to) = (0, Cursor::default());
        (self.asked, self.asked_to) = (0, Cursor::default());
        self.asked_all = false;
        self.attempt += 1;
    }

    /// When it is late if the last byte of its link came at `heard`.
    pub(super) fn deadline(&self, heard: Instant) -> Instant {
        self.since.max(heard) + self.patience.min(Duration::from_hours(24 * 365))
    }

    pub(super) fn attempt(&self) -> u32 {
        self.attempt
    }

    pub(crate) fn landed(&self) -> u64 {
        self.landed
    }

    pub(super) fn landed_to(&self) -> Cursor {
        self.landed_to
    }

    /// Whether every byte has landed.
    pub(crate) fn is_whole(&self) -> bool {
        self.landed == self.wish.bytes
    }

    /// Whether the last part of this attempt was requested.
    pub(super) fn is_asked(&self) -> bool {
        self.asked_all
    }

    /// Bytes that were not requested yet.
    pub(super) fn unasked(&self) -> u64 {
        self.wish.bytes - self.asked
    }

    /// The next part: its spans and their bytes, at most `most`. A part of 0 bytes only asks which publication there is.
    pub(super) fn cut(&mut self, most: u64) -> (Vec<Span>, u64) {
        let (mut spans, mut bytes) = (Vec::new(), 0);
        while bytes < most
            && spans.len() < MAX_PART_SPANS
            && let Some(span) = self.wish.spans.get(self.asked_to.index)
        {
            let within = self.asked_to.within;
            let taken = (span.bytes - within).min(most - bytes);
            spans.push(Span { start: span.start + within, bytes: taken });
            self.asked_to.pass(taken, &self.wish.spans);
            bytes += taken;
        }
        self.asked += bytes;
        self.asked_all = self.asked == self.wish.bytes;
        (spans, bytes)
    }

    /// Counts bytes that have landed.
    pub(super) fn land(&mut self, bytes: u64) {
        self.landed += bytes;
        self.landed_to.pass(bytes, &self.wish.runs);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::peer::Role;

    pub(crate) const PEER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };

    pub(crate) fn pull(id: u64, landing: LandingId, runs: &[(u64, u64)]) -> Pull {
        let runs: Vec<_> = runs.iter().map(|&(start, bytes)| Span { start, bytes }).collect();
        let bytes = runs.iter().map(|it| it.bytes).fold(0, u64::saturating_add);
        let wish = Wish { peer: PEER, key: RegionKey::default(), spans: runs.clone(), runs, bytes };
        Pull::new(PullId(id), wish, (landing, 1), Duration::from_secs(10), Instant::now())
    }

    proptest! {
        #[test]
        fn parts_are_the_stream_in_order_from_wherever_it_goes_on(
            runs in prop::collection::vec((0..1_000_u64, 1..50_u64), 0..12),
            most in 1..70_u64,
            from in 0..600_u64,
        ) {
            let stream = |spans: &[Span]| -> Vec<u64> {
                spans.iter().flat_map(|it| it.start..it.start + it.bytes).collect()
            };
            let mut pull = pull(0, LandingId(0), &runs);
            let all = stream(&pull.wish.spans);
            let from = from.min(pull.wish.bytes);
            pull.resume(7, from);
            let mut said = Vec::new();
            while !pull.is_asked() {
                let (spans, bytes) = pull.cut(most);
                prop_assert_eq!(stream(&spans).len() as u64, bytes);
                prop_assert!(bytes == most || pull.is_asked());
                said.extend(stream(&spans));
                pull.land(bytes);
            }
            prop_assert_eq!(&said[..], &all[from as usize..]);
            prop_assert!(pull.is_whole());
            pull.restart();
            prop_assert_eq!((pull.landed(), pull.unasked()), (0, all.len() as u64));
            prop_assert_eq!(stream(&pull.cut(u64::MAX).0), all);
        }
    }
}
