//! Memory that pulls land in, and which of its bytes are reserved.
//!
//! In: pulls that begin and end. Out: the places that they write to, and what earlier pulls have left there.
//!
//! ```text
//! free ──claim──▶ written by a pull ──Gone, refused──▶ free
//!                    ▲         └──ended otherwise──▶ kept ──a pull of other bytes──▶ free
//!                    └── the same pull again: goes on ┘
//! ```
//!
//! A pull that was interrupted leaves a prefix of its bytes. Once its link is closed, a whole pull leaves all of them. If the pull is
//! asked for again and the peer still publishes the same, what is left here does not come twice.
//!
//! Invariant: a byte is the target of one pull at a time.

use std::collections::BTreeMap;
use std::io::IoSliceMut;

use super::frame::Span;
use super::pull::{Cursor, Pull, Wish};
use crate::buffer::Buffer;
use crate::provider::PullId;

/// See the module.
pub(super) struct Landing {
    memory: Buffer,
    /// Reserved bytes: first, one behind the last, and for which pull.
    taken: BTreeMap<u64, (u64, PullId)>,
    kept: BTreeMap<PullId, Kept>,
    outstanding: usize,
    pub(super) discarded: bool,
}

/// What a pull that ended has left.
struct Kept {
    wish: Wish,
    publication: u64,
    landed: u64,
    link: u64,
}

impl Kept {
    /// Whether `pull` can resume here. A pull that had all its bytes over the same link starts
    /// again.
    fn is_for(&self, pull: &Pull) -> bool {
        self.wish == pull.wish && (self.landed < self.wish.bytes || self.link != pull.link)
    }
}

impl Landing {
    pub(super) fn new(memory: Buffer) -> Self {
        let (taken, kept) = (BTreeMap::new(), BTreeMap::new());
        Self { memory, taken, kept, outstanding: 0, discarded: false }
    }

