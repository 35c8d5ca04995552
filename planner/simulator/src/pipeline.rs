//! Steps of a job with pipeline stages.
//!
//! In: micro-batches. Out: nanoseconds of a step.
//!
//! * [`one_forward_one_backward`]: the baseline. Every group of ranks runs the usual schedule of its own; groups meet
//!   at the end of the step.
//! * [`ticks`]: the pool. All stages do the same thing in a tick, first all forward ticks, then all backward ones, and
//!   share one pool: attention of the micro-batches in all stages is balanced over all places, those too that have
//!   no micro-batch in this tick.

use crate::engine::Engine;
use crate::machine::{Direction, Machine, Model, Nanos};
use crate::packing;
use crate::phase::Phase;
use crate::step::{Pass, Step};

/// The baseline's step. `groups[g]` lists the micro-batches of group `g`, each the documents of one.
pub(crate) fn one_forward_one_backward(
    machine: &Machine,
    model: &Model,
    groups: &[Vec<Vec<u32>>],
    ranks: usize,
    stages: u32,
) -> Nanos {
    let times = groups.iter().map(|group| {
        let micro: Vec<[Nanos; 2]> = group
            .iter()
            .map(|documents| {
                let phase = packing::phase(model, std::slice::from_ref(documents), ranks);
                [Direction::Forward, Direction::Backward].map(|direction| {
                    let layers = u64::from(model.layers / stages.max(1));
                    layers * layer(machine, model, &phase, direction)
                })
            })
            .collect();
        schedule(&micro, stages as usize)
    });
    times.max().unwrap_or(0)
}

/// A layer of one group in one stream.
fn layer(machine: &Machine, model: &Model, phase: &Phase, direction: Direction) -> Nanos {
    let bytes = phase.wires.values().next();
    let bytes = bytes.map_or(0, |it| match direction {
        Direction::Forward => it.inputs,
        Direction::Backward => it.backward_inputs + it.backward_results,
    });
    let wire = if bytes > 0 { machine.wire(bytes) + machine.latency } else { 0 };
    let tokens = phase.tokens.iter().copied().max().unwrap_or(0);
    let cost = phase.cost.iter().copied().max().unwrap_or(0);
    machine.linear(model, tokens, direction) + machine.attention(model, cost, direction) + wire
}

/// One group's stages: warm up, one forward and one backward in turn, drain.
fn schedule(micro: &[[Nanos; 2]], stages: usize) -> Nanos {
    let mut engine = Engine::default();
    let count = micro.len();
    let ids: Vec<Vec<[usize; 2]>> = (0..stages)
        .map(|stage| {
            micro
                .iter()
                .map(|time| time.map(|duration| engine.add(Some(stage), 0, duration)))
                .collect()
        })
        .collect();
    for stage in 0..stages {
        let ahead = (stages - 1 - stage).min(count);
        let mut order: Vec<usize> = (0..ahead).map(|it| ids[stage][it][0]).collect();
        for it in 0..count {
            order.extend(ids[stage].get(it + ahead).map(|it| it[0]));
            order.push(ids[stage][it][1]);
        }
        for pair in order.windows(2) {
            engine.after(pair[0], pair[1], 0);
        }
        let next = ids.get(stage + 1);
        for (it, &[forward, backward]) in ids[stage].iter().enumerate() {
            match next.map(|next| next[it]) {
                Some([next_forward, next_backward]) => {
                    engine.after(forward, next_forward, 0);
                    engine.after(next_backward, backward, 0);
                }
                None => engine.after(forward, backward, 0),
            }
        }
    }
    engine.run()
}

/// The pool's step: `ticks[t]` holds the phases of the nano-batches that are in all stages at tick `t`. Backward visits
/// them in the other order.
pub(crate) fn ticks(step: &Step, ticks: &[Vec<Phase>]) -> Nanos {
    let passes = ticks.iter().flat_map(|nanos| {
        [Direction::Forward, Direction::Backward].map(|direction| Pass { direction, nanos })
    });
    passes.map(|pass| step.run(&[pass]).nanos).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_micro_batches_take_the_textbook_time() {
        // (m + p - 1) times forward and backward of one stage.
        for (count, stages) in [(8, 2), (4, 4), (1, 3), (5, 1)] {
            let time = schedule(&vec![[10, 20]; count], stages);
            assert_eq!(time, 30 * (count + stages - 1) as u64);
        }
    }
}
