//! What the conductor puts together: layouts from lengths, slots from views, reports from steps.
//!
//! In: [`Lengths`] of every trainer, a [`View`]. Out: a [`Header`] and, when the step is over, what the
//! controller is told. Pure; the side of the IO thread that uses it does the talking.

use std::collections::BTreeMap;

use cadre_control::proto;
use cadre_crds::Wire;
use cadre_exchange::PeerId;
use cadre_planner::{Costs, Document, Heads, Layout, Mask, RankId, Slot, imbalance_at_home};
use cadre_protocol::{Filler, Peer, ServerId, TrainerId};

use crate::header::{Header, Log, Member, Placement, ViewNumber};
use crate::io::envelope::{Lengths, ServerStep, StepDone};
use crate::planned::{PlannedStep, filler};
use crate::supervisor::Moment;

/// Weight of a slot that nothing is known about.
const NOMINAL: u32 = 100;

/// Who the trainers are.
#[derive(Clone, Debug)]
pub struct Roster {
    count: usize,
    list: Vec<(PeerId, String)>,
}

impl Roster {
    /// Of a job of `trainers` trainers, none known yet.
    pub fn new(trainers: u16) -> Self {
        Self { count: trainers.into(), list: Vec::new() }
    }

    /// Learns all of them, by rank.
    pub fn trainers(&mut self, list: Vec<(PeerId, String)>) {
        self.list = list;
    }

    /// Whether all are known.
    pub fn is_complete(&self) -> bool {
        self.list.len() == self.count
    }

    /// All of them, by rank.
    pub fn list(&self) -> Vec<(PeerId, String)> {
        self.list.clone()
    }
}

/// What the controller offers.
#[derive(Clone, Debug)]
pub struct View {
    /// Its number.
    pub number: ViewNumber,
    /// By slot.
    pub slots: Vec<Offer>,
}

/// One slot of a view.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Nominal weight.
    pub weight: u32,
    /// The trainer's rank, in place.
    pub home: Option<u16>,
    /// Memory of who fills it.
    pub memory: Option<u64>,
    /// Who fills it.
    pub member: Option<Member>,
    /// What the bits of who fills it depend on.
    pub numerics: Option<String>,
}

impl View {
    /// Reads the controller's view.
    pub fn of(view: &proto::View) -> Self {
        let number = view.number.unwrap_or_default();
        let slots = view.slots.iter().map(|slot| {
            let index = slot.server.as_ref().map(|it| it.index as u16);
            let home = (slot.kind() == proto::Kind::InPlace).then_some(index).flatten();
            let member = slot.server.as_ref().map(|it| match home {
                Some(rank) => Member::InPlace(rank),
                None => Member::Server {
                    index: it.index as u16,
                    incarnation: it.incarnation,
                    address: it.exchange_address.clone(),
                },
            });
            let memory = slot.server.as_ref().map(|it| it.memory_bytes);
            let numerics = slot.server.as_ref().map(|it| it.numerics_id.clone());
            Offer { weight: slot.weight, home, memory, member, numerics }
        });
        let ViewNumber { term, counter } =
            ViewNumber { term: number.term, counter: number.counter };
        Self { number: ViewNumber { term, counter }, slots: slots.collect() }
    }

    /// Whether somebody is still expected.
    pub fn has_vacancy(&self) -> bool {
        self.slots.is_empty() || self.slots.iter().any(|it| it.member.is_none())
    }

    /// Makes slots vacant whose servers would compute other bits; says which.
    pub fn refuse_foreign(&mut self, numerics: &str) -> Vec<String> {
        let mut refused = Vec::new();
        for (index, offer) in self.slots.iter_mut().enumerate() {
            let other = offer.numerics.as_deref().filter(|it| !it.is_empty() && *it != numerics);
            if let Some(other) = other {
                refused.push(format!(
                    "the server of slot {index} computes with {other:?}, the trainers with {numerics:?}; \
                     the job says reproducible, so the slot stays vacant"
                ));
                offer.member = None;
            }
        }
        refused
    }

