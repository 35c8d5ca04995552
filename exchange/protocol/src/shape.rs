//! What one phase asks for: bundles, work and parcels.
//!
//! The worker lowers its plan to this; the protocol knows nothing else about it. The constructor checks
//! what the machines assume: indices in range, every bundle with work, results going only to trainers
//! whose rows the work needs (so that a result never comes before its reader's landing space).

use crate::{Bundle, Groups, Parcel, Slot, TrainerId, Work};

/// Tasks of one document and KV-head group; they move as a whole from slot to slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BundleShape {
    /// The bundle's slot in the plan, in whose memory it has a planned place.
    pub slot: Slot,
}

/// What a server launches: forward a task, backward a whole bundle.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WorkShape {
    /// The bundle that it belongs to.
    pub bundle: Bundle,
    /// Parcels of the same bundle that it reads, each once.
    pub needs: Vec<Parcel>,
    /// Bytes of results for each trainer that wants some, each trainer once.
    pub results: Vec<(TrainerId, u64)>,
}

/// [`WorkShape`], as a shape holds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WorkOf<'a> {
    /// The bundle that it belongs to.
    pub bundle: Bundle,
    /// Parcels of the same bundle that it reads, each once.
    pub needs: &'a [Parcel],
    /// Bytes of results for each trainer that wants some, each trainer once.
    pub results: &'a [(TrainerId, u64)],
}

/// All work of a shape, numbered as it was added.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Works {
    bundles: Vec<Bundle>,
    needs: Groups<Parcel>,
    results: Groups<(TrainerId, u64)>,
}

impl Works {
    /// Room for so many.
    pub fn with_capacity(works: usize) -> Self {
        Self {
            bundles: Vec::with_capacity(works),
            needs: Groups::with_capacity(works),
            results: Groups::with_capacity(works),
        }
    }

    /// Adds one; its parts are what [`WorkShape`] says.
    pub fn push(
        &mut self,
        bundle: Bundle,
        needs: impl IntoIterator<Item = Parcel>,
        results: impl IntoIterator<Item = (TrainerId, u64)>,
    ) {
        self.bundles.push(bundle);
        self.needs.push(needs);
        self.results.push(results);
    }

    fn get(&self, index: usize) -> WorkOf<'_> {
        let bundle = self.bundles[index];
        WorkOf { bundle, needs: self.needs.of(index), results: self.results.of(index) }
    }

    fn iter(&self) -> impl ExactSizeIterator<Item = WorkOf<'_>> + Clone {
        (0..self.bundles.len()).map(|it| self.get(it))
    }

    /// For each member of a list of each work a pair of its group and the work.
    fn by<'a, T: Copy>(
        lists: &'a Groups<T>,
        group: impl Fn(T) -> usize + Copy + 'a,
    ) -> impl Iterator<Item = (usize, Work)> + Clone + 'a {
        let works = (0..lists.len()).map(|it| (it, Work(it as u32)));
        works.flat_map(move |(it, work)| lists.of(it).iter().map(move |&it| (group(it), work)))
    }
}

impl From<Vec<WorkShape>> for Works {
    fn from(works: Vec<WorkShape>) -> Self {
        let mut all = Self::with_capacity(works.len());
        for WorkShape { bundle, needs, results } in works {
            all.push(bundle, needs, results);
        }
        all
    }
}

/// Rows that one trainer holds and one bundle needs, pulled in one go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ParcelShape {
    /// The bundle that needs it.
    pub bundle: Bundle,
    /// The trainer that holds it.
    pub from: TrainerId,
    /// The size of the rows.
    pub bytes: u64,
}

/// What one phase asks for, the same in every layer of a nano-batch and direction. A large step has some 400,000 bundles in its
/// shapes, so they are lists of numbers side by side.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Shape {
    bundles: Vec<BundleShape>,
    works: Works,
    parcels: Vec<ParcelShape>,
    /// By bundle.
    works_of: Groups<Work>,
    parcels_of: Groups<Parcel>,
    sources: Groups<TrainerId>,
    bytes: Vec<u64>,
    /// By parcel: the work that needs it.
    users: Groups<Work>,
    /// By trainer: bundles that need its rows, its rows as they are pulled, work of which it wants results.
    feeds: Groups<Bundle>,
    sends: Groups<Parcel>,
    wants: Groups<Work>,
}

/// A bundle's share of a shape; each list ascends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) works: &'a [Work],
    pub(crate) parcels: &'a [Parcel],
    /// Trainers whose rows it needs.
    pub(crate) sources: &'a [TrainerId],
    /// Inputs and results together.
    pub(crate) bytes: u64,
}

