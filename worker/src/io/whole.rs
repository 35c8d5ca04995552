//! What the trainer's side hands to the thread that computes: whole phases, and before them their parts of dK and dV.
//!
//! In: landings whose pulls have ended, results of the own server. Out: nothing is done here.
//!
//! Invariant: what is handed on is written by nobody any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_planner::BundleId;
use cadre_protocol::{At, Peer, Phase, Work};
use cadre_step::lowering::BackwardResult;
use cadre_step::planned::PlannedStep;

use crate::memory::Memory;

/// A phase of which everything is here.
#[derive(Debug)]
pub struct Whole<M: Memory> {
    /// The phase.
    pub at: At,
    /// Its results; parts of dK and dV came before, each by itself.
    pub landed: Landed<M>,
    /// Who computed each work.
    pub makers: BTreeMap<Work, Peer>,
}

/// Results of a phase.
#[derive(Debug)]
pub enum Landed<M: Memory> {
    /// O (wire type) and LSE.
    Forward {
        /// What other processes computed, as rows of this trainer's stream, head by head: by row `[query heads, dim]`.
        o: M::Room,
        /// By row `[query heads]`.
        lse: M::Room,
        /// O and LSE of tasks that this process's in-place server computed, to be copied there.
        own: Vec<(Work, [M; 2])>,
    },
    /// dQ (wire type).
    Backward {
        /// What other processes computed, as rows of this trainer's stream, head by head: by row `[query heads, dim]`.
        dq: M::Room,
        /// Those of bundles that this process's in-place server computed, to be copied there.
        own: Vec<(BundleId, M)>,
    },
}

/// One bundle's part of dK and dV, for this trainer's rows. No other part of the bundle comes.
#[derive(Debug)]
pub struct Part<M: Memory> {
    /// The step.
    pub planned: Arc<PlannedStep>,
    /// The phase.
    pub phase: Phase,
    /// The bundle.
    pub bundle: BundleId,
    /// The part.
    pub values: Values<M>,
}

/// Where a part lies.
#[derive(Debug)]
pub enum Values<M: Memory> {
    /// This trainer's key rows of the bundle, dK then dV, with where they belong.
    Landed(M::Room, BackwardResult),
    /// dK and dV of all key rows of the bundle, which this process's in-place server computed.
    Own([M; 2]),
}
