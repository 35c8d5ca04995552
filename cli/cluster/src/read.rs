//! Reads what a cluster has.
//!
//! In: a kubeconfig or the rights of a pod, and a namespace. Out: [`Seen`]. What may not be read is named there
//! instead; only pools and jobs must be readable.

use std::collections::BTreeSet;

use cadre_crds::contract::{LABEL_JOB, LABEL_POOL};
use cadre_crds::{AttentionPool, Readable, TrainingJob};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, ObjectList};
use kube::config::KubeConfigOptions;
use kube::{Api, Client, Config};

use crate::facts::{Life, life, node};
use crate::seen::{Seen, name, namespace};

/// Most nodes that are read, and how many at a time.
const MAX_NODES: usize = 64;
const MAX_NODES_AT_ONCE: usize = 8;
/// Most events of a namespace that are read.
const MAX_EVENTS: u32 = 5_000;
/// Objects a page.
const OBJECTS_A_PAGE: u32 = 500;
/// Label of the operator's own pods.
pub(crate) const OPERATOR: &str = "app.kubernetes.io/name=cadre-operator";

/// Why the cluster cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No way to an API server.
    #[error("no access to a cluster: {0}; set KUBECONFIG or --context")]
    Config(String),
    /// A request failed.
    #[error("{what}: {why}{}", remedy(*.code))]
    Request {
        /// The request.
        what: String,
        /// What the API server said.
        why: String,
        /// Status code of the answer, if there was one.
        code: Option<u16>,
    },
}

fn remedy(code: Option<u16>) -> &'static str {
    match code {
        Some(404) => "; install the chart's definitions (charts/cadre/crds)",
        Some(401 | 403) => "; ask for the right to read it",
        None => "; see whether the API server can be reached",
        Some(_) => "",
    }
}

impl Error {
    pub(crate) fn request(what: impl Into<String>, error: &kube::Error) -> Self {
        let (why, code) = if let kube::Error::Api(status) = error {
            (status.message.clone(), Some(status.code))
        } else {
            (error.to_string(), None)
        };
        Self::Request { what: what.into(), why, code }
    }
}

/// Where to read.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Context of the kubeconfig; left out, the current one.
    pub context: Option<String>,
    /// Namespace; left out, the context's.
    pub namespace: Option<String>,
    /// All namespaces.
    pub all: bool,
}

/// A way to a cluster.
#[derive(Clone)]
pub struct Cluster {
    /// Speaks to the API server.
    pub client: Client,
    /// The namespace that is meant where none is named.
    pub namespace: String,
    all: bool,
}

