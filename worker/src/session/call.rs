//! What a rank hands to a phase and gets from it, and why a call is refused.
//!
//! In: borrowed rows. Out: [`Inputs`] and [`Outputs`] whose sizes were checked against the announced layout, before
//! anything is sent. Nothing is computed here but Δ.

use cadre_crds::Wire;
use cadre_kernels::{Threads, delta, device};
use cadre_planner::RankId;
use cadre_step::phases::{Direction, PhaseAt};
use cadre_step::planned::PlannedStep;

use super::rows::{PerHead, PerHeadMut, Rows, RowsMut};
use crate::heads::HeadByHead;
use crate::launch::PhaseRows;
use crate::memory::{Memory, Place as _};
use crate::merge::NotFinite;

/// Rows of one phase: this rank's stretch of the packed stream of its nano-batch.
pub type Inputs<'a> = PhaseInputs<Rows<'a>, PerHead<'a>>;

/// Where the results of one phase go.
pub type Outputs<'a> = PhaseOutputs<RowsMut<'a>, PerHeadMut<'a>>;

/// What a phase reads: rows of `R`, and `S` with a number for each row and query head.
#[derive(Clone, Copy, Debug)]
pub enum PhaseInputs<R, S> {
    /// Core attention.
    Forward {
        /// Queries, rotated, `[rows, query heads, dim]`.
        q: R,
        /// Keys, rotated, `[rows, KV heads, dim]`.
        k: R,
        /// Values, `[rows, KV heads, dim]`.
        v: R,
    },
    /// Its gradients. Q, K and V are those of the forward again: the same rows round to the same bits.
    Backward {
        /// Queries, `[rows, query heads, dim]`.
        q: R,
        /// Keys, `[rows, KV heads, dim]`.
        k: R,
        /// Values, `[rows, KV heads, dim]`.
        v: R,
        /// O as the forward gave it, `[rows, query heads, dim]`.
        o: R,
        /// LSE as the forward gave it, f32, `[rows, query heads]`.
        lse: S,
        /// Gradient of O, `[rows, query heads, dim]`.
        dout: R,
        /// Gradient of LSE, where the loss depends on it, f32, `[rows, query heads]`.
        dlse: Option<S>,
    },
}

/// What a phase writes, as [`PhaseInputs`].
#[derive(Debug)]
pub enum PhaseOutputs<R, S> {
    /// Of a forward phase.
    Forward {
        /// O, `[rows, query heads, dim]`.
        o: R,
        /// Log-sum-exp, natural logarithm, f32, `[rows, query heads]`; −∞ for a row without keys.
        lse: S,
    },
    /// Of a backward phase.
    Backward {
        /// `[rows, query heads, dim]`.
        dq: R,
        /// `[rows, KV heads, dim]`.
        dk: R,
        /// `[rows, KV heads, dim]`.
        dv: R,
    },
}

/// Sizes of a rank's rows in a phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) wire: Wire,
}

impl Sizes {
    pub(super) fn of(planned: &PlannedStep, at: PhaseAt, rank: RankId) -> Self {
        let problem = &planned.plans[planned.plan_index(at)].problem;
        Self {
            rows: problem.layout.rank_rows(rank) as usize,
            query_heads: problem.heads.query.into(),
            kv_heads: problem.heads.kv.into(),
            dim: problem.heads.dim.into(),
            wire: planned.header.wire,
        }
    }

    pub(super) fn query(&self) -> usize {
        self.query_heads * self.dim
    }

    pub(super) fn kv(&self) -> usize {
        self.kv_heads * self.dim
    }
}

/// A tensor of a phase with its name.
#[derive(Debug)]
pub(super) enum Tensor<'t, R, S> {
    /// Rows of so many elements.
    Rows(&'static str, &'t R, usize),
    /// A number for each row and query head.
    Heads(&'static str, &'t S),
}

