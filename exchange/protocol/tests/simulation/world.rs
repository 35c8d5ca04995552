//! The simulated cluster: processes, time, faults and the supervisor.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_protocol::{
    Audience, End, Filler, Fillers, Message, Nanos, OnPoolLoss, Peer, PullFailure, ServerId, Step,
    TrainerId, conductor, server, trainer,
};

use crate::faults::{Fault, Faults};
use crate::job::Job;
use crate::net::{Flight, Happening, Input, Machine, Net, What};
use crate::process::{Process, reassigned};
use crate::random::{Random, hash};

/// How a scenario ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Steps that every trainer finished.
    pub(crate) steps: u64,
    /// The job's end, where it did not finish.
    pub(crate) end: Option<End>,
    pub(crate) lost: usize,
}

/// Everything there is.
pub(crate) struct World {
    pub(crate) job: Job,
    pub(crate) now: Nanos,
    pub(crate) random: Random,
    pub(crate) net: Net,
    processes: BTreeMap<Peer, Process>,
    headers: BTreeMap<u64, Arc<Step>>,
    faults: Faults,
    /// Slots as the supervisor sees them, and incarnations given out.
    pub(crate) view: Fillers,
    incarnations: BTreeMap<u16, u32>,
    lost: BTreeSet<ServerId>,
    end: Option<End>,
    pub(crate) trainer_died: bool,
    /// Steps whose trainers may go on; the all-reduce.
    finished: BTreeMap<u64, u16>,
    steps_done: u64,
    limit: Nanos,
    /// Pulls that reached a paused process.
    reads: BTreeMap<Peer, Vec<u64>>,
    events: u64,
}

/// What a handler returns: `Err` is what is wrong.
type Checked = Result<(), String>;

