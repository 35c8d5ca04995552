//! One drawn nano-batch on a pool of some size: its plan, and what a layer of it takes.

use cadre_planner::{
    Costs, Direction, Document, Error, Kept, Layout, Links, NOMINAL_RATE, Plan, Problem, Profile,
    ProfileError, RankId, Slot, SlotId, Traffic, memory_of_slot, plan,
};
use cadre_worker::session::Kind;

use super::{Job, SizeError};

/// A processor's speed, as the model of a step needs it.
pub(super) struct Machine {
    pub(super) costs: Costs,
    pub(super) lanes: u16,
    /// Nanoseconds of a pair of one query head on one lane.
    pair: f64,
    /// Operations of linear layers a nanosecond on one lane.
    linear: f64,
    /// Bytes a microsecond of one lane's link, the slowest of the calibration.
    pub(super) rate: u32,
}

impl Machine {
    pub(super) fn new(profile: &Profile, head_dim: u16, lanes: u16) -> Result<Self, ProfileError> {
        let table = profile.table(head_dim, Direction::Forward, Kept::Causal)?;
        let (rows, keys) = (table.rows[table.rows.len() - 1], table.keys[table.keys.len() - 1]);
        let pairs = f64::from(rows) * (f64::from(keys) + f64::midpoint(f64::from(rows), 1.0));
        let slowest = profile.links.iter().map(|it| it.rate).min();
        Ok(Self {
            costs: profile.costs(head_dim)?,
            lanes,
            pair: table.picoseconds(rows, keys) as f64 / 1e3 / pairs,
            linear: profile.linear_operations as f64,
            rate: slowest.unwrap_or(NOMINAL_RATE),
        })
    }

    /// Nanoseconds of attention that costs so much.
    pub(super) fn attention(&self, cost: f64) -> f64 {
        cost * self.pair / f64::from(self.lanes)
    }

    /// Nanoseconds that a trainer needs beside attention for its rows of a layer, forward.
    pub(super) fn linear(&self, job: &Job) -> f64 {
        let super::Model { hidden, heads, feed_forward, .. } = job.model;
        let (dim, query) = (u64::from(heads.dim), u64::from(heads.query));
        let weights = hidden * (2 * dim * query + 2 * dim * u64::from(heads.kv) + 3 * feed_forward);
        let tokens = f64::from(job.settings.tokens.get());
        2.0 * weights as f64 * tokens / (self.linear * f64::from(self.lanes))
    }
}

/// A nano-batch's plan.
pub(super) struct Drawn {
    pub(super) problem: Problem,
    pub(super) plan: Plan,
}

/// What a layer of a nano-batch takes, in nanoseconds, forward and backward together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Layer {
    /// All of it.
    pub(super) time: f64,
    /// What of it waits for links alone.
    pub(super) exposed: f64,
    /// Bytes of the busiest link's busier direction, one lane.
    pub(super) busiest: f64,
}

impl Drawn {
    /// Plans a nano-batch of a step, for layers of one kind, on `servers` dedicated ones, beside those in place.
    pub(super) fn new(
        job: &Job,
        machine: &Machine,
        servers: u32,
        (step, nano): (u64, u32),
        Kind { mask }: Kind,
    ) -> Result<Self, SizeError> {
        let refuse = |source: Error| SizeError::Planner { step, source };
        let documents = job.lengths.documents(job.settings, step, nano).into_iter();
        let documents = documents.map(|rows| Document { rows, mask }).collect();
        let layout = Layout::end_to_end(documents, job.settings.tokens.get()).map_err(refuse)?;
        let head_start = (machine.linear(job) / machine.attention(1.0)) as u64;
        let slot = |home, head_start| Slot { weight: 100, head_start, home, memory: job.memory };
        let ranks = if job.in_place { layout.ranks().len() as u16 } else { 0 };
        let in_place = (0..ranks).map(|rank| slot(Some(RankId(rank)), head_start));
        let dedicated = (0..servers).map(|_| slot(None, 0));
        let problem = Problem {
            layout,
            heads: job.model.heads,
            element_bytes: 2,
            lanes: machine.lanes,
            slots: in_place.chain(dedicated).collect(),
            costs: machine.costs,
            links: Links::equal(),
        };
        let plan = plan(&problem).map_err(refuse)?;
        Ok(Self { problem, plan })
    }

    /// Cost of all attention, forward.
    pub(super) fn work(&self) -> u64 {
        (0..self.problem.slots.len() as u16)
            .map(|slot| self.plan.load(&self.problem, SlotId(slot)))
            .sum()
    }

    /// Finish of the last slot over the mean of all.
    pub(super) fn balance(&self) -> f64 {
        let finishes: Vec<f64> = (0..self.problem.slots.len() as u16)
            .map(|slot| self.plan.finish(&self.problem, SlotId(slot)) as f64)
            .collect();
        let mean = finishes.iter().sum::<f64>() / finishes.len().max(1) as f64;
        finishes.iter().copied().fold(0.0, f64::max) / mean.max(1.0)
    }

    /// Most bytes that a slot needs.
    pub(super) fn memory(&self) -> u64 {
        let slots = (0..self.problem.slots.len() as u16).map(SlotId);
        slots
            .map(|slot| memory_of_slot(&self.problem, &self.plan, slot).needed())
            .max()
            .unwrap_or(0)
    }

    /// A layer's time.
    pub(super) fn layer(&self, job: &Job, machine: &Machine) -> Layer {
        let linear = machine.linear(job);
        let finish = machine.attention(self.plan.bounds().finish as f64);
        let back = f64::from(machine.costs.backward_percent) / 100.0;
        // Slots in place finish after their linear layers, which take twice as long backward.
        let (forward, backward) = if job.in_place {
            (finish, (finish - linear).max(0.0) * back + 2.0 * linear)
        } else {
            (finish.max(linear), (finish * back).max(2.0 * linear))
        };
        let traffic = Traffic::of(&self.problem, &self.plan);
        let scale = f64::from(NOMINAL_RATE) / f64::from(machine.rate);
        let wires = [&traffic.forward, &traffic.backward].map(|it| it.busiest() as f64 * scale);
        let bytes = wires.iter().sum::<f64>() * f64::from(machine.rate) / 1e3;
        let hides = job.settings.nano_batches.get() > 1;
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
