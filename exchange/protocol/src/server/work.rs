//! Bundles that have room: their pulls, their work, their results.

use std::collections::{BTreeMap, BTreeSet};
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
        let active = Active::new(shape, key.1, room);
        let absent: Vec<_> = active.inputs.iter().map(|it| it.parcel).collect();
        self.active.insert(key, active);
        for parcel in absent {
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

    /// Bundles of a phase that have room here and need a trainer's rows; so all whose results it may want.
    fn fed_by(&self, trainer: TrainerId, at: At) -> impl Iterator<Item = Key> {
        let bundles = self.steps[&at.step].step.shape(at.phase).feeds(trainer).iter();
        bundles.map(move |it| (at, *it)).filter(|it| self.active.contains_key(it))
    }

    /// Bundles up to a phase that have room here and need a trainer's rows.
    pub(super) fn fed_up_to(&self, trainer: TrainerId, last: At) -> Vec<Key> {
        let mut keys = Vec::new();
        let mut next = self.active.first_key_value().map(|it| it.0.0);
        while let Some(at) = next.filter(|it| *it <= last) {
            keys.extend(self.fed_by(trainer, at));
            let later = (Bound::Excluded((at, Bundle(u32::MAX))), Bound::Unbounded);
            next = self.active.range(later).next().map(|it| it.0.0);
        }
        keys
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
        let input = active.input(parcel);
        if input.state != InputState::Absent || !self.rung.contains(&(at, peer)) {
            return;
        }
        if self.slices[0] == 0 {
            self.retries.insert((now, at, key.1, parcel));
            return;
        }
        self.slices[0] -= 1;
        input.state = InputState::Pulling;
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
        let input = active.input(parcel);
        let same = |found| found == 0 || !self.settings.rules.pull_checks_incarnation;
        match result {
            Ok(found) if !refused && same(found) => {
                input.state = InputState::Here;
                active.absent -= 1;
                out.push(Command::Accept { pull, at, parcel });
                let shape = Arc::clone(&active.shape);
                for &work in shape.users(parcel) {
                    active.unit(work).missing -= 1;
                }
                self.make_ready(key, out);
            }
            Ok(_) | Err(_) => {
                out.push(Command::Discard { pull });
                if passed {
                    input.state = InputState::Freed;
                    self.settle(key, out);
                    return;
                }
                input.state = InputState::Absent;
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
            let left: BTreeSet<_> = readers.filter(|it| !passed && !has(it)).collect();
            for &reader in &left {
                news.entry(reader).or_default().push(work);
            }
            let unit = active.unit(work);
            assert!(unit.state == UnitState::Ready, "only work made ready runs, and once");
            unit.state = if left.is_empty() {
                out.push(Command::FreeResult { at, work });
                UnitState::Freed
            } else {
                UnitState::Done(left)
            };
            self.ready -= 1;
            self.ran_ahead(key, work);
            self.settle(key, out);
        }
        for (trainer, works) in news {
            let message = Message::Finished { at, works };
            out.push(Command::Send { to: Peer::Trainer(trainer), message });
        }
    }

    /// `from` has the results of one work of a bundle, or of all.
    pub(super) fn acked_bundle(
        &mut self,
        key: Key,
        from: TrainerId,
        only: Option<Work>,
        out: &mut Vec<Command>,
    ) {
        let Some(active) = self.active.get_mut(&key) else { return };
        let units = match only {
            Some(work) => std::slice::from_mut(active.unit(work)),
            None => &mut active.works,
        };
        for unit in units {
            if let UnitState::Done(left) = &mut unit.state
                && left.remove(&from)
                && left.is_empty()
            {
                unit.state = UnitState::Freed;
                out.push(Command::FreeResult { at: key.0, work: unit.work });
            }
        }
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
        let keys = (*phases.start(), Bundle(0))..=(*phases.end(), Bundle(u32::MAX));
        for (key, active) in self.active.range(keys) {
            for unit in &active.works {
                if matches!(&unit.state, UnitState::Done(left) if left.contains(&trainer)) {
                    news.entry(key.0).or_default().push(unit.work);
                }
            }
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
        self.watermark = Some(at);
        self.rooms.pass(at);
        self.rung.retain(|it| it.0 > at);
        for early in self.early.values_mut() {
            early.retain(|it, _| *it > at);
        }
        self.retries.retain(|it| it.1 > at);
        self.ahead.retain(|it| it.0 > at);
        let passed = self.active.range(..=(at, Bundle(u32::MAX)));
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
        let mut queued = false;
        for index in 0..active.works.len() {
            let unit = &mut active.works[index];
            let work = unit.work;
            match unit.state {
                UnitState::Waiting => {
                    unit.state = UnitState::Freed;
                    active.leave(at, work, out);
                }
                UnitState::Done(_) => {
                    unit.state = UnitState::Freed;
                    out.push(Command::FreeResult { at, work });
                }
                UnitState::Ready => queued = true,
                UnitState::Freed => {}
            }
        }
        for input in &mut active.inputs {
            if input.state == InputState::Absent {
                input.state = InputState::Freed;
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
