//! The IO thread of a process: owns the exchange's sockets and the protocol machines; runs no kernel
//! and makes no plan.
//!
//! This thread does copy own rows to the server in place, and rows for works that run ahead of their bundle.
//!
//! In: what the process's other threads want ([`Request`]), what the controller says, what peers ring and
//! what pulls bring. Out: steps, whole phases and works for the threads that compute ([`Notice`]), and
//! reports for the controller.
//!
//! ```text
//! main ──Submit, Lengths, StepDone──▶┌────────┐◀──views, stop── controller
//! compute ──Ran────────────────────▶│   io   │──rings, pulls──▶ peers
//! main ◀──Step, Part, Whole, End────└────────┘──Work──▶ main, compute or rescue
//! ```
//!
//! Every wait has a deadline: the provider's poll ends at the next deadline of a machine. Planning is done
//! by a thread of its own, so that rows are served meanwhile.
//!
//! The conductor's process tells every worker the end of the job. From then on a worker has no machines
//! and calls nobody; a dedicated server waits for the controller's leave to go.

pub mod clock;
pub mod conducting;
mod early;
pub mod encoded;
pub mod exchange;
mod gather;
mod inbox;
mod lines;
mod load;
mod outbox;
mod outlets;
pub mod output;
pub mod plan_thread;
pub mod planning;
mod probe;
pub mod queues;
pub mod rows;
pub mod shared;
pub mod standing;
pub mod tasks;
pub mod telling;
mod unnamed;
pub mod whole;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use cadre_control::proto;
use cadre_exchange::Role;
use cadre_protocol::{Nanos, Peer, conductor, server, trainer};
use cadre_step::conduct::decisions::Event;
use cadre_step::envelope::{Ending, Said};

use self::conducting::Conducting;
use self::exchange::Exchange;
pub use self::lines::{Asked, Notice, Request};
use self::load::Load;
pub use self::outlets::{Control, Lines, Outlets};
use self::planning::{Backlog, Plans};
use self::probe::Probing;
pub use self::queues::{Handle, Line};
use self::rows::Rows;
use self::shared::Shared;
use self::tasks::Tasks;
use self::unnamed::Unnamed;

/// Longest sleep of the thread; everything has a deadline anyhow.
const LONGEST_SLEEP: Duration = Duration::from_millis(200);
/// A thread that has no turn for so long was stopped, with its process or its machine.
const STOPPED_FOR: Nanos = Nanos::from_millis(500);

/// Requests, and outputs of machines, that are handed on before links and deadlines have their turn. A step of many documents brings
/// hundreds of thousands: meanwhile this process is to be heard.
const MAX_REQUESTS_A_TURN: usize = 512;

/// Longest that a process which leaves waits until its last words were heard, while nobody hears one more of them; and in all,
/// from then on.
const LAST_WORDS_WITHIN: Nanos = Nanos::from_millis(2_000);
const LONGEST_LAST_WORDS: Nanos = Nanos::from_millis(6_000);

/// The thread's state.
pub struct Io<P: Exchange> {
    shared: Shared<P>,
    trainer: Option<Rows<P::Memory>>,
    server: Option<Tasks<P::Memory>>,
    conductor: Option<Conducting>,
    requests: Receiver<Asked<P::Memory>>,
    control: Control,
    outlets: Outlets<P::Memory>,
    plans: Plans,
    load: Load,
    backlog: Backlog,
    /// Peers whose link is known to be broken, by their newest incarnation: further tries are not worth a line each.
    down: BTreeMap<(Role, u16), u32>,
    /// Why somebody was turned away so far; each is told once.
    turned_away: BTreeSet<String>,
    /// The controller wants this server to leave the job, which it does as soon as nothing is planned for it.
    draining: Option<proto::Drain>,
    probing: Probing,
    /// What somebody said who may not say it; each is warned of once.
    disbelieved: BTreeSet<(Peer, &'static str)>,
    unnamed: Unnamed,
    ended: Option<Ending>,
    /// Whom the conductor has told the end.
    told_end: BTreeSet<Peer>,
    /// The process leaves, at the latest then if nobody hears its last words.
    leaving: Option<Nanos>,
    /// When it last looked at the time.
    looked: Nanos,
    /// This trainer was asked to end, since when.
    asked_to_end: Option<Nanos>,
}

/// How much of what machines gave is handed on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Settled {
    All,
    /// As much as a turn takes.
    Some,
}

/// What comes after a turn of the thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Turn {
    /// News from peers, or the next turn after so long.
    Sleep(Duration),
    /// Nothing: the process leaves.
    Leave,
}

