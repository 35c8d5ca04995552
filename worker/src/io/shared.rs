//! What the sides of the IO thread share: the provider, the peers' addresses, pulls, planned steps, and
//! what was said to a machine of the same process.
//!
//! Protocol machines name pulls and peers in their own words; here they are translated to the
//! provider's. A machine's pull may be several of the provider's, one a tensor: it ends when the last
//! of them has, with the first failure.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use cadre_exchange::{LandingId, PeerId, Piece, PullError, PullId as WirePull, RegionKey, Role};
use cadre_planner::Assignment;
use cadre_protocol::{
    At, Fillers, Message, Nanos, Peer, PullFailure, PullId, PullResult, Round, RoundTable,
    ServerId, TrainerId, Work, alive,
};

use super::envelope::Envelope;
use super::exchange::Exchange;
use crate::launch::{PhaseRows, Results};
use crate::lowering::Tensor;
use crate::planned::PlannedStep;
use crate::trace::{Activity, Tracer};

/// A machine of this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// The trainer's.
    Trainer,
    /// The server's.
    Server,
}

/// A pull of a machine, in the provider's hands.
#[derive(Debug)]
struct Group {
    side: Side,
    pull: PullId,
    left: usize,
    /// Of them, those that the device does not copy yet.
    waiting: usize,
    bytes: u64,
    failure: Option<PullFailure>,
    incarnation: u32,
    start: Instant,
}

/// A step that runs, with the assignments of its rounds so far.
#[derive(Debug)]
pub struct Running {
    /// The step.
    pub planned: Arc<PlannedStep>,
    rounds: Vec<Vec<Assignment>>,
}

/// See the module.
pub struct Shared {
    /// Moves bytes.
    pub provider: Exchange,
    /// Who this process is.
    pub me: Peer,
    /// Steps that have begun and are not over.
    pub steps: BTreeMap<u64, Running>,
    /// This trainer's rows, by phase, until they are released.
    pub rows: BTreeMap<At, PhaseRows>,
    /// Results of this process, until they are freed.
    pub results: BTreeMap<(At, Work), Arc<Results>>,
    /// Messages between machines of this process.
    pub local: VecDeque<Message>,
    /// What this process tells the conductor that lives in it.
    pub to_conductor: VecDeque<Envelope>,
    /// Pulls whose copies the device has begun, all of them.
    pub begun: VecDeque<(Side, PullId)>,
    /// Pulls that ended without the provider.
    pub ended: VecDeque<(Side, PullId, PullResult)>,
    /// Bytes that the server side has pulled from other processes.
    pub bytes_pulled: u64,
    /// Why this process can move nothing more.
    pub broken: Option<String>,
    /// Time spans.
    pub tracer: Tracer,
    epoch: Instant,
    addresses: BTreeMap<Peer, (PeerId, String)>,
    pulls: BTreeMap<WirePull, u64>,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
}

impl Shared {
    /// Of process `me`.
    pub fn new(me: Peer, provider: Exchange, tracer: Tracer) -> Self {
        Self {
            provider,
            me,
            steps: BTreeMap::new(),
            rows: BTreeMap::new(),
            results: BTreeMap::new(),
            local: VecDeque::new(),
            to_conductor: VecDeque::new(),
            begun: VecDeque::new(),
            ended: VecDeque::new(),
            bytes_pulled: 0,
            broken: None,
            tracer,
            epoch: Instant::now(),
            addresses: BTreeMap::new(),
            pulls: BTreeMap::new(),
            groups: BTreeMap::new(),
            next_group: 0,
        }
    }

    /// Protocol time.
    pub fn now(&self) -> Nanos {
        Nanos(self.epoch.elapsed().as_nanos() as u64)
    }

    /// The moment of a protocol time.
    pub fn instant(&self, at: Nanos) -> Instant {
        self.epoch + std::time::Duration::from_nanos(at.0)
    }

    /// Learns where a peer listens.
    pub fn know(&mut self, id: PeerId, address: &str) {
        if !address.is_empty() {
            self.addresses.insert(peer_of(id), (id, address.to_owned()));
        }
    }

    /// The exchange's name of a peer.
    fn id_of(&self, peer: Peer) -> Option<PeerId> {
        self.addresses.get(&peer).map(|it| it.0)
    }

    /// All other trainers that are known.
    pub fn trainers(&self) -> Vec<Peer> {
        let trainer = |it: &&Peer| matches!(it, Peer::Trainer(_)) && **it != self.me;
        self.addresses.keys().filter(trainer).copied().collect()
    }

    /// Sends to another process or to a machine of this one. What cannot be sent is lost, as on a
    /// broken link: the machines say it again.
    pub fn send(&mut self, to: Peer, message: Message) {
        if to == self.me {
            self.local.push_back(message);
        } else {
            self.ring(to, &Envelope::Protocol(message));
        }
    }

    /// Tells the conductor, in whichever process it lives.
    pub fn tell_conductor(&mut self, envelope: Envelope) {
        if self.me == Peer::CONDUCTOR {
            self.to_conductor.push_back(envelope);
        } else {
            self.ring(Peer::CONDUCTOR, &envelope);
        }
    }

    /// Rings another process.
    pub fn ring(&mut self, to: Peer, envelope: &Envelope) {
        let Some((id, address)) = self.addresses.get(&to) else {
            tracing::debug!("no address of {to} yet");
            return;
        };
        let bytes = match postcard::to_stdvec(envelope) {
            Ok(bytes) => bytes,
            Err(error) => return tracing::error!("a message to {to} cannot be encoded: {error}"),
        };
        self.provider.connect(*id, address);
        if let Err(error) = self.provider.ring(*id, &bytes) {
            tracing::warn!("a message to {to} is lost: {error}");
        }
    }

