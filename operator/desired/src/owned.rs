//! What others have changed of the objects that pools and jobs are made of.
//!
//! In: an object as it is and as it should be. Out: whether each field that the operator writes is as it should be. What others
//! have added is theirs.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Whether a Service is as it should be.
pub(crate) fn is_service(found: &Service, wanted: &Service) -> bool {
    let fields = |it: &Service| {
        let spec = it.spec.clone().unwrap_or_default();
        (spec.cluster_ip, spec.publish_not_ready_addresses, spec.selector)
    };
    has_labels(&found.metadata, &wanted.metadata) && fields(found) == fields(wanted)
}

/// Whether a disruption budget is as it should be, annotations aside.
pub(crate) fn is_budget(found: &PodDisruptionBudget, wanted: &PodDisruptionBudget) -> bool {
    let fields = |it: &PodDisruptionBudget| {
        let spec = it.spec.clone().unwrap_or_default();
        (spec.max_unavailable, spec.selector, spec.unhealthy_pod_eviction_policy)
    };
    has_labels(&found.metadata, &wanted.metadata) && fields(found) == fields(wanted)
}

fn has_labels(found: &ObjectMeta, wanted: &ObjectMeta) -> bool {
    let has = |(key, value)| found.labels.as_ref().and_then(|it| it.get(key)) == Some(value);
    wanted.labels.iter().flatten().all(has)
}
