//! Where the checkpoints of a job go, and what it begins with.
//!
//! In: `spec.checkpoint` as people write it. Out: the same, with what leaving a field out means. Whether a folder is there
//! is seen by trainer 0 alone.

use serde::{Deserialize, Serialize};

/// Where checkpoints go and how many stay.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.resumeFrom) || self.resumeFrom.matches('^[a-z0-9][-a-z0-9]*(/step-[0-9]+)?$')", "message": "spec.checkpoint.resumeFrom is no folder of a job's checkpoints; write NAME-UID, or NAME-UID/step-N for one of them"},
        {"rule": "!has(self.resumeFrom) || has(self.claimName) || has(self.hostPath)", "message": "spec.checkpoint.resumeFrom is set without storage; name that job's, spec.checkpoint.claimName or hostPath"},
        {"rule": "has(self.resumeFrom) == has(oldSelf.resumeFrom) && (!has(self.resumeFrom) || self.resumeFrom == oldSelf.resumeFrom)", "message": "spec.checkpoint.resumeFrom never changes; create a new job that names it"},
        {"rule": "!has(self.claimName) || !has(self.hostPath)", "message": "spec.checkpoint.hostPath is set beside spec.checkpoint.claimName; keep one of them"},
    ]))
)]
#[serde(default, rename_all = "camelCase")]
pub struct Checkpoint {
    /// Newest checkpoints that are kept. At least 1. Default 3.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub keep: u32,
    /// Claim whose volume holds them, mounted in every trainer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 253)))]
    pub claim_name: Option<String>,
    /// Directory of the node that holds them, where the cluster allows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 1024)))]
    pub host_path: Option<String>,
    /// What the job begins with: the folder of another job there, `NAME-UID` with the first 8 characters of the uid, for the
    /// newest checkpoint in it, or `NAME-UID/step-N` for that one. Default: the job begins at step 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = 128)))]
    pub resume_from: Option<String>,
}

impl Checkpoint {
    /// Whether there is storage that other jobs may know.
    pub fn is_shared(&self) -> bool {
        self.claim_name.is_some() || self.host_path.is_some()
    }
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { keep: 3, claim_name: None, host_path: None, resume_from: None }
    }
}
