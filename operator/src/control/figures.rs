//! How far the jobs are that train now, as their conductors say.
//!
//! In: attempts that begin, report and end. Out: the figures of each job's newest attempt. An attempt that crashed says no last
//! word: its figures go when the next one begins, and what it says afterwards is not heard.

use std::collections::BTreeMap;

use cadre_crds::Progress;
use cadre_views::JobKey;

use super::told::JobFigures;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Figures(BTreeMap<JobKey, JobFigures>);

impl Figures {
    /// A worker of an attempt has come. Failovers go on from the attempt before or, if that is not known, from `failovers`,
    /// which another leader has counted.
    pub(super) fn begin(&mut self, attempt: &JobKey, failovers: u32) {
        let of_job = |it: &JobKey| (&it.namespace, &it.name) == (&attempt.namespace, &attempt.name);
        let last = self.0.iter().rfind(|it| of_job(it.0));
        let failovers = match last {
            Some((last, _)) if last.attempt >= attempt.attempt => return,
            Some((_, figures)) => figures.failovers,
            None => failovers,
        };
        self.0.retain(|it, _| !of_job(it));
        self.0.insert(attempt.clone(), JobFigures { progress: None, failovers });
    }

    /// An attempt has made a step, and so many failovers more.
    pub(super) fn step(&mut self, attempt: &JobKey, progress: Progress, failovers: u32) {
        if let Some(figures) = self.0.get_mut(attempt) {
            figures.failovers += failovers;
            figures.progress = Some(progress);
        }
    }

    /// The last figures of an attempt that has ended.
    pub(super) fn end(&mut self, attempt: &JobKey) -> Option<JobFigures> {
        self.0.remove(attempt)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(attempt: u32) -> JobKey {
        JobKey { namespace: "n".into(), name: "j".into(), attempt }
    }

    fn at(step: u64) -> Progress {
        Progress { step, ..Progress::default() }
    }

    #[test]
    fn an_attempt_that_crashed_is_not_told_of_again() {
        let mut figures = Figures::default();
        figures.begin(&attempt(1), 4);
        figures.step(&attempt(1), at(22), 1);
        figures.begin(&attempt(2), 0);
        figures.step(&attempt(1), at(23), 1);
        figures.begin(&attempt(1), 0);
        figures.step(&attempt(2), at(30), 2);
        figures.begin(&attempt(2), 0);
        let expected = JobFigures { progress: Some(at(30)), failovers: 7 };
        let all: Vec<_> =
            figures.of_those(|_| true).map(|(key, it)| (key.attempt, it.clone())).collect();
        assert_eq!(all, [(2, expected.clone())]);
        assert_eq!(figures.end(&attempt(2)), Some(expected));
        assert_eq!(figures.of_those(|_| true).count(), 0);
    }

    #[test]
    fn jobs_are_apart_and_those_that_are_gone_are_forgotten() {
        let mut figures = Figures::default();
        let other = JobKey { name: "k".into(), ..attempt(9) };
        figures.begin(&other, 1);
        figures.begin(&attempt(1), 2);
        let failovers: Vec<_> = figures.of_those(|_| true).map(|it| it.1.failovers).collect();
        assert_eq!(failovers, [2, 1]);
        assert_eq!(figures.of_those(|it| it.name == "k").count(), 1);
        assert_eq!(figures.end(&attempt(1)), None);
    }
}
