//! Repairs a bent plan by many small moves, with prices on memory and on lateness.
//!
//! In: bins that hold all rows, within the limits of bundles; slots may hold too much and finish late. Out: bins where what is
//! too much, what is too late and what is pulled are together as little as so many moves could make them.
//!
//! Flow: a piece of a slot that is strained goes to another; half of the time another piece comes back. What that changes has
//! one price: bytes pulled, [`LATE`] times what is late, [`FULL`] times what is too much. A move stays if it makes the whole
//! cheaper, or dearer by less than a threshold that falls to nothing.
//!
//! What others rely on: numbers are drawn from a fixed seed, so the same bins end the same everywhere; the number of moves is
//! given.

use std::ops::Range;

use crate::balance::bins::Bins;
use crate::balance::even::{latest, levelling};
use crate::balance::groups::{Group, Span};
use crate::balance::pieces::held;
use crate::balance::prices::Prices;
use crate::{DocumentId, TILE_ROWS};

/// Price of a finish that is late by the level; 1 is the price of all bytes that the plan without limits pulls.
const LATE: f64 = 40.0;
/// Price of holding a whole phase beyond the memory, in the same unit.
const FULL: f64 = 100.0;
/// Share of a phase that the repair keeps free, so that the small excess that many moves leave still fits.
const MARGIN: f64 = 1.0 / 1024.0;
/// Bins among which one is picked.
const PICKED: usize = 6;

/// Bins among which one with keys of a document is sought.
const SOUGHT: usize = 256;

/// Pseudo-random numbers from a fixed seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % end.max(1) as u64) as usize
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

/// A span that went from one bin to another.
type Moved = (usize, usize, Span);

struct Repair<'a, 'b> {
    bins: &'b mut Bins<'a>,
    prices: Prices,
    draw: Draw,
    latest: u64,
    /// Bytes of a phase.
    phase: f64,
    /// Price of a byte.
    byte: f64,
}

/// Makes `moves` small moves. The first ones may make the plan dearer by up to `warm`, a share of
/// `pulled`: the bytes that a plan without limits pulls, in which prices are measured.
pub(in crate::balance) fn repair(bins: &mut Bins<'_>, pulled: i128, moves: usize, warm: f64) {
    let count = bins.all.len();
    let prices = Prices::of(bins);
    let phase = (0..count).map(|it| bins.free(it) + i128::from(bins.all[it].bytes)).max();
    let phase = phase.unwrap_or(1).max(1) as f64;
    let (latest, draw) = (latest(bins), Draw(0x9E37_79B9_7F4A_7C15));
    let mut repair = Repair { bins, prices, draw, latest, phase, byte: 1.0 / pulled.max(1) as f64 };
    if count > 1 {
        for step in 0..moves {
            let left = (moves - step) as f64 / moves as f64;
            repair.step(warm * left * left);
        }
    }
}

impl Repair<'_, '_> {
    /// What a bin's lateness and memory cost.
    fn strain(&self, bin: usize) -> f64 {
        let it = &self.bins.all[bin];
        let late = if it.is_empty() { 0 } else { it.finish().saturating_sub(self.latest) };
        let full = (MARGIN * self.phase - self.bins.free(bin) as f64).max(0.0);
        LATE * late as f64 / self.bins.level.max(1) as f64 + FULL * full / self.phase
    }

    /// Room of a bin for work and memory, the scarcer.
    fn slack(&self, bin: usize) -> f64 {
        let it = &self.bins.all[bin];
        let work = self.latest as f64 - it.finish() as f64;
        (work / self.bins.level.max(1) as f64).min(self.bins.free(bin) as f64 / self.phase)
    }

    fn step(&mut self, threshold: f64) {
        let count = self.bins.all.len();
        let mut donor = self.draw.below(count);
        if !self.draw.one_in(3) {
            for _ in 0..PICKED {
                let other = self.draw.below(count);
                if self.slack(other) < self.slack(donor) {
                    donor = other;
                }
            }
        }
        let Some(span) = self.span_of(donor) else {
            return;
        };
        let Some(receiver) = self.receiver(donor, &span) else {
            return;
        };
        let piece = self.part(donor, receiver, span);
        if piece.rows.is_empty() || !self.bins.reaches(receiver, &piece) {
            return;
        }
        let before = self.strain(donor) + self.strain(receiver);
        let mut bytes = 0;
        let mut moved = Vec::with_capacity(2);
        let mut is_allowed = self.go(donor, receiver, piece, &mut bytes, &mut moved);
        if is_allowed
            && (self.slack(receiver) < 0.0 || self.draw.one_in(4))
            && let Some(back) = self.span_of(receiver)
            && back.document != moved[0].2.document
        {
            let back = self.part(receiver, donor, back);
            if !back.rows.is_empty() && self.bins.reaches(donor, &back) {
                is_allowed = self.go(receiver, donor, back, &mut bytes, &mut moved);
            }
        }
        let after = self.strain(donor) + self.strain(receiver);
        if is_allowed && after - before + bytes as f64 * self.byte <= threshold {
            return;
        }
        for (from, to, span) in moved.into_iter().rev() {
            self.bins.take(to, &span);
            self.bins.put(from, &span);
        }
    }

