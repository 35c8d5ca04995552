//! What a layer takes, by place, and which place decides.
//!
//! In: a plan, a machine. Out: [`Run`]: sums over all layers of the steps drawn. Times are nanoseconds, of a layer forward and
//! backward. A place is a trainer with the slot that may stand there, or a dedicated server.

use std::collections::BTreeMap;

use cadre_planner::{Assignment, BundleId, Flow, Heads, SlotId, Traffic};

use super::super::draw::{Drawn, Machine, around};
use super::super::{DRAWN_STEPS, Job, Model};

/// What can be the bottleneck at a place.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Resource {
    Linear,
    Attention,
    LinkOut,
    LinkIn,
}

/// Processors and links, and what these carry beside attention.
pub(super) struct Cluster<'a> {
    pub(super) machine: &'a Machine,
    job: &'a Job,
    /// Whether weights and gradients travel, too.
    fsdp: bool,
    /// The place with slower links, and how many times slower they are.
    pub(super) slow: Option<(usize, f64)>,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(job: &'a Job, machine: &'a Machine, fsdp: bool) -> Self {
        Self { machine, job, fsdp, slow: None }
    }

    /// Nanoseconds of each trainer's links for weights of a layer of such heads forward, and for gradients backward, for one
    /// nano-batch.
    fn weights(&self, heads: Heads) -> [f64; 2] {
        let Model { hidden, feed_forward, .. } = self.job.model;
        let each = around(heads) + 3 * feed_forward;
        let trainers = f64::from(self.job.settings.trainers.get());
        let elements =
            if self.fsdp { (hidden * each) as f64 * (trainers - 1.0) / trainers } else { 0.0 };
        // bf16 weights, f32 gradients; nano-batches that go through a layer together use them together.
        let together = f64::from(self.job.together);
        [2.0, 4.0].map(|bytes| self.machine.wire(elements * bytes) / together)
    }

    /// The same machines, with slower links at one place.
    pub(super) fn with_slow(&self, place: usize, times: u16) -> Self {
        Self { slow: Some((place, times.into())), ..*self }
    }
}

/// One direction of a layer at a place.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    linear: f64,
    attention: f64,
    out: f64,
    into: f64,
}

impl Place {
    fn work(&self) -> f64 {
        self.linear + self.attention
    }

    fn wire(&self) -> f64 {
        self.out.max(self.into)
    }
}

/// The bottleneck: the place and resource that decided for the longest time, and the longest document there.
#[derive(Clone, Debug)]
pub(super) struct Bottleneck {
    pub(super) resource: Resource,
    pub(super) place: usize,
    /// Part of the time that it decided.
    pub(super) share: f64,
    /// Rows of the longest document with rows or work there, where it took longest.
    pub(super) rows: u32,
}

/// All steps drawn.
pub(super) struct Run {
    trainers: usize,
    is_hidden: bool,
    /// Nanoseconds of all steps.
    time: f64,
    /// The part of `time` that waits for links alone.
    exposed: f64,
    linear: f64,
    attention: f64,
    /// Imbalance of the worst plan.
    pub(super) max_over_mean: f64,
    /// By bottleneck: the time for which it decided, the time of its longest layer, and the longest
    /// document there.
    decided: BTreeMap<(Resource, usize), (f64, f64, u32)>,
    /// Time of each place's busier link.
    wires: Vec<f64>,
}

impl Run {
    pub(super) fn new(job: &Job) -> Self {
        Self {
            trainers: job.settings.trainers.get() as usize,
            is_hidden: job.together > 1,
            time: 0.0,
            exposed: 0.0,
            linear: 0.0,
            attention: 0.0,
            max_over_mean: 1.0,
            decided: BTreeMap::new(),
            wires: Vec::new(),
        }
    }

