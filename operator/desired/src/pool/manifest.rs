//! The objects that a pool is made of.
//!
//! In: a pool that passed validation and what a server's start is about. Out: the server's pod, the
//! Service and the disruption budget. Nothing is decided here; equal inputs, equal objects.

use std::collections::BTreeMap;

use super::revision::Revision;
use super::server::{Server, servers};
use super::{Observed, meta};
use crate::names::{self, name, owned_by, pool_labels, queue_labels, server_selector};
use crate::podspec::{complete, empty, mount, variable, volume};
use crate::settings::Settings;
use cadre_crds::contract::{
    ANNOTATION_AVOID, ANNOTATION_FAILURES, ANNOTATION_INCARNATION, ANNOTATION_TAKEN_OVER,
    CADRE_INCARNATION, CADRE_INDEX, CADRE_POOL, CADRE_ROLE, LABEL_CLASS, LABEL_JOB, LABEL_POOL,
    LABEL_REVISION, LABEL_ROLE, LABEL_SLOT, ROLE_SERVER, ROLE_TRAINER, SERVER_CONTAINER,
};
use cadre_crds::{AttentionPool, AttentionPoolSpec, Colocation};
use k8s_openapi::api::core::v1::{
    Affinity, Container, EmptyDirVolumeSource, NodeAffinity, NodeSelector, NodeSelectorRequirement,
    NodeSelectorTerm, Pod, PodAffinity, PodAffinityTerm, PodSpec, PodTemplateSpec,
    PreferredSchedulingTerm, ResourceRequirements, Service, ServiceSpec, WeightedPodAffinityTerm,
};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    LabelSelector, LabelSelectorRequirement, ObjectMeta,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Seconds beyond the drain's that a server has between SIGTERM and SIGKILL.
const GRACE_SECONDS: i64 = 10;

/// Weight of each node where a slot failed before it failed elsewhere; 100 is the largest.
const AVOIDED_WEIGHT: i32 = 50;

/// What a start of a server is about.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub(crate) slot: u32,
    pub(crate) incarnation: u32,
    /// Failures in a row of this slot's servers before.
    pub(crate) failures: u32,
    /// Nodes where the slot failed: not on the last one, rather not on the others.
    pub(crate) avoid: Vec<String>,
}

/// Topology keys of a pool, nearest first.
pub(crate) fn levels<'a>(spec: &'a AttentionPoolSpec, settings: &'a Settings) -> &'a [String] {
    let own = &spec.placement.levels;
    if own.is_empty() { &settings.levels } else { own }
}

