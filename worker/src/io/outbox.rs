//! What leaves the IO thread: steps, whole phases and works for the threads that compute, reports for the
//! controller, and the end.
//!
//! In: what the machines left. Out: notices and messages, until nothing is left. Doorbells and pulls do not
//! pass here: the machines' sides put them on the wire.
//!
//! Invariant: of several endings the first stays, and the threads that compute are told that one only.

use cadre_control::proto;
use cadre_protocol::{End, Peer};

use super::envelope::{Ending, Envelope};
use super::shared::Side;
use super::tasks::Planned;
use super::{Io, Notice};

impl Io {
    /// Carries what one side left for another until nothing is left.
    pub(super) fn settle(&mut self) {
        loop {
            let shared = &mut self.shared;
            if let Some(message) = shared.local.pop_front() {
                let me = shared.me;
                self.deliver(me, message);
            } else if let Some(envelope) = shared.to_conductor.pop_front() {
                let me = shared.me;
                if let Some(it) = &mut self.conductor {
                    it.told(shared, me, envelope);
                }
            } else if let Some((side, pull)) = shared.begun.pop_front() {
                if let (Side::Server, Some(it)) = (side, &mut self.server) {
                    it.begun(shared, pull);
                }
            } else if let Some((side, pull, result)) = shared.ended.pop_front() {
                match (side, &mut self.trainer, &mut self.server) {
                    (Side::Trainer, Some(it), _) => it.pulled(shared, pull, result),
                    (Side::Server, _, Some(it)) => it.pulled(shared, pull, result),
                    (Side::Trainer | Side::Server, _, _) => {}
                }
            } else if !self.hand_on() {
                return;
            }
        }
    }

    /// Hands results of the machines to the other threads and the controller; whether there were any.
    fn hand_on(&mut self) -> bool {
        let conducted = self.hand_on_conducted();
        let merged = self.hand_on_merged();
        let ready = self.hand_on_ready();
        conducted || merged || ready
    }

    /// Of the conductor: steps that begin, reports, the end.
    fn hand_on_conducted(&mut self) -> bool {
        let Some(it) = &mut self.conductor else {
            return false;
        };
        let begin = std::mem::take(&mut it.begin);
        let reports = std::mem::take(&mut it.reports);
        let ending = if self.ended.is_none() { it.ending.clone() } else { None };
        let end = it.end.take();
        let any = !begin.is_empty() || ending.is_some();
        for report in reports {
            self.say(report);
        }
        for planned in begin {
            self.begin(planned);
        }
        if let Some(ending) = ending {
            self.end(ending);
        }
        if let Some(end) = end {
            self.fail(end.to_string(), false);
        }
        any
    }

    /// Of the trainer's rows: phases that are whole, steps that are over.
    fn hand_on_merged(&mut self) -> bool {
        let Some(it) = &mut self.trainer else {
            return false;
        };
        let (whole, over) = (std::mem::take(&mut it.whole), std::mem::take(&mut it.over));
        let failed =
            (it.end.take().map(|it| it.to_string()), it.failed.take().map(|it| it.to_string()));
        let any = !whole.is_empty();
        for whole in whole {
            self.tell(Notice::Whole(Box::new(whole)));
        }
        self.forget(&over);
        if let Some(reason) = failed.0.or(failed.1) {
            self.fail(reason, false);
        }
        any
    }

    /// Of the server's tasks: works that can run, what nobody wants any more.
    fn hand_on_ready(&mut self) -> bool {
        let Some(it) = &mut self.server else {
            return false;
        };
        let (ready, over) = (std::mem::take(&mut it.ready), std::mem::take(&mut it.over));
        let (end, failed, cancelled) = (it.end.take(), it.failed.take(), it.cancelled.take());
        let any = !ready.is_empty();
        self.load.queue += std::mem::take(&mut it.kept);
        for (work, planned) in ready {
            // What went out early is counted once its rows count.
            self.load.queue += u32::from(work.promise.is_none());
            self.load.step = work.planned.header.step;
            let outlet = match (&self.outlets.rescue, planned) {
                (Some(rescue), Planned::Elsewhere) => rescue,
                (None, _) | (Some(_), Planned::Here) => &self.outlets.main,
            };
            // A receiver that is gone belongs to a process that ends.
            drop(outlet.send(Notice::Work(Box::new(work))));
        }
        if let Some(at) = cancelled {
            self.tell(Notice::Cancelled(at));
            if let Some(rescue) = &self.outlets.rescue {
                drop(rescue.send(Notice::Cancelled(at)));
            }
        }
        self.forget(&over);
        match (end, failed) {
            (Some(End::DeclaredLost(id)), _) => self.end(Ending::Failed {
                reason: End::DeclaredLost(id).to_string(),
                bad_input: false,
            }),
            (Some(end), _) => self.fail(end.to_string(), matches!(end, End::Memory { .. })),
            (None, Some(error)) => self.fail(error.to_string(), false),
            (None, None) => {}
        }
        any
    }

    /// Forgets steps that are over for every machine.
    fn forget(&mut self, over: &[u64]) {
        for step in over {
            // Trainer and server end a step on the same watermark, but a server may still hold rows.
            let held = self.server.as_ref().is_some_and(|it| it.holds(*step));
            if !held {
                self.shared.steps.remove(step);
            }
        }
    }

    /// Tells the thread that computes.
    pub(super) fn tell(&self, notice: Notice) {
        // A receiver that is gone belongs to a process that ends.
        drop(self.outlets.main.send(notice));
    }

    /// Tells the controller.
    pub(super) fn say(&self, message: impl Into<proto::WorkerMessage>) {
        if let Err(error) = self.control.sender.send(message) {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// A process that can move nothing more: a dedicated server goes, and its work to others; a trainer's job cannot go on.
    pub(super) fn give_up(&mut self) {
        let Some(reason) = self.shared.broken.take() else { return };
        match self.shared.me {
            Peer::Server(_) => self.tell(Notice::Lost(reason)),
            Peer::Trainer(_) => self.fail(reason, false),
        }
    }

    /// The job cannot go on: everybody is told by the conductor, or at least this process by itself.
    pub(super) fn fail(&mut self, reason: String, bad_input: bool) {
        let ending = Ending::Failed { reason, bad_input };
        if self.conductor.is_none() && self.ended.is_none() {
            self.shared.ring(Peer::CONDUCTOR, &Envelope::End(ending.clone()));
        }
        self.end(ending);
    }

    /// No step follows: everybody here is told, and by the conductor's process the other workers.
    pub(super) fn end(&mut self, ending: Ending) {
        if self.ended.is_some() {
            return;
        }
        if let Some(conductor) = &self.conductor {
            // Servers first: they have to know before a trainer leaves.
            for peer in conductor.servers().into_iter().chain(self.shared.trainers()) {
                self.shared.ring(peer, &Envelope::End(ending.clone()));
            }
        }
        self.tell(Notice::End(ending.clone()));
        if let Some(rescue) = &self.outlets.rescue {
            drop(rescue.send(Notice::End(ending.clone())));
        }
        self.ended = Some(ending);
        self.retire();
    }

    /// The job is over here: the machines go, so that nobody is called who may have left. What was
    /// published stays readable until the process ends.
    pub(super) fn retire(&mut self) {
        if let Some(conductor) = self.conductor.take() {
            for report in conductor.reports {
                self.say(report);
            }
        }
        self.trainer = None;
        self.server = None;
        self.shared.results.clear();
    }

    /// Whether the job is over here.
    pub(super) fn is_over(&self) -> bool {
        self.trainer.is_none() && self.server.is_none()
    }
}
