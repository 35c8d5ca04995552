//! One large step: the machines of a whole job without faults, each event once and in its turn.
//!
//! In: how large the job is. Out: every phase whole at every trainer, every work run once, nothing held; and printed, the time that
//! each machine took. `CADRE_SCALE=512x64x64x4x200000` asks for trainers, servers, layers, nano-batches and documents.
//!
//! What a machine does for an event must not grow with the peers or the parcels of a step: a job of the size above is then done
//! within minutes, else not within hours.
//!
//! All processes share one heap here, which glibc tidies when a long broadcast is allocated. That is most of the conductor's time;
//! `GLIBC_TUNABLES=glibc.malloc.mxfast=0` leaves it out.

#![allow(clippy::disallowed_types, reason = "it prints the time that machines take")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic, too")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what no calm job has is a failure")]

mod calm;

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_planner::{Document, Layout, Mask, Slot};
use cadre_protocol::conductor::{self, Conductor};
use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    At, Message, Nanos, Peer, Phase, PullId, Settings, Shape, Step, TrainerId, Work,
};
use cadre_step::header::{Header, Member};
use cadre_step::layers::Layers;
use cadre_step::packing::Packing;
use cadre_step::planned::PlannedStep;
use cadre_step::turns::Turns;

use self::calm::{Machines, server_id, step_of};

/// How large a job is.
#[derive(Clone, Copy, Debug)]
struct Size {
    trainers: u16,
    servers: u16,
    layers: u16,
    nanos: u16,
    documents: u32,
}

impl Size {
    /// As the environment says, or small enough for every test run.
    fn asked() -> Self {
        let text = std::env::var("CADRE_SCALE").unwrap_or_else(|_| "48x8x4x2x4000".into());
        let numbers: Vec<u32> = text.split('x').map(|it| it.parse().unwrap()).collect();
        let &[trainers, servers, layers, nanos, documents] = &numbers[..] else {
            panic!("CADRE_SCALE={text} is not five numbers, such as 512x64x64x4x200000")
        };
        let [trainers, servers, layers, nanos] =
            [trainers, servers, layers, nanos].map(|it| u16::try_from(it).unwrap());
        Self { trainers, servers, layers, nanos, documents }
    }

    /// Documents of 16 to 2,015 rows, end to end over all trainers.
    fn planned(self) -> PlannedStep {
        let any: Header = serde_json::from_str(include_str!("../../testing/header.json")).unwrap();
        let each = self.documents / u32::from(self.nanos);
        let nano = |nano: u32| {
            let rows: Vec<u32> = (0..each)
                .map(|it| 16 + (it * 7 + nano).wrapping_mul(2_654_435_761) % 2_000)
                .collect();
            let sum: u64 = rows.iter().map(|it| u64::from(*it)).sum();
            let own = u32::try_from(sum.div_ceil(u64::from(self.trainers))).unwrap();
            let document = |&rows: &u32| Document { rows, mask: Mask::Causal };
            let layout = Layout::end_to_end(rows.iter().map(document).collect(), own).unwrap();
            let mut ranks = layout.ranks().to_vec();
            ranks.resize(self.trainers.into(), Vec::new());
            Packing::new(&rows, ranks).unwrap()
        };
        let server = |index| Some(Member::Server { index, incarnation: 0, address: String::new() });
        let slot = Slot { weight: 100, head_start: 0, home: None, memory: 1 << 50 };
        PlannedStep::new(Arc::new(Header {
            layers: Layers::alike(any.layers.kind_of(0), self.layers).unwrap(),
            nanos: (0..self.nanos.into()).map(nano).collect(),
            turns: Turns::together(NonZeroU16::new(self.nanos).unwrap()),
            slots: vec![slot; self.servers.into()],
            fillers: (0..self.servers).map(server).collect(),
            ..any
        }))
        .unwrap()
    }
}

#[derive(Debug)]
enum Next {
    Message(Peer, Peer, Message),
    ToServer(usize, PullId),
    ToTrainer(usize, PullId),
    Launch(usize, At, Work),
}

/// Events that a kind of machine had, and the time in which it answered them.
#[derive(Clone, Copy, Debug, Default)]
struct Took {
    events: u64,
    commands: u64,
    time: Duration,
}

impl Took {
    fn one<C>(&mut self, commands: &mut Vec<C>, handle: impl FnOnce(&mut Vec<C>)) {
        let start = Instant::now();
        handle(commands);
        self.time += start.elapsed();
        self.events += 1;
        self.commands += commands.len() as u64;
    }
}

struct Job {
    step: Arc<Step>,
    now: Nanos,
    trainers: Vec<Trainer>,
    servers: Vec<Server>,
    conductor: Conductor,
    queue: VecDeque<Next>,
    /// By trainer: phases submitted, and whole.
    submitted: Vec<u32>,
    whole: Vec<u32>,
    accepted: u64,
    ran: u64,
    over: usize,
    is_done: bool,
    /// Of the conductor, all trainers, all servers.
    took: [Took; 3],
}

impl Job {
    fn new(planned: &PlannedStep) -> Self {
        let step = step_of(planned);
        let (count, settings, now) = (step.trainers(), Settings::default(), Nanos(0));
        let server = |it| Server::new(Host::Dedicated(server_id(it)), 1 << 50, settings, now);
        let mut job = Self {
            step,
            now,
            trainers: (0..count).map(|it| Trainer::new(TrainerId(it), settings, now)).collect(),
            servers: (0..planned.header.slots.len()).map(server).collect(),
            conductor: Conductor::new(count, settings, now),
            queue: VecDeque::new(),
            submitted: vec![0; count.into()],
            whole: vec![0; count.into()],
            accepted: 0,
            ran: 0,
            over: 0,
            is_done: false,
            took: [Took::default(); 3],
        };
        job.start(&Arc::clone(&job.step), planned);
        job
    }
}

