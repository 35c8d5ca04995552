//! What one phase asks for: bundles, work and parcels.
//!
//! The worker lowers its plan to this; the protocol knows nothing else about it. The constructor checks
//! what the machines assume: indices in range, every bundle with work, results going only to trainers
//! whose rows the work needs (so that a result never comes before its reader's landing space).

mod checks;

use std::sync::Arc;

use self::checks::Checks;
pub use self::checks::ShapeError;
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
    links: Arc<Links>,
    works: Works,
    parcels: Vec<ParcelShape>,
    /// By bundle.
    works_of: Groups<Work>,
    bytes: Vec<u64>,
    /// By parcel: the work that needs it.
    users: Groups<Work>,
    /// By trainer: work of which it wants results.
    wants: Groups<Work>,
}

/// Who gives rows to which bundle: the same in both directions of a nano-batch.
#[derive(Debug, Eq, PartialEq)]
struct Links {
    bundles: Vec<BundleShape>,
    /// By bundle.
    parcels_of: Groups<Parcel>,
    sources: Groups<TrainerId>,
    /// By trainer: bundles that need its rows, its rows as they are pulled.
    feeds: Groups<Bundle>,
    sends: Groups<Parcel>,
}

impl Links {
    /// Of parcels whose bundles exist.
    fn new(bundles: Vec<BundleShape>, parcels: &[ParcelShape]) -> Self {
        let numbered = || (0..).map(Parcel).zip(parcels);
        let parcels_of =
            Groups::sorted(bundles.len(), numbered().map(|it| (it.1.bundle.0 as usize, it.0)));
        let (mut sources, mut of_bundle) = (Groups::with_capacity(bundles.len()), Vec::new());
        for bundle in 0..bundles.len() {
            let its: &[Parcel] = parcels_of.of(bundle);
            of_bundle.clear();
            of_bundle.extend(its.iter().map(|it| parcels[it.0 as usize].from));
            of_bundle.sort_unstable();
            of_bundle.dedup();
            sources.push(of_bundle.iter().copied());
        }
        sources.shrink();
        let trainers = trainers(parcels);
        let of_bundles = (0..bundles.len()).flat_map(|bundle| {
            let of = sources.of(bundle).iter();
            of.map(move |it| (usize::from(it.0), Bundle(bundle as u32)))
        });
        let feeds = Groups::sorted(trainers, of_bundles);
        let sends = Groups::sorted(trainers, numbered().map(|it| (usize::from(it.1.from.0), it.0)));
        Self { bundles, parcels_of, sources, feeds, sends }
    }
}

/// How many trainers a list for each trainer that sends has.
fn trainers(parcels: &[ParcelShape]) -> usize {
    parcels.iter().map(|it| usize::from(it.from.0) + 1).max().unwrap_or(0)
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
        let bytes = bytes_of(bundles.len(), &parcels)?;
        let links = Arc::new(Links::new(bundles, &parcels));
        Self::linked(links, works, parcels, bytes)
    }

    /// The shape of the other direction: other works of the same bundles read the same parcels, which have other sizes.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    ///
    /// # Panics
    ///
    /// There are not as many sizes as parcels.
    pub fn other_way(
        &self,
        works: Works,
        sizes: impl ExactSizeIterator<Item = u64>,
    ) -> Result<Self, ShapeError> {
        assert_eq!(sizes.len(), self.parcels.len(), "each parcel has a size");
        let sized = |(it, bytes): (&ParcelShape, u64)| ParcelShape { bytes, ..*it };
        let parcels: Vec<_> = self.parcels.iter().zip(sizes).map(sized).collect();
        let bytes = bytes_of(self.links.bundles.len(), &parcels)?;
        Self::linked(Arc::clone(&self.links), works, parcels, bytes)
    }

    /// Checks the works; `bytes` are those of the parcels of each bundle.
    fn linked(
        links: Arc<Links>,
        works: Works,
        parcels: Vec<ParcelShape>,
        mut bytes: Vec<u64>,
    ) -> Result<Self, ShapeError> {
        let mut checks = Checks::new(&parcels);
        for (work, shape) in (0..).map(Work).zip(works.iter()) {
            let of_bundle = bytes
                .get_mut(shape.bundle.0 as usize)
                .ok_or(ShapeError::WorkBundle { work, bundle: shape.bundle })?;
            *of_bundle += shape.results.iter().map(|it| it.1).sum::<u64>();
            checks.work(work, shape, &parcels)?;
        }
        let of_works = (0..).map(Work).zip(&works.bundles);
        let works_of = Groups::sorted(bytes.len(), of_works.map(|it| (it.1.0 as usize, it.0)));
        for bundle in (0..bytes.len() as u32).map(Bundle) {
            if works_of.of(bundle.0 as usize).is_empty() {
                return Err(ShapeError::Idle { bundle });
            }
            let mut its = links.parcels_of.of(bundle.0 as usize).iter();
            if let Some(&parcel) = its.find(|it| !checks.is_needed(**it)) {
                return Err(ShapeError::Unused { parcel });
            }
        }
        let reads = |it: (TrainerId, u64)| usize::from(it.0.0);
        let wants = Groups::sorted(trainers(&parcels), Works::by(&works.results, reads));
        let needs = |it: Parcel| it.0 as usize;
        let users = Groups::sorted(parcels.len(), Works::by(&works.needs, needs));
        Ok(Self { links, works, parcels, works_of, bytes, users, wants })
    }

    /// Bundles that need a trainer's rows, ascending.
    pub fn feeds(&self, trainer: TrainerId) -> &[Bundle] {
        self.links.feeds.of(trainer.0.into())
    }

    /// Parcels of a trainer's rows, ascending.
    pub(crate) fn sends(&self, trainer: TrainerId) -> &[Parcel] {
        self.links.sends.of(trainer.0.into())
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
        &self.links.bundles
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
            parcels: self.links.parcels_of.of(index),
            sources: self.links.sources.of(index),
            bytes: self.bytes[index],
        }
    }

    pub(crate) fn parcel(&self, parcel: Parcel) -> &ParcelShape {
        &self.parcels[parcel.0 as usize]
    }

    pub(crate) fn bundle_ids(&self) -> impl Iterator<Item = Bundle> + use<> {
        (0..self.links.bundles.len() as u32).map(Bundle)
    }
}

/// Bytes of the parcels of each bundle.
fn bytes_of(bundles: usize, parcels: &[ParcelShape]) -> Result<Vec<u64>, ShapeError> {
    let mut bytes = vec![0; bundles];
    for (parcel, shape) in (0..).map(Parcel).zip(parcels) {
        let of_bundle = bytes
            .get_mut(shape.bundle.0 as usize)
            .ok_or(ShapeError::ParcelBundle { parcel, bundle: shape.bundle })?;
        *of_bundle += shape.bytes;
    }
    Ok(bytes)
}
