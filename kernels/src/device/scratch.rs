//! Scratch memory of launches, whose content nobody reads afterwards: parts of O and LSE, sums of dQ.
//!
//! In: the sizes that a plan needs. Out: addresses, for one call at a time. Plans may share a [`Scratch`]. It is then as large as
//! the largest of them needs, and their runs follow one another, whatever their streams.
//!
//! It grows, and shrinks only by [`Scratch::release`]. Invariants: the addresses that a call gets stay valid until it has
//! enqueued its work; sums of dQ are zero when a run begins, whatever happened to the run before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::check::{Refusal, same_gpu};
use super::driver::Gpu;
use super::error::Error;
use super::event::Event;
use super::memory::{Buffer, Stream};
use super::upload::Upload;

/// See the module; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Scratch(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    part_o: Buffer<f32>,
    part_lse: Buffer<f32>,
    sums: Buffer<f32>,
    /// A run that adds to the sums is enqueued, but not yet the launch at its end that zeroes them.
    dirty: bool,
    /// The end of the newest run.
    last: Option<Event>,
    /// Whether a run was recorded: then a graph has the addresses.
    recorded: bool,
    /// Copies plans' lists to the GPU; none before the first list.
    upload: Option<Upload>,
}

/// A scratch while one run uses it.
pub(super) struct Held<'a> {
    inner: &'a mut Inner,
    stream: &'a Stream,
    /// Whether the run is being recorded.
    records: bool,
    /// Whether it has addresses.
    given: bool,
    /// Whether the sums were cleared for this run because they were dirty.
    cleared: bool,
}

impl Inner {
    fn empty(gpu: &Gpu) -> Result<Self, Error> {
        let buffer = |what| Buffer::new(gpu, 0, what);
        Ok(Self {
            gpu: gpu.clone(),
            part_o: buffer("parts of O")?,
            part_lse: buffer("parts of LSE")?,
            sums: buffer("sums of dQ")?,
            dirty: false,
            last: None,
            recorded: false,
            upload: None,
        })
    }

    /// Grows the buffers for parts of O and of LSE to at least these numbers of elements.
    fn reserve_parts(&mut self, [o, lse]: [usize; 2]) -> Result<(), Error> {
        self.may_grow(o > self.part_o.len() || lse > self.part_lse.len(), "parts of O")?;
        self.part_o.reserve(o, "parts of O")?;
        self.part_lse.reserve(lse, "parts of LSE")
    }

    /// Grows the buffer of sums to at least `numbers` elements. New memory is not zeroed yet.
    fn reserve_sums(&mut self, numbers: usize) -> Result<(), Error> {
        if numbers > self.sums.len() {
            self.may_grow(true, "sums of dQ")?;
            self.dirty = true;
            self.sums.reserve(numbers, "sums of dQ")?;
        }
        Ok(())
    }

    fn may_grow(&self, grows: bool, what: &'static str) -> Result<(), Refusal> {
        if grows && self.recorded { Err(Refusal::Recorded { what }) } else { Ok(()) }
    }
}

impl<'a> Held<'a> {
    /// The stream of the run.
    pub(super) fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// Makes the run's stream wait for `event`. A recorded run waits for nothing outside of its
    /// recording.
    pub(super) fn behind(&self, event: &Event) -> Result<(), Error> {
        if self.records { Ok(()) } else { self.stream.wait_for(event) }
    }

    /// Addresses of room for these numbers of elements of parts of O, and of LSE.
    pub(super) fn parts(&mut self, numbers: [usize; 2]) -> Result<[u64; 2], Error> {
        self.inner.reserve_parts(numbers)?;
        self.given = true;
        Ok([self.inner.part_o.address(), self.inner.part_lse.address()])
    }

    /// Address of `numbers` sums. They are zero when the stream reaches this point; the run that
    /// follows adds to them.
    pub(super) fn sums(&mut self, numbers: usize) -> Result<u64, Error> {
        self.inner.reserve_sums(numbers)?;
        if self.inner.dirty {
            let all = self.inner.sums.len();
            self.inner.sums.clear(self.stream, all)?;
            self.cleared = true;
        }
        self.inner.dirty = true;
        self.given = true;
        Ok(self.inner.sums.address())
    }

    /// Notes that the run's last launch, which zeroes the sums, is enqueued.
    pub(super) fn sums_are_zero(&mut self) {
        // A recorded run zeroes the sums when its graph runs, not now.
        self.inner.dirty = self.records && self.cleared;
    }
}

impl Scratch {
    /// On `gpu`; no memory is taken yet.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        Ok(Self(Arc::new(Mutex::new(Inner::empty(gpu)?))))
    }

    /// Frees all memory of the scratch once the runs that are enqueued have ended. Later plans
    /// allocate what they need.
    ///
    /// # Errors
    ///
    /// The driver's, and where a graph has its addresses.
    pub fn release(&self) -> Result<(), Error> {
        let mut inner = self.lock();
        inner.may_grow(true, "plans to come")?;
        let (last, upload) = (inner.last.take(), inner.upload.take());
        *inner = Inner { last, upload, ..Inner::empty(&inner.gpu)? };
        Ok(())
    }

    /// Memory of the GPU that it has taken.
    pub fn len_bytes(&self) -> u64 {
        let inner = self.lock();
        [&inner.part_o, &inner.part_lse, &inner.sums].map(Buffer::len_bytes).iter().sum()
    }

    /// Refuses a plan whose lists are on another GPU.
    pub(super) fn is_on(&self, gpu: &Gpu) -> Result<(), Refusal> {
        same_gpu("the workspace", self.lock().gpu.device(), gpu.device())
    }

    /// Copies lists to the GPU. Work that is put on `stream` from now on waits for them.
    pub(super) fn upload<T>(
        &self,
        stream: &Stream,
        lists: impl FnOnce(&mut Upload) -> Result<T, Error>,
    ) -> Result<(T, Arc<Event>), Error> {
        let mut inner = self.lock();
        if inner.upload.is_none() {
            inner.upload = Some(Upload::new(&inner.gpu)?);
        }
        let upload = inner.upload.as_mut().expect("it was just made");
        let lists = lists(upload)?;
        let made = upload.sent()?;
        stream.wait_for(&made)?;
        Ok((lists, made))
    }

    /// Grows the memory for a plan's parts of O and LSE. Waits for calls that are about to enqueue a run.
    pub(super) fn reserve_parts(&self, numbers: [usize; 2]) -> Result<(), Error> {
        self.lock().reserve_parts(numbers)
    }

    /// Grows the memory for a plan's sums of dQ. Waits for calls that are about to enqueue a run.
    pub(super) fn reserve_sums(&self, numbers: usize) -> Result<(), Error> {
        self.lock().reserve_sums(numbers)
    }

    /// Enqueues a run on `stream`, after all runs before it. The call has the scratch to itself.
    pub(super) fn run(
        &self,
        stream: &Stream,
        put: impl FnOnce(&mut Held<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut guard = self.lock();
        let records = stream.records()?;
        let mut held = Held { inner: &mut guard, stream, records, given: false, cleared: false };
        if let Some(last) = &held.inner.last {
            held.behind(last)?;
        }
        let done = put(&mut held);
        let given = held.given;
        if records {
            // A run that was refused before it had addresses left none in the graph.
            guard.recorded |= given;
        } else {
            // This also covers a run that was enqueued in part, whose error comes first.
            let recorded = match &mut guard.last {
                Some(last) => last.record_again(stream),
                none => Event::record(stream).map(|it| *none = Some(it)),
            };
            return done.and(recorded);
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
