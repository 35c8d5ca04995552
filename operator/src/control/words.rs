//! The control service's messages in the words of the decisions, and back.
//!
//! In and out: plain data on both sides; nothing is decided here.

use std::collections::BTreeMap;

use cadre_control::manifest::{BadTolerance, BesideManifest};
use cadre_control::proto::finished::Outcome;
use cadre_control::{AttentionPlace, Settings, proto};
use cadre_crds::contract::ANNOTATION_ENCRYPTION;
use cadre_crds::{AttentionPool, Encryption, Progress, TrainingJob};
use cadre_desired::job::LastWords;
use cadre_desired::pool::Link;
use cadre_views::{
    Command, Conductor, Hello, JobKey, Kind, Number, Report, Server, Slot, Trainer, View,
};
use k8s_openapi::jiff::Timestamp;

/// Facts of an attempt that come from its trainers' pods.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Attempt {
    pub(super) trainers: u32,
    /// Encryption that the attempt began with; the job's spec may have changed since.
    pub(super) encryption: Encryption,
    /// Whether a `TrainingJob` describes the job.
    pub(super) is_described: bool,
}

pub(super) fn hello(hello: proto::Hello) -> Hello {
    Hello {
        incarnation: hello.incarnation,
        data_version: hello.data_version,
        address: hello.exchange_address,
        ring: hello.ring_address,
        memory: hello.memory_bytes,
        numerics: hello.numerics_id,
        secret: hello.job_secret,
        session: hello.session,
        view: hello.view.as_ref().map(view_of),
        resume: hello.resume,
    }
}

pub(super) fn report(report: &proto::ServerReport) -> Report {
    let proto::ServerReport { busy_ppm, cost, busy_nanoseconds, spare, .. } = *report;
    Report { busy_ppm, cost, busy_nanoseconds, is_spare: spare }
}

/// The slowest way to a trainer that a server has measured.
pub(super) fn slowest(measured: &proto::Probed) -> Option<Link> {
    let slowest = measured.probes.iter().min_by_key(|it| (it.mbps, it.trainer))?;
    let proto::Probe { trainer, mbps, ref path, ref why, .. } = *slowest;
    Some(Link { mbps, trainer, is_tcp: path == "tcp", why: why.clone() })
}

/// How many trainers a server reaches by each path.
pub(super) fn paths(measured: &proto::Probed) -> BTreeMap<String, u32> {
    let mut paths = BTreeMap::new();
    for probe in measured.probes.iter().filter(|it| it.mbps > 0) {
        *paths.entry(probe.path.clone()).or_default() += 1;
    }
    paths
}

pub(super) fn number(number: proto::ViewNumber) -> Number {
    Number { term: number.term, counter: number.counter }
}

fn view_of(view: &proto::View) -> View {
    let slots = view.slots.iter().map(|slot| Slot {
        number: slot.slot,
        weight: slot.weight,
        kind: match slot.kind() {
            proto::Kind::InPlace => Kind::InPlace,
            proto::Kind::Dedicated | proto::Kind::Unspecified => Kind::Dedicated,
        },
        server: slot.server.as_ref().map(|it| Server {
            index: it.index,
            incarnation: it.incarnation,
            address: it.exchange_address.clone(),
            memory: it.memory_bytes,
            numerics: it.numerics_id.clone(),
        }),
    });
    View { number: number(view.number.unwrap_or_default()), slots: slots.collect() }
}

pub(super) fn view(view: View) -> proto::View {
    let slots = view.slots.into_iter().map(|slot| proto::Slot {
        slot: slot.number,
        weight: slot.weight,
        kind: match slot.kind {
            Kind::Dedicated => proto::Kind::Dedicated,
            Kind::InPlace => proto::Kind::InPlace,
        }
        .into(),
        server: slot.server.map(|it| proto::Server {
            index: it.index,
            incarnation: it.incarnation,
            exchange_address: it.address,
            memory_bytes: it.memory,
            numerics_id: it.numerics,
        }),
    });
    let proto_number = proto::ViewNumber { term: view.number.term, counter: view.number.counter };
    proto::View { number: Some(proto_number), slots: slots.collect() }
}

pub(super) fn conductor(conductor: Conductor) -> proto::Conductor {
    let Conductor { incarnation, address, ring } = conductor;
    proto::Conductor { exchange_address: address, ring_address: ring, incarnation }
}

pub(super) fn trainers(trainers: Vec<Trainer>) -> proto::Trainers {
    let trainer = |it: Trainer| proto::Trainer {
        incarnation: it.incarnation,
        exchange_address: it.address,
        ring_address: it.ring,
    };
    proto::Trainers { trainers: trainers.into_iter().map(trainer).collect() }
}