    /// Dedicated servers and where they listen.
    pub fn addresses(&self) -> impl Iterator<Item = (PeerId, String)> {
        self.slots.iter().filter_map(|it| match &it.member {
            Some(Member::Server { index, incarnation, address }) => {
                Some((PeerId::server(*index, *incarnation), address.clone()))
            }
            Some(Member::InPlace(_) | Member::Standby(_)) | None => None,
        })
    }

    /// Fillers of the protocol, with the addresses of this view.
    pub fn members(&self, fillers: &[Option<Filler>]) -> Vec<Option<Member>> {
        let server = |id: ServerId| {
            let known = self
                .slots
                .iter()
                .filter_map(|it| it.member.clone())
                .find(|it| filler(it) == Filler::Server(id));
            known.unwrap_or(Member::Server {
                index: id.index,
                incarnation: id.incarnation,
                address: String::new(),
            })
        };
        let member = |it: &Filler| match *it {
            Filler::InPlace(TrainerId(rank)) => Member::InPlace(rank),
            Filler::Standby(TrainerId(rank)) => Member::Standby(rank),
            Filler::Server(id) => server(id),
        };
        fillers.iter().map(|it| it.as_ref().map(member)).collect()
    }

    /// Who fills slots that may be of another view: dedicated ones in order, the others by their home.
    pub fn fill(&self, slots: &[Slot]) -> Vec<Option<Member>> {
        let mut dedicated = self.slots.iter().filter(|it| it.home.is_none());
        slots
            .iter()
            .map(|slot| match slot.home {
                Some(RankId(rank)) if slot.is_standby() => Some(Member::Standby(rank)),
                Some(RankId(rank)) => Some(Member::InPlace(rank)),
                None => dedicated.next().and_then(|it| it.member.clone()),
            })
            .collect()
    }
}

/// What all headers of a job have in common, and the one in the making.
#[derive(Debug)]
pub struct Draft {
    /// Number of trainers.
    pub trainers: u16,
    /// Layers of the model.
    pub layers: u16,
    /// Heads of the model.
    pub heads: Heads,
    /// Type of rows on the wire.
    pub wire: Wire,
    /// Seed of the job.
    pub seed: u64,
    /// Numerics id of this build.
    pub numerics: String,
    /// Whether servers of another numerics id are refused.
    pub reproducible: bool,
    /// Where core attention is computed.
    pub placement: Placement,
    /// What tasks cost.
    pub costs: Costs,
    /// Whether trainers take the work of a lost pool.
    pub standby: Standby,
    /// Memory of a trainer for rows of others.
    pub trainer_memory: u64,
    /// Headers to replay.
    pub replay: Option<Log>,
    /// The header in the making.
    pub header: Option<Header>,
    /// Memory that a slot had when it was last filled.
    pub memories: BTreeMap<usize, u64>,
}

/// Whether trainers take the work of a lost pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Standby {
    /// They do.
    Yes,
    /// They do not.
    No,
}

/// Why there is no header.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Trainers hold rows that do not fit together.
    #[error("step {step}, nano-batch {nano}: {source}")]
    Layout {
        /// The step.
        step: u64,
        /// The nano-batch.
        nano: usize,
        /// What is wrong.
        source: cadre_planner::Error,
    },
    /// Trainers disagree on a document.
    #[error(
        "step {step}: trainers give document {document} the lengths {one} and {other}; give all of them the same data"
    )]
    Lengths {
        /// The step.
        step: u64,
        /// The document.
        document: u32,
        /// One length.
        one: u32,
        /// The other.
        other: u32,
    },
    /// The header log is of another run.
    #[error(transparent)]
    Replay(#[from] crate::header::Error),
}

