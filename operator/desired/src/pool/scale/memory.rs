//! What mode `Auto` remembers between two looks.
//!
//! In: how many servers sufficed in each look, and the number that was there. Out: how many were lacking, how many
//! sufficed for the whole window, and when numbers of others were taken over. Bounded. Invariant: who begins without a memory, as
//! a new leader does, takes no server away before a whole window has passed, and changes no number meanwhile that it finds.

use std::collections::VecDeque;

use cadre_crds::ScaleDecision;
use k8s_openapi::jiff::Timestamp;

use super::owner::{QUIET_SECONDS, TAKEOVERS, is_full, is_ours, takeovers};
use super::strangers::Strangers;
use super::{LOOK_SECONDS, Observed};

/// Looks that are remembered at most; within a window older ones are thinned out.
const REMEMBERED: usize = 128;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// When, and how many servers sufficed.
    looks: VecDeque<(i64, u32)>,
    /// Since when there is a memory; shrinking waits until it covers the whole window.
    since: Option<i64>,
    /// The last change that the API server has taken, until a status tells it.
    pub decision: Option<ScaleDecision>,
    /// The change that was written last, until it is seen.
    pub(super) intent: Option<ScaleDecision>,
    /// Servers that the last look wanted.
    pub(super) number: Option<u32>,
    /// The number of somebody else that is there.
    foreign: Option<u32>,
    /// When the newest number of somebody else came that was left alone.
    left_alone: Option<i64>,
    /// Jobs that servers of the pool cannot work for.
    pub(super) strangers: Strangers,
    /// When numbers of others were taken over, the newest last; none before the first look, which reads them.
    taken_over: Option<Vec<Timestamp>>,
    /// Generation of the pool's object with the number that was taken over last. While it has that one, the write has not succeeded.
    taken_over_at: Option<i64>,
}

impl Memory {
    /// Notes what is in the spec, and that `current` servers follow from it.
    pub(super) fn meet(&mut self, observed: &Observed, current: u32, time: Timestamp) {
        let (pool, now) = (&observed.pool, time.as_second());
        let replicas = pool.spec.replicas;
        // One that is noted and not done yet is none before this.
        let noted = usize::from(self.is_noted(observed));
        let times = self.taken_over.get_or_insert_with(|| takeovers(observed, time));
        let is_full = is_full(&times[..times.len().saturating_sub(noted)], now);
        if is_ours(pool) {
            self.foreign = None;
            let written = self.intent.take_if(|it| it.to == replicas);
            self.decision = written.or(self.decision.take());
        } else if self.foreign != Some(replicas) {
            self.foreign = Some(replicas);
            let goes_on = self.left_alone.is_some_and(|it| now - it < QUIET_SECONDS);
            self.left_alone = (goes_on || is_full).then_some(now);
            // Whoever asks for more has them for a window at least.
            if self.number.is_some_and(|it| it < current) {
                self.since = Some(now);
            }
        }
        self.number = Some(current);
    }

    /// The number is written now. One of somebody else that the next look finds is a new one, though it be the same.
    pub(super) fn writes(&mut self, observed: &Observed, now: Timestamp) {
        self.foreign = None;
        if is_ours(&observed.pool) || self.is_noted(observed) {
            return;
        }
        self.taken_over_at = observed.pool.metadata.generation;
        let times = self.taken_over.get_or_insert_default();
        times.push(now);
        times.drain(..times.len().saturating_sub(TAKEOVERS));
    }

    /// Whether it was noted before that the number that is there is taken over.
    fn is_noted(&self, observed: &Observed) -> bool {
        let is_it = |it| Some(it) == observed.pool.metadata.generation;
        !is_ours(&observed.pool) && self.taken_over_at.is_some_and(is_it)
    }

    /// When numbers of others were taken over, as the pool's budget is to say it.
    pub(super) fn takeovers(&self) -> String {
        let times: Vec<_> = self.taken_over.iter().flatten().map(ToString::to_string).collect();
        times.join(",")
    }

    /// Whether the number that is there is left alone, since others write again and again.
    pub(super) fn leaves_alone(&self, now: i64) -> bool {
        self.foreign.is_some() && self.left_alone.is_some_and(|it| now - it < QUIET_SECONDS)
    }

    pub(super) fn look(&mut self, now: i64, wish: u32, window: i64) {
        self.since.get_or_insert(now);
        // Looks closer together than the window's share of the memory count as one, by their largest.
        let apart = (window / REMEMBERED as i64).max(1);
        match self.looks.back_mut() {
            Some((at, most)) if now - *at < apart => *most = wish.max(*most),
            _ => self.looks.push_back((now, wish)),
        }
        while self.looks.front().is_some_and(|&(at, _)| at + window < now)
            || self.looks.len() > REMEMBERED + 2
        {
            self.looks.pop_front();
        }
    }

    /// The least that was wanted in the last looks; 0 until there are two, some seconds apart.
    pub(super) fn lacked(&self, now: i64) -> u32 {
        let recent = || self.looks.iter().filter(|(at, _)| at + 2 * LOOK_SECONDS >= now);
        let apart = recent().map(|(at, _)| now - at).max().unwrap_or(0);
        let least = recent().map(|&(_, wish)| wish).min().unwrap_or(0);
        if apart < LOOK_SECONDS { 0 } else { least }
    }

    /// The most that was wanted within the window; `current` until the memory covers it.
    pub(super) fn sufficed(&self, now: i64, window: i64, current: u32) -> u32 {
        if self.since.is_none_or(|it| now - it < window) {
            return current;
        }
        let most = self.looks.iter().map(|&(_, wish)| wish).max();
        most.map_or(current, |it| it.min(current))
    }
}
