//! Steps of any turns: numbers of phases (`turns/order.rs`), and the machines of the protocol that go through them.
//!
//! In: drawn turns, documents, windows. Out: every phase once, a forward before its backward, rows kept until every trainer has
//! what is made of them, a server's memory that is planned for.
//!
//! The machines are those of a whole job without faults: all trainers, dedicated servers whose memory just fits, the conductor;
//! messages, pulls and launches end in any order.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic, too")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what no calm job has is a failure")]

mod calm;
#[path = "turns/order.rs"]
mod order;
#[path = "../../testing/turns.rs"]
mod turns;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_planner::{DocumentId, Heads, Mask, Slot, Stretch};
use cadre_protocol::conductor::{self, Conductor};
use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{At, Message, Nanos, Peer, Phase, PullId, Settings, Step, TrainerId, Work};
use cadre_step::header::{Header, Member};
use cadre_step::layers::{Kind, Layers};
use cadre_step::packing::Packing;
use cadre_step::planned::{PlannedStep, needed};
use proptest::prelude::*;

use self::calm::{Machines, server_id, step_of};

/// A source of numbers that a seed begins.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Layers of two kinds, over documents that span trainers, on servers with room for two phases and the largest bundle.
fn planned(draw: &mut Draw, trainers: u16, servers: u16) -> PlannedStep {
    let any: Header = serde_json::from_str(include_str!("../../testing/header.json")).unwrap();
    let (layers, nanos) = (1 + draw.below(3) as u16, 1 + draw.below(4) as u16);
    let turns = turns::drawn(layers, nanos, &mut |bound| draw.below(bound));
    // Phases of the wide kind are several times as large as those of the other.
    let wide = Kind::causal(Heads { query: 6, kv: 3, dim: 32 });
    let near = Heads { query: 2, kv: 1, dim: 8 };
    let near = Kind { mask: Mask::Window { left: 60 }, ..Kind::causal(near) };
    let kind = |_| if draw.below(2) == 0 { near } else { wide };
    let layers = Layers::new((0..layers).map(kind)).unwrap();
    let costs = vec![any.costs[0]; layers.kinds().len()];
    let nano = |_| {
        let rows = u32::from(trainers) * (40 + draw.below(300) as u32);
        let part = rows / u32::from(trainers);
        let own =
            |rank| Stretch { document: DocumentId(0), start: rank * part, end: (rank + 1) * part };
        Packing::new(&[rows], (0..trainers.into()).map(|it| vec![own(it)]).collect()).unwrap()
    };
    let nanos = (0..nanos).map(nano).collect();
    let server = |index| Member::Server { index, incarnation: 0, address: String::new() };
    let fillers = (0..servers).map(|it| Some(server(it))).collect();
    let slot = |memory| Slot { weight: 100, head_start: 0, home: None, memory };
    let slots = vec![slot(1 << 30); servers.into()];
    let header = Header { layers, costs, turns, nanos, fillers, slots, ..any };
    let roomy = PlannedStep::new(Arc::new(header.clone())).unwrap();
    let needed = needed(roomy.plans.iter().map(|it| (&*it.problem, &*it.plan)));
    // A slot without work is not asked, but takes part.
    let header = Header { slots: needed.into_iter().map(|it| slot(it.max(1))).collect(), ..header };
    // Plans of slots that just fit may be others, which fit as well.
    PlannedStep::new(Arc::new(header)).unwrap_or(roomy)
}

#[derive(Debug)]
enum Pending {
    ToServer(usize, PullId),
    ToTrainer(usize, PullId),
    Launch(usize, At, Work),
}

/// A job without faults.
struct Job {
    step: Arc<Step>,
    settings: Settings,
    now: Nanos,
    trainers: Vec<Trainer>,
    servers: Vec<Server>,
    conductor: Conductor,
    messages: BTreeMap<(Peer, Peer), VecDeque<Message>>,
    pending: Vec<Pending>,
    /// By trainer: phases submitted, whole ones of which an earlier one is not, how many are whole from the first on, and released.
    submitted: Vec<u32>,
    apart: Vec<BTreeSet<u32>>,
    whole: Vec<u32>,
    released: Vec<u32>,
    /// By server: bytes of inputs and results, the budget, and what is pulled.
    held: Vec<u64>,
    memory: Vec<u64>,
    pulled: BTreeMap<(usize, PullId), u64>,
    /// By server: works that run ahead of their bundle and have not run, and bytes of the copy that they read.
    copies: Vec<(BTreeSet<(At, Work)>, u64)>,
    ran: BTreeSet<(usize, At, Work)>,
    over: usize,
    is_done: bool,
}

