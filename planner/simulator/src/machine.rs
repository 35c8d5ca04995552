//! What is simulated: a model, a kernel, a machine, and what work takes on them.
//!
//! In: tokens, pairs, bytes. Out: nanoseconds of one place, that is of a tensor-parallel group of [`Machine::lanes`]
//! processors with a link each. Every constant names its source; none is hidden elsewhere.
//!
//! Collectives inside a group are part of the speed of linear layers; embedding, loss and optimizer are left out.

use cadre_planner::Heads;
use serde::Serialize;

/// A nanosecond count.
pub type Nanos = u64;

/// A decoder's layers.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Model {
    /// Its name in tables.
    pub name: &'static str,
    /// Layers.
    pub layers: u32,
    /// Elements of a row.
    pub hidden: u64,
    /// Heads.
    pub heads: Heads,
    /// Width of the feed-forward part.
    pub ffn: u64,
}

impl Model {
    /// Llama-3-8B.
    pub const B8: Self = Self {
        name: "8B",
        layers: 32,
        hidden: 4096,
        heads: Heads { query: 32, kv: 8, dim: 128 },
        ffn: 14_336,
    };
    /// The 34B model of the published evaluation.
    pub const B34: Self = Self {
        name: "34B",
        layers: 48,
        hidden: 8192,
        heads: Heads { query: 64, kv: 16, dim: 128 },
        ffn: 22_016,
    };

    /// Weights of a layer: Q, K, V, O and the three matrices of the feed-forward part.
    pub fn layer_weights(&self) -> u64 {
        let dim = u64::from(self.heads.dim);
        let (query, kv) = (u64::from(self.heads.query) * dim, u64::from(self.heads.kv) * dim);
        self.hidden * (2 * query + 2 * kv + 3 * self.ffn)
    }

    /// Weights of a layer that come before attention: Q, K, V.
    fn weights_before(&self) -> u64 {
        let heads = u64::from(self.heads.query) + 2 * u64::from(self.heads.kv);
        self.hidden * heads * u64::from(self.heads.dim)
    }
}

/// An attention kernel's speed on one processor, in TFLOP/s of kept pairs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Kernel {
    /// Its name in tables.
    pub name: &'static str,
    /// Forward, long tasks.
    pub forward: u64,
    /// Backward, long tasks.
    pub backward: u64,
}

impl Kernel {
    /// `FlashAttention` 2 on Hopper, as the authors of the published planner measured it.
    pub const FLASH_2: Self = Self { name: "FlashAttention 2", forward: 300, backward: 300 };
    /// A Hopper kernel on packed causal batches of 32K: what FA3 publishes for H100. Not measured by this project.
    pub const HOPPER: Self = Self { name: "Hopper", forward: 584, backward: 426 };

    /// Rows that are charged for a task of few rows: below 128 rows the speed falls about in proportion
    /// (41/80/154/289/297/305 TFLOP/s at 16/32/64/128/256/512 rows).
    pub(crate) fn charged_rows(rows: u64) -> u64 {
        if rows == 0 { 0 } else { rows.max(128) }
    }
}

/// Backward or forward.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Direction {
    /// Forward.
    Forward,
    /// Backward: linear layers take twice as long, attention 2.5 times as many operations.
    Backward,
}

/// Processors and links.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Machine {
    /// The attention kernel.
    pub kernel: Kernel,
    /// Processors of a place.
    pub lanes: u64,
    /// Speed of a processor in linear layers, in TFLOP/s.
    pub linear: u64,
    /// Bytes a microsecond of a link, each way.
    pub link: u64,
    /// Latency: from the end of a transfer to the start of what waits for it.
    pub latency: Nanos,
}

impl Machine {
    /// Nodes of eight H200: 989 TFLOP/s at 52.5 %, 400 Gbit/s a processor.
    pub fn h200(kernel: Kernel) -> Self {
        Self { kernel, lanes: 8, linear: 519, link: 50_000, latency: 20_000 }
    }

    /// Linear layers of one model layer.
    pub fn linear(&self, model: &Model, tokens: u64, direction: Direction) -> Nanos {
        self.matmul(model.layer_weights(), tokens, direction)
    }

    /// The part of them before attention.
    pub(crate) fn before(&self, model: &Model, tokens: u64, direction: Direction) -> Nanos {
        self.matmul(model.weights_before(), tokens, direction)
    }

    fn matmul(&self, weights: u64, tokens: u64, direction: Direction) -> Nanos {
        let times = match direction {
            Direction::Forward => 2,
            Direction::Backward => 4,
        };
        divide(times * u128::from(weights) * u128::from(tokens), self.linear * self.lanes)
    }

    /// Attention of `cost` pairs and query heads.
    pub fn attention(&self, model: &Model, cost: u64, direction: Direction) -> Nanos {
        let forward = 4 * u128::from(model.heads.dim) * u128::from(cost);
        match direction {
            Direction::Forward => divide(forward, self.kernel.forward * self.lanes),
            Direction::Backward => divide(forward * 5 / 2, self.kernel.backward * self.lanes),
        }
    }

    /// Time that this number of bytes takes on the links of a place.
    pub fn wire(&self, bytes: u64) -> Nanos {
        (u128::from(bytes) * 1000 / u128::from(self.lanes * self.link)) as u64
    }
}

/// Time of this number of operations at a speed in TFLOP/s.
fn divide(operations: u128, tflops: u64) -> Nanos {
    // One TFLOP/s is a thousand operations a nanosecond.
    (operations / (u128::from(tflops.max(1)) * 1000)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length at which attention of a document takes as long as the linear layers.
    fn even(machine: &Machine, model: &Model) -> u64 {
        let slower = |rows: &u64| {
            let cost = rows * (rows + 1) / 2 * u64::from(model.heads.query);
            machine.attention(model, cost, Direction::Forward)
                >= machine.linear(model, *rows, Direction::Forward)
        };
        (1..400).map(|it| it * 1024).find(slower).unwrap()
    }

    #[test]
    fn attention_equals_linear_time_where_it_was_published() {
        let flash = Machine::h200(Kernel::FLASH_2);
        let hopper = Machine::h200(Kernel::HOPPER);
        assert_eq!(even(&flash, &Model::B8) / 1024, 31, "published: near 32K");
        assert!((52..=64).contains(&(even(&hopper, &Model::B8) / 1024)));
        assert!((82..=131).contains(&(even(&hopper, &Model::B34) / 1024)));
    }

    #[test]
    fn models_have_the_weights_that_name_them() {
        assert_eq!(Model::B8.layer_weights(), 218_103_808);
        assert!((33..35).contains(&(Model::B34.layer_weights() * 48 / 1_000_000_000)));
    }
}
