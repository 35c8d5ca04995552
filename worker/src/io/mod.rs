//! The IO thread of a process: owns the exchange and the protocol machines, and never computes.
//!
//! In: what the process's other threads want ([`Request`]), what the controller says, what peers ring and
//! what pulls bring. Out: steps, whole phases and works for the threads that compute ([`Notice`]), and
//! reports for the controller.
//!
//! ```text
//! main ──Submit, Lengths, StepDone──▶┌────────┐◀──views, stop── controller
//! compute ──Ran────────────────────▶│   io   │──rings, pulls──▶ peers
//! main ◀──Step, Whole, End──────────└────────┘──Work──▶ main, compute or rescue
//! ```
//!
//! Every wait has a deadline: the provider's poll ends at the next deadline of a machine. Planning is done
//! by a thread of its own, so that rows are served meanwhile.
//!
//! The conductor's process tells every worker the end of the job. From then on a worker has no machines
//! and calls nobody; a dedicated server waits for the controller's leave to go.

pub mod conducting;
mod early;
pub mod envelope;
pub mod exchange;
mod gather;
mod inbox;
mod load;
mod outbox;
mod probe;
pub mod rows;
pub mod shared;
pub mod tasks;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use cadre_control::proto;
use cadre_exchange::{PeerId, Waker};
use cadre_protocol::{At, Nanos, Peer, conductor, server, trainer};

use self::conducting::Conducting;
use self::envelope::{Ending, Lengths, StepDone};
use self::load::Load;
use self::probe::Probing;
use self::rows::{Rows, Whole};
use self::shared::Shared;
use self::tasks::Tasks;
use crate::header::Header;
use crate::launch::{Done, PhaseRows, Work};
use crate::planned::PlannedStep;

/// Longest sleep of the thread; everything has a deadline anyhow.
const LONGEST_SLEEP: Duration = Duration::from_millis(200);

/// What other threads want.
#[derive(Debug)]
pub enum Request {
    /// The trainer's rows of a phase.
    Submit(At, PhaseRows),
    /// What the trainer's stream of a step holds.
    Lengths(Lengths),
    /// The trainer's step is over.
    StepDone(StepDone),
    /// A work ran.
    Ran(Done),
    /// A work was dropped, because nobody wants it any more.
    Dropped(Work),
    /// A kernel refused, or something else that cannot go on.
    Fail(String),
    /// The process ends.
    Leave,
    /// The process was asked to end.
    Terminate,
    /// A step was planned.
    Planned(Box<Result<PlannedStep, String>>),
}

/// What the threads that compute are told.
#[derive(Debug)]
pub enum Notice {
    /// Where the trainers listen for the all-reduce, by rank.
    Trainers(Vec<String>),
    /// A step can be submitted to.
    Step(Arc<PlannedStep>),
    /// A phase is whole.
    Whole(Box<Whole>),
    /// A work can run.
    Work(Box<Work>),
    /// Nothing up to here is wanted any more.
    Cancelled(At),
    /// This server can do nothing more, and why.
    Lost(String),
    /// No step follows.
    End(Ending),
}

/// Speaks to the IO thread from others.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: Sender<Request>,
    waker: Waker,
}

impl Handle {
    /// Leaves requests for whoever holds the other end, and wakes it.
    pub fn new(requests: Sender<Request>, waker: Waker) -> Self {
        Self { requests, waker }
    }

    /// Asks for something. After the thread has ended, nothing happens.
    pub fn send(&self, request: Request) {
        if self.requests.send(request).is_ok() {
            self.waker.wake();
        }
    }
}

/// Where works go.
#[derive(Debug)]
pub struct Outlets {
    /// The trainer's main thread, or the server's compute thread.
    pub main: Sender<Notice>,
    /// Works whose own server was lost; in place only.
    pub rescue: Option<Sender<Notice>>,
}

/// The thread's state.
pub struct Io {
    shared: Shared,
    trainer: Option<Rows>,
    server: Option<Tasks>,
    conductor: Option<Conducting>,
    requests: Receiver<Request>,
    handle: Handle,
    control: Control,
    outlets: Outlets,
    planner: Sender<Box<Header>>,
    load: Load,
    /// Newest step that began here.
    newest: Option<u64>,
    /// Peers whose link is known to be broken: further tries are not worth a line each.
    down: BTreeSet<PeerId>,
    /// Why somebody was turned away so far; each is told once.
    turned_away: BTreeSet<String>,
    /// The controller wants this server to leave the job as soon as nothing is left here.
    draining: Option<proto::Drain>,
    probing: Probing,
    ended: Option<Ending>,
    leave: bool,
}

