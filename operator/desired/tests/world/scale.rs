//! What the API server makes of a write of `spec.replicas`.

use cadre_crds::AttentionPool;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

/// Writes the number as this manager: the field is its own from now on. A number that is there already changes nothing.
pub(crate) fn scale(pool: &mut AttentionPool, replicas: u32, manager: &str, second: i64) {
    if pool.spec.replicas == replicas {
        return;
    }
    pool.spec.replicas = replicas;
    let entry = ManagedFieldsEntry {
        manager: Some(manager.to_owned()),
        subresource: Some("scale".into()),
        time: Timestamp::from_second(second).ok().map(Time),
        fields_v1: Some(FieldsV1(json!({"f:spec": {"f:replicas": {}}}))),
        ..ManagedFieldsEntry::default()
    };
    pool.metadata.managed_fields = Some(vec![entry]);
}