impl World {
    pub(crate) fn new(job: Job, faults: Faults, mut random: Random) -> Self {
        let slowest = Nanos(*random.pick(&[50_000, 300_000, 2_000_000]));
        let net = Net::new(slowest);
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
            end: None,
            trainer_died: false,
            finished: BTreeMap::new(),
            steps_done: 0,
            limit,
            reads: BTreeMap::new(),
            events: 0,
            faults,
            job,
        };
        for id in (0..world.job.trainers).map(TrainerId) {
            let process = Process::trainer(id, world.job.settings, &world.job, Nanos(0));
            world.start(process);
        }
        for filler in world.view.clone().into_iter().flatten() {
            if let Filler::Server(id) = filler {
                world.start(Process::server(id, world.job.settings, Nanos(0)));
            }
        }
        world.net.local(Nanos(0), Peer::CONDUCTOR, Input::View);
        world.net.local(Nanos(1), Peer::CONDUCTOR, Input::Lengths(0));
        for (index, fault) in world.faults.list.iter().enumerate() {
            world.net.at(fault.0, Happening::Fault(index));
        }
        world
    }

    fn start(&mut self, process: Process) {
        self.net.at(self.now, Happening::Wake(process.peer));
        self.processes.insert(process.peer, process);
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
        Ok(Outcome { steps: self.steps_done, end: self.end, lost })
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
        let leaks = |it: &&Process| it.server.as_ref().is_some_and(|it| it.holds());
        match self.processes.values().filter(|it| !it.paused).find(leaks) {
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
            Happening::Resume(peer) => self.resume(peer),
            Happening::Spawn(index) => {
                self.spawn(index);
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
            return self.plan_wake(peer);
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

    fn plan_wake(&mut self, peer: Peer) -> Checked {
        let Some(process) = self.processes.get_mut(&peer) else { return Ok(()) };
        if let Some(deadline) = process.deadline().map(|it| it.max(self.now))
            && !process.paused
            && process.wake_at.is_none_or(|it| it > deadline)
        {
            process.wake_at = Some(deadline);
            self.net.at(deadline, Happening::Wake(peer));
        }
        Ok(())
    }

    /// Handles one input, and what the process sends to itself.
    fn handle(&mut self, to: Peer, input: Input) -> Checked {
        let mut process = self.processes.remove(&to).expect("only those that are there are called");
        let mut local = VecDeque::new();
        self.input(&mut process, input, &mut local)?;
        self.finish(process, local)
    }

    fn finish(&mut self, mut process: Process, mut local: VecDeque<Message>) -> Checked {
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
        self.plan_wake(peer)
    }

    fn input(
        &mut self,
        process: &mut Process,
        input: Input,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        match input {
            Input::Message { from, message } => self.message(process, from, message, local),
            Input::Header(step) => self.begin(process, step, local),
            Input::Pulled { machine: Machine::Trainer, pull, result } => {
                let found = result.map(|it| it.0);
                let event = trainer::Event::Pulled { pull, result: found };
                process.value = result.ok().map(|it| it.1);
                self.trainer_event(process, event, local)
            }
            Input::Pulled { machine: Machine::Server, pull, result } => {
                let found = result.map(|it| it.0);
                let event = server::Event::Pulled { pull, result: found };
                process.value = result.ok().map(|it| it.1);
                self.server_event(process, event, local)
            }
            Input::Closed(peer) => {
                self.trainer_event(process, trainer::Event::Closed(peer), local)?;
                self.server_event(process, server::Event::Closed(peer), local)?;
                self.conductor_event(process, conductor::Event::Closed(peer), local)
            }
            Input::Ran { at, works } => {
                let shell = process.server.as_mut().expect("only servers launch");
                shell.ran(&self.job, at, &works);
                self.server_event(process, server::Event::Ran { at, works }, local)
            }
            Input::Go => self.go(process, local),
            Input::View => {
                let view = self.view.clone();
                self.conductor_event(process, conductor::Event::View(view), local)
            }
            Input::Lengths(step) => {
                let phases = self.job.phases(step);
                self.conductor_event(process, conductor::Event::HeaderReady { step, phases }, local)
            }
        }
    }

    fn message(
        &mut self,
        process: &mut Process,
        from: Peer,
        message: Message,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        if let Message::Watermark { at } | Message::Pulse { watermark: Some(at) } = message {
            process.told = process.told.max(Some(at));
        }
        let audience = message.audience();
        if matches!(audience, Audience::Trainer | Audience::Members) {
            let message = message.clone();
            self.trainer_event(process, trainer::Event::Message { from, message }, local)?;
        }
        if matches!(audience, Audience::Server | Audience::Members) {
            let message = message.clone();
            self.server_event(process, server::Event::Message { from, message }, local)?;
        }
        if audience == Audience::Conductor {
            self.conductor_event(process, conductor::Event::Message { from, message }, local)?;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        process: &mut Process,
        step: u64,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let made = Arc::clone(&self.headers[&step]);
        process.steps.insert(step, made.clone());
        if let Some(shell) = &mut process.trainer {
            shell.begun.insert(step);
            let pause = Nanos(self.random.within(10_000, 1_000_000));
            self.net.local(self.now.after(pause), process.peer, Input::Go);
        }
        self.trainer_event(process, trainer::Event::Begin(made.clone()), local)?;
        self.server_event(process, server::Event::Begin(made), local)
    }

    fn go(&mut self, process: &mut Process, local: &mut VecDeque<Message>) -> Checked {
        let Some(shell) = &mut process.trainer else { return Ok(()) };
        let finished = &self.finished;
        let (all, barrier) = (self.job.trainers, self.job.all_reduce);
        let barrier = |step| !barrier || finished.get(&step) == Some(&all);
        if let Some(at) = shell.may_go(&self.job, barrier) {
            shell.submit(&self.job, at)?;
            let pause = Nanos(self.random.within(10_000, 1_000_000));
            self.net.local(self.now.after(pause), process.peer, Input::Go);
            self.trainer_event(process, trainer::Event::Submitted(at), local)?;
        }
        Ok(())
    }

    fn trainer_event(
        &mut self,
        process: &mut Process,
        event: trainer::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(shell) = &mut process.trainer else { return Ok(()) };
            let mut commands = Vec::new();
            shell.machine.handle(self.now, event, &mut commands);
            for command in commands {
                let Some(shell) = &mut process.trainer else { return Ok(()) };
                match command {
                    trainer::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    trainer::Command::Pull { pull, peer, at, work, deadline } => {
                        let what = What::Result(at, work);
                        let (by, machine) = (process.peer, Machine::Trainer);
                        let flight = Flight { by, machine, pull, from: peer, what };
                        self.net.pull(self.now, &mut self.random, flight, deadline);
                    }
                    trainer::Command::Accept { at, work, .. } => {
                        let value = process.value.ok_or("a failed pull was accepted")?;
                        shell.accept(&self.job, at, work, value)?;
                    }
                    trainer::Command::Discard { .. } => {}
                    trainer::Command::Complete(at) => {
                        let step = shell.whole(&self.job, at)?.then_some(at.step);
                        self.completed(process.peer, step);
                    }
                    trainer::Command::Release(at) => {
                        shell.release(at);
                        self.net.local(self.now, process.peer, Input::Go);
                    }
                    trainer::Command::StepOver(_) => {}
                    trainer::Command::Reassign { step, tables, .. } => {
                        let table = reassigned(&self.job, &process.steps[&step], &tables);
                        events.push_back(trainer::Event::Round(table));
                    }
                    trainer::Command::Close(peer) => {
                        self.net.close(self.now, &mut self.random, process.peer, peer);
                    }
                    trainer::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
        }
        Ok(())
    }

    /// A trainer has a whole phase: its next one may go. If its step is the last one to be whole, the
    /// all-reduce lets everybody go.
    fn completed(&mut self, peer: Peer, step: Option<u64>) {
        let pause = Nanos(self.random.within(10_000, 1_000_000));
        let when = self.now.after(pause);
        self.net.local(when, peer, Input::Go);
        if let Some(step) = step {
            let finished = self.finished.entry(step).or_insert(0);
            *finished += 1;
            if *finished == self.job.trainers {
                for id in (0..self.job.trainers).map(TrainerId) {
                    self.net.local(when, Peer::Trainer(id), Input::Go);
                }
            }
        }
    }

    fn server_event(
        &mut self,
        process: &mut Process,
        event: server::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(shell) = &mut process.server else { return Ok(()) };
            let mut commands = Vec::new();
            shell.machine.handle(self.now, event, &mut commands);
            for command in commands {
                let Some(shell) = &mut process.server else { return Ok(()) };
                match command {
                    server::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    server::Command::Pull { pull, peer, at, parcel, deadline } => {
                        shell.pull(&self.job, pull, at, parcel)?;
                        let (by, machine) = (process.peer, Machine::Server);
                        let (from, what) = (Peer::Trainer(peer), What::Rows(at, parcel));
                        let flight = Flight { by, machine, pull, from, what };
                        self.net.pull(self.now, &mut self.random, flight, deadline);
                    }
                    server::Command::Accept { pull, at, parcel } => {
                        if process.told >= Some(at) {
                            return Err(format!("{} took rows of passed {at:?}", process.peer));
                        }
                        let value = process.value.ok_or("a failed pull was accepted")?;
                        shell.accept(pull, at, parcel, value)?;
                    }
                    server::Command::Discard { pull } => shell.discard(pull),
                    server::Command::Ready { at, work } => shell.ready(&self.job, at, work)?,
                    server::Command::Cancel(at) => {
                        let works = shell.cancel(at);
                        if !works.is_empty() {
                            // Not computed: their results are freed as they are.
                            events.push_back(server::Event::Ran { at, works });
                        }
                    }
                    server::Command::FreeInput { at, parcel } => {
                        shell.free_input(&self.job, at, parcel)?;
                    }
                    server::Command::FreeResult { at, work } => {
                        shell.free_result(&self.job, at, work)?;
                    }
                    server::Command::StepOver(_) => {}
                    server::Command::Reassign { step, tables, .. } => {
                        let table = reassigned(&self.job, &process.steps[&step], &tables);
                        events.push_back(server::Event::Round(table));
                    }
                    server::Command::Close(peer) => {
                        self.net.close(self.now, &mut self.random, process.peer, peer);
                    }
                    server::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
            let most = self.random.within(1, 3) as usize;
            if let Some((at, works)) = process.server.as_mut().and_then(|it| it.launch(most)) {
                let span = Nanos(self.random.within(10_000, 800_000));
                let when = self.now.after(span);
                self.net.local(when, process.peer, Input::Ran { at, works });
            }
        }
        Ok(())
    }

    fn conductor_event(
        &mut self,
        process: &mut Process,
        event: conductor::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let Some(machine) = &mut process.conductor else { return Ok(()) };
            let mut commands = Vec::new();
            machine.handle(self.now, event, &mut commands);
            for command in commands {
                match command {
                    conductor::Command::Publish { step, fillers } => {
                        if !self.job.table(step, &fillers, &[]).1 {
                            self.headers.remove(&step);
                            let proposal = conductor::HEADER;
                            events.push_back(conductor::Event::Unplaceable { step, proposal });
                            continue;
                        }
                        if step + 1 < self.job.steps && !self.headers.contains_key(&step) {
                            let when = self.now.after(Nanos(self.random.within(10_000, 3_000_000)));
                            self.net.local(when, Peer::CONDUCTOR, Input::Lengths(step + 1));
                        }
                        self.headers.insert(step, self.job.step(step, &fillers));
                    }
                    conductor::Command::Header { step, .. }
                        if !self.headers.contains_key(&step) => {}
                    conductor::Command::Header { step, to } if to == process.peer => {
                        self.net.local(self.now, to, Input::Header(step));
                    }
                    conductor::Command::Header { step, to } => {
                        let input = Input::Header(step);
                        self.net.send(self.now, &mut self.random, process.peer, to, input);
                    }
                    conductor::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    conductor::Command::Propose { step, proposal, tables } => {
                        let header = &self.headers[&step].table().fillers;
                        let (_, placed) = self.job.table(step, header, &tables);
                        events.push_back(answer(placed, step, proposal));
                    }
                    conductor::Command::DeclareLost(id) => self.declared(id),
                    conductor::Command::PoolLost { .. } | conductor::Command::Filled { .. } => {}
                    conductor::Command::StepDone(step) => self.steps_done = step + 1,
                    conductor::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, from: Peer, to: Peer, message: Message, local: &mut VecDeque<Message>) {
        if from == to {
            local.push_back(message);
        } else {
            let input = Input::Message { from, message };
            self.net.send(self.now, &mut self.random, from, to, input);
        }
    }

    /// The request of a pull has reached the far side.
    fn read(&mut self, id: u64) {
        let Some(&Flight { from, what, .. }) = self.net.flights.get(&id) else { return };
        let shared = self.job.shared_memory;
        let found = match from {
            // Whoever has the memory now answers, under his own incarnation.
            Peer::Server(asked) if shared => {
                let newest =
                    |it: &&Process| matches!(it.peer, Peer::Server(id) if id.index == asked.index);
                self.processes.values().rev().find(newest)
            }
            Peer::Server(_) | Peer::Trainer(_) => self.processes.get(&from),
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

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(index) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    self.kill(peer);
                    self.replace(index);
                }
            }
            Fault::KillTrainer(index) => {
                self.trainer_died = true;
                self.kill(Peer::Trainer(TrainerId(index)));
            }
            Fault::PauseServer(index, span) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    self.pause(peer, span);
                }
            }
            Fault::PauseTrainer(index, span) => self.pause(Peer::Trainer(TrainerId(index)), span),
            Fault::Cut(trainer, index, span) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    let until = self.now.after(span);
                    let trainer = Peer::Trainer(TrainerId(trainer));
                    self.net.cut(self.now, &mut self.random, trainer, peer, until);
                }
            }
            Fault::Blip(a, b) => {
                let (a, b) = (Peer::Trainer(TrainerId(a)), Peer::Trainer(TrainerId(b)));
                self.net.cut(self.now, &mut self.random, a, b, self.now);
            }
        }
    }

    fn kill(&mut self, peer: Peer) {
        if self.processes.remove(&peer).is_some() {
            self.net.died(self.now, &mut self.random, peer);
            if !self.job.shared_memory {
                self.net.fail(self.now, |it| it.from == peer, PullFailure::PeerFailed);
            }
        }
    }

    fn replace(&mut self, index: u16) {
        if self.faults.replace {
            let when = self.now.after(Nanos(self.random.within(100_000, 200_000_000)));
            self.net.at(when, Happening::Spawn(index));
        } else {
            self.view[usize::from(index)] = None;
        }
    }

    fn spawn(&mut self, index: u16) {
        let incarnation = self.incarnations.entry(index).or_insert(0);
        *incarnation += 1;
        let id = ServerId { index, incarnation: *incarnation };
        self.view[usize::from(index)] = Some(Filler::Server(id));
        let process = Process::server(id, self.job.settings, self.now);
        self.start(process);
        let when = self.now.after(self.net.delay(&mut self.random));
        self.net.local(when, Peer::CONDUCTOR, Input::View);
    }

    fn declared(&mut self, id: ServerId) {
        self.lost.insert(id);
        let newest = self.incarnations.get(&id.index).copied().unwrap_or(0);
        // A supervisor kills what was given up, or leaves it alone to come back one day.
        let there = self.processes.contains_key(&Peer::Server(id));
        if self.random.chance(50) {
            self.kill(Peer::Server(id));
        }
        if there && newest == id.incarnation {
            self.replace(id.index);
        }
    }

    fn pause(&mut self, peer: Peer, span: Nanos) {
        if let Some(process) = self.processes.get_mut(&peer).filter(|it| !it.paused) {
            process.paused = true;
            self.net.at(self.now.after(span), Happening::Resume(peer));
        }
    }

    fn resume(&mut self, peer: Peer) -> Checked {
        let Some(process) = self.processes.get_mut(&peer) else { return Ok(()) };
        process.paused = false;
        let mut inbox = std::mem::take(&mut process.inbox);
        if self.random.chance(50) {
            // Data is looked at before messages: old beliefs meet new rows.
            inbox.sort_by_key(|it| !matches!(it, Input::Pulled { .. }));
        }
        let mut when = self.now;
        for input in inbox {
            when = when.after(Nanos(1));
            self.net.local(when, peer, input);
        }
        for id in self.reads.remove(&peer).unwrap_or_default() {
            self.net.at(when, Happening::Read(id));
        }
        self.plan_wake(peer)
    }

    fn ended(&mut self, peer: Peer, end: End) -> Checked {
        let in_place = self.job.slots.iter().flatten().any(|it| matches!(it, Filler::InPlace(_)));
        let fine = match &end {
            End::DeclaredLost(id) => return self.left(peer, *id),
            End::TrainerDead(_) | End::ConductorSilent(_) => self.trainer_died,
            End::PoolLost { .. } => {
                let local = self.job.settings.on_pool_loss == OnPoolLoss::Local;
                !self.lost.is_empty() && !local && (!in_place || self.job.picky)
            }
            End::Digest { .. } | End::Memory { .. } | End::Flooded { .. } | End::Rounds { .. } => {
                false
            }
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

fn answer(placed: bool, step: u64, proposal: u64) -> conductor::Event {
    if placed {
        conductor::Event::Placed { step, proposal }
    } else {
        conductor::Event::Unplaceable { step, proposal }
    }
}
