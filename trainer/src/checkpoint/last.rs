//! The last step before a checkpoint, for the logs of whoever goes on from it.
//!
//! In: its header, and what the trainer that writes tells of it. Out: `last.json` in the folder of the checkpoint; back from it the
//! same. A job whose trainer 0 died before it told anybody has this step in its checkpoint and in no log.
//!
//! Nothing that is computed depends on it, so a file that cannot be read is as good as none.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use cadre_worker::session::{Header, StepDone};
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Debug)]
pub struct Last {
    /// Of the step.
    pub header: Arc<Header>,
    /// The report of a trainer about the step.
    pub done: StepDone,
}

/// Name of the file in the folder of a checkpoint.
pub(super) const LAST: &str = "last.json";

#[derive(Serialize)]
struct Written<'a> {
    header: &'a Header,
    done: &'a StepDone,
}

#[derive(Deserialize)]
struct Found {
    header: Header,
    done: StepDone,
}

impl Last {
    /// What the file holds.
    pub(crate) fn text(&self) -> Vec<u8> {
        let Self { header, done } = self;
        let text = serde_json::to_vec(&Written { header, done });
        text.expect("a header and numbers are plain data")
    }

    /// Reads the last step of the checkpoint in `folder`; none if the checkpoint does not hold it.
    pub fn of(folder: &Path) -> Option<Self> {
        let text = fs::read(folder.join(LAST)).ok()?;
        match serde_json::from_slice(&text) {
            Ok(Found { header, done }) => Some(Self { header: Arc::new(header), done }),
            Err(error) => {
                tracing::warn!("{} is ignored: {error}", folder.join(LAST).display());
                None
            }
        }
    }
}
