//! The IO thread's ends of what connects it with the other threads of its process and with the controller.
//!
//! In and out: [`super::lines`] says what comes and goes here, [`super::queues`] with which bounds.
//!
//! Invariant: whoever waits for a notice is told when the IO thread panics.

use std::sync::mpsc::Receiver;

use cadre_control::proto;
use cadre_exchange::Waker;

use super::lines::{Asked, Notice};
use super::planning::Plans;
use super::queues::Outlet;
use crate::memory::Memory;

/// How the IO thread and the others of its process speak to each other.
pub struct Lines<M: Memory> {
    /// What others ask for, through handles.
    pub requests: Receiver<Asked<M>>,
    /// Where headers go to be made and planned.
    pub plans: Plans,
    /// Both ends of the controller's stream.
    pub control: Control,
    /// Where steps, phases and works go.
    pub outlets: Outlets<M>,
}

/// Where works go.
#[derive(Debug)]
pub struct Outlets<M: Memory> {
    /// The trainer's main thread, or the server's compute thread.
    pub main: Outlet<M>,
    /// Works whose own server was lost; in place only.
    pub rescue: Option<Outlet<M>>,
    /// Ends waits of the main thread that are not for notices, once the end was told.
    pub interrupt: Option<Waker>,
}

impl<M: Memory> Outlets<M> {
    /// Hands on what waited for room.
    pub(super) fn flush(&mut self) {
        self.main.flush();
        if let Some(rescue) = &mut self.rescue {
            rescue.flush();
        }
    }
}

impl<M: Memory> Drop for Outlets<M> {
    /// An IO thread that panics has ended the job for the threads of its process: whatever they wait for ends.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lost = || Notice::Lost("the io thread panicked; its log says where".into());
            self.main.tell(lost());
            self.rescue.iter_mut().for_each(|it| it.tell(lost()));
            self.interrupt.iter().for_each(Waker::wake);
        }
    }
}

/// Both ends of the controller's stream.
pub struct Control {
    /// To it; says whether it was queued. Never waits.
    pub sender:
        Box<dyn Fn(proto::WorkerMessage) -> Result<(), cadre_control::client::Error> + Send>,
    /// From it.
    pub receiver: Receiver<proto::ControllerMessage>,
}
