//! What the control service tells the reconciles: connected servers, their load, the progress of jobs.
//!
//! In: what workers report, many times a second. Out: what a status may say. What changes a decision at
//! once (who is connected, drained, kept out) is there at once; load and progress are refreshed every
//! [`FIGURES`], so that raw reports never reach the API server, and at rest nothing changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cadre_control::proto;
use cadre_crds::{Progress, TrainingJobStatus};
use cadre_desired::job::{Arrived, LastWords};
use cadre_desired::pool::Report;
use cadre_views::{JobKey, Unserved};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::Notify;

use crate::triggers::Key;

/// Interval at which load and progress go into statuses.
pub(crate) const FIGURES: Duration = Duration::from_secs(10);
/// Time from the start of a leader until every worker has had a chance to come back.
const COMPLETE: Duration = Duration::from_secs(15);
/// How long it is known when a server lost its connection.
const LOST_KEPT: i64 = 60;

/// What workers have reported, shared between the control service and the reconciles.
#[derive(Debug, Default)]
pub(crate) struct Told {
    inner: Mutex<Inner>,
    /// Wakes the control service when last figures were written.
    pub(crate) written: Notify,
}

/// Since when workers can connect.
#[derive(Clone, Copy, Debug, Default)]
enum Since {
    /// There is no service.
    #[default]
    Never,
    /// The service has not begun.
    Later,
    /// The service began at this time.
    At(Instant),
}

#[derive(Debug, Default)]
struct Inner {
    since: Since,
    /// What statuses show, by pool.
    pools: BTreeMap<Key, Servers>,
    /// Newest reports, for metrics.
    live: BTreeMap<Key, BTreeMap<String, Report>>,
    /// Figures of the newest job of each name.
    jobs: BTreeMap<Key, JobFigures>,
    /// Jobs whose status does not hold the last figures of an attempt yet.
    owed: BTreeSet<Key>,
    attached: Trainers,
    /// Attempts without servers, by pool.
    unserved: BTreeMap<Key, BTreeMap<JobKey, Unserved>>,
}

/// Trainers that are connected, by attempt and rank, of each job.
pub(crate) type Trainers = BTreeMap<Key, BTreeSet<(u32, u32)>>;

/// A pool's servers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Servers {
    /// Reports of the dedicated ones, by the name of the pod.
    pub(crate) reports: BTreeMap<String, Report>,
    /// The attempts that they work for, by the name of the pod.
    pub(crate) holders: BTreeMap<String, JobKey>,
    /// Servers of the shares of attempts that others have, since these use none.
    pub(crate) lent: BTreeMap<JobKey, u32>,
    /// Trainers that serve in place.
    pub(crate) in_place: u32,
    /// When those that are not connected lost their connection, by the name of the pod.
    pub(crate) lost: BTreeMap<String, Timestamp>,
}

/// Progress of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct JobFigures {
    /// Uid of the `TrainingJob`; empty for a job of another kind. A job that was made anew under
    /// the same name begins without figures.
    pub(crate) uid: String,
    pub(crate) progress: Option<Progress>,
    pub(crate) gaps: Gaps,
    pub(crate) failovers: u32,
    /// Steps in the newest checkpoint that a worker reported.
    pub(crate) checkpoint: u64,
    /// Whether the attempt's conductor has said its last word.
    pub(crate) is_over: bool,
    /// Last message of an attempt that has failed, until its conductor says farewell.
    pub(crate) last_words: Option<LastWords>,
    /// Trainers of the newest attempt that have joined, also those that have left since.
    pub(crate) joined: Arrived,
}

/// How far the plans of the newest step are above the lower bounds, as fractions; none where no
/// bound is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Gaps {
    /// Last finish.
    pub(crate) compute: Option<f64>,
    /// Busiest link.
    pub(crate) link: Option<f64>,
    /// Bytes pulled.
    pub(crate) bytes: Option<f64>,
}

impl Gaps {
    pub(crate) fn of(step: &proto::Progress) -> Self {
        Self { compute: step.gap_compute, link: step.gap_link, bytes: step.gap_bytes }
    }
}

impl Told {
    /// For an operator whose control service will begin: until then it is not known which servers
    /// are connected.
    pub(crate) fn awaiting() -> Self {
        let inner = Inner { since: Since::Later, ..Inner::default() };
        Self { inner: Mutex::new(inner), written: Notify::default() }
    }

    pub(crate) fn start(&self) {
        self.locked().since = Since::At(Instant::now());
    }

    /// A pool's servers, and whether every connected one is among them.
    pub(crate) fn pool(&self, key: &Key) -> (Servers, bool) {
        let inner = self.locked();
        let complete = match inner.since {
            Since::Never => true,
            Since::Later => false,
            Since::At(it) => it.elapsed() >= COMPLETE,
        };
        (inner.pools.get(key).cloned().unwrap_or_default(), complete)
    }

    /// Time until all have had a chance to come back, if that is to come.
    pub(crate) fn completes_in(&self) -> Option<Duration> {
        match self.locked().since {
            Since::Never => None,
            Since::Later => Some(COMPLETE),
            Since::At(it) => Some(COMPLETE.saturating_sub(it.elapsed())).filter(|it| !it.is_zero()),
        }
    }

