//! What the sides of the IO thread share: the provider, the peers' addresses, pulls, planned steps, and
//! what was said to a machine of the same process.
//!
//! Protocol machines name pulls and peers in their own words; here they are translated to the
//! provider's. A machine's pull may be several of the provider's, one a tensor: it ends when the last
//! of them has, with the failure that says most of the path.

mod addresses;
mod peers;
mod pulls;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;

use cadre_exchange::{PeerId, PullId as WirePull, RegionKey, Role};
use cadre_planner::Assignment;
use cadre_protocol::{
    Acks, AssignedRounds, At, Fillers, Message, Nanos, Peer, PullId, PullResult, ServerId,
    TrainerId, Work,
};
use cadre_step::envelope::Envelope;
use cadre_step::lowering::Tensor;
use cadre_step::planned::{PlannedStep, filler};
use cadre_step::words::Life;

use self::addresses::Addresses;
use self::pulls::Group;
use super::clock::Clock;
use super::exchange::Exchange;
use super::output::{Output, Outputs, Side};
use super::planning::{Asker, Finished, Reassign, Reassigning, Rounds};
use super::telling::Telling;
use crate::launch::{PhaseRows, Results};
use crate::trace::Tracer;

/// Incarnations of one server that are remembered, the newest ones.
const KEPT_INCARNATIONS: usize = 2;

/// Room for an envelope; most are shorter.
const ENVELOPE_ROOM_BYTES: usize = 64;

/// A step that runs, with the assignments of its rounds so far.
#[derive(Debug)]
pub struct Running {
    /// The step.
    pub planned: Arc<PlannedStep>,
    /// None while the planning thread has them.
    rounds: Option<Rounds>,
    /// Who fills the slots in the rounds that were dealt out.
    tables: Vec<Fillers>,
}

impl Running {
    /// Whether a peer fills or filled a slot.
    fn names(&self, peer: Peer) -> bool {
        let header = self.planned.header.fillers.iter().flatten().map(filler);
        let rounds = self.tables.iter().flatten().flatten().copied();
        header.chain(rounds).any(|it| it.executor() == Some(peer))
    }
}

/// See the module.
pub struct Shared<P: Exchange> {
    /// Moves bytes.
    pub provider: P,
    /// What time it is.
    pub clock: Clock,
    /// Who this process is.
    pub me: Peer,
    /// Steps that have begun and are not over.
    pub steps: BTreeMap<u64, Running>,
    /// This trainer's rows, by phase, until they are released.
    pub rows: BTreeMap<At, PhaseRows<P::Memory>>,
    /// Results of this process, until they are freed.
    pub results: BTreeMap<(At, Work), Arc<Results<P::Memory>>>,
    /// What the sides give to each other, and to other threads.
    pub outputs: Outputs<P::Memory>,
    /// What is said until it is heard.
    pub telling: Telling,
    /// Time spans.
    pub tracer: Tracer,
    /// Numerics id of this process, if the job wants the same everywhere.
    pub numerics: Option<String>,
    /// How many trainers the job has, as far as this process was told: [`u16::MAX`] until then.
    pub trainer_count: u16,
    addresses: Addresses,
    /// How many of these it may have links with at a time, each in one of its incarnations.
    names: u64,
    pulls: BTreeMap<WirePull, u64>,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
    refused: pulls::Refusals,
    /// Room for a message that is encoded; a watermark is sent to hundreds.
    message: Vec<u8>,
}

/// Another number for each life of a process in a job.
fn life() -> Life {
    // The standard library's keys are of the system's randomness, and counted up within a process.
    Life(RandomState::new().build_hasher().finish())
}

impl<P: Exchange> Shared<P> {
    /// Of process `me`.
    pub fn new(me: Peer, (provider, clock): (P, Clock), tracer: Tracer) -> Self {
        Self {
            provider,
            clock,
            me,
            steps: BTreeMap::new(),
            rows: BTreeMap::new(),
            results: BTreeMap::new(),
            outputs: Outputs::default(),
            telling: Telling::new(life()),
            tracer,
            numerics: None,
            trainer_count: u16::MAX,
            addresses: Addresses::default(),
            names: 0,
            pulls: BTreeMap::new(),
            groups: BTreeMap::new(),
            next_group: 0,
            refused: pulls::Refusals::default(),
            message: Vec::with_capacity(ENVELOPE_ROOM_BYTES),
        }
    }

