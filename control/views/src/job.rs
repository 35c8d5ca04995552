//! One attempt of a job as its controller sees it: its trainers, its slots, the views it was sent.
//!
//! In: trainers that come and listen, the slots it is given, servers that may fill them. Out: rosters and
//! views. A view is sent once every trainer listens, and then whenever its slots change.
//!
//! Invariant: numbers of views only rise, across controllers too: a new one has a higher term, and one that
//! finds its own term goes on after the conductor's number.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::slots::{Kind, Server, Slots};
use crate::types::{
    Command, Conductor, Hello, JobFacts, JobKey, Number, SERVERS_BACK_WITHIN, ServerId, Trainer,
    Unserved, View, Who,
};
use crate::usage::Usage;

/// How long a job that has never trained keeps its slots while some of its trainers do not come: their image may never do.
pub(crate) const SLOTS_KEPT_FOR: Duration = Duration::from_mins(5);

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) facts: JobFacts,
    /// Data version of the trainer that came first; other workers must have the same.
    pub(crate) data_version: u32,
    /// Jobs in the order of their arrival.
    pub(crate) arrival: u64,
    pub(crate) trainers: BTreeMap<u32, Rank>,
    pub(crate) secret: Vec<u8>,
    pub(crate) resume: String,
    /// None until it was given slots for the first time.
    pub(crate) slots: Option<Slots>,
    sent: Option<View>,
    /// The newest view that a finished step has used.
    pub(crate) confirmed: Option<Number>,
    /// The view that another controller sent last: one before it may have named more servers.
    pub(crate) adopted: Option<Number>,
    /// Until when the job waits for the servers of an adopted view.
    settles: Option<Duration>,
    pub(crate) pods: Pods,
    /// Whether its conductor has said that no step follows.
    pub(crate) finished: bool,
    /// When its conductor came.
    pub(crate) came: Option<Duration>,
    /// Why it has no servers, if that is known.
    pub(crate) unserved: Option<Unserved>,
    pub(crate) usage: Usage,
}

/// What the cluster's facts have said of an attempt's pods.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pods {
    /// Nothing yet.
    Awaited,
    /// They are there.
    There,
    /// They were there.
    Gone,
    /// They are there, and were gone in between.
    Back,
}

impl Pods {
    /// As they are when the newest facts name them, or do not.
    pub(crate) fn then(self, are_there: bool) -> Self {
        match (self, are_there) {
            (Self::Awaited, false) => Self::Awaited,
            (Self::Awaited | Self::There, true) => Self::There,
            (Self::There | Self::Gone | Self::Back, false) => Self::Gone,
            (Self::Gone | Self::Back, true) => Self::Back,
        }
    }
}

/// A trainer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rank {
    pub(crate) hello: Hello,
    pub(crate) attached: bool,
    pub(crate) listens: bool,
}

impl Job {
    pub(crate) fn new(facts: JobFacts, data_version: u32, arrival: u64, now: Duration) -> Self {
        Self {
            facts,
            data_version,
            arrival,
            trainers: BTreeMap::new(),
            secret: Vec::new(),
            resume: String::new(),
            slots: None,
            sent: None,
            confirmed: None,
            adopted: None,
            settles: None,
            pods: Pods::Awaited,
            finished: false,
            came: None,
            unserved: None,
            usage: Usage::new(now),
        }
    }

    /// Why a worker of this data version may not join, if it may not.
    pub(crate) fn mismatch(&self, key: &JobKey, who: &Who, data_version: u32) -> Option<String> {
        let own = self.data_version;
        (data_version != own).then(|| {
            format!(
                "{who} has data version {data_version}, job {key} {own}; start all workers of a job \
                 from the same build"
            )
        })
    }

    /// Whether a trainer that comes is of another run under the same key: pods of other kinds keep theirs when they start
    /// again, and so does a job that is made anew under its name.
    pub(crate) fn is_of_another_run(&self, rank: u32, hello: &Hello) -> bool {
        let secrets = [&self.secret, &hello.secret];
        let conducts_another =
            rank == 0 && secrets.iter().all(|it| !it.is_empty()) && secrets[0] != secrets[1];
        // Within a run each listens once.
        let listens = self.trainers.get(&rank).is_some_and(|it| it.listens)
            && hello.data_version == self.data_version;
        hello.session.is_empty() && (self.has_ended() || conducts_another || listens)
    }

    /// Whether no step follows.
    pub(crate) fn is_over(&self) -> bool {
        self.finished || self.pods == Pods::Gone
    }

    /// Whether it is over, or was.
    fn has_ended(&self) -> bool {
        self.is_over() || self.pods == Pods::Back
    }

    /// A conductor is there and the job goes on: it may be given slots.
    pub(crate) fn is_active(&self) -> bool {
        !self.is_over() && !self.secret.is_empty()
    }

    /// Whether the job may have slots: it trains, or its trainers are there, or may be expected yet.
    pub(crate) fn claims(&self, now: Duration) -> bool {
        let is_expected = || self.came.is_some_and(|it| now < it + SLOTS_KEPT_FOR);
        self.is_active() && (self.sent.is_some() || self.roster().is_some() || is_expected())
    }

    /// That some of its trainers have not come for too long.
    pub(crate) fn not_whole(&self) -> Unserved {
        let come = self.trainers.values().filter(|it| it.listens).count();
        let come = u32::try_from(come).unwrap_or(u32::MAX);
        Unserved::NotWhole { come, trainers: self.facts.trainers }
    }

