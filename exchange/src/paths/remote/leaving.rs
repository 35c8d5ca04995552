//! Closes ways by force, and decides what becomes of their pulls.
//!
//! In: reasons, time. Out: pulls that go over their link, wait for a new way, or end. Where the owner demands UCX, a way that
//! cannot be opened closes the link; a deadline never does. A way that was closed together with another one is opened again at
//! once.
//!
//! Invariant: a pull that UCX may still write for moves to [`super::left`], and nowhere else.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::pulls::Reading;
use super::way::{Onward, Stage, Way};
use super::{For, Remote};
use crate::paths::{NO_UCX, Paths};
use crate::peer::PeerId;
use crate::provider::{PullError, PullId};
use crate::tcp::Pull;
use crate::ucx::{EndId, Flying};

/// Maximum turns of UCX, each of many reads, before pulls are called late.
const MOST_TURNS: usize = 64;

impl Remote {
    /// The first time at which a pull or a look may be late. None while nothing waits.
    pub(in crate::paths) fn next_late(&self) -> Option<Instant> {
        let reading = self.deadlines.first().map(|it| it.0);
        let looks = self.ways.values().filter_map(|it| match it.stage {
            Stage::Looking { until, .. } => Some(until),
            Stage::Asked | Stage::Open { .. } | Stage::Shut { .. } => None,
        });
        self.waiting
            .next_late()
            .into_iter()
            .chain(reading)
            .chain(looks)
            .chain(self.look_at_left)
            .min()
    }

    fn late_at(&self, reading: &Reading) -> Instant {
        let heard = self.ways.get(&reading.peer()).and_then(|it| it.heard);
        reading.flying.pull().late_after(heard)
    }

    /// Late pulls, with their peers and whether UCX may still bring something for them.
    fn late(&mut self, now: Instant) -> Vec<(PullId, PeerId, bool)> {
        let mut late = Vec::new();
        while let Some(&(at, id)) = self.deadlines.first().filter(|it| it.0 <= now) {
            self.deadlines.remove(&(at, id));
            let Some(reading) = self.reading.get(&id) else { continue };
            let at = self.late_at(reading);
            if at <= now {
                late.push((id, reading.peer(), reading.is_under_way()));
            } else if let Some(reading) = self.reading.get_mut(&id) {
                reading.look_at = at;
                self.deadlines.insert((at, id));
            }
        }
        late
    }

    /// Closes the endpoint of a peer. Returns the pulls that UCX no longer writes for, and the numbers of those that it may still
    /// write for, which are kept.
    fn close_end(&mut self, peer: PeerId, now: Instant) -> (Vec<Pull>, Vec<PullId>) {
        if let Some(end) = self.ways.get(&peer).and_then(Way::end) {
            self.net.close(end);
        }
        self.count_done(now);
        self.leave_reads(peer);
        let reading = &self.reading;
        self.done.retain(|(what, _)| match what {
            For::Entry(id) | For::Rows(id, _) => reading.get(id).is_none_or(|it| it.peer() != peer),
            For::Look(whose, _) => *whose != peer,
            For::Left(_) => true,
        });
        let theirs = self.reading.iter().filter(|it| it.1.peer() == peer);
        let (mut free, mut kept) = (Vec::new(), Vec::new());
        for id in theirs.map(|it| *it.0).collect::<Vec<_>>() {
            match self.take_out(id) {
                Some(flying) if flying.is_flying() => kept.push(self.keep(flying, now)),
                flying => free.extend(flying.map(Flying::into_pull)),
            }
        }
        (free, kept)
    }

    /// The peer that an endpoint leads to.
    pub(super) fn owner_at(&self, end: EndId) -> Option<PeerId> {
        self.ways.iter().find(|it| it.1.end() == Some(end)).map(|it| *it.0)
    }
}

impl Paths {
    /// Closes the endpoint of a peer. Returns the pulls that UCX no longer writes for, and the numbers of those that it may still
    /// write for. The latter are kept with a new deadline.
    pub(super) fn close_way(&mut self, peer: PeerId) -> (Vec<Pull>, Vec<PullId>) {
        let now = self.tcp.now();
        let Some(remote) = &mut self.remote else { return (Vec::new(), Vec::new()) };
        let (free, kept) = remote.close_end(peer, now);
        for id in &kept {
            remote.watch_left_anew(*id, &mut self.tcp);
        }
        (free, kept)
    }

    /// Asks for the cards of owners whose endpoints were closed together with another one: nothing is wrong with them.
    pub(super) fn reopen_lost(&mut self) {
        while let Some(end) = self.remote.as_mut().and_then(|it| it.net.lost()) {
            if let Some(peer) = self.remote.as_ref().and_then(|it| it.owner_at(end)) {
                tracing::debug!("the way to {peer} is opened anew: it was closed with another one");
                self.ask_card(peer);
            }
        }
    }

    /// Begins a pull again whose way was left: by the next way where UCX is demanded, else over the link.
    pub(super) fn begin_again(&mut self, mut pull: Pull) {
        match &mut self.remote {
            Some(remote) if remote.required => {
                pull.begin_anew();
                self.tcp.watch_anew(&mut pull);
                remote.waiting.push(pull);
            }
            Some(_) | None => {
                self.traffic.sent_anew += 1;
                self.tcp.send_anew(pull);
            }
        }
    }

