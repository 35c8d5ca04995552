//! Brings the rows of a bundle to one place.
//!
//! In: the landing of a bundle, this process's own rows. Out: all rows of the bundle, when every pull of them has ended
//! ([`gather`]) or, where rows live on the GPU, as soon as their copies are under way ([`early`]); or, before that, a copy of the
//! rows that some of its works need ([`ahead`]). It decides nothing: which bundle, and when, the server's machine says.
//!
//! Invariant: bytes of a landing come from pulls or are copied here, each from one of both.

use std::collections::BTreeSet;

use cadre_exchange::{LandingId, Piece};
use cadre_kernels::device;
use cadre_planner::{BundleId, RankId};
use cadre_protocol::{At, Parcel, Peer, TrainerId, Work};
use cadre_step::lowering::{Source, Tensor};
use cadre_step::planned::PlannedStep;

use super::exchange::Exchange;
use super::rows::tensors;
use super::shared::Shared;
use crate::launch::{BundleRows, PhaseRows};
use crate::memory::{Memory, Place as _};

/// All rows of a bundle in one place.
pub(super) fn gather<M: Memory>(
    shared: &mut Shared<impl Exchange<Memory = M>>,
    planned: &PlannedStep,
    at: At,
    bundle: BundleId,
    landing: Option<LandingId>,
) -> Result<BundleRows<M>, device::Error> {
    let (nano, direction) = planned.nano_of(at.phase);
    let inputs = nano.lists.inputs(bundle, direction);
    if let (None, [_], Some(rows)) = (landing, &inputs.sources[..], shared.rows.get(&at)) {
        // Launches find each task and the keys by themselves, if these are in one piece.
        if side_by_side(planned, at, bundle) {
            return Ok(BundleRows::Home(rows.clone()));
        }
    }
    let mut room = match landing {
        Some(landing) => shared.provider.take(landing).expect("all parcels of a ready work ended"),
        None => shared.provider.place().room(inputs.bytes)?,
    };
    let own = own(shared, planned, at, bundle).expect("own rows stay until the phase is passed");
    for (rows, pieces) in own {
        shared.provider.place().copy(&rows, pieces, &mut room)?;
    }
    Ok(BundleRows::Landed(M::share(room)))
}

/// A copy of the rows that these works of a bundle need, laid out as its landing; other bytes of it are anything.
pub(super) fn ahead<M: Memory>(
    shared: &Shared<impl Exchange<Memory = M>>,
    planned: &PlannedStep,
    at: At,
    (works, landing): (&[Work], Option<LandingId>),
) -> Result<BundleRows<M>, device::Error> {
    let (nano, direction) = planned.nano_of(at.phase);
    let shape = nano.shape(direction);
    let needs = works.iter().flat_map(|&it| shape.work(it).needs);
    let needs: BTreeSet<Parcel> = needs.copied().collect();
    let bundle = planned.bundle_of(at.phase, works.first().map_or(0, |it| it.0));
    let place = shared.provider.place();
    let mut room = place.room(nano.lists.inputs(bundle, direction).bytes)?;
    for parcel in needs {
        let (_, source) = nano.lists.parcel(parcel, direction);
        if Peer::Trainer(TrainerId(source.rank.0 as u16)) == shared.me {
            let rows = shared.rows.get(&at).expect("own rows stay until the phase is passed");
            for (tensor, pieces) in source.tensors() {
                place.copy(tensor_of(rows, tensor), pieces, &mut room)?;
            }
        } else {
            let landing = landing.expect("rows of others have landed");
            let here = |it: &Piece| Piece { remote: it.local, ..*it };
            let pieces = source.pieces().iter().map(here);
            let copied =
                shared.provider.copy_landed(landing, &pieces.collect::<Vec<_>>(), &mut room);
            copied.expect("a landing stays while pulls write to it");
        }
    }
    Ok(BundleRows::Landed(M::share(room)))
}

/// As [`gather`], before pulls have ended: for launches that are enqueued behind their copies. None where rows lie on the host, or
/// own rows are gone.
pub(super) fn early<M: Memory>(
    shared: &mut Shared<impl Exchange<Memory = M>>,
    planned: &PlannedStep,
    at: At,
    bundle: BundleId,
    landing: LandingId,
) -> Result<Option<BundleRows<M>>, device::Error> {
    // Those of a phase that is passed may be gone.
    let Some(own) = own(shared, planned, at, bundle) else { return Ok(None) };
    Ok(shared.provider.early(landing, &own)?.map(BundleRows::Landed))
}

/// Local rows that a bundle needs, and the pieces of them that go to its landing. None where they are gone.
fn own<'a, M: Memory>(
    shared: &Shared<impl Exchange<Memory = M>>,
    planned: &'a PlannedStep,
    at: At,
    bundle: BundleId,
) -> Option<Vec<(M, &'a [Piece])>> {
    let Peer::Trainer(TrainerId(me)) = shared.me else { return Some(Vec::new()) };
    let (nano, direction) = planned.nano_of(at.phase);
    let sources = &nano.lists.inputs(bundle, direction).sources;
    let pieces = sources.iter().filter(|it| it.rank == RankId(me.into())).flat_map(Source::tensors);
    let of = |(tensor, pieces): (_, &'a [Piece])| {
        Some((tensor_of(shared.rows.get(&at)?, tensor).clone(), pieces))
    };
    pieces.map(of).collect()
}

fn tensor_of<M>(rows: &PhaseRows<M>, tensor: Tensor) -> &M {
    let (_, memory) = tensors(rows).find(|it| it.0 == tensor).expect("a source names its tensors");
    memory
}

/// Whether every task's rows and the keys of a bundle are one piece each, under each KV head.
fn side_by_side(planned: &PlannedStep, at: At, bundle: BundleId) -> bool {
    let (nano, _) = planned.nano_of(at.phase);
    let whole = &nano.plan.bundles()[bundle.0 as usize];
    let one_piece = |rows| nano.problem.layout.locate(whole.document, rows).count() == 1;
    one_piece(whole.keys.clone())
        && nano.plan.tasks_of(bundle).iter().all(|it| one_piece(it.rows.clone()))
}
