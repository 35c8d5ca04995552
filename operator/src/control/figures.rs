//! How far the jobs are that train now, as their conductors say.
//!
//! In: attempts that begin, report and end. Out: the figures of each job's newest attempt. Those of an attempt go when the next
//! one begins, whether it said a last word or crashed, and what it says afterwards is not heard.
//!
//! Failovers are counted by conductors, as totals of their job: an attempt's conductor goes on from what it is told here when it
//! comes. So a report that is read twice, or by another leader, counts once. Invariant: they never go back.

use std::collections::BTreeMap;

use cadre_crds::Progress;
use cadre_desired::job::LastWords;
use cadre_views::JobKey;

use crate::context::Context;
use crate::told::{Gaps, JobFigures};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Figures(BTreeMap<JobKey, JobFigures>);

impl Figures {
    /// A worker of the job with this uid has come, in this attempt. The count of failovers
    /// continues from the attempt before, or from `failovers`, which an earlier leader had heard.
    /// Figures of another job of the same name are dropped.
    pub(super) fn begin(&mut self, attempt: &JobKey, uid: &str, failovers: u32) {
        let of_job = |it: &JobKey| (&it.namespace, &it.name) == (&attempt.namespace, &attempt.name);
        let last = self.0.iter().rfind(|it| of_job(it.0) && it.1.uid == uid);
        let (failovers, checkpoint) = match last {
            Some((last, _)) if last.attempt >= attempt.attempt => return,
            Some((_, figures)) => (figures.failovers.max(failovers), figures.checkpoint),
            None => (failovers, 0),
        };
        self.0.retain(|it, _| !of_job(it));
        let uid = uid.to_owned();
        let figures = JobFigures { uid, failovers, checkpoint, ..JobFigures::default() };
        self.0.insert(attempt.clone(), figures);
    }

    /// Whether what is known of an attempt is of another job of the same name.
    pub(super) fn is_of_another(&self, attempt: &JobKey, uid: &str) -> bool {
        self.0.get(attempt).is_some_and(|it| it.uid != uid)
    }

    /// Failovers of the job of an attempt so far.
    pub(super) fn failovers(&self, attempt: &JobKey) -> u32 {
        self.0.get(attempt).map_or(0, |it| it.failovers)
    }

    /// An attempt has done a step; its job had `failovers` so far.
    pub(super) fn step(
        &mut self,
        attempt: &JobKey,
        (progress, gaps): (Progress, Gaps),
        failovers: u32,
    ) {
        if let Some(figures) = self.0.get_mut(attempt) {
            (figures.is_over, figures.last_words) = (false, None);
            figures.gaps = gaps;
            figures.failovers = figures.failovers.max(failovers);
            figures.progress = Some(progress);
        }
    }

    /// A trainer of an attempt has joined. Returns the figures if it had not before.
    pub(super) fn joined(&mut self, attempt: &JobKey, rank: u32) -> Option<&JobFigures> {
        let figures = self.0.get_mut(attempt)?;
        figures.joined.attempt = attempt.attempt;
        figures.joined.ranks.insert(rank).then_some(figures)
    }

    /// A checkpoint of an attempt holds `steps` steps. Returns the figures if it is the newest. A
    /// number that a status cannot hold is ignored, since the API server would refuse the whole
    /// status.
    pub(super) fn saved(&mut self, attempt: &JobKey, steps: u64) -> Option<&JobFigures> {
        i64::try_from(steps).ok()?;
        let figures = self.0.get_mut(attempt).filter(|it| it.checkpoint < steps)?;
        figures.checkpoint = steps;
        Some(figures)
    }

    /// The conductor of an attempt has said its last word, which says why if it has failed. Its figures stay: others of its trainers
    /// may come after that. Out: the figures.
    pub(super) fn end(&mut self, attempt: &JobKey, why: Option<LastWords>) -> Option<&JobFigures> {
        let figures = self.0.get_mut(attempt)?;
        (figures.is_over, figures.last_words) = (true, why);
        Some(figures)
    }

    /// The conductor of an attempt ends by itself.
    pub(super) fn leaves(&mut self, attempt: &JobKey) -> Option<&JobFigures> {
        let figures = self.0.get_mut(attempt)?;
        figures.last_words = None;
        Some(figures)
    }

    /// All, and only those, that `is_there` knows.
    pub(super) fn of_those(
        &mut self,
        is_there: impl Fn(&JobKey) -> bool,
    ) -> impl Iterator<Item = (&JobKey, &JobFigures)> {
        self.0.retain(|it, _| is_there(it));
        self.0.iter()
    }
}

