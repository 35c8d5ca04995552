//! Waiting for a condition, never for a time.
//!
//! In: a look that answers when the condition holds. Out: its answer, or an error that names what was
//! waited for and what the last look found.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longest wait. Far above what is normal on a busy machine, so it never decides about a slow one.
const LONGEST: Duration = Duration::from_mins(2);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Looks until there is an answer. An error of a look is remembered and looked past: an API server that
/// starts refuses connections.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let began = Instant::now();
    let mut last = None;
    while began.elapsed() < LONGEST {
        match look().await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => last = None,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(PAUSE).await;
    }
    let last = last.map(|it| format!("; the last look said: {it:#}")).unwrap_or_default();
    bail!("waited {} s for {what}{last}", LONGEST.as_secs())
}
