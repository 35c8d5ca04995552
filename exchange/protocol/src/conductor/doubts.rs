//! Whether the pool is lost, or this process is cut off from it.
//!
//! In: servers that were declared lost because this process could not reach them, and trainers' word on
//! whether they still do. Out: the job's end by the name of trainer 0, where the conductor lives.
//!
//! A server that stood still for too long answers trainers again, too. But then it also answers the
//! conductor, within a heartbeat: there is no doubt about a server that is heard here. One answer may have been on
//! its way when the server died, so two are needed. One server may have a bad path of its own, so two servers that
//! trainers reach are needed. A job that has no live slot left and does not wait for one then ends at once. Where
//! there are other servers, or replacements come, both have to be out of reach for [`BELIEVED_AFTER`] suspicions.

use std::collections::BTreeMap;

use super::{Command, Conductor};
use crate::{End, Filler, Nanos, OnPoolLoss, ServerId, TrainerId};

/// After so many heartbeats a server that answers trainers should have been heard here.
const ANSWERED_WITHIN: u64 = 3;

/// How long servers have to be out of reach until a job ends that could go on, in suspicions.
const BELIEVED_AFTER: u64 = 5;

/// How long the end of a job that does not wait for servers is put off, so that trainers can say what they reach; in
/// suspicions.
const PUT_OFF_FOR: u64 = 2;

/// How long trainers are asked for a lost server, if others do its work, in suspicions.
const ASKED_FOR: u64 = 10;

/// How long a lost server is remembered, in suspicions.
const REMEMBERED_FOR: u64 = 600;

/// Servers lost because this process could not reach them, and not heard since.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    servers: BTreeMap<ServerId, Doubt>,
    /// When the view last had anybody else to do the work than the first of these servers, in whichever incarnation.
    elsewhere: Option<Nanos>,
}

#[derive(Clone, Copy, Debug)]
struct Doubt {
    lost: Nanos,
    /// When a trainer said for the first and for the last time that the server answers.
    reached: Option<(Nanos, Nanos)>,
}

impl Doubts {
    pub(super) fn lost(&mut self, now: Nanos, server: ServerId) {
        self.servers.insert(server, Doubt { lost: now, reached: None });
    }

    /// A server is heard, so the path to it is well. Its older incarnations are in no doubt either: they are not heard here since it
    /// came, though trainers that have not heard it yet may still reach them.
    pub(super) fn heard(&mut self, server: ServerId) {
        let older = ServerId { incarnation: 0, ..server }..=server;
        let older: Vec<_> = self.servers.range(older).map(|it| *it.0).collect();
        for it in older {
            self.servers.remove(&it);
        }
    }

    /// A trainer says that these servers answered when it was asked.
    pub(super) fn reached(&mut self, now: Nanos, servers: &[ServerId]) {
        for server in servers {
            if let Some(doubt) = self.servers.get_mut(server) {
                doubt.reached.get_or_insert((now, now)).1 = now;
            }
        }
    }

    /// This process was paused: whom it could not reach before may well be there.
    pub(super) fn forget(&mut self) {
        self.servers.clear();
        self.elsewhere = None;
    }
}

impl Conductor {
    /// Whether trainers can tell if the pool is lost.
    pub(super) fn in_doubt(&self) -> bool {
        self.trainers.len() > 1 && self.doubts.servers.len() > 1
    }

    /// How long the end of the job waits for what trainers say.
    pub(super) fn doubt_within(&self) -> Nanos {
        Nanos(PUT_OFF_FOR * self.settings.suspect_after.0)
    }

    /// Servers that trainers are asked for.
    pub(super) fn asked(&self, now: Nanos) -> Vec<ServerId> {
        if !self.in_doubt() {
            return Vec::new();
        }
        let (waits, asked) = (self.waits_for_a_server(), self.settings.suspect_after.0 * ASKED_FOR);
        let recent = |it: &(&ServerId, &Doubt)| waits || now.since(it.1.lost) <= Nanos(asked);
        self.doubts.servers.iter().filter(recent).map(|it| *it.0).collect()
    }

    /// Ends the job if trainers reach servers that this process cannot reach.
    pub(super) fn doubt(&mut self, now: Nanos, out: &mut Vec<Command>) {
        let remembered = Nanos(REMEMBERED_FOR * self.settings.suspect_after.0);
        self.doubts.servers.retain(|_, it| now.since(it.lost) <= remembered);
        if let Some((first, _)) = self.doubts.servers.first_key_value() {
            let other = |it: &Filler| match it {
                Filler::Server(it) => it.index != first.index,
                Filler::InPlace(_) => true,
                Filler::Standby(_) => false,
            };
            if self.view.iter().flatten().any(other) {
                self.doubts.elsewhere = Some(now);
            }
        }
        if !self.in_doubt() {
            return;
        }
        let heartbeat = self.settings.heartbeat_every;
        let answered = Nanos(ANSWERED_WITHIN * heartbeat.0);
        let lasting = match self.settings.on_pool_loss {
            OnPoolLoss::Local | OnPoolLoss::Fail if self.waits_for_a_server() => Nanos(0),
            OnPoolLoss::Wait(_) | OnPoolLoss::Local | OnPoolLoss::Fail => {
                Nanos(BELIEVED_AFTER * self.settings.suspect_after.0)
            }
        };
        let there = |it: &Doubt| {
            it.reached.is_some_and(|(first, last)| {
                last.since(first) >= heartbeat
                    && now.since(first) >= answered
                    && last.since(it.lost) >= lasting
            })
        };
        let mut there = self.doubts.servers.iter().filter(|it| there(it.1)).map(|it| *it.0);
        // Who came in place of a server sits behind the same path. Others go on with the work, unless there are none: where for
        // as long nobody else has been there, nothing but the lives of one place can be counted.
        let lasting = Nanos(BELIEVED_AFTER * self.settings.suspect_after.0);
        let is_alone = self.doubts.elsewhere.is_none_or(|it| now.since(it) >= lasting);
        let first = there.next();
        let second =
            there.find(|it| first.is_some_and(|first| first.index != it.index || is_alone));
        if let (Some(first), Some(second)) = (first, second) {
            let (trainer, servers) = (TrainerId(0), [first, second]);
            out.push(Command::End(End::TrainerCutOff { trainer, servers }));
        }
    }
}
