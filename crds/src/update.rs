//! `spec.updateStrategy`: how a change of what servers are made from reaches those that are there.
//!
//! Field names, bounds and defaults alone; what the operator does with them is decided there.

use serde::{Deserialize, Serialize};

/// How servers of a former revision are replaced.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.type == 'RollingUpdate' || !has(self.rollingUpdate)", "message": "spec.updateStrategy.rollingUpdate is of no use to spec.updateStrategy.type OnDelete; remove it, or write RollingUpdate"},
    ]))
)]
#[serde(default, rename_all = "camelCase")]
pub struct UpdateStrategy {
    /// Who ends servers of a former revision: the operator (`RollingUpdate`, the default), or whoever deletes their pods
    /// (`OnDelete`).
    pub r#type: UpdateType,
    /// How fast the operator goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
}

/// Who ends servers of a former revision.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum UpdateType {
    /// The operator, some at a time.
    #[default]
    RollingUpdate,
    /// Whoever deletes their pods.
    OnDelete,
}

/// How fast servers of a former revision are replaced.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct RollingUpdate {
    /// Servers that may be missing for the change at a time, once the first one of it is ready. Default 1.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4096)))]
    pub max_unavailable: u32,
}

impl Default for RollingUpdate {
    fn default() -> Self {
        Self { max_unavailable: 1 }
    }
}