impl Draft {
    /// Makes the next header but for its fillers; says how many phases the step has.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn prepare(
        &mut self,
        step: u64,
        lengths: &BTreeMap<u16, Lengths>,
        view: &View,
    ) -> Result<u32, Error> {
        let count = lengths.values().map(|it| it.nanos.len()).max().unwrap_or(0);
        let nanos = (0..count).map(|nano| layout(step, nano, lengths.values()));
        let nanos = nanos.collect::<Result<Vec<_>, Error>>()?;
        let slots = self.slots(view);
        let fresh = Header {
            step,
            layers: self.layers,
            heads: self.heads,
            wire: self.wire,
            seed: self.seed,
            numerics: self.numerics.clone(),
            placement: self.placement,
            slots,
            costs: self.costs,
            nanos,
            view: view.number,
            fillers: Vec::new(),
        };
        let header = match &self.replay {
            Some(log) => log.replay(fresh)?,
            None => fresh,
        };
        let phases = 2 * u32::from(header.layers) * header.nanos.len() as u32;
        self.header = Some(header);
        Ok(phases)
    }

    /// Who fills the slots of the header in the making.
    pub fn fillers(&self, view: &View) -> Vec<Option<Member>> {
        self.header.as_ref().map_or_else(Vec::new, |it| view.fill(&it.slots))
    }

    /// The header with its fillers.
    pub fn finish(&self, view: ViewNumber, fillers: Vec<Option<Member>>) -> Header {
        let header = self.header.clone().expect("a header is prepared before it is published");
        Header { view, fillers, ..header }
    }

    fn slots(&mut self, view: &View) -> Vec<Slot> {
        let trainers = (0..self.trainers).map(RankId);
        let memory = self.trainer_memory;
        let at_home =
            |weight: u32| move |home| Slot { weight, head_start: 0, home: Some(home), memory };
        if self.placement == Placement::Local {
            return trainers.map(at_home(NOMINAL)).collect();
        }
        for (index, offer) in view.slots.iter().enumerate() {
            if let Some(memory) = offer.memory {
                self.memories.insert(index, memory);
            }
        }
        // A slot that was never filled: as small as the smallest, so that whoever comes can hold it.
        let least = self.memories.values().copied().min().unwrap_or(memory);
        let mut slots: Vec<_> = view
            .slots
            .iter()
            .enumerate()
            .map(|(index, offer)| Slot {
                weight: offer.weight,
                head_start: 0,
                home: offer.home.map(RankId),
                memory: self.memories.get(&index).copied().unwrap_or(least),
            })
            .collect();
        let in_place = slots.iter().any(|it| it.home.is_some());
        if self.standby == Standby::Yes && !in_place {
            slots.extend(trainers.map(at_home(0)));
        }
        slots
    }
}

/// One packed stream from the stretches of all trainers.
fn layout<'a>(
    step: u64,
    nano: usize,
    lengths: impl Iterator<Item = &'a Lengths>,
) -> Result<Layout, Error> {
    let mut rows: BTreeMap<u32, u32> = BTreeMap::new();
    let mut ranks = Vec::new();
    for trainer in lengths {
        let own = trainer.nanos.get(nano);
        for &(document, length) in own.map_or(&[][..], |it| &it.documents) {
            let one = *rows.entry(document).or_insert(length);
            if one != length {
                return Err(Error::Lengths { step, document, one, other: length });
            }
        }
        ranks.push(own.map_or_else(Vec::new, |it| it.stretches.clone()));
    }
    let documents = rows.values().map(|&rows| Document { rows, mask: Mask::Causal }).collect();
    Layout::new(documents, ranks).map_err(|source| Error::Layout { step, nano, source })
}

