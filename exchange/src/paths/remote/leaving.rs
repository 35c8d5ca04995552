//! How a way is left: closed by force, and what becomes of its pulls.
//!
//! In: reasons, time. Out: pulls that go over their link, wait for a new way, or end. Where UCX must be taken, a way that cannot be had
//! closes the link; a deadline closes none.
//!
//! Invariant: nothing is written for a pull when it leaves its way.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::pulls::Reading;
use super::way::{Stage, Way};
use super::{For, Remote};
use crate::paths::Paths;
use crate::peer::PeerId;
use crate::provider::{Event, Provider as _, PullError, PullId};
use crate::tcp::Pull;

/// How pulls go on whose way is left.
pub(super) enum Onward {
    /// Over the link, from their first byte; those of the set are late.
    Link(BTreeSet<PullId>),
    /// Not at all.
    End(PullError),
}

impl Remote {
    /// When something is late next.
    pub(in crate::paths) fn next_late(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(Pull::late_at);
        let reading = self.reading.values().map(|it| self.late_at(it));
        let looks = self.ways.values().filter_map(|it| match it.stage {
            Stage::Looking { until, .. } => Some(until),
            Stage::Asked | Stage::Open { .. } | Stage::Shut { .. } => None,
        });
        waiting.chain(reading).chain(looks).min()
    }

    fn late_at(&self, reading: &Reading) -> Instant {
        let heard = self.ways.get(&reading.peer()).and_then(|it| it.heard);
        reading.flying.pull().late_after(heard)
    }

    /// Closes the end of a peer and gives back its pulls: nothing is written for them any more.
    pub(super) fn close_way(&mut self, peer: PeerId, now: Instant) -> Vec<Pull> {
        if let Some(end) = self.ways.get(&peer).and_then(Way::end) {
            self.net.close(end);
        }
        while let Some(done) = self.net.done() {
            self.done.push_back(done);
        }
        for done in std::mem::take(&mut self.done) {
            let is_theirs = match self.gets.get(&done.get) {
                Some((For::Pull(id), _)) => {
                    self.reading.get(id).is_some_and(|it| it.peer() == peer)
                }
                Some((For::Look(..), _)) | None => false,
            };
            if is_theirs {
                self.count(&done, now);
            } else {
                self.done.push_back(done);
            }
        }
        let theirs = self.reading.extract_if(.., |_, it| it.peer() == peer);
        theirs.map(|it| it.1.flying.into_pull()).collect()
    }
}

impl Paths {
    /// Ends what nothing has come for in too long.
    pub(super) fn end_late_remote(&mut self, now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let late = |it: &mut Pull| it.is_late(now);
        for pull in remote.waiting.extract_if(.., late).collect::<Vec<_>>() {
            self.tcp.end_copied(pull, Err(PullError::Deadline));
        }
        let looks = remote
            .ways
            .iter()
            .filter(|it| matches!(it.1.stage, Stage::Looking { until, .. } if until <= now));
        for peer in looks.map(|it| *it.0).collect::<Vec<_>>() {
            let why = "it does not answer by UCX";
            self.leave(peer, why, true, Onward::Link(BTreeSet::new()));
        }
        let Some(remote) = &mut self.remote else { return };
        let late = remote.reading.iter().filter(|it| remote.late_at(it.1) <= now);
        let late: Vec<_> = late.map(|(id, it)| (*id, it.peer(), it.is_under_way())).collect();
        let stuck: BTreeSet<_> = late.iter().filter(|it| it.2).map(|it| it.1).collect();
        for (id, _, _) in late.iter().filter(|it| !stuck.contains(&it.1)) {
            if let Some(it) = remote.reading.remove(id) {
                self.tcp.end_copied(it.flying.into_pull(), Err(PullError::Deadline));
            }
        }
        for peer in stuck {
            let theirs = late.iter().filter(|it| it.1 == peer).map(|it| it.0).collect();
            let why = "nothing came for too long";
            self.leave(peer, why, true, Onward::Link(theirs));
        }
    }

    /// Leaves the way to a peer: closes it by force, then lets its pulls go on.
    pub(super) fn leave(&mut self, peer: PeerId, why: &str, is_odd: bool, onward: Onward) {
        let now = self.tcp.now();
        let Some(remote) = &mut self.remote else { return };
        let pulls = remote.close_way(peer, now);
        let required = remote.required;
        if let Some(way) = remote.ways.get_mut(&peer) {
            way.shut(peer, why, is_odd, now);
        }
        let mut again = Vec::new();
        for pull in pulls {
            match &onward {
                Onward::Link(late) if late.contains(&pull.id()) => {
                    self.tcp.end_copied(pull, Err(PullError::Deadline));
                }
                Onward::Link(_) if required => again.push(pull),
                Onward::Link(_) => {
                    self.traffic.sent_anew += 1;
                    self.tcp.send_anew(pull);
                }
                Onward::End(error) => self.tcp.end_copied(pull, Err(error.clone())),
            }
        }
        match onward {
            Onward::Link(late) if required && late.is_empty() => {
                for pull in again {
                    self.tcp.end_copied(pull, Err(PullError::PeerFailed));
                }
                let is_linked = self.tcp.is_opening(peer);
                self.tcp.close(peer);
                self.end_all(peer, &PullError::PeerFailed);
                let error = format!(
                    "{why}; run where both reach each other by UCX, or without requiring it (--exchange auto)"
                );
                if is_linked {
                    self.events.push(Event::Closed { peer, error });
                }
            }
            // A deadline closes no link: the way is tried anew, and what was not late waits for it.
            Onward::Link(_) if required => {
                if let Some(remote) = &mut self.remote {
                    remote.waiting.extend(again.into_iter().map(|mut it| {
                        it.begin_anew();
                        it
                    }));
                }
                self.ask_card(peer);
            }
            Onward::Link(_) | Onward::End(_) => {}
        }
    }

    /// As if the way to a peer had failed.
    #[cfg(test)]
    pub(in crate::paths) fn lose_way(&mut self, peer: PeerId) {
        if self.remote.as_ref().is_some_and(|it| it.ways.contains_key(&peer)) {
            self.leave(peer, "a test", false, Onward::Link(BTreeSet::new()));
        }
    }

    /// Ends all pulls from a peer that UCX brings, and forgets the way.
    pub(in crate::paths) fn end_all_remote(&mut self, peer: PeerId, why: &PullError) {
        if self
            .remote
            .as_ref()
            .is_none_or(|it| !it.ways.contains_key(&peer) && it.waiting.is_empty())
        {
            return;
        }
        self.leave(peer, "its link is closed", false, Onward::End(why.clone()));
        let Some(remote) = &mut self.remote else { return };
        remote.ways.remove(&peer);
        let theirs = |it: &mut Pull| it.peer() == peer;
        for pull in remote.waiting.extract_if(.., theirs).collect::<Vec<_>>() {
            self.tcp.end_copied(pull, Err(why.clone()));
        }
    }

    /// How long nothing of UCX is late.
    pub(in crate::paths) fn rest_remote(&self, now: Instant) -> Duration {
        let late = self.remote.as_ref().and_then(Remote::next_late);
        late.map_or(Duration::MAX, |it| it.saturating_duration_since(now))
    }
}
