//! Decides about one pool: who is welcome, which job a server works for, what views say, who leaves.
//!
//! In: [`Input`]s with the time. Out: [`Command`]s, to be carried out in order. A server leaves a job in one
//! way: a view without it, a step that has used that view, then [`Command::Drain`].
//!
//! ```text
//! input ──▶ noted here ──▶ settled: divide slots ──▶ welcome ──▶ fill, weigh, views ──▶ drains
//! ```
//!
//! Invariants: a server is offered to the job that it was welcomed to and to no other; numbers of views only
//! rise; the last healthy server is never kept out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::job::{Job, Rank, SLOTS_KEPT_FOR};
use crate::load::{Load, Trouble, reference};
use crate::server::Member;
use crate::types::{
    Command, Facts, Hello, Input, JobFacts, JobKey, ServerId, ServerReport, Unserved, Who,
};

/// See the module.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Lease transitions of this controller.
    pub(crate) term: u64,
    pub(crate) facts: Option<Facts>,
    /// When the first facts came.
    pub(crate) since: Option<Duration>,
    pub(crate) jobs: BTreeMap<JobKey, Job>,
    pub(crate) servers: BTreeMap<ServerId, Member>,
    /// Loads of in-place servers.
    pub(crate) in_place: BTreeMap<(JobKey, u32), Load>,
    /// When the facts named the pods of an attempt first.
    expected: BTreeMap<JobKey, Duration>,
    arrivals: u64,
    /// Slots of the shares of jobs that others have, who use them.
    pub(crate) lent: BTreeMap<JobKey, u32>,
}

impl Pool {
    /// A pool without workers.
    pub fn new(term: u64) -> Self {
        Self {
            term,
            facts: None,
            since: None,
            jobs: BTreeMap::new(),
            servers: BTreeMap::new(),
            in_place: BTreeMap::new(),
            expected: BTreeMap::new(),
            arrivals: 0,
            lent: BTreeMap::new(),
        }
    }

    /// Takes an input, and does what follows from it.
    pub fn handle(&mut self, now: Duration, input: Input, out: &mut Vec<Command>) {
        self.note(now, input, out);
        self.settle(now, out);
    }

