//! Pulls whose way was closed while UCX could still write for them. Their landings stay reserved until UCX has ended their reads.
//!
//! In: pulls of a closed endpoint that lingers, ends of their reads, time. Out: pulls that go on by the next way or over the link, or
//! whose end was told before.
//!
//! ```text
//! left ──all its reads ended──▶ goes on, from its first byte
//!   └──late, closed──▶ told ──all its reads ended──▶ its landing is free
//! ```
//!
//! An endpoint costs its own peer's way alone. One that lingers for [`PATIENCE`] is ended with all others, which are opened anew.
//!
//! Invariant: a pull leaves this module when nothing is written for it any more.

use std::time::{Duration, Instant};

use super::{For, PATIENCE, Remote};
use crate::paths::Paths;
use crate::paths::copies::Better;
use crate::peer::PeerId;
use crate::provider::{LandingId, PullError, PullId};
use crate::tcp::{Pull, Tcp};
use crate::ucx::Flying;

/// Interval at which lingering endpoints are checked: the end of some wakes nobody.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// See the module.
pub(super) struct Left {
    flying: Flying,
    since: Instant,
    /// Whether the event of the pull's end was sent.
    is_told: bool,
}

impl Left {
    /// When its deadline or the patience with its endpoint ends.
    fn due_at(&self) -> Instant {
        let end = self.since + PATIENCE;
        if self.is_told { end } else { end.min(self.flying.pull().late_at()) }
    }
}

impl Remote {
    /// Handles the reads in flight of a peer whose endpoint was closed: drops looks, and takes rows out of the windows.
    pub(super) fn leave_reads(&mut self, peer: PeerId) {
        let is_theirs = |id: &PullId| self.reading.get(id).is_some_and(|it| it.peer() == peer);
        let mut bytes_left = 0;
        self.gets.retain(|_, what| match *what {
            For::Look(whose, _) => whose != peer,
            For::Entry(id) => !is_theirs(&id),
            For::Rows(id, bytes) => {
                if is_theirs(&id) {
                    bytes_left += bytes;
                    *what = For::Left(id);
                }
                true
            }
            For::Left(_) => true,
        });
        self.flying_bytes -= bytes_left;
        if let Some(way) = self.ways.get_mut(&peer) {
            (way.flying_bytes, way.looks) = (0, 0);
        }
    }

    /// Keeps a pull for which UCX may still write.
    pub(super) fn keep(&mut self, flying: Flying, now: Instant) -> PullId {
        let id = flying.pull().id();
        let left = Left { flying, since: now, is_told: false };
        self.look_at_left = self.look_at_left.into_iter().chain([left.due_at()]).min();
        self.left.insert(id, left);
        id
    }

    /// Restarts the deadline of a pull that was left.
    pub(super) fn watch_left_anew(&mut self, id: PullId, tcp: &mut Tcp) {
        if let Some(left) = self.left.get_mut(&id) {
            left.flying.watch_anew(tcp);
        }
    }

    /// Whether UCX may still write to a landing, for a pull that has ended.
    pub(in crate::paths) fn is_busy(&self, landing: LandingId) -> bool {
        let mut of_it = self.busy.range((landing, PullId(0))..=(landing, PullId(u64::MAX)));
        of_it.next().is_some()
    }

    /// A read of such a pull has ended.
    pub(super) fn left_ended(&mut self, id: PullId) {
        if let Some(left) = self.left.get_mut(&id) {
            left.flying.ended();
        }
    }

    /// Finds the first time at which a pull or an endpoint here is due.
    fn look_anew(&mut self) {
        let flying = self.left.values().filter(|it| it.flying.is_flying());
        self.look_at_left = flying.map(Left::due_at).min();
    }

    /// How long a poll may sleep before it has to check lingering endpoints.
    pub(super) fn rest_left(&self) -> Duration {
        if self.left.is_empty() { Duration::MAX } else { LOOK_EVERY }
    }
}

impl Paths {
    /// Ends pulls that are late, and endpoints that linger longer than [`PATIENCE`].
    pub(super) fn end_late_left(&mut self, now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        if remote.look_at_left.is_none_or(|it| it > now) {
            return;
        }
        let late = remote.left.iter().filter(|it| it.1.flying.pull().is_late(now));
        for id in late.map(|it| *it.0).collect::<Vec<_>>() {
            self.tell_left(id, PullError::Deadline);
        }
        let Some(remote) = &mut self.remote else { return };
        if remote.left.values().any(|it| it.flying.is_flying() && it.since + PATIENCE <= now) {
            tracing::warn!(
                "UCX does not end reads of a closed endpoint: all endpoints are closed and opened anew"
            );
            remote.net.cut();
            remote.count_done(now);
            self.reopen_lost();
        }
        if let Some(remote) = &mut self.remote {
            remote.look_anew();
        }
    }

    /// Sends the event of a pull's end, unless it was sent.
    pub(super) fn tell_left(&mut self, id: PullId, why: PullError) {
        let Some(remote) = &mut self.remote else { return };
        if let Some(left) = remote.left.get_mut(&id).filter(|it| !it.is_told) {
            left.is_told = true;
            remote.busy.insert((left.flying.pull().landing(), id));
            self.tcp.tell_end(left.flying.pull(), why);
        }
    }

    /// Sends the events of the ends of all pulls from a peer.
    pub(super) fn tell_all_left(&mut self, peer: PeerId, why: &PullError) {
        let left = self.remote.iter().flat_map(|it| &it.left);
        let theirs = left.filter(|it| it.1.flying.pull().peer() == peer);
        for id in theirs.map(|it| *it.0).collect::<Vec<_>>() {
            self.tell_left(id, why.clone());
        }
    }

    /// Counts an ended read. After the last one, UCX no longer writes for the pull.
    pub(super) fn got_left(&mut self, id: PullId) {
        let Some(remote) = &mut self.remote else { return };
        if remote.left.get(&id).is_none_or(|it| it.flying.is_flying()) {
            return;
        }
        let Some(Left { flying, is_told, .. }) = remote.left.remove(&id) else { return };
        let pull = flying.into_pull();
        remote.busy.remove(&(pull.landing(), id));
        if is_told {
            self.tcp.free_told(pull);
        } else {
            self.go_on(pull);
        }
    }

    /// Begins a pull again: by a way that is open or opening where UCX is demanded, else over the link.
    fn go_on(&mut self, mut pull: Pull) {
        if self.remote.as_ref().is_some_and(|it| it.required) {
            pull.begin_anew();
            self.tcp.watch_anew(&mut pull);
            self.begin_remote(pull, Better::No);
        } else {
            self.begin_again(pull);
        }
    }
}
