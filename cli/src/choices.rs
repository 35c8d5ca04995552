//! Words that options choose from.
//!
//! In: what was said on the command line. Out: the worker's choices. Nothing is decided here.

use cadre_control::AttentionPlace;
use cadre_step::header::KvHeads;
use cadre_worker::{Choice, ExchangeChoice as Exchange};
use clap::ValueEnum;

/// Where core attention is computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Place {
    /// On the pool.
    Pool,
    /// In the trainers.
    Local,
}

impl From<Place> for AttentionPlace {
    fn from(place: Place) -> Self {
        match place {
            Place::Pool => Self::Pool,
            Place::Local => Self::Local,
        }
    }
}

/// What computes core attention.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum EngineChoice {
    /// The GPU, if there is one that the kernels are for.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU, or nothing.
    Gpu,
}

impl From<EngineChoice> for Choice {
    fn from(choice: EngineChoice) -> Self {
        match choice {
            EngineChoice::Auto => Self::Auto,
            EngineChoice::Cpu => Self::Cpu,
            EngineChoice::Gpu => Self::Gpu,
        }
    }
}

/// What moves rows between processes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum ExchangeChoice {
    /// From the host's memory: by shared memory where the peer is of this machine, by RDMA where both have it, else through sockets.
    Auto,
    /// From the host's memory, through sockets.
    Tcp,
    /// From the host's memory, by shared memory alone: the job is refused where it cannot be had.
    Shm,
    /// From the host's memory, by UCX alone, which reads it by RDMA: the job is refused where it cannot be had.
    Ucx,
    /// By copies of the GPU that all processes share.
    Node,
}

impl From<ExchangeChoice> for Exchange {
    fn from(choice: ExchangeChoice) -> Self {
        match choice {
            ExchangeChoice::Auto => Self::Auto,
            ExchangeChoice::Tcp => Self::Tcp,
            ExchangeChoice::Shm => Self::Shared,
            ExchangeChoice::Ucx => Self::Ucx,
            ExchangeChoice::Node => Self::Node,
        }
    }
}

/// Whether the KV heads of a document go to different servers.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum HeadsChoice {
    /// Heads may part, each with its own rows alone: fewer bytes travel.
    Apart,
    /// Heads stay together.
    Together,
}

impl From<HeadsChoice> for KvHeads {
    fn from(choice: HeadsChoice) -> Self {
        match choice {
            HeadsChoice::Apart => Self::Apart,
            HeadsChoice::Together => Self::Together,
        }
    }
}
