//! A training step as events: linear layers, attention, transfers, over layers and nano-batches.
//!
//! In: what each nano-batch asks of a layer ([`Phase`]), a model, a machine, how transfers are hidden. Out: a
//! [`StepTime`].
//!
//! ```text
//! rank    linear ─┬────────────────────────────┬─► linear of the next layer
//!                 │ inputs: its link out,      │ results: the server's link out,
//!                 ▼ the server's link in       │ the rank's link in
//! server          attention ───────────────────┘
//! ```
//!
//! A processor, a link out and a link in of a place each do one thing at a time: of what is ready, what comes first in
//! the order (layer, nano-batch). All layers are alike. Backward goes the same way in the other order. Weights are
//! gathered before a layer's first use, gradients spread after its last, behind all other traffic. Embedding, loss and
//! optimizer are left out.

use serde::Serialize;

use crate::engine::{Activity, Engine};
use crate::machine::{Direction, Machine, Model, Nanos};
use crate::phase::{Bytes, Phase};

/// How transfers are hidden behind work.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub enum Overlap {
    /// Not at all: a processor waits for its transfers.
    OneStream,
    /// Local work first, foreign work when it has landed; one nano-batch after the other.
    InCall,
    /// One nano-batch computes while the other travels.
    PingPong,
    /// Both.
    Both,
}

impl Overlap {
    fn splits(self) -> bool {
        matches!(self, Self::InCall | Self::Both)
    }

    fn serial(self) -> bool {
        matches!(self, Self::OneStream | Self::InCall)
    }
}

/// Nano-batches that go through all layers in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Which way.
    pub direction: Direction,
    /// What each nano-batch asks of each layer; all have the same places.
    pub nanos: &'a [Phase],
}

/// The model, machine and overlap of a step: everything but its passes.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The model.
    pub model: Model,
    /// The machine.
    pub machine: Machine,
    /// Layers that the passes go through.
    pub layers: u32,
    /// How transfers are hidden.
    pub overlap: Overlap,
    /// Places that share a layer's weights: each sends and receives its part of the rest before forward and after
    /// backward. One: nothing travels.
    pub replicas: u64,
}

/// The time of a step, and the work of its processors.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct StepTime {
    /// From the first event to the last.
    pub nanos: Nanos,
    /// Work of each place's processors.
    pub busy: Vec<Nanos>,
}

impl StepTime {
    /// Share of time that processors did not compute, in millionths.
    pub fn idle_ppm(&self) -> u64 {
        let all = u128::from(self.nanos) * self.busy.len() as u128;
        let busy: u128 = self.busy.iter().map(|it| u128::from(*it)).sum();
        ((all.saturating_sub(busy)) * 1_000_000 / all.max(1)) as u64
    }
}

/// Priority of weights and gradients: behind all other traffic of a link.
const BACKGROUND: u64 = 1 << 60;
/// Parts of local work: foreign work that has landed goes between them.
const LOCAL_PARTS: u64 = 4;

impl Step {
    /// Runs passes one after the other.
    pub fn run(&self, passes: &[Pass<'_>]) -> StepTime {
        let places = passes.iter().flat_map(|it| it.nanos).map(|it| it.tokens.len()).max();
        let places = places.unwrap_or(0);
        let mut build = Build {
            step: self,
            engine: Engine::default(),
            places,
            busy: vec![0; places],
            order: 0,
        };
        let mut before: Vec<Vec<Option<Activity>>> = Vec::new();
        for pass in passes {
            before = build.pass(pass, &before);
        }
        let Build { engine, busy, .. } = build;
        StepTime { nanos: engine.run(), busy }
    }

    /// Forward and backward of some nano-batches.
    pub fn forward_and_backward(&self, nanos: &[Phase]) -> StepTime {
        let pass = |direction| Pass { direction, nanos };
        self.run(&[pass(Direction::Forward), pass(Direction::Backward)])
    }

    /// Time of linear layers before the `index`-th attention of a pass, of `self.layers + 1` in all.
    fn linear(&self, tokens: u64, index: u32, direction: Direction) -> Nanos {
        let all = self.machine.linear(&self.model, tokens, direction);
        let before = self.machine.before(&self.model, tokens, direction);
        let (first, last) = match direction {
            Direction::Forward => (before, all - before),
            Direction::Backward => (all - before, before),
        };
        match index {
            0 => first,
            _ if index == self.layers => last,
            _ => all,
        }
    }
}

struct Build<'a> {
    step: &'a Step,
    engine: Engine,
    places: usize,
    busy: Vec<Nanos>,
    /// Grows with each layer of each nano-batch.
    order: u64,
}

