//! Launches under way on rows that live on the GPU: what a thread that computes has put there and not seen the end of.
//!
//! In: works. Out: those whose launches are over, with their results and the time that was theirs. It waits for no launch.
//!
//! Invariant: every work that is put is given back once, unless the GPU failed.

use std::sync::Arc;
use std::time::Instant;

use cadre_kernels::device::{Error, Event, Refusal};
use cadre_kernels::{Engine, EngineError};

use super::{Done, Flight, Landed, Launcher, Resident, Work};
use crate::memory::{GpuRows, OnGpu};

/// See the module.
#[derive(Debug)]
pub struct Flying {
    engine: Engine,
    resident: Resident,
    /// Launches that were enqueued on streams, in this order, with when.
    flights: Vec<(Instant, Flight)>,
    /// The end of the last one, on the GPU's clock and on ours.
    before: Option<(Instant, Arc<Event>)>,
}

impl Launcher for Flying {
    type Memory = GpuRows;

    const EARLY: bool = true;

    fn new(engine: Engine, place: &OnGpu) -> Result<Self, Error> {
        let resident = Resident::new(&engine, place)?;
        Ok(Self { engine, resident, flights: Vec::new(), before: None })
    }

    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn unfit(&mut self) -> Option<Refusal> {
        self.engine.unfit()
    }

    fn put(&mut self, works: Vec<Work<GpuRows>>) -> Result<Vec<Done<GpuRows>>, EngineError> {
        let start = Instant::now();
        let flights = self.resident.put(works)?;
        self.flights.extend(flights.into_iter().map(|it| (start, it)));
        Ok(Vec::new())
    }

    fn flights(&self) -> usize {
        self.flights.len()
    }

    fn land(&mut self) -> Vec<Landed<GpuRows>> {
        let (mut landed, mut index) = (Vec::new(), 0);
        while index < self.flights.len() {
            match self.flights[index].1.is_over() {
                Ok(false) => index += 1,
                Ok(true) => {
                    let (put, flight) = self.flights.remove(index);
                    let before = self.before.take();
                    let (seen, over) = before.unzip();
                    landed.push(flight.land(over.as_deref()).map(|(done, over)| {
                        let start = seen.map_or(put, |it| it.max(put));
                        self.before = Some((Instant::now(), over));
                        (start, done)
                    }));
                }
                Err(error) => {
                    self.flights.remove(index);
                    landed.push(Err(error));
                }
            }
        }
        landed
    }
}
