//! What goes wrong in a scenario, drawn before it begins.
//!
//! Processes are meant by what they are, not by which life of them it is: a fault hits whoever is there at its moment.

use cadre_exchange::Role;

use crate::job::Job;
use crate::random::{Random, hash};

const SECOND: u64 = 1_000_000_000;

/// A process, whichever life of it.
pub(crate) type Who = (Role, u16);

/// See the module. Spans are nanoseconds.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The processes end without a word.
    Kill { who: Vec<Who>, silently: bool },
    /// They do nothing for a while; their kernels do.
    Pause(Vec<Who>, u64),
    /// Links between two break, and stand again when they are opened. Which ends hear of it.
    Blip(Who, Who, [bool; 2]),
    /// Nothing passes between two for a while: refused, or silently.
    Cut(Who, Who, u64, bool),
    /// The controller replaces servers that are well, all in one view.
    Replace(Vec<u16>),
    /// The controller adds a server.
    Add,
    /// What the second one pulls of these of the first one does not come any more; messages do.
    Dry(Who, Who, Pulled),
    /// A server loses its power while the conductor plans a header, and is missed in the moment in which that is planned.
    Silent(u16),
    /// Words that one publishes come with this byte changed, wherever they come.
    Spoil(Who, u64),
    /// Rows take their time from now on.
    Crawl(u64),
    /// A server is asked to end.
    Drain(u16),
    /// A server is given to another job, and comes back under its name.
    Lend(u16),
    /// The controller is away for a while.
    Away(u64),
    /// The main thread of a trainer stands still, for a while or for good. Its other threads do not. It has said so where it is
    /// for longer than it may.
    Stand(u16, Option<u64>),
    /// The controller is asked to end the job.
    Stop,
    /// A trainer is asked to end.
    Terminate(u16),
    /// A member says so many things that it should not.
    Speak(Who, u32),
}

/// What is pulled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pulled {
    Words,
    Results,
}

/// How a scenario is broken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Weather {
    /// Nothing goes wrong.
    Calm,
    /// Faults now and then.
    Stormy,
    /// All faults in one moment.
    Burst,
    /// One server goes after the other, and others come, while two steps are out.
    Relay,
    /// Servers are killed, one after the other, where memory just fits; others come at once and have the memory of the dead.
    Narrow,
    /// Nothing but what a member says that means harm.
    Hostile,
}

/// What goes wrong, and when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) list: Vec<(u64, Fault)>,
    /// When all of them are over.
    pub(crate) over: u64,
}

impl Faults {
    /// Whether any process is killed.
    pub(crate) fn kills(&self) -> bool {
        self.list.iter().any(|it| matches!(it.1, Fault::Kill { .. }))
    }

    pub(crate) fn random(random: &mut Random, job: &Job, weather: Weather) -> Self {
        let mut faults = Self::default();
        if weather == Weather::Calm {
            return faults;
        }
        if weather == Weather::Relay {
            return Self::relay(random, job);
        }
        if weather == Weather::Narrow {
            return Self::narrow(random, job);
        }
        if weather == Weather::Hostile {
            return Self::hostile(random, job);
        }
        // A step takes about so long; the first ones come after the processes have found each other.
        let phases = u64::from(job.layers.count()) * job.nanos as u64 * 2;
        let step = phases * (2 * job.linear + 3 * job.launch + 10_000_000);
        let span = job.steps * step + 100_000_000;
        let moment = random.within(0, span);
        for _ in 0..random.within(1, 5) {
            let when = match weather {
                Weather::Burst => moment + random.within(0, 2_000_000),
                Weather::Calm
                | Weather::Stormy
                | Weather::Relay
                | Weather::Narrow
                | Weather::Hostile => random.within(0, span),
            };
            let fault = fault(random, job);
            let lasts = match fault {
                Fault::Pause(_, span) | Fault::Cut(_, _, span, _) | Fault::Away(span) => span,
                Fault::Kill { .. }
                | Fault::Blip(..)
                | Fault::Replace(_)
                | Fault::Add
                | Fault::Dry(..)
                | Fault::Silent(_)
                | Fault::Spoil(..)
                | Fault::Crawl(_)
                | Fault::Drain(_)
                | Fault::Lend(_)
                | Fault::Stand(..)
                | Fault::Stop
                | Fault::Terminate(_)
                | Fault::Speak(..) => 0,
            };
            faults.over = faults.over.max(when + lasts);
            faults.list.push((when, fault));
        }
        // Beside the others, which stay what they were.
        let mut aside = Random::new(hash(&[job.seed, 13]));
        if aside.chance(15) {
            let (when, rank) =
                (aside.within(0, span), aside.within(0, u64::from(job.trainers) - 1));
            let lasts = aside.within(1, 20 * SECOND);
            let for_good = !job.stopped && aside.chance(50);
            // Longer than it may without a word. A job that is stopped waits for the end of all faults.
            let busy = !for_good && !job.stopped && aside.chance(20);
            let lasts = if busy { lasts + job.stalled().0 } else { lasts };
            faults.over = faults.over.max(when + lasts);
            faults.list.push((when, Fault::Stand(rank as u16, (!for_good).then_some(lasts))));
        }
        let mut aside = Random::new(hash(&[job.seed, 107]));
        if aside.chance(10) {
            let rank = aside.within(0, u64::from(job.trainers) - 1) as u16;
            let dry = Fault::Dry(who(&mut aside, job), (Role::Trainer, rank), Pulled::Results);
            let when = aside.within(0, span);
            faults.over = faults.over.max(when);
            faults.list.push((when, dry));
        }
        let mut end = Random::new(hash(&[job.seed, 41]));
        if end.chance(10) {
            faults.list.push((end.within(0, span), Fault::Stop));
        }
        faults
    }
}

