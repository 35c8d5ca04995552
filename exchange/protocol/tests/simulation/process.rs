//! Simulated processes: shells around the machines that hold rows and results, and check what they are
//! told to do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cadre_protocol::conductor::Conductor;
use cadre_protocol::server::{Host, Server};
use cadre_protocol::trainer::Trainer;
use cadre_protocol::{At, Nanos, Parcel, Peer, PullId, ServerId, Settings, TrainerId, Work};

use crate::job::{Job, Running, next, result, row};
use crate::net::Input;

/// A process, with its machines.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) peer: Peer,
    pub(crate) trainer: Option<TrainerShell>,
    pub(crate) server: Option<ServerShell>,
    pub(crate) conductor: Option<Conductor>,
    pub(crate) paused: bool,
    /// What came during a pause.
    pub(crate) inbox: Vec<Input>,
    pub(crate) wake_at: Option<Nanos>,
    /// Wakes at one and the same time.
    pub(crate) spins: (Nanos, u32),
    /// Newest watermark that was delivered.
    pub(crate) told: Option<At>,
    /// The bits that the newest pull brought.
    pub(crate) value: Option<u64>,
    /// Steps that it has begun, or that its conductor has published.
    pub(crate) steps: BTreeMap<u64, Running>,
}

impl Process {
    pub(crate) fn trainer(id: TrainerId, job: &Job, now: Nanos) -> Self {
        let settings = job.settings;
        let in_place = ServerShell::new(Host::InPlace(id), job, now);
        Self {
            trainer: Some(TrainerShell::new(id, settings, now)),
            server: Some(in_place),
            conductor: (id.0 == 0).then(|| Conductor::new(job.trainers, settings, now)),
            ..Self::empty(Peer::Trainer(id))
        }
    }

    pub(crate) fn server(id: ServerId, job: &Job, now: Nanos) -> Self {
        let shell = ServerShell::new(Host::Dedicated(id), job, now);
        Self { server: Some(shell), ..Self::empty(Peer::Server(id)) }
    }

    fn empty(peer: Peer) -> Self {
        Self {
            peer,
            trainer: None,
            server: None,
            conductor: None,
            paused: false,
            inbox: Vec::new(),
            wake_at: None,
            spins: (Nanos(0), 0),
            told: None,
            value: None,
            steps: BTreeMap::new(),
        }
    }

    /// The earliest deadline of its machines.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        let trainer = self.trainer.as_ref().and_then(|it| it.machine.next_deadline());
        let server = self.server.as_ref().and_then(|it| it.machine.next_deadline());
        let conductor = self.conductor.as_ref().and_then(Conductor::next_deadline);
        trainer.into_iter().chain(server).chain(conductor).min()
    }
}

/// A trainer's rows and results.
#[derive(Debug)]
pub(crate) struct TrainerShell {
    pub(crate) id: TrainerId,
    pub(crate) machine: Trainer,
    /// For which phase the rows of each cell were written.
    cells: Vec<At>,
    free: Vec<usize>,
    /// Where a phase's rows are, or were.
    places: BTreeMap<At, usize>,
    released: BTreeSet<At>,
    /// Results accepted.
    accepted: BTreeMap<At, BTreeSet<Work>>,
    pub(crate) complete: BTreeSet<At>,
    pub(crate) next: At,
    pub(crate) begun: BTreeSet<u64>,
}

impl TrainerShell {
    fn new(id: TrainerId, settings: Settings, now: Nanos) -> Self {
        Self {
            id,
            machine: Trainer::new(id, settings, now),
            cells: vec![At::new(u64::MAX, 0); settings.window],
            free: (0..settings.window).collect(),
            places: BTreeMap::new(),
            released: BTreeSet::new(),
            accepted: BTreeMap::new(),
            complete: BTreeSet::new(),
            next: At::new(0, 0),
            begun: BTreeSet::new(),
        }
    }

    /// The phase that may be submitted now: its step has begun, those that it needs are complete here
    /// and `barrier` (an all-reduce) lets it.
    pub(crate) fn may_go(&self, job: &Job, barrier: impl Fn(u64) -> bool) -> Option<At> {
        let at = self.next;
        let before = at.phase.0.checked_sub(job.ahead);
        let ready = before.is_none_or(|it| self.complete.contains(&At::new(at.step, it)));
        let start =
            at.phase.0 > 0 || at.step == 0 || (self.has(job, at.step - 1) && barrier(at.step - 1));
        let begun = self.begun.contains(&at.step);
        (at.step < job.steps && begun && ready && start && self.machine.may_submit()).then_some(at)
    }

