//! What a job does when a trainer has ended that should not have.
//!
//! In: `spec.failurePolicy` as people write it. Out: the same, with what leaving a field out means. What follows from it is
//! decided elsewhere.

use serde::{Deserialize, Serialize};

/// What a dead trainer does to the job.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.stalledAfterSeconds > self.suspectAfterSeconds", "message": "spec.failurePolicy.stalledAfterSeconds is not above spec.failurePolicy.suspectAfterSeconds; raise it, or lower spec.failurePolicy.suspectAfterSeconds"},
    ]))
)]
#[serde(default, rename_all = "camelCase")]
pub struct FailurePolicy {
    /// Restarts in a row without a newer checkpoint before the job fails; a newer one sets the count back. Default 3, of
    /// `cadre run` 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1000)))]
    pub max_restarts: Option<u32>,
    /// Silence after which a trainer is dead: it hangs, or its node is gone. Default 30 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 3600)))]
    pub suspect_after_seconds: u32,
    /// Time without a call although it is its turn after which a trainer stands still, and the attempt ends. Above
    /// `suspectAfterSeconds`. Default 1800 s.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 86400)))]
    pub stalled_after_seconds: u32,
    /// Exceptions, first match wins. At most 16.
    #[cfg_attr(feature = "schema", schemars(length(max = 16)))]
    pub rules: Vec<FailureRule>,
}

impl FailurePolicy {
    /// What leaving `maxRestarts` out means in a cluster.
    pub const DEFAULT_MAX_RESTARTS: u32 = 3;

    /// Restarts in a row without a newer checkpoint before a job of a cluster fails.
    pub fn restarts(&self) -> u32 {
        self.max_restarts.unwrap_or(Self::DEFAULT_MAX_RESTARTS)
    }
}

impl Default for FailurePolicy {
    fn default() -> Self {
        Self {
            max_restarts: None,
            suspect_after_seconds: 30,
            stalled_after_seconds: 1800,
            rules: Vec::new(),
        }
    }
}

/// An exception from `maxRestarts`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct FailureRule {
    /// What to do.
    pub action: FailureAction,
    /// Exit codes of a trainer that the rule is about, 1 to 255.
    #[cfg_attr(
        feature = "schema",
        schemars(length(min = 1, max = 255), inner(range(min = 1, max = 255)))
    )]
    pub exit_codes: Vec<u32>,
}

/// What a failure rule does.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum FailureAction {
    /// The job fails at once.
    FailJob,
    /// The job restarts and the restart counts.
    Restart,
    /// The job restarts and the restart does not count.
    RestartUncounted,
}
