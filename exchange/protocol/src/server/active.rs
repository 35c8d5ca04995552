//! A bundle that has room: which of its parcels are here, and how far its works are.
//!
//! In: what happened to a parcel or a work. Out: inputs that can be freed. What follows for the server is decided elsewhere
//! ([`super::work`]).
//!
//! Invariant: an input is freed when the last work that reads it runs no more, and no work is lost: each is waiting, ready, done or
//! freed.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Command;
use super::room::Room;
use crate::{At, Bundle, Parcel, Shape, TrainerId, Work};

pub(super) type Key = (At, Bundle);

/// A bundle that has room.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) shape: Arc<Shape>,
    pub(super) room: Room,
    pub(super) bytes: u64,
    /// In the order of the shape.
    pub(super) inputs: Vec<Input>,
    /// Of them, those that have not come.
    pub(super) absent: usize,
    /// In the order of the shape.
    pub(super) works: Vec<Unit>,
    /// Ready ahead of the bundle, on a copy of their rows.
    pub(super) ahead: BTreeSet<Work>,
    /// Bytes of the newest such copy.
    pub(super) copied: u64,
}

#[derive(Debug)]
pub(super) struct Input {
    pub(super) parcel: Parcel,
    pub(super) state: InputState,
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
pub(super) struct Unit {
    pub(super) work: Work,
    /// Parcels that are not here yet.
    pub(super) missing: usize,
    pub(super) state: UnitState,
}

#[derive(Debug, Eq, PartialEq)]
pub(super) enum UnitState {
    Waiting,
    Ready,
    /// Ran; these readers have not acknowledged.
    Done(BTreeSet<TrainerId>),
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
        let inputs = parts.parcels.iter().map(input).collect();
        let works = parts.works.iter().map(unit).collect();
        let (bytes, absent) = (parts.bytes, parts.parcels.len());
        let (ahead, copied) = (BTreeSet::new(), 0);
        Self { shape, room, bytes, inputs, absent, works, ahead, copied }
    }

    pub(super) fn input(&mut self, parcel: Parcel) -> &mut Input {
        let index = self.inputs.binary_search_by_key(&parcel, |it| it.parcel);
        &mut self.inputs[index.expect("a bundle is asked for its own parcels only")]
    }

    pub(super) fn unit(&mut self, work: Work) -> &mut Unit {
        let index = self.works.binary_search_by_key(&work, |it| it.work);
        &mut self.works[index.expect("a bundle is asked for its own work only")]
    }

    /// A work runs no more: its inputs lose a user, and those that have none are freed.
    pub(super) fn leave(&mut self, at: At, work: Work, out: &mut Vec<Command>) {
        let shape = Arc::clone(&self.shape);
        for &parcel in shape.work(work).needs {
            let input = self.input(parcel);
            input.users -= 1;
            if input.users == 0 && input.state == InputState::Here {
                input.state = InputState::Freed;
                out.push(Command::FreeInput { at, parcel });
            }
        }
    }

    pub(super) fn unfinished(&self) -> bool {
        self.works.iter().any(|it| matches!(it.state, UnitState::Waiting | UnitState::Ready))
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

    pub(super) fn owed_to(&self, trainer: TrainerId) -> bool {
        self.works
            .iter()
            .any(|it| matches!(&it.state, UnitState::Done(left) if left.contains(&trainer)))
    }

    pub(super) fn over(&self) -> bool {
        self.inputs.iter().all(|it| it.state == InputState::Freed)
            && self.works.iter().all(|it| it.state == UnitState::Freed)
    }
}
