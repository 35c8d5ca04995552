//! One server whose memory just fits its largest step: the earliest phase always runs to its end.
//!
//! In: a seed, of which a job is made with two steps live at a time. They begin here in any order,
//! trainers ring what their window allows, also for steps that have not begun here, pulls fail, other
//! servers are lost. Out: what is wrong. Nothing but the server is simulated.
//!
//! Now and then the earliest phase that is not passed becomes due: its step begins, all trainers ring for
//! it, and whatever waits for nobody ends. Then it has to be done, whatever later phases have of the
//! memory. The server may never end the job for want of memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_protocol::server::{Command, Event, Host};
use cadre_protocol::{
    Acks, At, Bundle, Filler, Fillers, Message, Nanos, Peer, PullFailure, PullId, Round,
    RoundTable, TrainerId, Work,
};

use crate::job::{Job, Running, row};
use crate::process::ServerShell;
use crate::random::Random;

const STEPS: u64 = 6;

/// What ends one day without anybody's help.
#[derive(Debug)]
enum Pending {
    Pull(PullId),
    Launch(At, Vec<Work>),
    Ack(TrainerId, At, Vec<Work>),
}

struct Alone {
    job: Job,
    random: Random,
    host: Host,
    slot: usize,
    shell: ServerShell,
    now: Nanos,
    /// All phases of the job, in order.
    phases: Vec<At>,
    /// How many of them are passed, and how many each trainer has rung for.
    passed: usize,
    rung: Vec<usize>,
    steps: BTreeMap<u64, (Running, Vec<Fillers>, Arc<RoundTable>)>,
    pending: Vec<Pending>,
    ran: BTreeSet<(At, Work)>,
}

/// Runs one server through a job.
pub(crate) fn alone(seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed);
    let job = Job::new(&mut random, STEPS);
    let standby = |it: &usize| matches!(job.slots[*it], Some(Filler::Standby(_)));
    let slots: Vec<_> = (0..job.slots.len()).filter(|it| !standby(it)).collect();
    let slot = *random.pick(&slots);
    let host = match job.slots[slot] {
        Some(Filler::Server(id)) => Host::Dedicated(id),
        Some(Filler::InPlace(id) | Filler::Standby(id)) => Host::InPlace(id),
        None => return Err("a slot is vacant".into()),
    };
    let phases = |step| (0..job.phases(step)).map(move |it| At::new(step, it));
    let phases = (0..STEPS).flat_map(phases).collect();
    let mut alone = Alone {
        shell: ServerShell::new(host, &job, Nanos(0)),
        now: Nanos(0),
        phases,
        passed: 0,
        rung: vec![0; usize::from(job.trainers)],
        steps: BTreeMap::new(),
        pending: Vec::new(),
        ran: BTreeSet::new(),
        job,
        random,
        host,
        slot,
    };
    while alone.passed < alone.phases.len() {
        alone.act()?;
    }
    if alone.shell.holds() { Err("it holds memory after the last step".into()) } else { Ok(()) }
}

impl Alone {
    /// Whether a step's header is out, and it is not over.
    fn live(&self, step: u64) -> bool {
        let first = self.phases[self.passed].step;
        (first..first + 2).contains(&step) && step < STEPS
    }

    fn act(&mut self) -> Result<(), String> {
        self.now = self.now.after(Nanos(self.random.within(0, 1_000_000)));
        match self.random.within(0, 19) {
            0..2 => {
                let step = self.phases[self.passed].step + self.random.within(0, 1);
                if self.live(step) { self.begin(step) } else { Ok(()) }
            }
            2..9 => {
                let trainer = self.random.within(0, u64::from(self.job.trainers) - 1) as usize;
                let next = self.rung[trainer];
                let ahead = next - self.passed.min(next);
                let at = self.phases.get(next).filter(|it| self.live(it.step)).copied();
                match at.filter(|_| ahead < self.job.settings.window) {
                    Some(at) => self.ring(trainer, at),
                    None => Ok(()),
                }
            }
            9..17 => self.finish_one(85),
            17 => self.lose(),
            18 => self.handle(Event::Tick),
            _ => self.earliest_phase_ends(),
        }
    }

    fn begin(&mut self, step: u64) -> Result<(), String> {
        if self.steps.contains_key(&step) {
            return Ok(());
        }
        let mut fillers = self.job.slots.clone();
        for (slot, filler) in fillers.iter_mut().enumerate() {
            if slot != self.slot && self.random.chance(20) {
                *filler = None;
            }
        }
        let made = self.job.step(step, &fillers);
        let made = made.or_else(|| self.job.step(step, &self.job.slots));
        let running = made.ok_or("a bundle has no slot")?;
        let (begun, table) = (Arc::clone(&running.step), Arc::clone(running.step.table()));
        self.steps.insert(step, (running, Vec::new(), table));
        self.handle(Event::Begin(begun))
    }

    fn ring(&mut self, trainer: usize, at: At) -> Result<(), String> {
        self.rung[trainer] += 1;
        let digest = crate::random::hash(&[at.step]);
        let (round, acks) = (Round(0), Acks::default());
        let from = Peer::Trainer(TrainerId(trainer as u16));
        let message = Message::Doorbell { at, round, acks, digest };
        self.handle(Event::Message { from, message })
    }