    /// Newest reports of all servers, for metrics; they are not part of any status.
    pub(crate) fn live(&self) -> Vec<(Key, String, Report)> {
        let inner = self.locked();
        let of_pool = |(key, reports): (&Key, &BTreeMap<String, Report>)| -> Vec<_> {
            reports.iter().map(|(pod, report)| (key.clone(), pod.clone(), report.clone())).collect()
        };
        inner.live.iter().flat_map(of_pool).collect()
    }

    /// How good the plans of the jobs are, for metrics.
    pub(crate) fn gaps(&self) -> Vec<(Key, Gaps)> {
        self.locked().jobs.iter().map(|(key, it)| (key.clone(), it.gaps)).collect()
    }

    /// Figures of the `TrainingJob` with this uid.
    pub(crate) fn job(&self, key: &Key, uid: &str) -> JobFigures {
        self.locked().jobs.get(key).filter(|it| it.uid == uid).cloned().unwrap_or_default()
    }

    /// Stores a pool's servers; returns whether a reconcile should run at once. With `figures`, load
    /// goes into the status too.
    pub(crate) fn tell_pool(&self, key: &Key, mut servers: Servers, figures: bool) -> bool {
        let mut inner = self.locked();
        inner.live.insert(key.clone(), servers.reports.clone());
        let before = inner.pools.entry(key.clone()).or_default();
        if !figures {
            for (pod, report) in &mut servers.reports {
                let old = before.reports.get(pod).map(|it| (it.busy_ppm, it.slow_factor_percent));
                (report.busy_ppm, report.slow_factor_percent) = old.unwrap_or_default();
            }
        }
        let (now, there) = (Timestamp::now(), &servers.reports);
        let mut lost = std::mem::take(&mut before.lost);
        lost.extend(before.reports.keys().map(|it| (it.clone(), now)));
        lost.retain(|pod, at| {
            !there.contains_key(pod) && now.as_second() - at.as_second() < LOST_KEPT
        });
        // Only who has lost it is news.
        let changed = before.reports != servers.reports
            || before.holders != servers.holders
            || before.lent != servers.lent
            || before.in_place != servers.in_place;
        servers.lost = lost;
        *before = servers;
        changed
    }

    /// Tells a job's figures; whether they are new.
    pub(crate) fn tell_job(&self, key: &Key, figures: &JobFigures) -> bool {
        let mut inner = self.locked();
        let changed = inner.jobs.get(key) != Some(figures);
        inner.jobs.insert(key.clone(), figures.clone());
        if changed && figures.is_over {
            inner.owed.insert(key.clone());
        } else if !figures.is_over {
            inner.owed.remove(key);
        }
        changed
    }

    /// Whether a job's status is still to hold the last figures of an attempt.
    pub(crate) fn owes(&self, key: &Key) -> bool {
        self.locked().owed.contains(key)
    }

    /// The status of the job with this uid was written, or is as it was; none where there is none to write. Last figures that it
    /// holds are owed no more.
    pub(crate) fn wrote(&self, key: &Key, uid: &str, status: Option<&TrainingJobStatus>) {
        let mut inner = self.locked();
        let Some(figures) = inner.jobs.get(key).filter(|it| it.uid == uid) else { return };
        let holds = status.is_none_or(|it| {
            let is_step = figures.progress.is_none() || it.progress == figures.progress;
            is_step && it.failovers >= figures.failovers
        });
        if holds && inner.owed.remove(key) {
            self.written.notify_one();
        }
    }

    /// Trainers of a job that are connected.
    pub(crate) fn attached(&self, key: &Key) -> BTreeSet<(u32, u32)> {
        self.locked().attached.get(key).cloned().unwrap_or_default()
    }

    /// Tells all trainers that are connected. Out: the jobs of which that is news.
    pub(crate) fn tell_attached(&self, now: Trainers) -> Vec<Key> {
        let attached = &mut self.locked().attached;
        let of_both: BTreeSet<_> = attached.keys().chain(now.keys()).collect();
        let is_news = |it: &&Key| attached.get(*it) != now.get(*it);
        let news = of_both.into_iter().filter(is_news).cloned().collect();
        *attached = now;
        news
    }

    /// Tells the attempts of a pool that have no servers. Out: those of which that is news.
    pub(crate) fn tell_unserved(&self, pool: &Key, now: BTreeMap<JobKey, Unserved>) -> Vec<JobKey> {
        let before = &mut self.locked().unserved;
        let before = before.entry(pool.clone()).or_default();
        let of_both: BTreeSet<_> = before.keys().chain(now.keys()).collect();
        let is_news = |it: &&JobKey| before.get(*it) != now.get(*it);
        let news = of_both.into_iter().filter(is_news).cloned().collect();
        *before = now;
        news
    }

    /// The attempts of a pool that have no servers, and why.
    pub(crate) fn unserved(&self, pool: &Key) -> BTreeMap<JobKey, Unserved> {
        self.locked().unserved.get(pool).cloned().unwrap_or_default()
    }

