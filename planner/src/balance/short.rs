//! Takes documents in bulk from slots that hold far too much in short ones.
//!
//! In: bins after the matching. Out: rows taken from them, which [`super::fill`] then deals to whoever has capacity left.
//! A matching sends few pieces along an edge, and the last step moves one piece at a time: neither gets rid of hundreds of
//! short documents. The longest go, which bring the fewest bytes for their cost.
//!
//! It leaves alone what few moves can do, and never takes a bin below its capacity.

use super::bins::{Bins, LONGEST};
use super::even::latest;
use super::groups::Span;

/// Bins that finish late and whose longest documents together cost less than what they have too much.
pub(super) fn overfull(bins: &Bins<'_>) -> Vec<usize> {
    let is_overfull = |bin: &usize| {
        bins.all[*bin].finish() > latest(bins) && {
            let longest = bins.spans(*bin, LONGEST);
            longest.iter().map(|it| bins.cost(it)).sum::<u64>() < surplus(bins, *bin)
        }
    };
    (0..bins.all.len()).filter(is_overfull).collect()
}

/// Takes from such bins all that fits into what they have too much, the longest documents first.
pub(super) fn take(bins: &mut Bins<'_>, overfull: &[usize]) -> Vec<Span> {
    let mut taken = Vec::new();
    for &bin in overfull {
        for span in bins.spans(bin, usize::MAX) {
            let surplus = surplus(bins, bin);
            if surplus == 0 {
                break;
            }
            if bins.cost(&span) <= surplus {
                bins.take(bin, &span);
                taken.push(span);
            }
        }
    }
    bins.forget_what_left();
    taken
}

fn surplus(bins: &Bins<'_>, bin: usize) -> u64 {
    bins.all[bin].left().min(0).unsigned_abs()
}