/// What a server's process does when its IO thread has ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum After {
    /// It ends.
    Leave,
    /// It joins the next job.
    Again,
    /// It ends, and says why.
    Failed(String),
}

/// Both ends of the controller's stream.
#[derive(Debug)]
pub struct Control {
    /// To it.
    pub sender: cadre_control::client::Sender,
    /// From it.
    pub receiver: Receiver<proto::ControllerMessage>,
}

impl Io {
    /// A thread for the machines that are given.
    pub fn new(
        shared: Shared,
        (trainer, server, conductor): (Option<Rows>, Option<Tasks>, Option<Conducting>),
        control: Control,
        outlets: Outlets,
    ) -> std::io::Result<(Self, Handle)> {
        let (sender, requests) = channel();
        let handle = Handle::new(sender, shared.provider.waker());
        let (planner, headers) = channel::<Box<Header>>();
        let back = handle.clone();
        std::thread::Builder::new().name("plan".into()).spawn(move || {
            for header in headers {
                let planned = PlannedStep::new(Arc::new(*header)).map_err(|it| it.to_string());
                back.send(Request::Planned(Box::new(planned)));
            }
        })?;
        let io = Self {
            shared,
            trainer,
            server,
            conductor,
            requests,
            handle: handle.clone(),
            control,
            outlets,
            planner,
            load: Load::new(),
            newest: None,
            down: BTreeSet::new(),
            turned_away: BTreeSet::new(),
            draining: None,
            probing: Probing::default(),
            ended: None,
            leave: false,
        };
        Ok((io, handle))
    }

    /// Serves until the process leaves the job.
    pub fn run(mut self) -> After {
        let mut events = Vec::new();
        if matches!(self.shared.me, Peer::Trainer(_)) {
            probe::publish(&mut self.shared);
        }
        while !self.leave {
            while let Ok(request) = self.requests.try_recv() {
                self.request(request);
            }
            while let Ok(message) = self.control.receiver.try_recv() {
                self.controller(message);
            }
            self.settle();
            self.tick();
            self.settle();
            self.report();
            self.drain();
            let timeout = self.sleep();
            self.shared.provider.poll(timeout, &mut events);
            for event in events.drain(..) {
                self.event(event);
            }
            self.give_up();
        }
        self.shared.tracer.flush();
        drop(self.handle);
        match (self.ended, self.draining) {
            (Some(Ending::Failed { reason, .. }), _) => After::Failed(reason),
            (_, Some(drain)) if drain.stays => After::Again,
            (_, _) => After::Leave,
        }
    }

    /// Ends a server that drains, once it holds nothing that anybody wants.
    fn drain(&mut self) {
        let Some(drain) = self.draining else { return };
        let idle = self.server.as_ref().is_none_or(Tasks::is_idle);
        if drain.over || idle && self.shared.results.is_empty() {
            self.end(Ending::Completed);
        }
    }

    /// How long nothing is due.
    fn sleep(&self) -> Duration {
        let now = self.shared.now();
        let deadlines = [
            self.trainer.as_ref().and_then(Rows::next_deadline),
            self.server.as_ref().and_then(Tasks::next_deadline),
            self.conductor.as_ref().and_then(Conducting::next_deadline),
        ];
        let next = deadlines.into_iter().flatten().min();
        let until = next.map_or(LONGEST_SLEEP, |it| Duration::from_nanos(it.since(now).0));
        until.min(LONGEST_SLEEP)
    }

    fn tick(&mut self) {
        let now = self.shared.now();
        let due = |at: Option<Nanos>| at.is_some_and(|it| it <= now);
        if let Some(it) = self.trainer.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, trainer::Event::Tick);
        }
        if let Some(it) = self.server.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, server::Event::Tick);
        }
        if let Some(it) = self.conductor.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, conductor::Event::Tick);
        }
    }

    /// Tells the controller about the load of a server, now and then; of one in place once it has work.
    fn report(&mut self) {
        let dedicated = matches!(self.shared.me, Peer::Server(_));
        if let Some(report) = self.load.report()
            && (dedicated || report.cost > 0)
        {
            self.say(report);
        }
    }
}