    /// Pulls that have not ended.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    pub(super) fn memory(&self) -> &Buffer {
        &self.memory
    }

    pub(super) fn into_memory(self) -> Buffer {
        self.memory
    }

    /// Reserves the bytes of a pull, and lets it resume where the same pull stopped. The error is
    /// why it may not begin.
    pub(super) fn claim(&mut self, pull: &mut Pull) -> Result<(), String> {
        let room = self.memory.len_bytes() as u64;
        let mut found = None;
        for (index, run) in pull.wish.runs.iter().enumerate() {
            let reason = match run.end().filter(|&end| end <= room) {
                None => format!("a piece ends behind the landing of {room} bytes"),
                Some(end) => match self.make_way(*run, end) {
                    Ok(kept) => {
                        found = kept.or(found);
                        self.taken.insert(run.start, (end, pull.id));
                        continue;
                    }
                    Err(()) => {
                        format!("byte {} of the landing is the target of a pull already", run.start)
                    }
                },
            };
            for run in &pull.wish.runs[..index] {
                self.taken.remove(&run.start);
            }
            return Err(reason);
        }
        if let Some(kept) = found.filter(|it| it.is_for(pull)) {
            pull.resume(kept.publication, kept.landed);
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Forgets what earlier pulls have left in a run: the last of them, or an error where one is outstanding.
    fn make_way(&mut self, run: Span, end: u64) -> Result<Option<Kept>, ()> {
        let mut last = None;
        while let Some((_, &(other, holder))) = self.taken.range(..end).next_back()
            && other > run.start
        {
            let kept = self.kept.remove(&holder).ok_or(())?;
            for run in &kept.wish.runs {
                self.taken.remove(&run.start);
            }
            last = Some(kept);
        }
        Ok(last)
    }

    /// A pull has ended: its bytes are free, but kept for the same pull until another one wants them.
    pub(super) fn release(&mut self, pull: Pull, keep: bool) {
        self.outstanding -= 1;
        let (landed, link) = (pull.landed(), pull.link);
        let Pull { id, wish, publication, .. } = pull;
        match publication.filter(|_| keep && landed > 0) {
            Some(publication) => {
                self.kept.insert(id, Kept { wish, publication, landed, link });
            }
            None => {
                for run in &wish.runs {
                    self.taken.remove(&run.start);
                }
            }
        }
    }

    /// Where a stream goes on that is at `from`, for at most `left` bytes: as many slices, in stream order, as lie one behind
    /// the other, and their length.
    pub(super) fn slices(
        &mut self,
        runs: &[Span],
        from: Cursor,
        left: u64,
    ) -> (Vec<IoSliceMut<'_>>, u64) {
        const MOST: usize = 512;
        let runs = &runs[from.index..];
        let mut rest = self.memory.bytes_mut();
        let mut slices = Vec::with_capacity(runs.len().min(MOST) + 1);
        let (mut at, mut total) = (0, 0);
        for (index, run) in runs.iter().take(MOST).enumerate() {
            let skip = if index == 0 { from.within } else { 0 };
            let (start, bytes) = (run.start + skip, (run.bytes - skip).min(left - total));
            if start < at || bytes == 0 {
                break;
            }
            let (slice, tail) = rest[(start - at) as usize..].split_at_mut(bytes as usize);
            slices.push(IoSliceMut::new(slice));
            (rest, at, total) = (tail, start + bytes, total + bytes);
        }
        (slices, total)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pull::tests::pull;
    use super::*;
    use crate::provider::LandingId;

    fn claim(landing: &mut Landing, id: u64, runs: &[(u64, u64)]) -> Option<Pull> {
        let mut pull = pull(id, LandingId(0), runs);
        landing.claim(&mut pull).ok().map(|()| pull)
    }

    #[test]
    fn a_byte_is_the_target_of_one_pull_at_a_time() {
        let mut landing = Landing::new(Buffer::zeroed(100));
        let first = claim(&mut landing, 1, &[(10, 10), (50, 10)]).expect("all free");
        for runs in
            [&[(19, 1)][..], &[(0, 11)], &[(0, 100)], &[(20, 5), (55, 1)], &[(30, 5), (32, 1)]]
        {
            assert!(claim(&mut landing, 2, runs).is_none(), "{runs:?}");
        }
        let second = claim(&mut landing, 3, &[(20, 30), (0, 10), (60, 40)]).expect("free");
        landing.release(first, true);
        landing.release(second, false);
        assert!(claim(&mut landing, 4, &[(0, 100)]).is_some());
    }

    #[test]
    fn pieces_outside_of_the_landing_are_refused() {
        let mut landing = Landing::new(Buffer::zeroed(8));
        for run in [(0, 9), (8, 1), (u64::MAX, 2), (2, u64::MAX)] {
            assert!(claim(&mut landing, 1, &[run]).is_none(), "{run:?}");
        }
        assert_eq!(landing.outstanding(), 0);
    }

    /// A pull of `runs` of which `landed` bytes of publication 7 came before it ended, over link 1.
    fn interrupted(landing: &mut Landing, id: u64, runs: &[(u64, u64)], landed: u64) {
        let mut pull = claim(landing, id, runs).expect("free");
        pull.publication = Some(7);
        pull.land(landed);
        landing.release(pull, true);
    }

    #[test]
    fn the_same_pull_goes_on_where_it_stopped_and_no_other() {
        let runs = [(50, 10), (0, 10)];
        let mut landing = Landing::new(Buffer::zeroed(100));
        interrupted(&mut landing, 1, &runs, 13);
        let pull = claim(&mut landing, 2, &runs).expect("free");
        assert_eq!((pull.landed(), pull.publication), (13, Some(7)));
        assert_eq!(pull.landed_to(), Cursor { index: 1, within: 3 });
        landing.release(pull, true);
        // One that writes a single byte of it makes the rest worthless.
        let other = claim(&mut landing, 3, &[(59, 1)]).expect("free");
        landing.release(other, true);
        let pull = claim(&mut landing, 4, &runs).expect("free");
        assert_eq!((pull.landed(), pull.publication), (0, None));
    }

    #[test]
    fn a_whole_pull_is_asked_for_anew_unless_its_link_was_another() {
        let mut landing = Landing::new(Buffer::zeroed(100));
        interrupted(&mut landing, 1, &[(0, 10)], 10);
        let same = claim(&mut landing, 2, &[(0, 10)]).expect("free");
        assert_eq!(same.landed(), 0);
        landing.release(same, false);
        interrupted(&mut landing, 3, &[(0, 10)], 10);
        let mut next = pull(4, LandingId(0), &[(0, 10)]);
        next.link = 2;
        landing.claim(&mut next).expect("free");
        assert!(next.is_whole() && !next.is_asked(), "its publication is asked for");
    }

    #[test]
    fn slices_follow_the_stream_as_far_as_it_ascends_and_the_part_goes() {
        let mut landing = Landing::new(Buffer::zeroed(100));
        let runs = [(10, 10), (30, 5), (0, 4)].map(|(start, bytes)| Span { start, bytes });
        let mut check = |from: Cursor, left, expected: (Vec<usize>, u64)| {
            let (slices, total) = landing.slices(&runs, from, left);
            assert_eq!((slices.iter().map(|it| it.len()).collect(), total), expected);
        };
        check(Cursor { index: 0, within: 3 }, 100, (vec![7, 5], 12));
        check(Cursor { index: 0, within: 3 }, 9, (vec![7, 2], 9));
        check(Cursor { index: 2, within: 0 }, 100, (vec![4], 4));
    }
}
