//! One nano-batch on a pool of some size, drawn or observed: its plan, and what a layer of it takes.

use std::collections::{BTreeMap, BTreeSet};

use cadre_crds::OnPoolLoss;
use cadre_planner::{
    Direction, Document, Flow, Heads, Kept, Layout, Mask, NOMINAL_RATE, Plan, Problem, Profile,
    ProfileError, RankId, Slot, SlotId, Stretch, Traffic,
};
use cadre_step::conduct::{Draft, NOMINAL_WEIGHT, Offer, Standby, View};
use cadre_step::envelope::{Lengths, NanoLengths};
use cadre_step::header::{Header, Member, Placement, ViewNumber};
use cadre_step::layers::Layers;
use cadre_step::planned;

use super::{Job, SizeError};

/// A processor's speed, as the model of a step needs it.
pub(super) struct Machine {
    /// By head dim.
    kernels: BTreeMap<u16, Kernels>,
    lanes: u16,
    /// Operations of linear layers a nanosecond on one lane.
    linear: f64,
    /// Bytes a microsecond of one lane's link, the slowest of the calibration.
    pub(super) rate: u32,
}

/// Speed of attention of one head dim.
#[derive(Clone, Copy)]
struct Kernels {
    /// Backward over forward.
    back: f64,
    /// Nanoseconds of a pair of one query head on one lane.
    pair: f64,
}

impl Kernels {
    fn new(profile: &Profile, head_dim: u16) -> Result<Self, ProfileError> {
        let table = profile.table(head_dim, Direction::Forward, Kept::Causal)?;
        let (rows, keys) = (table.rows[table.rows.len() - 1], table.keys[table.keys.len() - 1]);
        let pairs = f64::from(rows) * (f64::from(keys) + f64::midpoint(f64::from(rows), 1.0));
        Ok(Self {
            back: f64::from(profile.costs(head_dim)?.backward_percent) / 100.0,
            pair: table.picoseconds(rows, keys) as f64 / 1e3 / pairs,
        })
    }
}

impl Machine {
    /// The machine of a calibration, for the head dims of `layers`.
    pub(super) fn new(
        profile: &Profile,
        layers: &Layers,
        lanes: u16,
    ) -> Result<Self, ProfileError> {
        let dims: BTreeSet<u16> = layers.kinds().iter().map(|it| it.heads.dim).collect();
        let kernels = dims.into_iter().map(|dim| Ok((dim, Kernels::new(profile, dim)?)));
        let slowest = profile.links.iter().map(|it| it.rate).min();
        Ok(Self {
            kernels: kernels.collect::<Result<_, ProfileError>>()?,
            lanes,
            linear: profile.linear_operations as f64,
            rate: slowest.unwrap_or(NOMINAL_RATE),
        })
    }

    fn kernels(&self, problem: &Problem) -> Kernels {
        self.kernels[&problem.heads.dim]
    }

    /// Nanoseconds of attention that costs `cost` in a plan of this problem.
    pub(super) fn attention(&self, problem: &Problem, cost: f64) -> f64 {
        cost * self.kernels(problem).pair / f64::from(self.lanes)
    }

    /// Backward over forward.
    pub(super) fn back(&self, problem: &Problem) -> f64 {
        self.kernels(problem).back
    }

    /// Processors of a rank and of a server.
    pub(super) fn lanes(&self) -> u16 {
        self.lanes
    }

    /// Nanoseconds that `bytes` take on a place's links, each way.
    pub(super) fn wire(&self, bytes: f64) -> f64 {
        bytes * 1e3 / (f64::from(self.rate) * f64::from(self.lanes))
    }

    /// Ratio of this machine's link time to the planner's. The planner shares a place's bytes among
    /// a lane for each KV head, and where links are not known at the nominal rate; the machine has
    /// its own number of lanes and its own rate.
    pub(super) fn scale(&self, problem: &Problem) -> f64 {
        let share = f64::from(problem.lanes) / f64::from(self.lanes);
        let is_nominal = problem.links.places.is_empty();
        if is_nominal { share * f64::from(NOMINAL_RATE) / f64::from(self.rate) } else { share }
    }

    /// Nanoseconds that a trainer needs beside attention for its rows of a layer of such heads, forward.
    pub(super) fn linear(&self, job: &Job, heads: Heads) -> f64 {
        let around = job.model.hidden * around(heads);
        self.weights(job, around) + self.feed(job)
    }

