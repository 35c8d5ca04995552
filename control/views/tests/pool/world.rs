//! A pool, its cluster and its workers.
//!
//! Workers do what real ones do: they greet, listen once welcomed, take views, say what they were told when
//! they come back, and go when drained. The checks of every test are here: numbers of views rise, a server
//! is offered only to the job that it was welcomed to, and is let go only after a step that has used a
//! view without it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use cadre_views::{
    Command, Facts, Fate, Health, Hello, Input, JobFacts, JobKey, Kind, Pool, ServerId, Trouble,
    View, Who,
};

use super::rest::Rest;

pub(crate) fn key(job: &str) -> JobKey {
    JobKey { namespace: "n".into(), name: job.into(), attempt: 1 }
}

#[derive(Default)]
pub(crate) struct Worker {
    pub(crate) hello: Hello,
    pub(crate) job: Option<JobKey>,
    pub(crate) drained: bool,
    pub(crate) terminating: bool,
}

/// Whether a view offers this start of a server.
pub(crate) fn names(view: &View, id: ServerId) -> bool {
    let servers = view.slots.iter().filter(|it| it.kind == Kind::Dedicated);
    let mut servers = servers.filter_map(|it| it.server.as_ref());
    servers.any(|it| (it.index, it.incarnation) == (id.index, id.incarnation))
}

pub(crate) struct World {
    pool: Pool,
    pub(crate) now: Duration,
    pub(crate) facts: Facts,
    pub(crate) workers: BTreeMap<Who, Worker>,
    held_back: BTreeSet<Who>,
    /// The last view that a finished step has used, by job.
    pub(crate) stepped: BTreeMap<JobKey, View>,
    pub(crate) reproducible: bool,
    /// Slots that jobs keep though they do not use them.
    pub(crate) keeps: Option<u32>,
    /// Jobs of which no step is out, or one that computes nothing for the time being.
    pub(crate) resting: BTreeMap<JobKey, Rest>,
    /// Jobs that go on, of which no server has said so yet.
    pub(crate) awake: BTreeSet<JobKey>,
    /// Servers that ask their conductor whether they may leave, and whether they stay for another job.
    pub(crate) asking: BTreeMap<Who, bool>,
    /// Number of the run that jobs begin; their secrets are made of it.
    pub(crate) run: u8,
    /// Whether connections break before a drain is heard.
    pub(crate) loses_drains: bool,
    /// Of the workers that start from now on.
    pub(crate) data_version: u32,
    /// Who was refused, and why; none may be, where there is no list.
    pub(crate) refused: Option<Vec<String>>,
    /// What is to be obeyed still, the first of them just now.
    commands: VecDeque<Command>,
    /// What people were told.
    pub(crate) notices: Vec<String>,
}

impl World {
    pub(crate) fn new(term: u64, servers: u32) -> Self {
        let health = Health {
            report_timeout: Duration::from_secs(10),
            reshape_after: Duration::from_mins(10),
            slow_factor_percent: 150,
            quarantine_after: 3,
        };
        let facts = Facts {
            slots: (0..servers).collect(),
            servers: BTreeMap::new(),
            jobs: BTreeSet::new(),
            in_place: false,
            cap: None,
            health,
        };
        let mut world = Self {
            pool: Pool::new(term),
            now: Duration::ZERO,
            facts,
            workers: BTreeMap::new(),
            held_back: BTreeSet::new(),
            stepped: BTreeMap::new(),
            reproducible: false,
            keeps: Some(1),
            resting: BTreeMap::new(),
            awake: BTreeSet::new(),
            asking: BTreeMap::new(),
            run: 7,
            loses_drains: false,
            data_version: 3,
            refused: None,
            commands: VecDeque::new(),
            notices: Vec::new(),
        };
        world.tell_facts();
        for index in 0..servers {
            world.start_server(ServerId { index, incarnation: 0 });
        }
        world
    }

    pub(crate) fn put(&mut self, input: Input) {
        let mut out = Vec::new();
        self.pool.handle(self.now, input, &mut out);
        let is_first = self.commands.is_empty();
        self.commands.extend(out);
        // What follows from obeying one comes after those that were there before.
        while let Some(command) = self.commands.front().filter(|_| is_first).cloned() {
            self.obey(command);
            self.commands.pop_front();
        }
    }

    pub(crate) fn tell_facts(&mut self) {
        self.put(Input::Facts(self.facts.clone()));
    }

    fn job_facts(&self, job: &JobKey) -> JobFacts {
        let of_job = |it: &&Who| matches!(it, Who::Trainer(of, _) if of == job);
        let trainers = self.workers.keys().filter(of_job).count() as u32;
        JobFacts { trainers, reproducible: self.reproducible, share: 100, keeps: self.keeps }
    }

