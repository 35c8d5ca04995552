//! What time it is for the machines of a process.
//!
//! In: the system's clock, or nanoseconds that somebody else counts. Out: protocol time ([`Nanos`], from the start of the
//! process), and moments for whoever works with the system's.
//!
//! Invariant: a process has one clock, and it never goes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cadre_protocol::Nanos;

/// See the module. Clones tell the same time.
#[derive(Clone, Debug)]
pub struct Clock {
    /// When protocol time began.
    epoch: Instant,
    counted: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// The system's; protocol time begins now.
    pub fn system() -> Self {
        Self { epoch: Instant::now(), counted: None }
    }

    /// Nanoseconds since `epoch` that somebody else counts up.
    pub fn counted(epoch: Instant, nanos: Arc<AtomicU64>) -> Self {
        Self { epoch, counted: Some(nanos) }
    }

    /// Protocol time.
    pub fn now(&self) -> Nanos {
        match &self.counted {
            None => Nanos(self.epoch.elapsed().as_nanos() as u64),
            Some(nanos) => Nanos(nanos.load(Ordering::Relaxed)),
        }
    }

    /// The moment of a protocol time.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.epoch + Duration::from_nanos(at.0)
    }

    /// This moment.
    pub fn moment(&self) -> Instant {
        self.instant(self.now())
    }
}
