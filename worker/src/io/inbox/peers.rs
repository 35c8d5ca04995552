//! What peers say: envelopes of the exchange, words, messages of the protocol.
//!
//! In: who says it. Out: an event for each machine that it is for; a warning where somebody says what only others may.

use cadre_crds::Wire;
use cadre_exchange::PeerId;
use cadre_protocol::{Peer, conductor, server, trainer};
use cadre_step::conduct::decisions::Event;
use cadre_step::envelope::{Ending, Envelope, Said, speaker};
use cadre_step::header::Header;

use super::MAX_REASONS_TOLD;
use crate::io::Io;
use crate::io::exchange::Exchange;
use crate::io::outbox::reason_of;
use crate::io::shared::peer_of;

impl<P: Exchange> Io<P> {
    pub(super) fn ring(&mut self, from: PeerId, envelope: Envelope) {
        let peer = peer_of(from);
        // Whoever knows the secret may call itself anything; members are those that the controller has named.
        if peer == self.shared.me {
            return self.disbelieve(peer, "anything under the name of this process");
        }
        let known = self.shared.id_of(peer);
        if known.is_some_and(|it| it != from) {
            return self.disbelieve(peer, "anything under another incarnation than its own");
        }
        if let (None, Peer::Server(server), Some(it)) = (known, peer, &mut self.conductor) {
            it.handle(&mut self.shared, Event::Protocol(conductor::Event::Unnamed(server)));
        }
        if let Some(ending) = self.ended.as_ref().filter(|_| self.shared.me == Peer::CONDUCTOR) {
            // Who still calls came late.
            if known.is_some() && self.told_end.insert(peer) {
                let body = self.shared.compose(&Said::End(ending.clone()));
                self.shared.tell(peer, &body);
            }
        }
        match envelope {
            Envelope::Protocol(message) => self.message((from, known.is_some()), message),
            Envelope::Beat { by, beat } => {
                if self.shared.lives(peer, by) {
                    self.came_back(peer);
                }
                self.message((from, known.is_some()), cadre_protocol::Message::Heartbeat(beat));
            }
            // Its sender says it again until the controller or the conductor has named it here.
            Envelope::Word { .. } if known.is_none() => {
                tracing::debug!("{from} is not known here yet: its words are not heard");
            }
            Envelope::Word { stream, number, body } => {
                match self.shared.word(peer, (stream, number), body) {
                    Ok(told) => self.told_all(peer, told),
                    Err(error) => self.fail(error.to_string(), false),
                }
            }
            Envelope::Heard { by, stream, through } => {
                if self.shared.covered((peer, by), stream, through) {
                    self.came_back(peer);
                }
            }
        }
    }

    /// A peer lives anew: it may have been in another job, and come back between two views that the conductor has seen.
    fn came_back(&mut self, peer: Peer) {
        if let Some(it) = &mut self.conductor {
            it.handle(&mut self.shared, Event::CameBack(peer));
        }
    }

    /// A message for a machine, from whoever calls itself so; whether that one is known here.
    fn message(&mut self, (from, is_known): (PeerId, bool), message: cadre_protocol::Message) {
        let peer = peer_of(from);
        let (speaker, name) = speaker(&message);
        if !speaker.is(peer) {
            self.disbelieve(peer, name);
        } else if is_known {
            self.deliver(peer, message);
        } else if let Some(refused) = self.unnamed.ring(from, self.shared.trainer_count, message) {
            self.disbelieve(peer, refused);
        }
    }

    /// Why this process would compute other bits than the header promises, if it would.
    fn foreign(&self, header: &Header) -> Option<String> {
        let (own, me) = (self.shared.numerics.as_deref()?, self.shared.me);
        // Their GPUs have no part in rows of f32.
        let own = if header.wire == Wire::F32 { cadre_kernels::numerics_of_cpu(own) } else { own };
        (own != header.numerics).then(|| {
            format!(
                "{me} computes with {own:?}, the job with {:?}; the job says reproducible, so give all ranks and servers \
                 one kind of processor and one --engine, or leave reproducible out",
                header.numerics
            )
        })
    }

    /// All trainers are known now: what they rang before counts.
    pub(super) fn named(&mut self) {
        for (from, message) in self.unnamed.named() {
            self.ring(from, Envelope::Protocol(message));
        }
    }

    pub(in crate::io) fn told_all(&mut self, from: Peer, told: Vec<Said>) {
        for said in told {
            if said.speaker().is(from) {
                self.told(from, said);
            } else {
                self.disbelieve(from, said.name());
            }
        }
    }

    /// A peer says a word that it may say.
    fn told(&mut self, from: Peer, said: Said) {
        match said {
            Said::Header { header, trainers } => {
                for (id, address) in &trainers {
                    self.shared.know(*id, address);
                }
                self.named();
                if let Some(reason) = self.foreign(&header) {
                    return self.give_up(reason, true);
                }
                self.backlog.came(header);
                self.plan();
            }
            Said::Addresses(servers) => {
                for (id, address) in &servers {
                    let peer = peer_of(*id);
                    let heard_of = self.shared.id_of(peer) == Some(*id);
                    self.shared.know(*id, address);
                    // A round may have named it before: what it was to be told then was lost.
                    if !heard_of {
                        self.unsaid(peer);
                    }
                }
            }
            // A dedicated server is the controller's: it stays until that one lets it go.
            Said::End(_) if matches!(self.shared.me, Peer::Server(_)) => {
                tracing::info!("the job is over");
                self.retire();
            }
            Said::End(ending) => self.end(ending),
            Said::Failed { reason, bad_input } if self.shared.me == Peer::CONDUCTOR => {
                if self.conductor.as_ref().is_some_and(|it| it.decisions().has_lost(from)) {
                    tracing::warn!("{from} is lost, so this ends nothing: {reason}");
                } else {
                    let reason = reason_of(from, reason);
                    self.end(Ending::Failed { reason, bad_input });
                }
            }
            Said::Leaving if self.ended.is_none() => {
                tracing::warn!("{from} was asked to end, so the job stops");
                if let (Some(it), Peer::Trainer(trainer)) = (&mut self.conductor, from) {
                    it.handle(&mut self.shared, Event::Asked(trainer.0));
                }
            }
            Said::Lengths(_)
            | Said::Steps(_)
            | Said::Standing(_)
            | Said::StepDone(_)
            | Said::ServerStep(_) => {
                if let Some(it) = &mut self.conductor {
                    it.handle(&mut self.shared, Event::Told(from, said));
                }
            }
            Said::Failed { .. } | Said::Leaving => {}
        }
    }

    /// Somebody says what only others may say: nothing changes, and it is warned of once.
    fn disbelieve(&mut self, from: Peer, what: &'static str) {
        let told =
            self.disbelieved.contains(&(from, what)) || self.disbelieved.len() >= MAX_REASONS_TOLD;
        if told {
            tracing::debug!("{from} says {what} again, which it may not");
        } else {
            tracing::warn!("{from} says {what}, which it may not; it is not believed");
            self.disbelieved.insert((from, what));
        }
    }

    /// Hands a protocol message to the machine that it is for.
    pub(in crate::io) fn deliver(&mut self, from: Peer, message: cadre_protocol::Message) {
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
            it.handle(shared, Event::Protocol(conductor::Event::Message { from, message }));
        }
    }
}