impl Shape {
    /// Checks and indexes the parts.
    ///
    /// # Errors
    ///
    /// The first part that breaks what the types' docs say.
    pub fn new(
        bundles: Vec<BundleShape>,
        works: Vec<WorkShape>,
        parcels: Vec<ParcelShape>,
    ) -> Result<Self, ShapeError> {
        Self::of_works(bundles, works.into(), parcels)
    }

    /// As [`Self::new`], of works that are side by side already.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn of_works(
        bundles: Vec<BundleShape>,
        works: Works,
        parcels: Vec<ParcelShape>,
    ) -> Result<Self, ShapeError> {
        let mut bytes = vec![0; bundles.len()];
        for (parcel, shape) in (0..).map(Parcel).zip(&parcels) {
            let of_bundle = bytes
                .get_mut(shape.bundle.0 as usize)
                .ok_or(ShapeError::ParcelBundle { parcel, bundle: shape.bundle })?;
            *of_bundle += shape.bytes;
        }
        let mut checks = Checks::new(&parcels);
        for (work, shape) in (0..).map(Work).zip(works.iter()) {
            let of_bundle = bytes
                .get_mut(shape.bundle.0 as usize)
                .ok_or(ShapeError::WorkBundle { work, bundle: shape.bundle })?;
            *of_bundle += shape.results.iter().map(|it| it.1).sum::<u64>();
            checks.work(work, shape, &parcels)?;
        }
        let numbered = || (0..).map(Parcel).zip(&parcels);
        let parcels_of =
            Groups::sorted(bundles.len(), numbered().map(|it| (it.1.bundle.0 as usize, it.0)));
        let of_works = (0..).map(Work).zip(&works.bundles);
        let works_of = Groups::sorted(bundles.len(), of_works.map(|it| (it.1.0 as usize, it.0)));
        let (mut sources, mut of_bundle) = (Groups::with_capacity(bundles.len()), Vec::new());
        for bundle in (0..bundles.len() as u32).map(Bundle) {
            let its: &[Parcel] = parcels_of.of(bundle.0 as usize);
            if works_of.of(bundle.0 as usize).is_empty() {
                return Err(ShapeError::Idle { bundle });
            }
            if let Some(&parcel) = its.iter().find(|it| !checks.is_needed(**it)) {
                return Err(ShapeError::Unused { parcel });
            }
            of_bundle.clear();
            of_bundle.extend(its.iter().map(|it| parcels[it.0 as usize].from));
            of_bundle.sort_unstable();
            of_bundle.dedup();
            sources.push(of_bundle.iter().copied());
        }
        sources.shrink();
        let trainers = checks.sends.len();
        let of_bundles = (0..bundles.len()).flat_map(|bundle| {
            let of = sources.of(bundle).iter();
            of.map(move |it| (usize::from(it.0), Bundle(bundle as u32)))
        });
        let feeds = Groups::sorted(trainers, of_bundles);
        let sends = Groups::sorted(trainers, numbered().map(|it| (usize::from(it.1.from.0), it.0)));
        let reads = |it: (TrainerId, u64)| usize::from(it.0.0);
        let wants = Groups::sorted(trainers, Works::by(&works.results, reads));
        let needs = |it: Parcel| it.0 as usize;
        let users = Groups::sorted(parcels.len(), Works::by(&works.needs, needs));
        Ok(Self {
            bundles,
            works,
            parcels,
            works_of,
            parcels_of,
            sources,
            bytes,
            users,
            feeds,
            sends,
            wants,
        })
    }

    /// Bundles that need a trainer's rows, ascending.
    pub fn feeds(&self, trainer: TrainerId) -> &[Bundle] {
        self.feeds.of(trainer.0.into())
    }

    /// Parcels of a trainer's rows, ascending.
    pub(crate) fn sends(&self, trainer: TrainerId) -> &[Parcel] {
        self.sends.of(trainer.0.into())
    }

    /// Work that needs a parcel, ascending.
    pub(crate) fn users(&self, parcel: Parcel) -> &[Work] {
        self.users.of(parcel.0 as usize)
    }

    /// Work of which a trainer wants results, ascending.
    pub fn wants(&self, trainer: TrainerId) -> &[Work] {
        self.wants.of(trainer.0.into())
    }

    /// The bundles, by [`Bundle`].
    pub fn bundles(&self) -> &[BundleShape] {
        &self.bundles
    }

    /// The work, by [`Work`].
    pub fn works(&self) -> impl ExactSizeIterator<Item = WorkOf<'_>> + Clone {
        self.works.iter()
    }

    /// Whether there is such a work.
    pub fn has_work(&self, work: Work) -> bool {
        (work.0 as usize) < self.works.bundles.len()
    }

    /// One work.
    ///
    /// # Panics
    ///
    /// There is no such.
    pub fn work(&self, work: Work) -> WorkOf<'_> {
        self.works.get(work.0 as usize)
    }

    /// The parcels, by [`Parcel`].
    pub fn parcels(&self) -> &[ParcelShape] {
        &self.parcels
    }

    /// Bytes of a bundle's inputs and results together.
    pub fn bundle_bytes(&self, bundle: Bundle) -> u64 {
        self.bytes[bundle.0 as usize]
    }

    pub(crate) fn parts(&self, bundle: Bundle) -> Parts<'_> {
        let index = bundle.0 as usize;
        Parts {
            works: self.works_of.of(index),
            parcels: self.parcels_of.of(index),
            sources: self.sources.of(index),
            bytes: self.bytes[index],
        }
    }

    pub(crate) fn parcel(&self, parcel: Parcel) -> &ParcelShape {
        &self.parcels[parcel.0 as usize]
    }

    pub(crate) fn bundle_ids(&self) -> impl Iterator<Item = Bundle> + use<> {
        (0..self.bundles.len() as u32).map(Bundle)
    }
}

