//! What the operator tells Prometheus.
//!
//! | name | labels | what |
//! |---|---|---|
//! | `cadre_operator_reconciles_total` | `kind`, `result` | looks at objects; result `ok` or `error` |
//! | `cadre_operator_reconcile_seconds` | `kind` | time of a look |
//! | `cadre_operator_actions_total` | `action` | what was done to the cluster |
//! | `cadre_operator_status_writes_total` | `kind` | statuses written |
//! | `cadre_operator_leader` | | 1 while this process leads |
//! | `cadre_operator_server_busy_ratio` | `namespace`, `pool`, `server` | share of the time in which a server computes |
//! | `cadre_operator_server_time_ratio` | the same | its observed over its expected time |
//! | `cadre_operator_server_trainers` | the same, `path` | trainers whose rows come to it by that path |
//! | `cadre_operator_server_held_since_timestamp_seconds` | the same, `job_namespace`, `job` | since when it works for that job |
//! | `cadre_operator_pool_servers` | `namespace`, `pool`, `state` | servers, as the pool's status counts them |
//! | `cadre_operator_pool_misplaced` | `namespace`, `pool`, `reason` | 1 while `PlacementSatisfied` is false |
//! | `cadre_operator_job_steps` | `namespace`, `job` | steps that are done |
//! | `cadre_operator_job_checkpoint_steps` | the same | steps in the newest checkpoint that was heard of |
//! | `cadre_operator_job_restarts` | the same | restarts that counted |
//! | `cadre_operator_job_failovers` | the same | servers lost in its steps |
//! | `cadre_operator_job_tokens_per_second` | the same | tokens trained on, all trainers together |
//! | `cadre_operator_job_exposed_wait_ratio` | the same | share of a step in which the worst trainer waits for attention |
//! | `cadre_operator_job_imbalance_ratio` | the same | busiest server over the mean |
//! | `cadre_operator_job_plan_gap_ratio` | `namespace`, `job`, `of` | how far plans are above what none could beat |
//! | `cadre_operator_certificate_expiry_timestamp_seconds` | `file` | until when the control service's certificates are good |
//! | `cadre_operator_condition` | `kind`, `namespace`, `name`, `type`, `reason` | 1 for each condition that is true |
//!
//! What is told of pools, jobs and servers is as it is when somebody asks, and the one that leads tells it. Of its
//! certificates each process tells.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use cadre_crds::{AttentionPool, Readable, TrainingJob};
use cadre_desired::Action;
use cadre_desired::pool::Report;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::told::Gaps;

/// What this process has counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) leader: Gauge<i64, AtomicI64>,
    reconciles: Family<Look, Counter>,
    seconds: Family<OfKind, Histogram>,
    actions: Family<Done, Counter>,
    status_writes: Family<OfKind, Counter>,
}