    /// The newest attempt of a job that has no servers, and why.
    pub(crate) fn unserved_attempt(&self, job: &Key) -> Option<(u32, Unserved)> {
        let inner = self.locked();
        let all = inner.unserved.values().flatten();
        let of_job = all.filter(|it| (&it.0.namespace, &it.0.name) == (&job.0, &job.1));
        of_job.map(|it| (it.0.attempt, *it.1)).max()
    }

    /// Forgets a pool that is gone.
    pub(crate) fn forget_pool(&self, key: &Key) {
        let mut inner = self.locked();
        inner.pools.remove(key);
        inner.live.remove(key);
        inner.unserved.remove(key);
    }

    /// Forgets the jobs that are gone.
    pub(crate) fn keep_jobs(&self, is_there: impl Fn(&Key) -> bool) {
        let mut inner = self.locked();
        inner.jobs.retain(|it, _| is_there(it));
        inner.owed.retain(is_there);
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_awaited_from_before_the_service_begins_and_where_there_is_none_never() {
        let key = ("n".to_owned(), "p".to_owned());
        let complete = |told: &Told| told.pool(&key).1;
        assert!(complete(&Told::default()));
        let told = Told::awaiting();
        assert!(!complete(&told));
        told.start();
        assert!(!complete(&told));
        let before = Instant::now().checked_sub(COMPLETE).expect("the machine is up for longer");
        told.locked().since = Since::At(before);
        assert!(complete(&told));
    }

    #[test]
    fn load_waits_for_its_turn_and_what_matters_does_not() {
        let told = Told::default();
        let key = ("n".to_owned(), "p".to_owned());
        let tell = |busy, quarantined, figures| {
            let report = Report { busy_ppm: Some(busy), quarantined, ..Report::default() };
            let reports = [("p-0-0".to_owned(), report)].into();
            told.tell_pool(&key, Servers { reports, ..Servers::default() }, figures)
        };
        assert!(tell(1, false, true), "a server is new");
        assert!(!tell(2, false, false), "load alone is no news");
        assert_eq!(told.pool(&key).0.reports["p-0-0"].busy_ppm, Some(1));
        assert!(tell(3, true, false), "it is kept out");
        assert_eq!(told.pool(&key).0.reports["p-0-0"].busy_ppm, Some(1));
        assert_eq!(told.live()[0].2.busy_ppm, Some(3), "who asks is told at once");
        assert!(tell(3, true, true));
        assert_eq!(told.pool(&key).0.reports["p-0-0"].busy_ppm, Some(3));
        told.forget_pool(&key);
        assert!(told.pool(&key).0.reports.is_empty() && told.live().is_empty(), "it is gone");
    }

    #[test]
    fn a_job_that_was_made_anew_does_not_begin_with_the_figures_of_the_one_before() {
        let told = Told::default();
        let key = ("n".to_owned(), "j".to_owned());
        let figures = JobFigures { uid: "1".into(), failovers: 3, ..JobFigures::default() };
        assert!(told.tell_job(&key, &figures));
        assert_eq!(told.job(&key, "1"), figures);
        assert_eq!(told.job(&key, "2"), JobFigures::default());
        told.keep_jobs(|_| false);
        assert_eq!(told.job(&key, "1"), JobFigures::default());
    }

    #[test]
    fn last_figures_are_owed_until_the_status_holds_them() {
        let told = Told::default();
        let key = ("n".to_owned(), "j".to_owned());
        let at = |step| Some(Progress { step, ..Progress::default() });
        let of = |progress, failovers, is_over| JobFigures {
            uid: "u".into(),
            progress,
            failovers,
            is_over,
            ..JobFigures::default()
        };
        let holds = |progress, failovers| {
            let status = TrainingJobStatus { progress, failovers, ..TrainingJobStatus::default() };
            told.wrote(&key, "u", Some(&status));
            !told.owes(&key)
        };
        told.tell_job(&key, &of(at(8), 0, false));
        assert!(!told.owes(&key), "it trains on");
        let last = of(at(9), 1, true);
        told.tell_job(&key, &last);
        assert!(!holds(at(8), 1) && !holds(at(9), 0), "a status of before");
        told.wrote(&key, "v", None);
        assert!(told.owes(&key), "another job");
        assert!(holds(at(9), 1));
        told.tell_job(&key, &last);
        assert!(!told.owes(&key), "said again");
        told.tell_job(&key, &of(at(10), 1, true));
        told.tell_job(&key, &of(None, 1, false));
        assert!(!told.owes(&key), "the next attempt has begun");
        told.tell_job(&key, &of(None, 1, true));
        assert!(holds(at(9), 1), "an attempt without a step");
        told.tell_job(&key, &last);
        told.wrote(&key, "u", None);
        assert!(!told.owes(&key), "nobody reads it");
        told.tell_job(&key, &of(at(11), 1, true));
        told.keep_jobs(|_| false);
        assert!(!told.owes(&key), "it is gone");
    }
}
