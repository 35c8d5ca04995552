//! What was read from the API server, and how its objects hang together.
//!
//! In: lists of objects. Out: those that belong to a pool or a job. Asks nobody.

use std::fmt;
use std::str::FromStr;

use cadre_crds::contract::{LABEL_ATTEMPT, LABEL_JOB, LABEL_POOL, LABEL_ROLE, ROLE_SERVER};
use cadre_crds::{AttentionPool, TrainingJob};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

/// Everything that an answer is made from.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When it was read.
    pub now: Timestamp,
    /// Pools.
    pub pools: Vec<AttentionPool>,
    /// Training jobs.
    pub jobs: Vec<TrainingJob>,
    /// Jobs of the core API that are attempts.
    pub attempts: Vec<Job>,
    /// Pods of pools and jobs.
    pub pods: Vec<Pod>,
    /// Autoscalers from outside, of pools and of all else.
    pub autoscalers: Vec<HorizontalPodAutoscaler>,
    /// Nodes of pods that are not ready.
    pub nodes: Vec<Node>,
    /// Events of all these.
    pub events: Vec<Event>,
    /// Pods of the operator.
    pub operators: Vec<Pod>,
    /// Leases beside them.
    pub leases: Vec<Lease>,
    /// What could not be read, and why.
    pub unread: Vec<String>,
}

/// A kind that can be asked about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// `AttentionPool`.
    Pool,
    /// `TrainingJob`.
    Job,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pool => "attnpool",
            Self::Job => "cadjob",
        })
    }
}

/// An object that is asked about, written `attnpool/NAME` or `cadjob/NAME`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Target {
    /// Pool or job.
    pub kind: Kind,
    /// Name of the object.
    pub name: String,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("`{text}` names no object; write attnpool/NAME or cadjob/NAME");
        let (kind, name) = text.split_once('/').ok_or_else(wanted)?;
        let kind = match kind.to_ascii_lowercase().split('.').next().unwrap_or_default() {
            "attnpool" | "attentionpool" | "attentionpools" | "pool" => Kind::Pool,
            "cadjob" | "trainingjob" | "trainingjobs" | "job" => Kind::Job,
            _ => return Err(wanted()),
        };
        if name.is_empty() {
            return Err(wanted());
        }
        Ok(Self { kind, name: name.to_owned() })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

impl Seen {
    /// Nothing yet.
    pub fn nothing(now: Timestamp) -> Self {
        Self {
            now,
            pools: Vec::new(),
            jobs: Vec::new(),
            attempts: Vec::new(),
            pods: Vec::new(),
            autoscalers: Vec::new(),
            nodes: Vec::new(),
            events: Vec::new(),
            operators: Vec::new(),
            leases: Vec::new(),
            unread: Vec::new(),
        }
    }

    pub(crate) fn pool(&self, namespace: &str, name: &str) -> Option<&AttentionPool> {
        self.pools.iter().find(|it| is(&it.metadata, namespace, name))
    }

    pub(crate) fn job(&self, namespace: &str, name: &str) -> Option<&TrainingJob> {
        self.jobs.iter().find(|it| is(&it.metadata, namespace, name))
    }

    /// Dedicated servers of a pool, by name.
    pub(crate) fn servers(&self, pool: &AttentionPool) -> Vec<&Pod> {
        let all = self.of_pool(pool).filter(|it| is_server(it));
        let home = namespace(&pool.metadata);
        sorted(all.filter(|it| namespace(&it.metadata) == home))
    }

    /// Pods of jobs that are with a pool, in any namespace that it serves.
    pub(crate) fn trainers_of_pool(&self, pool: &AttentionPool) -> Vec<&Pod> {
        let home = namespace(&pool.metadata);
        let serves = |it: &&Pod| {
            let from = namespace(&it.metadata);
            from == home || pool.spec.access.namespaces.iter().any(|it| it == from)
        };
        // Those that have ended stay for their logs.
        let ended = |it: &&Pod| {
            let phase = it.status.as_ref().and_then(|it| it.phase.as_deref());
            matches!(phase, Some("Failed" | "Succeeded"))
        };
        sorted(self.of_pool(pool).filter(|it| !is_server(it) && !ended(it)).filter(serves))
    }

