//! What is known about an object, from the caches and the writes that they have not seen.
//!
//! In: a pool or a job. Out: an observation for the decision, with what the control service tells. Makes no
//! request. What is seen of a job is remembered, with the time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cadre_crds::contract::{LABEL_JOB, LABEL_POOL, LABEL_ROLE, ROLE_SERVER};
use cadre_crds::{AttentionPool, Readable, ScalingMode, TrainingJob};
use cadre_desired::pool::Node;
use cadre_desired::pool::scale::Demand;
use cadre_desired::{identity, job, pool, servers_budget, servers_service, trainers_service};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;

use crate::caches::{node, within};
use crate::context::Context;
use crate::told::{JobFigures, Servers};
use crate::triggers::Key;

pub(crate) fn pool(context: &Context, read: &Readable<AttentionPool>) -> pool::Observed {
    let object = &read.object;
    let name = object.metadata.name.clone().unwrap_or_default();
    let home = object.metadata.namespace.clone().unwrap_or_default();
    let of_pool = |pod: &Pod| label(&pod.metadata, LABEL_POOL) == Some(&name);
    let is_server = |pod: &Pod| label(&pod.metadata, LABEL_ROLE) == Some(ROLE_SERVER);
    let ours = |pod: &Pod| {
        of_pool(pod) && is_server(pod) && pod.metadata.namespace.as_ref() == Some(&home)
    };
    let seen = context.caches.pods_seen.load(Ordering::SeqCst);
    let cached = context.caches.pods.state_filter(|it| ours(it));
    let pods = context.recent_pods.correct(cached, ours, seen, Instant::now());
    // A trainer of another namespace may belong to a pool of the same name there.
    let joins = |pod: &Pod| {
        let from = pod.metadata.namespace.as_ref();
        let is_let_in =
            from == Some(&home) || object.spec.access.namespaces.iter().any(|it| Some(it) == from);
        is_let_in && self::home(context, pod) == home
    };
    let trainers =
        context.caches.pods.state_filter(|it| of_pool(it) && !is_server(it) && joins(it));
    let nodes = nodes(context, pods.iter().chain(&trainers));
    let named = |it: &ObjectMeta, name: &String| {
        it.name.as_ref() == Some(name) && it.namespace.as_ref() == Some(&home)
    };
    let of_servers = servers_service(&name);
    let service = context.caches.services.find(|it| named(&it.metadata, &of_servers));
    let (told, complete) = context.told.pool(&(home.clone(), name.clone()));
    let Servers { reports, holders, lent, in_place, lost } = told;
    let of_servers = servers_budget(&name);
    let budget = context.caches.budgets.find(|it| named(&it.metadata, &of_servers));
    let of_home = |it: &ControllerRevision| {
        it.metadata.namespace.as_ref() == Some(&home)
            && label(&it.metadata, LABEL_POOL) == Some(&name)
    };
    let revisions = context.caches.revisions.state_filter(of_home);
    let is_auto = object.spec.scaling.mode == ScalingMode::Auto;
    let (demands, unserved) = if is_auto {
        (demands(context, &trainers), context.told.unserved(&(home.clone(), name.clone())))
    } else {
        (BTreeMap::new(), BTreeMap::new())
    };
    let uid = object.uid().unwrap_or_default();
    pool::Observed {
        pool: object.clone(),
        unreadable: read.unreadable.clone(),
        service: service.map(|it| it.as_ref().clone()),
        budget: budget.map(|it| it.as_ref().clone()),
        revisions,
        pods,
        trainers,
        nodes,
        reports,
        holders,
        lent,
        in_place,
        reports_complete: complete,
        has_control: context.issuer.folder.is_some(),
        lost,
        unmade_since: context.unmade.since(&uid),
        demands,
        unserved,
        memory: context.memory(&uid),
    }
}

