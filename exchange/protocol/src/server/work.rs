//! Bundles that have room: their pulls, their work, their results.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeInclusive};
use std::sync::Arc;

use super::active::{Active, InputState, Key, UnitState};
use super::room::Room;
use super::{Command, Server};
use crate::{
    At, Bundle, Message, Nanos, Parcel, Peer, PullFailure, PullId, PullResult, TrainerId, Work,
};

impl Server {
    pub(super) fn activate(&mut self, now: Nanos, key: Key, room: Room, out: &mut Vec<Command>) {
        let shape = Arc::clone(self.steps[&key.0.step].step.shape(key.0.phase));
        self.active.insert(key, Active::new(Arc::clone(&shape), key.1, room));
        for &parcel in shape.parts(key.1).parcels {
            self.pull_parcel(now, key, parcel, out);
        }
        self.make_ready(key, out);
    }

    /// Pulls everything that the rows of `from` allow.
    pub(super) fn pull_rows(
        &mut self,
        now: Nanos,
        at: At,
        from: TrainerId,
        out: &mut Vec<Command>,
    ) {
        let shape = Arc::clone(self.steps[&at.step].step.shape(at.phase));
        for &parcel in shape.sends(from) {
            self.pull_parcel(now, (at, shape.parcel(parcel).bundle), parcel, out);
        }
    }

    /// Pulls a parcel, if it is absent and readable.
    pub(super) fn pull_parcel(
        &mut self,
        now: Nanos,
        key: Key,
        parcel: Parcel,
        out: &mut Vec<Command>,
    ) {
        let at = key.0;
        let Some(active) = self.active.get_mut(&key) else { return };
        let peer = active.shape.parcel(parcel).from;
        let absent = active.input_state(parcel) == InputState::Absent;
        if !absent || !self.rung.contains(&(at, peer)) {
            return;
        }
        if self.slices[0] == 0 {
            self.retries.insert((now, at, key.1, parcel));
            return;
        }
        self.slices[0] -= 1;
        active.set_input(parcel, InputState::Pulling);
        let pull = PullId(self.next_pull);
        self.next_pull += 1;
        self.pulls.insert(pull, (at, key.1, parcel));
        let span = self.settings.pull_span(self.host.peer(), Peer::Trainer(peer));
        let deadline = now.after(span);
        out.push(Command::Pull { pull, peer, at, parcel, deadline });
    }

    pub(super) fn pulled(
        &mut self,
        now: Nanos,
        (pull, result): (PullId, PullResult),
        out: &mut Vec<Command>,
    ) {
        let Some((at, bundle, parcel)) = self.pulls.remove(&pull) else { return };
        let key = (at, bundle);
        self.tried(now, key, parcel, result);
        let passed = self.passed(at);
        let refused = passed && self.settings.rules.pull_checks_watermark;
        let active = self.active.get_mut(&key).expect("a bundle outlives its pulls");
        let from = active.source(parcel);
        let same = |found| found == 0 || !self.settings.rules.pull_checks_incarnation;
        match result {
            Ok(found) if !refused && same(found) => {
                out.push(Command::Accept { pull, at, parcel });
                active.comes(parcel);
                self.make_ready(key, out);
            }
            Ok(_) | Err(_) => {
                out.push(Command::Discard { pull });
                if passed {
                    active.set_input(parcel, InputState::Freed);
                    self.settle(key, out);
                    return;
                }
                active.set_input(parcel, InputState::Absent);
                let again = now.after(self.settings.retry_after);
                self.retries.insert((again, at, bundle, parcel));
                if result == Err(PullFailure::Deadline) {
                    out.push(Command::Close(Peer::Trainer(from)));
                }
            }
        }
    }

    pub(super) fn ran(&mut self, at: At, works: &[Work], out: &mut Vec<Command>) {
        let passed = self.passed(at);
        let mut news: BTreeMap<TrainerId, Vec<Work>> = BTreeMap::new();
        for &work in works {
            let Some(live) = self.steps.get(&at.step) else { continue };
            let key = (at, live.step.shape(at.phase).work(work).bundle);
            let Some(active) = self.active.get_mut(&key) else { continue };
            active.leave(at, work, out);
            let readers = active.shape.work(work).results.iter().map(|it| it.0);
            let has = |it: &TrainerId| self.through.get(it).is_some_and(|it| *it >= at);
            let left: Vec<_> = readers.filter(|it| !passed && !has(it)).collect();
            for &reader in &left {
                news.entry(reader).or_default().push(work);
                self.owed.owe(reader, at, work);
            }
            let ready = active.unit_state(work) == UnitState::Ready;
            assert!(ready, "only work made ready runs, and once");
            if left.is_empty() {
                active.set_unit(work, UnitState::Freed);
                out.push(Command::FreeResult { at, work });
            } else {
                active.set_unit(work, UnitState::Done(left.len()));
            }
            self.ready -= 1;
            self.ran_ahead(key, work);
            self.settle(key, out);
        }
        // Who gets on with a phase is not late, however long all of it takes.
        self.owing = self.owing.filter(|it| it.0 != at);
        for (trainer, works) in news {
            let message = Message::Finished { at, works };
            out.push(Command::Send { to: Peer::Trainer(trainer), message });
        }
    }