    fn of_pool(&self, pool: &AttentionPool) -> impl Iterator<Item = &Pod> {
        let name = name(&pool.metadata);
        self.pods.iter().filter(move |it| label(&it.metadata, LABEL_POOL) == Some(name))
    }

    /// Pods of a job, of all attempts, by name.
    pub(crate) fn trainers(&self, job: &TrainingJob) -> Vec<&Pod> {
        let ours = |it: &&Pod| belongs(&it.metadata, &job.metadata);
        sorted(self.pods.iter().filter(ours))
    }

    /// The newest attempt of a job; one before it that stays for its logs is none.
    pub(crate) fn attempt(&self, job: &TrainingJob) -> Option<&Job> {
        let told = job.status.as_ref().map_or(0, |it| it.attempt);
        let number =
            |it: &Job| label(&it.metadata, LABEL_ATTEMPT).and_then(|it| it.parse::<u32>().ok());
        let ours = self.attempts.iter().filter(|it| belongs(&it.metadata, &job.metadata));
        let ours = ours.filter(|it| number(it).is_none_or(|it| it >= told));
        ours.max_by_key(|it| it.metadata.creation_timestamp.as_ref().map(|it| it.0))
    }

    pub(crate) fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|it| it.metadata.name.as_deref() == Some(name))
    }

    /// Whether the nodes could be read. If so, a node that is missing is gone.
    pub(crate) fn knows_nodes(&self) -> bool {
        !self.unread.iter().any(|it| it.starts_with("nodes"))
    }

    /// Warnings about an object, the newest first.
    pub(crate) fn warnings(&self, kind: &str, meta: &ObjectMeta) -> Vec<&Event> {
        let about = |it: &&Event| {
            let of = &it.involved_object;
            it.type_.as_deref() == Some("Warning")
                && of.kind.as_deref() == Some(kind)
                && of.name == meta.name
                && of.namespace == meta.namespace
                // A name may have been used before.
                && (of.uid.is_none() || meta.uid.is_none() || of.uid == meta.uid)
        };
        let mut all: Vec<&Event> = self.events.iter().filter(about).collect();
        all.sort_by_key(|it| std::cmp::Reverse(last(it)));
        all
    }
}

/// When an event was last seen.
pub(crate) fn last(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|it| it.last_observed_time.as_ref()).map(|it| it.0);
    let last = event.last_timestamp.as_ref().map(|it| it.0);
    let first = event.event_time.as_ref().map(|it| it.0);
    [series, last, first].into_iter().flatten().max()
}

pub(crate) fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

pub(crate) fn namespace(meta: &ObjectMeta) -> &str {
    meta.namespace.as_deref().unwrap_or_default()
}

pub(crate) fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn is_server(pod: &Pod) -> bool {
    label(&pod.metadata, LABEL_ROLE) == Some(ROLE_SERVER)
}

fn belongs(meta: &ObjectMeta, job: &ObjectMeta) -> bool {
    label(meta, LABEL_JOB) == job.name.as_deref() && meta.namespace == job.namespace
}

fn is(meta: &ObjectMeta, in_namespace: &str, named: &str) -> bool {
    name(meta) == named && namespace(meta) == in_namespace
}

fn sorted<'a>(pods: impl Iterator<Item = &'a Pod>) -> Vec<&'a Pod> {
    let mut pods: Vec<&Pod> = pods.collect();
    pods.sort_by_key(|it| (it.metadata.namespace.as_deref(), it.metadata.name.as_deref()));
    pods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_by_any_of_their_names() {
        for text in ["attnpool/a", "AttentionPool/a", "attentionpools.cadre.dev/a", "pool/a"] {
            assert_eq!(text.parse(), Ok(Target { kind: Kind::Pool, name: "a".into() }));
        }
        assert_eq!("cadjob/b".parse::<Target>().map(|it| it.to_string()), Ok("cadjob/b".into()));
        for text in ["a", "pod/a", "attnpool/", "/a", ""] {
            let refusal = text.parse::<Target>().expect_err("no object");
            assert!(refusal.contains("attnpool/NAME"), "{refusal}");
        }
    }
}