/// Settings of a job for a worker, with its failovers so far. No `TrainingJob` describes a job of another kind.
pub(super) fn settings(
    (key, failovers): (&JobKey, u32),
    job: Option<&TrainingJob>,
    pool: &AttentionPool,
    Attempt { trainers, encryption, .. }: Attempt,
    resume: &str,
) -> Result<Settings, BadTolerance> {
    let own = BesideManifest {
        job: key.name.clone(),
        attempt: key.attempt,
        trainers: u16::try_from(trainers).unwrap_or(u16::MAX),
        attention: AttentionPlace::Pool,
        encryption,
        // The pod's environment says where.
        checkpoints: std::path::PathBuf::new(),
        failovers,
        resume: Some(resume).filter(|it| !it.is_empty()).map(Into::into),
        headers: None,
        faults: Vec::new(),
    };
    Settings::of(job.map(|it| &it.spec), &pool.spec.health, own)
}

/// Why a trainer may not join: its pod's annotation about encryption differs from those of earlier
/// pods.
pub(super) fn parted(job: &JobKey, first: Encryption, own: Encryption) -> String {
    format!(
        "job {job} has links that are {first:?}, and this pod's annotation {ANNOTATION_ENCRYPTION} says {own:?}; give all \
         pods of the job the same"
    )
}

/// The worker that a command is for.
pub(super) fn to(command: &Command) -> Option<&cadre_views::Who> {
    match command {
        Command::Welcome { to, .. }
        | Command::Postpone(to, _)
        | Command::Refuse(to, _)
        | Command::Conductor(to, _)
        | Command::Trainers(to, _)
        | Command::View(to, _)
        | Command::Drain { to, .. } => Some(to),
        Command::Notice(..) => None,
    }
}

/// Steps in the checkpoint at a path, by its name, `step-N`; of another name, or none, 0.
pub(super) fn steps_in(path: &str) -> u64 {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.strip_prefix("step-").and_then(|it| it.parse().ok()).unwrap_or(0)
}

/// The conductor's last message, if its attempt has failed.
pub(super) fn last_words(attempt: u32, said: proto::Finished) -> Option<LastWords> {
    let failed = said.outcome() == Outcome::Failed;
    let since = Timestamp::now();
    failed.then_some(LastWords { attempt, since, exit_code: said.exit_code, text: said.message })
}

/// A job's status from a step's report.
pub(super) fn progress(step: &proto::Progress) -> Progress {
    let (done, total) = (step.step + 1, step.steps.max(step.step + 1));
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    Progress {
        step: done,
        total,
        percent: u32::try_from(done * 100 / total).unwrap_or(100),
        eta_seconds: ((total - done) as f64 * step.seconds) as u64,
        tokens_per_second: share(step.tokens as f64, step.seconds) as u64,
        exposed_wait_percent: (share(step.exposed_wait_seconds, step.seconds) * 100.0) as u32,
        imbalance_percent: (step.imbalance * 100.0) as u32,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn steps_are_read_from_the_name_of_a_checkpoint() {
        for (path, steps) in [("/a/j-12/step-40", 40), ("step-7", 7), ("/step-3/x", 0), ("", 0)] {
            assert_eq!(steps_in(path), steps, "{path}");
        }
    }

    #[test]
    fn workers_are_told_of_a_manifest_what_the_supervisor_tells_them() {
        let text = include_str!("../../../testing/manifest.json");
        let all: BTreeMap<String, Value> = serde_json::from_str(text).expect("JSON");
        let job: TrainingJob = serde_json::from_value(all["job"].clone()).expect("a job");
        let pool = serde_json::from_value(all["pool"].clone()).expect("a pool");
        let key = JobKey { namespace: "n".into(), name: "bible".into(), attempt: 1 };
        let attempt = Attempt {
            trainers: job.spec.trainers(),
            encryption: job.spec.attention.encryption.expect("it says one"),
            is_described: true,
        };
        let settings = settings((&key, 0), Some(&job), &pool, attempt, "").expect("settings");
        let told = serde_json::to_value(settings).expect("plain data");
        let (told, expected) = (told.as_object(), all["settings"].as_object());
        let (told, expected) = told.zip(expected).expect("all fields");
        assert!(told.keys().eq(expected.keys()), "{told:?}");
        for (field, value) in expected {
            assert_eq!(told[field], *value, "{field}");
        }
    }

    #[test]
    fn progress_is_of_steps_done() {
        let step = proto::Progress {
            step: 24,
            steps: 50,
            tokens: 4096,
            seconds: 2.0,
            exposed_wait_seconds: 0.1,
            imbalance: 1.05,
            ..proto::Progress::default()
        };
        let progress = progress(&step);
        assert_eq!((progress.step, progress.total, progress.percent), (25, 50, 50));
        assert_eq!((progress.eta_seconds, progress.tokens_per_second), (50, 2048));
        assert_eq!((progress.exposed_wait_percent, progress.imbalance_percent), (5, 105));
    }
}
