//! Trainers whose rows cannot be pulled.
//!
//! In: how pulls end. Out: which trainers heartbeats, or complaints of a server in place, name, and which late work is not this server's fault. The
//! conductor knows whether such a trainer is there, and so whether the path to it is bad.
//!
//! A trainer is out of reach from the first pull that its link fails until one of its pulls ends well, or
//! until nothing is wanted of it any more.

use std::collections::BTreeSet;

use super::active::{Active, Key};
use super::{Command, Server};
use crate::{At, Message, Nanos, Parcel, Peer, PullFailure, PullResult, TrainerId};

impl Server {
    /// A pull ended.
    pub(super) fn tried(&mut self, now: Nanos, key: Key, parcel: Parcel, result: PullResult) {
        let Some(from) = self.active.get(&key).map(|it| it.source(parcel)) else { return };
        match result {
            Ok(_) => {
                self.unreached.remove(&from);
            }
            Err(PullFailure::PeerFailed | PullFailure::Deadline) => {
                self.unreached.entry(from).or_insert(now);
            }
            Err(PullFailure::Gone | PullFailure::Cancelled) => {}
        }
    }

    /// Trainers whose rows are wanted and cannot be pulled, and for how long that has been so.
    pub(super) fn unreached(&mut self, now: Nanos) -> Vec<(TrainerId, Nanos)> {
        if !self.unreached.is_empty() {
            let active = self.active.iter().filter(|it| !self.passed(it.0.0));
            let wanted: BTreeSet<_> = active.flat_map(|it| it.1.lacks()).collect();
            self.unreached.retain(|it, _| wanted.contains(it));
        }
        self.unreached.iter().map(|(&it, &since)| (it, now.since(since))).collect()
    }

    /// In place: tells the conductor which trainers cannot be reached, as a dedicated server does with its heartbeats.
    pub(super) fn complain(&mut self, now: Nanos, out: &mut Vec<Command>) {
        if now < self.beat_at {
            return;
        }
        self.beat_at = now.after(self.settings.heartbeat_every);
        let trainers = self.unreached(now);
        if !trainers.is_empty() {
            let message = Message::Unreached { trainers };
            out.push(Command::Send { to: Peer::CONDUCTOR, message });
        }
    }

    /// The earliest phase with work whose rows can all be pulled and which has not run.
    pub(super) fn owes(&self) -> Option<At> {
        let reached = |it: &Active| !it.lacks().any(|it| self.unreached.contains_key(&it));
        let idle = |it: &Key| !self.passed(it.0) && self.complete(it.0, it.1);
        let mut active = self.active.iter();
        let active = active.find(|it| it.1.unfinished() && reached(it.1) && idle(it.0));
        let moved = self.rooms.moved.iter().copied().find(idle);
        active.map(|it| *it.0).into_iter().chain(moved).map(|it| it.0).min()
    }
}
