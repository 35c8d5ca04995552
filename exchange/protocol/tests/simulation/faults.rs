//! What goes wrong in a scenario, and when.

use std::collections::BTreeSet;

use cadre_protocol::{Nanos, Settings, TrainerId};

use crate::job::Job;
use crate::random::Random;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// `kill -9` of a server.
    Kill(u16),
    /// `kill -9` of a trainer: the job has to end.
    KillTrainer(u16),
    /// SIGSTOP, then SIGCONT after a span that may be longer than it takes to be declared lost.
    PauseServer(u16, Nanos),
    /// The same for a trainer, shorter than it takes to be declared dead.
    PauseTrainer(u16, Nanos),
    /// A link between a trainer and a server breaks, and cannot be opened for a span.
    Cut(u16, u16, Nanos),
    /// A link between two trainers breaks and can be opened again at once.
    Blip(u16, u16),
    /// So many servers, from this one on, stop at once; the conductor with them, for a span of its own,
    /// after which it blames nobody for the silence: they become late in one moment.
    StopTogether { first: u16, count: u16, servers: Nanos, conductor: Nanos },
    /// So many servers die at once; their replacements come in one view.
    KillTogether { first: u16, count: u16 },
}

/// A trainer's path to servers that is bad to the end, while everybody else's is fine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BadPath {
    pub(crate) trainer: u16,
    /// The server with its first incarnation, or all that there ever are.
    pub(crate) server: Option<u16>,
    pub(crate) fault: PathFault,
    pub(crate) from: Nanos,
}

/// How a path is bad.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PathFault {
    /// Links break, and cannot be opened again.
    Refuses,
    /// All bytes vanish without a word.
    Swallows,
    /// What the trainer pulls never comes, all messages do.
    LosesResults,
    /// What servers pull never comes, all messages do.
    LosesRows,
}

#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) list: Vec<(Nanos, Fault)>,
    /// Whether the supervisor replaces lost servers.
    pub(crate) replace: bool,
    /// Servers of the first view that never start.
    pub(crate) absent: BTreeSet<u16>,
    pub(crate) path: Option<BadPath>,
    /// Whether every limit leaves room for the slowest packets.
    pub(crate) calm: bool,
    /// From when on nothing goes wrong any more.
    pub(crate) over: Nanos,
}

impl Faults {
    pub(crate) fn none() -> Self {
        Self {
            list: Vec::new(),
            replace: true,
            absent: BTreeSet::new(),
            path: None,
            calm: false,
            over: Nanos(0),
        }
    }

    /// Nothing goes wrong, and no packet takes longer than a limit allows.
    pub(crate) fn calm() -> Self {
        Self { calm: true, ..Self::none() }
    }

    /// Whether a trainer may have been out of reach of a server for as long as it takes to be believed, and of
    /// another one for a suspicion.
    pub(crate) fn cut_off(&self, trainer: TrainerId, settings: &Settings) -> bool {
        let path = self.path.is_some_and(|it| it.trainer == trainer.0 && it.server.is_none());
        let believed = if trainer.0 == 0 { Nanos(0) } else { Nanos(5 * settings.suspect_after.0) };
        let mut cuts = Vec::new();
        for &(_, fault) in &self.list {
            if let Fault::Cut(by, server, span) = fault
                && by == trainer.0
            {
                cuts.push((server, span));
            }
        }
        let second = settings.suspect_after.min(believed);
        path || cuts.iter().any(|first| {
            let other = |it: &(u16, Nanos)| it.0 != first.0 && it.1 >= second;
            first.1 >= believed && cuts.iter().any(other)
        })
    }

    /// One trainer's path to one server, or to all, is bad from some moment on.
    pub(crate) fn path(random: &mut Random, job: &Job) -> Self {
        let all = random.chance(50);
        // Trainer 0 is the conductor: whom it cannot reach is lost.
        let other = random.within(1, u64::from(job.trainers) - 1) as u16;
        let trainer = if job.steps.is_multiple_of(5) { 0 } else { other };
        let server = random.within(0, u64::from(job.dedicated.max(1)) - 1) as u16;
        let passes = if random.chance(50) { PathFault::Swallows } else { PathFault::Refuses };
        let from = Nanos(random.within(0, job.steps * 3_000_000));
        // Of a source of its own, so that scenarios that once went wrong stay what they were.
        let mut random_fault = Random::new(from.0);
        let fault = match random_fault.within(0, 9) {
            0..3 => PathFault::LosesResults,
            3 => PathFault::LosesRows,
            _ => passes,
        };
        let path = BadPath { trainer, server: (!all).then_some(server), fault, from };
        Self { path: Some(path), replace: random.chance(70), ..Self::calm() }
    }

    /// Up to eight faults, at random times of a run, or all within a few phases.
    pub(crate) fn random(random: &mut Random, job: &Job, at_once: bool) -> Self {
        let span = Nanos::from_millis(random.within(1, 10) * job.steps);
        let burst = at_once.then(|| random.within(0, span.0));
        let mut list = Vec::new();
        let mut over = Nanos(0);
        for _ in 0..random.within(1, 8) {
            let when = match burst {
                Some(start) => Nanos(start + random.within(0, 5_000_000)),
                None => Nanos(random.within(0, span.0)),
            };
            let (fault, lasts) = fault(random, job);
            over = over.max(when.after(lasts));
            list.push((when, fault));
        }
        Self { list, replace: random.chance(70), over, ..Self::none() }
    }

