//! How often numbers of a status are written.
//!
//! In: when which status was written. Out: how long numbers alone have to wait, since each write goes to all who watch the object.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two writes of one object's status that tell no other truth or reason.
pub(crate) const APART: Duration = Duration::from_secs(10);

/// When which status was written last, by uid.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    written: Mutex<BTreeMap<String, Instant>>,
}

impl Pace {
    /// How long numbers alone have to wait.
    pub(crate) fn wait(&self, uid: &str, now: Instant) -> Option<Duration> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let left = APART.saturating_sub(now.duration_since(*written.get(uid)?));
        Some(left).filter(|it| !it.is_zero())
    }

    /// The status of an object was written now.
    pub(crate) fn wrote(&self, uid: String, now: Instant) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, at| now.duration_since(*at) < APART);
        written.insert(uid, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wait_for_their_turn_and_old_turns_are_forgotten() {
        let pace = Pace::default();
        let start = Instant::now();
        assert_eq!(pace.wait("a", start), None, "the first is written at once");
        pace.wrote("a".into(), start);
        assert_eq!(pace.wait("a", start + APART / 4), Some(APART / 4 * 3));
        assert_eq!(pace.wait("b", start), None, "each object has its own turns");
        assert_eq!(pace.wait("a", start + APART), None);
        pace.wrote("b".into(), start + APART);
        assert_eq!(pace.written.lock().expect("nobody panicked").len(), 1);
    }
}
