//! What reaches the IO thread: requests of other threads, the controller's messages, the exchange's events.
//!
//! In: one of these. Out: an event for each machine that it is for. Nothing here waits; what the machines
//! answer is left for the outbox.
//!
//! Invariant: a step begins here at most once, and never after a later one, however often its header comes.

use std::sync::Arc;

use cadre_control::proto::{self, controller_message};
use cadre_exchange::{Event as Wire, PeerId};
use cadre_protocol::{Peer, conductor, server, trainer};

use super::envelope::{Ending, Envelope};
use super::shared::peer_of;
use super::{Io, Notice, Request};
use crate::conduct::{View, moment};
use crate::planned::PlannedStep;

/// Reasons for turning somebody away that are remembered, so that each is told once.
const TOLD: usize = 256;

impl Io {
    /// What another thread wants.
    pub(super) fn request(&mut self, request: Request) {
        let shared = &mut self.shared;
        match request {
            Request::Submit(at, rows) => {
                if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none()) {
                    it.submit(shared, at, rows);
                }
            }
            Request::Lengths(lengths) if self.ended.is_none() => {
                shared.tell_conductor(Envelope::Lengths(lengths));
            }
            Request::Lengths(_) => {}
            Request::StepDone(done) => {
                if self.ended.is_none() {
                    shared.tell_conductor(Envelope::StepDone(done));
                }
                shared.tracer.flush();
            }
            Request::Ran(done) => {
                self.load.ran(&done);
                if let Some(it) = self.server.as_mut() {
                    it.ran(shared, done);
                }
            }
            Request::Dropped(work) => {
                self.load.queue = self.load.queue.saturating_sub(1);
                if let Some(it) = self.server.as_mut() {
                    it.dropped(shared, &work);
                }
            }
            Request::Fail(reason) => self.fail(reason, false),
            Request::Leave => self.leave = true,
            Request::Terminate => self.terminate(),
            Request::Planned(planned) => match *planned {
                Ok(planned) => self.begin(Arc::new(planned)),
                Err(reason) => self.fail(reason, true),
            },
        }
    }

    /// What the controller says.
    pub(super) fn controller(&mut self, message: proto::ControllerMessage) {
        use controller_message::Message;
        let shared = &mut self.shared;
        match message.message {
            Some(Message::Conductor(it)) => {
                let id = PeerId::trainer(0, it.incarnation);
                shared.know(id, &it.exchange_address);
            }
            Some(Message::Trainers(it)) => {
                let rings = it.trainers.iter().map(|it| it.ring_address.clone()).collect();
                drop(self.outlets.main.send(Notice::Trainers(rings)));
                let list = (0..).zip(it.trainers).map(|(index, it)| {
                    (PeerId::trainer(index, it.incarnation), it.exchange_address)
                });
                let list: Vec<_> = list.collect();
                for (id, address) in &list {
                    shared.know(*id, address);
                }
                if let Peer::Server(_) = shared.me {
                    let trainers = list.iter().map(|it| it.0).collect();
                    self.probing.begin(shared, trainers);
                }
                if let Some(conductor) = &mut self.conductor {
                    conductor.trainers(shared, list);
                }
            }
            Some(Message::View(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.view(shared, View::of(&it));
                }
            }
            Some(Message::FaultsFired(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.fired(shared, moment(it.step, it.direction()));
                }
            }
            Some(Message::Stop(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.stop(shared, it.checkpoint);
                }
            }
            Some(Message::Drain(it)) => self.draining = Some(it),
            Some(Message::Welcome(it)) => {
                if let Some(conductor) = it.conductor {
                    shared.know(
                        PeerId::trainer(0, conductor.incarnation),
                        &conductor.exchange_address,
                    );
                }
            }
            None => {}
        }
    }

    /// What the exchange says.
    pub(super) fn event(&mut self, event: Wire) {
        match event {
            Wire::Connected(peer) => {
                self.down.remove(&peer);
            }
            Wire::Message { from, bytes } => match postcard::from_bytes(&bytes) {
                Ok(envelope) => self.ring(from, envelope),
                Err(error) => tracing::error!("{from} rang something unreadable: {error}"),
            },
            Wire::Begun { pull } => self.shared.began(pull),
            Wire::Pulled { pull, result } => {
                if self.probing.is_mine(pull) {
                    if let Some(probed) = self.probing.pulled(&mut self.shared, &result) {
                        self.say(probed);
                    }
                } else {
                    self.shared.pulled(pull, result);
                }
            }
            // Everybody leaves when the job is over.
            Wire::Closed { peer, error } if self.is_over() => {
                tracing::debug!("the link with {peer} is closed: {error}");
            }
            Wire::Closed { peer, error } => {
                if self.down.insert(peer) {
                    tracing::info!("the link with {peer} broke: {error}");
                } else {
                    tracing::debug!("the link with {peer} is still broken: {error}");
                }
                let (shared, peer) = (&mut self.shared, peer_of(peer));
                if let Some(it) = &mut self.trainer {
                    it.handle(shared, trainer::Event::Closed(peer));
                }
                if let Some(it) = &mut self.server {
                    it.handle(shared, server::Event::Closed(peer));
                }
                if let Some(it) = &mut self.conductor {
                    it.handle(shared, conductor::Event::Closed(peer));
                }
            }
            Wire::Broken { reason } => self.shared.broken = Some(reason),
            // Who is turned away tries again and again.
            Wire::Refused { from, reason } if self.turned_away.contains(&reason) => {
                tracing::debug!("{from} was turned away again: {reason}");
            }
            Wire::Refused { from, reason } => {
                tracing::warn!("{from} was turned away: {reason}");
                if self.turned_away.len() < TOLD {
                    self.turned_away.insert(reason);
                }
            }
        }
    }

    /// The process was asked to end: a server has its work given to others first, a trainer has the job end
    /// after the step in progress.
    fn terminate(&mut self) {
        let over = self.is_over();
        match (self.shared.me, &mut self.conductor) {
            (Peer::Server(_), _) if over => self.end(Ending::Completed),
            (Peer::Server(_), _) => self.say(proto::Leaving {}),
            (Peer::Trainer(_), Some(conductor)) => conductor.stop(&mut self.shared, true),
            (Peer::Trainer(_), None) if self.ended.is_none() => {
                self.shared.ring(Peer::CONDUCTOR, &Envelope::Leaving);
            }
            (Peer::Trainer(_), None) => {}
        }
    }

    fn ring(&mut self, from: PeerId, envelope: Envelope) {
        let peer = peer_of(from);
        if let Some(ending) = self.ended.as_ref().filter(|_| self.shared.me == Peer::CONDUCTOR) {
            // Who still calls came late, or missed it.
            if !matches!(envelope, Envelope::End(_)) {
                self.shared.ring(peer, &Envelope::End(ending.clone()));
            }
            return;
        }
        match envelope {
            Envelope::Protocol(message) => self.deliver(peer, message),
            Envelope::Header { header, trainers } => {
                for (id, address) in &trainers {
                    self.shared.know(*id, address);
                }
                if self.newest < Some(header.step) && self.planner.send(header).is_err() {
                    self.fail("the planning thread ended".into(), false);
                }
            }
            Envelope::Addresses(servers) => {
                for (id, address) in &servers {
                    self.shared.know(*id, address);
                }
            }
            // A dedicated server is the controller's: it stays until that one lets it go.
            Envelope::End(_) if matches!(self.shared.me, Peer::Server(_)) => {
                tracing::info!("the job is over");
                self.retire();
            }
            Envelope::End(ending) => self.end(ending),
            Envelope::Leaving => {
                tracing::warn!("{from} was asked to end, so the job stops");
                if let Some(it) = &mut self.conductor {
                    it.stop(&mut self.shared, true);
                }
            }
            Envelope::Lengths(_) | Envelope::StepDone(_) | Envelope::ServerStep(_) => {
                if let Some(it) = &mut self.conductor {
                    it.told(&mut self.shared, peer, envelope);
                }
            }
        }
    }

    /// Hands a protocol message to the machine that it is for.
    pub(super) fn deliver(&mut self, from: Peer, message: cadre_protocol::Message) {
        use cadre_protocol::Audience;
        let audience = message.audience();
        tracing::trace!("{from} says {message:?}");
        let shared = &mut self.shared;
        let members = audience == Audience::Members;
        if let Some(it) = self.trainer.as_mut().filter(|_| members || audience == Audience::Trainer)
        {
            let message = message.clone();
            it.handle(shared, trainer::Event::Message { from, message });
        }
        if let Some(it) = self.server.as_mut().filter(|_| members || audience == Audience::Server) {
            let message = message.clone();
            it.handle(shared, server::Event::Message { from, message });
        }
        if let Some(it) = self.conductor.as_mut().filter(|_| audience == Audience::Conductor) {
            it.handle(shared, conductor::Event::Message { from, message });
        }
    }

    /// Begins a step in every machine that works for it.
    pub(super) fn begin(&mut self, planned: Arc<PlannedStep>) {
        let number = planned.header.step;
        // A header may come twice, the second time late.
        if self.newest >= Some(number) || self.is_over() {
            return;
        }
        self.newest = Some(number);
        for member in planned.header.fillers.iter().flatten() {
            if let crate::header::Member::Server { index, incarnation, address } = member {
                self.shared.know(PeerId::server(*index, *incarnation), address);
            }
        }
        let step = match self.shared.begin(Arc::clone(&planned)) {
            Ok(running) => planned.protocol_step(running.first()).map_err(|it| it.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let step = match step {
            Ok(step) => Arc::new(step),
            Err(reason) => return self.fail(reason, true),
        };
        if let Some(it) = &mut self.server {
            it.begin(&self.shared, number);
            it.handle(&mut self.shared, server::Event::Begin(Arc::clone(&step)));
        }
        if let Some(it) = &mut self.trainer {
            it.handle(&mut self.shared, trainer::Event::Begin(step));
            self.tell(Notice::Step(planned));
        }
    }
}
