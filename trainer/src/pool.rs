//! Core attention of a trainer through the pool: the model's calls on a rank's [`Rank`].
//!
//! In: rows of the model's calls ([`Attention`]). Out: whole phases. Keeps Q, K, V and LSE of a phase from its forward to its
//! backward, rounded to the job's wire type, since a session keeps no tensor of its caller's. Sinks are applied here, to whole rows.
//!
//! Invariant: Q, K and V are rounded once, so forward and backward read the same bits.

use std::collections::BTreeMap;

use cadre_kernels::{Threads, wire};
use cadre_worker::session::{
    self, Direction, Inputs, Layers, Outputs, PerHead, PerHeadMut, PhaseAt, PlannedStep, Rank,
    Rows, RowsMut, Ticket, Wire,
};
use half::bf16;

use super::attention::{At, sink, sunk};
use super::{Attention, AttentionError, Gradients};

/// Attention on the pool, for the phases of one step.
pub struct Pool<'a> {
    rank: &'a Rank,
    wire: Wire,
    layers: &'a Layers,
    /// Threads that compute Δ and the gradient of sinks.
    threads: Threads,
    /// Open phases, by layer and nano-batch.
    phases: BTreeMap<At, Phase>,
}

#[derive(Debug)]
struct Phase {
    q: Kept,
    k: Kept,
    v: Kept,
    /// Empty until the forward is whole.
    lse: Vec<f32>,
    /// Sinks of the layer; `dsinks` is their gradient.
    sinks: Vec<f32>,
    dsinks: Vec<f32>,
    /// Ticket of the phase that was submitted last, until it is waited for.
    ticket: Option<Ticket>,
}

/// Rows in the job's wire type.
#[derive(Debug)]
enum Kept {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Kept {
    fn new(kind: Wire, values: Vec<f32>) -> Self {
        match kind {
            Wire::F32 => Self::F32(values),
            Wire::Bf16 => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                wire::to_bf16(&mut rounded, &values);
                Self::Bf16(rounded)
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(it) => it.len(),
            Self::Bf16(it) => it.len(),
        }
    }

    fn rows(&self) -> Rows<'_> {
        match self {
            Self::F32(it) => Rows::f32(it),
            Self::Bf16(it) => Rows::bf16(it),
        }
    }
}

impl<'a> Pool<'a> {
    /// Attention for the phases of a step that has begun.
    pub fn new(rank: &'a Rank, planned: &'a PlannedStep, threads: Threads) -> Self {
        let (wire, layers) = (planned.header.wire, &planned.header.layers);
        Self { rank, wire, layers, threads, phases: BTreeMap::new() }
    }

    /// Elements of a head of a layer.
    fn dim(&self, at: At) -> usize {
        self.layers.kind_of(at.layer).heads.dim.into()
    }
}

fn phase_at(direction: Direction, At { layer, nano }: At) -> PhaseAt {
    PhaseAt { layer, nano, direction }
}

impl From<session::Error> for AttentionError {
    fn from(error: session::Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl Attention for Pool<'_> {
    fn submit_forward(&mut self, at: At, [q, k, v]: [Vec<f32>; 3]) -> Result<(), AttentionError> {
        let [q, k, v] = [q, k, v].map(|it| Kept::new(self.wire, it));
        let inputs = Inputs::Forward { q: q.rows(), k: k.rows(), v: v.rows() };
        let ticket = self.rank.submit(phase_at(Direction::Forward, at), inputs)?;
        let [lse, sinks, dsinks] = [const { Vec::new() }; 3];
        let phase = Phase { q, k, v, lse, sinks, dsinks, ticket: Some(ticket) };
        self.phases.insert(at, phase);
        Ok(())
    }

    fn wait_forward(&mut self, at: At, sinks: &[f32]) -> Result<Vec<f32>, AttentionError> {
        let dim = self.dim(at);
        let Some(phase) = self.phases.get_mut(&at) else {
            return Err(at.cannot_be("waited for: it was not submitted"));
        };
        let Some(ticket) = phase.ticket.take() else {
            return Err(at.cannot_be("waited for twice"));
        };
        let mut out = vec![0.0; phase.q.len()];
        phase.lse = vec![0.0; phase.q.len() / dim];
        let to =
            Outputs::Forward { o: RowsMut::f32(&mut out), lse: PerHeadMut::f32(&mut phase.lse) };
        self.rank.wait(ticket, to)?;
        sink(&mut out, &mut phase.lse, sinks);
        phase.sinks = sinks.to_vec();
        Ok(out)
    }

    fn submit_backward(&mut self, at: At, rows: [Vec<f32>; 2]) -> Result<(), AttentionError> {
        let ([dout, out], with) = (rows, (self.threads, self.dim(at)));
        let phase = self.phases.get_mut(&at).filter(|it| it.ticket.is_none());
        let Some(phase) = phase else {
            return Err(at.cannot_be("submitted backward: its forward is not done"));
        };
        let inputs = Inputs::Backward {
            q: phase.q.rows(),
            k: phase.k.rows(),
            v: phase.v.rows(),
            o: Rows::f32(&out),
            lse: PerHead::f32(&phase.lse),
            dout: Rows::f32(&dout),
            dlse: None,
        };
        phase.ticket = Some(self.rank.submit(phase_at(Direction::Backward, at), inputs)?);
        phase.dsinks = sunk(with, (&dout, &out), &phase.lse, &phase.sinks);
        Ok(())
    }

    fn wait_backward(&mut self, at: At) -> Result<Gradients, AttentionError> {
        let phase = self.phases.remove(&at);
        let Some(Phase { q, k, v, lse, sinks: _, dsinks, ticket: Some(ticket) }) = phase else {
            return Err(at.cannot_be("waited for: it was not submitted"));
        };
        drop(lse);
        let zeros = |it: Kept| vec![0.0; it.len()];
        let mut to = Gradients { dq: zeros(q), dk: zeros(k), dv: zeros(v), dsinks };
        let Gradients { dq, dk, dv, dsinks: _ } = &mut to;
        let [dq, dk, dv] = [dq, dk, dv].map(|it| RowsMut::f32(it));
        self.rank.wait(ticket, Outputs::Backward { dq, dk, dv })?;
        Ok(to)
    }
}
