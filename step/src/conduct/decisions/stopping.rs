//! How a job ends before its last step: the controller stops it, or a pool that is lost keeps it waiting.
//!
//! In: the order of the controller or of a trainer that was asked to end, which steps have no server. Out: the end, told to all;
//! notices of who was asked and of the pool.

use super::{About, Acts, Command, Decisions};
use crate::envelope::Ending;

impl Decisions {
    /// A trainer's process was asked to end: the job ends after the last step that is out.
    pub(super) fn asked(&mut self, acts: &mut Acts<'_>, trainer: u16) {
        if self.stop.is_none() && self.ending.is_none() {
            let text = format!(
                "trainer {trainer} was asked to end: the job stops after the steps that are out"
            );
            acts.say(About::Warning, text);
        }
        self.stop(acts, true);
    }

    /// The controller wants the job to end after the last step that is out.
    pub(super) fn stop(&mut self, acts: &mut Acts<'_>, checkpoint: bool) {
        self.stop = Some(Ending::Stopped { checkpoint });
        self.stop_lost(acts);
        self.proceed(acts);
    }

    /// Whether the earliest step that is not whole has no server for some of its work.
    pub(super) fn waits_for_the_pool(&self) -> bool {
        self.pool_lost.contains(&self.whole)
    }

    /// A job that is to stop does not wait for a pool that may never come back. It does wait until the steps before are over at all
    /// trainers: those need no server any more, and each trainer ends with the same step.
    pub(super) fn stop_lost(&mut self, acts: &mut Acts<'_>) {
        let are_over = self.published.range(..self.whole).next().is_none();
        let is_cut = are_over && self.ending.is_none() && self.waits_for_the_pool();
        if let Some(stopped) = self.stop.clone().filter(|_| is_cut) {
            self.over_where_done(acts);
            self.close(acts, stopped);
        }
    }

    /// A step has servers again, or for the first time.
    pub(super) fn pool_is_back(&mut self, acts: &mut Acts<'_>, step: u64) {
        if self.pool_lost.remove(&step) {
            acts.say(About::PoolBack, format!("step {step} goes on"));
        }
    }

    /// No step follows: every trainer is told.
    pub(super) fn close(&mut self, acts: &mut Acts<'_>, ending: Ending) {
        self.ending.get_or_insert_with(|| ending.clone());
        if let Ending::Failed { .. } = ending {
            self.tell_all_over(acts);
        }
        // Who has heard of the end leaves, and tells nobody of steps any more.
        if self.telling.is_empty() {
            self.closing = None;
            acts.put(Command::Ending(ending));
        } else {
            self.closing = Some(ending);
        }
    }
}