    /// Protocol time.
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// How many rows of phases, results, steps and pulls are held: none between two steps, once everybody is done.
    pub fn holdings(&self) -> [usize; 4] {
        [self.rows.len(), self.results.len(), self.steps.len(), self.groups.len()]
    }

    /// Sends to another process or to a machine of this one. What cannot be sent is lost, as on a
    /// broken link: the machines say it again, also when a queue that was full has room again.
    pub fn send(&mut self, to: Peer, message: Message) {
        if to == self.me {
            self.outputs.put(Output::Message(message));
            return;
        }
        if let Message::Heartbeat(beat) = message {
            let by = self.telling.life();
            return self.ring(to, &Envelope::Beat { by, beat });
        }
        if !is_long(&message) {
            return self.ring(to, &Envelope::Protocol(message));
        }
        for message in parted(message) {
            self.ring(to, &Envelope::Protocol(message));
        }
    }

    /// As [`Self::send`], the same to each of them: it is encoded once.
    pub fn send_all(&mut self, all: &[Peer], message: Message) {
        if matches!(message, Message::Heartbeat(_)) || is_long(&message) {
            return all.iter().for_each(|to| self.send(*to, message.clone()));
        }
        if all.contains(&self.me) {
            self.outputs.put(Output::Message(message.clone()));
        }
        self.ring_all(all, &Envelope::Protocol(message));
    }

    /// Rings another process.
    pub fn ring(&mut self, to: Peer, envelope: &Envelope) {
        self.ring_all(&[to], envelope);
    }

    /// Rings each other process of these.
    fn ring_all(&mut self, all: &[Peer], envelope: &Envelope) {
        let mut room = std::mem::take(&mut self.message);
        room.clear();
        let bytes = match postcard::to_extend(envelope, room) {
            Ok(bytes) => bytes,
            Err(error) => return tracing::error!("a message cannot be encoded: {error}"),
        };
        for to in all.iter().filter(|it| **it != self.me) {
            let Some((id, address)) = self.addresses.get(*to) else {
                tracing::debug!("no address of {to} yet");
                continue;
            };
            self.provider.connect(*id, address);
            if let Err(error) = self.provider.ring(*id, &bytes) {
                tracing::warn!("a message to {to} is lost: {error}");
            }
        }
        self.message = bytes;
    }

    /// Closes the links with a peer by force.
    pub fn close(&mut self, peer: Peer) {
        if let Some(id) = self.id_of(peer) {
            self.provider.close(id);
        }
    }

    /// A machine's pull ended; it is told when its turn comes.
    pub fn ended(&mut self, side: Side, pull: PullId, result: PullResult) {
        self.outputs.put(Output::Pulled(side, pull, result));
    }

    /// A header or plan that this side needs no more: the planning thread drops it.
    pub fn finish(&mut self, it: impl Send + 'static) {
        self.outputs.put(Output::Finished(Finished::new(it)));
    }

    /// This process can move nothing more.
    pub fn broke(&mut self, why: &impl ToString) {
        self.outputs.put(Output::Broken(why.to_string()));
    }

    /// Takes a planned step; its bundles are where the header's fillers put them.
    pub fn begin(&mut self, planned: Arc<PlannedStep>, first: Vec<Assignment>) {
        let step = planned.header.step;
        let (rounds, tables) = (Some(AssignedRounds::new(first)), Vec::new());
        self.steps.entry(step).or_insert(Running { planned, rounds, tables });
    }

    /// Has the bundles of a step dealt out for the newest round of `tables`, which hold the fillers of rounds 1 and up.
    pub fn reassign(&mut self, step: u64, tables: Vec<Fillers>, asker: Asker) {
        self.outputs.put(Output::Reassign(Reassign { step, tables, asker }));
    }

    /// Lends what the planning thread deals out a round from; nothing if the step is over.
    pub fn lend(&mut self, asked: Reassign) -> Option<Reassigning> {
        let Running { planned, rounds, tables } = self.steps.get_mut(&asked.step)?;
        tables.clone_from(&asked.tables);
        let rounds = rounds.take().expect("one round is dealt out at a time");
        Some(Reassigning { asked, planned: Arc::clone(planned), rounds })
    }

    /// Takes back what was lent. Nobody needs it if the step is over.
    pub fn returned(&mut self, planned: Arc<PlannedStep>, rounds: Rounds) {
        match self.steps.get_mut(&planned.header.step) {
            Some(running) => running.rounds = Some(rounds),
            None => self.finish((planned, rounds)),
        }
    }
}

