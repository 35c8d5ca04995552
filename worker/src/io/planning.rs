//! Planning beside the IO thread, so that rows are served meanwhile. The conductor's headers are made here, too, and long words are
//! read.
//!
//! In: headers, in any order, and long words. Out: for each header that is new and still wanted a [`Request::Planned`], for each
//! word a [`Request::Read`]. [`Headers`] decides what is done next and is pure; [`done`] does the work; [`start`] gives it a
//! thread, which ends when nobody can send headers any more.
//!
//! Invariant: a header is planned once, however often it comes, and one at a time; what is begun here was placed here. So nothing
//! that costs as much as a step has documents is done on the IO thread: it makes no layout, no plan and no first assignment; it
//! encodes no header and decodes no long word.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use cadre_planner::Assignment;
use cadre_protocol::conductor::LIVE_STEPS;
use cadre_protocol::{PeerId, Step, alive};
use cadre_step::conduct::{Filled, Making};
use cadre_step::envelope::Said;
use cadre_step::header::Header;
use cadre_step::planned::{self, PlannedStep, filler};

use super::conducting::reports::Figures;
use super::telling::{Encoded, Unread};
use super::{Line, Request};

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
}

impl Wanted {
    /// The step whose header it is about.
    fn step(&self) -> Option<u64> {
        match self {
            Self::Making(it) => Some(it.step()),
            Self::Own(it, _) => Some(it.step()),
            Self::Plan(it) => Some(it.step),
            Self::Read(_) => None,
        }
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

/// The headers of a process. So many steps are live as [`LIVE_STEPS`] says: what is older than the newest ones is over, so its header
/// is not planned any more.
#[derive(Debug, Default)]
pub struct Headers {
    /// Of the steps that may be live, those whose headers came.
    known: BTreeSet<u64>,
    /// Those of them that are not planned yet.
    waiting: BTreeMap<u64, Wanted>,
    /// The conductor's next one, which is to be made.
    making: Option<Box<Making>>,
    /// Words that are to be read, of each peer one.
    unread: VecDeque<Box<Unread>>,
    doing: Doing,
}

/// What the thread is doing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// It reads a word.
    Word,
    /// It makes or plans the header of a step.
    Header(u64),
}

impl Headers {
    /// A header came, of whichever live step: a server that joins late hears of the newer one first. One that is known, or of a step that
    /// is over, changes nothing.
    pub fn came(&mut self, header: Box<Header>) {
        self.wait(Wanted::Plan(header));
    }

    /// The conductor's own: of the same step again where other fillers are tried.
    pub fn own(&mut self, wanted: Wanted) {
        match wanted {
            Wanted::Making(it) => self.making = Some(it),
            Wanted::Own(..) | Wanted::Plan(_) => {
                if let Some(step) = wanted.step() {
                    self.known.remove(&step);
                }
                self.wait(wanted);
            }
            Wanted::Read(unread) => self.read(unread),
        }
    }

    /// A long word came.
    pub fn read(&mut self, unread: Box<Unread>) {
        self.unread.push_back(unread);
    }

    fn wait(&mut self, wanted: Wanted) {
        let Some(step) = wanted.step() else { return };
        let newest = self.known.last().copied().max(Some(step)).unwrap_or_default();
        let is_over = |step: u64| newest - step >= LIVE_STEPS as u64;
        if is_over(step) || !self.known.insert(step) {
            return;
        }
        self.waiting.insert(step, wanted);
        self.known.retain(|it| !is_over(*it));
        self.waiting.retain(|it, _| !is_over(*it));
    }

    /// What is to be done now, if anything is.
    pub fn take(&mut self) -> Option<Wanted> {
        if self.doing != Doing::Nothing {
            return None;
        }
        // Words take little, and others wait behind them.
        let word = self.unread.pop_front().map(Wanted::Read);
        let header = || self.waiting.pop_first().map(|it| it.1);
        let wanted = word.or_else(header).or_else(|| self.making.take().map(Wanted::Making))?;
        self.doing = wanted.step().map_or(Doing::Word, Doing::Header);
        Some(wanted)
    }

    /// What was taken is done. Which step it was of, if of any.
    pub fn done(&mut self) -> Option<u64> {
        match std::mem::take(&mut self.doing) {
            Doing::Header(step) => Some(step),
            Doing::Nothing | Doing::Word => None,
        }
    }
}

/// Starts the thread; its answers go to `back`.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(back: Line) -> std::io::Result<Plans> {
    // One is planned at a time, and the next goes there when its answer has come: the queue is never full.
    let (plans, all) = sync_channel(1);
    let plan = move || {
        let guard = Guard::new("plan", &back);
        for wanted in all {
            back.send(done(wanted));
        }
        guard.over();
    };
    std::thread::Builder::new().name("plan".into()).spawn(plan)?;
    Ok(plans)
}

/// Ends the job where a thread panics that others wait for.
pub struct Guard {
    thread: &'static str,
    back: Option<Line>,
}

impl Guard {
    /// Of the thread that runs.
    pub fn new(thread: &'static str, back: &Line) -> Self {
        Self { thread, back: Some(back.clone()) }
    }

