//! What the conductor puts together: layouts from lengths, slots from views.
//!
//! In: [`Lengths`] of every trainer, a [`View`]. Out: a [`Header`]. Nothing is sent here: the conductor's
//! IO thread does that.

mod view;

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use cadre_crds::Wire;
use cadre_planner::{Costs, DocumentId, Heads, RankId, Slot, Stretch};

use crate::envelope::Lengths;
use crate::header::{Header, Log, Member, Placement, ViewNumber};
use crate::layers::Layers;
use crate::packing::Packing;
use crate::phases::PhaseOrder;
use crate::planned::{TooManyPlans, check_plans};
use crate::turns::{self, Turns};

pub use self::view::{Offer, Roster, View};

/// Documents and stretches of a step at most: its header is said to every worker, and written to the job's log.
const MAX_ENTRIES: usize = 4_000_000;
/// Weight of a slot that nothing is known about.
pub const NOMINAL_WEIGHT: u32 = 100;

/// What all headers of a job have in common, and the one in the making.
#[derive(Debug)]
pub struct Draft {
    /// Number of trainers.
    pub trainers: u16,
    /// Layers of the model, by kind.
    pub layers: Layers,
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
    /// Rows of a document whose length nobody tells.
    #[error(
        "step {step}: a trainer holds rows of document {document} and tells no length of it; list every document that it holds"
    )]
    Untold {
        /// The step.
        step: u64,
        /// The document.
        document: u32,
    },
    /// A header that is too long.
    #[error(
        "step {step} has {entries} documents and stretches, more than {MAX_ENTRIES}; pack fewer documents, or let ranks hold longer stretches of them"
    )]
    TooMany {
        /// The step.
        step: u64,
        /// How many there are.
        entries: usize,
    },
    /// Trainers that count nano-batches otherwise.
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
    /// Turns that no step of this model can have.
    #[error("step {step}: {source}")]
    Turns {
        /// The step.
        step: u64,
        /// What is wrong.
        source: turns::Error,
    },
    /// Trainers want phases in another order.
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
        /// Its turns.
        its: String,
        /// Another trainer.
        other: u16,
        /// Those of that one.
        theirs: String,
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
        let told = lengths.values().flat_map(|it| &it.nanos);
        let entries: usize = told.map(|it| it.documents.len() + it.stretches.len()).sum();
        if entries > MAX_ENTRIES {
            return Err(Error::TooMany { step, entries });
        }
        let count = nanos(step, lengths)?;
        let turns = self.turns(step, count, lengths)?;
        let order = PhaseOrder::new(&turns, self.layers.count(), count)
            .map_err(|source| Error::Turns { step, source })?;
        let nanos = (0..count).map(|nano| packing(step, nano, lengths.values()));
        let nanos = nanos.collect::<Result<Vec<_>, Error>>()?;
        let slots = self.slots(view);
        let fresh = Header {
            step,
            layers: self.layers.clone(),
            heads: self.heads,
            wire: self.wire,
            seed: self.seed,
            numerics: self.numerics.clone(),
            placement: self.placement,
            slots,
            costs: self.costs,
            turns,
            nanos,
            view: view.number,
            fillers: Vec::new(),
        };
        self.header = Some(match &self.replay {
            Some(log) => log.replay(fresh)?,
            None => fresh,
        });
        Ok(order.count() as u32)
    }

    /// The turns of a step of so many nano-batches, which every trainer has announced.
    fn turns(
        &self,
        step: u64,
        nanos: usize,
        lengths: &BTreeMap<u16, Lengths>,
    ) -> Result<Turns, Error> {
        check_plans(nanos, &self.layers).map_err(|source| Error::Plans { step, source })?;
        // No number above `MAX_PLANS` came so far.
        let held = NonZeroU16::new(nanos as u16).ok_or(Error::Empty { step })?;
        let together = Turns::together(held);
        let mut each = lengths.iter().map(|it| (*it.0, it.1.turns.as_ref().unwrap_or(&together)));
        let Some((one, turns)) = each.next() else { return Ok(together) };
        match each.find(|it| it.1 != turns) {
            None => Ok(turns.clone()),
            Some((other, theirs)) => {
                let same = turns.list().iter().zip(theirs.list()).take_while(|it| it.0 == it.1);
                let turn = same.count();
                let (its, theirs) = (turns.to_string(), theirs.to_string());
                Err(Error::OtherTurns { step, turn, one, its, other, theirs })
            }
        }
    }

    /// Whether the header of a step will have the slots of the one that was made last, by this view.
    pub fn keeps_slots(&mut self, step: u64, view: &View) -> bool {
        let slots = match &self.replay {
            // Of a step that the log lacks: that is said where its header is made.
            Some(log) => log.slots(step).map(<[Slot]>::to_vec),
            None => Some(self.slots(view)),
        };
        self.header.as_ref().is_some_and(|it| slots.is_none_or(|slots| slots == it.slots))
    }

    /// Who fills the slots of the header in the making.
    pub fn fillers(&self, view: &View) -> Vec<Option<Member>> {
        self.header.as_ref().map_or_else(Vec::new, |it| view.fill(&it.slots, &[]))
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
            return trainers.map(at_home(NOMINAL_WEIGHT)).collect();
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

/// How many nano-batches every trainer has announced.
fn nanos(step: u64, lengths: &BTreeMap<u16, Lengths>) -> Result<usize, Error> {
    let mut each = lengths.iter().map(|it| (*it.0, it.1.nanos.len()));
    let Some((one, its)) = each.next() else { return Ok(0) };
    match each.find(|it| it.1 != its) {
        Some((other, theirs)) => Err(Error::Nanos { step, one, its, other, theirs }),
        None => Ok(its),
    }
}

/// One packed stream from the stretches of all trainers. These number their documents as they like; in the stream the
/// numbers follow each other, in the same order.
fn packing<'a>(
    step: u64,
    nano: usize,
    lengths: impl Iterator<Item = &'a Lengths> + Clone,
) -> Result<Packing, Error> {
    let mut rows: BTreeMap<u32, u32> = BTreeMap::new();
    let of_nano = lengths.map(|it| it.nanos.get(nano));
    for own in of_nano.clone() {
        for &(document, length) in own.map_or(&[][..], |it| &it.documents) {
            let one = *rows.entry(document).or_insert(length);
            if one != length {
                return Err(Error::Lengths { step, document, one, other: length });
            }
        }
    }
    let numbers: BTreeMap<u32, u32> = rows.keys().copied().zip(0..).collect();
    let numbered = |it: &Stretch| match numbers.get(&it.document.0) {
        Some(&number) => Ok(Stretch { document: DocumentId(number), ..*it }),
        None => Err(Error::Untold { step, document: it.document.0 }),
    };
    let stretches = of_nano.map(|own| own.map_or(&[][..], |it| &it.stretches));
    let ranks: Result<_, _> =
        stretches.map(|it| it.iter().map(numbered).collect::<Result<Vec<_>, _>>()).collect();
    let documents: Vec<u32> = rows.into_values().collect();
    Packing::new(&documents, ranks?).map_err(|source| Error::Layout { step, nano, source })
}

#[cfg(test)]
mod tests;