    /// Ends what has waited too long. It first handles what has arrived already, since this process itself may have been stopped.
    pub(super) fn end_late_remote(&mut self, now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        if remote.next_late().is_none_or(|it| it > now) {
            return;
        }
        // More turns than the windows have reads.
        let mut turns = 0..MOST_TURNS;
        while remote.net.progress() && turns.next().is_some() {}
        remote.count_done(now);
        while let Some(pull) = remote.waiting.take_late(now) {
            self.tcp.end_copied(pull, Err(PullError::Deadline));
        }
        let is_here =
            |peer| remote.done.iter().any(|it| matches!(it.0, For::Look(of, _) if of == peer));
        let looks = remote.ways.iter().filter(|it| {
            matches!(it.1.stage, Stage::Looking { until, .. } if until <= now) && !is_here(*it.0)
        });
        for peer in looks.map(|it| *it.0).collect::<Vec<_>>() {
            let why = "it does not answer by UCX";
            self.leave(peer, why, true, &Onward::Link(BTreeSet::new()));
        }
        self.end_late_left(now);
        let late = self.remote.as_mut().map_or_else(Vec::new, |it| it.late(now));
        let stuck: BTreeSet<_> = late.iter().filter(|it| it.2).map(|it| it.1).collect();
        for (id, _, _) in late.iter().filter(|it| !stuck.contains(&it.1)) {
            if let Some(pull) = self.remote.as_mut().and_then(|it| it.remove(*id)) {
                self.tcp.end_copied(pull, Err(PullError::Deadline));
            }
        }
        for peer in stuck {
            let theirs = late.iter().filter(|it| it.1 == peer).map(|it| it.0).collect();
            let why = "nothing came for too long";
            self.leave(peer, why, true, &Onward::Link(theirs));
        }
    }

    /// Leaves the way to a peer: closes it by force, then lets its pulls go on.
    pub(super) fn leave(&mut self, peer: PeerId, why: &str, is_odd: bool, onward: &Onward) {
        let (pulls, kept) = self.close_way(peer);
        let now = self.tcp.now();
        let Some(remote) = &mut self.remote else { return };
        let required = remote.required;
        if let Some(way) = remote.ways.get_mut(&peer) {
            // A way that closes because its link closed has not failed.
            let is_failure = is_odd || matches!(way.stage, Stage::Open { .. });
            remote.failures += u64::from(is_failure && matches!(onward, Onward::Link(_)));
            way.shut(peer, why, is_odd, now);
        }
        // A deadline does not close the link: the endpoint is opened anew, and pulls that are not
        // late wait for it.
        let (closes, reopens) = match onward {
            Onward::Link(late) => (required && late.is_empty(), required && !late.is_empty()),
            Onward::End(_) => (false, false),
        };
        for id in kept {
            match onward {
                Onward::Link(late) if late.contains(&id) => self.tell_left(id, PullError::Deadline),
                Onward::Link(_) if closes => self.tell_left(id, PullError::PeerFailed),
                // The pull goes on when UCX no longer writes for it.
                Onward::Link(_) => {}
                Onward::End(error) => self.tell_left(id, error.clone()),
            }
        }
        for pull in pulls {
            match onward {
                Onward::Link(late) if late.contains(&pull.id()) => {
                    self.tcp.end_copied(pull, Err(PullError::Deadline));
                }
                Onward::Link(_) if closes => {
                    self.tcp.end_copied(pull, Err(PullError::PeerFailed));
                }
                Onward::Link(_) => self.begin_again(pull),
                Onward::End(error) => self.tcp.end_copied(pull, Err(error.clone())),
            }
        }
        if reopens {
            self.ask_card(peer);
        }
        if closes {
            let is_linked = self.tcp.is_opening(peer);
            self.tcp.break_links(peer);
            self.end_all(peer, &PullError::PeerFailed);
            let error = format!(
                "{why}; run where both reach each other by UCX, or without requiring it (--exchange auto)"
            );
            self.closed(peer, is_linked.then_some(error), why == NO_UCX);
        }
    }

    /// Acts as if the endpoint of a peer had failed.
    #[cfg(test)]
    pub(in crate::paths) fn lose_way(&mut self, peer: PeerId) {
        if self.remote.as_ref().is_some_and(|it| it.ways.contains_key(&peer)) {
            self.leave(peer, "a test", false, &Onward::Link(BTreeSet::new()));
        }
    }

    /// Ends all pulls from a peer that UCX brings, and forgets the way.
    pub(in crate::paths) fn end_all_remote(&mut self, peer: PeerId, why: &PullError) {
        if self.remote.as_ref().is_none_or(|it| {
            !it.ways.contains_key(&peer) && it.waiting.is_empty() && it.left.is_empty()
        }) {
            return;
        }
        self.leave(peer, "its link is closed", false, &Onward::End(why.clone()));
        self.tell_all_left(peer, why);
        let Some(remote) = &mut self.remote else { return };
        remote.ways.remove(&peer);
        for pull in remote.waiting.take_from(peer) {
            self.tcp.end_copied(pull, Err(why.clone()));
        }
    }

    /// How long a poll may sleep before something of UCX is late.
    pub(in crate::paths) fn rest_remote(&self, now: Instant) -> Duration {
        let Some(remote) = &self.remote else { return Duration::MAX };
        let late = remote.next_late().map_or(Duration::MAX, |it| it.saturating_duration_since(now));
        late.min(remote.rest_left())
    }
}
