//! Checkpoints that trainers tell of: how far a job has come for good.
//!
//! In: what a trainer has written, and what a conductor goes on from. Out: the steps in the newest one, told to the
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

/// Steps in the checkpoint at a path, by its name, `step-N`; of another name, or none, 0.
pub(super) fn steps_in(path: &str) -> u64 {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.strip_prefix("step-").and_then(|it| it.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_from_the_name_of_a_checkpoint() {
        for (path, steps) in [("/a/j-12/step-40", 40), ("step-7", 7), ("/step-3/x", 0), ("", 0)] {
            assert_eq!(steps_in(path), steps, "{path}");
        }
    }
}
