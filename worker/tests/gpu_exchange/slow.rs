//! A GPU whose copies are over when the test says so.
//!
//! In: a switch. Out: a [`Device`] that is [`GpuMemory`] but for the question whether a copy is over.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use cadre_exchange::{Device, Piece, Place};
use cadre_kernels::device::{ArenaMemory, Error, Event, Imported};
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
    type Memory = ArenaMemory;
    type Imported = Imported;
    type Copy = Event;
    type Error = Error;

    fn place(&self, memory: &ArenaMemory) -> Place {
        self.gpu.place(memory)
    }

    fn export(&self, memory: &ArenaMemory) -> Result<OwnedFd, Error> {
        self.gpu.export(memory)
    }

    fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Imported, Error> {
        self.gpu.import(descriptor, bytes)
    }

    fn copy(
        &mut self,
        from: &Imported,
        to: &ArenaMemory,
        pieces: &[Piece],
    ) -> Result<Event, Error> {
        self.switch.begun.set(self.switch.begun.get() + 1);
        self.gpu.copy(from, to, pieces)
    }

    fn is_over(&self, copy: &Event) -> Result<bool, Error> {
        Ok(!self.switch.held.get() && self.gpu.is_over(copy)?)
    }
}