/// Tells the reconciles the figures of an attempt's job, if they are new.
pub(super) fn tell_job(context: &Context, key: &JobKey, figures: &JobFigures) {
    let of = (key.namespace.clone(), key.name.clone());
    if context.told.tell_job(&of, figures) {
        context.caches.job_triggers.put(of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(attempt: u32) -> JobKey {
        JobKey { namespace: "n".into(), name: "j".into(), attempt }
    }

    fn at(step: u64) -> (Progress, Gaps) {
        (Progress { step, ..Progress::default() }, Gaps::default())
    }

    fn of(uid: &str, (progress, _): (Progress, Gaps), failovers: u32) -> JobFigures {
        let (uid, progress) = (uid.to_owned(), Some(progress));
        JobFigures { uid, progress, failovers, ..JobFigures::default() }
    }

    #[test]
    fn an_attempt_that_crashed_is_not_told_of_again() {
        let mut figures = Figures::default();
        figures.begin(&attempt(1), "u", 4);
        figures.step(&attempt(1), at(22), 5);
        figures.begin(&attempt(2), "u", 0);
        assert_eq!(figures.failovers(&attempt(2)), 5);
        figures.step(&attempt(1), at(23), 9);
        figures.begin(&attempt(1), "u", 0);
        figures.step(&attempt(2), at(30), 7);
        figures.begin(&attempt(2), "u", 0);
        let expected = of("u", at(30), 7);
        let all: Vec<_> =
            figures.of_those(|_| true).map(|(key, it)| (key.attempt, it.clone())).collect();
        assert_eq!(all, [(2, expected.clone())]);
        let over = JobFigures { is_over: true, ..expected.clone() };
        assert_eq!(figures.end(&attempt(2), None), Some(&over));
        figures.begin(&attempt(2), "u", 0);
        assert_eq!(figures.of_those(|_| true).next().map(|it| it.1), Some(&over), "one came late");
        figures.step(&attempt(2), at(30), 7);
        assert_eq!(figures.of_those(|_| true).next().map(|it| it.1), Some(&expected), "it goes on");
    }

    #[test]
    fn the_newest_checkpoint_of_a_job_stays_known_and_is_news_once() {
        let mut figures = Figures::default();
        assert_eq!(figures.saved(&attempt(1), 10), None, "of nobody");
        figures.begin(&attempt(1), "u", 0);
        for (steps, news) in [(0, false), (20, true), (20, false), (10, false), (40, true)] {
            assert_eq!(figures.saved(&attempt(1), steps).is_some(), news, "{steps}");
        }
        assert_eq!(figures.saved(&attempt(1), u64::MAX), None, "no status holds it");
        figures.begin(&attempt(2), "u", 0);
        assert_eq!(figures.saved(&attempt(1), 60), None, "of an attempt that is over");
        assert_eq!(figures.of_those(|_| true).map(|it| it.1.checkpoint).max(), Some(40));
        assert_eq!(figures.saved(&attempt(2), 40), None);
        figures.begin(&attempt(1), "other", 0);
        assert!(figures.saved(&attempt(1), 1).is_some(), "another job");
    }

    #[test]
    fn a_job_that_was_made_anew_begins_anew() {
        let mut figures = Figures::default();
        figures.begin(&attempt(3), "u", 4);
        figures.begin(&attempt(1), "other", 0);
        figures.step(&attempt(3), at(9), 5);
        figures.step(&attempt(1), at(2), 1);
        let expected = of("other", at(2), 1);
        assert_eq!(
            figures.of_those(|_| true).map(|it| it.1.clone()).collect::<Vec<_>>(),
            [expected]
        );
    }

    /// A job whose conductor reports to one leader after the other; each finds what the one before it had written.
    #[test]
    fn failovers_are_counted_once_whoever_hears_of_them_and_how_often() {
        for seed in 1..=200_u64 {
            let mut state = seed;
            let mut pick = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let (mut figures, mut written, mut number) = (Figures::default(), 0, 1);
            figures.begin(&attempt(1), "u", 0);
            // What the conductor has counted, and what it said last.
            let (mut counted, mut said) = (0, None);
            for step in 0..60 {
                match pick(6) {
                    0 => {
                        figures = Figures::default();
                        figures.begin(&attempt(number), "u", written);
                    }
                    1 => {
                        number += 1;
                        figures.begin(&attempt(number), "u", written);
                        (counted, said) = (figures.failovers(&attempt(number)), None);
                    }
                    2 => {
                        let now = figures.failovers(&attempt(number));
                        assert!(now >= written, "seed {seed}: {now} after {written}");
                        written = now;
                    }
                    _ => {
                        counted += pick(3) as u32;
                        said = Some((at(step), counted));
                    }
                }
                // To a leader that has not heard it, or has.
                if let (Some((progress, total)), 0..2) = (&said, pick(3)) {
                    figures.step(&attempt(number), progress.clone(), *total);
                    let now = figures.failovers(&attempt(number));
                    assert_eq!(now, *total, "seed {seed}, step {step}");
                }
            }
        }
    }

    #[test]
    fn jobs_are_apart_and_those_that_are_gone_are_forgotten() {
        let mut figures = Figures::default();
        let other = JobKey { name: "k".into(), ..attempt(9) };
        figures.begin(&other, "u", 1);
        figures.begin(&attempt(1), "u", 2);
        let failovers: Vec<_> = figures.of_those(|_| true).map(|it| it.1.failovers).collect();
        assert_eq!(failovers, [2, 1]);
        assert_eq!(figures.of_those(|it| it.name == "k").count(), 1);
        assert_eq!(figures.end(&attempt(1), None), None);
    }
}
