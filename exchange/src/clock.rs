//! The clock that a provider's deadlines are measured by.
//!
//! In: nothing, or a [`Hand`] that a test moves. Out: moments. A poll always sleeps by the clock of the system.
//!
//! Invariant: the time never goes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock; clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    driven: Option<(Instant, Arc<AtomicU64>)>,
}

/// Moves a driven clock.
#[derive(Clone, Debug)]
pub struct Hand {
    nanos: Arc<AtomicU64>,
}

impl Clock {
    /// The clock of the system.
    pub fn system() -> Self {
        Self::default()
    }

    /// A clock whose time only its [`Hand`] moves, so that tests need not wait.
    pub fn driven() -> (Self, Hand) {
        let nanos = Arc::<AtomicU64>::default();
        (Self { driven: Some((Instant::now(), Arc::clone(&nanos))) }, Hand { nanos })
    }

    /// The time now.
    pub fn now(&self) -> Instant {
        match &self.driven {
            None => Instant::now(),
            Some((start, nanos)) => *start + Duration::from_nanos(nanos.load(Ordering::Acquire)),
        }
    }
}

impl Hand {
    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        self.nanos.fetch_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driven_clock_moves_with_its_hand_alone() {
        let (clock, hand) = Clock::driven();
        let (other, start) = (clock.clone(), clock.now());
        assert_eq!(clock.now(), start);
        hand.advance(Duration::from_secs(3));
        assert_eq!(other.now(), start + Duration::from_secs(3));
        assert!(Clock::system().now() >= start);
    }
}
