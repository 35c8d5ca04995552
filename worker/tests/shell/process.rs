//! One process under the simulation: its IO thread as it is in production, and its other threads, turn by turn.
//!
//! In: the network, a clock that the world counts up. Out: what each turn brought ([`Turned`]). Requests and notices between the
//! threads go through the same channels as in production; the thread that plans is a queue that the world empties.
//!
//! It decides nothing about time: the world says which thread runs when.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::Duration;

use cadre_control::{AttentionPlace, Settings, proto};
use cadre_exchange::{PeerId, Waker};
use cadre_kernels::{Engine, Threads};
use cadre_protocol::Peer;
use cadre_protocol::server::Host;
use cadre_worker::compute::{Compute, Progress};
use cadre_worker::io::clock::Clock;
use cadre_worker::io::conducting::Conducting;
use cadre_worker::io::planning::Wanted;
use cadre_worker::io::queues::{self, Notices, Outlet};
use cadre_worker::io::rows::Rows;
use cadre_worker::io::shared::{Shared, peer_of};
use cadre_worker::io::standing::Standing;
use cadre_worker::io::tasks::Tasks;
use cadre_worker::io::{After, Control, Handle, Io, Lines, Outlets, Request, Turn};
use cadre_worker::launch::AtOnce;
use cadre_worker::memory::{self, HostRows};
use cadre_worker::session::{Model, Rank};
use cadre_worker::trace::Tracer;

use crate::job::Job;
use crate::net::{Life, Net, Thread};
use crate::plans::Plans;
use crate::provider::Wires;
use crate::trainer::{Main, Want};
use crate::truth::Truth;

/// A thread that runs works as they come.
struct Worker {
    compute: Compute<HostRows>,
    notices: Notices<HostRows>,
    ended: bool,
}

enum Role {
    Trainer(Box<Main>, Worker),
    Server(Worker),
}

/// What the IO thread says to another one, on its way there.
struct Line {
    said: Notices<HostRows>,
    inbox: Outlet<HostRows>,
}

/// See the module.
pub(crate) struct Process {
    pub(crate) life: Life,
    pub(crate) id: PeerId,
    io: Option<Io<Wires>>,
    handle: Handle<HostRows>,
    clock: Arc<AtomicU64>,
    /// This process's clock began so much later than the world's.
    began: u64,
    lines: Vec<Line>,
    wanted: Receiver<Wanted>,
    pub(crate) planning: VecDeque<Wanted>,
    reports: Receiver<proto::WorkerMessage>,
    control: Sender<proto::ControllerMessage>,
    role: Role,
    events: Vec<cadre_exchange::Event>,
    /// Its main thread does nothing, and takes nothing that it is told.
    pub(crate) stands: bool,
    /// Whether each thread runs soon, or would if the process were not paused.
    pub(crate) scheduled: [bool; 2],
    pub(crate) missed: [bool; 2],
    /// When the IO thread wants to run.
    pub(crate) timer: Option<u64>,
    /// The IO thread does nothing before, though others of the process do.
    pub(crate) late_until: u64,
    /// Turns of one millisecond beyond those that the exchange's news were for.
    pub(crate) turns: (u64, u32),
}

/// What a turn of the IO thread brought.
#[derive(Debug, Default)]
pub(crate) struct Turned {
    /// When it wants to run again.
    pub(crate) sleep: Option<Duration>,
    pub(crate) after: Option<After>,
    /// Which threads got something.
    pub(crate) woken: [bool; 2],
    /// What came over the exchange.
    pub(crate) news: usize,
    /// Headers that came to be made or planned.
    pub(crate) headers: usize,
    pub(crate) reports: Vec<proto::WorkerMessage>,
}

