//! What a worker is told when it comes: the job's secret, its settings, and where the conductor listens.
//!
//! In: the objects of the pool and the job, as the caches have them. Out: a `Welcome`, or a refusal of a worker that cannot
//! be told all that the job says. Who is welcome is not decided here.

use cadre_control::{CONTROL_VERSION, proto};
use cadre_crds::Encryption;
use cadre_views::{Conductor, Input, JobKey, Who};
use kube::runtime::reflector::ObjectRef;

use super::service::Service;
use super::words;
use crate::triggers::Key;

/// Why a worker has no settings.
enum Why {
    /// An object is gone or cannot be read: the worker may come again, as a server of another job.
    Later(String),
    /// Its version cannot be told them.
    Never(String),
}

impl Service {
    pub(super) fn welcome(
        &mut self,
        worker: &(Key, Who),
        (job, resume): (JobKey, String),
        (job_secret, conductor): (Vec<u8>, Option<Conductor>),
    ) {
        let Some(link) = self.workers.get(worker) else { return };
        let version = link.control_version();
        match self.settings(&worker.0, &job, &resume, version) {
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
            Err(why) => {
                self.part(worker, |link| match why {
                    Why::Later(reason) => link.postpone(&reason),
                    Why::Never(reason) => link.refuse(&reason),
                });
                // The views take it for attached.
                self.put(&worker.0.clone(), Input::Detached(worker.1.clone()));
            }
        }
    }

    /// The text of a job's settings, or why there is none. Whoever was let in at the door came when the objects were there: one
    /// that is missing now was deleted.
    fn settings(&self, key: &Key, job: &JobKey, resume: &str, version: u32) -> Result<String, Why> {
        let caches = &self.context.caches;
        let training = caches.trainings.get(&ObjectRef::new(&job.name).within(&job.namespace));
        let training = training.as_ref().filter(|it| it.unreadable.is_none()).map(|it| &it.object);
        let pool = caches.pools.get(&ObjectRef::new(&key.1).within(&key.0));
        let pool =
            pool.ok_or_else(|| Why::Later(format!("AttentionPool {}/{} is gone", key.0, key.1)))?;
        // Not known if a server comes back before the trainers; it has heard these settings before.
        let is_described = training.is_some();
        let unknown = words::Attempt { trainers: 0, encryption: Encryption::Off, is_described };
        let attempt = self.attempts.get(job).copied().unwrap_or(unknown);
        if attempt.is_described && training.is_none() {
            let text = format!("TrainingJob {}/{} is gone", job.namespace, job.name);
            return Err(Why::Later(text));
        }
        let of = (job, self.jobs.failovers(job));
        let settings = words::settings(of, training, &pool.object, attempt, resume);
        let settings = settings.map_err(|it| Why::Never(it.to_string()))?;
        settings.to_text(version).map_err(|it| Why::Never(it.to_string()))
    }
}