    /// Another server of a step that has begun is lost.
    fn lose(&mut self) -> Result<(), String> {
        let live = self.steps.iter_mut().filter(|it| *it.0 >= self.phases[self.passed].step);
        let mut live: Vec<_> = live.collect();
        if live.is_empty() {
            return Ok(());
        }
        let index = self.random.within(0, live.len() as u64 - 1) as usize;
        let (running, tables, table) = &mut *live[index].1;
        let mut fillers = table.fillers.clone();
        let slot = self.random.within(0, fillers.len() as u64 - 1) as usize;
        if slot == self.slot || fillers[slot].take().is_none() {
            return Ok(());
        }
        tables.push(fillers);
        let Ok(next) = self.job.table(running, tables) else {
            tables.pop();
            return Ok(());
        };
        *table = Arc::clone(&next);
        self.handle(Event::Round(next))
    }

    /// Something that waits for nobody ends, a pull well in `well` of 100 cases.
    fn finish_one(&mut self, well: u64) -> Result<(), String> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let index = self.random.within(0, self.pending.len() as u64 - 1) as usize;
        match self.pending.swap_remove(index) {
            Pending::Pull(pull) if !self.random.chance(well) => {
                self.handle(Event::Pulled { pull, result: Err(PullFailure::PeerFailed) })
            }
            Pending::Pull(pull) => self.handle(Event::Pulled { pull, result: Ok(0) }),
            Pending::Launch(at, works) => {
                self.shell.ran(&self.job, at, &works);
                self.ran.extend(works.iter().map(|it| (at, *it)));
                self.handle(Event::Ran { at, works })
            }
            Pending::Ack(from, at, works) => {
                let works = works.into_iter().map(|it| (at, it)).collect();
                let message = Message::Ack { acks: Acks { through: None, works } };
                self.handle(Event::Message { from: Peer::Trainer(from), message })
            }
        }
    }

    /// The earliest phase is due: it has to be done when nothing more ends by itself.
    fn earliest_phase_ends(&mut self) -> Result<(), String> {
        let at = self.phases[self.passed];
        self.begin(at.step)?;
        for trainer in 0..self.rung.len() {
            while self.rung[trainer] <= self.passed {
                self.ring(trainer, self.phases[self.rung[trainer]])?;
            }
        }
        loop {
            while !self.pending.is_empty() {
                self.finish_one(100)?;
            }
            // Pulls that failed are tried again.
            self.now = self.now.after(Nanos::from_millis(3));
            self.handle(Event::Tick)?;
            if self.pending.is_empty() {
                break;
            }
        }
        self.done(at)?;
        self.passed += 1;
        let message = Message::Watermark { at };
        self.handle(Event::Message { from: Peer::CONDUCTOR, message })
    }

    /// Whether all work of a phase that this server has to do was done.
    fn done(&self, at: At) -> Result<(), String> {
        let (running, _, table) = &self.steps[&at.step];
        let index = running.step.shape_index(at.phase);
        let mine = |bundle: Bundle| match (self.host, table.executor(index, bundle)) {
            (Host::Dedicated(me), Some(Peer::Server(it))) => me == it,
            (Host::InPlace(me), Some(Peer::Trainer(it))) => me == it,
            (Host::Dedicated(_) | Host::InPlace(_), _) => false,
        };
        let works = (0..).map(Work).zip(self.job.shape(at).works());
        let undone = |it: &(Work, cadre_protocol::WorkOf<'_>)| {
            mine(it.1.bundle) && !self.ran.contains(&(at, it.0))
        };
        match { works }.find(undone) {
            Some((work, _)) => {
                Err(format!("{work:?} of {at:?} waits for ever: {:?}", self.shell.machine))
            }
            None => Ok(()),
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut commands = Vec::new();
            self.shell.machine.handle(self.now, event, &mut commands);
            for command in commands {
                self.carry_out(command, &mut events)?;
            }
            let most = self.random.within(1, 3) as usize;
            if let Some((at, works)) = self.shell.launch(most) {
                self.pending.push(Pending::Launch(at, works));
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, command: Command, events: &mut VecDeque<Event>) -> Result<(), String> {
        let (job, shell) = (&self.job, &mut self.shell);
        match command {
            Command::Send { to: Peer::Trainer(to), message: Message::Finished { at, works } } => {
                self.pending.push(Pending::Ack(to, at, works));
            }
            Command::Pull { pull, at, parcel, .. } => {
                shell.pull(job, pull, at, parcel)?;
                self.pending.push(Pending::Pull(pull));
            }
            Command::Accept { pull, at, parcel } => {
                let from = job.shape(at).parcels()[parcel.0 as usize].from;
                shell.accept(pull, at, parcel, row(from, at, parcel))?;
            }
            Command::Discard { pull } => shell.discard(pull),
            Command::Ready { at, work } => shell.ready(job, at, work)?,
            Command::Ahead { at, works } => shell.ahead(job, at, &works)?,
            Command::Cancel(at) => {
                let works = shell.cancel(at);
                if !works.is_empty() {
                    events.push_back(Event::Ran { at, works });
                }
            }
            Command::FreeInput { at, parcel } => shell.free_input(job, at, parcel)?,
            Command::FreeResult { at, work } => shell.free_result(job, at, work)?,
            Command::End(end) => return Err(format!("it ended: {end}")),
            Command::Send { .. }
            | Command::StepOver(_)
            | Command::Reassign { .. }
            | Command::Close(_) => {}
        }
        Ok(())
    }
}
