//! What a checkpoint belongs to.
//!
//! In: what a run was asked to do. Out: the same, read back; a refusal where another run asks for something else.

use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::CheckpointError;
use crate::model::{Config, Stack};

/// What a checkpoint belongs to, and how far it is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps done: the run goes on with the step of this number.
    pub step: u64,
    /// Sizes of the model.
    pub model: Config,
    /// Its layers.
    pub layers: Stack,
    /// Trainers of the job.
    pub trainers: u32,
    /// Nano-batches of a micro-batch.
    pub nano_batches: u32,
    /// Micro-batches of a step, whose gradients are summed.
    pub accumulate: u32,
    /// Rows of a trainer and nano-batch.
    pub tokens: u32,
    /// Longest document.
    pub cap: u32,
    /// Seed of the data and of the initial weights.
    pub seed: u64,
    /// Digest of the corpus, 16 hex digits; with that of the list of lengths where that is not the usual one.
    pub corpus: String,
    /// Text of the schedule of the learning rate, for the notice when it differs.
    pub schedule: String,
    /// Numerics id of the build.
    pub numerics: String,
    /// Text of the slots of the last step, for the notice when they differ.
    pub slots: String,
    /// Bits of the last loss, 8 hex digits; empty before the first step.
    pub loss_bits: String,
    /// Digest of the last step's header, 16 hex digits; empty before the first step.
    pub header: String,
}

impl State {
    /// What this model has that the `config.json` of a Llama cannot express; none for a Llama.
    pub fn beyond_llama(&self) -> Option<String> {
        let Config { width, query_heads, .. } = self.model;
        let sizes = (!width.is_multiple_of(query_heads)).then(|| {
            format!("its width {width} is no multiple of its {query_heads} query heads, as transformers asks of a Llama")
        });
        self.layers.beyond_llama().or(sizes)
    }

    /// Names what all trainers of a job have to do alike: everything but what differs between processors and from step to step.
    pub fn digest(&self) -> u64 {
        let none = String::new;
        let alike = Self {
            numerics: none(),
            slots: none(),
            loss_bits: none(),
            header: none(),
            ..self.clone()
        };
        xxh3_64(format!("{alike:?}").as_bytes())
    }

    /// Refuses a state of another run than `wanted`. `folder`, where this state was found, is named in the error.
    pub(super) fn fits(&self, wanted: &Self, folder: &Path) -> Result<(), CheckpointError> {
        let shown = |model: &Config| format!("{model:?}");
        let pairs = [
            ("model", shown(&self.model), shown(&wanted.model)),
            ("list of layers", self.layers.to_string(), wanted.layers.to_string()),
            ("number of trainers", self.trainers.to_string(), wanted.trainers.to_string()),
            (
                "number of nano-batches",
                self.nano_batches.to_string(),
                wanted.nano_batches.to_string(),
            ),
            ("number of micro-batches", self.accumulate.to_string(), wanted.accumulate.to_string()),
            ("tokens per trainer", self.tokens.to_string(), wanted.tokens.to_string()),
            ("cap of documents", self.cap.to_string(), wanted.cap.to_string()),
            ("seed", self.seed.to_string(), wanted.seed.to_string()),
            ("corpus or list of lengths", self.corpus.clone(), wanted.corpus.clone()),
        ];
        for (field, found, wanted) in pairs {
            if found != wanted {
                let path = folder.to_path_buf();
                return Err(CheckpointError::Foreign { path, field, found, wanted });
            }
        }
        Ok(())
    }
}
