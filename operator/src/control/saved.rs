//! Checkpoints that trainers tell of: how far a job has come for good.
//!
//! In: what a trainer has written. Out: the steps in the newest one, told to the
//! reconciles at once, since an attempt may end right after it. Nothing here looks at a volume.

use cadre_views::JobKey;

use super::service::{Service, tell_job};

impl Service {
    /// A checkpoint of an attempt holds `steps` steps.
    pub(super) fn saved(&mut self, attempt: &JobKey, steps: u64) {
        if let Some(figures) = self.jobs.saved(attempt, steps) {
            tell_job(&self.context, attempt, figures);
        }
    }
}
