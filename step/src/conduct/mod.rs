//! What the conductor puts together: layouts from lengths, slots from views.
//!
//! In: [`Lengths`] of every trainer, a [`View`]. Out: a [`Header`]. Nothing is sent here: the conductor's
//! IO thread does that.

mod view;

use std::collections::BTreeMap;

use cadre_crds::Wire;
use cadre_planner::{Costs, Heads, RankId, Slot};

use crate::envelope::Lengths;
use crate::header::{Header, Log, Member, Placement, ViewNumber};
use crate::layers::Layers;
use crate::packing::Packing;

pub use self::view::{Offer, Roster, View};

/// Documents and stretches of a step at most: its header is said to every worker, and written to the job's log.
const MAX_ENTRIES: usize = 4_000_000;
/// Plans of a step at most: each has a shape of the protocol for each direction, and shapes are numbered by a `u16`.
const MAX_PLANS: usize = u16::MAX as usize / 2;
/// Weight of a slot that nothing is known about.
const NOMINAL: u32 = 100;

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
    /// A step without work.
    #[error("step {step} has no nano-batch; give every step at least one")]
    Empty {
        /// The step.
        step: u64,
    },
    /// A step with more plans or phases than can be numbered.
    #[error(
        "step {step} has {nanos} nano-batches, {layers} layers and {kinds} kinds of them; at most {MAX_PLANS} nano-batches × kinds and {} phases are supported, so make nano-batches longer",
        u32::MAX
    )]
    Phases {
        /// The step.
        step: u64,
        /// Nano-batches that the trainers announced.
        nanos: usize,
        /// Layers with core attention.
        layers: u16,
        /// Kinds of them.
        kinds: usize,
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
        let count = lengths.values().map(|it| it.nanos.len()).max().unwrap_or(0);
        let phases = self.phases(step, count)?;
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
            nanos,
            view: view.number,
            fillers: Vec::new(),
        };
        self.header = Some(match &self.replay {
            Some(log) => log.replay(fresh)?,
            None => fresh,
        });
        Ok(phases)
    }

    /// Phases of a step of so many nano-batches.
    fn phases(&self, step: u64, nanos: usize) -> Result<u32, Error> {
        if nanos == 0 {
            return Err(Error::Empty { step });
        }
        let (layers, kinds) = (self.layers.count(), self.layers.kinds().len());
        let phases = u32::try_from(2 * u64::from(layers) * nanos as u64);
        match phases {
            Ok(phases) if nanos.saturating_mul(kinds) <= MAX_PLANS => Ok(phases),
            Ok(_) | Err(_) => Err(Error::Phases { step, nanos, layers, kinds }),
        }
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
fn packing<'a>(
    step: u64,
    nano: usize,
    lengths: impl Iterator<Item = &'a Lengths>,
) -> Result<Packing, Error> {
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
    let documents: Vec<u32> = rows.into_values().collect();
    Packing::new(&documents, ranks).map_err(|source| Error::Layout { step, nano, source })
}

#[cfg(test)]
mod tests {
    use cadre_planner::{DocumentId, Mask, Stretch};

    use super::*;
    use crate::envelope::NanoLengths;
    use crate::layers::Kind;

    /// Of a model whose layers are all of other windows.
    fn draft(layers: u16) -> Draft {
        let window = |left| Kind { mask: Mask::Window { left } };
        Draft {
            trainers: 1,
            layers: Layers::new((0..layers.into()).map(window)).unwrap(),
            heads: Heads { query: 2, kv: 1, dim: 8 },
            wire: Wire::F32,
            seed: 0,
            numerics: "test".into(),
            reproducible: true,
            placement: Placement::Local,
            costs: Costs::default(),
            standby: Standby::No,
            trainer_memory: 1 << 20,
            replay: None,
            header: None,
            memories: BTreeMap::new(),
        }
    }

    fn prepare(layers: u16, nanos: Vec<NanoLengths>) -> Result<u32, Error> {
        let view = View { number: ViewNumber::default(), slots: Vec::new() };
        draft(layers).prepare(7, &BTreeMap::from([(0, Lengths { step: 7, nanos })]), &view)
    }

    fn nano(documents: u32) -> NanoLengths {
        let stretch = |it| Stretch { document: DocumentId(it), start: 0, end: 1 };
        let documents = 0..documents;
        NanoLengths {
            documents: documents.clone().map(|it| (it, 1)).collect(),
            stretches: documents.map(stretch).collect(),
        }
    }

    #[test]
    fn a_step_that_nothing_can_be_made_of_is_refused_by_its_number() {
        assert_eq!(prepare(3, vec![nano(2), nano(1)]).unwrap(), 12);
        let most = |layers: u16| vec![nano(1); MAX_PLANS / usize::from(layers)];
        prepare(7, most(7)).unwrap();
        for (layers, nanos, expected) in [
            (2, Vec::new(), "step 7 has no nano-batch"),
            (1, vec![nano(2_000_001)], "step 7 has 4000002 documents and stretches"),
            (
                7,
                [most(7), most(7)].concat(),
                "step 7 has 9362 nano-batches, 7 layers and 7 kinds of them",
            ),
        ] {
            let refused = prepare(layers, nanos).unwrap_err().to_string();
            assert!(refused.starts_with(expected), "{refused}");
        }
    }
}
