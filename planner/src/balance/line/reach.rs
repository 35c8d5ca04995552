//! Slots take their rows of a line, some of which cannot reach the ranks of all rows.
//!
//! In: a line, and the bins in the order in which they take from it, each with its room. Out: what each takes.
//!
//! A bin that reaches all ranks takes what has room there. One that does not takes rows up to the first that it cannot pull, or
//! of whose keys it cannot pull one. Then it **waits**, and goes on taking where the line comes back into its reach; the next bin
//! takes the rows before that. So a pair of places that cannot reach each other changes the runs of its own slots and of their
//! neighbours, and no others. The next bin may take no more than these ([`Next::Stops`]) and go on behind who waited, which then
//! keeps the rows of its rank; or its whole run ([`Next::GoesOn`]), which then stays one piece.

use std::collections::VecDeque;

use super::super::bins::Bins;
use super::super::groups::Span;
use super::super::tails::ends;
use super::{Line, Taken};
use crate::{Mask, TILE_ROWS};

/// Maximum waiting bins that are asked each time that the line goes on.
const MAX_ASKED_A_TURN: usize = 8;

/// What the bin does whose turn comes while others wait.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Next {
    /// It takes all that has room.
    GoesOn,
    /// It takes the rows up to where one that waits can take some.
    Stops,
}

/// A line of which some rows are taken.
pub(super) struct Taking<'a, 'b> {
    line: &'a Line,
    bins: &'a Bins<'b>,
    /// The next span, and what is left of it if a bin took its head.
    next: usize,
    rest: Option<Span>,
    taken: Taken,
    waiting: VecDeque<Waiting>,
    next_bin: Next,
}

/// A bin that cannot take from where the line is, or has stopped for one that could not.
struct Waiting {
    bin: usize,
    room: u64,
}

/// Whether a bin that took what it can reach may take more elsewhere.
enum Then {
    Waits,
    IsFull,
}

impl<'a, 'b> Taking<'a, 'b> {
    pub(super) fn new(line: &'a Line, bins: &'a Bins<'b>, next_bin: Next) -> Self {
        Self {
            line,
            bins,
            next: 0,
            rest: None,
            taken: Taken::default(),
            waiting: VecDeque::new(),
            next_bin,
        }
    }

    /// A bin takes what has room.
    pub(super) fn turn(&mut self, bin: usize, room: u64) {
        let it = Waiting { bin, room };
        if !self.bins.reaches_all_ranks(bin) {
            self.waiting.push_front(it);
        } else if self.next_bin == Next::Stops && !self.waiting.is_empty() {
            self.up_to_who_waits(it);
        } else {
            self.whole_runs(bin, room);
        }
        self.ask(MAX_ASKED_A_TURN);
    }

    /// A bin takes rows up to the first that one of those which wait can take; it goes on behind that one.
    fn up_to_who_waits(&mut self, mut it: Waiting) {
        let span = self.rest.clone().or_else(|| self.line.spans.get(self.next).cloned());
        let asked = self.waiting.iter().take(MAX_ASKED_A_TURN);
        let end =
            span.as_ref().and_then(|span| asked.filter_map(|it| self.comes_back(it, span)).min());
        match (span, end) {
            (Some(span), Some(end)) => {
                let part = self.bins.head(&span.with_rows(span.rows.start..end), it.room);
                if part.rows.end == end {
                    it.room = it.room.saturating_sub(self.bins.cost(&part));
                    self.taken.1.push((it.bin, part));
                    self.rest = Some(span.with_rows(end..span.rows.end));
                    self.waiting.push_back(it);
                } else {
                    self.whole_runs(it.bin, it.room);
                }
            }
            _ => self.whole_runs(it.bin, it.room),
        }
    }

