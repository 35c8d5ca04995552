//! What a scenario is made of: trainers, servers, steps, documents, settings.
//!
//! In: random numbers. Out: a [`Job`]. Rows are hashes of where they are, so that everybody makes the same without asking.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use cadre_control::Moment;
use cadre_crds::Wire;
use cadre_planner::{Costs, Document, Heads, Layout, LinkMap, Mask, Tolerance};
use cadre_protocol::{Nanos, OnPoolLoss, Rules, Settings};
use cadre_step::conduct::{Draft, Offer, Standby, View};
use cadre_step::envelope::{Lengths, NanoLengths};
use cadre_step::header::{Header, KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers, Sinks};
use cadre_step::packing::Packing;
use cadre_step::phases::Direction;
use cadre_step::planned::{PlannedStep, needed, plans};
use cadre_step::turns::Turns;

use crate::random::{Random, hash};

/// What computes alike.
pub(crate) const NUMERICS: &str = "simulated";
/// Jobs of seeds from here on are **brief**: few phases of few rows. A soak runs many of them in the time of one other.
pub(crate) const BRIEF: u64 = 1 << 50;
/// Steps times layers times nano-batches of a brief job, and rows of a trainer in a nano-batch, at most.
const BRIEF_PARTS: u64 = 4;
const BRIEF_TOKENS: u32 = 24;
/// Memory of a worker that has more than it needs.
pub(crate) const MEMORY: u64 = 1 << 26;

/// See the module.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "what is drawn of a job")]
pub(crate) struct Job {
    pub(crate) seed: u64,
    pub(crate) trainers: u16,
    pub(crate) servers: u16,
    pub(crate) in_place: bool,
    pub(crate) steps: u64,
    pub(crate) layers: Layers,
    /// Nano-batches of a step, and whether its turns are drawn.
    pub(crate) nanos: usize,
    pub(crate) draws_turns: bool,
    /// Some nano-batches leave a trainer out.
    pub(crate) leaves_out: bool,
    pub(crate) kv_heads: KvHeads,
    pub(crate) wire: Wire,
    /// Where there is no server, each rank computes its own rows, wherever documents begin and end.
    pub(crate) local: bool,
    /// Where the controller is told how far the job is, because faults are to come there.
    pub(crate) moments: BTreeSet<Moment>,
    /// Rows of a trainer in a nano-batch.
    pub(crate) tokens: u32,
    pub(crate) settings: Settings,
    /// Time of a launch, and of the model between two phases, at most.
    pub(crate) launch: u64,
    pub(crate) linear: u64,
    /// The controller ends the job, once nothing is left of its last step: then nobody holds anything.
    pub(crate) stopped: bool,
    /// Trainers learn that a step is the last when they begin it.
    pub(crate) open_ended: bool,
    /// The loss depends on the LSE: backward calls bring its gradient.
    pub(crate) uses_lse: bool,
    /// Numbers between two rows of every tensor that a trainer hands in or out.
    pub(crate) gap: usize,
    /// Bytes of messages that wait for one peer, at most; drawn where there is none.
    pub(crate) queue: Option<usize>,
    /// Trainers wait for each other at the end of a step.
    pub(crate) reduces: bool,
    /// Trainers announce the next step as soon as a step begins, or at any time in it.
    pub(crate) announces_late: bool,
    /// Bytes of the longest word that rides in its ring; longer ones are published and pulled.
    pub(crate) riding: usize,
    /// Of every worker.
    pub(crate) memory: u64,
    /// The controller starts another server so soon after one is gone, at the latest.
    pub(crate) respawn: u64,
    /// A member says what it should not: others may be refused for it.
    pub(crate) is_hostile: bool,
    /// All ranks leave when the header of this step is there, within seconds; or when they have submitted so many phases of it.
    pub(crate) quits: Option<u64>,
    pub(crate) quits_after: u32,
}