    /// The thread ends as it should.
    pub fn over(mut self) {
        self.back = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(back) = &self.back {
            let reason = format!("the {} thread panicked; its log says where", self.thread);
            back.send(Request::Fail(reason));
        }
    }
}

/// Makes a header; plans a step, and places its bundles; or reads a word.
pub fn done(wanted: Wanted) -> Request {
    match wanted {
        Wanted::Making(it) => Request::Made(Box::new(it.make())),
        Wanted::Own(it, trainers) => Request::Planned(Box::new(own(it.header(), trainers))),
        Wanted::Plan(it) => Request::Planned(Box::new(ready(*it))),
        Wanted::Read(it) => Request::Read(Box::new(it.read())),
    }
}

fn own(header: Header, trainers: Vec<(PeerId, String)>) -> Result<Ready, Error> {
    let said = Said::Header { header: Box::new(header), trainers };
    let word = Encoded::of(&said);
    let Said::Header { header, .. } = said else { unreachable!("it was just put there") };
    let ready = ready(*header)?;
    let figures = Figures::of(&ready.planned);
    Ok(Ready { own: Some(Own { word, figures }), ..ready })
}

fn ready(header: Header) -> Result<Ready, Error> {
    let planned = PlannedStep::new(Arc::new(header))?;
    let fillers: Vec<_> = planned.header.fillers.iter().map(|it| it.as_ref().map(filler)).collect();
    let first = planned.assign(None, &alive(&fillers))?;
    let step = planned.protocol_step(&first)?;
    Ok(Ready { planned: Arc::new(planned), first, step: Arc::new(step), own: None })
}

#[cfg(test)]
mod tests {
    use cadre_exchange::Waker;
    use cadre_step::header::Member;

    use super::super::{Asked, Handle};
    use super::*;
    use crate::memory::HostRows;

    fn header(step: u64) -> Header {
        let any: Header =
            serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
        Header { step, ..any }
    }

    fn come(headers: &mut Headers, step: u64) {
        headers.came(Box::new(header(step)));
    }

    fn steps(headers: &mut Headers) -> Vec<u64> {
        let mut steps = Vec::new();
        while let Some(wanted) = headers.take() {
            assert!(headers.take().is_none(), "one is planned at a time");
            assert_eq!(headers.done(), wanted.step());
            steps.extend(wanted.step());
        }
        steps
    }

    #[test]
    fn a_header_is_planned_once_however_often_it_comes() {
        let mut headers = Headers::default();
        // Before it was planned, while it is, and after.
        come(&mut headers, 3);
        come(&mut headers, 3);
        let first = headers.take().unwrap();
        come(&mut headers, 3);
        come(&mut headers, 4);
        assert!(headers.take().is_none());
        assert_eq!(headers.done(), first.step());
        come(&mut headers, 3);
        come(&mut headers, 4);
        assert_eq!(steps(&mut headers), [4]);
        come(&mut headers, 2);
        assert!(steps(&mut headers).is_empty());
    }

    #[test]
    fn headers_of_live_steps_are_planned_in_whichever_order_they_come() {
        let mut headers = Headers::default();
        come(&mut headers, 8);
        assert_eq!(steps(&mut headers), [8]);
        come(&mut headers, 7);
        assert_eq!(steps(&mut headers), [7], "a server that joined late is asked for both");
        come(&mut headers, 6);
        come(&mut headers, 7);
        assert!(steps(&mut headers).is_empty());
        come(&mut headers, 10);
        come(&mut headers, 9);
        assert_eq!(steps(&mut headers), [9, 10], "the older one is wanted first");
    }

    #[test]
    fn who_falls_behind_plans_the_newest_headers_alone() {
        let mut headers = Headers::default();
        for step in 0..100 {
            come(&mut headers, step);
        }
        come(&mut headers, u64::MAX);
        come(&mut headers, u64::MAX - 1);
        assert_eq!(headers.waiting.len(), LIVE_STEPS);
        assert_eq!(steps(&mut headers), [u64::MAX - 1, u64::MAX]);
    }

    #[test]
    fn the_conductor_tries_the_same_step_with_other_fillers() {
        let mut headers = Headers::default();
        for _ in 0..2 {
            headers.own(Wanted::Plan(Box::new(header(0))));
            assert_eq!(steps(&mut headers), [0]);
        }
        come(&mut headers, 0);
        assert!(steps(&mut headers).is_empty());
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

    #[test]
    fn a_thread_that_panics_ends_the_job_by_its_name() {
        let (handle, requests) = Handle::<HostRows>::channel(Waker::new().unwrap());
        let back = handle.line();
        drop(handle);
        Guard::new("plan", &back).over();
        let thread = std::thread::spawn(move || {
            let _guard = Guard::new("plan", &back);
            panic!("a bug");
        });
        assert!(thread.join().is_err());
        let Ok(Asked::For(Request::Fail(reason))) = requests.recv() else {
            panic!("the job goes on")
        };
        assert!(reason.starts_with("the plan thread panicked"), "{reason}");
        assert!(requests.recv().is_err());
    }
}