/// A dedicated server of a revision.
pub(crate) fn server(
    observed: &Observed,
    settings: &Settings,
    revision: &Revision<'_>,
    start: &Start,
) -> Pod {
    let pool = revision.pool.as_ref();
    let template = pool.spec.template.clone();
    let own = || own_template(&image(observed, &revision.digest, settings), settings);
    let template = template.unwrap_or_else(own);
    let from = template.metadata.unwrap_or_default();
    let mut labels = from.labels.unwrap_or_default();
    labels.extend(pool_labels(&pool.metadata));
    labels.extend(queue_labels(&pool.metadata));
    labels.insert(LABEL_SLOT.into(), start.slot.to_string());
    labels.insert(LABEL_REVISION.into(), revision.digest.clone());
    labels.remove(LABEL_CLASS);
    labels.extend(observed.pool.spec.class.iter().map(|it| (LABEL_CLASS.to_owned(), it.clone())));
    let mut annotations = from.annotations.unwrap_or_default();
    annotations.insert(ANNOTATION_INCARNATION.into(), start.incarnation.to_string());
    annotations.insert(ANNOTATION_FAILURES.into(), start.failures.to_string());
    if !start.avoid.is_empty() {
        annotations.insert(ANNOTATION_AVOID.into(), start.avoid.join(","));
    }
    let mut spec = template.spec.unwrap_or_default();
    devices(&mut spec, pool, settings);
    place(&mut spec, pool, settings, &start.avoid);
    // A preempted or evicted server drains between SIGTERM and SIGKILL.
    let grace = i64::from(pool.spec.drain.timeout_seconds) + GRACE_SECONDS;
    spec.termination_grace_period_seconds.get_or_insert(grace);
    spec.subdomain = Some(names::servers_service(name(&pool.metadata)));
    let variables = vec![
        variable(CADRE_ROLE, ROLE_SERVER),
        variable(CADRE_POOL, name(&pool.metadata)),
        variable(CADRE_INDEX, start.slot.to_string()),
        variable(CADRE_INCARNATION, start.incarnation.to_string()),
    ];
    complete(&mut spec, SERVER_CONTAINER, variables, settings);
    Pod {
        metadata: ObjectMeta {
            name: Some(names::server(name(&pool.metadata), start.slot, start.incarnation)),
            namespace: pool.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![owned_by::<AttentionPool>(&pool.metadata)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

/// Image of a server whose revision names none: that of the servers of it that work for jobs, else the chart's. After an
/// upgrade the chart's may be of another build, which cannot work for these jobs.
pub(crate) fn image(observed: &Observed, digest: &str, settings: &Settings) -> String {
    let all = servers(observed);
    let works = all.iter().find(|it| {
        it.revision() == Some(digest) && it.stays() && it.report.is_some_and(|it| it.serves)
    });
    works.and_then(Server::image).unwrap_or(&settings.server_image).to_owned()
}

/// Pod of a pool without a template: an image of ours, nothing that is not needed.
fn own_template(image: &str, settings: &Settings) -> PodTemplateSpec {
    let mut spec = PodSpec {
        containers: vec![Container {
            name: SERVER_CONTAINER.into(),
            image: Some(image.to_owned()),
            command: Some(vec!["cadre".into(), "serve".into()]),
            ..Container::default()
        }],
        ..PodSpec::default()
    };
    if !settings.server_priority_class.is_empty() {
        spec.priority_class_name = Some(settings.server_priority_class.clone());
    }
    // Lists that are empty in the settings are left out of the pod.
    let secrets = Some(settings.server_pull_secrets.clone());
    spec.image_pull_secrets = secrets.filter(|it| !it.is_empty());
    spec.tolerations = Some(settings.server_tolerations.clone()).filter(|it| !it.is_empty());
    let resources = Some(settings.server_resources.clone());
    spec.containers[0].resources = resources.filter(|it| *it != ResourceRequirements::default());
    let security = spec.security_context.get_or_insert_default();
    security.run_as_non_root = Some(true);
    volume(&mut spec, empty("cadre-tmp", EmptyDirVolumeSource::default()));
    let container = &mut spec.containers[0];
    container.security_context.get_or_insert_default().read_only_root_filesystem = Some(true);
    mount(container, "cadre-tmp", "/tmp", false);
    PodTemplateSpec { metadata: None, spec: Some(spec) }
}

/// GPUs and RDMA devices, unless the template has limits for them.
fn devices(spec: &mut PodSpec, pool: &AttentionPool, settings: &Settings) {
    let fabric = &pool.spec.fabric;
    let mut wanted: Vec<(&str, u32)> =
        fabric.rdma_resources.iter().map(|it| (it.as_str(), 1)).collect();
    if fabric.gpus_per_server > 0 {
        wanted.push((&settings.gpu_resource, fabric.gpus_per_server));
        let selector = spec.node_selector.get_or_insert_with(BTreeMap::new);
        for (key, value) in &settings.gpu_node_selector {
            selector.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    let Some(container) = spec.containers.iter_mut().find(|it| it.name == SERVER_CONTAINER) else {
        return;
    };
    if wanted.is_empty() {
        return;
    }
    let resources = container.resources.get_or_insert_default();
    let limits = resources.limits.get_or_insert_with(BTreeMap::new);
    for (resource, count) in wanted {
        limits.entry(resource.to_owned()).or_insert_with(|| Quantity(count.to_string()));
    }
}

/// Near to the trainers of the pool, nearest level first; away from nodes where the slot failed.
fn place(spec: &mut PodSpec, pool: &AttentionPool, settings: &Settings, avoid: &[String]) {
    let affinity = spec.affinity.get_or_insert_with(Affinity::default);
    // The node where the slot failed last is out of the question; the others it goes back to where there is none else.
    if let Some((newest, older)) = avoid.split_last() {
        let nodes = affinity.node_affinity.get_or_insert_with(NodeAffinity::default);
        let required = nodes
            .required_during_scheduling_ignored_during_execution
            .get_or_insert_with(|| NodeSelector { node_selector_terms: Vec::new() });
        if required.node_selector_terms.is_empty() {
            required.node_selector_terms.push(NodeSelectorTerm::default());
        }
        // Terms are alternatives, so each of them gets the exception.
        for term in &mut required.node_selector_terms {
            term.match_fields.get_or_insert_default().push(not_on(newest));
        }
        let preferred = older.iter().map(|node| PreferredSchedulingTerm {
            weight: AVOIDED_WEIGHT,
            preference: NodeSelectorTerm {
                match_fields: Some(vec![not_on(node)]),
                match_expressions: None,
            },
        });
        if !older.is_empty() {
            nodes
                .preferred_during_scheduling_ignored_during_execution
                .get_or_insert_default()
                .extend(preferred);
        }
    }
    let levels = levels(&pool.spec, settings);
    let Some(farthest) = levels.last() else { return };
    let term = |key: &String| near_trainers(pool, key);
    let pods = affinity.pod_affinity.get_or_insert_with(PodAffinity::default);
    let preferred =
        pods.preferred_during_scheduling_ignored_during_execution.get_or_insert_with(Vec::new);
    for (at, key) in (0_i32..).zip(levels) {
        // 100 is the largest weight; each level farther counts half.
        let weight = (100 >> at.min(6)).max(1);
        preferred.push(WeightedPodAffinityTerm { weight, pod_affinity_term: term(key) });
    }
    if pool.spec.placement.colocation == Colocation::Required {
        pods.required_during_scheduling_ignored_during_execution
            .get_or_insert_with(Vec::new)
            .push(term(farthest));
    }
}

/// Any node but this one. The API server takes exactly one name in such a requirement.
fn not_on(node: &str) -> NodeSelectorRequirement {
    NodeSelectorRequirement {
        key: "metadata.name".into(),
        operator: "NotIn".into(),
        values: Some(vec![node.to_owned()]),
    }
}

fn near_trainers(pool: &AttentionPool, key: &str) -> PodAffinityTerm {
    let mut labels = BTreeMap::from([(LABEL_POOL.to_owned(), name(&pool.metadata).to_owned())]);
    let jobs = &pool.spec.placement.colocate_with;
    let mut expressions = Vec::new();
    if jobs.is_empty() {
        // Pods of other kinds have no role.
        expressions.push(requirement(LABEL_ROLE, "NotIn", &[ROLE_SERVER.to_owned()]));
    } else {
        labels.insert(LABEL_ROLE.into(), ROLE_TRAINER.into());
        expressions.push(requirement(LABEL_JOB, "In", jobs));
    }
    let namespaces = &pool.spec.access.namespaces;
    let own = pool.metadata.namespace.iter();
    let all = namespaces.iter().chain(own).cloned().collect();
    PodAffinityTerm {
        label_selector: Some(LabelSelector {
            match_labels: Some(labels),
            match_expressions: Some(expressions),
        }),
        namespaces: (!namespaces.is_empty()).then_some(all),
        topology_key: key.to_owned(),
        ..PodAffinityTerm::default()
    }
}

fn requirement(key: &str, operator: &str, values: &[String]) -> LabelSelectorRequirement {
    LabelSelectorRequirement {
        key: key.into(),
        operator: operator.into(),
        values: Some(values.to_vec()),
    }
}

/// Gives each server a name that others resolve, before it is ready.
pub(crate) fn service(pool: &AttentionPool) -> Service {
    Service {
        metadata: meta(pool, names::servers_service(name(&pool.metadata))),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            publish_not_ready_addresses: Some(true),
            selector: Some(server_selector(name(&pool.metadata))),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// One server at a time may be evicted; those that are not ready always may. The disruption controller counts the others from
/// `spec.replicas`, through the scale subresource: those that find no node, or that the API server refuses, would count as
/// evicted as long as that is so (`missing`), and nobody could drain a node. It also keeps when numbers of others were taken over, if any were.
pub(crate) fn budget(
    pool: &AttentionPool,
    missing: usize,
    taken_over: &str,
) -> PodDisruptionBudget {
    let most = i32::try_from(missing).unwrap_or(i32::MAX).saturating_add(1);
    let mut metadata = meta(pool, names::servers_budget(name(&pool.metadata)));
    let noted = (ANNOTATION_TAKEN_OVER.to_owned(), taken_over.to_owned());
    metadata.annotations = (!taken_over.is_empty()).then(|| BTreeMap::from([noted]));
    PodDisruptionBudget {
        metadata,
        spec: Some(PodDisruptionBudgetSpec {
            min_available: None,
            selector: Some(LabelSelector {
                match_labels: Some(server_selector(name(&pool.metadata))),
                match_expressions: None,
            }),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".into()),
            max_unavailable: Some(IntOrString::Int(most)),
        }),
        status: None,
    }
}