impl Job {
    fn new(planned: &PlannedStep, window: usize) -> Self {
        let slots = planned.header.slots.len();
        let step = step_of(planned);
        let (count, settings) = (step.trainers(), Settings { window, ..Settings::default() });
        let (now, zeros) = (Nanos(0), vec![0; count.into()]);
        let memory: Vec<_> = planned.header.slots.iter().map(|it| it.memory).collect();
        let server = |(it, memory): (usize, &u64)| {
            Server::new(Host::Dedicated(server_id(it)), *memory, settings, now)
        };
        let mut job = Self {
            step,
            settings,
            now,
            trainers: (0..count).map(|it| Trainer::new(TrainerId(it), settings, now)).collect(),
            servers: memory.iter().enumerate().map(server).collect(),
            conductor: Conductor::new(count, settings, now),
            messages: BTreeMap::new(),
            pending: Vec::new(),
            submitted: zeros.clone(),
            apart: vec![BTreeSet::new(); count.into()],
            whole: zeros.clone(),
            released: zeros,
            held: vec![0; slots],
            memory,
            pulled: BTreeMap::new(),
            copies: vec![Default::default(); slots],
            ran: BTreeSet::new(),
            over: 0,
            is_done: false,
        };
        job.start(&Arc::clone(&job.step), planned);
        job
    }

    /// The conductor sends a message.
    fn say(&mut self, to: Peer, message: Message) {
        if let Message::Watermark { at } = &message {
            let all = self.whole.iter().all(|it| *it > at.phase.0);
            assert!(all, "the watermark is at {at:?}, trainers at {:?}", self.whole);
        }
        self.send(Peer::CONDUCTOR, to, message);
    }
}

impl Machines for Job {
    fn conduct(&mut self, event: conductor::Event) {
        let mut commands = Vec::new();
        self.conductor.handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                conductor::Command::Header { to, .. } => self.begin(to, Arc::clone(&self.step)),
                conductor::Command::Send { to, message } => {
                    self.say(to, message);
                }
                conductor::Command::SendAll { to, message } => {
                    for to in to {
                        self.say(to, message.clone());
                    }
                }
                conductor::Command::StepDone(_) => self.is_done = true,
                conductor::Command::Publish { .. } | conductor::Command::Filled { .. } => {}
                other => panic!("the conductor wants {other:?}"),
            }
        }
    }

    fn train(&mut self, me: usize, event: trainer::Event) {
        let mut commands = Vec::new();
        self.trainers[me].handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                trainer::Command::Send { to, message } => {
                    self.send(Peer::Trainer(TrainerId(me as u16)), to, message);
                }
                trainer::Command::Pull { pull, .. } => {
                    self.pending.push(Pending::ToTrainer(me, pull));
                }
                trainer::Command::Complete(at) => {
                    assert!(at.phase.0 < self.submitted[me] && self.apart[me].insert(at.phase.0));
                    while self.apart[me].remove(&self.whole[me]) {
                        self.whole[me] += 1;
                    }
                }
                trainer::Command::Release(at) => {
                    assert_eq!(at.phase.0, self.released[me], "rows go in the order of phases");
                    let least = self.whole.iter().min().copied().unwrap_or(0);
                    assert!(at.phase.0 < least, "somebody may still need rows of {at:?}");
                    self.released[me] += 1;
                }
                trainer::Command::Accept { .. } | trainer::Command::Discard { .. } => {}
                trainer::Command::StepOver(_) => self.over += 1,
                other => panic!("trainer {me} wants {other:?}"),
            }
        }
    }

    fn serve(&mut self, me: usize, event: server::Event) {
        let mut commands = Vec::new();
        self.servers[me].handle(self.now, event, &mut commands);
        for command in commands {
            match command {
                server::Command::Send { to, message } => {
                    self.send(Peer::Server(server_id(me)), to, message);
                }
                server::Command::Pull { pull, at, parcel, .. } => {
                    let bytes = self.step.shape(at.phase).parcels()[parcel.0 as usize].bytes;
                    self.held[me] += bytes;
                    self.pulled.insert((me, pull), bytes);
                    self.pending.push(Pending::ToServer(me, pull));
                }
                server::Command::Accept { at, parcel, .. } => {
                    let from = self.step.shape(at.phase).parcels()[parcel.0 as usize].from;
                    let (first, end) =
                        (self.released[usize::from(from.0)], self.submitted[usize::from(from.0)]);
                    assert!((first..end).contains(&at.phase.0), "rows of {at:?} are not there");
                }
                server::Command::Discard { pull } => self.held[me] -= self.pulled[&(me, pull)],
                server::Command::Ready { at, work } => {
                    self.held[me] += self.result(at, work);
                    self.pending.push(Pending::Launch(me, at, work));
                }
                server::Command::Ahead { at, works } => {
                    assert!(self.copies[me].0.is_empty(), "server {me} makes a second copy");
                    let shape = self.step.shape(at.phase);
                    let bundle = shape.work(works[0]).bundle;
                    let bytes: u64 = shape
                        .parcels()
                        .iter()
                        .filter(|it| it.bundle == bundle)
                        .map(|it| it.bytes)
                        .sum();
                    self.held[me] += bytes;
                    self.copies[me] = (works.iter().map(|it| (at, *it)).collect(), bytes);
                    for work in works {
                        self.held[me] += self.result(at, work);
                        self.pending.push(Pending::Launch(me, at, work));
                    }
                }
                server::Command::FreeInput { at, parcel } => {
                    self.held[me] -= self.step.shape(at.phase).parcels()[parcel.0 as usize].bytes;
                }
                server::Command::FreeResult { at, work } => self.held[me] -= self.result(at, work),
                server::Command::Cancel(_) => {}
                server::Command::StepOver(_) => self.over += 1,
                other => panic!("server {me} wants {other:?}"),
            }
            assert!(self.held[me] <= self.memory[me], "server {me} holds {} bytes", self.held[me]);
        }
    }
}

