//! What goes wrong in a scenario, and when.

use cadre_protocol::Nanos;

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
}

#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) list: Vec<(Nanos, Fault)>,
    /// Whether the supervisor replaces lost servers.
    pub(crate) replace: bool,
    /// From when on nothing goes wrong any more.
    pub(crate) over: Nanos,
}

impl Faults {
    pub(crate) fn none() -> Self {
        Self { list: Vec::new(), replace: true, over: Nanos(0) }
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
        Self { list, replace: random.chance(70), over }
    }
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
