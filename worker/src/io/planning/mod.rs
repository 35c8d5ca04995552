//! Planning beside the IO thread, so that rows are served meanwhile. The conductor's headers are made here, too, long words are
//! read, bundles of lost servers are dealt out, and plans of steps that are over are dropped.
//!
//! In: headers, in any order, long words, rounds, what nobody needs any more. Out: for each header that is new and still wanted
//! a step that can begin ([`Ready`]), for each word what it says, for each round its table. [`Backlog`] decides what is done next
//! and is pure; [`super::plan_thread`] is the thread that does it.
//!
//! Invariant: a header is planned once, however often it comes, and one at a time; what is begun here was placed here. The IO
//! thread makes no layout, no plan and no assignment; it encodes no header, decodes no long word and drops none of these.

mod backlog;
mod figures;
mod rounds;

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use cadre_planner::Assignment;
use cadre_protocol::{PeerId, Step, alive};
use cadre_step::conduct::{Filled, Making};
use cadre_step::envelope::Said;
use cadre_step::header::Header;
use cadre_step::planned::{self, PlannedStep, filler};

pub use self::backlog::Backlog;
pub use self::figures::Figures;
pub use self::rounds::{Asker, Reassign, Reassigned, Reassigning, Rounds};
use super::encoded::{Encoded, Unread};

/// Where headers go to be made and planned, one at a time.
pub type Plans = SyncSender<Wanted>;

/// What is to be done.
#[derive(Debug)]
pub enum Wanted {
    /// The conductor's next header, without fillers.
    Making(Box<Making>),
    /// The plan of the conductor's own header, and what it says of it to others: trainers and where they listen.
    Own(Box<Filled>, Vec<(PeerId, String)>),
    /// The plan of a header.
    Plan(Box<Header>),
    /// What a long word says.
    Read(Box<Unread>),
    /// The table of a round.
    Reassign(Box<Reassigning>),
    /// What is finished is dropped.
    Finished(Vec<Finished>),
}

impl Wanted {
    /// The step whose header it is about.
    fn step(&self) -> Option<u64> {
        match self {
            Self::Making(it) => Some(it.step()),
            Self::Own(it, _) => Some(it.step()),
            Self::Plan(it) => Some(it.step),
            Self::Read(_) | Self::Reassign(_) | Self::Finished(_) => None,
        }
    }
}

/// A header or plan that nobody needs any more. To free it takes as long as it has documents.
pub struct Finished(Box<dyn Send>);

impl Finished {
    /// Takes it over.
    pub fn new(it: impl Send + 'static) -> Self {
        Self(Box::new(it))
    }

    /// Drops it.
    pub(super) fn free(self) {
        drop(self.0);
    }
}

impl std::fmt::Debug for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Finished")
    }
}

/// A step that can begin.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Its plan.
    pub planned: Arc<PlannedStep>,
    /// Where its bundles are, with the fillers of its header.
    pub first: Vec<Assignment>,
    /// What its machines begin with.
    pub step: Arc<Step>,
    /// At the conductor.
    pub own: Option<Own>,
}

/// What the conductor says of a step.
#[derive(Clone, Debug)]
pub struct Own {
    /// The header, as all others are told.
    pub word: Encoded,
    /// To the controller, when the step is over.
    pub figures: Figures,
}

/// Why a step cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] planned::Error),
    /// A bundle fits no slot that is filled.
    #[error(transparent)]
    Unplaceable(#[from] cadre_planner::Error),
    /// The protocol refuses the lists: a bug of the lowering.
    #[error(transparent)]
    Lists(#[from] cadre_protocol::StepError),
}

/// The plan of the conductor's own header, and what it says of it to `trainers` and the controller.
pub(super) fn own(header: Header, trainers: Vec<(PeerId, String)>) -> Result<Ready, Error> {
    let said = Said::Header { header: Box::new(header), trainers };
    let word = Encoded::of(&said);
    let Said::Header { header, .. } = said else { unreachable!("it was just put there") };
    let ready = ready(*header)?;
    let figures = Figures::of(&ready.planned);
    Ok(Ready { own: Some(Own { word, figures }), ..ready })
}

/// The plan of a header, its bundles where the header's fillers put them.
pub(super) fn ready(header: Header) -> Result<Ready, Error> {
    let planned = PlannedStep::new(Arc::new(header))?;
    let fillers: Vec<_> = planned.header.fillers.iter().map(|it| it.as_ref().map(filler)).collect();
    let first = planned.assign(None, &alive(&fillers))?;
    let step = planned.protocol_step(&first)?;
    Ok(Ready { planned: Arc::new(planned), first, step: Arc::new(step), own: None })
}

#[cfg(test)]
mod tests {
    use cadre_step::header::Member;

    use super::*;

    pub(super) fn header(step: u64) -> Header {
        let any: Header =
            serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
        Header { step, ..any }
    }

    #[test]
    fn a_step_is_placed_where_it_is_planned_and_refused_by_reason() {
        let ready_step = ready(header(5)).unwrap();
        assert_eq!(ready_step.step.number(), 5);
        assert_eq!(ready_step.first.len(), ready_step.planned.plans.len());
        let vacant = Header { fillers: vec![None], ..header(5) };
        // Nobody executes anything then; what follows is the conductor's to decide.
        let nobody = ready(vacant).unwrap();
        assert!(nobody.step.table().assignments.iter().flatten().all(Option::is_none));
        let nowhere =
            Header { slots: Vec::new(), fillers: Vec::<Option<Member>>::new(), ..header(5) };
        assert!(matches!(ready(nowhere), Err(Error::Plan(_))));
    }
}
