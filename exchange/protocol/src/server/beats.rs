//! What a dedicated server tells the conductor, again and again, and how it leaves.
//!
//! ```text
//! stays ──Event::Leave──▶ asks, with each heartbeat ──Spare──▶ may go
//!                           └──silence for conductor_after──▶ ends by that
//! ```
//!
//! Invariant: the conductor's answer counts only after the question. So it knows that nothing more is to be planned here.

use super::{Command, Server};
use crate::{At, Heartbeat, Message, Nanos, Peer};

/// Whether a server is to leave.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Leaves {
    #[default]
    No,
    Asks,
    Spare,
}

impl Server {
    /// Whether a server that is to leave may: the conductor has said that no step that is not over has work for it, and that none
    /// will have.
    pub fn is_spare(&self) -> bool {
        self.leaves == Leaves::Spare
    }

    pub(super) fn leave(&mut self, now: Nanos) {
        if self.leaves == Leaves::No {
            self.leaves = Leaves::Asks;
            self.beat_at = now;
            // A job that has not begun yet is not waited for.
            self.heard = self.heard.min(now);
        }
    }

    pub(super) fn spare(&mut self, watermark: Option<At>, out: &mut Vec<Command>) {
        if self.leaves == Leaves::No {
            return;
        }
        if let Some(at) = watermark {
            self.advance(at, out);
        }
        self.leaves = Leaves::Spare;
    }

    pub(super) fn beat(&mut self, now: Nanos, out: &mut Vec<Command>) {
        self.beat_at = now.after(self.settings.heartbeat_every);
        let since = |at| match self.owing {
            Some((before, since)) if before == at => (at, since),
            Some(_) | None => (at, now),
        };
        self.owing = self.owes().map(since);
        let message = Message::Heartbeat(Box::new(Heartbeat {
            watermark: self.watermark,
            done: None,
            rounds: self.steps.iter().map(|(&step, it)| (step, it.table.round)).collect(),
            owes: self.owing.map(|(at, since)| (at, now.since(since))),
            unreached: self.unreached(now),
            reached: Vec::new(),
            leaves: self.leaves != Leaves::No,
        }));
        out.push(Command::Send { to: Peer::CONDUCTOR, message });
    }
}