impl Build<'_> {
    /// Adds a pass after the last activities of each nano-batch and place; returns its own.
    fn pass(
        &mut self,
        pass: &Pass<'_>,
        before: &[Vec<Option<Activity>>],
    ) -> Vec<Vec<Option<Activity>>> {
        let layers = u64::from(self.step.layers);
        let first = self.order;
        self.order += (layers + 1) * pass.nanos.len() as u64;
        let mut last: Vec<Vec<Option<Activity>>> = Vec::new();
        let mut of_layers: Vec<Vec<Vec<Option<Activity>>>> = Vec::new();
        for (nano, phase) in pass.nanos.iter().enumerate() {
            let mut linear: Vec<Vec<Option<Activity>>> = Vec::new();
            for index in 0..=self.step.layers {
                let at = u64::from(index) * pass.nanos.len() as u64 + nano as u64;
                let order = (first + at + 1) * 4;
                let now: Vec<_> = (0..self.places)
                    .map(|place| self.linear(phase, place, index, pass.direction, order))
                    .collect();
                if index == 0 {
                    self.chain(before.get(nano), &now);
                    if self.step.overlap.serial() {
                        self.chain(last.last().or(before.last()), &now);
                    }
                } else {
                    self.attention(
                        phase,
                        pass.direction,
                        order - 1,
                        &linear[index as usize - 1],
                        &now,
                    );
                }
                linear.push(now);
            }
            last.push(linear[self.step.layers as usize].clone());
            of_layers.push(linear);
        }
        self.weights(pass.direction, &of_layers);
        last
    }

    fn chain(&mut self, before: Option<&Vec<Option<Activity>>>, now: &[Option<Activity>]) {
        for (before, now) in before.into_iter().flatten().zip(now) {
            if let (Some(before), Some(now)) = (before, now) {
                self.engine.after(*before, *now, 0);
            }
        }
    }

    /// Linear layers of a place that holds tokens.
    fn linear(
        &mut self,
        phase: &Phase,
        place: usize,
        index: u32,
        direction: Direction,
        order: u64,
    ) -> Option<Activity> {
        let tokens = phase.tokens.get(place).copied().unwrap_or(0);
        let duration = self.step.linear(tokens, index, direction);
        self.busy[place] += duration;
        (tokens > 0).then(|| self.engine.add(Some(place), order, duration))
    }

    /// One attention between the linear activities `from` and `to` of all places.
    fn attention(
        &mut self,
        phase: &Phase,
        direction: Direction,
        order: u64,
        from: &[Option<Activity>],
        to: &[Option<Activity>],
    ) {
        let mut foreign = vec![None; self.places];
        for place in 0..phase.cost.len() {
            let local = if self.step.overlap.splits() { phase.local[place] } else { 0 };
            let rest = self.work(place, phase.cost[place] - local, direction, order - 1);
            self.link(from[place], rest, to[place]);
            foreign[place] = rest;
            for part in 0..LOCAL_PARTS {
                let cost = local * (part + 1) / LOCAL_PARTS - local * part / LOCAL_PARTS;
                let work = self.work(place, cost, direction, order);
                self.link(from[place], work, to[place]);
            }
        }
        for (&(rank, place), bytes) in &phase.wires {
            let Bytes { inputs, results, backward_inputs, backward_results, .. } = *bytes;
            let (inputs, results) = match direction {
                Direction::Forward => (inputs, results),
                Direction::Backward => (backward_inputs, backward_results),
            };
            self.transfer((rank, place), inputs, order, from[rank], foreign[place]);
            self.transfer((place, rank), results, order, foreign[place], to[rank]);
        }
    }

    fn link(&mut self, from: Option<Activity>, work: Option<Activity>, to: Option<Activity>) {
        if let (Some(from), Some(work)) = (from, work) {
            self.engine.after(from, work, 0);
        }
        if let (Some(work), Some(to)) = (work, to) {
            self.engine.after(work, to, 0);
        }
    }

    /// Attention at a place; `None` if there is none.
    fn work(
        &mut self,
        place: usize,
        cost: u64,
        direction: Direction,
        order: u64,
    ) -> Option<Activity> {
        let duration = self.step.machine.attention(&self.step.model, cost, direction);
        self.busy[place] += duration;
        (cost > 0).then(|| self.engine.add(Some(place), order, duration))
    }

    /// Bytes from one place's link out to another's link in, between two activities.
    fn transfer(
        &mut self,
        (sender, receiver): (usize, usize),
        bytes: u64,
        order: u64,
        from: Option<Activity>,
        to: Option<Activity>,
    ) {
        let (Some(from), Some(to), true) = (from, to, bytes > 0) else { return };
        let duration = self.step.machine.wire(bytes);
        let out = self.engine.add(Some(self.places + sender), order, duration);
        let into = self.engine.add(Some(2 * self.places + receiver), order, duration);
        self.engine.after(from, out, 0);
        self.engine.after_start(out, into);
        self.engine.after(into, to, self.step.machine.latency);
    }

    /// Weights come before a layer's first forward, gradients (f32) leave after its last backward.
    fn weights(&mut self, direction: Direction, nanos: &[Vec<Vec<Option<Activity>>>]) {
        let (Step { model, machine, replicas, layers, .. }, Some(last)) =
            (*self.step, nanos.len().checked_sub(1))
        else {
            return;
        };
        if replicas < 2 {
            return;
        }
        let elements = model.layer_weights() * (replicas - 1) / replicas;
        for layer in 0..layers as usize {
            let ends = nanos[0][layer].iter().zip(&nanos[last][layer + 1]);
            for (place, (&first, &done)) in ends.enumerate() {
                let order = BACKGROUND + layer as u64;
                match (direction, first, done) {
                    (Direction::Forward, Some(first), _) => {
                        for side in 1..=2 {
                            let wire = machine.wire(elements * 2);
                            let gather =
                                self.engine.add(Some(side * self.places + place), order, wire);
                            self.engine.after(gather, first, machine.latency);
                        }
                    }
                    (Direction::Backward, _, Some(done)) => {
                        for side in 1..=2 {
                            let wire = machine.wire(elements * 4);
                            let spread =
                                self.engine.add(Some(side * self.places + place), order, wire);
                            self.engine.after(done, spread, machine.latency);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Kernel;

    fn step(overlap: Overlap) -> Step {
        let mut machine = Machine::h200(Kernel::FLASH_2);
        machine.latency = 0;
        Step { model: Model::B8, machine, layers: 4, overlap, replicas: 1 }
    }

    fn phase(moved: u64, bytes: u64) -> Phase {
        let cost = 100_000_000_000;
        let mut phase = Phase {
            tokens: vec![65_536; 2],
            cost: vec![cost; 2],
            local: vec![cost, cost - moved],
            ..Phase::default()
        };
        if bytes > 0 {
            let bytes = Bytes { inputs: bytes, results: bytes / 2, ..Bytes::default() };
            phase.wires.insert((0, 1), bytes);
        }
        phase
    }

    #[test]
    fn without_transfers_a_step_is_its_work() {
        for overlap in [Overlap::OneStream, Overlap::InCall, Overlap::PingPong, Overlap::Both] {
            let step = step(overlap);
            let time = step.forward_and_backward(&[phase(0, 0), phase(0, 0)]);
            let per_layer = |direction| {
                step.machine.linear(&step.model, 65_536, direction)
                    + step.machine.attention(&step.model, 100_000_000_000, direction)
            };
            let layer = per_layer(Direction::Forward) + per_layer(Direction::Backward);
            assert!(time.nanos.abs_diff(8 * layer) < 100, "{overlap:?}");
            assert!(time.idle_ppm() < 10);
        }
    }

    #[test]
    fn transfers_are_exposed_in_one_stream_and_hidden_in_the_others() {
        let nanos = [phase(20_000_000_000, 400_000_000), phase(20_000_000_000, 400_000_000)];
        let time = |overlap| {
            let pass = Pass { direction: Direction::Forward, nanos: &nanos };
            step(overlap).run(&[pass]).nanos
        };
        let free = step(Overlap::OneStream)
            .run(&[Pass { direction: Direction::Forward, nanos: &[phase(0, 0), phase(0, 0)] }])
            .nanos;
        let wire = step(Overlap::OneStream).machine.wire(600_000_000);
        assert_eq!(time(Overlap::OneStream), free + 8 * wire);
        for overlap in [Overlap::InCall, Overlap::PingPong, Overlap::Both] {
            assert!(time(overlap) < free + 4 * wire, "{overlap:?}");
        }
        assert!(time(Overlap::Both) <= time(Overlap::PingPong));
    }

    #[test]
    fn gradients_are_exposed_behind_the_last_layer_alone() {
        let mut step = step(Overlap::PingPong);
        let nanos = [phase(0, 0)];
        let free = step.forward_and_backward(&nanos).nanos;
        step.replicas = 2;
        let time = step.forward_and_backward(&nanos).nanos;
        let layer = step.machine.wire(step.model.layer_weights() * 6 / 2);
        assert!(time > free && time < free + 2 * layer);
    }
}