    /// Several servers lost in one moment, once or twice, among other faults.
    pub(crate) fn together(random: &mut Random, job: &Job) -> Self {
        let mut faults = if random.chance(50) {
            let at_once = random.chance(50);
            Self::random(random, job, at_once)
        } else {
            Self { replace: random.chance(70), ..Self::none() }
        };
        let span = random.within(1, 10) * job.steps;
        for _ in 0..random.within(1, 2) {
            let when = Nanos(random.within(0, span * 1_000_000));
            let (fault, lasts) = several(random, job);
            faults.over = faults.over.max(when.after(lasts));
            faults.list.push((when, fault));
        }
        if random.chance(30) {
            faults.absent = (0..job.dedicated).filter(|_| random.chance(60)).collect();
            faults.over = faults.over.max(Nanos(2 * job.settings.suspect_after.0));
        }
        faults
    }
}

impl Faults {
    /// All servers but one are lost in one moment, one to three times; some of their replacements die as
    /// they arrive, and the conductor is stopped meanwhile.
    pub(crate) fn churn(random: &mut Random, job: &Job) -> Self {
        let mut faults = Self { replace: random.chance(85), ..Self::none() };
        let most = job.dedicated.max(1);
        let suspicion = job.settings.suspect_after.0;
        let mut when = random.within(0, job.steps * 3_000_000);
        for _ in 0..random.within(1, 3) {
            let first = random.within(0, u64::from(most) - 1) as u16;
            let count = (most - 1).max(1);
            let servers = Nanos(random.within(suspicion, 3 * suspicion));
            let conductor = Nanos(random.within(0, 2 * suspicion));
            let lost = if random.chance(50) {
                Fault::KillTogether { first, count }
            } else {
                Fault::StopTogether { first, count, servers, conductor }
            };
            faults.add(Nanos(when), lost, servers);
            // A replacement comes within twice the suspicion after its server is gone.
            for _ in 0..random.within(1, 6) {
                let then = Nanos(when + random.within(0, 5 * suspicion));
                let server = (first + random.within(0, u64::from(count)) as u16) % most;
                let span = Nanos(random.within(1_000_000, 3 * suspicion));
                let fault = match random.within(0, 3) {
                    0 => Fault::PauseTrainer(0, span),
                    1 => Fault::PauseServer(server, span),
                    _ => Fault::Kill(server),
                };
                faults.add(then, fault, span);
            }
            when += random.within(0, 10 * suspicion);
        }
        faults
    }

    fn add(&mut self, when: Nanos, fault: Fault, lasts: Nanos) {
        self.over = self.over.max(when.after(lasts));
        self.list.push((when, fault));
    }
}

/// A fault that takes several servers at once, and how long it lasts.
fn several(random: &mut Random, job: &Job) -> (Fault, Nanos) {
    let most = u64::from(job.dedicated.max(1));
    let first = random.within(0, most - 1) as u16;
    let count = random.within(2.min(most), most) as u16;
    if random.chance(40) {
        return (Fault::KillTogether { first, count }, Nanos(0));
    }
    // Longer than two heartbeats, so that the conductor notices its pause; all but a few servers are
    // away for longer than it takes to be declared lost.
    let heartbeats = 2 * job.settings.heartbeat_every.0;
    let conductor = Nanos(random.within(heartbeats + 1, 5 * heartbeats));
    let suspicion = job.settings.suspect_after.0;
    let servers = Nanos(random.within(suspicion / 2, 4 * suspicion) + conductor.0);
    (Fault::StopTogether { first, count, servers, conductor }, servers)
}

fn fault(random: &mut Random, job: &Job) -> (Fault, Nanos) {
    let trainers = u64::from(job.trainers);
    let trainer = |random: &mut Random| random.within(0, trainers - 1) as u16;
    let server = random.within(0, u64::from(job.dedicated.max(1)) - 1) as u16;
    let kind = random.within(0, 99);
    let pause = match random.within(0, 2) {
        0 => Nanos(random.within(100_000, 20_000_000)),
        1 => Nanos(random.within(20_000_000, 130_000_000)),
        _ => Nanos(random.within(90_000_000, 1_000_000_000)),
    };
    match kind {
        0..30 => (Fault::Kill(server), Nanos(0)),
        30..55 => (Fault::PauseServer(server, pause), pause),
        55..70 => (Fault::PauseTrainer(trainer(random), pause), pause),
        70..90 => (Fault::Cut(trainer(random), server, pause), pause),
        90..99 => {
            let a = trainer(random);
            let b = trainer(random);
            (if a == b { Fault::Kill(server) } else { Fault::Blip(a, b) }, Nanos(0))
        }
        _ => (Fault::KillTrainer(trainer(random)), Nanos(0)),
    }
}