/// What there is when somebody asks.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Pool, name and report of each server that is connected.
    pub(crate) servers: Vec<((String, String), String, Report)>,
    pub(crate) pools: Vec<Arc<Readable<AttentionPool>>>,
    pub(crate) jobs: Vec<Arc<Readable<TrainingJob>>>,
    /// Namespace and name of each job that trains, and how good its plans are.
    pub(crate) gaps: Vec<((String, String), Gaps)>,
    /// Files of certificates, and until when each is good, in seconds since 1970.
    pub(crate) certificates: Vec<(&'static str, i64)>,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfPool {
    namespace: String,
    pool: String,
    state: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfJob {
    namespace: String,
    job: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Misplaced {
    namespace: String,
    pool: String,
    reason: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Gap {
    namespace: String,
    job: String,
    of: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct File {
    file: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct True {
    kind: &'static str,
    namespace: String,
    name: String,
    r#type: String,
    reason: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfServer {
    namespace: String,
    pool: String,
    server: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct ByPath {
    namespace: String,
    pool: String,
    server: String,
    path: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Held {
    namespace: String,
    pool: String,
    server: String,
    job_namespace: String,
    job: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Look {
    kind: String,
    result: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OfKind {
    kind: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct Done {
    action: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            leader: Gauge::default(),
            reconciles: Family::default(),
            seconds: Family::new_with_constructor(histogram as fn() -> Histogram),
            actions: Family::default(),
            status_writes: Family::default(),
        }
    }
}

/// From 1 ms to 16 s.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

impl Metrics {
    pub(crate) fn reconciled(&self, kind: &str, ok: bool, took: Duration) {
        let result = if ok { "ok" } else { "error" };
        self.reconciles.get_or_create(&Look { kind: kind.into(), result }).inc();
        self.seconds.get_or_create(&OfKind { kind: kind.into() }).observe(took.as_secs_f64());
    }

    pub(crate) fn action(&self, action: &Action) {
        let action = match action {
            Action::Create(_) => "create",
            Action::Apply(_) => "apply",
            Action::Drain { .. } => "drain",
            Action::Note { .. } => "note",
            Action::Delete(_) | Action::DeleteSelf => "delete",
            Action::Scale { .. } => "scale",
            Action::Guard => "guard",
            Action::Release => "release",
        };
        self.actions.get_or_create(&Done { action }).inc();
    }

    pub(crate) fn wrote_status(&self, kind: &str) {
        self.status_writes.get_or_create(&OfKind { kind: kind.into() }).inc();
    }

    /// All metrics in the text format of Prometheus. Metrics of objects are made anew for each
    /// request, so two requests at the same time do not mix.
    pub(crate) fn text(&self, seen: &Seen) -> String {
        let mut registry = Registry::with_prefix("cadre_operator");
        registry.register("leader", "1 while this process leads", self.leader.clone());
        registry.register("reconciles", "Looks at objects", self.reconciles.clone());
        registry.register("reconcile_seconds", "Time of a look", self.seconds.clone());
        registry.register("actions", "What was done to the cluster", self.actions.clone());
        registry.register("status_writes", "Statuses written", self.status_writes.clone());
        Objects::new(&mut registry).tell(seen);
        let mut text = String::new();
        // Writing into memory does not fail; an empty page would say it.
        if encode(&mut text, &registry).is_err() {
            text.clear();
        }
        text
    }
}

/// Metrics of pools, jobs and servers.
#[derive(Debug)]
struct Objects {
    busy: Family<OfServer, Gauge<f64, AtomicU64>>,
    time: Family<OfServer, Gauge<f64, AtomicU64>>,
    trainers: Family<ByPath, Gauge>,
    held: Family<Held, Gauge>,
    servers: Family<OfPool, Gauge>,
    misplaced: Family<Misplaced, Gauge>,
    steps: Family<OfJob, Gauge>,
    saved: Family<OfJob, Gauge>,
    restarts: Family<OfJob, Gauge>,
    failovers: Family<OfJob, Gauge>,
    tokens: Family<OfJob, Gauge>,
    waits: Family<OfJob, Gauge<f64, AtomicU64>>,
    imbalance: Family<OfJob, Gauge<f64, AtomicU64>>,
    gaps: Family<Gap, Gauge<f64, AtomicU64>>,
    certificates: Family<File, Gauge>,
    conditions: Family<True, Gauge>,
}

impl Objects {
    fn new(registry: &mut Registry) -> Self {
        Self {
            busy: family(registry, "server_busy_ratio", "Share of the time in which it computes"),
            time: family(registry, "server_time_ratio", "Observed over expected time"),
            trainers: family(registry, "server_trainers", "Trainers whose rows come by a path"),
            held: family(
                registry,
                "server_held_since_timestamp_seconds",
                "Since when it works for a job",
            ),
            servers: family(registry, "pool_servers", "Servers of a pool"),
            conditions: family(registry, "condition", "Conditions that are true"),
            steps: family(registry, "job_steps", "Steps that are done"),
            saved: family(registry, "job_checkpoint_steps", "Steps in the newest checkpoint"),
            restarts: family(registry, "job_restarts", "Restarts that counted"),
            failovers: family(registry, "job_failovers", "Servers lost in its steps"),
            misplaced: family(registry, "pool_misplaced", "PlacementSatisfied is false"),
            tokens: family(registry, "job_tokens_per_second", "Tokens trained on"),
            waits: family(registry, "job_exposed_wait_ratio", "Wait for attention in a step"),
            imbalance: family(registry, "job_imbalance_ratio", "Busiest server over the mean"),
            gaps: family(registry, "job_plan_gap_ratio", "Plans above what none could beat"),
            certificates: family(
                registry,
                "certificate_expiry_timestamp_seconds",
                "Until when a certificate is good",
            ),
        }
    }

    fn tell(&self, seen: &Seen) {
        for ((namespace, pool), server, report) in &seen.servers {
            let of = OfServer {
                namespace: namespace.clone(),
                pool: pool.clone(),
                server: server.clone(),
            };
            if let Some(busy) = report.busy_ppm {
                self.busy.get_or_create(&of).set(f64::from(busy) / 1e6);
            }
            if report.slow_factor_percent > 0 {
                self.time.get_or_create(&of).set(f64::from(report.slow_factor_percent) / 100.0);
            }
            for (path, count) in &report.paths {
                let OfServer { namespace, pool, server } = of.clone();
                let by = ByPath { namespace, pool, server, path: path.clone() };
                self.trainers.get_or_create(&by).set((*count).into());
            }
        }
        for ((namespace, job), gaps) in &seen.gaps {
            let all = [("compute", gaps.compute), ("link", gaps.link), ("bytes", gaps.bytes)];
            for (of, gap) in all.into_iter().filter_map(|(of, gap)| Some((of, gap?))) {
                let gap_of = Gap { namespace: namespace.clone(), job: job.clone(), of };
                self.gaps.get_or_create(&gap_of).set(gap);
            }
        }
        for (file, end) in &seen.certificates {
            self.certificates.get_or_create(&File { file }).set(*end);
        }
        for pool in &seen.pools {
            self.pool(&pool.object);
        }
        for job in &seen.jobs {
            self.job(&job.object);
        }
    }

    fn pool(&self, pool: &AttentionPool) {
        let Some(status) = &pool.status else { return };
        let (namespace, name) = place(&pool.metadata);
        for (state, count) in [
            ("desired", status.desired),
            ("ready", status.ready),
            ("registered", status.registered),
            ("draining", status.draining),
            ("quarantined", status.quarantined),
            ("in-place", status.in_place_servers),
        ] {
            let of = OfPool { namespace: namespace.clone(), pool: name.clone(), state };
            self.servers.get_or_create(&of).set(count.into());
        }
        for holder in &status.holders {
            for server in &holder.servers {
                let held = Held {
                    namespace: namespace.clone(),
                    pool: name.clone(),
                    server: server.clone(),
                    job_namespace: holder.namespace.clone(),
                    job: holder.name.clone(),
                };
                self.held.get_or_create(&held).set(holder.since.0.as_second());
            }
        }
        let far = |it: &&Condition| it.type_ == "PlacementSatisfied" && it.status == "False";
        if let Some(reason) = status.conditions.iter().find(far).map(|it| it.reason.clone()) {
            self.misplaced.get_or_create(&Misplaced { namespace, pool: name, reason }).set(1);
        }
        self.conditions("AttentionPool", &pool.metadata, &status.conditions);
    }

    fn job(&self, job: &TrainingJob) {
        let Some(status) = &job.status else { return };
        let (namespace, job_name) = place(&job.metadata);
        let of = OfJob { namespace, job: job_name };
        let steps = status.progress.as_ref().map_or(0, |it| it.step);
        self.steps.get_or_create(&of).set(i64::try_from(steps).unwrap_or(i64::MAX));
        let saved = i64::try_from(status.checkpoint_step).unwrap_or(i64::MAX);
        self.saved.get_or_create(&of).set(saved);
        self.restarts.get_or_create(&of).set(status.restarts.into());
        self.failovers.get_or_create(&of).set(status.failovers.into());
        if let Some(it) = &status.progress {
            let tokens = i64::try_from(it.tokens_per_second).unwrap_or(i64::MAX);
            self.tokens.get_or_create(&of).set(tokens);
            self.waits.get_or_create(&of).set(f64::from(it.exposed_wait_percent) / 100.0);
            self.imbalance.get_or_create(&of).set(f64::from(it.imbalance_percent) / 100.0);
        }
        self.conditions("TrainingJob", &job.metadata, &status.conditions);
    }

    fn conditions(&self, kind: &'static str, meta: &ObjectMeta, conditions: &[Condition]) {
        for condition in conditions.iter().filter(|it| it.status == "True") {
            let (namespace, name) = place(meta);
            let (r#type, reason) = (condition.type_.clone(), condition.reason.clone());
            self.conditions.get_or_create(&True { kind, namespace, name, r#type, reason }).set(1);
        }
    }
}

/// A family of gauges in the registry.
fn family<L, G>(registry: &mut Registry, name: &str, help: &str) -> Family<L, G>
where
    L: Clone + Debug + EncodeLabelSet + Eq + Hash + Send + Sync + 'static,
    G: Clone + Debug + Default + EncodeMetric + Send + Sync + TypedMetric + 'static,
{
    let family = Family::<L, G>::default();
    registry.register(name, help, family.clone());
    family
}

fn place(meta: &ObjectMeta) -> (String, String) {
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests;
