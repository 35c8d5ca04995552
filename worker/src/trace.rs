//! Time spans of one process, for the step timeline.
//!
//! In: spans from any thread. Out: one JSON object a line in `OUT/trace/ROLE-INDEX-INCARNATION.jsonl`,
//! written at the end of each step, so that a killed process leaves whole steps behind. The
//! supervisor merges the files to a Chrome trace. Without a folder nothing is kept.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// What a thread was doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activity {
    /// Everything of a layer but core attention, and the optimizer.
    Linear,
    /// Rows published and announced.
    Doorbell,
    /// Rows or results on their way.
    Pull,
    /// A kernel launch.
    Launch,
    /// Nothing to do until somebody else is done.
    Wait,
}

impl Activity {
    fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Doorbell => "doorbell",
            Self::Pull => "pull",
            Self::Launch => "launch",
            Self::Wait => "wait",
        }
    }
}

#[derive(Serialize)]
struct Line {
    name: &'static str,
    ts_us: u64,
    dur_us: u64,
    track: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    args: String,
}

/// Collects spans; clones share one file.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    /// A moment and the machine's monotonic clock at it, in microseconds.
    epoch: (Instant, u64),
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pending: String,
    file: File,
}

impl Tracer {
    /// Keeps nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Writes to `folder/name.jsonl`.
    ///
    /// # Errors
    ///
    /// The folder or the file cannot be made.
    pub fn to(folder: &Path, name: &str) -> std::io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let file = File::create(folder.join(format!("{name}.jsonl")))?;
        let now = clock_gettime(ClockId::Monotonic);
        let micros = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000;
        let state = Mutex::new(State { pending: String::new(), file });
        Ok(Self(Some(Arc::new(Inner { epoch: (Instant::now(), micros), state }))))
    }

    /// Whether anything is kept.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Keeps the span from `start` until now, on the thread's `track`.
    pub fn span(
        &self,
        track: &'static str,
        activity: Activity,
        start: Instant,
        detail: impl FnOnce() -> String,
    ) {
        self.span_between(track, activity, (start, Instant::now()), detail);
    }

    /// Keeps the span between two moments.
    pub fn span_between(
        &self,
        track: &'static str,
        activity: Activity,
        (start, end): (Instant, Instant),
        detail: impl FnOnce() -> String,
    ) {
        let Some(inner) = &self.0 else { return };
        let (epoch, micros) = inner.epoch;
        let line = Line {
            name: activity.name(),
            ts_us: micros + start.saturating_duration_since(epoch).as_micros() as u64,
            dur_us: end.saturating_duration_since(start).as_micros() as u64,
            track,
            args: detail(),
        };
        let text = serde_json::to_string(&line).expect("a line of plain fields serialises");
        let mut state = inner.state.lock().expect("no holder of this lock panics");
        state.pending.push_str(&text);
        state.pending.push('\n');
    }

    /// Writes what was kept so far. A full disk stops the trace, not the training.
    pub fn flush(&self) {
        let Some(inner) = &self.0 else { return };
        let mut state = inner.state.lock().expect("no holder of this lock panics");
        let pending = std::mem::take(&mut state.pending);
        if let Err(error) = state.file.write_all(pending.as_bytes()) {
            tracing::warn!("the trace is incomplete: {error}");
        }
    }
}