impl Process {
    /// A process that has attached itself.
    pub(crate) fn new(net: &Rc<RefCell<Net>>, id: PeerId, job: &Job) -> Self {
        let life = net.borrow_mut().open(id);
        let began = net.borrow().now;
        let clock = Arc::new(AtomicU64::new(0));
        let epoch = net.borrow().epoch + Duration::from_nanos(began);
        let waker = Waker::new().expect("an event counter");
        let wires = Wires { net: Rc::clone(net), life, waker: waker.clone() };
        let me = peer_of(id);
        let counted = Clock::counted(epoch, Arc::clone(&clock));
        let mut shared = Shared::new(me, (wires, counted), Tracer::off());
        shared.telling.riding = job.riding;
        shared.trainer_count = job.trainers;
        let (handle, requests) = Handle::channel(waker.clone());
        let (plans, wanted) = sync_channel(1);
        let (report, reports) = channel();
        let (control, receiver) = channel();
        let sender = Box::new(move |message| {
            report.send(message).ok();
            Ok(())
        });
        let now = shared.now();
        let mut lines = Vec::new();
        let mut line = || {
            let (io, said) = queues::notices(waker.clone());
            let (inbox, notices) = queues::notices(waker.clone());
            lines.push(Line { said, inbox });
            (io, notices)
        };
        let compute = |track| {
            let launcher = AtOnce::new(Engine::cpu(Threads::ONE));
            Compute::new(launcher, track, handle.clone(), Tracer::off())
        };
        let (main, notices) = line();
        let (machines, rescue, role) = match me {
            Peer::Trainer(me) => {
                let conducting = (me.0 == 0)
                    .then(|| Conducting::new(job.draft(), job.settings, 0, &told(job), now));
                let standing = Standing::new((me, 0), [job.stalled(); 2], now);
                let rows = Rows::new(me, job.settings, standing, now);
                let tasks = Tasks::new(
                    Host::InPlace(me),
                    job.memory,
                    job.settings,
                    (&shared.provider, now),
                );
                let (io, places) = ((handle.clone(), notices), [memory::Host; 2]);
                let main = (compute("main"), Threads::ONE);
                let model = Model { layers: job.layers.clone(), seed: job.seed, wire: job.wire };
                let begins = (model, 0, job.known_steps());
                let own = Rank::new(me, io, main, places, begins, Tracer::off());
                let (rescue, notices) = line();
                let worker = Worker { compute: compute("rescue"), notices, ended: false };
                let role = Role::Trainer(Box::new(Main::new(own)), worker);
                ((Some(rows), Some(tasks), conducting), Some(rescue), role)
            }
            Peer::Server(me) => {
                let tasks = Tasks::new(
                    Host::Dedicated(me),
                    job.memory,
                    job.settings,
                    (&shared.provider, now),
                );
                let worker = Worker { compute: compute("compute"), notices, ended: false };
                ((None, Some(tasks), None), None, Role::Server(worker))
            }
        };
        let outlets = Outlets { main, rescue, interrupt: None };
        let control_ends = Control { sender, receiver };
        let io =
            Io::new(shared, machines, Lines { requests, plans, control: control_ends, outlets });
        Self {
            life,
            id,
            io: Some(io),
            handle,
            clock,
            began,
            lines,
            wanted,
            planning: VecDeque::new(),
            reports,
            control,
            role,
            events: Vec::new(),
            stands: false,
            scheduled: [false; 2],
            missed: [false; 2],
            timer: None,
            late_until: 0,
            turns: (0, 0),
        }
    }

    /// The controller says something.
    pub(crate) fn told(&self, message: proto::ControllerMessage) {
        self.control.send(message).ok();
    }

    /// The process is asked to end.
    pub(crate) fn terminate(&self) {
        self.handle.send(Request::Terminate);
    }

    /// A turn of the IO thread.
    pub(crate) fn turn(&mut self, now: u64) -> Turned {
        self.clock.store(now - self.began, Ordering::Relaxed);
        let mut turned = Turned::default();
        let Some(io) = &mut self.io else { return turned };
        turned.news = io.shared().provider.news();
        io.receive(Duration::ZERO, &mut self.events);
        match io.turn() {
            Turn::Sleep(sleep) => turned.sleep = Some(sleep),
            Turn::Leave => turned.after = self.io.take().map(Io::leave),
        }
        let hears = [!self.stands, true];
        let lines = self.lines.iter_mut().zip(&mut turned.woken).zip(hears);
        for ((line, woken), _) in lines.filter(|it| it.1) {
            while let Ok(notice) = line.said.try_recv() {
                *woken = true;
                line.inbox.tell(notice);
            }
        }
        // What is on its way, or taken and not computed, is owed.
        for line in &self.lines {
            line.said.owe(line.inbox.owed());
        }
        for wanted in self.wanted.try_iter() {
            turned.headers += 1;
            self.planning.push_back(wanted);
        }
        turned.reports = self.reports.try_iter().collect();
        turned
    }

