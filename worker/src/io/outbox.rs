//! What leaves the IO thread: steps, whole phases and works for the threads that compute, reports for the
//! controller, and the end.
//!
//! In: what the machines left. Out: notices and messages, until nothing is left. Doorbells and pulls do not
//! pass here: the machines' sides put them on the wire.
//!
//! Invariant: of several endings the first stays, and the threads that compute are told that one only.

use cadre_control::proto;
use cadre_protocol::{End, Peer, trainer};
use cadre_step::conduct::decisions::Event;
use cadre_step::envelope::{Ending, Said};

use super::exchange::Exchange;
use super::output::{Output, Planned, Side};
use super::{Io, LAST_WORDS_WITHIN, MAX_REQUESTS_A_TURN, Notice, Settled};
use crate::launch::Work;

impl<P: Exchange> Io<P> {
    /// Hands on what one side gives to another, as far as a turn goes.
    pub(super) fn settle(&mut self) -> Settled {
        for _ in 0..MAX_REQUESTS_A_TURN {
            let Some(output) = self.shared.outputs.take() else { return Settled::All };
            self.hand_on(output);
        }
        Settled::Some
    }

    /// The same of all.
    pub(super) fn settle_all(&mut self) {
        while self.settle() == Settled::Some {}
    }

    /// Hands an output to whom it is for. Machines that are gone get nothing, and what they gave is nobody's.
    fn hand_on(&mut self, output: Output<P::Memory>) {
        let me = self.shared.me;
        let shared = &mut self.shared;
        match output {
            Output::Message(message) => self.deliver(me, message),
            Output::Conductor(said) => {
                if let Some(it) = &mut self.conductor {
                    it.handle(shared, Event::Told(me, said));
                }
            }
            Output::Begun(Side::Trainer, _) => {}
            Output::Begun(Side::Server, pull) => {
                if let Some(it) = &mut self.server {
                    it.begun(shared, pull);
                }
            }
            Output::Pulled(Side::Trainer, pull, result) => {
                if let Some(it) = &mut self.trainer {
                    it.handle(shared, trainer::Event::Pulled { pull, result });
                }
            }
            Output::Pulled(Side::Server, pull, result) => {
                if let Some(it) = &mut self.server {
                    it.pulled(shared, pull, result);
                }
            }
            Output::Part(part) => self.tell(Notice::Part(part)),
            Output::Whole(whole) => {
                if let Some(it) = &mut self.trainer {
                    it.standing.whole(whole.at);
                }
                self.tell(Notice::Whole(whole));
            }
            Output::Ready(work, planned) => self.give(work, planned),
            Output::Kept => self.load.queue += 1,
            Output::Cancelled(at) => {
                if let Some(it) = &mut self.trainer {
                    it.standing.cancelled(at);
                }
                self.tell_all(|| Notice::Cancelled(at));
            }
            Output::Over(step) => self.forget(step),
            Output::Begin(ready) => {
                let step = ready.planned.header.step;
                self.begin(*ready);
                if let Some(it) = &mut self.conductor {
                    it.handle(&mut self.shared, Event::Begun(step));
                }
            }
            Output::Plan(wanted) => {
                self.backlog.own(wanted);
                self.plan();
            }
            Output::Read(unread) => {
                self.backlog.read(unread);
                self.plan();
            }
            Output::Reassign(asked) => {
                self.backlog.reassign(asked);
                self.plan();
            }
            Output::Finished(finished) => {
                self.backlog.finish(finished);
                self.plan();
            }
            Output::Report(report) => self.say(*report),
            Output::Ending(ending) => self.end(ending),
            // Nobody is there to let it go: it leaves as it was asked to.
            Output::End(Side::Server, End::ConductorSilent(_)) if self.draining.is_some() => {
                self.end(Ending::Completed);
            }
            // What the conductor decided; or a dedicated server, which ends alone: the job may be well without it.
            Output::JobEnd(end)
            | Output::End(Side::Server, end @ (End::DeclaredLost(_) | End::ConductorSilent(_))) => {
                self.end(Ending::Failed { reason: end.to_string(), bad_input: false });
            }
            Output::End(side, end) => {
                let too_small = side == Side::Server && matches!(end, End::Memory { .. });
                self.fail(end.to_string(), too_small);
            }
            Output::Broken(reason) => self.give_up(reason, false),
            Output::Crowded(reason) => self.give_up(reason, true),
        }
    }