    /// The first tile of a span behind its first one that a bin can take.
    fn comes_back(&self, it: &Waiting, span: &Span) -> Option<u32> {
        let bins = self.bins;
        let left = match bins.problem.document(span.document).mask {
            Mask::Window { left } => left,
            Mask::Causal | Mask::Full => 0,
        };
        // Reach ends and begins at the edges of ranks, for keys a window later.
        let edges = |by: u32| {
            let pieces = bins.problem.layout.locate(span.document, span.rows.clone());
            let edges = pieces.map(move |it| it.rows.start.saturating_add(by));
            let tiles = edges.map(|row| row.div_ceil(TILE_ROWS).saturating_mul(TILE_ROWS));
            tiles.filter(|row| *row > span.rows.start && *row < span.rows.end)
        };
        let can_take = |row: &u32| {
            let end = span.rows.end.min(row + TILE_ROWS);
            bins.reaches(it.bin, &span.with_rows(*row..end))
        };
        // Both ascend, so the first that it can take of each will do.
        [0, left].into_iter().filter_map(|by| edges(by).find(can_take)).min()
    }

    /// All that was taken; none if some of the line is left.
    pub(super) fn finish(mut self) -> Option<Taken> {
        let mut left = (usize::MAX, 0);
        // Who waits may go on behind what another one took.
        while !self.is_done() && left != self.at() {
            left = self.at();
            self.ask(self.waiting.len());
        }
        self.is_done().then_some(self.taken)
    }

    pub(super) fn is_done(&self) -> bool {
        self.rest.is_none() && self.next == self.line.spans.len()
    }

    fn at(&self) -> (usize, u32) {
        (self.next, self.rest.as_ref().map_or(0, |it| it.rows.start))
    }

    fn ask(&mut self, most: usize) {
        for _ in 0..most.min(self.waiting.len()) {
            let Some(mut it) = self.waiting.pop_front() else {
                return;
            };
            if let Then::Waits = self.within_reach(&mut it) {
                self.waiting.push_back(it);
            }
        }
    }

    /// The bin takes rows up to the first that is out of its reach.
    fn within_reach(&mut self, it: &mut Waiting) -> Then {
        let bins = self.bins;
        while let Some(span) = self.rest.take().or_else(|| self.line.spans.get(self.next).cloned())
        {
            let [_, reached] = ends(&span, |part| bins.reaches(it.bin, part));
            let part = bins.head(&reached, it.room);
            let end = part.rows.end;
            if !part.rows.is_empty() {
                it.room = it.room.saturating_sub(bins.cost(&part));
                self.taken.1.push((it.bin, part));
            }
            if end == span.rows.end {
                self.next += 1;
                continue;
            }
            let begun = end > self.line.spans[self.next].rows.start;
            self.rest = begun.then(|| span.with_rows(end..span.rows.end));
            return if end == reached.rows.end { Then::Waits } else { Then::IsFull };
        }
        Then::IsFull
    }

    /// The bin takes as many whole spans as have room, and the head of the next.
    fn whole_runs(&mut self, bin: usize, mut room: u64) {
        let bins = self.bins;
        if let Some(span) = self.rest.take() {
            let cost = bins.cost(&span);
            if cost > room {
                self.rest = Some(self.head((bin, room), span));
                return;
            }
            room -= cost;
            self.taken.1.push((bin, span));
            self.next += 1;
        }
        let before = &self.line.before;
        let most = before[self.next] + room;
        let end = before.partition_point(|it| *it <= most) - 1;
        if end > self.next {
            self.taken.0.push((bin, self.next..end));
            room = most - before[end];
            self.next = end;
        }
        if let Some(span) = self.line.spans.get(self.next) {
            let rest = self.head((bin, room), span.clone());
            self.rest = (rest != *span).then_some(rest);
        }
    }

    /// Gives a bin the head of a span that has room there, and returns the rest.
    fn head(&mut self, (bin, room): (usize, u64), span: Span) -> Span {
        let head = self.bins.head(&span, room);
        if head.rows.is_empty() {
            return span;
        }
        let rest = span.with_rows(head.rows.end..span.rows.end);
        self.taken.1.push((bin, head));
        rest
    }
}
