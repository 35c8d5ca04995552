//! The conductor, but for what carries out its decisions: layouts from lengths, slots from views, and what it decides
//! ([`decisions`]).
//!
//! In: [`Lengths`] of every trainer, a [`View`]. Out: a [`Header`]. Nothing is sent here: the conductor's
//! IO thread does that.
//!
//! Invariant: the cost of what a [`Draft`] does grows with the slots of the job alone. [`Making`] and [`Filled`] do what grows with
//! the documents of a step. They need no draft, so that another thread can do it.

pub mod decisions;
mod making;
mod view;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use cadre_crds::Wire;
use cadre_planner::{Costs, LinkMap, RankId, Slot, Tolerance};

use crate::envelope::Lengths;
use crate::header::{Header, KvHeads, Log, Member, Placement, ViewNumber};
use crate::layers::Layers;
use crate::planned::TooManyPlans;
use crate::turns::{self, Turns};

pub use self::making::{Filled, Made, Making};
pub use self::view::{Offer, Roster, View};

/// Weight of a slot whose speed nobody has measured.
pub const NOMINAL_WEIGHT: u32 = 100;

/// Fields that all headers of a job share, and the header that is being made.
#[derive(Debug)]
pub struct Draft {
    /// Number of trainers.
    pub trainers: u16,
    /// Layers of the model, by kind.
    pub layers: Layers,
    /// Whether the KV heads of a document may part.
    pub kv_heads: KvHeads,
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
    /// What tasks cost, by kind of layers.
    pub costs: Vec<Costs>,
    /// How uneven plans may be.
    pub tolerance: Tolerance,
    /// What is known of the links of its workers.
    pub links: LinkMap,
    /// Whether trainers take the work of a lost pool.
    pub standby: Standby,
    /// Bytes that each trainer has for rows of other trainers, when it serves in place or stands
    /// by.
    pub trainer_memory: u64,
    /// Headers to replay.
    pub replay: Option<Arc<Log>>,
    /// The header that was made last, without fillers.
    pub header: Option<Arc<Header>>,
    /// Members that fill the slots of the header that was published last.
    pub filled: Vec<Option<Member>>,
    /// Bytes that each slot had when it was last filled.
    pub memories: BTreeMap<usize, u64>,
}

/// Whether trainers take the work of a lost pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Standby {
    /// Trainers take it.
    Yes,
    /// Nobody takes it.
    No,
}

/// Why there is no header.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Trainers hold rows that do not fit together.
    #[error("step {step}, nano-batch {nano}: {source}{}", announced(.by))]
    Layout {
        /// The step.
        step: u64,
        /// The nano-batch.
        nano: usize,
        /// What is wrong. Documents have the numbers that trainers gave them.
        source: Box<cadre_planner::Error>,
        /// Who announced the document that it is about; nobody if it is about none.
        by: Vec<u16>,
    },
    /// Trainers disagree on a document.
    #[error(
        "step {step}: trainer {one} gives document {document} the length {its}, trainer {other} {theirs}; give all of them the same data"
    )]
    Lengths {
        /// The step.
        step: u64,
        /// The document.
        document: u32,
        /// A trainer.
        one: u16,
        /// The length that it gives.
        its: u32,
        /// Another trainer, or the same one.
        other: u16,
        /// The length that this one gives.
        theirs: u32,
    },
    /// A trainer holds rows of a document whose length it does not tell.
    #[error(
        "step {step}: trainer {trainer} holds rows of document {document}, and no trainer tells its length; list every document that it holds"
    )]
    Untold {
        /// The step.
        step: u64,
        /// Who holds rows of it.
        trainer: u16,
        /// The document.
        document: u32,
    },
    /// More documents and stretches than a header may have.
    #[error(
        "step {step} has {entries} documents and stretches, more than {}; pack fewer documents, or let ranks hold longer stretches of them",
        making::MAX_ENTRIES
    )]
    TooMany {
        /// The step.
        step: u64,
        /// How many there are.
        entries: usize,
    },
    /// Two trainers announce different numbers of nano-batches.
    #[error(
        "step {step}: trainer {one} announced {its} nano-batches, trainer {other} {theirs}; announce all of them at every rank, also those of which it has no rows"
    )]
    Nanos {
        /// The step.
        step: u64,
        /// A trainer.
        one: u16,
        /// How many it told.
        its: usize,
        /// Another trainer.
        other: u16,
        /// How many that one told.
        theirs: usize,
    },
    /// A step without work.
    #[error("step {step} has no nano-batch; give every step at least one")]
    Empty {
        /// The step.
        step: u64,
    },
    /// A step with more plans than can be numbered.
    #[error("step {step}: {source}")]
    Plans {
        /// The step.
        step: u64,
        /// How many there are.
        source: TooManyPlans,
    },
    /// Turns that do not fit the layers and nano-batches of this model.
    #[error("step {step}: {source}")]
    Turns {
        /// The step.
        step: u64,
        /// What is wrong.
        source: turns::Error,
    },
    /// Two trainers announce different turns.
    #[error(
        "step {step}: trainer {one} announced the turns {its}, trainer {other} {theirs}, other ones from turn {turn} on; give all ranks the same turns"
    )]
    OtherTurns {
        /// The step.
        step: u64,
        /// The first that differs, counted from 0.
        turn: usize,
        /// A trainer.
        one: u16,
        /// Turns of this trainer.
        its: String,
        /// Another trainer.
        other: u16,
        /// Turns of the other trainer.
        theirs: String,
    },
    /// The header log is of another run.
    #[error(transparent)]
    Replay(#[from] crate::header::Error),
}

