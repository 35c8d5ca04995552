//! What is still to happen, in its order: by moment, then as it was said.
//!
//! In: happenings with their moments. Out: the next one. Turns of processes are all of the moment in which they are asked for, and
//! most deadlines of pulls are taken back before they are due: both lie apart, where they cost less.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use cadre_exchange::PullId;

use super::{Happening, Life, Signal};

/// A moment, and a number that tells apart what happens in it.
pub(super) type Moment = (u64, u64);

/// See the module.
#[derive(Default)]
pub(super) struct Queue {
    /// And where it lies in `what`.
    order: BinaryHeap<Reverse<(Moment, usize)>>,
    what: Vec<Option<Happening>>,
    free: Vec<usize>,
    turns: VecDeque<(Moment, Life)>,
    deadlines: BTreeMap<Moment, (Life, PullId)>,
    sequence: u64,
}

impl Queue {
    fn next(&mut self, when: u64) -> Moment {
        self.sequence += 1;
        (when, self.sequence)
    }

    pub(super) fn at(&mut self, when: u64, what: Happening) {
        let moment = self.next(when);
        let place = self.free.pop().unwrap_or_else(|| {
            self.what.push(None);
            self.what.len() - 1
        });
        self.what[place] = Some(what);
        self.order.push(Reverse((moment, place)));
    }

    /// A process has something to look at. `now` never goes back.
    pub(super) fn turn(&mut self, now: u64, life: Life) {
        let moment = self.next(now);
        self.turns.push_back((moment, life));
    }

    /// A pull ends at the latest then; whoever ends it sooner takes this back.
    pub(super) fn deadline(&mut self, when: u64, life: Life, id: PullId) -> Moment {
        let moment = self.next(when);
        self.deadlines.insert(moment, (life, id));
        moment
    }

    pub(super) fn take_back(&mut self, deadline: Moment) {
        self.deadlines.remove(&deadline);
    }

    pub(super) fn pop(&mut self) -> Option<(u64, Happening)> {
        let turn = self.turns.front().map(|it| it.0);
        let other = self.order.peek().map(|it| it.0.0);
        let deadline = self.deadlines.first_key_value().map(|it| *it.0);
        let first = [turn, other, deadline].into_iter().flatten().min()?;
        let what = if turn == Some(first) {
            Happening::Turn(self.turns.pop_front()?.1)
        } else if other == Some(first) {
            let Reverse((_, place)) = self.order.pop()?;
            self.free.push(place);
            self.what[place].take()?
        } else {
            let (_, (life, id)) = self.deadlines.pop_first()?;
            Happening::Signal(Signal::Late(life, id))
        };
        Some((first.0, what))
    }
}
