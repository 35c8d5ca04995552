//! What a worker is told when it comes: the job's secret, its settings, and where the conductor listens.
//!
//! In: the objects of the pool and the job, as the caches have them. Out: a `Welcome`, or a refusal of a worker that cannot
//! be told all that the job says. Who is welcome is not decided here.

use cadre_control::{CONTROL_VERSION, Settings, proto};
use cadre_crds::Encryption;
use cadre_views::{Conductor, JobKey, Who};
use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use super::words;
use crate::triggers::Key;

impl Service {
    pub(super) fn welcome(
        &mut self,
        worker: &(Key, Who),
        (job, resume): (JobKey, String),
        (job_secret, conductor): (Vec<u8>, Option<Conductor>),
    ) {
        let Some(link) = self.workers.get(worker) else { return };
        let version = link.control_version();
        match self.settings(&worker.0, &job, &resume).to_text(version) {
            Ok(settings) => {
                let welcome = proto::Welcome {
                    job_secret,
                    conductor: conductor.map(words::conductor),
                    settings,
                    control_version: CONTROL_VERSION,
                    session: job.to_string(),
                };
                self.send(worker, welcome);
            }
            Err(error) => self.refuse(worker, &error.to_string()),
        }
    }

    fn settings(&self, key: &Key, job: &JobKey, resume: &str) -> Settings {
        let caches = &self.context.caches;
        let training = caches.trainings.get(&ObjectRef::new(&job.name).within(&job.namespace));
        let training = training.as_ref().map(|it| &it.object);
        let pool = caches.pools.get(&ObjectRef::new(&key.1).within(&key.0));
        let pool = pool.as_ref().map(|it| &it.object);
        // Not known if a server comes back before the trainers; it has heard these settings before.
        let unknown = words::Attempt { trainers: 0, encryption: Encryption::Off };
        let attempt = self.attempts.get(job).copied().unwrap_or(unknown);
        words::settings((job, self.jobs.failovers(job)), training, pool, attempt, resume)
    }
}
