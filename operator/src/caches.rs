//! What the API server has, as this process knows it.
//!
//! One watch a kind, narrowed by labels, for both controllers together; each object is pruned to what a
//! decision reads. Out: stores, and a trigger for each pool or job that a change is about.
//!
//! A standby fills them too, so that it takes over at once. Nodes are watched only when the operator
//! looks after all namespaces: a role within one namespace cannot see them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cadre_crds::contract::{LABEL_CLASS, LABEL_JOB, LABEL_POOL, LABEL_ROLE, ROLE_SERVER};
use cadre_crds::{AttentionPool, Bare as _, Readable, TrainingJob};
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata as _, NamespaceResourceScope};
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;

use crate::api::WATCH_SECONDS;
use crate::prune::{prune, prune_job, prune_node, prune_pod, prune_pool};
use crate::recent::version;
use crate::triggers::{Triggers, key};

/// Objects that this operator makes. Jobs and revisions are known by the label of what they are of, which is counted
/// on anyway: one that were hidden for want of this label would be made once more, and under another name.
const OURS: &str = "app.kubernetes.io/managed-by=cadre-operator";

/// Objects of a list that are unpruned in memory at the same time.
const PAGE: u32 = 100;

/// What an operator looks after.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    /// Namespace; none: all.
    pub(crate) namespace: Option<String>,
    /// Class of pools and jobs; none: those without one.
    pub(crate) class: Option<String>,
}

/// All stores, and what waits for a controller.
#[derive(Debug)]
pub(crate) struct Caches {
    pub(crate) pools: Store<Readable<AttentionPool>>,
    pub(crate) trainings: Store<Readable<TrainingJob>>,
    pub(crate) pods: Store<Pod>,
    pub(crate) jobs: Store<Job>,
    pub(crate) services: Store<Service>,
    pub(crate) budgets: Store<PodDisruptionBudget>,
    pub(crate) revisions: Store<ControllerRevision>,
    pub(crate) nodes: Option<Store<Node>>,
    pub(crate) pool_triggers: Triggers,
    pub(crate) job_triggers: Triggers,
    /// Newest versions that the watches of pods and Jobs have brought.
    pub(crate) pods_seen: Arc<AtomicU64>,
    pub(crate) jobs_seen: Arc<AtomicU64>,
    filled: OnceCell<()>,
}

impl Caches {
    /// Starts all watches.
    pub(crate) fn start(client: &Client, scope: &Scope) -> Self {
        let (namespace, own_class) = (scope.namespace.as_deref(), scope.class.clone());
        let class = own_class.clone();
        let (pool_triggers, job_triggers) = (Triggers::default(), Triggers::default());
        let owned = Owned { pools: pool_triggers.clone(), jobs: job_triggers.clone() };

        let own = job_triggers.clone();
        let trainings: Store<Readable<TrainingJob>> = watch(
            scoped(client, namespace),
            all(),
            move |it: &Readable<TrainingJob>| it.object.class() == class.as_deref(),
            |it| prune(it.metadata_mut()),
            move |it| {
                own.put(key(it));
            },
        );

        let (own, jobs, waiting) = (pool_triggers.clone(), job_triggers.clone(), trainings.clone());
        let class = own_class.clone();
        let pools: Store<Readable<AttentionPool>> = watch(
            scoped(client, namespace),
            all(),
            move |it: &Readable<AttentionPool>| it.object.class() == class.as_deref(),
            |it| prune_pool(it.metadata_mut()),
            move |it| {
                own.put(key(it));
                // Jobs that wait for this pool, or have just lost it.
                let name = it.name_any();
                let waits = |it: &TrainingJob| it.spec.attention.pool_ref.name == name;
                for job in waiting.state() {
                    if waits(&job.object) {
                        jobs.put(key(job.as_ref()));
                    }
                }
            },
        );

        let (pods_seen, jobs_seen) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (own, known, seen) = (owned.clone(), pools.clone(), pods_seen.clone());
        let labelled = all().labels(LABEL_POOL);
        // Whoever may make pods may also make "servers" of another class, which the policy of ours lets pass.
        let ours_or_trainer = move |it: &Pod| {
            let label = |key: &str| it.labels().get(key).map(String::as_str);
            label(LABEL_ROLE) != Some(ROLE_SERVER) || label(LABEL_CLASS) == own_class.as_deref()
        };
        let pods: Store<Pod> = watch_noting(
            scoped(client, namespace),
            labelled,
            ours_or_trainer,
            prune_pod,
            seen,
            move |it| {
                own.pod(it, &known);
            },
        );

        let (own, seen) = (owned.clone(), jobs_seen.clone());
        let jobs: Store<Job> = watch_noting(
            scoped(client, namespace),
            all().labels(LABEL_JOB),
            |_| true,
            prune_job,
            seen,
            move |it| {
                own.owner(&it.metadata);
            },
        );
        let services: Store<Service> = watch_ours(client, namespace, OURS, &owned);
        let budgets: Store<PodDisruptionBudget> = watch_ours(client, namespace, OURS, &owned);
        let revisions: Store<ControllerRevision> =
            watch_ours(client, namespace, LABEL_POOL, &owned);

        let (there, seen) = (pods.clone(), Mutex::new(BTreeMap::new()));
        let nodes = namespace.is_none().then(|| {
            watch(
                Api::all(client.clone()),
                all(),
                |_| true,
                prune_node,
                move |it: &Node| {
                    let cordoned = it.spec.as_ref().and_then(|it| it.unschedulable) == Some(true);
                    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                    // Heartbeats of nodes are no news.
                    if seen.insert(it.name_any(), cordoned) != Some(cordoned) {
                        for pod in there.state() {
                            if node(&pod) == Some(&it.name_any()) {
                                owned.owner(&pod.metadata);
                            }
                        }
                    }
                },
            )
        });
        let filled = OnceCell::new();
        Self {
            pools,
            trainings,
            pods,
            jobs,
            services,
            budgets,
            revisions,
            nodes,
            pool_triggers,
            job_triggers,
            pods_seen,
            jobs_seen,
            filled,
        }
    }