    /// Hands a work to the thread that is to run it.
    fn give(&mut self, work: Box<Work<P::Memory>>, planned: Planned) {
        // What went out early is counted once its rows count.
        self.load.queue += u32::from(work.promise.is_none());
        self.load.step = work.planned.header.step;
        let outlet = match (&mut self.outlets.rescue, planned) {
            (Some(rescue), Planned::Elsewhere) => rescue,
            (None, _) | (Some(_), Planned::Here) => &mut self.outlets.main,
        };
        outlet.tell(Notice::Work(work));
    }

    /// Forgets a step that is over for every machine.
    fn forget(&mut self, step: u64) {
        // Trainer and server end a step on the same watermark, but each in its own time.
        let served = self.server.as_ref().is_some_and(|it| it.holds(step));
        let trained = self.trainer.as_ref().is_some_and(|it| it.runs(step));
        if !served
            && !trained
            && let Some(over) = self.shared.steps.remove(&step)
        {
            self.shared.finish(over);
        }
    }

    /// Tells every thread that computes.
    fn tell_all(&mut self, notice: impl Fn() -> Notice<P::Memory>) {
        self.tell(notice());
        if let Some(rescue) = &mut self.outlets.rescue {
            rescue.tell(notice());
        }
    }

    /// Tells the thread that computes.
    pub(super) fn tell(&mut self, notice: Notice<P::Memory>) {
        self.outlets.main.tell(notice);
    }

    /// Tells the controller.
    pub(super) fn say(&self, message: impl Into<proto::WorkerMessage>) {
        if let Err(error) = (self.control.sender)(message.into()) {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// A process that can move nothing more: a dedicated server goes, and its work to others; a trainer's job cannot go on.
    pub(super) fn give_up(&mut self, reason: String, bad_input: bool) {
        match self.shared.me {
            Peer::Server(_) => self.tell(Notice::Lost(reason)),
            Peer::Trainer(_) => self.fail(reason, bad_input),
        }
    }

    /// The job cannot go on: everybody is told by the conductor, or at least this process by itself.
    pub(super) fn fail(&mut self, reason: String, bad_input: bool) {
        if self.conductor.is_some() {
            let reason = reason_of(self.shared.me, reason);
            return self.end(Ending::Failed { reason, bad_input });
        }
        if self.ended.is_none() {
            self.shared.tell_conductor(Said::Failed { reason: reason.clone(), bad_input });
        }
        self.end(Ending::Failed { reason, bad_input });
    }

    /// No step follows: everybody here is told, and by the conductor's process the other workers.
    pub(super) fn end(&mut self, ending: Ending) {
        if self.ended.is_some() {
            return;
        }
        if let Some(conductor) = &mut self.conductor {
            if matches!(ending, Ending::Failed { .. }) {
                conductor.handle(&mut self.shared, Event::Failed);
            }
            // Servers first: they have to know before a trainer leaves.
            let peers: Vec<_> =
                conductor.decisions().servers().into_iter().chain(self.shared.trainers()).collect();
            let body = self.shared.compose(&Said::End(ending.clone()));
            for peer in peers {
                self.shared.tell(peer, &body);
                self.told_end.insert(peer);
            }
            // They have to hear it.
            let now = self.shared.now();
            self.leaving = self.leaving.map(|_| now.after(LAST_WORDS_WITHIN));
        }
        // A main thread that stands still says no last words: what ends it is the controller.
        if let Ending::Failed { reason, .. } = &ending
            && self.trainer.as_ref().is_some_and(|it| it.standing.is_still())
        {
            let outcome = proto::finished::Outcome::Failed.into();
            let (message, sample) = (reason.clone(), String::new());
            self.say(proto::Finished { outcome, message, exit_code: 3, sample });
        }
        self.tell_all(|| Notice::End(ending.clone()));
        if let Some(interrupt) = &self.outlets.interrupt {
            interrupt.wake();
        }
        self.ended = Some(ending);
        self.retire();
    }

    /// The job is over here: the machines go, so that nobody is called who may have left. What was
    /// published stays readable until the process ends.
    pub(super) fn retire(&mut self) {
        self.conductor = None;
        self.trainer = None;
        self.server = None;
        // What they gave is nobody's, but for what a person should read.
        while let Some(output) = self.shared.outputs.take() {
            if let Output::Report(report) = output {
                self.say(*report);
            }
        }
        self.shared.results.clear();
    }

    /// Whether the job is over here.
    pub(super) fn is_over(&self) -> bool {
        self.trainer.is_none() && self.server.is_none()
    }
}

/// The reason of a failure, with the name of the process that failed.
pub(super) fn reason_of(peer: Peer, reason: String) -> String {
    let named = match peer {
        Peer::Trainer(id) => reason.contains(&format!("rank {}", id.0)),
        Peer::Server(_) => false,
    };
    let name = peer.to_string();
    if named || reason.contains(&name) { reason } else { format!("{name}: {reason}") }
}