    /// Closes the links with a peer by force.
    pub fn close(&mut self, peer: Peer) {
        if let Some(id) = self.id_of(peer) {
            self.provider.close(id);
        }
    }

    /// Starts a machine's pull of pieces of several regions.
    pub fn pull(
        &mut self,
        (side, pull): (Side, PullId),
        from: Peer,
        parts: Vec<(RegionKey, Vec<Piece>, LandingId)>,
        deadline: Nanos,
    ) {
        let parts: Vec<_> = parts.into_iter().filter(|it| !it.1.is_empty()).collect();
        let Some((id, address)) = self.addresses.get(&from).cloned() else {
            return self.ended.push_back((side, pull, Err(PullFailure::PeerFailed)));
        };
        if parts.is_empty() {
            return self.ended.push_back((side, pull, Ok(from.incarnation())));
        }
        self.provider.connect(id, &address);
        let (group, deadline) = (self.next_group, self.instant(deadline));
        self.next_group += 1;
        let left = parts.len();
        for (key, pieces, landing) in parts {
            let wire = self.provider.pull(id, key, pieces, landing, deadline);
            self.pulls.insert(wire, group);
        }
        let (bytes, failure, incarnation) = (0, None, from.incarnation());
        let (waiting, start) = (left, Instant::now());
        let group_of = Group { side, pull, left, waiting, bytes, failure, incarnation, start };
        self.groups.insert(group, group_of);
    }

    /// Pulls a region that is no machine's; the caller knows the pull when it ends.
    pub fn pull_region(
        &mut self,
        from: PeerId,
        key: RegionKey,
        pieces: Vec<Piece>,
        landing: LandingId,
        deadline: Instant,
    ) -> WirePull {
        if let Some((id, address)) = self.addresses.get(&peer_of(from)) {
            self.provider.connect(*id, address);
        }
        self.provider.pull(from, key, pieces, landing, deadline)
    }

    /// The provider says that the device copies for a pull; if it was the last of a machine's, all of that one is under way.
    pub fn began(&mut self, wire: WirePull) {
        let Some(id) = self.pulls.get(&wire) else { return };
        let group = self.groups.get_mut(id).expect("a group lives until its last pull ended");
        group.waiting -= 1;
        if group.waiting == 0 {
            self.begun.push_back((group.side, group.pull));
        }
    }

    /// The provider says that a pull ended; if it was the last of a machine's, that one ended.
    pub fn pulled(&mut self, wire: WirePull, result: Result<u64, PullError>) {
        let Some(id) = self.pulls.remove(&wire) else { return };
        let group = self.groups.get_mut(&id).expect("a group lives until its last pull ended");
        match result {
            Ok(bytes) => group.bytes += bytes,
            Err(error) => {
                tracing::debug!("a pull failed: {error}");
                group.failure.get_or_insert(match error {
                    PullError::Gone => PullFailure::Gone,
                    PullError::PeerFailed => PullFailure::PeerFailed,
                    PullError::Deadline => PullFailure::Deadline,
                    PullError::Cancelled => PullFailure::Cancelled,
                    PullError::Refused { reason } => {
                        tracing::error!("a pull was refused: {reason}");
                        PullFailure::Gone
                    }
                });
            }
        }
        group.left -= 1;
        if group.left == 0 {
            let group = self.groups.remove(&id).expect("it was there a moment ago");
            if group.side == Side::Server {
                self.bytes_pulled += group.bytes;
            }
            self.tracer
                .span("pull", Activity::Pull, group.start, || format!("{} bytes", group.bytes));
            let result = group.failure.map_or(Ok(group.incarnation), Err);
            self.ended.push_back((group.side, group.pull, result));
        }
    }

    /// Takes a planned step; its bundles are where the header's fillers put them.
    ///
    /// # Errors
    ///
    /// A bundle that no filled slot can hold.
    pub fn begin(&mut self, planned: Arc<PlannedStep>) -> Result<&Running, cadre_planner::Error> {
        let step = planned.header.step;
        let fillers: Fillers = planned
            .header
            .fillers
            .iter()
            .map(|it| it.as_ref().map(crate::planned::filler))
            .collect();
        let first = planned.assign(None, &alive(&fillers))?;
        let running = self.steps.entry(step).or_insert(Running { planned, rounds: vec![first] });
        Ok(running)
    }

    /// The table of the newest round of `tables`, which hold the fillers of rounds 1 and up.
    ///
    /// # Errors
    ///
    /// A bundle that no survivor can hold. `None` if the step is over.
    pub fn table(
        &mut self,
        step: u64,
        tables: &[Fillers],
    ) -> Result<Option<RoundTable>, cadre_planner::Error> {
        let Some(running) = self.steps.get_mut(&step) else { return Ok(None) };
        while running.rounds.len() <= tables.len() {
            let fillers = &tables[running.rounds.len() - 1];
            let current = running.rounds.last().expect("round 0 is always there");
            let next = running.planned.assign(Some(current), &alive(fillers))?;
            running.rounds.push(next);
        }
        let newest = tables.last().cloned().unwrap_or_default();
        let round = Round(tables.len() as u32);
        Ok(Some(running.planned.table(round, newest, &running.rounds[tables.len()])))
    }
}

impl Running {
    /// The assignments of round 0.
    pub fn first(&self) -> &[Assignment] {
        &self.rounds[0]
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
