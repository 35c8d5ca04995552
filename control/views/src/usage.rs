//! Whether a job uses its servers, and what it keeps of its share while it does not.
//!
//! In: what its servers report, ends of its steps, the time. Out: whether it is quiet, and whether it lends.
//!
//! ```text
//!            quiet for long, and others can use them
//!   keeps ──────────────────────────────────────────▶ lends ──┐
//!     ▲  ▲                                                    │ a sign of use
//!     │  └────── all its servers are back, and a while ───────┘
//!     └─ a sign of use ── as found (a new controller does not know)
//! ```
//!
//! A step whose header is out uses the servers that it counts on, also while they wait for rows. So a job whose steps
//! are long is not quiet, and what is quiet needs no server at once. No decisions about others here.

use std::collections::VecDeque;
use std::time::Duration;

use crate::types::SERVERS_BACK_WITHIN;

/// Shortest time without use after which a job is quiet.
const QUIET_AFTER: Duration = Duration::from_secs(30);
/// A job is quiet after so many of its usual steps without use: between them it may evaluate, or write a checkpoint.
const QUIET_STEPS: u32 = 4;
/// How long a job that has its whole share back keeps it.
const KEPT_FOR: Duration = Duration::from_mins(5);
/// Newest steps whose upper median is the usual one.
const REMEMBERED_STEPS: usize = 8;

/// What a job does with its share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Share {
    /// Has it all.
    Keeps,
    /// Others have what it does not need.
    Lends,
    /// Another controller gave it what it has; whether that is all of it is not known yet.
    AsFound,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Usage {
    /// The last sign of use, or when it was first heard of.
    used: Duration,
    stepped: Option<Duration>,
    steps: VecDeque<Duration>,
    share: Share,
    /// Until when it lends nothing.
    keeps_until: Duration,
    /// Whether servers are to come back that it lent.
    awaits: bool,
    /// Whether it has had too few servers for a step.
    lacked: bool,
    /// Whether any server has been seen to work for it. One that has not trained yet loads a model, or its data.
    has_trained: bool,
}

impl Usage {
    pub(crate) fn new(now: Duration) -> Self {
        Self {
            used: now,
            stepped: None,
            steps: VecDeque::new(),
            share: Share::Keeps,
            keeps_until: Duration::ZERO,
            awaits: false,
            lacked: false,
            has_trained: false,
        }
    }

    /// Another controller gave the job its servers.
    pub(crate) fn found(&mut self, now: Duration) {
        (self.used, self.share, self.keeps_until) = (now, Share::AsFound, now + KEPT_FOR);
        self.has_trained = true;
    }

    /// Some server computes for the job, or a step that is out counts on it.
    pub(crate) fn uses(&mut self, now: Duration) {
        (self.used, self.has_trained) = (now, true);
        if self.share != Share::Keeps {
            self.takes_back(now);
        }
    }

    /// A step is over. That is no sign of use: the last one may be told again.
    pub(crate) fn stepped(&mut self, now: Duration) {
        if let Some(before) = self.stepped.replace(now) {
            self.steps.push_back(now.saturating_sub(before));
            if self.steps.len() > REMEMBERED_STEPS {
                self.steps.pop_front();
            }
        }
    }

    /// The job has too few servers for a step: it lends nothing any more.
    pub(crate) fn lacks(&mut self, now: Duration) {
        self.lacked |= self.share != Share::Keeps || self.awaits;
        self.uses(now);
    }

    /// Whether nothing was seen of the job for long.
    pub(crate) fn is_quiet(&self, now: Duration) -> bool {
        let mut steps: Vec<_> = self.steps.iter().copied().collect();
        steps.sort_unstable();
        let usual = steps.get(steps.len() / 2).copied().unwrap_or_default();
        now >= self.used + QUIET_AFTER.max(usual.saturating_mul(QUIET_STEPS))
    }

    /// Whether the job has use for more servers.
    pub(crate) fn borrows(&self, now: Duration) -> bool {
        self.has_trained && !self.is_quiet(now)
    }

    /// What follows from the job's servers and from others. `is_whole`: each of its slots has a server that is well.
    /// `is_spare`: none of these computes for it or is counted on. `borrows`: whether another job could use them.
    /// `is_alone`: nobody else may have them.
    pub(crate) fn settle(
        &mut self,
        now: Duration,
        (is_whole, is_spare): (bool, bool),
        (borrows, is_alone): (bool, bool),
    ) {
        if is_alone {
            self.share = Share::Keeps;
        } else if !is_whole && self.has_waited(now) {
            // What it has kept is not there any more.
            self.takes_back(now);
        } else if self.share != Share::Lends
            && (is_whole && is_spare && borrows && self.is_quiet(now))
            && (now >= self.keeps_until && !self.awaits && !self.lacked && self.has_trained)
        {
            self.share = Share::Lends;
        }
    }

    /// Whether servers are to come back that it lent.
    pub(crate) fn awaits(&self) -> bool {
        self.awaits
    }

    /// All of them have come back.
    pub(crate) fn has_all_back(&mut self, now: Duration) {
        (self.awaits, self.keeps_until) = (false, now + KEPT_FOR);
    }

    /// Most slots that the job is given, which has so many and keeps so many of them; none: its share.
    pub(crate) fn cap(&self, has: u32, keeps: u32) -> Option<u32> {
        match self.share {
            Share::Keeps => None,
            Share::Lends => Some(keeps.max(1)),
            Share::AsFound => Some(has.max(keeps).max(1)),
        }
    }

    /// Whether no server of a job that has less than its share is waited for.
    fn has_waited(&self, now: Duration) -> bool {
        match self.share {
            Share::Keeps => false,
            Share::Lends => true,
            Share::AsFound => now >= self.used + SERVERS_BACK_WITHIN,
        }
    }

    fn takes_back(&mut self, now: Duration) {
        (self.share, self.awaits, self.keeps_until) = (Share::Keeps, true, now + KEPT_FOR);
    }
}