    pub(crate) fn greet(&mut self, who: &Who) {
        let hello = self.workers[who].hello.clone();
        let facts = match who {
            Who::Server(_) => None,
            Who::Trainer(job, _) => Some(self.job_facts(job)),
        };
        self.put(Input::Attached(who.clone(), hello, facts));
        if self.workers.get(who).is_some_and(|it| it.terminating) {
            self.put(Input::Leaving(who.clone()));
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Welcome { to, job, secret, .. } => {
                let conductor = self.workers.get(&Who::Trainer(job.clone(), 0));
                let own = conductor.map(|it| it.hello.secret.clone());
                let Some(worker) = self.workers.get_mut(&to) else { return };
                if let Some(own) = own.filter(|_| worker.hello.session.is_empty()) {
                    assert_eq!(secret, own, "{to} of {job}");
                }
                worker.hello.session = job.to_string();
                worker.job = Some(job);
                if worker.hello.address.is_empty() {
                    worker.hello.address = to.to_string();
                    let (address, ring) = (to.to_string(), format!("ring of {to}"));
                    self.put(Input::Listening(to, address, ring));
                }
            }
            Command::View(to, view) => {
                let Who::Trainer(job, 0) = &to else { panic!("a view for {to}") };
                let job = job.clone();
                for slot in view.slots.iter().filter(|it| it.kind == Kind::Dedicated) {
                    let Some(server) = &slot.server else { continue };
                    let id = ServerId { index: server.index, incarnation: server.incarnation };
                    // One that was killed may be offered until somebody says so.
                    if let Some(worker) = self.workers.get(&Who::Server(id)) {
                        assert_eq!(worker.job.as_ref(), Some(&job), "server {id:?} of another job");
                        assert!(!worker.drained, "{id:?} was let go");
                    }
                }
                let worker = self.workers.get_mut(&to).expect("the conductor lives");
                if let Some(last) = &worker.hello.view {
                    assert!(last.number < view.number, "{last:?} then {view:?}");
                }
                worker.hello.view = Some(view);
            }
            Command::Drain { .. } if self.loses_drains => {}
            Command::Drain { to, stays, over } => {
                let Who::Server(id) = to else { panic!("a drain for {to}") };
                let worker = self.workers.get_mut(&to).expect("it is connected");
                let job = worker.job.clone().expect("who works is drained");
                let named = |view: &View| names(view, id);
                let is_between = self.resting.get(&job) == Some(&Rest::Between);
                if !over && !is_between {
                    let used = self.stepped.get(&job).is_some_and(named);
                    if used && self.awake.contains(&job) {
                        // Its header and the drain have met on their way.
                        self.asking.insert(to, stays);
                        return;
                    }
                    assert!(!used, "{id:?} may have work of the step in progress");
                }
                self.leave(&to, stays);
            }
            Command::Refuse(who, reason) => {
                self.workers.remove(&who);
                self.refused.as_mut().unwrap_or_else(|| panic!("{who}: {reason}")).push(reason);
            }
            Command::Postpone(who, reason) => panic!("{who}: {reason}"),
            Command::Notice(reason, text) => self.notices.push(format!("{reason}: {text}")),
            Command::Conductor(..) | Command::Trainers(..) => {}
        }
    }

    pub(crate) fn start_server(&mut self, id: ServerId) {
        self.facts.servers.insert(id, Fate::Stays);
        self.tell_facts();
        let who = Who::Server(id);
        let hello = Hello { data_version: self.data_version, ..Hello::default() };
        self.workers.insert(who.clone(), Worker { hello, ..Worker::default() });
        self.greet(&who);
    }

    /// Another process comes under the name of a worker.
    pub(crate) fn come_as(&mut self, who: &Who) {
        let hello = Hello { data_version: self.data_version, ..Hello::default() };
        let own = self.workers.insert(who.clone(), Worker { hello, ..Worker::default() });
        self.greet(who);
        self.workers.insert(who.clone(), own.expect("the worker is there"));
    }

    pub(crate) fn start_job(&mut self, job: &str, trainers: u32, in_place: bool) {
        self.facts.in_place = in_place;
        self.make_trainers(job, trainers);
        // The conductor comes last: the others wait for it.
        for rank in (0..trainers).rev() {
            self.greet(&Who::Trainer(key(job), rank));
        }
        self.step(job);
    }

    pub(crate) fn make_trainers(&mut self, job: &str, trainers: u32) {
        let key = key(job);
        self.facts.jobs.insert(key.clone());
        self.tell_facts();
        for rank in 0..trainers {
            let secret = if rank == 0 { vec![self.run; 32] } else { Vec::new() };
            let data_version = self.data_version;
            let hello = Hello { secret, data_version, ..Hello::default() };
            self.workers
                .insert(Who::Trainer(key.clone(), rank), Worker { hello, ..Worker::default() });
        }
    }