    /// Whether the thread that plans is at a header of the conductor's own.
    pub(crate) fn plans_own(&self) -> bool {
        matches!(self.planning.front(), Some(Wanted::Own(..)))
    }

    /// The thread that plans has done one.
    pub(crate) fn plan(&mut self, plans: &mut Plans) {
        if let Some(wanted) = self.planning.pop_front() {
            self.handle.send(plans.done(wanted));
        }
    }

    /// One turn of a thread that computes.
    pub(crate) fn run(
        &mut self,
        thread: Thread,
        job: &Job,
        truth: &mut Truth,
    ) -> Result<Want, String> {
        let worker = match (&mut self.role, thread) {
            (Role::Trainer(main, _), Thread::Main) => return main.run(job, truth),
            (Role::Trainer(_, worker), Thread::Rescue) | (Role::Server(worker), _) => worker,
        };
        while let Ok(notice) = worker.notices.try_recv() {
            if worker.ended {
                continue;
            }
            if let ControlFlow::Break(ended) = worker.compute.take(notice) {
                worker.ended = true;
                if let Err(why) = ended {
                    return Err(format!("{} cannot compute any more: {why}", self.id));
                }
                if thread == Thread::Main {
                    self.handle.send(Request::Leave(None));
                }
            }
        }
        let ran = !worker.ended && worker.compute.run() == Progress::Ran;
        Ok(if ran { Want::Launch } else { Want::News })
    }

    /// The trainer's main thread.
    pub(crate) fn main(&mut self) -> Option<&mut Main> {
        match &mut self.role {
            Role::Trainer(main, _) => Some(main),
            Role::Server(_) => None,
        }
    }

    /// Whether its job is over and its main thread does not notice: such a process of `cadre train` ends itself.
    pub(crate) fn is_stuck(&self) -> bool {
        let is_over = matches!(&self.role, Role::Trainer(_, rescue) if rescue.ended);
        self.stands && is_over
    }

    /// The main thread has ended.
    pub(crate) fn leave(&self) {
        match &self.role {
            Role::Trainer(main, _) => main.session.leave(true),
            Role::Server(_) => self.handle.send(Request::Leave(None)),
        }
    }

    /// What the IO thread still holds: rows, results, steps, pulls.
    pub(crate) fn holdings(&self) -> [usize; 4] {
        self.io.as_ref().map_or([0; 4], |io| io.shared().holdings())
    }

    /// Whom it still owes words.
    pub(crate) fn owes(&self) -> Vec<Peer> {
        self.io.as_ref().map_or_else(Vec::new, |io| io.shared().telling.owed_to())
    }
}

/// What a controller says of the job; the conductor takes faults and failovers from it.
fn told(job: &Job) -> Settings {
    Settings {
        job: "simulated".into(),
        attempt: 1,
        trainers: job.trainers,
        attention: AttentionPlace::Pool,
        wire: job.wire,
        wire_is_open: Some(false),
        reproducible: true,
        encryption: cadre_crds::Encryption::Off,
        on_pool_loss: cadre_crds::OnPoolLoss::Fail,
        pool_wait_seconds: 0,
        suspect_after_milliseconds: 1_000,
        trainer_suspect_after_seconds: 30,
        stalled_after_seconds: (job.stalled().millis() / 1000) as u32,
        checkpoints: std::path::PathBuf::new(),
        checkpoints_kept: 1,
        failovers: 0,
        resume: None,
        headers: None,
        profile: None,
        tolerance: None,
        faults: job.moments.iter().copied().collect(),
    }
}
