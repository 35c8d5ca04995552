//! Our kinds as resources of the API server.
//!
//! Group, version, kind and path of [`AttentionPool`] and [`TrainingJob`], by the traits of
//! k8s-openapi. Clients build on these traits; there is no client here and no request is made.

use k8s_openapi::{NamespaceResourceScope, Resource};

use crate::contract::API_VERSION;
use crate::{AttentionPool, TrainingJob};

impl Resource for AttentionPool {
    const API_VERSION: &'static str = API_VERSION;
    const GROUP: &'static str = "cadre.dev";
    const KIND: &'static str = "AttentionPool";
    const VERSION: &'static str = "v1alpha1";
    const URL_PATH_SEGMENT: &'static str = "attentionpools";
    type Scope = NamespaceResourceScope;
}

impl Resource for TrainingJob {
    const API_VERSION: &'static str = API_VERSION;
    const GROUP: &'static str = "cadre.dev";
    const KIND: &'static str = "TrainingJob";
    const VERSION: &'static str = "v1alpha1";
    const URL_PATH_SEGMENT: &'static str = "trainingjobs";
    type Scope = NamespaceResourceScope;
}