/// A tensor of another size than announced: its name, and what it has.
type Refused = (&'static str, String);

impl<R, S> PhaseInputs<R, S> {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Self::Forward { .. } => Direction::Forward,
            Self::Backward { .. } => Direction::Backward,
        }
    }

    /// All of them, in the order in which they are checked.
    pub(super) fn tensors(&self, sizes: &Sizes) -> Vec<Tensor<'_, R, S>> {
        let (query, kv) = (sizes.query(), sizes.kv());
        let (Self::Forward { q, k, v } | Self::Backward { q, k, v, .. }) = self;
        let mut all =
            vec![Tensor::Rows("Q", q, query), Tensor::Rows("K", k, kv), Tensor::Rows("V", v, kv)];
        if let Self::Backward { o, lse, dout, dlse, .. } = self {
            all.extend([Tensor::Rows("O", o, query), Tensor::Rows("dO", dout, query)]);
            all.push(Tensor::Heads("LSE", lse));
            all.extend(dlse.as_ref().map(|it| Tensor::Heads("dLSE", it)));
        }
        all
    }
}

impl<R, S> PhaseOutputs<R, S> {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Self::Forward { .. } => Direction::Forward,
            Self::Backward { .. } => Direction::Backward,
        }
    }

    /// As [`PhaseInputs::tensors`].
    pub(super) fn tensors(&self, sizes: &Sizes) -> Vec<Tensor<'_, R, S>> {
        match self {
            Self::Forward { o, lse } => {
                vec![Tensor::Rows("O", o, sizes.query()), Tensor::Heads("LSE", lse)]
            }
            Self::Backward { dq, dk, dv } => vec![
                Tensor::Rows("dQ", dq, sizes.query()),
                Tensor::Rows("dK", dk, sizes.kv()),
                Tensor::Rows("dV", dv, sizes.kv()),
            ],
        }
    }
}

impl Inputs<'_> {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Refused> {
        self.tensors(sizes).into_iter().try_for_each(|it| match it {
            Tensor::Rows(name, it, width) => {
                it.check(sizes.rows, width).map_err(|what| (name, what))
            }
            Tensor::Heads(name, it) => {
                it.0.check(sizes.rows, sizes.query_heads).map_err(|what| (name, what))
            }
        })
    }

    /// Copies the rows into memory that peers may read, head by head.
    pub(super) fn hold<M: Memory>(
        self,
        (sizes, form): (&Sizes, &HeadByHead),
        place: &M::Place,
        threads: Threads,
    ) -> Result<PhaseRows<M>, device::Error> {
        let rows = |rows: Rows<'_>, width| place.hold(rows.to_wire(sizes.wire, form, width));
        let scalars =
            |values: Rows<'_>| place.hold(values.to_wire(Wire::F32, form, sizes.query_heads));
        let qkv = |q, k, v| -> Result<[M; 3], device::Error> {
            Ok([rows(q, sizes.query())?, rows(k, sizes.kv())?, rows(v, sizes.kv())?])
        };
        match self {
            Self::Forward { q, k, v } => {
                let [q, k, v] = qkv(q, k, v)?;
                Ok(PhaseRows { q, k, v, gradients: None })
            }
            Self::Backward { q, k, v, o, lse, dout, dlse } => {
                let [q, k, v] = qkv(q, k, v)?;
                let [wide, out] = [dout, o].map(|it| it.to_f32s(sizes.rows, sizes.query()));
                let mut delta = delta(threads, sizes.dim, &wide, &out);
                let dlse = dlse.map(|it| it.0.to_f32s(sizes.rows, sizes.query_heads));
                for (delta, dlse) in delta.iter_mut().zip(dlse.iter().flat_map(|it| it.iter())) {
                    *delta -= dlse;
                }
                let dout = rows(dout, sizes.query())?;
                let (lse, delta) = (scalars(lse.0)?, scalars(Rows::f32(&delta))?);
                Ok(PhaseRows { q, k, v, gradients: Some([dout, lse, delta]) })
            }
        }
    }
}

impl Outputs<'_> {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Refused> {
        self.tensors(sizes).into_iter().try_for_each(|it| match it {
            Tensor::Rows(name, it, width) => {
                it.check(sizes.rows, width).map_err(|what| (name, what))
            }
            Tensor::Heads(name, it) => {
                it.0.check(sizes.rows, sizes.query_heads).map_err(|what| (name, what))
            }
        })
    }
}