impl Job {
    pub(crate) fn new(seed: u64, random: &mut Random, rules: Rules) -> Self {
        let most = *random.pick(&[2, 2, 3, 4]);
        let trainers = random.within(1, most) as u16;
        let in_place = random.chance(30);
        let most = *random.pick(&[2, 3, 3, 5]);
        let servers = random.within(u64::from(!in_place), most) as u16;
        let on_pool_loss = match random.within(0, 2) {
            0 => OnPoolLoss::Fail,
            1 => OnPoolLoss::Local,
            _ => OnPoolLoss::Wait(Nanos::from_millis(30_000)),
        };
        let suspect_after = Nanos::from_millis(*random.pick(&[500, 1_000, 1_000]));
        let settings = Settings { suspect_after, on_pool_loss, rules, ..Settings::default() };
        let slow = *random.pick(&[1, 1, 10, 100]);
        let kv = random.within(1, 2) as u16;
        let mut own = Random::new(hash(&[seed, 19]));
        let draws_turns = own.chance(50);
        let (mut steps, mut count) = (random.within(1, 4), random.within(1, 3));
        let nanos = random.within(1, if draws_turns { 3 } else { 2 }) as usize;
        if seed >= BRIEF {
            count = count.min(BRIEF_PARTS / nanos as u64);
            steps = steps.min(BRIEF_PARTS / (nanos as u64 * count));
        }
        let heads = Heads { query: kv * random.within(1, 2) as u16, kv, dim: 8 };
        let layers = layers(seed, count, heads);
        let job = Self {
            seed,
            trainers,
            servers,
            in_place,
            steps,
            layers,
            nanos,
            draws_turns,
            leaves_out: Random::new(hash(&[seed, 61])).chance(30),
            kv_heads: *Random::new(hash(&[seed, 43])).pick(&[KvHeads::Apart, KvHeads::Together]),
            wire: *Random::new(hash(&[seed, 97])).pick(&[Wire::F32, Wire::F32, Wire::Bf16]),
            local: Random::new(hash(&[seed, 101])).chance(50),
            moments: BTreeSet::new(),
            tokens: *random.pick(&[8, 24, 40, 150]),
            settings,
            launch: 200_000 * slow,
            linear: 300_000 * slow,
            stopped: random.chance(60),
            open_ended: Random::new(hash(&[seed, 17])).chance(50),
            uses_lse: Random::new(hash(&[seed, 107])).chance(30),
            gap: *Random::new(hash(&[seed, 109])).pick(&[0, 0, 1, 5]),
            queue: Random::new(hash(&[seed, 113])).chance(10).then_some(2_000),
            reduces: Random::new(hash(&[seed, 29])).chance(70),
            announces_late: Random::new(hash(&[seed, 31])).chance(50),
            riding: *Random::new(hash(&[seed, 59])).pick(&[4096, 4096, 200, 50]),
            memory: MEMORY,
            respawn: 1_000_000_000,
            is_hostile: false,
            quits: None,
            quits_after: 0,
        };
        job.short().with_moments()
    }

    /// The same, in some jobs with moments at which faults are to come.
    fn with_moments(mut self) -> Self {
        let mut random = Random::new(hash(&[self.seed, 103]));
        let count = if random.chance(15) { random.within(1, 3) } else { 0 };
        for _ in 0..count {
            let step = random.within(0, self.steps - 1);
            let direction = *random.pick(&[Direction::Forward, Direction::Backward]);
            let turns = self.turns(step);
            let goes = |it: &Turns| it.list().iter().any(|it| it.direction == direction);
            if turns.as_ref().is_none_or(goes) {
                self.moments.insert(Moment { step, direction });
            }
        }
        self
    }

    /// Whether every rank computes its own rows.
    pub(crate) fn is_local(&self) -> bool {
        self.local && self.in_place && self.servers == 0
    }

    /// The same, most often with fewer rows: where they are cut to the smallest chunks, each a bundle of its own, and where there
    /// are many. One of ten stays as it is: with thousands of pulls at a time it may cost as much as fifty others.
    fn short(self) -> Self {
        let mut random = Random::new(hash(&[self.seed, 53]));
        let smallest = self.layers.kinds().iter().filter_map(|it| it.chunk).min();
        let most = match smallest.map_or(u32::MAX, NonZeroU32::get) {
            _ if self.seed >= BRIEF => BRIEF_TOKENS,
            _ if random.chance(10) => u32::MAX,
            0..4 => 16,
            4..16 => 40,
            _ if random.chance(50) => 40,
            _ => u32::MAX,
        };
        Self { tokens: self.tokens.min(most), ..self }
    }