    /// Goes on from the view that another controller sent; vacant slots get these numbers of the pool.
    pub(crate) fn adopt(&mut self, view: &View, vacant: &BTreeSet<u32>, now: Duration) {
        if self.sent.as_ref().is_some_and(|it| it.number >= view.number) {
            return;
        }
        let mut vacant = vacant.iter().copied();
        let unknown = (1..).map(|it| u32::MAX - it);
        let mut owners = vacant.by_ref().chain(unknown);
        let owner = || owners.next().unwrap_or(u32::MAX);
        self.slots = Some(Slots::adopt(&view.slots, owner, now));
        self.sent = Some(view.clone());
        self.adopted = Some(view.number);
        self.settles = Some(now + SERVERS_BACK_WITHIN);
        self.usage.found(now);
    }

    pub(crate) fn conductor(&self) -> Option<Conductor> {
        self.trainers.get(&0).filter(|it| it.listens).map(place)
    }

    /// All trainers, once all of them listen.
    pub(crate) fn roster(&self) -> Option<Vec<Trainer>> {
        let listening: Vec<_> = self.trainers.values().filter(|it| it.listens).map(place).collect();
        (listening.len() == self.facts.trainers as usize).then_some(listening)
    }

    /// Gives the job exactly these slots of the pool.
    pub(crate) fn give(&mut self, given: &BTreeSet<u32>, in_place: bool, now: Duration) {
        let Some(slots) = &mut self.slots else {
            let trainers = if in_place { self.facts.trainers } else { 0 };
            self.slots = Some(Slots::new(given.iter().copied(), trainers, now));
            return;
        };
        let has: BTreeSet<u32> = slots.dedicated().collect();
        for &index in has.difference(given) {
            slots.remove(index);
        }
        for &index in given.difference(&has) {
            slots.append(index, now);
        }
    }

    /// Fills the slots with the servers that may be offered, in place with trainers, and with weights.
    pub(crate) fn fill(
        &mut self,
        offers: &BTreeMap<u32, Server>,
        weights: &BTreeMap<(Kind, u32), u32>,
        now: Duration,
    ) {
        let Some(slots) = &mut self.slots else { return };
        for slot in slots.view() {
            let Some(server) = slot.server.filter(|_| slot.kind == Kind::Dedicated) else {
                continue;
            };
            if offers.get(&server.index) != Some(&server) {
                slots.vacate(Kind::Dedicated, server.index, server.incarnation, now);
            }
        }
        for server in offers.values() {
            slots.fill(Kind::Dedicated, server.clone());
        }
        for (&rank, trainer) in self.trainers.iter().filter(|it| it.1.listens) {
            let hello = &trainer.hello;
            let server = Server {
                index: rank,
                incarnation: hello.incarnation,
                address: hello.address.clone(),
                memory: hello.memory,
                numerics: hello.numerics.clone(),
            };
            slots.fill(Kind::InPlace, server);
        }
        for (&(kind, index), &weight) in weights {
            slots.weigh(kind, index, weight);
        }
    }

    /// Whether the job still waits for servers of an adopted view.
    pub(crate) fn awaits(&self, settled: impl Fn(ServerId) -> bool, now: Duration) -> bool {
        let Some(sent) = self.sent.as_ref().filter(|_| self.settles.is_some_and(|it| now < it))
        else {
            return false;
        };
        let dedicated = sent.slots.iter().filter(|it| it.kind == Kind::Dedicated);
        let mut servers = dedicated.filter_map(|it| it.server.as_ref());
        let id = |it: &Server| ServerId { index: it.index, incarnation: it.incarnation };
        self.roster().is_none() || servers.any(|it| !settled(id(it)))
    }

    /// Whether the conductor may still use a server of this view.
    pub(crate) fn offers(&self, id: ServerId) -> bool {
        let slots = self.sent.iter().flat_map(|it| &it.slots);
        let mut servers =
            slots.filter(|it| it.kind == Kind::Dedicated).filter_map(|it| it.server.as_ref());
        servers.any(|it| (it.index, it.incarnation) == (id.index, id.incarnation))
    }

    /// The next view, if it is another than the last.
    pub(crate) fn view(&mut self, term: u64, after: Duration, now: Duration) -> Option<View> {
        self.roster()?;
        let slots = self.slots.as_mut()?;
        if self.sent.is_some() {
            slots.reshape(now, after);
        }
        let slots = slots.view();
        if self.sent.as_ref().is_some_and(|it| it.slots == slots) {
            return None;
        }
        let last = self.sent.as_ref().map_or(Number::default(), |it| it.number);
        let counter = if last.term >= term { last.counter + 1 } else { 1 };
        let view = View { number: Number { term: term.max(last.term), counter }, slots };
        self.sent = Some(view.clone());
        Some(view)
    }

    /// The last view, again: for a conductor that has come back.
    pub(crate) fn again(&self, key: &JobKey) -> Option<Command> {
        let view = self.sent.clone()?;
        Some(Command::View(Who::Trainer(key.clone(), 0), view))
    }
}

fn place(rank: &Rank) -> Trainer {
    Trainer {
        incarnation: rank.hello.incarnation,
        address: rank.hello.address.clone(),
        ring: rank.hello.ring.clone(),
    }
}