/// Checks one work after the other; each takes as long as what it names.
struct Checks {
    /// By parcel: the last work that needs it.
    needed: Vec<Option<Work>>,
    /// By trainer: the last work that needs rows of it, and the last that has results for it.
    sends: Vec<Option<Work>>,
    reads: Vec<Option<Work>>,
}

impl Checks {
    fn new(parcels: &[ParcelShape]) -> Self {
        let trainers = parcels.iter().map(|it| usize::from(it.from.0) + 1).max().unwrap_or(0);
        Self {
            needed: vec![None; parcels.len()],
            sends: vec![None; trainers],
            reads: vec![None; trainers],
        }
    }

    fn work(
        &mut self,
        work: Work,
        shape: WorkOf<'_>,
        parcels: &[ParcelShape],
    ) -> Result<(), ShapeError> {
        for &parcel in shape.needs {
            let own = parcels.get(parcel.0 as usize).filter(|it| it.bundle == shape.bundle);
            let Some(own) = own else { return Err(ShapeError::Needs { work, parcel }) };
            if self.needed[parcel.0 as usize].replace(work) == Some(work) {
                return Err(ShapeError::Needs { work, parcel });
            }
            self.sends[usize::from(own.from.0)] = Some(work);
        }
        for &(trainer, _) in shape.results {
            let index = usize::from(trainer.0);
            let sends = self.sends.get(index).is_some_and(|it| *it == Some(work));
            if !sends || self.reads[index].replace(work) == Some(work) {
                return Err(ShapeError::Reader { work, trainer });
            }
        }
        Ok(())
    }

    fn is_needed(&self, parcel: Parcel) -> bool {
        self.needed[parcel.0 as usize].is_some()
    }
}

/// Why a shape is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ShapeError {
    /// A parcel of no bundle.
    #[error("parcel {} names bundle {}, which the shape does not have", parcel.0, bundle.0)]
    ParcelBundle {
        /// The parcel.
        parcel: Parcel,
        /// What it names.
        bundle: Bundle,
    },
    /// Work of no bundle.
    #[error("work {} names bundle {}, which the shape does not have", work.0, bundle.0)]
    WorkBundle {
        /// The work.
        work: Work,
        /// What it names.
        bundle: Bundle,
    },
    /// Work that needs a parcel of another bundle, or one twice.
    #[error("work {} needs parcel {}, which is not its bundle's or is named twice", work.0, parcel.0)]
    Needs {
        /// The work.
        work: Work,
        /// The parcel.
        parcel: Parcel,
    },
    /// Results for a trainer that sends nothing to the work, or twice.
    #[error("work {} has results for trainer {}, which sends it no rows or is named twice", work.0, trainer.0)]
    Reader {
        /// The work.
        work: Work,
        /// The trainer.
        trainer: TrainerId,
    },
    /// A bundle without work.
    #[error("bundle {} has no work; leave it out", bundle.0)]
    Idle {
        /// The bundle.
        bundle: Bundle,
    },
    /// A parcel that no work reads.
    #[error("parcel {} is needed by no work; leave it out", parcel.0)]
    Unused {
        /// The parcel.
        parcel: Parcel,
    },
}