    /// The same with long steps, a few servers and nobody else, for which it waits.
    pub(crate) fn waiting(self, random: &mut Random) -> Self {
        let on_pool_loss = OnPoolLoss::Wait(Nanos::from_millis(30_000));
        let phases = u64::from(self.layers.count()) * self.nanos as u64 * 2;
        let most = if self.seed >= BRIEF { 2 } else { 4 };
        Self {
            servers: random.within(1, 2) as u16,
            in_place: false,
            steps: random.within(2, most),
            settings: Settings { on_pool_loss, ..self.settings },
            linear: 6_000_000_000 / phases,
            announces_late: true,
            moments: BTreeSet::new(),
            ..self
        }
        .with_moments()
    }

    /// The same with as much memory as its largest step needs and no more, several servers, and others that come at once in the
    /// place of those that are gone.
    pub(crate) fn narrow(self, random: &mut Random) -> Self {
        let it = self.waiting(random);
        let linear = it.linear / 4;
        let servers = random.within(3, 5) as u16;
        let mut it = Self { servers, linear, respawn: 2_000_000, ..it };
        it.memory = it.needed();
        it
    }

    /// The same, where one of the members means harm.
    pub(crate) fn with_a_hostile_member(self) -> Self {
        Self { trainers: self.trainers.max(2), is_hostile: true, ..self }
    }

    /// What the largest step needs of a server.
    fn needed(&self) -> u64 {
        let offer = |index| Offer {
            weight: 100,
            home: None,
            memory: Some(MEMORY),
            member: Some(Member::Server { index, incarnation: 0, address: String::new() }),
            numerics: None,
        };
        let slots = (0..self.servers).map(offer).collect();
        let view = View { number: ViewNumber::default(), slots };
        let needed = |step| {
            let lengths = (0..self.trainers).map(|rank| (rank, self.lengths(step, rank)));
            let made = self.draft().order(step, lengths.collect(), &view).make();
            let plans = plans(&made.expect("a sound step").header).expect("there is room");
            needed(plans.iter().map(|(problem, plan)| (problem, plan))).into_iter().max()
        };
        (0..self.steps).filter_map(needed).max().unwrap_or(MEMORY)
    }

    /// How many steps there are, if trainers know it from the first moment.
    pub(crate) fn known_steps(&self) -> Option<u64> {
        (!self.stopped && !self.open_ended).then_some(self.steps)
    }

    /// After so long a trainer stands still; in a job that is stopped they all do, at its end.
    pub(crate) fn stalled(&self) -> Nanos {
        Nanos::from_millis(if self.stopped { 600_000 } else { 60_000 })
    }

    /// The packed stream of a nano-batch, end to end over all trainers. What its documents let rows keep is the layers'.
    pub(crate) fn layout(&self, step: u64, nano: usize) -> Layout {
        let mut random = Random::new(hash(&[self.seed, step, nano as u64, 7]));
        let mut left = self.tokens * u32::from(self.trainers);
        let mut documents = Vec::new();
        while left > 0 {
            let most = *random.pick(&[left, left, 30, 60]);
            let rows = random.within(1, u64::from(most.min(left))) as u32;
            documents.push(Document { rows, mask: Mask::Causal });
            left -= rows;
        }
        let layout = Layout::end_to_end(documents, self.tokens).expect("documents fill the ranks");
        // Of some jobs a rank has no rows of some nano-batches, and another one has them.
        let mut own = Random::new(hash(&[self.seed, step, nano as u64, 29]));
        if self.trainers == 1 || !self.leaves_out || own.chance(50) {
            return layout;
        }
        let (documents, mut ranks) = (layout.documents().to_vec(), layout.ranks().to_vec());
        let without = own.within(0, u64::from(self.trainers) - 1) as usize;
        let moved = std::mem::take(&mut ranks[without]);
        ranks[(without + 1) % usize::from(self.trainers)].extend(moved);
        Layout::new(documents, ranks).expect("every row stays")
    }

