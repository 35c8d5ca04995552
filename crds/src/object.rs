//! What every object of ours is: metadata, what the user wants, and what is there.
//!
//! [`AttentionPool`](crate::AttentionPool) and [`TrainingJob`](crate::TrainingJob) are this with a spec and a status of
//! their own. What fields mean and which of them fit together is said where these are.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata, Resource};
use serde::{Deserialize, Serialize};

/// An object as the API server stores it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct CustomResource<Spec, Status> {
    /// Name, labels and what else every object has.
    pub metadata: ObjectMeta,
    /// What the user wants.
    pub spec: Spec,
    /// What is there; written by the operator only.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
}

/// Without asking that a status has a default.
fn none<Status>() -> Option<Status> {
    None
}

impl<Spec, Status> Metadata for CustomResource<Spec, Status>
where
    Self: Resource,
{
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
