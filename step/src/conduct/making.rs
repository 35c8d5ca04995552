//! Headers that are made: the layouts of what trainers announce, and the fillers.
//!
//! In: what trainers announced, and all that the conductor knows of the step ([`super::Draft::order`]). Out: a [`Header`] without
//! fillers; with them, once they are known.
//!
//! Invariant: what is made depends on the order alone, so that any thread may make it.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use cadre_planner::{DocumentId, Stretch};

use super::Error;
use crate::envelope::{Lengths, NanoLengths};
use crate::header::{Header, Log, Member, ViewNumber};
use crate::packing::Packing;
use crate::phases::PhaseOrder;
use crate::planned::check_plans;
use crate::turns::Turns;

/// Most documents and stretches of a step: its header goes to every worker, and into the job's log.
pub(super) const MAX_ENTRIES: usize = 4_000_000;

/// All inputs of a header.
#[derive(Debug)]
pub struct Making {
    /// The header without turns, nano-batches and fillers.
    pub(super) blank: Header,
    pub(super) lengths: BTreeMap<u16, Lengths>,
    pub(super) replay: Option<Arc<Log>>,
}

/// A header without fillers.
#[derive(Debug)]
pub struct Made {
    /// The header.
    pub header: Arc<Header>,
    /// How many phases its step has.
    pub phases: u32,
}

/// A header and the members that fill its slots.
#[derive(Clone, Debug)]
pub struct Filled {
    pub(super) header: Arc<Header>,
    pub(super) view: ViewNumber,
    pub(super) fillers: Vec<Option<Member>>,
}

impl Making {
    /// The step.
    pub fn step(&self) -> u64 {
        self.blank.step
    }

    /// Makes the header but for its fillers.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn make(self) -> Result<Made, Error> {
        let Self { blank, lengths, replay } = self;
        let step = blank.step;
        let told = lengths.values().flat_map(|it| &it.nanos);
        let entries: usize = told.map(|it| it.documents.len() + it.stretches.len()).sum();
        if entries > MAX_ENTRIES {
            return Err(Error::TooMany { step, entries });
        }
        let count = nanos(step, &lengths)?;
        let turns = agreed(&blank, count, &lengths)?;
        let order = PhaseOrder::new(&turns, blank.layers.count(), count)
            .map_err(|source| Error::Turns { step, source })?;
        let nanos = (0..count).map(|nano| packing(step, nano, &lengths));
        let fresh = Header { turns, nanos: nanos.collect::<Result<_, Error>>()?, ..blank };
        let header = match &replay {
            Some(log) => log.replay(fresh)?,
            None => fresh,
        };
        Ok(Made { header: Arc::new(header), phases: order.count() as u32 })
    }
}

impl Filled {
    /// The step.
    pub fn step(&self) -> u64 {
        self.header.step
    }

    /// The whole header.
    pub fn header(self) -> Header {
        let Self { header, view, fillers } = self;
        Header { view, fillers, ..Arc::unwrap_or_clone(header) }
    }
}

/// The turns that every trainer has announced for a step of `nanos` nano-batches.
fn agreed(blank: &Header, nanos: usize, lengths: &BTreeMap<u16, Lengths>) -> Result<Turns, Error> {
    let step = blank.step;
    check_plans(nanos, &blank.layers).map_err(|source| Error::Plans { step, source })?;
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

/// How many nano-batches every trainer has announced.
fn nanos(step: u64, lengths: &BTreeMap<u16, Lengths>) -> Result<usize, Error> {
    let mut each = lengths.iter().map(|it| (*it.0, it.1.nanos.len()));
    let Some((one, its)) = each.next() else { return Ok(0) };
    match each.find(|it| it.1 != its) {
        Some((other, theirs)) => Err(Error::Nanos { step, one, its, other, theirs }),
        None => Ok(its),
    }
}

/// One packed stream from the stretches of all trainers. Trainers number their documents freely;
/// the stream numbers them from 0, in the same order.
pub(super) fn packing(
    step: u64,
    nano: usize,
    lengths: &BTreeMap<u16, Lengths>,
) -> Result<Packing, Error> {
    let of_nano = lengths.iter().filter_map(|it| Some((*it.0, it.1.nanos.get(nano)?)));
    let told = of_nano.clone().flat_map(|it| &it.1.documents);
    // Document and length, each pair once.
    let mut rows: Vec<(u32, u32)> = told.copied().collect();
    rows.sort_unstable();
    rows.dedup();
    let by = |document: u32| {
        let knows = move |it: &NanoLengths| {
            let mut held = it.stretches.iter().map(|it| it.document.0);
            it.documents.iter().any(|it| it.0 == document) || held.any(|it| it == document)
        };
        of_nano.clone().filter(move |it| knows(it.1))
    };
    if let Some(&[(document, its), (_, theirs)]) =
        rows.array_windows().find(|[one, other]| one.0 == other.0)
    {
        let who = |rows| by(document).find(|it| it.1.documents.contains(&(document, rows)));
        let [one, other] = [its, theirs].map(|it| who(it).map_or(0, |it| it.0));
        return Err(Error::Lengths { step, document, one, its, other, theirs });
    }
    let numbered =
        |trainer, it: &Stretch| match rows.binary_search_by_key(&it.document.0, |it| it.0) {
            Ok(number) => Ok(Stretch { document: DocumentId(number as u32), ..*it }),
            Err(_) => Err(Error::Untold { step, trainer, document: it.document.0 }),
        };
    let ranks: Result<_, _> = of_nano
        .clone()
        .map(|(trainer, own)| own.stretches.iter().map(|it| numbered(trainer, it)).collect())
        .collect::<Result<Vec<Vec<_>>, _>>();
    let documents: Vec<u32> = rows.iter().map(|it| it.1).collect();
    Packing::new(&documents, ranks?).map_err(|mut source| {
        let about = number_in(&mut source).map(|it| {
            // The number that trainers know it by.
            it.0 = rows.get(it.0 as usize).map_or(it.0, |it| it.0);
            it.0
        });
        let by = about.map(|it| by(it).map(|it| it.0).collect()).unwrap_or_default();
        Error::Layout { step, nano, source: Box::new(source), by }
    })
}

/// The document that a layout is refused for.
fn number_in(error: &mut cadre_planner::Error) -> Option<&mut DocumentId> {
    use cadre_planner::Error as Refused;
    if let Refused::EmptyDocument { document }
    | Refused::LongDocument { document, .. }
    | Refused::BadStretch { document, .. }
    | Refused::Hole { document, .. }
    | Refused::Overlap { document, .. } = error
    {
        Some(document)
    } else {
        None
    }
}
