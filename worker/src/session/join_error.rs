//! Why a rank cannot join its job; layers that nothing here computes.
//!
//! In: layers, and what went wrong at the parts of a rank. Out: a [`JoinError`] with rank, field and remedy.
//!
//! It starts nothing.

use cadre_kernels::device;
use cadre_planner::Heads;
use cadre_step::layers::Layers;

use crate::{attach, profile};

/// Why a rank cannot join its job.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The environment, the controller or the exchange.
    #[error(transparent)]
    Attach(#[from] attach::Error),
    /// Nothing computes here.
    #[error(transparent)]
    Engine(device::Error),
    /// [`Join::first`](super::Join::first) of this rank refused what the job says.
    #[error("rank {0}: {1}")]
    First(u16, String),
    /// The headers to replay cannot be read.
    #[error(transparent)]
    Headers(#[from] cadre_step::header::Error),
    /// The calibration that plans are to be made with.
    #[error("{0}; or leave out spec.attention.profile and --profile")]
    Profile(#[from] profile::Error),
    /// The GPU of this rank.
    #[error("the GPU of rank {rank}: {source}; look at its driver, or say --engine cpu")]
    Gpu {
        /// Which rank.
        rank: u16,
        /// The driver's reason.
        source: device::Error,
    },
    /// A process is one rank of one job.
    #[error(
        "rank {rank} joins its job a second time; a process joins once: leave the first session, or start a process for each rank"
    )]
    Twice {
        /// Which rank.
        rank: u16,
    },
    /// The model has no core attention.
    #[error(
        "{what} in layer {layer} of rank {rank} is 0; give the model layers with heads, or do without the pool"
    )]
    Nothing {
        /// Which rank.
        rank: u16,
        /// Among those with core attention.
        layer: usize,
        /// Which number.
        what: &'static str,
    },
    /// KV heads that query heads do not share evenly.
    #[error(
        "{query} query heads in layer {layer} of rank {rank} are no multiple of its {kv} KV heads; give each KV head as many"
    )]
    Uneven {
        /// Which rank.
        rank: u16,
        /// Among those with core attention.
        layer: usize,
        /// Query heads.
        query: u16,
        /// KV heads.
        kv: u16,
    },
    /// A server in place has to have room for rows of others.
    #[error("rank {rank} brings no memory for rows of others; give it 1 MiB or more")]
    NoMemory {
        /// Which rank.
        rank: u16,
    },
    /// No engine computes such heads.
    #[error(
        "no engine takes the head dim {dim} in layer {layer} of rank {rank}; give the model heads of a multiple of 8 up to 256"
    )]
    HeadDim {
        /// Which rank.
        rank: u16,
        /// Among those with core attention.
        layer: usize,
        /// Its head dim.
        dim: u16,
    },
    /// Rows that would stay on a GPU, where no kernel computes such heads.
    #[error(
        "--exchange node does not take the head dim {dim} in layer {layer} of rank {rank}, whose rows would stay on the GPU; give the model heads \
         of 64, 128 or 256, or take another exchange"
    )]
    OnGpu {
        /// Which rank.
        rank: u16,
        /// Among those with core attention.
        layer: usize,
        /// Its head dim.
        dim: u16,
    },
    /// The system has no thread to give.
    #[error("rank {rank} cannot start its threads: {source}; raise the limit on processes")]
    Threads {
        /// Which rank.
        rank: u16,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl JoinError {
    /// Whether the user has to correct something (exit code 2), rather than to try again.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Attach(error) => error.is_bad_input(),
            Self::Engine(_)
            | Self::First(..)
            | Self::Headers(_)
            | Self::Profile(_)
            | Self::Nothing { .. }
            | Self::Uneven { .. }
            | Self::HeadDim { .. }
            | Self::OnGpu { .. }
            | Self::NoMemory { .. }
            | Self::Twice { .. } => true,
            Self::Gpu { .. } | Self::Threads { .. } => false,
        }
    }
}

/// Refuses heads that nothing computes.
pub(super) fn check_heads(rank: u16, layers: &Layers) -> Result<(), JoinError> {
    for layer in 0..usize::from(layers.count()) {
        let Heads { query, kv, dim } = layers.kind_of(layer).heads;
        for (number, what) in [
            (query, "the number of query heads"),
            (kv, "the number of KV heads"),
            (dim, "the head dim"),
        ] {
            if number == 0 {
                return Err(JoinError::Nothing { rank, layer, what });
            }
        }
        if !query.is_multiple_of(kv) {
            return Err(JoinError::Uneven { rank, layer, query, kv });
        }
        if !cadre_kernels::is_head_dim(dim.into()) {
            return Err(JoinError::HeadDim { rank, layer, dim });
        }
    }
    Ok(())
}

/// Refuses heads whose rows could not stay on a GPU.
pub(super) fn check_gpu_heads(rank: u16, layers: &Layers) -> Result<(), JoinError> {
    let mut dims =
        (0..usize::from(layers.count())).map(|layer| (layer, layers.kind_of(layer).heads.dim));
    match dims.find(|it| !cadre_kernels::is_gpu_head_dim(it.1.into())) {
        Some((layer, dim)) => Err(JoinError::OnGpu { rank, layer, dim }),
        None => Ok(()),
    }
}
