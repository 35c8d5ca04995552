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

pub mod conducting;
pub mod envelope;
pub mod rows;
pub mod shared;
pub mod tasks;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use cadre_control::proto::{self, controller_message};
use cadre_exchange::{Event as Wire, PeerId, Provider as _, Waker};
use cadre_protocol::{At, End, Nanos, Peer, conductor, server, trainer};

use self::conducting::Conducting;
use self::envelope::{Ending, Envelope, Lengths, StepDone};
use self::rows::{Rows, Whole};
use self::shared::{Shared, Side, peer_of};
use self::tasks::{Planned, Tasks};
use crate::conduct::{View, moment};
use crate::header::Header;
use crate::launch::{Done, PhaseRows, Work};
use crate::planned::PlannedStep;

/// Between two load reports of a server.
const REPORT_EVERY: Duration = Duration::from_secs(1);
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
    /// The controller wants this server to end as soon as nothing is left here.
    draining: bool,
    ended: Option<Ending>,
    leave: bool,
}

/// Both ends of the controller's stream.
#[derive(Debug)]
pub struct Control {
    /// To it.
    pub sender: cadre_control::client::Sender,
    /// From it.
    pub receiver: Receiver<proto::ControllerMessage>,
}

/// What the next load report says.
#[derive(Debug)]
struct Load {
    since: Instant,
    step: u64,
    queue: u32,
    tasks: u32,
    busy: Duration,
    cost: u64,
    /// Cost units a second of the first second of work: what later ones are held against.
    speed: Option<f64>,
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
        let handle = Handle { requests: sender, waker: shared.provider.waker() };
        let (planner, headers) = channel::<Box<Header>>();
        let back = handle.clone();
        std::thread::Builder::new().name("plan".into()).spawn(move || {
            for header in headers {
                let planned = PlannedStep::new(Arc::new(*header)).map_err(|it| it.to_string());
                back.send(Request::Planned(Box::new(planned)));
            }
        })?;
        let load = Load {
            since: Instant::now(),
            step: 0,
            queue: 0,
            tasks: 0,
            busy: Duration::ZERO,
            cost: 0,
            speed: None,
        };
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
            load,
            newest: None,
            draining: false,
            ended: None,
            leave: false,
        };
        Ok((io, handle))
    }

    /// Serves until the process leaves.
    pub fn run(mut self) {
        let mut events = Vec::new();
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
        }
        self.shared.tracer.flush();
        drop(self.handle);
    }

    /// Ends a server that drains, once it holds nothing that anybody wants.
    fn drain(&mut self) {
        let idle = self.server.as_ref().is_none_or(Tasks::is_idle);
        if self.draining && idle && self.shared.results.is_empty() {
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

    fn request(&mut self, request: Request) {
        let shared = &mut self.shared;
        match request {
            Request::Submit(at, rows) => {
                if let Some(it) = self.trainer.as_mut().filter(|_| self.ended.is_none()) {
                    it.submit(shared, at, rows);
                }
            }
            Request::Lengths(lengths) => shared.tell_conductor(Envelope::Lengths(lengths)),
            Request::StepDone(done) => {
                shared.tell_conductor(Envelope::StepDone(done));
                shared.tracer.flush();
            }
            Request::Ran(done) => {
                self.load.ran(&done);
                if let Some(it) = self.server.as_mut() {
                    it.ran(shared, done);
                }
            }
            Request::Dropped(work) => {
                self.load.queue = self.load.queue.saturating_sub(1);
                if let Some(it) = self.server.as_mut() {
                    it.dropped(shared, &work);
                }
            }
            Request::Fail(reason) => self.fail(reason, false),
            Request::Leave => self.leave = true,
            Request::Planned(planned) => match *planned {
                Ok(planned) => self.begin(Arc::new(planned)),
                Err(reason) => self.fail(reason, true),
            },
        }
    }

    /// What the controller says.
    fn controller(&mut self, message: proto::ControllerMessage) {
        use controller_message::Message;
        let shared = &mut self.shared;
        match message.message {
            Some(Message::Conductor(it)) => {
                let id = PeerId::trainer(0, it.incarnation);
                shared.know(id, &it.exchange_address);
            }
            Some(Message::Trainers(it)) => {
                let rings = it.trainers.iter().map(|it| it.ring_address.clone()).collect();
                drop(self.outlets.main.send(Notice::Trainers(rings)));
                let list = (0..).zip(it.trainers).map(|(index, it)| {
                    (PeerId::trainer(index, it.incarnation), it.exchange_address)
                });
                let list: Vec<_> = list.collect();
                for (id, address) in &list {
                    shared.know(*id, address);
                }
                if let Some(conductor) = &mut self.conductor {
                    conductor.trainers(shared, list);
                }
            }
            Some(Message::View(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.view(shared, View::of(&it));
                }
            }
            Some(Message::FaultsFired(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.fired(shared, moment(it.step, it.direction()));
                }
            }
            Some(Message::Stop(it)) => {
                if let Some(conductor) = &mut self.conductor {
                    conductor.stop(shared, it.checkpoint);
                }
            }
            Some(Message::Drain(_)) => self.draining = true,
            Some(Message::Welcome(it)) => {
                if let Some(conductor) = it.conductor {
                    shared.know(
                        PeerId::trainer(0, conductor.incarnation),
                        &conductor.exchange_address,
                    );
                }
            }
            None => {}
        }
    }

    /// What the exchange says.
    fn event(&mut self, event: Wire) {
        match event {
            Wire::Connected(_) => {}
            Wire::Message { from, bytes } => match postcard::from_bytes(&bytes) {
                Ok(envelope) => self.ring(from, envelope),
                Err(error) => tracing::error!("{from} rang something unreadable: {error}"),
            },
            Wire::Pulled { pull, result } => self.shared.pulled(pull, result),
            Wire::Closed { peer, error } => {
                tracing::info!("the link with {peer} broke: {error}");
                let (shared, peer) = (&mut self.shared, peer_of(peer));
                if let Some(it) = &mut self.trainer {
                    it.handle(shared, trainer::Event::Closed(peer));
                }
                if let Some(it) = &mut self.server {
                    it.handle(shared, server::Event::Closed(peer));
                }
                if let Some(it) = &mut self.conductor {
                    it.handle(shared, conductor::Event::Closed(peer));
                }
            }
            Wire::Refused { error } => tracing::warn!("somebody was turned away: {error}"),
        }
    }

    fn ring(&mut self, from: PeerId, envelope: Envelope) {
        let peer = peer_of(from);
        match envelope {
            Envelope::Protocol(message) => self.deliver(peer, message),
            Envelope::Header { header, trainers } => {
                for (id, address) in &trainers {
                    self.shared.know(*id, address);
                }
                if self.newest < Some(header.step) && self.planner.send(header).is_err() {
                    self.fail("the planning thread ended".into(), false);
                }
            }
            Envelope::Addresses(servers) => {
                for (id, address) in &servers {
                    self.shared.know(*id, address);
                }
            }
            Envelope::End(ending) => self.end(ending),
            Envelope::Lengths(_) | Envelope::StepDone(_) | Envelope::ServerStep(_) => {
                if let Some(it) = &mut self.conductor {
                    it.told(&mut self.shared, peer, envelope);
                }
            }
        }
    }

    /// Hands a protocol message to the machine that it is for.
    fn deliver(&mut self, from: Peer, message: cadre_protocol::Message) {
        use cadre_protocol::Audience;
        let audience = message.audience();
        tracing::trace!("{from} says {message:?}");
        let shared = &mut self.shared;
        let members = audience == Audience::Members;
        if let Some(it) = self.trainer.as_mut().filter(|_| members || audience == Audience::Trainer)
        {
            let message = message.clone();
            it.handle(shared, trainer::Event::Message { from, message });
        }
        if let Some(it) = self.server.as_mut().filter(|_| members || audience == Audience::Server) {
            let message = message.clone();
            it.handle(shared, server::Event::Message { from, message });
        }
        if let Some(it) = self.conductor.as_mut().filter(|_| audience == Audience::Conductor) {
            it.handle(shared, conductor::Event::Message { from, message });
        }
    }

    /// Begins a step in every machine that works for it.
    fn begin(&mut self, planned: Arc<PlannedStep>) {
        let number = planned.header.step;
        // A header may come twice, the second time late.
        if self.newest >= Some(number) {
            return;
        }
        self.newest = Some(number);
        for member in planned.header.fillers.iter().flatten() {
            if let crate::header::Member::Server { index, incarnation, address } = member {
                self.shared.know(PeerId::server(*index, *incarnation), address);
            }
        }
        let step = match self.shared.begin(Arc::clone(&planned)) {
            Ok(running) => planned.protocol_step(running.first()).map_err(|it| it.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let step = match step {
            Ok(step) => Arc::new(step),
            Err(reason) => return self.fail(reason, true),
        };
        if let Some(it) = &mut self.server {
            it.begin(&self.shared, number);
            it.handle(&mut self.shared, server::Event::Begin(Arc::clone(&step)));
        }
        if let Some(it) = &mut self.trainer {
            it.handle(&mut self.shared, trainer::Event::Begin(step));
            self.tell(Notice::Step(planned));
        }
    }

    /// Carries what one side left for another until nothing is left.
    fn settle(&mut self) {
        loop {
            let shared = &mut self.shared;
            if let Some(message) = shared.local.pop_front() {
                let me = shared.me;
                self.deliver(me, message);
            } else if let Some(envelope) = shared.to_conductor.pop_front() {
                let me = shared.me;
                if let Some(it) = &mut self.conductor {
                    it.told(shared, me, envelope);
                }
            } else if let Some((side, pull, result)) = shared.ended.pop_front() {
                match (side, &mut self.trainer, &mut self.server) {
                    (Side::Trainer, Some(it), _) => it.pulled(shared, pull, result),
                    (Side::Server, _, Some(it)) => it.pulled(shared, pull, result),
                    (Side::Trainer | Side::Server, _, _) => {}
                }
            } else if !self.hand_on() {
                return;
            }
        }
    }

    /// Hands results of the machines to the other threads and the controller; whether there were any.
    fn hand_on(&mut self) -> bool {
        let mut any = false;
        if let Some(it) = &mut self.conductor {
            let begin = std::mem::take(&mut it.begin);
            let reports = std::mem::take(&mut it.reports);
            let ending = if self.ended.is_none() { it.ending.clone() } else { None };
            let end = it.end.take();
            any |= !begin.is_empty() || ending.is_some();
            for report in reports {
                self.say(report);
            }
            for planned in begin {
                self.begin(planned);
            }
            if let Some(ending) = ending {
                self.end(ending);
            }
            if let Some(end) = end {
                self.fail(end.to_string(), false);
            }
        }
        if let Some(it) = &mut self.trainer {
            let (whole, over) = (std::mem::take(&mut it.whole), std::mem::take(&mut it.over));
            let failed =
                (it.end.take().map(|it| it.to_string()), it.failed.take().map(|it| it.to_string()));
            any |= !whole.is_empty();
            for whole in whole {
                self.tell(Notice::Whole(Box::new(whole)));
            }
            self.forget(&over);
            if let Some(reason) = failed.0.or(failed.1) {
                self.fail(reason, false);
            }
        }
        if let Some(it) = &mut self.server {
            let (ready, over) = (std::mem::take(&mut it.ready), std::mem::take(&mut it.over));
            let (end, failed, cancelled) = (it.end.take(), it.failed.take(), it.cancelled.take());
            any |= !ready.is_empty();
            for (work, planned) in ready {
                self.load.queue += 1;
                self.load.step = work.planned.header.step;
                let outlet = match (&self.outlets.rescue, planned) {
                    (Some(rescue), Planned::Elsewhere) => rescue,
                    (None, _) | (Some(_), Planned::Here) => &self.outlets.main,
                };
                // A receiver that is gone belongs to a process that ends.
                drop(outlet.send(Notice::Work(Box::new(work))));
            }
            if let Some(at) = cancelled {
                self.tell(Notice::Cancelled(at));
                if let Some(rescue) = &self.outlets.rescue {
                    drop(rescue.send(Notice::Cancelled(at)));
                }
            }
            self.forget(&over);
            match (end, failed) {
                (Some(End::DeclaredLost(id)), _) => self.end(Ending::Failed {
                    reason: End::DeclaredLost(id).to_string(),
                    bad_input: false,
                }),
                (Some(end), _) => self.fail(end.to_string(), matches!(end, End::Memory { .. })),
                (None, Some(error)) => self.fail(error.to_string(), false),
                (None, None) => {}
            }
        }
        any
    }

    /// Forgets steps that are over for every machine.
    fn forget(&mut self, over: &[u64]) {
        for step in over {
            // Trainer and server end a step on the same watermark, but a server may still hold rows.
            let held = self.server.as_ref().is_some_and(|it| it.holds(*step));
            if !held {
                self.shared.steps.remove(step);
            }
        }
    }

    /// Tells the thread that computes.
    fn tell(&self, notice: Notice) {
        // A receiver that is gone belongs to a process that ends.
        drop(self.outlets.main.send(notice));
    }

    fn say(&self, message: impl Into<proto::WorkerMessage>) {
        if let Err(error) = self.control.sender.send(message) {
            tracing::debug!("the controller is not told: {error}");
        }
    }

    /// The job cannot go on: everybody is told by the conductor, or at least this process by itself.
    fn fail(&mut self, reason: String, bad_input: bool) {
        let ending = Ending::Failed { reason, bad_input };
        if self.conductor.is_none() && self.ended.is_none() {
            self.shared.ring(Peer::CONDUCTOR, &Envelope::End(ending.clone()));
        }
        self.end(ending);
    }

    fn end(&mut self, ending: Ending) {
        if self.ended.is_some() {
            return;
        }
        if self.conductor.is_some() {
            for trainer in self.shared.trainers() {
                self.shared.ring(trainer, &Envelope::End(ending.clone()));
            }
        }
        self.tell(Notice::End(ending.clone()));
        if let Some(rescue) = &self.outlets.rescue {
            drop(rescue.send(Notice::End(ending.clone())));
        }
        self.ended = Some(ending);
    }

    /// Tells the controller about the load of a dedicated server, now and then.
    fn report(&mut self) {
        let elapsed = self.load.since.elapsed();
        if elapsed < REPORT_EVERY || self.trainer.is_some() {
            return;
        }
        let report = self.load.report(elapsed);
        self.say(report);
    }
}

impl Load {
    fn ran(&mut self, done: &Done) {
        self.queue = self.queue.saturating_sub(1);
        self.tasks += 1;
        self.busy += done.busy;
        self.cost += done.work.cost();
    }

    fn report(&mut self, elapsed: Duration) -> proto::ServerReport {
        let (busy, cost) = (self.busy.as_secs_f64(), self.cost as f64);
        let speed = if busy > 0.0 { Some(cost / busy) } else { None };
        let expected = *self.speed.get_or_insert(speed.unwrap_or(0.0));
        if expected == 0.0 {
            self.speed = None;
        }
        let report = proto::ServerReport {
            step: self.step,
            queue: self.queue,
            busy_ppm: (busy / elapsed.as_secs_f64() * 1e6).min(1e6) as u32,
            tasks_per_second: f64::from(self.tasks) / elapsed.as_secs_f64(),
            observed_over_expected: speed.map_or(0.0, |it| expected / it),
            memory_bytes: 0,
        };
        (self.since, self.tasks, self.busy, self.cost) = (Instant::now(), 0, Duration::ZERO, 0);
        report
    }
}
