//! The simulated cluster: processes, time, faults and the supervisor.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cadre_protocol::{
    End, Filler, Fillers, Message, Nanos, OnPoolLoss, Peer, PullFailure, ServerId, TrainerId,
    conductor, server, trainer,
};

use crate::faults::Faults;
use crate::job::{Job, Running};
use crate::net::{Flight, Happening, Input, Net, What};
use crate::process::{Process, ServerShell};
use crate::random::{Random, hash};

/// How a scenario ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Steps that every trainer finished.
    pub(crate) steps: u64,
    /// The job's end, where it did not finish.
    pub(crate) end: Option<End>,
    pub(crate) lost: usize,
    /// Works that ran ahead of their bundle.
    pub(crate) ahead: usize,
}

/// Everything there is.
pub(crate) struct World {
    pub(crate) job: Job,
    pub(crate) now: Nanos,
    pub(crate) random: Random,
    pub(crate) net: Net,
    pub(crate) processes: BTreeMap<Peer, Box<Process>>,
    pub(crate) headers: BTreeMap<u64, Running>,
    pub(crate) faults: Faults,
    /// Slots as the supervisor sees them, and incarnations given out.
    pub(crate) view: Fillers,
    pub(crate) incarnations: BTreeMap<u16, u32>,
    pub(crate) lost: BTreeSet<ServerId>,
    pub(crate) ahead: usize,
    pub(crate) end: Option<End>,
    pub(crate) trainer_died: bool,
    /// Steps whose trainers may go on; the all-reduce.
    pub(crate) finished: BTreeMap<u64, u16>,
    pub(crate) steps_done: u64,
    limit: Nanos,
    /// Pulls that reached a paused process.
    pub(crate) reads: BTreeMap<Peer, Vec<u64>>,
    events: u64,
    /// Whether every event and command is printed.
    pub(crate) trace: bool,
}

/// What a handler returns: `Err` is what is wrong.
pub(crate) type Checked = Result<(), String>;

impl World {
    pub(crate) fn new(mut job: Job, faults: Faults, mut random: Random) -> Self {
        let slowest = Nanos(*random.pick(&[50_000, 300_000, 2_000_000]));
        let net = Net::new(slowest, faults.path);
        if faults.calm {
            // One packet in a hundred takes twenty times as long, and a pull takes two.
            let longest = 20 * slowest.0;
            let settings = &mut job.settings;
            settings.pull_within = settings.pull_within.max(Nanos(5 * longest));
            settings.phase_within = settings.phase_within.max(Nanos(20 * longest));
        }
        if faults.path.is_some() {
            // As in production: trainers say that a path is bad long before work is late.
            job.settings.phase_within = Nanos(30 * job.settings.suspect_after.0);
        }
        let limit = faults.over.after(Nanos(job.steps * 400_000_000 + 10_000_000_000));
        let mut world = Self {
            now: Nanos(0),
            random,
            net,
            processes: BTreeMap::new(),
            headers: BTreeMap::new(),
            view: job.slots.clone(),
            incarnations: BTreeMap::new(),
            lost: BTreeSet::new(),
            ahead: 0,
            end: None,
            trainer_died: false,
            finished: BTreeMap::new(),
            steps_done: 0,
            limit,
            reads: BTreeMap::new(),
            events: 0,
            trace: std::env::var_os("CADRE_TRACE").is_some(),
            faults,
            job,
        };
        for id in (0..world.job.trainers).map(TrainerId) {
            let process = Process::trainer(id, &world.job, Nanos(0));
            world.start(process);
        }
        for filler in world.view.clone().into_iter().flatten() {
            if let Filler::Server(id) = filler
                && !world.faults.absent.contains(&id.index)
            {
                world.start(Process::server(id, &world.job, Nanos(0)));
            }
        }
        world.net.local(Nanos(0), Peer::CONDUCTOR, Input::View);
        world.net.local(Nanos(1), Peer::CONDUCTOR, Input::Lengths(0));
        if let Some(path) = world.faults.path {
            world.net.at(path.from, Happening::PathBreaks);
        }
        for (index, fault) in world.faults.list.iter().enumerate() {
            world.net.at(fault.0, Happening::Fault(index));
        }
        world
    }