    /// Moves a span; `false` if a bundle gets too large.
    fn go(
        &mut self,
        from: usize,
        to: usize,
        span: Span,
        bytes: &mut i128,
        moved: &mut Vec<Moved>,
    ) -> bool {
        let bins = &mut *self.bins;
        *bytes += self.prices.of_move(bins, &bins.all[from], &bins.all[to], &span);
        bins.take(from, &span);
        bins.put(to, &span);
        let groups = bins.groups_of(&bins.all[to], span.document);
        let mut touched = groups.iter().filter(|it| meet(&it.heads, &span.heads));
        let fits = touched.all(|it| bins.fits_bundle(span.document, it));
        moved.push((from, to, span));
        fits
    }

    /// A run of rows that a bin holds, of any document or of the dearest of a few.
    fn span_of(&mut self, bin: usize) -> Option<Span> {
        let documents = self.bins.problem.layout.documents().len();
        let tries = if self.draw.one_in(2) { 1 } else { 4 };
        let mut best: Option<(u64, Span)> = None;
        for _ in 0..tries {
            let at = DocumentId(self.draw.below(documents) as u32);
            let (document, groups) = self.bins.all[bin].from(at)?;
            let Group { heads, rows } = &groups[self.draw.below(groups.len())];
            let rows = rows[self.draw.below(rows.len())].clone();
            let span = Span { document, heads: heads.clone(), rows };
            let cost = self.bins.cost(&span);
            if best.as_ref().is_none_or(|it| it.0 < cost) {
                best = Some((cost, span));
            }
        }
        let (_, mut span) = best?;
        if self.bins.problem.heads_may_part() && span.heads.len() > 1 && !self.draw.one_in(3) {
            let count = 1 + self.draw.below(span.heads.len()) as u16;
            span.heads.start = span.heads.end - count;
        }
        Some(span)
    }

    /// The bin that gets the span: its home, a bin that holds keys of its document, or one with
    /// room.
    fn receiver(&mut self, donor: usize, span: &Span) -> Option<usize> {
        let count = self.bins.all.len();
        let way = self.draw.below(4);
        let first = self.draw.below(count);
        let mut found = None;
        if way < 2 {
            let mut all = (first..count).chain(0..first).take(SOUGHT).filter(|it| *it != donor);
            found = if way == 0 {
                all.find(|it| self.bins.is_home(*it, span))
            } else {
                all.find(|it| self.bins.all[*it].has(span.document))
            };
        }
        let mut best = first;
        for _ in 0..PICKED {
            let other = self.draw.below(count);
            if best == donor || (other != donor && self.slack(other) > self.slack(best)) {
                best = other;
            }
        }
        found.or((best != donor).then_some(best))
    }

    /// All of a span, or as much of an end as makes both alike, or some tiles.
    fn part(&mut self, donor: usize, receiver: usize, span: Span) -> Span {
        let (from, to) = (&self.bins.all[donor], &self.bins.all[receiver]);
        let tiles = span.rows.end.div_ceil(TILE_ROWS) - span.rows.start / TILE_ROWS;
        match self.draw.below(4) {
            0 => span,
            1 => {
                let wanted = levelling(from, to);
                let tail = self.bins.tail(&span, wanted);
                let head = self.bins.head(&span, wanted);
                if self.draw.one_in(2) { tail } else { head }
            }
            2 => {
                let end = held(self.bins, to, &span).clamp(span.rows.start, span.rows.end);
                let end = end / TILE_ROWS * TILE_ROWS;
                let span = span.with_rows(span.rows.start..end.max(span.rows.start));
                self.end_of(span, tiles)
            }
            _ => self.end_of(span, tiles),
        }
    }

    /// Some tiles at an end of a span, seldom many.
    fn end_of(&mut self, span: Span, tiles: u32) -> Span {
        let Range { start, end } = span.rows;
        if start >= end {
            return span;
        }
        let most = 1 + self.draw.below(tiles as usize);
        let some = (1 + self.draw.below(most)) as u32;
        let rows = if self.draw.one_in(2) {
            let first = (end.div_ceil(TILE_ROWS).saturating_sub(some)) * TILE_ROWS;
            first.max(start)..end
        } else {
            start..((start / TILE_ROWS + some) * TILE_ROWS).min(end)
        };
        span.with_rows(rows)
    }
}

fn meet(a: &Range<u16>, b: &Range<u16>) -> bool {
    a.start < b.end && b.start < a.end
}