    /// Nanoseconds that a trainer needs for its rows of a layer without core attention, forward.
    pub(super) fn feed(&self, job: &Job) -> f64 {
        self.weights(job, 3 * job.model.hidden * job.model.feed_forward)
    }

    fn weights(&self, job: &Job, weights: u64) -> f64 {
        let tokens = f64::from(job.settings.tokens.get());
        2.0 * weights as f64 * tokens / (self.linear * f64::from(self.lanes))
    }
}

/// Columns of the matrices around core attention of such heads.
pub(super) fn around(Heads { query, kv, dim }: Heads) -> u64 {
    2 * u64::from(dim) * (u64::from(query) + u64::from(kv))
}

/// The plan of a nano-batch for layers of one kind.
pub(super) struct Drawn {
    pub(super) problem: Problem,
    pub(super) plan: Plan,
}

/// Times of a layer of one nano-batch in nanoseconds, forward and backward together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Layer {
    /// The whole time.
    pub(super) time: f64,
    /// The part of it in which only links are busy.
    pub(super) exposed: f64,
    /// Bytes of the busiest link's busier direction, one lane.
    pub(super) busiest: f64,
}

/// What the trainers of a job would announce of a step whose documents are drawn.
fn drawn_lengths(job: &Job, step: u64) -> Result<BTreeMap<u16, Lengths>, SizeError> {
    let trainers = job.settings.trainers.get() as u16;
    let mut told: BTreeMap<u16, Lengths> = (0..trainers)
        .map(|rank| (rank, Lengths { step, turns: Some(job.turns.clone()), nanos: Vec::new() }))
        .collect();
    for nano in 0..job.settings.nano_batches.get() {
        let documents = job.lengths.documents(job.settings, step, nano);
        let causal = documents.iter().map(|&rows| Document { rows, mask: Mask::Causal });
        let layout = Layout::end_to_end(causal.collect(), job.settings.tokens.get())
            .map_err(|source| SizeError::Planner { step, source })?;
        for (stretches, told) in layout.ranks().iter().zip(told.values_mut()) {
            let whole = |it: &Stretch| (it.document.0, documents[it.document.0 as usize]);
            let documents = stretches.iter().map(whole).collect();
            told.nanos.push(NanoLengths { documents, stretches: stretches.clone() });
        }
    }
    Ok(told)
}

/// The header of a step, as the job's conductor makes it with `servers` dedicated servers of what trainers announce.
fn header(
    job: &Job,
    servers: u32,
    step: u64,
    told: &BTreeMap<u16, Lengths>,
) -> Result<Header, SizeError> {
    let trainers = job.settings.trainers.get() as u16;
    let weight = |all: &[u32], at: usize| all.get(at).copied().unwrap_or(NOMINAL_WEIGHT);
    let [of_servers, of_trainers] = &job.weights;
    let offer = |weight, home, memory| Offer {
        weight,
        home,
        memory: Some(memory),
        member: None,
        numerics: None,
    };
    let dedicated = (0..servers).map(|it| offer(weight(of_servers, it as usize), None, job.memory));
    let in_place = (0..trainers).filter(|_| job.in_place);
    let in_place = in_place
        .map(|rank| offer(weight(of_trainers, rank.into()), Some(rank), job.trainer_memory));
    let slots = dedicated.chain(in_place).collect();
    let mut draft = Draft {
        trainers,
        layers: job.stack.core().clone(),
        kv_heads: job.kv_heads,
        wire: job.wire,
        seed: job.settings.seed,
        numerics: String::new(),
        reproducible: true,
        placement: Placement::Pool,
        costs: job.costs.clone(),
        tolerance: job.tolerance,
        links: job.links.clone(),
        standby: if job.on_pool_loss == OnPoolLoss::Local { Standby::Yes } else { Standby::No },
        trainer_memory: job.trainer_memory,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    };
    let number = ViewNumber::default();
    let made = draft.order(step, told.clone(), &View { number, slots }).make()?;
    draft.made(made.header);
    Ok(draft.finish(number, Vec::new()).header())
}

/// Bytes of the busiest link, in its busier direction.
fn busiest_bytes(flow: &Flow) -> u64 {
    let busiest = flow.places.iter().max_by_key(|it| it.sending.max(it.receiving));
    busiest.map_or(0, |it| if it.sending >= it.receiving { it.sent() } else { it.received() })
}

