//! A launch that was enqueued on a stream and may not be over.
//!
//! In: works, the memory that the launch writes, moments of its stream. Out: the works with their results, once the launch is
//! over. Asking never waits.
//!
//! Invariant: memory that the launch writes is dropped or handed on only after the launch is over.

use std::sync::Arc;
use std::time::Duration;

use cadre_kernels::device::{Error, Event, Stream};

use super::{Done, Results, Work, shared_out};
use crate::memory::GpuRows;

/// See the module.
#[derive(Debug)]
pub struct Flight {
    /// None once it was handed on.
    works: Option<Vec<(Work<GpuRows>, Results<GpuRows>)>>,
    /// When what it reads was there.
    start: Event,
    over: Arc<Event>,
}

impl Flight {
    /// Everything that is on `stream` now, since `start`, which computes `works`.
    pub(super) fn new(
        stream: &Stream,
        start: Event,
        works: Vec<(Work<GpuRows>, Results<GpuRows>)>,
    ) -> Result<Self, Error> {
        // Without an event at its end, nothing would show when its memory is free.
        let over = Event::timed(stream).inspect_err(|_| drop(stream.wait()))?;
        Ok(Self { works: Some(works), start, over: Arc::new(over) })
    }

    /// Whether its results are there.
    ///
    /// # Errors
    ///
    /// The GPU's.
    pub fn is_over(&self) -> Result<bool, Error> {
        self.over.is_over()
    }

    /// Waits for the launch and returns its results. Its own time begins when `before`, an earlier
    /// launch, was over.
    ///
    /// # Errors
    ///
    /// The GPU's; it is waited for.
    pub fn land(
        mut self,
        before: Option<&Event>,
    ) -> Result<(Vec<Done<GpuRows>>, Arc<Event>), Error> {
        self.over.wait()?;
        let mut seconds = self.over.seconds_since(&self.start)?;
        if let Some(before) = before {
            // Launches of two streams may end in another order than they were asked for in.
            seconds = seconds.min(self.over.seconds_since(before)?).max(0.0);
        }
        let works = self.works.take().unwrap_or_default();
        Ok((shared_out(works, Duration::from_secs_f64(seconds)), Arc::clone(&self.over)))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.works.is_some() {
            // A GPU that is lost writes no more.
            let _ = self.over.wait();
        }
    }
}
