//! Deadlines and bounds of the machines.

use crate::{Nanos, Peer, Rules};

/// Doublings of the time between two tries.
pub(crate) const MAX_DOUBLINGS: u32 = 4;

/// Deadlines and bounds, the same in every process of a job.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// Between two heartbeats.
    pub heartbeat_every: Nanos,
    /// A server silent for so long is lost.
    pub suspect_after: Nanos,
    /// A trainer silent for so long is dead.
    pub trainer_after: Nanos,
    /// A process that hears nothing from the conductor for so long ends.
    pub conductor_after: Nanos,
    /// Before its first word a trainer, or the conductor, may be silent for so much longer, since processes start one by one.
    pub assemble_within: Nanos,
    /// When nothing has come over its link for so long, a pull is given up and the link closed; as long as bytes come, it may
    /// take any time. Between two trainers, whose links also carry the conductor's messages, only after `trainer_after`.
    pub pull_within: Nanos,
    /// When a phase takes longer, the servers that owe its missing results become suspect.
    pub phase_within: Nanos,
    /// Before trying again after a link broke or a pull failed; a trainer waits longer with every try,
    /// up to sixteen times this.
    pub retry_after: Nanos,
    /// Opening a link fails within this: refused, or not greeted in time.
    pub reach_within: Nanos,
    /// An acknowledgement is sent alone when no doorbell has left for so long that could carry it.
    pub ack_within: Nanos,
    /// Phases whose rows a trainer keeps at a time, at least 1.
    pub window: usize,
    /// Whether works may start on their own rows while pulls bring others of their bundle: their shell can copy rows out of
    /// memory to which pulls write.
    pub runs_ahead: bool,
    /// What the conductor does when no server is left.
    pub on_pool_loss: OnPoolLoss,
    /// Rules that keep the bits: all on, but in tests of the simulation itself.
    pub rules: Rules,
}

impl Settings {
    /// How long after a break the next one comes, at the latest, where no link can be opened. Breaks that
    /// are further apart have nothing to do with each other.
    pub(crate) fn between_breaks(&self) -> Nanos {
        let longest_wait = Nanos(self.retry_after.0 << MAX_DOUBLINGS);
        self.reach_within.after(longest_wait).after(self.suspect_after)
    }

    /// How long this process was paused, if it was, when it handles events now and did so last at `last`: silence meanwhile says
    /// nothing about others.
    pub(crate) fn pause(&self, last: Nanos, now: Nanos) -> Option<Nanos> {
        Some(now.since(last)).filter(|it| *it > Nanos(2 * self.heartbeat_every.0))
    }

    /// How long a pull may go without a byte over its link.
    pub(crate) fn pull_span(&self, by: Peer, from: Peer) -> Nanos {
        match (by, from) {
            (Peer::Trainer(_), Peer::Trainer(_)) => self.trainer_after,
            (Peer::Server(_), _) | (_, Peer::Server(_)) => self.pull_within,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            heartbeat_every: Nanos::from_millis(200),
            suspect_after: Nanos::from_millis(1_000),
            trainer_after: Nanos::from_millis(30_000),
            conductor_after: Nanos::from_millis(30_000),
            assemble_within: Nanos(0),
            pull_within: Nanos::from_millis(10_000),
            phase_within: Nanos::from_millis(30_000),
            retry_after: Nanos::from_millis(20),
            reach_within: Nanos::from_millis(6_000),
            ack_within: Nanos::from_millis(5),
            window: 4,
            runs_ahead: true,
            on_pool_loss: OnPoolLoss::Fail,
            rules: Rules::all(),
        }
    }
}

/// What happens when no live slot is left, or none can hold a bundle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OnPoolLoss {
    /// Wait so long for a server to fill a slot, then end.
    Wait(Nanos),
    /// The trainers' standby slots take the work.
    Local,
    /// End.
    Fail,
}
