//! What a worker is told in `Welcome` besides the job's secret.
//!
//! In and out: one JSON object, written by the supervisor (later the operator) and read by trainers
//! and servers. Unknown fields are ignored, missing ones have defaults, so that either side may be
//! one version ahead. Options of the training itself are arguments of the command, not here.

use std::path::PathBuf;

use cadre_crds::{OnPoolLoss, Wire};
use serde::{Deserialize, Serialize};

use super::fault::Moment;

/// Where core attention is computed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionPlace {
    /// On the pool's slots.
    #[default]
    Pool,
    /// Every query row in its own trainer.
    Local,
}

/// The job as its workers need to know it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Settings {
    /// Name of the job.
    pub job: String,
    /// Name of the pool.
    pub pool: String,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Trainers of the job.
    pub trainers: u16,
    /// Steps of the job.
    pub steps: u64,
    /// Where core attention is computed.
    pub attention: AttentionPlace,
    /// Type of rows on the wire.
    pub wire: Wire,
    /// Nominal weights, servers of one numerics id.
    pub reproducible: bool,
    /// What to do when no server is left.
    pub on_pool_loss: OnPoolLoss,
    /// How long to wait for one.
    pub pool_wait_seconds: u32,
    /// Silence after which a server is suspected.
    pub suspect_after_milliseconds: u32,
    /// Where checkpoints go.
    pub checkpoints: PathBuf,
    /// Checkpoints that stay.
    pub checkpoints_kept: u32,
    /// Slots lost in the job before this worker came.
    pub failovers: u32,
    /// Checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Header log to replay.
    pub headers: Option<PathBuf>,
    /// Moments at which the conductor says `PhaseReached` and waits for `FaultsFired`.
    pub faults: Vec<Moment>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            job: String::new(),
            pool: String::new(),
            attempt: 1,
            trainers: 1,
            steps: 0,
            attention: AttentionPlace::Pool,
            wire: Wire::F32,
            reproducible: false,
            on_pool_loss: OnPoolLoss::Wait,
            pool_wait_seconds: 300,
            suspect_after_milliseconds: 1000,
            checkpoints: PathBuf::new(),
            checkpoints_kept: 3,
            failovers: 0,
            resume: None,
            headers: None,
            faults: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads the text of `Welcome`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        serde_json::from_str(text).map_err(|source| Error::Malformed { source })
    }

    /// The text for `Welcome`.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("settings have string keys and UTF-8 paths")
    }
}

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not the JSON of settings.
    #[error(
        "settings of the job are malformed: {source}; run worker and controller of the same release"
    )]
    Malformed {
        /// What is wrong.
        source: serde_json::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_another_version_are_read() {
        let settings = Settings::parse(r#"{"job":"bible","of_the_future":1}"#).expect("known");
        assert_eq!(settings, Settings { job: "bible".into(), ..Settings::default() });
    }

    #[test]
    fn malformed_settings_are_refused() {
        let refusal = Settings::parse("{").expect_err("cut off");
        assert!(refusal.to_string().starts_with("settings of the job are malformed"));
    }
}
