//! Rounds: which slot executes each bundle after servers were lost, dealt out beside the IO thread.
//!
//! In: a step with its rounds so far, and the fillers of all rounds up to the one that is asked for. Out: the table of that round.
//! The IO thread lends the rounds of a step for as long as it takes, and so owns them again before it asks for another round.
//!
//! Invariant: a table follows from the fillers alone that it is asked for with ([`AssignedRounds`]), however many proposals were
//! superseded meanwhile.

use std::cmp::Ordering;
use std::sync::Arc;

use cadre_planner::Assignment;
use cadre_protocol::{AssignedRounds, Fillers, Round, RoundTable, alive};
use cadre_step::planned::PlannedStep;

/// Assignments of a step's bundles, by plan, of all rounds so far.
pub type Rounds = AssignedRounds<Vec<Assignment>>;

/// A round of a step that is to be dealt out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reassign {
    /// The step.
    pub step: u64,
    /// Fillers of rounds 1 and up, the newest last.
    pub tables: Vec<Fillers>,
    /// For whom.
    pub asker: Asker,
}

/// Who asks for a round.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Asker {
    /// The conductor, which wants to know whether every bundle has a slot: the number of its proposal.
    Conductor(u64),
    /// The machines of trainer and server: the conductor has sent the round to all.
    Members,
}

impl Reassign {
    /// How new it is beside another one, if only the newer of the two is wanted.
    pub(super) fn age(&self, other: &Self) -> Option<Ordering> {
        if self.step != other.step {
            return None;
        }
        match (self.asker, other.asker) {
            (Asker::Conductor(one), Asker::Conductor(two)) => Some(one.cmp(&two)),
            (Asker::Members, Asker::Members) => Some(self.tables.len().cmp(&other.tables.len())),
            (Asker::Conductor(_), Asker::Members) | (Asker::Members, Asker::Conductor(_)) => None,
        }
    }
}

/// All that a round is dealt out from.
#[derive(Debug)]
pub struct Reassigning {
    /// The round.
    pub asked: Reassign,
    /// Its step.
    pub planned: Arc<PlannedStep>,
    /// The rounds of the step so far, lent.
    pub rounds: Rounds,
}

/// A round that was dealt out.
#[derive(Debug)]
pub struct Reassigned {
    /// The round.
    pub asked: Reassign,
    /// Its step, which may be over by now.
    pub planned: Arc<PlannedStep>,
    /// The rounds of the step, given back.
    pub rounds: Rounds,
    /// The table, or the bundle that no survivor can hold.
    pub table: Result<Arc<RoundTable>, cadre_planner::Error>,
}

impl Reassigning {
    /// Takes as long as the step has bundles.
    pub fn reassign(self) -> Reassigned {
        let Self { asked, planned, mut rounds } = self;
        let assigned = rounds.after(&asked.tables, |before, fillers| {
            planned.assign(Some(before.as_slice()), &alive(fillers))
        });
        let table = assigned.map(|it| {
            let newest = asked.tables.last().cloned().unwrap_or_default();
            let round = Round(asked.tables.len() as u32);
            Arc::new(planned.table(round, newest, it))
        });
        Reassigned { asked, planned, rounds, table }
    }
}
