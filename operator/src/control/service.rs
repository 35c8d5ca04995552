//! Carries what the decisions say to workers, and brings in what workers and reconciles say.
//!
//! In: streams of pods, facts of pools. Out: words on the streams, what is told to reconciles. One task owns
//! all of it. A worker has one link; a new one of the same worker replaces the old.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_control::Caller;
use cadre_control::proto::{self, Hello, Probed, worker_message::Message};
use cadre_control::server::{Event, Link, LinkId};
use cadre_desired::pool::Report;
use cadre_desired::server_name;
use cadre_views::{Command, Input, JobKey, Pool, ServerId, Who};
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use super::door::{Answer, Known, identify, job_facts};
use super::figures::{Figures, tell_job};
use super::waiting::Waiting;
use super::words::{self, Attempt, progress, steps_in};
use crate::context::Context;
use crate::told::{FIGURES, Gaps, Servers};
use crate::triggers::Key;

/// Between two looks at what time alone changes: stale reports, servers that are awaited. Load reports wait for
/// it too.
const TICK: Duration = Duration::from_millis(500);
/// Events that are noted before what follows from them is done: what follows takes a look at all servers.
const TOGETHER: usize = 256;

/// See the module.
pub(super) struct Service {
    pub(super) context: Arc<Context>,
    term: u64,
    pub(super) started: Instant,
    pub(super) pools: BTreeMap<Key, Pool>,
    pub(super) links: BTreeMap<LinkId, (Key, Who)>,
    pub(super) workers: BTreeMap<(Key, Who), Link>,
    pub(super) jobs: Figures,
    pub(super) attempts: BTreeMap<JobKey, Attempt>,
    /// What servers have measured to the trainers of the attempt that they work for.
    pub(super) ways: BTreeMap<(Key, ServerId), (JobKey, Probed)>,
    pub(super) waiting: Waiting,
    /// Conductors that have said all, since when, and of which job.
    pub(super) parting: Vec<(Instant, Key, Link)>,
    /// Pools of which something was noted and nothing done yet.
    pub(super) noted: BTreeSet<Key>,
    refreshed: Instant,
}

impl Service {
    pub(super) fn new(context: Arc<Context>, term: u64) -> Self {
        let now = Instant::now();
        Self {
            context,
            term,
            started: now,
            pools: BTreeMap::new(),
            links: BTreeMap::new(),
            workers: BTreeMap::new(),
            jobs: Figures::default(),
            attempts: BTreeMap::new(),
            ways: BTreeMap::new(),
            waiting: Waiting::default(),
            parting: Vec::new(),
            noted: BTreeSet::new(),
            refreshed: now,
        }
    }