pub(crate) fn job(context: &Context, read: &Readable<TrainingJob>) -> job::Observed {
    let object = &read.object;
    let name = object.metadata.name.clone().unwrap_or_default();
    let home = object.metadata.namespace.clone().unwrap_or_default();
    let ours = |meta: &ObjectMeta| {
        label(meta, LABEL_JOB) == Some(&name) && meta.namespace.as_ref() == Some(&home)
    };
    let seen = context.caches.jobs_seen.load(Ordering::SeqCst);
    let jobs = context.caches.jobs.state_filter(|it| ours(&it.metadata));
    let jobs = context.recent_jobs.correct(jobs, |it| ours(&it.metadata), seen, Instant::now());
    let pods = context.caches.pods.state_filter(|it| ours(&it.metadata));
    let services = within(&context.caches.services, &home);
    let service = services.into_iter().find(|it| it.name_any() == trainers_service(&name));
    let wanted = &object.spec.attention.pool_ref;
    let of = home.clone();
    let from = wanted.namespace.clone().unwrap_or(home);
    let pool = context.caches.pools.get(&ObjectRef::new(&wanted.name).within(&from));
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    let key = (of, name);
    let attached = context.told.attached(&key);
    let figures = context.told.job(&key, uid);
    let JobFigures {
        progress,
        failovers,
        checkpoint,
        last_words,
        joined,
        uid: _,
        gaps: _,
        is_over: _,
    } = figures;
    let (is_served, is_whole) =
        (context.issuer.folder.is_some(), context.told.completes_in().is_none());
    let mut observed = job::Observed {
        job: object.clone(),
        unreadable: read.unreadable.clone(),
        pool: pool.map(|it| it.object.clone()),
        service: service.map(|it| it.as_ref().clone()),
        jobs: plain(&jobs),
        pods: plain(&pods),
        progress,
        checkpoint,
        failovers,
        last_words,
        joined: (is_served && is_whole).then_some(joined),
        attached: (!is_served || is_whole).then_some(attached),
        refused_pod: context.tries.of(uid),
        unserved: context.told.unserved_attempt(&key),
        watched: context.watched(uid),
    };
    let seen = job::watch(&observed, Timestamp::now());
    context.watch(uid, seen.clone());
    observed.watched = Some(seen);
    observed
}

/// What the jobs of these trainers need and wait for, by namespace and name; of jobs of other kinds nothing is known.
fn demands(context: &Context, trainers: &[Arc<Pod>]) -> BTreeMap<Key, Demand> {
    let mut demands = BTreeMap::new();
    for of in trainers.iter().filter_map(|it| identity::job_of(it)) {
        let key = (of.namespace, of.name);
        let found = context.caches.trainings.get(&ObjectRef::new(&key.1).within(&key.0));
        let Some(job) = found.filter(|_| !demands.contains_key(&key)) else { continue };
        let uid = job.object.metadata.uid.as_deref().unwrap_or_default();
        let waited = context.told.job(&key, uid).progress.map_or(0, |it| it.exposed_wait_percent);
        let servers = job.object.spec.attention.servers;
        let demand = Demand { servers, exposed_wait_ppm: waited.saturating_mul(10_000) };
        demands.insert(key, demand);
    }
    demands
}

/// Namespace of the pool that a trainer joins.
fn home(context: &Context, pod: &Pod) -> String {
    let of = identity::job_of(pod);
    let job = of.and_then(|of| {
        context.caches.trainings.get(&ObjectRef::new(&of.name).within(&of.namespace))
    });
    identity::home(pod, job.as_ref().map(|it| &it.object))
}

/// Nodes that these pods run on.
fn nodes<'a>(
    context: &Context,
    pods: impl Iterator<Item = &'a Arc<Pod>>,
) -> BTreeMap<String, Node> {
    let Some(store) = &context.caches.nodes else { return BTreeMap::new() };
    let mut nodes = BTreeMap::new();
    for name in pods.filter_map(|it| node(it)) {
        if nodes.contains_key(name) {
            continue;
        }
        if let Some(node) = store.get(&ObjectRef::new(name)) {
            let cordoned = node.spec.as_ref().and_then(|it| it.unschedulable) == Some(true);
            let labels = node.metadata.labels.clone().unwrap_or_default();
            nodes.insert(name.to_owned(), Node { labels, cordoned });
        }
    }
    nodes
}

fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

fn plain<K: Clone>(objects: &[Arc<K>]) -> Vec<K> {
    objects.iter().map(|it| it.as_ref().clone()).collect()
}