impl Cluster {
    /// Connects.
    ///
    /// # Errors
    ///
    /// There is no configuration, or it cannot be used.
    pub async fn connect(scope: &Scope) -> Result<Self, Error> {
        let config = match &scope.context {
            None => Config::infer().await.map_err(|it| Error::Config(it.to_string())),
            Some(context) => {
                let options =
                    KubeConfigOptions { context: Some(context.clone()), ..Default::default() };
                Config::from_kubeconfig(&options).await.map_err(|it| Error::Config(it.to_string()))
            }
        }?;
        let namespace = scope.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|it| Error::Config(it.to_string()))?;
        Ok(Self { client, namespace, all: scope.all })
    }

    /// Reads pools and jobs, and what belongs to them.
    ///
    /// # Errors
    ///
    /// Pools or jobs cannot be read.
    pub async fn read(&self) -> Result<Seen, Error> {
        let mut seen = Seen::nothing(Timestamp::now());
        let pools = self.list::<Readable<AttentionPool>>("attentionpools", "").await?;
        seen.pools = pools.into_iter().map(|it| readable(&mut seen.unread, it)).collect();
        let jobs = self.list::<Readable<TrainingJob>>("trainingjobs", "").await?;
        seen.jobs = jobs.into_iter().map(|it| readable(&mut seen.unread, it)).collect();
        self.read_other_namespaces(&mut seen).await;
        let namespaces = self.namespaces(&seen);
        for it in &namespaces {
            let it = it.as_str();
            let pods = self.list_in::<Pod>(it, "pods", LABEL_POOL).await;
            keep(&mut seen.pods, pods, &mut seen.unread);
            let jobs = self.list_in::<Job>(it, "jobs.batch", LABEL_JOB).await;
            keep(&mut seen.attempts, jobs, &mut seen.unread);
            let scalers =
                self.list_in::<HorizontalPodAutoscaler>(it, "horizontalpodautoscalers", "").await;
            keep(&mut seen.autoscalers, scalers, &mut seen.unread);
            let parameters = ListParams::default().limit(MAX_EVENTS);
            let events = self.api::<Event>(it).list(&parameters).await;
            let events = events.map(|it| it.items);
            let events = events.map_err(|error| Error::request(format!("events of {it}"), &error));
            keep(&mut seen.events, events, &mut seen.unread);
        }
        self.read_nodes(&mut seen).await;
        self.read_operator(&mut seen).await;
        Ok(seen)
    }

    /// Pools that jobs name in other namespaces than the one asked for.
    async fn read_other_namespaces(&self, seen: &mut Seen) {
        if self.all {
            return;
        }
        let elsewhere: BTreeSet<(String, String)> = seen
            .jobs
            .iter()
            .map(|it| &it.spec.attention.pool_ref)
            .filter_map(|it| Some((it.namespace.clone()?, it.name.clone())))
            .filter(|it| it.0 != self.namespace)
            .collect();
        for (home, name) in elsewhere {
            match self.api::<Readable<AttentionPool>>(&home).get(&name).await {
                Ok(pool) => {
                    let pool = readable(&mut seen.unread, pool);
                    seen.pools.push(pool);
                }
                Err(error) => {
                    let error = Error::request(format!("attnpool {home}/{name}"), &error);
                    seen.unread.push(error.to_string());
                }
            }
        }
    }

    fn namespaces(&self, seen: &Seen) -> BTreeSet<String> {
        let pools = seen.pools.iter().map(|it| &it.metadata);
        let jobs = seen.jobs.iter().map(|it| &it.metadata);
        let served = seen.pools.iter().flat_map(|it| it.spec.access.namespaces.iter().cloned());
        let mut all: BTreeSet<String> =
            pools.chain(jobs).map(|it| namespace(it).to_owned()).chain(served).collect();
        if !self.all {
            all.insert(self.namespace.clone());
        }
        all
    }

    async fn read_nodes(&self, seen: &mut Seen) {
        let troubled = seen.pods.iter().filter(|it| life(it) != Life::Ready);
        let names: BTreeSet<String> = troubled.filter_map(node).map(str::to_owned).collect();
        let api = Api::<Node>::all(self.client.clone());
        let reads = names.into_iter().take(MAX_NODES).map(|name| {
            let api = api.clone();
            async move { api.get_opt(&name).await }
        });
        let read: Vec<_> = stream::iter(reads).buffer_unordered(MAX_NODES_AT_ONCE).collect().await;
        for it in read {
            match it {
                Ok(node) => seen.nodes.extend(node),
                Err(error) => {
                    seen.unread.push(Error::request("nodes", &error).to_string());
                    return;
                }
            }
        }
    }

    async fn read_operator(&self, seen: &mut Seen) {
        let parameters = ListParams::default().labels(OPERATOR);
        match Api::<Pod>::all(self.client.clone()).list(&parameters).await {
            Ok(pods) => seen.operators = pods.items,
            Err(error) => {
                seen.unread.push(Error::request("operator pods", &error).to_string());
                return;
            }
        }
        let homes: BTreeSet<String> =
            seen.operators.iter().map(|it| namespace(&it.metadata).to_owned()).collect();
        for home in homes {
            let leases = Api::<Lease>::namespaced(self.client.clone(), &home);
            match leases.list(&ListParams::default()).await {
                Ok(leases) => seen.leases.extend(leases.items),
                Err(error) => {
                    seen.unread.push(Error::request("leases of the operator", &error).to_string());
                }
            }
        }
    }

    fn api<K>(&self, home: &str) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), home)
    }

    async fn list<K: Listed>(&self, what: &str, label: &str) -> Result<Vec<K>, Error> {
        let api = if self.all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        };
        pages(&api, label).await.map_err(|error| Error::request(what, &error))
    }

    async fn list_in<K: Listed>(
        &self,
        home: &str,
        what: &str,
        label: &str,
    ) -> Result<Vec<K>, Error> {
        let listed = pages(&self.api(home), label).await;
        listed.map_err(|error| Error::request(format!("{what} of {home}"), &error))
    }
}

/// What can be listed.
trait Listed:
    kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
    + Clone
    + std::fmt::Debug
    + serde::de::DeserializeOwned
{
}

impl<K> Listed for K where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
{
}

/// All objects with a label, page by page.
async fn pages<K: Listed>(api: &Api<K>, label: &str) -> Result<Vec<K>, kube::Error> {
    let mut all = Vec::new();
    let mut parameters = ListParams::default().limit(OBJECTS_A_PAGE);
    if !label.is_empty() {
        parameters = parameters.labels(label);
    }
    loop {
        let ObjectList { items, metadata, .. } = api.list(&parameters).await?;
        all.extend(items);
        match metadata.continue_.filter(|it| !it.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(all),
        }
    }
}

/// An object, and a line about what of it cannot be read.
fn readable<K>(unread: &mut Vec<String>, read: Readable<K>) -> K
where
    K: k8s_openapi::Resource + k8s_openapi::Metadata<Ty = ObjectMeta>,
{
    if let Some(refusal) = &read.unreadable {
        let meta = read.object.metadata();
        unread.push(format!("{} {}/{}: {refusal}", K::KIND, namespace(meta), name(meta)));
    }
    read.object
}

fn keep<K>(all: &mut Vec<K>, read: Result<Vec<K>, Error>, unread: &mut Vec<String>) {
    match read {
        Ok(items) => all.extend(items),
        Err(error) => unread.push(error.to_string()),
    }
}