    /// Serves until there are no more events.
    pub(super) async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let context = self.context.clone();
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => {
                        self.event(event);
                        // Takes further events that have arrived, to settle once for all of them.
                        for _ in 1..TOGETHER {
                            let Ok(event) = events.try_recv() else { break };
                            self.event(event);
                        }
                    }
                    None => return,
                },
                () = context.known.news.notified() => self.learn(),
                () = context.told.written.notified() => self.part_heard(),
                _ = ticks.tick() => self.tick(),
            }
            self.settle();
        }
    }

    fn learn(&mut self) {
        for (key, facts) in self.context.known.take() {
            let term = self.term;
            self.pools.entry(key.clone()).or_insert_with(|| Pool::new(term));
            self.put(&key, Input::Facts(facts));
        }
    }

    /// A share that was edited counts from now on.
    fn share(&mut self) {
        let trainings = &self.context.caches.trainings;
        let asked = |job: &JobKey| {
            let read = trainings.get(&ObjectRef::new(&job.name).within(&job.namespace))?;
            read.unreadable.is_none().then_some(read.object.spec.attention.share)
        };
        let edited = |(job, share): (&JobKey, u32)| {
            let asked = asked(job).filter(|it| *it != share)?;
            Some(Input::Share(job.clone(), asked))
        };
        let of_pool = |(key, pool): (&Key, &Pool)| -> Vec<_> {
            pool.shares().filter_map(edited).map(|it| (key.clone(), it)).collect()
        };
        for (key, input) in self.pools.iter().flat_map(of_pool).collect::<Vec<_>>() {
            self.put(&key, input);
        }
    }

    fn tick(&mut self) {
        self.forget_pools();
        self.share();
        self.tell_attached();
        self.part_heard();
        let keys: Vec<Key> = self.pools.keys().cloned().collect();
        for key in &keys {
            self.put(key, Input::Tick);
        }
        self.settle();
        if self.refreshed.elapsed() >= FIGURES {
            self.refreshed = Instant::now();
            for key in &keys {
                self.tell(key, true);
            }
            self.tell_jobs();
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Attached { link, hello, caller } => {
                let Some(caller) = caller else { return link.refuse("the service has no gate") };
                self.attached(link, *hello, &caller);
            }
            Event::Message { link, message } => {
                if let Some((key, who)) = self.links.get(&link).cloned() {
                    self.said(&key, who, message);
                }
            }
            Event::Detached { link } => {
                if let Some((key, who)) = self.links.remove(&link) {
                    let worker = (key, who);
                    let current = self.workers.get(&worker).is_some_and(|it| it.id() == link);
                    if current {
                        // All that it said has been taken above.
                        let link = self.workers.remove(&worker);
                        let (key, who) = worker;
                        self.lets_go(&who, link);
                        tracing::info!("{who} of pool {}/{} is gone", key.0, key.1);
                        self.put(&key, Input::Detached(who));
                    }
                }
            }
        }
    }

    fn attached(&mut self, link: Link, hello: Hello, caller: &Caller) {
        let pools = &self.pools;
        let found = identify(&self.context.caches, &hello, caller, |it| pools.contains_key(it));
        let Known { key, identity, job, encryption } = match found {
            Ok(found) => found,
            Err(Answer::Later(reason)) => return self.postpone(link, caller, reason),
            Err(Answer::Never(reason)) => {
                tracing::warn!("{caller} is refused: {reason}");
                return link.refuse(&reason);
            }
        };
        let who = identity.who;
        tracing::info!("{caller} is {who} of pool {}/{}", key.0, key.1);
        let facts = match &who {
            Who::Server(_) => None,
            Who::Trainer(of, rank) => {
                let facts = job_facts(job.as_ref(), &hello);
                if facts.trainers == 0 {
                    return link
                        .refuse("the job has no TrainingJob; set WORLD_SIZE to its trainers");
                }
                let attempt =
                    Attempt { trainers: facts.trainers, encryption, is_described: job.is_some() };
                let uid =
                    job.as_ref().and_then(|it| it.metadata.uid.as_deref()).unwrap_or_default();
                if self.jobs.is_of_another(of, uid) {
                    self.attempts.remove(of);
                }
                let first = self.attempts.entry(of.clone()).or_insert(attempt);
                if first.encryption != encryption {
                    return link.refuse(&words::parted(of, first.encryption, encryption));
                }
                let told = job.as_ref().and_then(|it| it.status.as_ref());
                self.jobs.begin(of, uid, told.map_or(0, |it| it.failovers));
                self.joined(of, *rank);
                self.saved(of, steps_in(&hello.resume));
                Some(facts)
            }
        };
        self.links.insert(link.id(), (key.clone(), who.clone()));
        // An older link of the same worker ends by this.
        self.workers.insert((key.clone(), who.clone()), link);
        self.put(&key, Input::Attached(who, words::hello(hello), facts));
    }

    fn said(&mut self, key: &Key, who: Who, message: Message) {
        let conducts = matches!(&who, Who::Trainer(_, 0));
        match (message, &who) {
            (Message::Listening(it), _) => {
                self.put(key, Input::Listening(who, it.exchange_address, it.ring_address));
            }
            (Message::ServerReport(it), _) => {
                self.note(key, Input::Reported(who, words::report(&it)));
            }
            (Message::Progress(it), Who::Trainer(job, _)) if conducts => {
                self.jobs.step(job, (progress(&it), Gaps::of(&it)), it.failovers_so_far);
                let number = words::number(it.view.unwrap_or_default());
                self.put(key, Input::Stepped(job.clone(), number));
            }
            (Message::Notice(it), Who::Trainer(job, _)) if conducts => self.notice(key, job, it),
            (Message::Saved(it), Who::Trainer(job, _)) => self.saved(job, it.steps),
            (Message::Finished(it), Who::Trainer(job, _)) if conducts => {
                tracing::info!("{who} of pool {}/{} ends: {}", key.0, key.1, it.message);
                self.ends(job, it);
                self.attempts.remove(job);
                self.put(key, Input::Finished(job.clone()));
            }
            (Message::Drained(_), _) => self.put(key, Input::Drained(who)),
            (Message::Leaving(_), _) => self.put(key, Input::Leaving(who)),
            (Message::Probed(it), Who::Server(id)) => {
                let pool = self.pools.get(key);
                if let Some((_, job)) = pool.and_then(|it| it.holders().find(|it| it.0 == *id)) {
                    self.ways.insert((key.clone(), *id), (job.clone(), it));
                    self.noted.insert(key.clone());
                }
            }
            // After its farewell a conductor ends by itself, however long that takes.
            (Message::Bye(_), Who::Trainer(job, _)) if conducts => self.leaves(job),
            // Only a conductor speaks for its job; the rest is of the local supervisor.
            (
                Message::Hello(_)
                | Message::Progress(_)
                | Message::PhaseReached(_)
                | Message::Notice(_)
                | Message::Finished(_)
                | Message::Bye(_)
                | Message::Probed(_)
                | Message::Saved(_)
                | Message::Busy(_),
                _,
            ) => {}
        }
    }

    /// Lets the decisions about a pool take an input; what follows from it comes with [`Self::settle`].
    pub(super) fn put(&mut self, key: &Key, input: Input) {
        self.note(key, input);
        self.noted.insert(key.clone());
    }

    /// As [`Self::put`], for input whose consequences can wait until the next tick.
    fn note(&mut self, key: &Key, input: Input) {
        let Some(pool) = self.pools.get_mut(key) else { return };
        let mut commands = Vec::new();
        pool.note(self.started.elapsed(), input, &mut commands);
        self.obey_all(key, commands);
    }

    /// Carries out the commands that follow from all input so far, and hands reports to the
    /// reconciles. A worker that cannot be reached becomes input in turn.
    fn settle(&mut self) {
        while let Some(key) = self.noted.pop_first() {
            let Some(pool) = self.pools.get_mut(&key) else { continue };
            let mut commands = Vec::new();
            pool.settle(self.started.elapsed(), &mut commands);
            self.obey_all(&key, commands);
            self.tell(&key, false);
            self.tell_unserved(&key);
        }
    }

    fn obey_all(&mut self, key: &Key, commands: Vec<Command>) {
        for command in commands {
            self.obey(key, command);
        }
    }

    fn obey(&mut self, key: &Key, command: Command) {
        if let Command::Notice(reason, text) = &command {
            tracing::warn!("pool {}/{}: {reason}: {text}", key.0, key.1);
            return self.say(key, reason, text.clone());
        }
        let Some(who) = words::to(&command).cloned() else { return };
        let worker = (key.clone(), who);
        match command {
            Command::Postpone(_, reason) => {
                if let Some(link) = self.workers.remove(&worker) {
                    self.links.remove(&link.id());
                    link.postpone(reason);
                }
            }
            Command::Refuse(_, reason) => self.part(&worker, |it| it.refuse(&reason)),
            Command::Welcome { job, secret, conductor, resume, .. } => {
                self.welcome(&worker, (job, resume), (secret, conductor));
            }
            Command::Conductor(_, it) => self.send(&worker, words::conductor(it)),
            Command::Trainers(_, it) => self.send(&worker, words::trainers(it)),
            Command::View(_, it) => {
                tracing::info!("view {}.{} for {}", it.number.term, it.number.counter, worker.1);
                self.send(&worker, words::view(it));
            }
            Command::Drain { stays, over, .. } => self.send(&worker, proto::Drain { stays, over }),
            Command::Notice(..) => {}
        }
    }

    pub(super) fn send(
        &mut self,
        worker: &(Key, Who),
        message: impl Into<proto::ControllerMessage>,
    ) {
        if let Some(link) = self.workers.get(worker)
            && let Err(error) = link.send(message)
        {
            tracing::warn!("{}: {error}", worker.1);
            // The end of the stream comes as its own event.
            if let Some(link) = self.workers.remove(worker) {
                self.links.remove(&link.id());
            }
            self.put(&worker.0.clone(), Input::Detached(worker.1.clone()));
        }
    }

    /// Hands the reports of a pool's servers to the reconciles.
    fn tell(&mut self, key: &Key, figures: bool) {
        let Some(pool) = self.pools.get(key) else { return };
        let known = pool.reports(self.started.elapsed());
        let holders: BTreeMap<ServerId, &JobKey> = pool.holders().collect();
        self.ways.retain(|(of, id), it| of != key || holders.get(id) == Some(&&it.0));
        let ways = &self.ways;
        let report = |(id, it): (ServerId, cadre_views::ServerReport)| {
            let way = ways.get(&(key.clone(), id)).map(|it| &it.1);
            let report = Report {
                busy_ppm: it.figure.busy_ppm,
                slow_factor_percent: it.figure.slow_factor_percent,
                quarantined: it.trouble.is_some(),
                drained: it.drained,
                data_version: it.data_version,
                serves: it.serves,
                link: way.and_then(words::slowest),
                paths: way.map(words::paths).unwrap_or_default(),
            };
            (server_name(&key.1, id.index, id.incarnation), report)
        };
        let named = |id: ServerId| server_name(&key.1, id.index, id.incarnation);
        let holders = holders.into_iter().map(|(id, job)| (named(id), job.clone())).collect();
        let reports = known.into_iter().map(report).collect();
        let in_place = u32::try_from(pool.in_place()).unwrap_or(u32::MAX);
        let lent = pool.lent().map(|(job, it)| (job.clone(), it)).collect();
        let servers = Servers { reports, holders, lent, in_place, ..Servers::default() };
        if self.context.told.tell_pool(key, servers, figures) {
            self.context.caches.pool_triggers.put(key.clone());
        }
    }

    /// Hands the progress of the jobs to the reconciles. Drops jobs that are gone, and their
    /// attempts.
    fn tell_jobs(&mut self) {
        let caches = &self.context.caches;
        let is_there = |of: &JobKey| {
            let job = ObjectRef::new(&of.name).within(&of.namespace);
            let works = |it: &Who| matches!(it, Who::Trainer(job, _) if job == of);
            caches.trainings.get(&job).is_some() || self.workers.keys().any(|it| works(&it.1))
        };
        self.attempts.retain(|it, _| is_there(it));
        for (key, figures) in self.jobs.of_those(is_there) {
            tell_job(&self.context, key, figures);
        }
        let named = |(home, name): &Key| caches.trainings.get(&ObjectRef::new(name).within(home));
        self.context.told.keep_jobs(|it| named(it).is_some());
    }
}