impl Machines for Job {
    fn conduct(&mut self, event: conductor::Event) {
        let (mut commands, now) = (Vec::new(), self.now);
        self.took[0].one(&mut commands, |out| self.conductor.handle(now, event, out));
        for command in commands {
            match command {
                conductor::Command::Header { to, .. } => self.begin(to, Arc::clone(&self.step)),
                conductor::Command::Send { to, message } => {
                    self.queue.push_back(Next::Message(Peer::CONDUCTOR, to, message));
                }
                conductor::Command::SendAll { to, message } => {
                    let to = to.into_iter();
                    self.queue
                        .extend(to.map(|to| Next::Message(Peer::CONDUCTOR, to, message.clone())));
                }
                conductor::Command::StepDone(_) => self.is_done = true,
                conductor::Command::Publish { .. } => {}
                other => panic!("the conductor wants {other:?}"),
            }
        }
    }

    fn train(&mut self, me: usize, event: trainer::Event) {
        let (mut commands, now) = (Vec::new(), self.now);
        self.took[1].one(&mut commands, |out| self.trainers[me].handle(now, event, out));
        for command in commands {
            match command {
                trainer::Command::Send { to, message } => {
                    let me = Peer::Trainer(TrainerId(me as u16));
                    self.queue.push_back(Next::Message(me, to, message));
                }
                trainer::Command::Pull { pull, .. } => {
                    self.queue.push_back(Next::ToTrainer(me, pull));
                }
                trainer::Command::Accept { .. } => self.accepted += 1,
                trainer::Command::Complete(_) => self.whole[me] += 1,
                trainer::Command::StepOver(_) => self.over += 1,
                trainer::Command::Release(_) => {}
                other => panic!("trainer {me} wants {other:?}"),
            }
        }
        let may_submit = |it: &Self| {
            it.submitted[me] < it.step.phases()
                && it.trainers[me].runs(it.step.number())
                && it.trainers[me].may_submit()
        };
        if may_submit(self) {
            let at = At::new(self.step.number(), self.submitted[me]);
            self.submitted[me] += 1;
            self.train(me, trainer::Event::Submitted(at));
        }
    }

    fn serve(&mut self, me: usize, event: server::Event) {
        let (mut commands, now) = (Vec::new(), self.now);
        self.took[2].one(&mut commands, |out| self.servers[me].handle(now, event, out));
        for command in commands {
            match command {
                server::Command::Send { to, message } => {
                    self.queue.push_back(Next::Message(Peer::Server(server_id(me)), to, message));
                }
                server::Command::Pull { pull, .. } => {
                    self.queue.push_back(Next::ToServer(me, pull));
                }
                server::Command::Ready { at, work } => {
                    self.queue.push_back(Next::Launch(me, at, work));
                }
                server::Command::Ahead { at, works } => {
                    self.queue.extend(works.into_iter().map(|it| Next::Launch(me, at, it)));
                }
                server::Command::StepOver(_) => self.over += 1,
                server::Command::Accept { .. }
                | server::Command::FreeInput { .. }
                | server::Command::FreeResult { .. }
                | server::Command::Cancel(_) => {}
                other => panic!("server {me} wants {other:?}"),
            }
        }
    }
}

impl Job {
    fn act(&mut self, next: Next) {
        match next {
            Next::Message(from, to, message) => self.deliver(from, to, message),
            Next::ToServer(me, pull) => {
                self.serve(me, server::Event::Pulled { pull, result: Ok(0) });
            }
            Next::ToTrainer(me, pull) => {
                self.train(me, trainer::Event::Pulled { pull, result: Ok(0) });
            }
            Next::Launch(me, at, work) => {
                self.ran += 1;
                self.serve(me, server::Event::Ran { at, works: vec![work] });
            }
        }
    }

    fn run(&mut self) {
        let processes = self.trainers.len() + self.servers.len();
        // Acknowledgements and words that ride on nothing go when they are due.
        for _ in 0..100 {
            while let Some(next) = self.queue.pop_front() {
                self.act(next);
            }
            if self.is_done && self.over == processes {
                return;
            }
            self.now = self.now.after(Nanos::from_millis(5));
            self.tick(self.trainers.len(), self.servers.len());
        }
        panic!("the step never ends: submitted {:?}, whole {:?}", self.submitted, self.whole);
    }
}

#[test]
fn a_large_step_goes_through_all_machines() {
    let size = Size::asked();
    let start = Instant::now();
    let planned = size.planned();
    let planning = start.elapsed();
    let mut job = Job::new(&planned);
    job.run();
    let all = |of: fn(&Shape) -> usize| {
        (0..job.step.phases()).map(|it| of(job.step.shape(Phase(it))) as u64).sum::<u64>()
    };
    assert_eq!(job.ran, all(|it| it.works().len()), "each work ran once");
    let results = all(|it| it.works().map(|it| it.results.len()).sum());
    assert_eq!(job.accepted, results, "each result came once");
    assert!(job.whole.iter().all(|it| *it == job.step.phases()));
    println!("{size:?}: {} works, planned in {planning:?}", job.ran);
    for (name, Took { events, commands, time }) in
        ["conductor", "trainers", "servers"].into_iter().zip(job.took)
    {
        println!("{name}: {events} events, {commands} commands, {} ms", time.as_millis());
    }
}
