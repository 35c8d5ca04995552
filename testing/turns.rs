//! Turns of a step, drawn for tests: any order of forward and backward turns, some that go forward alone, some that leave layers out.
//!
//! In: numbers of layers and nano-batches, a source of numbers. Out: a list that [`Turns::new`] takes.

use cadre_step::phases::Direction;
use cadre_step::turns::{Turn, Turns, Which};

/// Turns of `nanos` nano-batches through `layers` layers; `below` draws a number below its argument, which is not 0.
pub(crate) fn drawn(layers: u16, nanos: u16, below: &mut dyn FnMut(u64) -> u64) -> Turns {
    let every: Vec<u16> = (0..layers).collect();
    let mut waiting: Vec<u16> = (0..nanos).collect();
    // Nano-batches of a forward turn that may go backward, and its layers.
    let mut forward: Vec<(Vec<u16>, Vec<u16>)> = Vec::new();
    let mut turns = Vec::new();
    while !waiting.is_empty() || !forward.is_empty() {
        let goes_forward = forward.is_empty() || !waiting.is_empty() && below(2) == 0;
        let (direction, some, layers) = if goes_forward {
            let some = part(&mut waiting, below);
            let layers =
                if below(4) == 0 { part(&mut every.clone(), below) } else { every.clone() };
            // Others, of which nothing is learnt, go forward alone.
            if below(5) > 0 {
                forward.push((some.clone(), layers.clone()));
            }
            (Direction::Forward, some, layers)
        } else {
            let at = below(forward.len() as u64) as usize;
            let (mut these, layers) = forward.swap_remove(at);
            let some = part(&mut these, below);
            if !these.is_empty() {
                forward.push((these, layers.clone()));
            }
            // Others are frozen.
            let layers = if below(3) == 0 { part(&mut layers.clone(), below) } else { layers };
            (Direction::Backward, some, layers)
        };
        let layers = sorted(layers);
        let layers = if layers == every { Which::All } else { Which::Only(layers) };
        turns.push(Turn { direction, nanos: some, layers });
    }
    Turns::new(turns).expect("turns are drawn as they may be")
}

/// Takes some of a list, at least one, in any order.
fn part(from: &mut Vec<u16>, below: &mut dyn FnMut(u64) -> u64) -> Vec<u16> {
    let count = 1 + below(from.len() as u64);
    (0..count).map(|_| from.swap_remove(below(from.len() as u64) as usize)).collect()
}

fn sorted(mut layers: Vec<u16>) -> Vec<u16> {
    layers.sort_unstable();
    layers
}