/// Trainers that a refusal lists.
const MAX_LISTED_TRAINERS: usize = 8;

/// Who announced a document, in words behind what is wrong with it.
fn announced(by: &[u16]) -> String {
    let list: Vec<_> = by.iter().take(MAX_LISTED_TRAINERS).map(u16::to_string).collect();
    match list.as_slice() {
        [] => String::new(),
        [one] => format!(" (trainer {one} announced it)"),
        list => {
            let more = if by.len() > MAX_LISTED_TRAINERS { " and others" } else { "" };
            format!(" (trainers {}{more} announced it)", list.join(", "))
        }
    }
}

impl Draft {
    /// All inputs of the next header, so that another thread can make it.
    pub fn order(
        &mut self,
        step: u64,
        lengths: BTreeMap<u16, Lengths>,
        view: &View,
    ) -> Box<Making> {
        let slots = self.slots(view);
        let dedicated = slots.iter().filter(|it| it.home.is_none()).count();
        let blank = Header {
            step,
            layers: self.layers.clone(),
            kv_heads: self.kv_heads,
            wire: self.wire,
            seed: self.seed,
            numerics: self.numerics.clone(),
            placement: self.placement,
            slots,
            costs: self.costs.clone(),
            tolerance: self.tolerance,
            links: self.links.links(self.trainers, dedicated),
            turns: Turns::forward(NonZeroU16::MIN),
            nanos: Vec::new(),
            view: view.number,
            fillers: Vec::new(),
        };
        Box::new(Making { blank, lengths, replay: self.replay.clone() })
    }

    /// Keeps the next header, which was made of what [`Self::order`] gave.
    pub fn made(&mut self, header: Arc<Header>) {
        self.header = Some(header);
    }

    /// Whether a header of `step` from this view would have the slots of the header that was made
    /// last.
    pub fn keeps_slots(&mut self, step: u64, view: &View) -> bool {
        let slots = match &self.replay {
            // A step that the log lacks counts as equal here; making its header reports the error.
            Some(log) => log.slots(step).map(<[Slot]>::to_vec),
            None => Some(self.slots(view)),
        };
        self.header.as_ref().is_some_and(|it| slots.is_none_or(|slots| slots == it.slots))
    }

    /// Members that fill the slots of the header that was made last.
    pub fn fillers(&self, view: &View) -> Vec<Option<Member>> {
        // The slots are those of the view, but in a replay: there servers keep theirs, however few are offered.
        let before = if self.replay.is_some() { &self.filled[..] } else { &[] };
        self.header.as_ref().map_or_else(Vec::new, |it| view.fill(&it.slots, before))
    }

    /// The header that was made last, with its fillers.
    pub fn finish(&mut self, view: ViewNumber, fillers: Vec<Option<Member>>) -> Filled {
        let header = self.header.clone().expect("a header is made before it is published");
        self.filled.clone_from(&fillers);
        Filled { header, view, fillers }
    }

    fn slots(&mut self, view: &View) -> Vec<Slot> {
        let trainers = (0..u32::from(self.trainers)).map(RankId);
        let memory = self.trainer_memory;
        let at_home =
            |weight: u32| move |home| Slot { weight, head_start: 0, home: Some(home), memory };
        if self.placement == Placement::Local {
            return trainers.map(at_home(NOMINAL_WEIGHT)).collect();
        }
        for (index, offer) in view.slots.iter().enumerate() {
            if let Some(memory) = offer.memory {
                self.memories.insert(index, memory);
            }
        }
        // A slot that was never filled gets the least memory of all, so that any server can take
        // it.
        let least = self.memories.values().copied().min().unwrap_or(memory);
        let mut slots: Vec<_> = view
            .slots
            .iter()
            .enumerate()
            .map(|(index, offer)| Slot {
                weight: offer.weight,
                head_start: 0,
                home: offer.home.map(|rank| RankId(rank.into())),
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

#[cfg(test)]
mod tests;