/// What a server did, as the controller is told.
pub fn server_step(planned: &PlannedStep, from: Peer, done: &ServerStep) -> proto::ServerStep {
    let slot =
        planned.header.fillers.iter().flatten().position(|it| filler(it).executor() == Some(from));
    let (kind, index, incarnation) = match from {
        Peer::Trainer(id) => (proto::Kind::InPlace, id.0, 0),
        Peer::Server(id) => (proto::Kind::Dedicated, id.index, id.incarnation),
    };
    proto::ServerStep {
        slot: slot.unwrap_or(0) as u32,
        index: index.into(),
        incarnation,
        kind: kind.into(),
        tasks: done.tasks,
        busy_seconds: done.busy_seconds,
        bytes_pulled: done.bytes_pulled,
    }
}

/// A finished step, as the controller is told.
pub fn progress(
    planned: &PlannedStep,
    done: &[StepDone],
    servers: Vec<proto::ServerStep>,
    failovers: u32,
) -> proto::Progress {
    let header = &planned.header;
    let worst = |of: fn(&StepDone) -> f64| done.iter().map(of).fold(0.0, f64::max);
    let at_home = planned
        .nanos
        .iter()
        .map(|it| imbalance_at_home(&it.problem).expect("a planned problem is sound"));
    let (most, mean) = at_home.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
    let busy: Vec<f64> = servers.iter().map(|it| it.busy_seconds).collect();
    let total: f64 = busy.iter().sum();
    let imbalance = if total > 0.0 {
        busy.iter().copied().fold(0.0, f64::max) * busy.len() as f64 / total
    } else {
        1.0
    };
    proto::Progress {
        step: header.step,
        loss_bits: done.first().map_or(0, |it| it.loss.to_bits()),
        tokens: done.first().map_or(0, |it| it.tokens),
        seconds: worst(|it| it.seconds),
        exposed_wait_seconds: worst(|it| it.exposed_wait_seconds),
        failovers,
        view: Some(proto::ViewNumber { term: header.view.term, counter: header.view.counter }),
        imbalance,
        imbalance_unplanned: if mean > 0 { most as f64 / mean as f64 } else { 1.0 },
        header: serde_json::to_string(header.as_ref()).expect("a header is plain data"),
        servers,
    }
}

/// The moment of a control message.
pub fn moment(step: u64, direction: proto::Direction) -> Moment {
    let direction = match direction {
        proto::Direction::Backward => crate::supervisor::Direction::Backward,
        proto::Direction::Forward | proto::Direction::Unspecified => {
            crate::supervisor::Direction::Forward
        }
    };
    Moment { step, direction }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(index: u32, numerics: &str) -> proto::Slot {
        let server = proto::Server {
            index,
            incarnation: 0,
            exchange_address: "127.0.0.1:1".into(),
            memory_bytes: 1 << 20,
            numerics_id: numerics.into(),
        };
        proto::Slot {
            slot: index,
            weight: 100,
            kind: proto::Kind::Dedicated.into(),
            server: Some(server),
        }
    }

    #[test]
    fn servers_of_other_numerics_leave_their_slots_vacant() {
        let slots = vec![server(0, "cpu"), server(1, "gpu")];
        let mut view = View::of(&proto::View { number: None, slots });
        let refused = view.refuse_foreign("cpu");
        assert_eq!(refused.len(), 1);
        assert!(refused[0].contains("slot 1 computes with \"gpu\""), "{refused:?}");
        assert!(view.slots[0].member.is_some() && view.slots[1].member.is_none());
        assert!(view.has_vacancy());
    }

    #[test]
    fn recorded_slots_are_filled_in_order() {
        let view = View::of(&proto::View { number: None, slots: vec![server(4, "cpu")] });
        let slot = |home: Option<u16>, weight| Slot {
            weight,
            head_start: 0,
            home: home.map(RankId),
            memory: 1,
        };
        let members =
            view.fill(&[slot(None, 100), slot(Some(1), 100), slot(None, 100), slot(Some(0), 0)]);
        assert!(matches!(members[0], Some(Member::Server { index: 4, .. })));
        assert_eq!(members[1..], [Some(Member::InPlace(1)), None, Some(Member::Standby(0))]);
    }
}