impl Faults {
    /// Servers are lost one after the other, most of them silently.
    fn narrow(random: &mut Random, job: &Job) -> Self {
        let mut faults = Self::default();
        let mut when = SECOND / 3;
        for _ in 0..random.within(3, 8) {
            when += random.within(SECOND / 50, SECOND);
            let who = vec![(Role::Server, random.within(0, u64::from(job.servers) - 1) as u16)];
            let silently = random.chance(70);
            faults.list.push((when, Fault::Kill { who, silently }));
        }
        faults.over = when;
        faults
    }

    /// A member that is not the conductor speaks now and then, or all the time.
    fn hostile(random: &mut Random, job: &Job) -> Self {
        let mut faults = Self::default();
        let who = if job.servers > 0 && random.chance(40) {
            (Role::Server, random.within(0, u64::from(job.servers) - 1) as u16)
        } else {
            (Role::Trainer, random.within(1, u64::from(job.trainers) - 1) as u16)
        };
        let longest = *random.pick(&[SECOND / 10, SECOND / 2, 5 * SECOND]);
        let most = *random.pick(&[1, 5, 40]);
        for _ in 0..random.within(1, 20) {
            let (when, count) = (random.within(0, longest), random.within(1, most));
            faults.list.push((when, Fault::Speak(who, count as u32)));
            faults.over = faults.over.max(when);
        }
        faults
    }

    /// The pool changes hands. Somebody is always there soon: only the first server is never replaced, once another one was added.
    fn relay(random: &mut Random, job: &Job) -> Self {
        let mut faults = Self::default();
        let (mut when, mut servers, mut drained) = (SECOND / 2, job.servers, false);
        for _ in 0..random.within(3, 8) {
            when += random.within(SECOND / 10, 5 * SECOND / 2);
            let fault = match random.within(0, 9) {
                0..6 => {
                    let who = vec![(Role::Server, random.within(0, u64::from(servers) - 1) as u16)];
                    Fault::Kill { who, silently: false }
                }
                6..8 => {
                    servers += 1;
                    Fault::Add
                }
                8 if servers > job.servers && !drained => {
                    drained = true;
                    Fault::Drain(0)
                }
                _ => Fault::Replace(vec![random.within(0, u64::from(servers) - 1) as u16]),
            };
            faults.list.push((when, fault));
        }
        faults.over = when;
        faults
    }
}

fn who(random: &mut Random, job: &Job) -> Who {
    if job.servers > 0 && random.chance(60) {
        (Role::Server, random.within(0, u64::from(job.servers) - 1) as u16)
    } else {
        (Role::Trainer, random.within(0, u64::from(job.trainers) - 1) as u16)
    }
}

fn servers(random: &mut Random, job: &Job) -> Vec<u16> {
    (0..job.servers).filter(|_| random.chance(60)).collect()
}

fn fault(random: &mut Random, job: &Job) -> Fault {
    let lengths =
        [SECOND / 20, SECOND / 2, 3 * SECOND / 4, 3 * SECOND / 2, 4 * SECOND, 12 * SECOND];
    let longest = *random.pick(&lengths);
    let span = random.within(1, longest);
    let others = |it: Vec<u16>| it.into_iter().map(|it| (Role::Server, it)).collect::<Vec<_>>();
    match random.within(0, 99) {
        0..20 => {
            let who = others(servers(random, job));
            Fault::Kill { who, silently: random.chance(20) }
        }
        20..23 => {
            let who = vec![(Role::Trainer, random.within(0, u64::from(job.trainers) - 1) as u16)];
            Fault::Kill { who, silently: random.chance(20) }
        }
        23..35 => Fault::Pause(others(servers(random, job)), span),
        35..50 => {
            // Servers and the conductor at once, the conductor for less than it is missed.
            let mut all = others(servers(random, job));
            all.push((Role::Trainer, 0));
            Fault::Pause(all, span)
        }
        50..58 => Fault::Pause(vec![who(random, job)], span),
        58..76 => {
            let heard = *random.pick(&[[true; 2], [true; 2], [true, false], [false, true]]);
            Fault::Blip(who(random, job), who(random, job), heard)
        }
        76..79 => Fault::Lend(random.within(0, u64::from(job.servers.max(1)) - 1) as u16),
        79..88 => Fault::Cut(who(random, job), who(random, job), span, random.chance(50)),
        88..92 => Fault::Replace(servers(random, job)),
        92..95 => Fault::Add,
        95..97 => Fault::Crawl(*random.pick(&[100, 10_000, 200_000])),
        97..98 => Fault::Drain(random.within(0, u64::from(job.servers.max(1)) - 1) as u16),
        _ => Fault::Away(span),
    }
}