/// What a server's process does when its IO thread has ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum After {
    /// The process ends.
    Leave,
    /// The process joins the next job.
    Again,
    /// The process ends, and says why.
    Failed {
        /// Why the job has failed.
        reason: String,
        /// Another attempt would fail in the same way.
        bad_input: bool,
    },
}

/// The machines of a process: of its trainer, its server, its conductor.
pub type Machines<M> = (Option<Rows<M>>, Option<Tasks<M>>, Option<Conducting>);

/// Starts the IO thread of a process, and the one that plans for it.
///
/// # Errors
///
/// The system has no threads to give.
pub fn start<P: Exchange + Send + 'static>(
    shared: Shared<P>,
    machines: Machines<P::Memory>,
    control: Control,
    outlets: Outlets<P::Memory>,
) -> std::io::Result<(JoinHandle<After>, Handle<P::Memory>)> {
    let (handle, requests) = Handle::channel(shared.provider.waker());
    let plans = plan_thread::start(handle.line())?;
    let io = Io::new(shared, machines, Lines { requests, plans, control, outlets });
    let thread = std::thread::Builder::new().name("io".into()).spawn(move || io.run())?;
    Ok((thread, handle))
}

impl<P: Exchange> Io<P> {
    /// The IO thread of a process that has the machines that are given.
    pub fn new(
        mut shared: Shared<P>,
        (trainer, server, conductor): Machines<P::Memory>,
        lines: Lines<P::Memory>,
    ) -> Self {
        let Lines { requests, plans, control, outlets } = lines;
        if matches!(shared.me, Peer::Trainer(_)) {
            probe::publish(&mut shared);
        }
        let (load, looked) = (Load::new(shared.now()), shared.now());
        Self {
            shared,
            trainer,
            server,
            conductor,
            requests,
            control,
            outlets,
            plans,
            load,
            backlog: Backlog::default(),
            down: BTreeMap::new(),
            turned_away: BTreeSet::new(),
            draining: None,
            probing: Probing::default(),
            disbelieved: BTreeSet::new(),
            unnamed: Unnamed::default(),
            ended: None,
            told_end: BTreeSet::new(),
            leaving: None,
            looked,
            asked_to_end: None,
        }
    }

    /// Serves until the process leaves the job.
    pub fn run(mut self) -> After {
        let mut events = Vec::new();
        loop {
            let turn = self.turn();
            let Turn::Sleep(timeout) = turn else { break };
            self.receive(timeout, &mut events);
        }
        self.leave()
    }

    /// Does everything that can be done without news from peers; says for how long nothing more is due.
    pub fn turn(&mut self) -> Turn {
        self.look_at_the_time();
        // What came last may be how the job ends.
        if self.leaving.is_some() && self.settle() == Settled::All && self.may_leave() {
            return Turn::Leave;
        }
        let asked = self.take_requests();
        while let Ok(message) = self.control.receiver.try_recv() {
            self.controller(message);
        }
        self.settle();
        self.tick();
        self.probing.look(&mut self.shared);
        let settled = self.settle();
        self.report();
        self.drain();
        self.outlets.flush();
        let is_done = asked < MAX_REQUESTS_A_TURN && settled == Settled::All;
        Turn::Sleep(if is_done { self.sleep() } else { Duration::ZERO })
    }

    /// Does what other threads want, as far as a turn goes; says how much that was. Works that ran are taken in together.
    fn take_requests(&mut self) -> usize {
        let mut ran = Vec::new();
        let mut count = 0;
        while count < MAX_REQUESTS_A_TURN
            && let Ok(asked) = self.requests.try_recv()
        {
            count += 1;
            if let Asked::Ran(done) = asked {
                ran.push(done);
                continue;
            }
            self.ran(std::mem::take(&mut ran));
            self.asked(asked);
        }
        self.ran(ran);
        count
    }

    /// Waits for news from peers, at most for `timeout` or until a handle is used, and takes them in. `events` is empty before
    /// and after, and kept by the caller for its memory alone.
    pub fn receive(&mut self, timeout: Duration, events: &mut Vec<cadre_exchange::Event>) {
        self.shared.provider.poll(timeout, events);
        self.look_at_the_time();
        for (index, event) in events.drain(..).enumerate() {
            if index % MAX_REQUESTS_A_TURN == MAX_REQUESTS_A_TURN - 1 {
                self.tick();
            }
            self.event(event);
        }
    }

    /// What its sides share.
    pub fn shared(&self) -> &Shared<P> {
        &self.shared
    }

    /// The same, for a bench that stands for the peers of a process.
    pub fn shared_mut(&mut self) -> &mut Shared<P> {
        &mut self.shared
    }