    pub(crate) fn start(&mut self, process: Process) {
        self.net.at(self.now, Happening::Wake(process.peer));
        self.processes.insert(process.peer, Box::new(process));
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Result<Outcome, String> {
        while self.end.is_none() && self.steps_done < self.job.steps {
            let Some((now, happening)) = self.net.pop() else {
                return Err("nothing happens".into());
            };
            self.now = now;
            self.events += 1;
            if self.events > 2_000_000 {
                return Err(format!("no end of events, the last is {happening:?}"));
            }
            if now > self.limit {
                self.show();
                return Err(format!(
                    "no progress: {} of {} steps",
                    self.steps_done, self.job.steps
                ));
            }
            self.happen(happening)?;
        }
        if self.end.is_none() {
            self.settle()?;
        }
        let lost = self.lost.len();
        Ok(Outcome { steps: self.steps_done, end: self.end, lost, ahead: self.ahead })
    }

    /// Prints the machines of a job that is stuck, for whoever looks for the reason.
    fn show(&self) {
        for process in self.processes.values() {
            println!("{}, paused: {}", process.peer, process.paused);
            if let Some(it) = &process.trainer {
                println!("  next {:?}, {:?}", it.next, it.machine);
            }
            println!(
                "  {:?}\n  {:?}",
                process.server.as_ref().map(|it| &it.machine),
                process.conductor
            );
        }
    }

    /// Lets what is under way end, then looks for leaks.
    fn settle(&mut self) -> Checked {
        let until = self.now.max(self.faults.over).after(Nanos::from_millis(300));
        while self.end.is_none() && self.now < until {
            let Some((now, happening)) = self.net.pop() else {
                return Err("nothing happens".into());
            };
            self.now = now;
            self.happen(happening)?;
        }
        if self.end.is_some() {
            // A trainer was killed after the last step: who is cut off has not heard of its end yet.
            return Ok(());
        }
        let conductors = self.faults.path.is_some_and(|it| it.trainer == 0);
        let leaks = |it: &&Process| {
            // One that cannot reach the conductor hears of no watermark, and ends in the end.
            let alone =
                matches!(it.peer, Peer::Server(id) if conductors && self.lost.contains(&id));
            !alone && it.server.as_ref().is_some_and(ServerShell::holds)
        };
        match self.processes.values().map(Box::as_ref).filter(|it| !it.paused).find(leaks) {
            Some(process) => Err(format!("{} holds memory after the last step", process.peer)),
            None => Ok(()),
        }
    }

    fn happen(&mut self, happening: Happening) -> Checked {
        match happening {
            Happening::Arrive { link, to, input } => {
                if !self.net.arrives(link) {
                    return Ok(());
                }
                match self.processes.get_mut(&to) {
                    Some(process) if process.paused => process.inbox.push(input),
                    Some(_) => return self.handle(to, input),
                    None => {
                        // Nobody is there: whoever sent it is refused.
                        if let Some(((from, _), _)) = link {
                            let when = self.now.after(Nanos(self.random.within(50_000, 500_000)));
                            self.net.local(when, from, Input::Closed(to));
                        }
                    }
                }
                Ok(())
            }
            Happening::Wake(peer) => self.wake(peer),
            Happening::Read(id) => {
                self.read(id);
                Ok(())
            }
            Happening::Land(id, found) => {
                self.net.end(self.now, id, Ok(found));
                Ok(())
            }
            Happening::Late(id) => {
                self.net.end(self.now, id, Err(PullFailure::Deadline));
                Ok(())
            }
            Happening::Fault(index) => {
                let fault = self.faults.list[index].1;
                self.fault(fault);
                Ok(())
            }
            Happening::Resume(peer) => {
                self.resume(peer);
                Ok(())
            }
            Happening::PathBreaks => {
                self.path_breaks();
                Ok(())
            }
            Happening::Spawn(servers) => {
                self.spawn(&servers);
                Ok(())
            }
        }
    }

    fn wake(&mut self, peer: Peer) -> Checked {
        let now = self.now;
        let Some(process) = self.processes.get_mut(&peer) else { return Ok(()) };
        process.wake_at = None;
        if process.paused {
            return Ok(());
        }
        if process.deadline().is_none_or(|it| it > now) {
            self.plan_wake(peer);
            return Ok(());
        }
        process.spins = if process.spins.0 == now { (now, process.spins.1 + 1) } else { (now, 0) };
        if process.spins.1 > 20 {
            return Err(format!("{peer} spins at {now:?}"));
        }
        let mut process = self.processes.remove(&peer).expect("it was just found");
        let mut local = VecDeque::new();
        self.trainer_event(&mut process, trainer::Event::Tick, &mut local)?;
        self.server_event(&mut process, server::Event::Tick, &mut local)?;
        self.conductor_event(&mut process, conductor::Event::Tick, &mut local)?;
        self.finish(process, local)
    }

    pub(crate) fn plan_wake(&mut self, peer: Peer) {
        let Some(process) = self.processes.get_mut(&peer) else { return };
        if let Some(deadline) = process.deadline().map(|it| it.max(self.now))
            && !process.paused
            && process.wake_at.is_none_or(|it| it > deadline)
        {
            process.wake_at = Some(deadline);
            self.net.at(deadline, Happening::Wake(peer));
        }
    }

    /// Handles one input, and what the process sends to itself.
    fn handle(&mut self, to: Peer, input: Input) -> Checked {
        let mut process = self.processes.remove(&to).expect("only those that are there are called");
        let mut local = VecDeque::new();
        self.input(&mut process, input, &mut local)?;
        self.finish(process, local)
    }

    fn finish(&mut self, mut process: Box<Process>, mut local: VecDeque<Message>) -> Checked {
        while let Some(message) = local.pop_front() {
            let from = process.peer;
            self.message(&mut process, from, message, &mut local)?;
        }
        let peer = process.peer;
        let left = matches!(peer, Peer::Server(id) if self.lost.contains(&id));
        let over = process.server.as_ref().is_some_and(|it| it.machine.next_deadline().is_none());
        if left && over && process.trainer.is_none() {
            // It was told that it is lost: the process exits.
            self.net.died(self.now, &mut self.random, peer);
            return Ok(());
        }
        self.processes.insert(peer, process);
        self.plan_wake(peer);
        Ok(())
    }

    /// The request of a pull has reached the far side.
    fn read(&mut self, id: u64) {
        let Some(&flight) = self.net.flights.get(&id) else { return };
        let Flight { from, what, .. } = flight;
        if self.net.loses(self.now, &flight) {
            return;
        }
        let shared = self.job.shared_memory;
        let found = match from {
            // Whoever has the memory now answers, under his own incarnation.
            Peer::Server(asked) if shared => {
                let newest =
                    |it: &&Process| matches!(it.peer, Peer::Server(id) if id.index == asked.index);
                self.processes.values().map(Box::as_ref).rev().find(newest)
            }
            Peer::Server(_) | Peer::Trainer(_) => self.processes.get(&from).map(Box::as_ref),
        };
        let Some(process) = found else {
            return self.net.end(self.now, id, Err(PullFailure::PeerFailed));
        };
        if process.paused && !shared {
            // A paused process answers when it goes on.
            let peer = process.peer;
            self.reads.entry(peer).or_default().push(id);
            return;
        }
        let value = match what {
            What::Rows(at, parcel) => {
                process.trainer.as_ref().and_then(|it| it.read(at, parcel, shared))
            }
            What::Result(at, work) => {
                let value = process.server.as_ref().and_then(|it| it.read(at, work));
                value.or(shared.then(|| hash(&[at.step, u64::from(work.0), 0xdead])))
            }
        };
        let stale = shared && process.peer != from;
        let when = self.now.after(self.net.delay(&mut self.random));
        match value {
            Some(value) => {
                let value = if stale { hash(&[value]) } else { value };
                self.net.at(when, Happening::Land(id, (process.peer.incarnation(), value)));
            }
            None => self.net.end(when, id, Err(PullFailure::Gone)),
        }
    }

    pub(crate) fn ended(&mut self, peer: Peer, end: End) -> Checked {
        let in_place = self.job.slots.iter().flatten().any(|it| matches!(it, Filler::InPlace(_)));
        let fine = match &end {
            End::DeclaredLost(id) => return self.left(peer, *id),
            // A server that cannot reach the conductor ends alone.
            End::ConductorSilent(_) if self.faults.path.is_some_and(|it| it.trainer == 0) => {
                return match peer {
                    Peer::Server(id) => self.left(peer, id),
                    Peer::Trainer(_) => Err(format!("{peer} ended the job: {end}")),
                };
            }
            End::TrainersDead(_) | End::ConductorSilent(_) => self.trainer_died,
            End::TrainerCutOff { trainer, .. } => self.faults.cut_off(*trainer, &self.job.settings),
            End::PoolLost { .. } => {
                let local = self.job.settings.on_pool_loss == OnPoolLoss::Local;
                !self.lost.is_empty() && (self.job.picky || !local && !in_place)
            }
            End::TrainersApart(_)
            | End::Digest { .. }
            | End::Memory { .. }
            | End::Flooded { .. }
            | End::Rounds { .. } => false,
        };
        if !fine {
            return Err(format!("{peer} ended the job: {end}"));
        }
        self.end = Some(end);
        Ok(())
    }

    fn left(&mut self, peer: Peer, id: ServerId) -> Checked {
        if peer == Peer::Server(id) && self.lost.contains(&id) {
            Ok(())
        } else {
            Err(format!("{peer} believes that {id:?} was declared lost"))
        }
    }
}