    /// Waits until every store has been filled once. Any number may wait: a store itself wakes only the
    /// last one that asked it.
    pub(crate) async fn ready(&self) -> anyhow::Result<()> {
        self.filled.get_or_try_init(|| self.fill()).await.copied()
    }

    async fn fill(&self) -> anyhow::Result<()> {
        let gone = "a watch has ended";
        self.pools.wait_until_ready().await.context(gone)?;
        self.trainings.wait_until_ready().await.context(gone)?;
        self.pods.wait_until_ready().await.context(gone)?;
        self.jobs.wait_until_ready().await.context(gone)?;
        self.services.wait_until_ready().await.context(gone)?;
        self.budgets.wait_until_ready().await.context(gone)?;
        self.revisions.wait_until_ready().await.context(gone)?;
        if let Some(nodes) = &self.nodes {
            nodes.wait_until_ready().await.context(gone)?;
        }
        Ok(())
    }
}

/// Triggers for what an object belongs to.
#[derive(Clone)]
struct Owned {
    pools: Triggers,
    jobs: Triggers,
}

impl Owned {
    /// For the pool or job that made it.
    fn owner(&self, meta: &ObjectMeta) {
        let namespace = meta.namespace.clone().unwrap_or_default();
        for owner in meta.owner_references.iter().flatten() {
            let key = (namespace.clone(), owner.name.clone());
            match owner.kind.as_str() {
                AttentionPool::KIND => self.pools.put(key),
                TrainingJob::KIND => self.jobs.put(key),
                _ => {}
            }
        }
    }

    /// For the pools that its label may mean, and the job that it trains.
    fn pod(&self, pod: &Pod, pools: &Store<Readable<AttentionPool>>) {
        self.owner(&pod.metadata);
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let label = |key: &str| pod.metadata.labels.as_ref().and_then(|it| it.get(key)).cloned();
        if let Some(name) = label(LABEL_JOB) {
            self.jobs.put((namespace, name));
        }
        let pool = label(LABEL_POOL);
        for found in pools.state().iter().filter(|it| Some(it.name_any()) == pool) {
            self.pools.put(key(found.as_ref()));
        }
    }
}

/// The API of a kind, in one namespace or all.
pub(crate) fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Of all objects of a kind.
fn all() -> watcher::Config {
    watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS)
}

/// Fills a store with the objects of a kind that have a label; a change triggers the pool or job that owns the object.
fn watch_ours<K>(client: &Client, namespace: Option<&str>, label: &str, owned: &Owned) -> Store<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (api, owned) = (scoped(client, namespace), owned.clone());
    watch(
        api,
        all().labels(label),
        |_| true,
        |it: &mut K| prune(it.meta_mut()),
        move |it| owned.owner(it.meta()),
    )
}

/// Fills a store from a watch, for ever, with the objects that `keep` takes; `changed` hears of every one that is new, other or
/// gone.
fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
    keep: impl Fn(&K) -> bool + Send + 'static,
    prune: impl Fn(&mut K) + Send + 'static,
    changed: impl Fn(&K) + Send + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Default,
{
    watch_noting(api, config, keep, prune, Arc::default(), changed)
}

/// As [`watch`]; also notes the newest resource version that the store holds.
fn watch_noting<K>(
    api: Api<K>,
    config: watcher::Config,
    keep: impl Fn(&K) -> bool + Send + 'static,
    prune: impl Fn(&mut K) + Send + 'static,
    seen: Arc<AtomicU64>,
    changed: impl Fn(&K) + Send + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Default,
{
    let (store, writer) = reflector::store();
    tokio::spawn(async move {
        let kept = move |event: &watcher::Event<K>| {
            std::future::ready(match event {
                watcher::Event::Apply(it)
                | watcher::Event::Delete(it)
                | watcher::Event::InitApply(it) => keep(it),
                watcher::Event::Init | watcher::Event::InitDone => true,
            })
        };
        let events = watcher(api, config).default_backoff().try_filter(kept).modify(prune);
        // A new list is in the store when it is whole.
        let mut listed = 0;
        let noted = reflector::reflector(writer, events).inspect_ok(move |event| match event {
            watcher::Event::Apply(it) | watcher::Event::Delete(it) => {
                seen.fetch_max(version(it), Ordering::SeqCst);
            }
            watcher::Event::InitApply(it) => listed = listed.max(version(it)),
            watcher::Event::Init => {}
            watcher::Event::InitDone => {
                seen.fetch_max(listed, Ordering::SeqCst);
            }
        });
        let objects = noted.touched_objects();
        let mut objects = std::pin::pin!(objects);
        while let Some(object) = objects.next().await {
            match object {
                Ok(object) => changed(&object),
                Err(error) => {
                    tracing::warn!("watch of {}: {error}; the operator tries again", K::kind(&()));
                }
            }
        }
    });
    store
}

/// The node of a pod.
pub(crate) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Objects of a store in one namespace.
pub(crate) fn within<K>(store: &Store<K>, namespace: &str) -> Vec<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    store.state().into_iter().filter(|it| it.namespace().as_deref() == Some(namespace)).collect()
}