    /// Why a job has no servers.
    pub(crate) fn unserved(&self, job: &str) -> Option<&'static str> {
        self.pool.unserved(self.now).find(|it| *it.0 == key(job)).map(|it| it.1.reason())
    }

    pub(crate) fn share(&mut self, job: &str, share: u32) {
        self.put(Input::Share(key(job), share));
    }

    /// Servers that work for a job, as they are told.
    pub(crate) fn held_by(&self, job: &str) -> usize {
        self.pool.holders().filter(|it| *it.1 == key(job)).count()
    }

    /// Slots of a job's share that others have.
    pub(crate) fn lent_by(&self, job: &str) -> u32 {
        self.pool.lent().find(|it| *it.0 == key(job)).map_or(0, |it| it.1)
    }

    /// The conductor finishes a step with the newest view.
    pub(crate) fn step(&mut self, job: &str) {
        let Some(conductor) = self.workers.get(&Who::Trainer(key(job), 0)) else { return };
        let Some(view) = conductor.hello.view.clone() else { return };
        let number = view.number;
        self.stepped.insert(key(job), view);
        self.put(Input::Stepped(key(job), number));
        self.answer(job);
    }

    /// Trainers and pods are gone, and nobody tells the controller, which is away.
    pub(crate) fn vanish(&mut self, job: &str) {
        let key = key(job);
        self.workers.retain(|who, _| !matches!(who, Who::Trainer(of, _) if *of == key));
        self.facts.jobs.remove(&key);
    }

    pub(crate) fn finish(&mut self, job: &str) {
        let key = key(job);
        self.put(Input::Finished(key.clone()));
        let trainers: Vec<Who> = self
            .workers
            .keys()
            .filter(|it| matches!(it, Who::Trainer(of, _) if *of == key))
            .cloned()
            .collect();
        for who in trainers {
            self.workers.remove(&who);
            self.put(Input::Detached(who));
        }
        self.facts.jobs.remove(&key);
        self.tell_facts();
    }

    /// Its connection breaks; its pod follows.
    pub(crate) fn kill(&mut self, id: ServerId) {
        if self.workers.remove(&Who::Server(id)).is_some() {
            self.put(Input::Detached(Who::Server(id)));
        }
    }

    pub(crate) fn lose(&mut self, job: &str, id: ServerId) {
        self.put(Input::Lost(key(job), id));
        self.facts.servers.remove(&id);
        self.tell_facts();
    }

    pub(crate) fn terminate(&mut self, id: ServerId) {
        if let Some(worker) = self.workers.get_mut(&Who::Server(id)) {
            worker.terminating = true;
            self.put(Input::Leaving(Who::Server(id)));
        }
    }

    pub(crate) fn mark(&mut self, id: ServerId, fate: Fate) {
        if let Some(known) = self.facts.servers.get_mut(&id) {
            *known = fate;
        }
        self.tell_facts();
    }

    /// Wants so many slots; the highest go first, drained.
    pub(crate) fn want(&mut self, slots: u32) {
        self.facts.slots = (0..slots).collect();
        for (id, fate) in &mut self.facts.servers {
            if id.index >= slots {
                *fate = Fate::Drains;
            }
        }
        self.tell_facts();
    }

    /// Does not come back to another controller.
    pub(crate) fn hold_back(&mut self, who: Who) {
        self.held_back.insert(who);
    }

    pub(crate) fn change_controller(&mut self, term: u64) {
        self.pool = Pool::new(term);
        self.tell_facts();
        for who in self.workers.keys().cloned().collect::<Vec<_>>() {
            if !self.held_back.contains(&who) && !self.workers[&who].drained {
                self.greet(&who);
            }
        }
    }

    pub(crate) fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.put(Input::Tick);
        }
    }

    pub(crate) fn last(&self, job: &str) -> Option<&View> {
        self.workers.get(&Who::Trainer(key(job), 0))?.hello.view.as_ref()
    }

    /// `TERM.COUNTER: SLOTS`; `D1.0` is incarnation 0 of server 1, `D-` a vacant slot, `I0.0` in place.
    pub(crate) fn view(&self, job: &str) -> String {
        let Some(view) = self.last(job) else { return String::new() };
        let slots = view.slots.iter().map(|slot| {
            let kind = if slot.kind == Kind::Dedicated { "D" } else { "I" };
            let who = slot.server.as_ref();
            let who = who.map_or("-".into(), |it| format!("{}.{}", it.index, it.incarnation));
            format!(" {kind}{who}")
        });
        format!("{}.{}:{}", view.number.term, view.number.counter, slots.collect::<String>())
    }

    pub(crate) fn weights(&self, job: &str) -> Vec<u32> {
        self.last(job).iter().flat_map(|it| &it.slots).map(|it| it.weight).collect()
    }

    pub(crate) fn waiting(&self) -> BTreeSet<ServerId> {
        let waits = |(who, worker): (&Who, &Worker)| match who {
            Who::Server(id) if worker.job.is_none() && !worker.drained => Some(*id),
            Who::Server(_) | Who::Trainer(..) => None,
        };
        self.workers.iter().filter_map(waits).collect()
    }

    pub(crate) fn is_drained(&self, id: ServerId) -> bool {
        self.pool.reports(self.now).get(&id).is_some_and(|it| it.drained)
    }

    pub(crate) fn trouble(&self, id: ServerId) -> Option<Trouble> {
        self.pool.reports(self.now).get(&id)?.trouble
    }

    pub(crate) fn servers(&self) -> Vec<ServerId> {
        self.facts.servers.keys().copied().collect()
    }
}