    /// Whether a step is as its trainers have announced it.
    pub(crate) fn has_layouts(&self, planned: &PlannedStep) -> bool {
        let Header { step, nanos, turns, .. } = planned.header.as_ref();
        let layouts = (0..self.nanos).map(|it| Packing::from(&self.layout(*step, it)));
        nanos.iter().cloned().eq(layouts) && self.turns(*step).is_none_or(|it| it == *turns)
    }

    /// The order of a step's phases, another one in each step.
    pub(crate) fn turns(&self, step: u64) -> Option<Turns> {
        let mut random = Random::new(hash(&[self.seed, step, 23]));
        let (layers, nanos) = (self.layers.count(), self.nanos as u16);
        let mut below = |bound| random.within(0, bound - 1);
        self.draws_turns.then(|| crate::turns::drawn(layers, nanos, &mut below))
    }

    /// How many phases of a step, of so many, a trainer has submitted when it announces the next one.
    pub(crate) fn announces_at(&self, step: u64, rank: u16, phases: u32) -> u32 {
        let mut random = Random::new(hash(&[self.seed, step, rank.into(), 37]));
        if self.announces_late { random.within(0, phases.into()) as u32 } else { 0 }
    }

    /// What a trainer tells of its part of a step.
    pub(crate) fn lengths(&self, step: u64, rank: u16) -> Lengths {
        let nanos = (0..self.nanos).map(|nano| {
            let layout = self.layout(step, nano);
            let stretches = layout.ranks()[usize::from(rank)].clone();
            let rows = |it: &cadre_planner::Stretch| {
                (it.document.0, layout.documents()[it.document.0 as usize].rows)
            };
            NanoLengths { documents: stretches.iter().map(rows).collect(), stretches }
        });
        Lengths { step, turns: self.turns(step), nanos: nanos.collect() }
    }

    /// What the conductor knows.
    pub(crate) fn draft(&self) -> Draft {
        Draft {
            trainers: self.trainers,
            layers: self.layers.clone(),
            kv_heads: self.kv_heads,
            wire: self.wire,
            seed: self.seed,
            numerics: NUMERICS.into(),
            reproducible: true,
            placement: if self.is_local() { Placement::Local } else { Placement::Pool },
            costs: vec![Costs { task_rows: 128, ..Costs::default() }; self.layers.kinds().len()],
            tolerance: Tolerance::USUAL,
            links: LinkMap::default(),
            standby: match self.settings.on_pool_loss {
                OnPoolLoss::Local => Standby::Yes,
                OnPoolLoss::Wait(_) | OnPoolLoss::Fail => Standby::No,
            },
            trainer_memory: self.memory,
            replay: None,
            header: None,
            filled: Vec::new(),
            memories: BTreeMap::new(),
        }
    }
}

/// Half of the jobs are all causal; the others draw what each layer's rows keep and how their scores are made. Beside that, four of
/// ten draw each layer's heads.
fn layers(seed: u64, count: u64, all: Heads) -> Layers {
    let mut random = Random::new(hash(&[seed, 11]));
    let mixed = random.chance(50);
    let mut own = Random::new(hash(&[seed, 71]));
    let other_heads = own.chance(40);
    let mut heads = || {
        let kv = own.within(1, 3) as u16;
        let query = kv * own.within(1, 2) as u16;
        let drawn = Heads { query, kv, dim: *own.pick(&[8, 16, 40]) };
        if other_heads { drawn } else { all }
    };
    let kind = |_| {
        let heads = heads();
        let mask = match random.within(0, 5) {
            0 => Mask::Full,
            1..=3 => Mask::Window { left: *random.pick(&[0, 5, 70, 200]) },
            _ => Mask::Causal,
        };
        let kind = Kind {
            heads,
            mask,
            chunk: NonZeroU32::new(*random.pick(&[0, 0, 1, 7, 32, 100])),
            scale: random.pick(&["", "", "0.5"]).parse().ok(),
            softcap: random.pick(&["", "", "1.5"]).parse().ok(),
            sinks: *random.pick(&[Sinks::None, Sinks::None, Sinks::Learnt]),
        };
        if mixed { kind } else { Kind::causal(heads) }
    };
    Layers::new((0..count).map(kind)).expect("there is a layer")
}