/// Most works that one message names: it fits a message of the exchange, whatever their numbers, and does not keep who hears it from
/// others for long.
const MAX_NAMED_WORKS: usize = 1 << 11;

/// Whether a message names more works than fit one.
fn is_long(message: &Message) -> bool {
    let works = if let Message::Finished { works, .. } = message {
        works.len()
    } else if let Message::Ack { acks } | Message::Doorbell { acks, .. } = message {
        acks.works.len()
    } else {
        0
    };
    works > MAX_NAMED_WORKS
}

/// A message as several that say the same where it names more works than fit one. Works come before what they ride on, so that
/// acknowledgements are no later than in one piece.
fn parted(message: Message) -> Vec<Message> {
    match message {
        Message::Finished { at, works } if works.len() > MAX_NAMED_WORKS => works
            .chunks(MAX_NAMED_WORKS)
            .map(|it| Message::Finished { at, works: it.to_vec() })
            .collect(),
        Message::Ack { acks } if acks.works.len() > MAX_NAMED_WORKS => {
            let Acks { through, works } = acks;
            let chunks = works.chunks(MAX_NAMED_WORKS);
            chunks.map(|it| Message::Ack { acks: Acks { through, works: it.to_vec() } }).collect()
        }
        Message::Doorbell { at, round, acks, digest } if acks.works.len() > MAX_NAMED_WORKS => {
            let bare = Acks { through: acks.through, works: Vec::new() };
            let mut all = parted(Message::Ack { acks });
            all.push(Message::Doorbell { at, round, acks: bare, digest });
            all
        }
        message @ (Message::Doorbell { .. }
        | Message::Finished { .. }
        | Message::Ack { .. }
        | Message::PhaseDone { .. }
        | Message::Watermark { .. }
        | Message::Round { .. }
        | Message::Heartbeat(_)
        | Message::Pulse { .. }
        | Message::Suspect { .. }
        | Message::Unreached { .. }
        | Message::Leave { .. }
        | Message::Spare { .. }) => vec![message],
    }
}

/// Name of one trainer's rows.
pub fn rows_key(at: At, tensor: Tensor) -> RegionKey {
    RegionKey([at.step as u32, at.phase.0, tensor as u32, u32::MAX])
}

/// Name of a work's results.
pub fn result_key(at: At, tensor: Tensor, work: Work) -> RegionKey {
    RegionKey([at.step as u32, at.phase.0, tensor as u32, work.0])
}

/// The protocol's name of a process.
pub fn peer_of(id: PeerId) -> Peer {
    match id.role {
        Role::Trainer => Peer::Trainer(TrainerId(id.index)),
        Role::Server => Peer::Server(ServerId { index: id.index, incarnation: id.incarnation }),
    }
}

#[cfg(test)]
#[allow(clippy::wildcard_enum_match_arm, reason = "tests pick one out of many")]
mod tests {
    use cadre_exchange::MAX_MESSAGE_BYTES;
    use cadre_protocol::Round;
    use proptest::prelude::*;

    use super::*;

    fn works(message: &Message) -> Vec<Work> {
        match message {
            Message::Finished { works, .. } => works.clone(),
            Message::Ack { acks } | Message::Doorbell { acks, .. } => {
                acks.works.iter().map(|it| it.1).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn no_message_outgrows_the_exchange_and_all_works_are_named_once_in_order(
            count in 0..400_000_u32
        ) {
            let at = At::new(u64::MAX, u32::MAX);
            // The longest numbers there are.
            let named: Vec<_> = (0..count).map(|it| Work(u32::MAX - it)).collect();
            let acks = Acks { through: Some(at), works: named.iter().map(|it| (at, *it)).collect() };
            let (round, digest) = (Round(u32::MAX), u64::MAX);
            for message in [
                Message::Finished { at, works: named.clone() },
                Message::Ack { acks: acks.clone() },
                Message::Doorbell { at, round, acks: acks.clone(), digest },
            ] {
                let last = std::mem::discriminant(&message);
                let parts = parted(message);
                prop_assert_eq!(std::mem::discriminant(parts.last().unwrap()), last);
                let all: Vec<_> = parts.iter().flat_map(works).collect();
                prop_assert_eq!(&all, &named);
                for part in parts {
                    let bytes = postcard::to_stdvec(&Envelope::Protocol(part)).unwrap();
                    prop_assert!(bytes.len() <= MAX_MESSAGE_BYTES);
                }
            }
        }
    }
}
