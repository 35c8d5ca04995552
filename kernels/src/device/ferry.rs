//! Copies of lent rows from and to pinned memory of the host.
//!
//! In: rows ([`Lent`], [`LentMut`]), and a stream of their lender's behind whose work they may be touched. Out: copies on a stream of our
//! own ([`Ferry`]), and the event that is over when they are.
//!
//! ```text
//! lender's stream: ─ makes rows ─┐                                       ┌─ waits for `over` ─ reads results
//! ours:                          └ copies down ─ over   copies up ─ over ┘
//! ```
//!
//! It launches nothing. Invariant: pinned memory that a copy reads or writes is neither touched nor used again before that copy is over.

// Every function of the driver is unsafe to call.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Gpu, call};
use super::error::Error;
use super::event::Event;
use super::lent::{Lent, LentMut};
use super::memory::Stream;
use super::pinned::{Pinned, PinnedPool};

/// Enqueues copies of lent rows on a stream of its own.
#[derive(Debug)]
pub struct Ferry {
    stream: Stream,
    pool: PinnedPool,
}

/// Rows that are being copied to the host.
#[derive(Debug)]
pub struct Coming {
    rows: Vec<Pinned>,
    over: Arc<Event>,
}

/// Rows that are being copied to the device. Dropping this waits for the copies.
#[derive(Debug)]
pub struct Going {
    over: Arc<Event>,
    _rows: Vec<Pinned>,
}

impl Ferry {
    /// On a stream of its own of `gpu`.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self, Error> {
        Ok(Self { stream: Stream::new(gpu)?, pool: PinnedPool::new(gpu) })
    }

    /// The GPU whose rows it moves.
    pub fn gpu(&self) -> &Gpu {
        self.stream.gpu()
    }

    /// Pinned memory for results, with unspecified content.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn room(&self, bytes: usize) -> Result<Pinned, Error> {
        self.pool.take(bytes)
    }

    /// Copies rows to the host, after the work that is on `behind` now.
    ///
    /// # Errors
    ///
    /// The driver's; nothing is being copied then.
    pub fn down(&self, rows: &[Lent<'_>], behind: &Stream) -> Result<Coming, Error> {
        let rooms = rows.iter().map(|it| self.pool.take(it.place.bytes()));
        let mut rooms = rooms.collect::<Result<Vec<_>, _>>()?;
        let mut put = || -> Result<Event, Error> {
            self.begin_behind(behind)?;
            for (from, to) in rows.iter().zip(&mut rooms) {
                let row = from.place.row();
                let copy = sys::CUDA_MEMCPY2D_st {
                    srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
                    srcDevice: from.place.address,
                    srcPitch: from.place.pitch(),
                    dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
                    dstHost: to.address().cast::<c_void>(),
                    dstPitch: row,
                    ..nothing(row, from.place.spread.rows)
                };
                self.put(&copy)?;
            }
            Event::record(&self.stream)
        };
        // Copies that were enqueued before the error still write to these rooms, so wait before
        // they are given back.
        let over = Arc::new(put().inspect_err(|_| drop(self.stream.wait()))?);
        Ok(Coming { rows: rooms, over })
    }

    /// Copies rows to the device behind the work that is on `behind` now.
    ///
    /// # Errors
    ///
    /// The driver's; nothing is being copied then.
    ///
    /// # Panics
    ///
    /// Room that is shorter than its rows.
    pub fn up(&self, rows: Vec<(Pinned, LentMut<'_>)>, behind: &Stream) -> Result<Going, Error> {
        let put = || -> Result<Event, Error> {
            self.begin_behind(behind)?;
            for (from, to) in &rows {
                assert!(from.bytes().len() >= to.place.bytes(), "rows come out of their room");
                let row = to.place.row();
                let copy = sys::CUDA_MEMCPY2D_st {
                    srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
                    srcHost: from.bytes().as_ptr().cast::<c_void>(),
                    srcPitch: row,
                    dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
                    dstDevice: to.place.address,
                    dstPitch: to.place.pitch(),
                    ..nothing(row, to.place.spread.rows)
                };
                self.put(&copy)?;
            }
            Event::record(&self.stream)
        };
        let over = Arc::new(put().inspect_err(|_| drop(self.stream.wait()))?);
        Ok(Going { over, _rows: rows.into_iter().map(|it| it.0).collect() })
    }

    /// Makes our stream wait for the work that is on `lender` now.
    fn begin_behind(&self, lender: &Stream) -> Result<(), Error> {
        self.stream.wait_for(&Event::record(lender)?)
    }

    fn put(&self, copy: &sys::CUDA_MEMCPY2D_st) -> Result<(), Error> {
        if copy.WidthInBytes == 0 || copy.Height == 0 {
            return Ok(());
        }
        self.gpu().bind()?;
        // SAFETY: the lender's rows, as they promise, and pinned memory of their length, which nobody touches or gives back before the
        // event behind the copy is over.
        let code = unsafe { sys::cuMemcpy2DAsync_v2(copy, self.stream.handle()) };
        call("cuMemcpy2DAsync", || ", lent rows".to_owned(), code)
    }
}

/// A copy descriptor of `rows` rows of `row` bytes, without source and target.
fn nothing(row: usize, rows: usize) -> sys::CUDA_MEMCPY2D_st {
    sys::CUDA_MEMCPY2D_st {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: row,
        Height: rows,
    }
}

impl Coming {
    /// The event after which the lender may write its rows again.
    pub fn over(&self) -> &Arc<Event> {
        &self.over
    }

    /// Waits for the copies. Returns the rows in the order in which they were given.
    ///
    /// # Errors
    ///
    /// What went wrong in the streams before.
    pub fn land(mut self) -> Result<Vec<Pinned>, Error> {
        self.over.wait()?;
        Ok(std::mem::take(&mut self.rows))
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        // A lost GPU writes no more, so its error does not matter here.
        let _ = self.over.wait();
    }
}

impl Going {
    /// When the rows are there.
    pub fn over(&self) -> &Arc<Event> {
        &self.over
    }

    /// Whether they are.
    ///
    /// # Errors
    ///
    /// What went wrong in the streams before.
    pub fn is_over(&self) -> Result<bool, Error> {
        self.over.is_over()
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.over.wait();
    }
}