    /// What the process is to do after its last turn.
    pub fn leave(self) -> After {
        self.shared.tracer.flush();
        match (self.ended, self.draining) {
            (Some(Ending::Failed { reason, bad_input }), _) => After::Failed { reason, bad_input },
            (_, Some(drain)) if drain.stays => After::Again,
            (_, _) => After::Leave,
        }
    }

    /// Last words have as long as they are to have in time in which the process runs: while it is stopped, nobody hears them.
    fn look_at_the_time(&mut self) {
        let now = self.shared.now();
        let stopped = Some(now.since(self.looked)).filter(|it| *it > STOPPED_FOR);
        self.looked = now;
        if let (Some(until), Some(stopped)) = (&mut self.leaving, stopped) {
            *until = until.after(stopped);
        }
    }

    /// Whether the process was asked to leave, and everybody has heard what it said, or was waited for. A conductor that leaves
    /// before a step is over has those named first who left like it, if others did not.
    fn may_leave(&self) -> bool {
        if self.stays() {
            return false;
        }
        let due = |until| self.shared.telling.is_covered() || until <= self.shared.now();
        self.leaves_at().is_some_and(due)
    }

    /// When the process leaves, whoever has not heard it: one that hears one word after the other may hear the last one.
    fn leaves_at(&self) -> Option<Nanos> {
        let until = self.leaving?;
        let heard = self.shared.telling.heard_at.after(LAST_WORDS_WITHIN);
        Some(until.max(heard).min(until.after(LONGEST_LAST_WORDS)))
    }

    /// Whether the conductor is about to name who left.
    fn stays(&self) -> bool {
        self.conductor.as_ref().is_some_and(Conducting::names_leavers)
    }

    /// Ends a server that drains, once it holds nothing that anybody wants, and the conductor will plan nothing for it.
    fn drain(&mut self) {
        let Some(drain) = self.draining else { return };
        let may = self.server.as_ref().is_none_or(Tasks::may_leave);
        if drain.over || may && self.shared.results.is_empty() {
            self.end(Ending::Completed);
        }
    }

    /// How long nothing is due.
    fn sleep(&self) -> Duration {
        if self.may_leave() {
            return Duration::ZERO;
        }
        let now = self.shared.now();
        let deadlines = [
            // Who stays has said its last words, and waits for others.
            self.leaves_at().filter(|_| !self.stays()),
            self.shared.telling.next_deadline(),
            self.trainer.as_ref().and_then(Rows::next_deadline),
            self.server.as_ref().and_then(Tasks::next_deadline),
            self.conductor.as_ref().and_then(Conducting::next_deadline),
        ];
        let next = deadlines.into_iter().fold(None, Nanos::first_of);
        let until = next.map_or(LONGEST_SLEEP, |it| Duration::from_nanos(it.since(now).0));
        until.min(LONGEST_SLEEP).min(self.probing.rest())
    }

    fn tick(&mut self) {
        let now = self.shared.now();
        self.shared.tell_again();
        let owed = self.outlets.main.owed();
        // Of who leaves it was said what is due.
        let here = self.trainer.as_mut().filter(|_| self.leaving.is_none());
        if let Some(stands) = here.and_then(|it| it.standing.look(now, owed)) {
            tracing::warn!("the main thread stands still: {stands:?}");
            self.shared.tell_conductor(Said::Standing(stands));
        }
        if let Some(text) = self.trainer.as_mut().and_then(|it| it.standing.slow()) {
            let (level, event) = (proto::notice::Level::Warning, proto::notice::Event::Unspecified);
            let (level, event) = (level.into(), event.into());
            self.say(proto::Notice { level, text, event, server: None });
        }
        let due = |at: Option<Nanos>| at.is_some_and(|it| it <= now);
        if let Some(it) = self.trainer.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, trainer::Event::Tick);
        }
        if let Some(it) = self.server.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, server::Event::Tick);
        }
        if let Some(it) = self.conductor.as_mut().filter(|it| due(it.next_deadline())) {
            it.handle(&mut self.shared, Event::Protocol(conductor::Event::Tick));
        }
    }

    /// Tells the controller about the load of a server, now and then; of one in place when it had work.
    fn report(&mut self) {
        let dedicated = matches!(self.shared.me, Peer::Server(_));
        if let Some(report) = self.load.report(self.looked)
            && (dedicated || report.cost > 0)
        {
            let memory_bytes = self.server.as_ref().map_or(0, |it| it.memory(&self.shared));
            let spare = self.server.as_ref().is_none_or(Tasks::is_spare);
            self.say(proto::ServerReport { memory_bytes, spare, ..report });
        }
    }
}

#[cfg(test)]
mod tests;