    fn has(&self, job: &Job, step: u64) -> bool {
        (0..job.phases(step)).all(|it| self.complete.contains(&At::new(step, it)))
    }

    /// Writes the rows of a phase.
    pub(crate) fn submit(&mut self, job: &Job, at: At) -> Result<(), String> {
        let cell = self.free.pop().ok_or("no free cell, although the machine said so")?;
        self.cells[cell] = at;
        self.places.insert(at, cell);
        self.next = next(job, at);
        Ok(())
    }

    pub(crate) fn release(&mut self, at: At) {
        // The newest free cell is reused first: the hardest case for late readers.
        if self.released.insert(at) {
            self.free.push(self.places[&at]);
        }
    }

    /// What a reader finds where the rows of a phase are, or were.
    pub(crate) fn read(&self, at: At, parcel: Parcel, shared_memory: bool) -> Option<u64> {
        let place = *self.places.get(&at)?;
        let withdrawn = self.released.contains(&at) && !shared_memory;
        (!withdrawn).then(|| row(self.id, self.cells[place], parcel))
    }

    pub(crate) fn accept(
        &mut self,
        job: &Job,
        at: At,
        work: Work,
        value: u64,
    ) -> Result<(), String> {
        if value != job.right_result(at, work) {
            return Err(format!("trainer {} got wrong bits for {work:?} of {at:?}", self.id.0));
        }
        if !self.accepted.entry(at).or_default().insert(work) {
            return Err(format!("trainer {} merged {work:?} of {at:?} twice", self.id.0));
        }
        Ok(())
    }

    /// A phase is complete. Whether its step now is.
    pub(crate) fn whole(&mut self, job: &Job, at: At) -> Result<bool, String> {
        let accepted = self.accepted.remove(&at).unwrap_or_default();
        if !self.complete.insert(at) || !job.wanted(at, self.id).eq(accepted) {
            return Err(format!("trainer {}: {at:?} is not complete, or twice", self.id.0));
        }
        Ok(self.has(job, at.step))
    }
}

/// A server's memory.
#[derive(Debug)]
pub(crate) struct ServerShell {
    pub(crate) machine: Server,
    inputs: BTreeMap<(At, Parcel), u64>,
    results: BTreeMap<(At, Work), Option<u64>>,
    landing: BTreeMap<PullId, u64>,
    used: u64,
    /// Works that read a copy of rows and did not run, and its bytes.
    copy: (BTreeSet<(At, Work)>, u64),
    queue: VecDeque<(At, Work)>,
    running: bool,
}

impl ServerShell {
    pub(crate) fn new(host: Host, job: &Job, now: Nanos) -> Self {
        Self {
            machine: Server::new(host, job.memory(host), job.settings, now),
            inputs: BTreeMap::new(),
            results: BTreeMap::new(),
            landing: BTreeMap::new(),
            used: 0,
            copy: (BTreeSet::new(), 0),
            queue: VecDeque::new(),
            running: false,
        }
    }

    fn take(&mut self, bytes: u64) -> Result<(), String> {
        self.used += bytes;
        let budget = self.machine.budget();
        let fits = self.used <= budget;
        fits.then_some(()).ok_or_else(|| format!("a server holds {} of {budget} bytes", self.used))
    }

    pub(crate) fn pull(
        &mut self,
        job: &Job,
        pull: PullId,
        at: At,
        parcel: Parcel,
    ) -> Result<(), String> {
        let bytes = job.shape(at).parcels()[parcel.0 as usize].bytes;
        self.landing.insert(pull, bytes);
        self.take(bytes)
    }

    pub(crate) fn discard(&mut self, pull: PullId) {
        self.used -= self.landing.remove(&pull).expect("only pulls are discarded");
    }

    pub(crate) fn accept(
        &mut self,
        pull: PullId,
        at: At,
        parcel: Parcel,
        value: u64,
    ) -> Result<(), String> {
        self.landing.remove(&pull).ok_or("a pull is accepted once")?;
        match self.inputs.insert((at, parcel), value) {
            Some(_) => Err(format!("{parcel:?} of {at:?} was accepted twice")),
            None => Ok(()),
        }
    }

