//! What reaches the IO thread: requests of other threads, the controller's messages, the exchange's events.
//!
//! In: one of these. Out: an event for each machine that it is for. Nothing here waits; what the machines
//! answer is left for the outbox.
//!
//! Invariant: a step begins here at most once, however often its header comes; of two live ones either may begin first. Words and
//! messages count from those alone who may say them ([`cadre_step::envelope`]).

mod peers;
mod plans;

use cadre_control::Moment;
use cadre_control::proto::{self, controller_message};
use cadre_exchange::{Event as Wire, PeerId};
use cadre_protocol::{At, Nanos, Peer, Phase, conductor, server, trainer};
use cadre_step::conduct::decisions::Event;
use cadre_step::envelope::{Ending, Said};

use super::conducting::reports;
use super::exchange::Exchange;
use super::output::Planned;
use super::shared::peer_of;
use super::telling;
use super::{Asked, Io, LAST_WORDS_WITHIN, Notice, Request};
use crate::launch::{Done, PhaseRows};

/// Reasons for turning somebody away that are remembered, so that each is told once.
const MAX_REASONS_TOLD: usize = 256;

/// When this process leaves: a peer has left, too, that cannot be reached so often in a row, and still not after so long. A link
/// that is away for less hears the last words.
const GONE_AFTER_BREAKS: u32 = 2;
const GONE_AFTER: Nanos = Nanos::from_millis(600);

/// A trainer that was asked to end leaves without the conductor when that one has refused its links for so long.
const ALONE_AFTER: Nanos = Nanos::from_millis(1_000);

impl<P: Exchange> Io<P> {
    /// What another thread wants.
    pub(super) fn asked(&mut self, asked: Asked<P::Memory>) {
        match asked {
            Asked::For(request) => self.request(request),
            Asked::Submit(at, rows) => self.submit(at, Some(rows)),
            Asked::Ran(done) => self.ran(vec![done]),
            Asked::Dropped(work) => {
                self.load.queue = self.load.queue.saturating_sub(1);
                if let Some(it) = self.server.as_mut() {
                    it.dropped(&mut self.shared, work);
                }
            }
        }
    }