    /// `from` has the results of a work that it was owed.
    pub(super) fn acked_work(
        &mut self,
        from: TrainerId,
        at: At,
        work: Work,
        out: &mut Vec<Command>,
    ) {
        if !self.owed.settle(from, at, work) {
            return;
        }
        let key = (at, self.steps[&at.step].step.shape(at.phase).work(work).bundle);
        let active = self.active.get_mut(&key).expect("a bundle outlives its results");
        let UnitState::Done(left) = active.unit_state(work) else { return };
        if left > 1 {
            return active.set_unit(work, UnitState::Done(left - 1));
        }
        active.set_unit(work, UnitState::Freed);
        out.push(Command::FreeResult { at, work });
        self.settle(key, out);
    }

    /// Tells a trainer of every result that it has not acknowledged.
    pub(super) fn announce_to(
        &self,
        trainer: TrainerId,
        phases: RangeInclusive<At>,
        out: &mut Vec<Command>,
    ) {
        let mut news: BTreeMap<At, Vec<Work>> = BTreeMap::new();
        for (at, work) in self.owed.to(trainer, phases) {
            news.entry(at).or_default().push(work);
        }
        for (at, works) in news {
            let message = Message::Finished { at, works };
            out.push(Command::Send { to: Peer::Trainer(trainer), message });
        }
    }

    /// The watermark has reached `at`: nothing up to it is pulled or run any more.
    pub(super) fn advance(&mut self, at: At, out: &mut Vec<Command>) {
        if self.watermark >= Some(at) {
            return;
        }
        // What an earlier watermark has passed frees itself when its pulls have ended and its works ran.
        let before = self
            .watermark
            .replace(at)
            .map_or(Bound::Unbounded, |it| Bound::Excluded((it, Bundle(u32::MAX))));
        self.rooms.pass(at);
        while self.rung.first().is_some_and(|it| it.0 <= at) {
            self.rung.pop_first();
        }
        self.early.pass(at);
        while self.ahead.first().is_some_and(|it| it.0 <= at) {
            self.ahead.pop_first();
        }
        let passed = self.active.range((before, Bound::Included((at, Bundle(u32::MAX)))));
        let mut cancelled = None;
        for key in passed.map(|it| *it.0).collect::<Vec<_>>() {
            if self.cancel(key, out) && cancelled != Some(key.0) {
                cancelled = Some(key.0);
                out.push(Command::Cancel(key.0));
            }
            self.settle(key, out);
        }
        self.finish_steps(out);
    }

    /// Frees what can be freed of a passed bundle. Whether work is still queued.
    fn cancel(&mut self, key: Key, out: &mut Vec<Command>) -> bool {
        let at = key.0;
        let active = self.active.get_mut(&key).expect("only active bundles are cancelled");
        let shape = Arc::clone(&active.shape);
        let parts = shape.parts(key.1);
        let mut queued = false;
        for &work in parts.works {
            match active.unit_state(work) {
                UnitState::Waiting => {
                    active.set_unit(work, UnitState::Freed);
                    active.leave(at, work, out);
                }
                UnitState::Done(_) => {
                    for &(reader, _) in shape.work(work).results {
                        self.owed.settle(reader, at, work);
                    }
                    active.set_unit(work, UnitState::Freed);
                    out.push(Command::FreeResult { at, work });
                }
                UnitState::Ready => queued = true,
                UnitState::Freed => {}
            }
        }
        for &parcel in parts.parcels {
            if active.input_state(parcel) == InputState::Absent {
                active.set_input(parcel, InputState::Freed);
            }
        }
        queued
    }

    /// Gives the room of a bundle back when nothing of it is left.
    fn settle(&mut self, key: Key, out: &mut Vec<Command>) {
        if self.active.get(&key).is_some_and(Active::over) {
            let active = self.active.remove(&key).expect("it was just found");
            self.rooms.free(key.0, active.room, active.bytes);
            if self.passed(key.0) {
                self.finish_steps(out);
            }
        }
    }

    fn finish_steps(&mut self, out: &mut Vec<Command>) {
        while let Some((&number, live)) = self.steps.first_key_value() {
            let held = self.active.range(..=(live.step.last(), Bundle(u32::MAX))).next().is_some();
            if held || !self.passed(live.step.last()) {
                return;
            }
            self.steps.remove(&number);
            self.rooms.over(number);
            out.push(Command::StepOver(number));
        }
    }
}