    pub(crate) fn ready(&mut self, job: &Job, at: At, work: Work) -> Result<(), String> {
        let shape = job.shape(at).work(work);
        if shape.needs.iter().any(|&it| !self.inputs.contains_key(&(at, it))) {
            return Err(format!("{work:?} of {at:?} is ready without its rows"));
        }
        if self.results.insert((at, work), None).is_some() {
            return Err(format!("{work:?} of {at:?} is ready twice"));
        }
        self.queue.push_back((at, work));
        self.take(shape.results.iter().map(|it| it.1).sum())
    }

    /// Copies the rows of works out of memory to which pulls write.
    pub(crate) fn ahead(&mut self, job: &Job, at: At, works: &[Work]) -> Result<(), String> {
        if !self.copy.0.is_empty() {
            return Err("rows of works are copied while other copies are read".into());
        }
        let shape = job.shape(at);
        let of = |it: &Work| shape.work(*it).bundle;
        let bundle = of(works.first().ok_or("nothing runs ahead")?);
        if works.iter().any(|it| of(it) != bundle) {
            return Err(format!("works of two bundles of {at:?} run ahead together"));
        }
        let rows = shape.parcels().iter().zip((0..).map(Parcel)).filter(|it| it.0.bundle == bundle);
        if rows.clone().all(|it| self.inputs.contains_key(&(at, it.1))) {
            return Err(format!("{works:?} of {at:?} run ahead, and all rows are here"));
        }
        let bytes = rows.map(|it| it.0.bytes).sum();
        self.copy = (works.iter().map(|it| (at, *it)).collect(), bytes);
        self.take(bytes)?;
        works.iter().try_for_each(|&it| self.ready(job, at, it))
    }

    /// Works read their rows no more.
    fn read_no_more(&mut self, at: At, works: &[Work]) {
        let (reading, bytes) = &mut self.copy;
        let before = reading.len();
        for work in works {
            reading.remove(&(at, *work));
        }
        if before > 0 && reading.is_empty() {
            self.used -= std::mem::take(bytes);
        }
    }

    /// Starts a launch of up to `most` works of one phase, if idle.
    pub(crate) fn launch(&mut self, most: usize) -> Option<(At, Vec<Work>)> {
        if self.running {
            return None;
        }
        let at = self.queue.front()?.0;
        let same = self.queue.iter().take(most).take_while(|it| it.0 == at).count();
        self.running = true;
        Some((at, self.queue.drain(..same).map(|it| it.1).collect()))
    }

    /// Computes the launch that ended.
    pub(crate) fn ran(&mut self, job: &Job, at: At, works: &[Work]) {
        self.running = false;
        for &work in works {
            let needs = job.shape(at).work(work).needs;
            let rows = needs.iter().map(|&it| self.inputs[&(at, it)]);
            let value = result(at, work, rows.collect::<Vec<_>>().into_iter());
            self.results.insert((at, work), Some(value));
        }
        self.read_no_more(at, works);
    }

    /// Drops queued work of a phase.
    pub(crate) fn cancel(&mut self, at: At) -> Vec<Work> {
        let dropped: Vec<_> = self.queue.iter().filter(|it| it.0 == at).map(|it| it.1).collect();
        self.queue.retain(|it| it.0 != at);
        self.read_no_more(at, &dropped);
        dropped
    }

    pub(crate) fn free_input(&mut self, job: &Job, at: At, parcel: Parcel) -> Result<(), String> {
        self.inputs.remove(&(at, parcel)).ok_or("only accepted rows are freed, and once")?;
        self.used -= job.shape(at).parcels()[parcel.0 as usize].bytes;
        Ok(())
    }

    pub(crate) fn free_result(&mut self, job: &Job, at: At, work: Work) -> Result<(), String> {
        self.results.remove(&(at, work)).ok_or("only results are freed, and once")?;
        let results = job.shape(at).work(work).results;
        self.used -= results.iter().map(|it| it.1).sum::<u64>();
        Ok(())
    }

    pub(crate) fn read(&self, at: At, work: Work) -> Option<u64> {
        self.results.get(&(at, work)).copied().flatten()
    }

    /// Whether anything is held, which after the last watermark would be a leak.
    pub(crate) fn holds(&self) -> bool {
        self.used > 0 || !self.inputs.is_empty() || !self.results.is_empty()
    }
}