    /// Takes an input alone: what follows from it and others together is [`Self::settle`]'s, which looks at every
    /// server.
    pub fn note(&mut self, now: Duration, input: Input, out: &mut Vec<Command>) {
        match input {
            Input::Facts(facts) => {
                self.since.get_or_insert(now);
                self.expected.retain(|it, _| facts.jobs.contains(it));
                for job in &facts.jobs {
                    self.expected.entry(job.clone()).or_insert(now);
                }
                self.facts = Some(facts);
            }
            Input::Attached(who, hello, job) => self.attached(now, who, hello, job, out),
            Input::Detached(who) => self.detached(now, &who),
            Input::Listening(who, address, ring) => self.listening(&who, address, ring, out),
            Input::Reported(who, report) => self.reported(now, &who, report),
            Input::Stepped(key, number) => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.confirmed = job.confirmed.max(Some(number));
                    job.usage.stepped(now);
                }
            }
            Input::Lacking(key) => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.usage.lacks(now);
                }
            }
            Input::Lost(key, id) => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.usage.uses(now);
                }
                if let Some(server) = self.servers.get_mut(&id).filter(|it| it.job == Some(key)) {
                    server.trouble = Some(Trouble::Lost);
                    server.drained = true;
                    let text = format!("the conductor has given {} up", Who::Server(id));
                    out.push(Command::Notice("ServerLost", text));
                }
            }
            Input::Leaving(who) => {
                if let Some(server) = self.server(&who) {
                    server.dismiss(false);
                }
            }
            Input::Drained(who) => {
                if let Some(server) = self.server(&who) {
                    server.drained = server.leave.is_none_or(|it| !it.stays);
                }
            }
            Input::Finished(key) => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.finished = true;
                }
            }
            Input::Share(key, share) => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.facts.share = share;
                }
            }
            Input::Tick => {}
        }
    }

    /// Reports of the servers that have connected.
    pub fn reports(&self, now: Duration) -> BTreeMap<ServerId, ServerReport> {
        let Some(facts) = &self.facts else { return BTreeMap::new() };
        let present = self.servers.iter().filter(|(_, it)| it.away.is_none() || it.drained);
        let report = |it: &Member| {
            let figure = it.load.figure(now, facts.health);
            ServerReport {
                figure,
                trouble: it.trouble,
                drained: it.drained,
                data_version: it.data_version(),
                serves: it.job.is_some(),
            }
        };
        present.map(|(&id, it)| (id, report(it))).collect()
    }

    /// The attempts that connected servers work for.
    pub fn holders(&self) -> impl Iterator<Item = (ServerId, &JobKey)> {
        let present = self.servers.iter().filter(|it| it.1.away.is_none());
        present.filter_map(|(&id, it)| Some((id, it.job.as_ref()?)))
    }

    /// The jobs that have no servers though their pods are there, and why.
    pub fn unserved(&self, now: Duration) -> impl Iterator<Item = (&JobKey, Unserved)> {
        let active = self.jobs.iter().filter(|it| it.1.is_active());
        let active = active.filter_map(|(key, it)| Some((key, it.unserved?)));
        let is_late = move |it: &(&JobKey, &Duration)| now >= *it.1 + SLOTS_KEPT_FOR;
        let has_come =
            |it: &JobKey| self.jobs.get(it).is_some_and(|it| it.is_over() || it.is_active());
        let late = self.expected.iter().filter(is_late).map(|it| it.0);
        active.chain(late.filter(move |it| !has_come(it)).map(|it| (it, Unserved::NotCome)))
    }

    /// Jobs that do not use all of their shares, and how many slots others have of each.
    pub fn lent(&self) -> impl Iterator<Item = (&JobKey, u32)> {
        self.lent.iter().map(|(key, it)| (key, *it))
    }

    /// Trainers that serve in place: they have connected, and listen.
    pub fn in_place(&self) -> usize {
        let serves = self.facts.as_ref().is_some_and(|it| it.in_place);
        let jobs = self.jobs.values().filter(|it| serves && !it.is_over());
        jobs.flat_map(|it| it.trainers.values()).filter(|it| it.attached && it.listens).count()
    }

    /// The shares by which slots are divided among the attempts that are there.
    pub fn shares(&self) -> impl Iterator<Item = (&JobKey, u32)> {
        self.jobs.iter().map(|(key, it)| (key, it.facts.share))
    }

    /// Whether nothing is connected, so that nothing has to be looked at.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn server(&mut self, who: &Who) -> Option<&mut Member> {
        match who {
            Who::Server(id) => self.servers.get_mut(id),
            Who::Trainer(..) => None,
        }
    }

    fn attached(
        &mut self,
        now: Duration,
        who: Who,
        hello: Hello,
        facts: Option<JobFacts>,
        out: &mut Vec<Command>,
    ) {
        if self.facts.is_none() {
            out.push(Command::Postpone(who, "the pool has not been looked at yet"));
            return;
        }
        match (&who, facts) {
            (Who::Server(id), _) => {
                let id = *id;
                match self.servers.get_mut(&id) {
                    Some(member) => member.attach(id, hello, now),
                    None => drop(self.servers.insert(id, Member::new(id, hello, now))),
                }
                self.go_on(&who, out);
            }
            (Who::Trainer(key, rank), Some(facts)) => {
                let (key, rank) = (key.clone(), *rank);
                if rank >= facts.trainers {
                    let text = format!("{who}: the job has {} trainers", facts.trainers);
                    out.push(Command::Refuse(who, text));
                    return;
                }
                self.trainer(now, &key, rank, hello, facts, out);
            }
            (Who::Trainer(..), None) => {
                out.push(Command::Postpone(who, "the job is not known yet"));
            }
        }
    }

    /// Welcomes a server at once if its hello names the job that it works for.
    fn go_on(&mut self, who: &Who, out: &mut Vec<Command>) {
        let Some(member) = self.server(who) else { return };
        let Some(key) = member.job.clone() else { return };
        // If the job has ended, a drain follows; if the conductor comes later, the roster follows.
        let job = self.jobs.get(&key);
        let secret = job.map(|it| it.secret.clone()).unwrap_or_default();
        let conductor = job.and_then(Job::conductor);
        let (to, resume) = (who.clone(), String::new());
        out.push(Command::Welcome { to, job: key, secret, conductor, resume });
    }

    fn trainer(
        &mut self,
        now: Duration,
        key: &JobKey,
        rank: u32,
        hello: Hello,
        facts: JobFacts,
        out: &mut Vec<Command>,
    ) {
        if self.jobs.get(key).is_some_and(|it| it.is_of_another_run(rank, &hello)) {
            self.begin_anew(key, now);
        }
        let arrivals = &mut self.arrivals;
        let job = self.jobs.entry(key.clone()).or_insert_with(|| {
            *arrivals += 1;
            Job::new(facts, hello.data_version, *arrivals, now)
        });
        let who = Who::Trainer(key.clone(), rank);
        if let Some(reason) = job.mismatch(key, &who, hello.data_version) {
            out.push(Command::Refuse(who, reason));
            return;
        }
        if rank == 0 {
            if !hello.secret.is_empty() {
                job.came.get_or_insert(now);
                job.secret.clone_from(&hello.secret);
                job.resume.clone_from(&hello.resume);
            }
            if let Some(view) = &hello.view {
                let held: BTreeSet<u32> = self
                    .jobs
                    .values()
                    .filter_map(|it| it.slots.as_ref())
                    .flat_map(|it| it.dedicated().collect::<Vec<_>>())
                    .collect();
                let named =
                    view.slots.iter().filter_map(|it| it.server.as_ref()).map(|it| it.index);
                let named: BTreeSet<u32> = named.collect();
                let wanted = self.facts.iter().flat_map(|it| &it.slots).copied();
                let vacant =
                    wanted.filter(|it| !held.contains(it) && !named.contains(it)).collect();
                if let Some(job) = self.jobs.get_mut(key) {
                    job.adopt(view, &vacant, now);
                }
            }
        }
        let Some(job) = self.jobs.get_mut(key) else { return };
        let listens = !hello.address.is_empty();
        let (address, ring) = (hello.address.clone(), hello.ring.clone());
        let stale = hello.view.as_ref().map(|it| it.number);
        let known = !hello.session.is_empty();
        job.trainers.insert(rank, Rank { hello, attached: true, listens: false });
        if known && let Some(job) = self.jobs.get(key) {
            let (secret, conductor) = (job.secret.clone(), job.conductor());
            let (to, job) = (who.clone(), key.clone());
            out.push(Command::Welcome { to, job, secret, conductor, resume: String::new() });
        }
        if listens {
            self.listening(&who, address, ring, out);
        }
        // A view that was sent while the conductor was away is lost, so it is sent again.
        if rank == 0
            && known
            && let Some(Command::View(to, view)) = self.jobs.get(key).and_then(|it| it.again(key))
            && stale.is_none_or(|it| it < view.number)
        {
            out.push(Command::View(to, view));
        }
    }

    /// Forgets an attempt of which another run begins. Its servers leave it; trainers of the run before go by themselves.
    fn begin_anew(&mut self, key: &JobKey, now: Duration) {
        self.jobs.remove(key);
        self.in_place.retain(|(of, _), _| of != key);
        if let Some(since) = self.expected.get_mut(key) {
            *since = now;
        }
        for server in self.servers.values_mut().filter(|it| it.job.as_ref() == Some(key)) {
            server.dismiss(true);
            if let Some(leave) = &mut server.leave {
                leave.over = true;
            }
        }
    }

    fn detached(&mut self, now: Duration, who: &Who) {
        match who {
            Who::Server(id) => {
                if let Some(server) = self.servers.get_mut(id) {
                    server.away = Some(now);
                }
            }
            Who::Trainer(key, rank) => {
                let job = self.jobs.get_mut(key);
                if let Some(trainer) = job.and_then(|it| it.trainers.get_mut(rank)) {
                    trainer.attached = false;
                }
            }
        }
    }

    fn listening(&mut self, who: &Who, address: String, ring: String, out: &mut Vec<Command>) {
        match who {
            Who::Server(id) => {
                if let Some(server) = self.servers.get_mut(id) {
                    server.listens(*id, address);
                }
            }
            Who::Trainer(key, rank) => {
                let Some(job) = self.jobs.get_mut(key) else { return };
                if let Some(trainer) = job.trainers.get_mut(rank) {
                    trainer.listens = true;
                    trainer.hello.address = address;
                    trainer.hello.ring = ring;
                }
                let trainers = job.trainers.keys().map(|&it| Who::Trainer(key.clone(), it));
                let of_job = |it: &(&ServerId, &Member)| it.1.job.as_ref() == Some(key);
                let servers = self.servers.iter().filter(of_job).map(|it| Who::Server(*it.0));
                let all: Vec<Who> = trainers.chain(servers).collect();
                if *rank == 0
                    && let Some(conductor) = job.conductor()
                {
                    let others = all.iter().filter(|it| *it != who);
                    out.extend(others.map(|to| Command::Conductor(to.clone(), conductor.clone())));
                }
                if let Some(roster) = job.roster() {
                    out.extend(all.into_iter().map(|to| Command::Trainers(to, roster.clone())));
                }
            }
        }
    }

    fn reported(&mut self, now: Duration, who: &Who, report: crate::load::Report) {
        let Some(health) = self.facts.as_ref().map(|it| it.health) else { return };
        let key = match who {
            Who::Server(id) => self.servers.get(id).and_then(|it| it.job.clone()),
            Who::Trainer(key, _) => Some(key.clone()),
        };
        let Some(key) = key else { return };
        if let Some(job) = self.jobs.get_mut(&key).filter(|_| report.is_used()) {
            job.usage.uses(now);
        }
        let dedicated = self.servers.values().filter(|it| it.job.as_ref() == Some(&key));
        let in_place = self.in_place.iter().filter(|it| it.0.0 == key).map(|it| it.1);
        let loads = dedicated.map(|it| &it.load).chain(in_place);
        let reference = reference(loads.filter_map(|it| it.speed(now, health)));
        let load = match who {
            Who::Server(id) => self.servers.get_mut(id).map(|it| &mut it.load),
            Who::Trainer(_, rank) => {
                Some(self.in_place.entry((key, *rank)).or_insert_with(|| Load::new(now)))
            }
        };
        if let Some(load) = load {
            load.report(now, report, reference, health);
        }
    }
}