/// Members that fill all slots, servers at the longest address that IPv4 has.
pub(crate) fn fillers(slots: &[Slot]) -> Vec<Option<Member>> {
    let address = "255.255.255.255:65535".to_owned();
    let mut server = 0..u16::MAX;
    let filler = |slot: &Slot| match slot.home {
        Some(RankId(rank)) if slot.is_standby() => Member::Standby(rank as u16),
        Some(RankId(rank)) => Member::InPlace(rank as u16),
        None => {
            let index = server.next().unwrap_or(u16::MAX);
            Member::Server { index, incarnation: 0, address: address.clone() }
        }
    };
    slots.iter().map(filler).map(Some).collect()
}

impl Drawn {
    /// Plans a drawn step on `servers` dedicated servers, beside those in place: by nano-batch, and then by kind of layers.
    pub(super) fn all(job: &Job, servers: u32, step: u64) -> Result<Vec<Self>, SizeError> {
        Self::of(job, servers, step, &drawn_lengths(job, step)?)
    }

    /// Size of the header of a drawn step, as it is sent when every slot is filled.
    pub(super) fn header_bytes(job: &Job, servers: u32, step: u64) -> Result<usize, SizeError> {
        let header = header(job, servers, step, &drawn_lengths(job, step)?)?;
        let header = Header { fillers: fillers(&header.slots), ..header };
        Ok(postcard::to_stdvec(&header).expect("a header is plain data").len())
    }

    /// Plans a step of these documents, as [`Self::all`] does.
    pub(super) fn of(
        job: &Job,
        servers: u32,
        step: u64,
        told: &BTreeMap<u16, Lengths>,
    ) -> Result<Vec<Self>, SizeError> {
        let plans = planned::plans(&header(job, servers, step, told)?);
        let plans = plans.map_err(|source| SizeError::Planner { step, source })?;
        Ok(plans.into_iter().map(|(problem, plan)| Self { problem, plan }).collect())
    }

    /// Cost of all attention, forward.
    pub(super) fn work(&self) -> u64 {
        (0..self.problem.slots.len() as u32)
            .map(|slot| self.plan.load(&self.problem, SlotId(slot)))
            .sum()
    }

    /// Finish of the last slot over the mean of all.
    pub(super) fn balance(&self) -> f64 {
        let slots = (0..).map(SlotId).zip(&self.problem.slots).filter(|it| !it.1.is_standby());
        let finishes: Vec<f64> =
            slots.map(|it| self.plan.finish(&self.problem, it.0) as f64).collect();
        let mean = finishes.iter().sum::<f64>() / finishes.len().max(1) as f64;
        finishes.iter().copied().fold(0.0, f64::max) / mean.max(1.0)
    }

    /// Most bytes that a slot needs for a step of these plans.
    pub(super) fn memory(step: &[Self]) -> u64 {
        let plans = step.iter().map(|it| (&it.problem, &it.plan));
        planned::needed(plans).into_iter().max().unwrap_or(0)
    }

    /// A layer's time.
    pub(super) fn layer(&self, job: &Job, machine: &Machine) -> Layer {
        let linear = machine.linear(job, self.problem.heads);
        let finish = machine.attention(&self.problem, self.plan.bounds().finish as f64);
        let back = finish * machine.back(&self.problem);
        // Slots in place begin after their linear layers, which take twice as long backward.
        let (forward, backward) = if job.in_place {
            (linear + finish, 2.0 * linear + back)
        } else {
            (finish.max(linear), back.max(2.0 * linear))
        };
        let traffic = Traffic::of(&self.problem, &self.plan);
        let scale = machine.scale(&self.problem);
        let wires = [&traffic.forward, &traffic.backward].map(|it| it.busiest() as f64 * scale);
        let bytes = [&traffic.forward, &traffic.backward].map(busiest_bytes);
        let bytes = bytes.into_iter().sum::<u64>() as f64 / f64::from(machine.lanes);
        let hides = job.together > 1;
        let mut layer = Layer { busiest: bytes, ..Layer::default() };
        for (work, wire, other) in [(forward, wires[0], linear), (backward, wires[1], 2.0 * linear)]
        {
            let (time, exposed) = if hides {
                (work.max(wire), (wire - work).max(0.0))
            } else {
                let apart = if job.in_place { 0.0 } else { other.min(work) };
                (work + wire + apart, wire)
            };
            layer.time += time;
            layer.exposed += exposed;
        }
        layer
    }
}
