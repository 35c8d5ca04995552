//! Jobs that rest, in the world: what their servers report, and who asks whether it may leave.

use std::time::Duration;

use cadre_views::{Input, Report, Who};

use super::world::{World, key, names};

/// How a job does not use its servers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Rest {
    /// No step is out.
    Between,
    /// One is, and its trainers compute something else.
    Within,
}

impl World {
    /// No step of the job is out from now on: it evaluates, for example.
    pub(crate) fn rest(&mut self, job: &str) {
        self.resting.insert(key(job), Rest::Between);
    }

    /// Its trainers go on: the header of a step goes out.
    pub(crate) fn go_on(&mut self, job: &str) {
        self.resting.remove(&key(job));
        let conductor = self.workers.get(&Who::Trainer(key(job), 0));
        if let Some(view) = conductor.and_then(|it| it.hello.view.clone()) {
            self.stepped.insert(key(job), view);
            self.awake.insert(key(job));
        }
    }

    /// A server leaves its job.
    pub(crate) fn leave(&mut self, who: &Who, stays: bool) {
        let Some(worker) = self.workers.get_mut(who) else { return };
        worker.job = None;
        worker.hello.session.clear();
        worker.hello.address.clear();
        worker.drained = !stays;
        self.put(Input::Drained(who.clone()));
        self.put(Input::Detached(who.clone()));
        if stays {
            self.greet(who);
        }
    }

    /// The conductor lets those go that ask, if no step that is out counts on them.
    pub(crate) fn answer(&mut self, job: &str) {
        let key = key(job);
        for (who, stays) in self.asking.clone() {
            let Who::Server(id) = who else { continue };
            let of_job = self.workers.get(&who).is_some_and(|it| it.job.as_ref() == Some(&key));
            if of_job && !self.stepped.get(&key).is_some_and(|it| names(it, id)) {
                self.asking.remove(&who);
                self.leave(&who, stays);
            }
        }
    }

    /// The servers in the newest view of a job, without the slots that are vacant.
    pub(crate) fn servers_of(&self, job: &str) -> Vec<String> {
        let view = self.view(job);
        view.split(' ').skip(1).filter(|it| *it != "D-").map(str::to_owned).collect()
    }

    /// Whether steps of the job end.
    pub(crate) fn trains(&self, job: &str) -> bool {
        !self.resting.contains_key(&key(job))
    }

    /// As [`Self::pass`], in one step.
    pub(crate) fn leap(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.put(Input::Tick);
    }

    /// Seconds in which every server reports.
    pub(crate) fn live(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.pass(1);
            self.report(&[1_000_000; 16]);
        }
    }

    /// Servers report these speeds, in their order.
    pub(crate) fn report(&mut self, speeds: &[u64]) {
        let servers = self.workers.keys().filter(|it| matches!(it, Who::Server(_))).cloned();
        for (who, speed) in servers.collect::<Vec<_>>().into_iter().zip(speeds) {
            let job = self.workers.get(&who).and_then(|it| it.job.as_ref());
            let rest = job.and_then(|it| self.resting.get(it));
            let report = match rest {
                Some(rest) => Report { is_spare: *rest == Rest::Between, ..Report::default() },
                None => Report {
                    busy_ppm: 500_000,
                    cost: speed / 2,
                    busy_nanoseconds: 500_000_000,
                    is_spare: false,
                },
            };
            self.put(Input::Reported(who, report));
        }
        self.awake.clear();
    }

    /// Seconds in which every server reports now and then.
    pub(crate) fn live_slowly(&mut self, seconds: u64) {
        for _ in 0..seconds / 5 {
            self.leap(5);
            self.report(&[1_000_000; 16]);
        }
    }

    /// So many rounds of a second each, in which these jobs end a step, and all servers report.
    pub(crate) fn train(&mut self, jobs: &[&str], rounds: u64) {
        for _ in 0..rounds {
            self.live(1);
            for job in jobs {
                self.step(job);
            }
        }
    }

    pub(crate) fn held<const N: usize>(&self, jobs: [&str; N]) -> [usize; N] {
        jobs.map(|it| self.held_by(it))
    }
}