    fn submit(&mut self, at: At, rows: Option<PhaseRows<P::Memory>>) {
        if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none())
            && let Err(error) = it.submit(&mut self.shared, at, rows)
        {
            self.fail(error.to_string(), true);
        }
    }

    fn request(&mut self, request: Request) {
        let shared = &mut self.shared;
        match request {
            Request::Skip(At { step, phase: Phase(first) }, count) => {
                for phase in (first..first + count).map(Phase) {
                    self.submit(At { step, phase }, None);
                }
            }
            Request::Lengths(lengths, encoded) => {
                if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none()) {
                    it.standing.announced(lengths.step);
                    match encoded {
                        Some(encoded) => {
                            let body = shared.compose_encoded(encoded);
                            shared.tell(Peer::CONDUCTOR, &body);
                        }
                        None => shared.tell_conductor(Said::Lengths(lengths)),
                    }
                }
            }
            Request::Steps(steps) => {
                if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none()) {
                    it.standing.ends(steps);
                    shared.tell_conductor(Said::Steps(steps));
                }
            }
            Request::Busy(lease, calls) => {
                if let Some(it) = self.trainer.as_mut() {
                    it.standing.busy(lease, calls);
                }
            }
            Request::StepDone(done) => {
                if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none()) {
                    if let Some(over) = it.standing.done() {
                        shared.finish(over);
                    }
                    shared.tell_conductor(Said::StepDone(done));
                }
                shared.tracer.flush();
            }
            // What was said before, such as that a step is done, counts.
            Request::Fail(reason) => {
                self.settle_all();
                self.fail(reason, false);
            }
            Request::Refuse(reason) => {
                self.settle_all();
                self.fail(reason, true);
            }
            Request::Leave(left) => {
                let until = shared.now().after(LAST_WORDS_WITHIN);
                // After the end of the job nobody waits for anybody.
                if self.leaving.is_none()
                    && self.ended.is_none()
                    && let Some(left) = left
                {
                    tracing::warn!("this process leaves before its step is over: {left:?}");
                    shared.tell_conductor(Said::Standing(left));
                }
                self.leaving.get_or_insert(until);
            }
            Request::Terminate => self.terminate(),
            Request::Made(made) => self.made(*made),
            Request::Planned(planned) => self.planned(*planned),
            Request::Read(read) => self.read(*read),
            Request::Reassigned(reassigned) => self.reassigned(*reassigned),
            Request::Freed => self.freed(),
        }
    }

    /// Works ran.
    pub(super) fn ran(&mut self, done: Vec<Done<P::Memory>>) {
        if let Some(it) = self.trainer.as_mut().filter(|_| !done.is_empty()) {
            it.standing.moved();
        }
        for it in &done {
            self.load.ran(it);
            if let (Some(trainer), Some(server)) = (&mut self.trainer, &self.server)
                && server.planned(&it.work) == Planned::Here
            {
                trainer.standing.ran(it.work.at());
            }
        }
        if let Some(it) = self.server.as_mut() {
            it.ran(&mut self.shared, done);
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
                let rings = (0..).zip(&it.trainers).map(|(index, it)| {
                    (PeerId::trainer(index, it.incarnation), it.ring_address.clone())
                });
                self.outlets.main.tell(Notice::Trainers(rings.collect()));
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
                    conductor.handle(shared, Event::Trainers(list));
                }
                self.named();
            }
            Some(Message::View(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    match reports::offered(&it) {
                        Ok(view) => conductor.view(shared, view),
                        Err(why) => self.fail(why.to_string(), false),
                    }
                }
            }
            Some(Message::FaultsFired(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    match Moment::of(it.step, it.direction()) {
                        Ok(at) => conductor.fired(shared, at),
                        Err(why) => self.fail(why.to_string(), false),
                    }
                }
            }
            Some(Message::Stop(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.handle(shared, Event::Stop { checkpoint: it.checkpoint });
                }
            }
            Some(Message::Drain(it)) if matches!(shared.me, Peer::Server(_)) => {
                // Nothing takes back that the job is over: not the answer to a server that was asked to end at the same time.
                let over = it.over || self.draining.is_some_and(|it| it.over);
                self.draining = Some(proto::Drain { over, ..it });
                if let Some(it) = &mut self.server {
                    it.handle(&mut self.shared, server::Event::Leave);
                }
            }
            Some(Message::Drain(_)) => {
                tracing::warn!(
                    "the controller lets {} go, which is no server: it stays",
                    shared.me
                );
            }
            Some(Message::Welcome(it)) => {
                if let Some(conductor) = it.conductor {
                    shared.know(
                        PeerId::trainer(0, conductor.incarnation),
                        &conductor.exchange_address,
                    );
                }
            }
            None => {
                let reason = "the controller says what this release does not know; run workers and controller of the same release";
                self.give_up(reason.to_owned(), false);
            }
        }
    }

    /// What the exchange says.
    pub(super) fn event(&mut self, event: Wire) {
        match event {
            Wire::Connected(peer) => {
                self.down.remove(&(peer.role, peer.index));
            }
            Wire::Message { from, bytes } => match postcard::from_bytes(&bytes) {
                Ok(envelope) => self.ring(from, envelope),
                Err(error) => tracing::error!("{from} rang something unreadable: {error}"),
            },
            Wire::Room { peer } => {
                tracing::info!("{peer} reads again: what it was not told is said now");
                self.unsaid(peer_of(peer));
            }
            Wire::Begun { pull } => self.shared.began(pull),
            Wire::Pulled { pull, result } => {
                if self.probing.is_mine(pull) {
                    if let Some(probed) = self.probing.pulled(&mut self.shared, &result) {
                        self.say(probed);
                    }
                } else if self.shared.telling.is_mine(pull) {
                    match self.shared.fetched(pull, &result) {
                        Ok(()) => {}
                        Err(it @ telling::Error::Unreachable { .. }) => {
                            self.give_up(it.to_string(), false);
                        }
                        Err(it) => self.fail(it.to_string(), false),
                    }
                } else {
                    self.shared.pulled(pull, result);
                }
            }
            Wire::Closed { peer, error } if self.leaving.is_some() => {
                tracing::debug!("the link with {peer} is closed: {error}");
                let left = self.leaving.map_or(Nanos(0), |until| until.since(self.shared.now()));
                let breaks = self.shared.cut(peer_of(peer));
                if breaks >= GONE_AFTER_BREAKS && left.after(GONE_AFTER) <= LAST_WORDS_WITHIN {
                    self.shared.forget(peer_of(peer));
                    // If it calls nevertheless it is told again.
                    self.told_end.remove(&peer_of(peer));
                }
            }
            // Everybody leaves when the job is over.
            Wire::Closed { peer, error } if self.is_over() => {
                tracing::debug!("the link with {peer} is closed: {error}");
                self.shared.cut(peer_of(peer));
            }
            Wire::Closed { peer, error } => {
                let known = self.down.insert((peer.role, peer.index), peer.incarnation);
                if known == Some(peer.incarnation) {
                    tracing::debug!("the link with {peer} is still broken: {error}");
                } else {
                    tracing::info!("the link with {peer} broke: {error}");
                }
                let (shared, peer) = (&mut self.shared, peer_of(peer));
                let breaks = shared.cut(peer);
                if peer == Peer::CONDUCTOR && breaks >= GONE_AFTER_BREAKS {
                    self.end_alone();
                }
                let shared = &mut self.shared;
                if let Some(it) = &mut self.trainer {
                    it.handle(shared, trainer::Event::Closed(peer));
                }
                if let Some(it) = &mut self.server {
                    it.handle(shared, server::Event::Closed(peer));
                }
                if let Some(it) = &mut self.conductor {
                    it.handle(shared, Event::Protocol(conductor::Event::Closed(peer)));
                }
            }
            Wire::Broken { reason } => self.shared.broke(&reason),
            Wire::Unfit { peer, reason } => self.give_up(format!("{peer}: {reason}"), true),
            // Who is turned away tries again and again.
            Wire::Refused { from, reason }
                if self.turned_away.len() >= MAX_REASONS_TOLD
                    || self.turned_away.contains(&reason) =>
            {
                tracing::debug!("{from} was turned away again: {reason}");
            }
            Wire::Refused { from, reason } => {
                tracing::warn!("{from} was turned away: {reason}");
                self.turned_away.insert(reason);
            }
        }
    }

    /// What was dropped for a peer is said again.
    fn unsaid(&mut self, peer: Peer) {
        let shared = &mut self.shared;
        if let Some(it) = &mut self.trainer {
            it.handle(shared, trainer::Event::Unsaid(peer));
        }
        if let Some(it) = &mut self.server {
            it.handle(shared, server::Event::Unsaid(peer));
        }
    }

    /// The process was asked to end: a server has its work given to others first, a trainer has the job end
    /// after the last step that is out.
    fn terminate(&mut self) {
        let over = self.is_over();
        match (self.shared.me, &mut self.conductor) {
            (Peer::Server(_), _) if over => self.end(Ending::Completed),
            (Peer::Server(_), _) => self.say(proto::Leaving {}),
            (Peer::Trainer(me), Some(conductor)) => {
                conductor.handle(&mut self.shared, Event::Asked(me.0));
            }
            (Peer::Trainer(_), None) if self.ended.is_none() && self.asked_to_end.is_none() => {
                self.asked_to_end = Some(self.shared.now());
                self.shared.tell_conductor(Said::Leaving);
            }
            (Peer::Trainer(_), None) => {}
        }
    }

    /// The conductor cannot be reached: a trainer that was asked to end does not wait until that one is silent for long.
    fn end_alone(&mut self) {
        let now = self.shared.now();
        if self.asked_to_end.is_some_and(|since| now.since(since) >= ALONE_AFTER) {
            let reason = "this trainer was asked to end, and the conductor in trainer 0 cannot be reached; restart the job from its checkpoint";
            self.end(Ending::Failed { reason: reason.into(), bad_input: false });
        }
    }
}