    /// Seconds of a step, with layers that have no core attention.
    pub(super) fn seconds(&self, job: &Job, machine: &Machine) -> f64 {
        let others = job.stack.layers() - usize::from(job.stack.core().count());
        let nanos = f64::from(job.settings.nano_batches.get());
        let others = 3.0 * machine.feed(job) * others as f64 * nanos;
        (self.time / DRAWN_STEPS as f64 + others) / 1e9
    }

    /// Part of the layers' time that waits for links alone.
    pub(super) fn waits(&self) -> f64 {
        self.exposed / self.time.max(1.0)
    }

    /// Attention over attention and linear layers, of the mean processor.
    pub(super) fn attention_share(&self) -> f64 {
        self.attention / (self.attention + self.linear).max(1.0)
    }

    /// The place with most to send or receive.
    pub(super) fn busiest_link(&self) -> Option<usize> {
        (0..self.wires.len()).max_by(|a, b| self.wires[*a].total_cmp(&self.wires[*b]))
    }

    pub(super) fn bottleneck(&self) -> Option<Bottleneck> {
        let most = self.decided.iter().max_by(|a, b| a.1.0.total_cmp(&b.1.0))?;
        let (&(resource, place), &(time, _, rows)) = most;
        Some(Bottleneck { resource, place, share: time / self.time.max(1.0), rows })
    }

    /// Adds layers of one plan, whose bundles may be executed elsewhere.
    pub(super) fn add(
        &mut self,
        job: &Job,
        cluster: &Cluster<'_>,
        drawn: &Drawn,
        moved: Option<&Assignment>,
        layers: f64,
    ) {
        let planned = Assignment::planned(&drawn.plan);
        let executed = moved.unwrap_or(&planned);
        let traffic = Traffic::of_assignment(&drawn.problem, &drawn.plan, executed);
        let costs = costs(drawn, executed);
        let (_, count) = drawn.problem.places();
        self.wires.resize(count.max(self.wires.len()), 0.0);
        let active: Vec<f64> = costs.iter().flatten().copied().collect();
        let mean = active.iter().sum::<f64>() / active.len().max(1) as f64;
        let most = active.iter().copied().fold(0.0, f64::max);
        self.max_over_mean = self.max_over_mean.max(most / mean.max(1.0));
        let back = cluster.machine.back(&drawn.problem);
        let ways = [(&traffic.forward, 1.0, 1.0), (&traffic.backward, back, 2.0)];
        for (direction, (flow, back, linear)) in ways.into_iter().enumerate() {
            let places = self.places(cluster, (direction, flow), &costs, (back, linear), drawn);
            self.direction(job, drawn, executed, &places, layers);
        }
    }

    fn places(
        &self,
        cluster: &Cluster<'_>,
        (direction, flow): (usize, &Flow),
        costs: &[Option<f64>],
        (back, linear): (f64, f64),
        drawn: &Drawn,
    ) -> Vec<Place> {
        // The plan shares a place's bytes among its own number of lanes at the rate that it knows.
        let (machine, heads) = (cluster.machine, drawn.problem.heads);
        let scale = machine.scale(&drawn.problem);
        let (own, carried) = (machine.linear(cluster.job, heads), cluster.weights(heads));
        let (place_of, count) = drawn.problem.places();
        let mut places = vec![Place::default(); count];
        for (place, it) in places.iter_mut().enumerate() {
            let is_trainer = place < self.trainers;
            let weights = if is_trainer { carried[direction] } else { 0.0 };
            let slower = cluster.slow.filter(|it| it.0 == place).map_or(1.0, |it| it.1);
            *it = Place {
                linear: if is_trainer { own * linear } else { 0.0 },
                attention: 0.0,
                out: (flow.places[place].sending as f64 * scale + weights) * slower,
                into: (flow.places[place].receiving as f64 * scale + weights) * slower,
            };
        }
        for (place, cost) in place_of.iter().zip(costs) {
            let time = machine.attention(&drawn.problem, cost.unwrap_or(0.0));
            places[*place].attention += time * back;
        }
        places
    }