/// Why a call has no result. After any of them no further phase of the job may be submitted: but for
/// [`Error::Ended`], the call has told the conductor, and the job ends everywhere with this reason.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another call is next.
    #[error("rank {rank}: {called}, but {expected}; make the calls of a step in their order")]
    OutOfTurn {
        /// Who called.
        rank: u16,
        /// What was called, in words.
        called: String,
        /// What is next, in words.
        expected: String,
    },
    /// Rows, or room for results, of another size than the rank's lengths say.
    #[error(
        "rank {rank}: {tensor} of {phase} {what}; hand over the rows that were announced for it"
    )]
    Rows {
        /// Who called.
        rank: u16,
        /// The phase.
        phase: String,
        /// Which tensor.
        tensor: &'static str,
        /// What it has instead.
        what: String,
    },
    /// Rows on a GPU, or room for results there, that cannot be used.
    #[error("rank {rank}: {tensor} of {phase} {source}")]
    Lent {
        /// Who called.
        rank: u16,
        /// The phase.
        phase: String,
        /// Which tensor.
        tensor: &'static str,
        /// What is wrong, and what to do.
        source: Box<device::LentError>,
    },
    /// The system has no thread to give.
    #[error("rank {rank} cannot start its thread copies: {source}; raise the limit on processes")]
    Thread {
        /// Who called.
        rank: u16,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Turns that do not fit the rank's layers or nano-batches.
    #[error("rank {rank} announced step {step}: {source}")]
    Turns {
        /// Who called.
        rank: u16,
        /// The step.
        step: u64,
        /// What is wrong.
        source: cadre_step::turns::Error,
    },
    /// A step of a model with other layers, or heads in them.
    #[error(
        "rank {rank}: its layers are {own}, those of step {step} are {job}; give every rank the same model"
    )]
    Layers {
        /// Whose model differs.
        rank: u16,
        /// The step.
        step: u64,
        /// The rank's layers.
        own: String,
        /// Those of rank 0, in the header.
        job: String,
    },
    /// A step of a job with another seed.
    #[error("rank {rank} has the seed {own}, step {step} the seed {job}; give every rank the same")]
    Seed {
        /// Whose seed differs.
        rank: u16,
        /// The step.
        step: u64,
        /// What the rank has.
        own: u64,
        /// What rank 0 has, in the header.
        job: u64,
    },
    /// A step of a job whose rows have another type on the wire.
    #[error(
        "rank {rank} joined with rows of {own:?}, step {step} has {job:?} on the wire; give every rank the same type, or set \
         spec.attention.wire"
    )]
    Wire {
        /// Whose rows differ.
        rank: u16,
        /// The step.
        step: u64,
        /// What the rank has.
        own: Wire,
        /// What rank 0 has, in the header.
        job: Wire,
    },
    /// A result holds NaN or infinity.
    #[error("rank {rank}, {phase}: {source}; look at its inputs first")]
    NotFinite {
        /// Whose rows.
        rank: u16,
        /// The phase.
        phase: String,
        /// Tensor, task and who computed it.
        source: Box<NotFinite>,
    },
    /// The GPU's memory, or the driver's.
    #[error("rank {rank}: rows of {phase}: {source}")]
    Device {
        /// Who called.
        rank: u16,
        /// The phase.
        phase: String,
        /// The driver's reason.
        source: Box<device::Error>,
    },
    /// The job ended.
    #[error("{reason}")]
    Ended {
        /// Why, in one line.
        reason: String,
    },
}

impl Error {
    /// Whether the program, or what it was given, has to be corrected: another attempt would end in the same way. The job ends
    /// as one whose input is bad (exit code 2), and is not started again.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::OutOfTurn { .. }
            | Self::Rows { .. }
            | Self::Lent { .. }
            | Self::Turns { .. }
            | Self::Layers { .. }
            | Self::Wire { .. }
            | Self::Seed { .. } => true,
            Self::Thread { .. }
            | Self::NotFinite { .. }
            | Self::Device { .. }
            | Self::Ended { .. } => false,
        }
    }
}
