//! A bundle that has room: which of its parcels are here, and how far its works are.
//!
//! In: what happened to a parcel or a work. Out: inputs that can be freed. What follows for the server is decided elsewhere
//! ([`super::work`]).
//!
//! Invariant: an input is freed when the last work that reads it runs no more, and no work is lost: each is waiting, ready, done or
//! freed. States change in [`Active::set_input`] and [`Active::set_unit`] alone, which count them: nobody walks over a bundle to
//! learn whether it is over.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Command;
use super::listed::Listed;
use super::room::Room;
use crate::{At, Bundle, Parcel, Shape, TrainerId, Work};

pub(super) type Key = (At, Bundle);

/// A bundle that has room.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) shape: Arc<Shape>,
    pub(super) room: Room,
    pub(super) bytes: u64,
    /// Bytes of all rows.
    pub(super) rows: u64,
    inputs: Listed<Input>,
    /// Of them, those that have not come.
    pub(super) absent: usize,
    works: Listed<Unit>,
    /// Of them, those that have not run and are not cancelled.
    unrun: usize,
    /// Inputs and works that are not freed.
    unfreed: usize,
    /// Works that wait for no row and are not ready, and the parcels that they read with their bytes.
    pub(super) runnable: BTreeSet<Work>,
    reads: BTreeSet<Parcel>,
    pub(super) read_bytes: u64,
    /// Ready ahead of the bundle, on a copy of their rows.
    pub(super) ahead: BTreeSet<Work>,
    /// Bytes of the newest such copy.
    pub(super) copied: u64,
}

#[derive(Debug)]
struct Input {
    parcel: Parcel,
    state: InputState,
    /// Work that has not run and is not cancelled.
    users: usize,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum InputState {
    Absent,
    Pulling,
    Here,
    Freed,
}

#[derive(Debug)]
struct Unit {
    work: Work,
    /// Parcels that are not here yet.
    missing: usize,
    state: UnitState,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum UnitState {
    Waiting,
    Ready,
    /// Ran; so many readers have not acknowledged.
    Done(usize),
    Freed,
}

impl Active {
    pub(super) fn new(shape: Arc<Shape>, bundle: Bundle, room: Room) -> Self {
        let parts = shape.parts(bundle);
        let input = |&parcel| {
            let users = shape.users(parcel).len();
            Input { parcel, state: InputState::Absent, users }
        };
        let unit =
            |&work| Unit { work, missing: shape.work(work).needs.len(), state: UnitState::Waiting };
        let needs_nothing = |it: &&Work| shape.work(**it).needs.is_empty();
        let (bytes, absent, unrun) = (parts.bytes, parts.parcels.len(), parts.works.len());
        Self {
            room,
            bytes,
            rows: parts.parcels.iter().map(|it| shape.parcel(*it).bytes).sum(),
            inputs: parts.parcels.iter().map(input).collect(),
            absent,
            works: parts.works.iter().map(unit).collect(),
            unrun,
            unfreed: absent + unrun,
            runnable: parts.works.iter().filter(needs_nothing).copied().collect(),
            reads: BTreeSet::new(),
            read_bytes: 0,
            ahead: BTreeSet::new(),
            copied: 0,
            shape,
        }
    }

    fn input(&mut self, parcel: Parcel) -> &mut Input {
        let input = self.inputs.find(&parcel, |it| it.parcel);
        input.expect("a bundle is asked for its own parcels only")
    }

    fn unit(&mut self, work: Work) -> &mut Unit {
        self.works.find(&work, |it| it.work).expect("a bundle is asked for its own work only")
    }

    pub(super) fn input_state(&mut self, parcel: Parcel) -> InputState {
        self.input(parcel).state
    }

    pub(super) fn unit_state(&mut self, work: Work) -> UnitState {
        self.unit(work).state
    }

    /// Nothing that is freed changes any more.
    pub(super) fn set_input(&mut self, parcel: Parcel, state: InputState) {
        self.input(parcel).state = state;
        self.unfreed -= usize::from(state == InputState::Freed);
    }

    /// Nothing that is freed changes any more.
    pub(super) fn set_unit(&mut self, work: Work, state: UnitState) {
        let runs = |it| matches!(it, UnitState::Waiting | UnitState::Ready);
        let before = std::mem::replace(&mut self.unit(work).state, state);
        self.unrun -= usize::from(runs(before) && !runs(state));
        self.unfreed -= usize::from(state == UnitState::Freed);
        if before == UnitState::Waiting {
            self.runnable.remove(&work);
        }
    }

    /// A parcel is here: works that waited for it alone wait for no row now.
    pub(super) fn comes(&mut self, parcel: Parcel) {
        self.set_input(parcel, InputState::Here);
        self.absent -= 1;
        let shape = Arc::clone(&self.shape);
        for &work in shape.users(parcel) {
            let unit = self.unit(work);
            unit.missing -= 1;
            if unit.missing > 0 || unit.state != UnitState::Waiting {
                continue;
            }
            self.runnable.insert(work);
            for &need in shape.work(work).needs {
                let is_new = self.reads.insert(need);
                self.read_bytes += if is_new { shape.parcel(need).bytes } else { 0 };
            }
        }
    }

    /// Works that wait for no row are ready now.
    pub(super) fn take_runnable(&mut self) -> Vec<Work> {
        self.reads.clear();
        self.read_bytes = 0;
        let works: Vec<_> = std::mem::take(&mut self.runnable).into_iter().collect();
        for &work in &works {
            self.set_unit(work, UnitState::Ready);
        }
        works
    }

    /// A work runs no more: its inputs lose a user, and those that have none are freed.
    pub(super) fn leave(&mut self, at: At, work: Work, out: &mut Vec<Command>) {
        let shape = Arc::clone(&self.shape);
        for &parcel in shape.work(work).needs {
            let input = self.input(parcel);
            input.users -= 1;
            if input.users == 0 && input.state == InputState::Here {
                self.set_input(parcel, InputState::Freed);
                out.push(Command::FreeInput { at, parcel });
            }
        }
    }

    pub(super) fn unfinished(&self) -> bool {
        self.unrun > 0
    }

    /// Whose rows a parcel is.
    pub(super) fn source(&self, parcel: Parcel) -> TrainerId {
        self.shape.parcel(parcel).from
    }

    /// Trainers whose rows are not here yet.
    pub(super) fn lacks(&self) -> impl Iterator<Item = TrainerId> {
        let absent = |it: &&Input| matches!(it.state, InputState::Absent | InputState::Pulling);
        self.inputs.iter().filter(absent).map(|it| self.source(it.parcel))
    }

    pub(super) fn over(&self) -> bool {
        self.unfreed == 0
    }
}