    /// Time of one direction of a layer, and the bottleneck that decides it.
    fn direction(
        &mut self,
        job: &Job,
        drawn: &Drawn,
        executed: &Assignment,
        places: &[Place],
        layers: f64,
    ) {
        let most = |of: &dyn Fn(&Place) -> f64| {
            let at = |place: &usize| of(&places[*place]);
            let place = (0..places.len()).max_by(|a, b| at(a).total_cmp(&at(b))).unwrap_or(0);
            (places.get(place).map_or(0.0, of), place)
        };
        let (work, worker) = most(&Place::work);
        let (wire, sender) = most(&Place::wire);
        let (attention, server) = most(&|it| it.attention);
        let (linear, trainer) = most(&|it| it.linear);
        let of_link = |place: usize| {
            if places[place].out >= places[place].into {
                Resource::LinkOut
            } else {
                Resource::LinkIn
            }
        };
        let of_work = |place: usize| {
            let it = &places[place];
            if it.attention > it.linear { Resource::Attention } else { Resource::Linear }
        };
        let (time, exposed, decides) = if self.is_hidden {
            let decides =
                if wire > work { (of_link(sender), sender) } else { (of_work(worker), worker) };
            (work.max(wire), (wire - work).max(0.0), decides)
        } else {
            let all = [
                (linear, (Resource::Linear, trainer)),
                (attention, (Resource::Attention, server)),
                (wire, (of_link(sender), sender)),
            ];
            let decides = all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
            (linear + attention + wire, wire, decides.map_or((Resource::Linear, 0), |it| it.1))
        };
        self.time += time * layers;
        self.exposed += exposed * layers;
        let count = places.len().max(1) as f64;
        self.linear += places.iter().map(|it| it.linear).sum::<f64>() / count * layers;
        self.attention += places.iter().map(|it| it.attention).sum::<f64>() / count * layers;
        for (sum, it) in self.wires.iter_mut().zip(places) {
            *sum += it.wire() * layers;
        }
        let it = self.decided.entry(decides).or_insert((0.0, 0.0, 0));
        it.0 += time * layers;
        if time > it.1 {
            (it.1, it.2) = (time, longest(job, drawn, executed, decides));
        }
    }
}

/// Forward cost of each slot, with what it works off before; `None` of one that has no bundle and is no part of the plan.
fn costs(drawn: &Drawn, executed: &Assignment) -> Vec<Option<f64>> {
    let slots = &drawn.problem.slots;
    let mut loads: Vec<Option<u64>> =
        slots.iter().map(|it| (!it.is_standby()).then_some(0)).collect();
    for bundle in (0..drawn.plan.bundles().len() as u32).map(BundleId) {
        if let Some(SlotId(slot)) = executed.executor(bundle) {
            *loads[slot as usize].get_or_insert(0) +=
                drawn.plan.bundle_cost(&drawn.problem, bundle);
        }
    }
    let finish = |(load, slot): (Option<u64>, &cadre_planner::Slot)| {
        load.map(|load| slot.finish(load) as f64)
    };
    loads.into_iter().zip(slots).map(finish).collect()
}

/// Rows of the longest document that a place works on, or that it holds rows of where it is its link out that decides.
fn longest(job: &Job, drawn: &Drawn, executed: &Assignment, decides: (Resource, usize)) -> u32 {
    let (resource, place) = decides;
    let problem = &drawn.problem;
    let rows = |document| problem.layout.document(document).map_or(0, |it| it.rows);
    if resource == Resource::LinkOut && place < job.settings.trainers.get() as usize {
        let here = problem.layout.ranks().get(place).into_iter().flatten();
        return here.map(|it| rows(it.document)).max().unwrap_or(0);
    }
    let (place_of, _) = problem.places();
    let bundles = (0..).map(BundleId).zip(drawn.plan.bundles());
    let here = bundles.filter(|(id, _)| {
        executed.executor(*id).is_some_and(|it| place_of[it.0 as usize] == place)
    });
    here.map(|(_, it)| rows(it.document)).max().unwrap_or(0)
}