impl Job {
    fn result(&self, at: At, work: Work) -> u64 {
        self.step.shape(at.phase).work(work).results.iter().map(|it| it.1).sum()
    }

    fn send(&mut self, from: Peer, to: Peer, message: Message) {
        self.messages.entry((from, to)).or_default().push_back(message);
    }

    /// Something happens; whether anything was left to happen.
    fn act(&mut self, draw: &mut Draw) -> bool {
        let phases = self.step.phases();
        let able = |me: &usize| self.submitted[*me] < phases && self.trainers[*me].may_submit();
        let able: Vec<_> = (0..self.trainers.len()).filter(able).collect();
        let links: Vec<_> =
            self.messages.iter().filter(|it| !it.1.is_empty()).map(|it| *it.0).collect();
        let choices = able.len() + links.len() + self.pending.len();
        if choices == 0 {
            return false;
        }
        let choice = draw.below(choices as u64) as usize;
        if let Some(&me) = able.get(choice) {
            let at = At::new(self.step.number(), self.submitted[me]);
            self.submitted[me] += 1;
            self.train(me, trainer::Event::Submitted(at));
            let kept = self.submitted[me] - self.released[me];
            assert!(
                kept as usize <= self.settings.window,
                "trainer {me} keeps rows of {kept} phases"
            );
        } else if let Some(&(from, to)) = links.get(choice - able.len()) {
            let message = self.messages.get_mut(&(from, to)).and_then(VecDeque::pop_front);
            self.deliver(from, to, message.expect("the link has one"));
        } else {
            match self.pending.swap_remove(choice - able.len() - links.len()) {
                Pending::ToServer(me, pull) => {
                    self.serve(me, server::Event::Pulled { pull, result: Ok(0) });
                }
                Pending::ToTrainer(me, pull) => {
                    self.train(me, trainer::Event::Pulled { pull, result: Ok(0) });
                }
                Pending::Launch(me, at, work) => {
                    assert!(self.ran.insert((me, at, work)), "{work:?} of {at:?} ran twice");
                    let (reading, bytes) = &mut self.copies[me];
                    if reading.remove(&(at, work)) && reading.is_empty() {
                        self.held[me] -= std::mem::take(bytes);
                    }
                    self.serve(me, server::Event::Ran { at, works: vec![work] });
                }
            }
        }
        true
    }

    fn run(&mut self, draw: &mut Draw) {
        let processes = self.trainers.len() + self.servers.len();
        for _ in 0..500 {
            while self.act(draw) {}
            if self.is_done && self.over == processes {
                return;
            }
            // Acknowledgements go alone after a while; nobody is suspect so soon.
            self.now = self.now.after(Nanos::from_millis(5));
            self.tick(self.trainers.len(), self.servers.len());
        }
        panic!("the step never ends: submitted {:?}, whole {:?}", self.submitted, self.whole);
    }
}

proptest! {
    #[test]
    fn machines_go_through_any_turns_within_window_watermark_and_memory(
        trainers in 1_u16..4, servers in 1_u16..4, window in 1_usize..5, seed: u64,
    ) {
        let mut draw = Draw(seed);
        let planned = planned(&mut draw, trainers, servers);
        let mut job = Job::new(&planned, window);
        job.run(&mut draw);
        let works = (0..).map(Phase).zip(planned.order.iter()).map(|(phase, at)| {
            let nano = &planned.plans[planned.plan_index(at)];
            // Each phase asks for what its own nano-batch, kind of layers and direction need.
            let [forward, backward] = nano.lists.shapes().unwrap();
            let shape = if at.direction == cadre_planner::Direction::Forward { forward } else { backward };
            assert_eq!(**job.step.shape(phase), shape, "{at:?}");
            planned.works(phase)
        });
        prop_assert_eq!(job.ran.len(), works.sum::<usize>(), "each work ran once");
        prop_assert_eq!(job.held, vec![0; servers.into()]);
    }
}
