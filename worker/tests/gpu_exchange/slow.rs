//! A GPU whose copies are over when the test says so.
//!
//! In: a switch. Out: a [`Device`] that is [`GpuMemory`] but for the question whether a copy is over.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use cadre_exchange::{Device, Piece, Place};
use cadre_worker::gpu_memory::GpuMemory;

/// What the test sees and says.
#[derive(Default)]
pub(super) struct Switch {
    /// Copies are not over while this is set.
    pub(super) held: Cell<bool>,
    /// Copies that were begun.
    pub(super) begun: Cell<u32>,
}

pub(super) struct Slow {
    pub(super) gpu: GpuMemory,
    pub(super) switch: Rc<Switch>,
}

impl Device for Slow {
    type Memory = <GpuMemory as Device>::Memory;
    type Imported = <GpuMemory as Device>::Imported;
    type Copy = <GpuMemory as Device>::Copy;
    type Error = <GpuMemory as Device>::Error;

    fn place(&self, memory: &Self::Memory) -> Place {
        self.gpu.place(memory)
    }

    fn export(&self, memory: &Self::Memory) -> Result<OwnedFd, Self::Error> {
        self.gpu.export(memory)
    }

    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Self::Imported, Self::Error> {
        self.gpu.import(descriptor, bytes)
    }

    fn copy(
        &mut self,
        from: &Self::Imported,
        to: &Self::Memory,
        pieces: &[Piece],
    ) -> Result<Self::Copy, Self::Error> {
        self.switch.begun.set(self.switch.begun.get() + 1);
        self.gpu.copy(from, to, pieces)
    }

    fn is_over(&self, copy: &Self::Copy) -> Result<bool, Self::Error> {
        Ok(!self.switch.held.get() && self.gpu.is_over(copy)?)
    }
}
