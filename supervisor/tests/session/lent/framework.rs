//! Where a framework has its tensors, and how it hands them over.
//!
//! In: numbers, and calls of a session. Out: tickets and tensors, on the host or on a GPU. On a GPU nobody waits: what was handed over is
//! written anew on the caller's stream behind the event that says that it may be, and its memory is used for the next tensor.

use std::sync::Arc;

use cadre_kernels::device::{Buffer, Event, Gpu, Lent, LentMut, Spread, Stream};
use cadre_worker::session::{
    Inputs, LentInputs, LentOutputs, Outputs, PerHead, PerHeadMut, PhaseAt, Rows, RowsMut, Session,
    Ticket,
};

use super::{Failure, KV, NANOS, QUERY, QUERY_HEADS, ROWS};

/// See the module.
pub(super) trait Framework {
    type Tensor;

    /// A tensor of a nano-batch with these numbers.
    fn tensor(&mut self, nano: usize, numbers: &[f32]) -> Result<Self::Tensor, Failure>;

    /// Of Q, and of K and V side by side; Q stays the caller's.
    fn forward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        q: &Self::Tensor,
        kv: Self::Tensor,
    ) -> Result<Ticket, Failure>;

    /// O and LSE.
    fn of_forward(
        &mut self,
        session: &Session,
        nano: usize,
        ticket: Ticket,
    ) -> Result<[Self::Tensor; 2], Failure>;

    /// Of Q, K and V side by side, O and LSE, dO, dLSE; Q, O and LSE stay the caller's.
    fn backward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        kept: [&Self::Tensor; 3],
        given: [Self::Tensor; 3],
    ) -> Result<Ticket, Failure>;

    /// dQ, dK and dV.
    fn of_backward(
        &mut self,
        session: &Session,
        nano: usize,
        ticket: Ticket,
    ) -> Result<[Self::Tensor; 3], Failure>;

    /// Its numbers, on the host.
    fn read(&mut self, nano: usize, tensor: &Self::Tensor) -> Result<Vec<f32>, Failure>;
}

/// In vectors.
pub(super) struct OnHost;

impl Framework for OnHost {
    type Tensor = Vec<f32>;

    fn tensor(&mut self, _: usize, numbers: &[f32]) -> Result<Vec<f32>, Failure> {
        Ok(numbers.to_vec())
    }

    fn forward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        q: &Vec<f32>,
        kv: Vec<f32>,
    ) -> Result<Ticket, Failure> {
        let [k, v] = halves(&kv);
        Ok(session.submit(phase, Inputs::Forward { q: Rows::f32(q), k, v })?)
    }

    fn of_forward(
        &mut self,
        session: &Session,
        _: usize,
        ticket: Ticket,
    ) -> Result<[Vec<f32>; 2], Failure> {
        let (mut o, mut lse) = (vec![0.0; ROWS * QUERY], vec![0.0; ROWS * QUERY_HEADS]);
        session.wait(
            ticket,
            Outputs::Forward { o: RowsMut::f32(&mut o), lse: PerHeadMut::f32(&mut lse) },
        )?;
        Ok([o, lse])
    }

    fn backward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        [q, o, lse]: [&Vec<f32>; 3],
        [kv, dout, dlse]: [Vec<f32>; 3],
    ) -> Result<Ticket, Failure> {
        let [k, v] = halves(&kv);
        let [q, o, dout] = [q, o, &dout].map(|it| Rows::f32(it));
        let (lse, dlse) = (PerHead::f32(lse), Some(PerHead::f32(&dlse)));
        let inputs = Inputs::Backward { q, k, v, o, lse, dout, dlse };
        Ok(session.submit(phase, inputs)?)
    }

    fn of_backward(
        &mut self,
        session: &Session,
        _: usize,
        ticket: Ticket,
    ) -> Result<[Vec<f32>; 3], Failure> {
        let [mut dq, mut dk, mut dv] = [QUERY, KV, KV].map(|it| vec![0.0; ROWS * it]);
        let [to_q, to_k, to_v] = [&mut dq, &mut dk, &mut dv].map(|it| RowsMut::f32(it));
        session.wait(ticket, Outputs::Backward { dq: to_q, dk: to_k, dv: to_v })?;
        Ok([dq, dk, dv])
    }

    fn read(&mut self, _: usize, tensor: &Vec<f32>) -> Result<Vec<f32>, Failure> {
        Ok(tensor.clone())
    }
}

/// K and V of rows that have both.
fn halves(kv: &[f32]) -> [Rows<'_>; 2] {
    [&kv[..kv.len() - KV], &kv[KV..]].map(|it| Rows::f32(it).every(2 * KV))
}

/// On a GPU, with memory that is used again as soon as its stream may.
pub(super) struct OnGpu {
    streams: Vec<Stream>,
    /// By stream.
    free: Vec<Vec<Buffer<f32>>>,
}

const BOTH: Spread = Spread { rows: ROWS, width: KV, distance: 2 * KV };

impl OnGpu {
    pub(super) fn new() -> Result<Self, Failure> {
        let gpu = Gpu::open(0)?;
        let streams = (0..NANOS).map(|_| Stream::new(&gpu)).collect::<Result<_, _>>()?;
        Ok(Self { streams, free: (0..NANOS).map(|_| Vec::new()).collect() })
    }

    /// Any numbers, of the last tensor there.
    fn room(&mut self, nano: usize, numbers: usize) -> Result<Buffer<f32>, Failure> {
        let free = &mut self.free[nano];
        Ok(match free.iter().position(|it| it.len() == numbers) {
            Some(at) => free.swap_remove(at),
            None => Buffer::new(self.streams[nano].gpu(), numbers, "a tensor")?,
        })
    }

    /// Behind `over` tensors are written anew, and theirs is room for others.
    fn give_back(
        &mut self,
        nano: usize,
        over: &Arc<Event>,
        tensors: impl IntoIterator<Item = Buffer<f32>>,
    ) -> Result<(), Failure> {
        self.streams[nano].wait_for(over)?;
        for mut tensor in tensors {
            let other = vec![f32::NAN; tensor.len()];
            tensor.write(&self.streams[nano], 0, &other)?;
            self.free[nano].push(tensor);
        }
        Ok(())
    }
}

fn rows(tensor: &Buffer<f32>) -> Lent<'_> {
    tensor.lend(0, Spread::dense(ROWS, tensor.len() / ROWS))
}

fn rows_mut(tensor: &mut Buffer<f32>) -> LentMut<'_> {
    tensor.lend_mut(0, Spread::dense(ROWS, tensor.len() / ROWS))
}

impl Framework for OnGpu {
    type Tensor = Buffer<f32>;

    fn tensor(&mut self, nano: usize, numbers: &[f32]) -> Result<Buffer<f32>, Failure> {
        let mut tensor = self.room(nano, numbers.len())?;
        tensor.write(&self.streams[nano], 0, numbers)?;
        Ok(tensor)
    }

    fn forward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        q: &Buffer<f32>,
        kv: Buffer<f32>,
    ) -> Result<Ticket, Failure> {
        let inputs = LentInputs::Forward { q: rows(q), k: kv.lend(0, BOTH), v: kv.lend(KV, BOTH) };
        let (ticket, over) = session.submit_lent(phase, inputs, &self.streams[phase.nano])?;
        self.give_back(phase.nano, &over, [kv])?;
        Ok(ticket)
    }

    fn of_forward(
        &mut self,
        session: &Session,
        nano: usize,
        ticket: Ticket,
    ) -> Result<[Buffer<f32>; 2], Failure> {
        let mut o = self.room(nano, ROWS * QUERY)?;
        let mut lse = self.room(nano, ROWS * QUERY_HEADS)?;
        let outputs = LentOutputs::Forward { o: rows_mut(&mut o), lse: rows_mut(&mut lse) };
        let over = session.wait_lent(ticket, outputs, &self.streams[nano])?;
        self.streams[nano].wait_for(&over)?;
        Ok([o, lse])
    }

    fn backward(
        &mut self,
        session: &Session,
        phase: PhaseAt,
        [q, o, lse]: [&Buffer<f32>; 3],
        [kv, dout, dlse]: [Buffer<f32>; 3],
    ) -> Result<Ticket, Failure> {
        let inputs = LentInputs::Backward {
            q: rows(q),
            k: kv.lend(0, BOTH),
            v: kv.lend(KV, BOTH),
            o: rows(o),
            lse: rows(lse),
            dout: rows(&dout),
            dlse: Some(rows(&dlse)),
        };
        let (ticket, over) = session.submit_lent(phase, inputs, &self.streams[phase.nano])?;
        self.give_back(phase.nano, &over, [kv, dout, dlse])?;
        Ok(ticket)
    }

    fn of_backward(
        &mut self,
        session: &Session,
        nano: usize,
        ticket: Ticket,
    ) -> Result<[Buffer<f32>; 3], Failure> {
        let mut dq = self.room(nano, ROWS * QUERY)?;
        let (mut dk, mut dv) = (self.room(nano, ROWS * KV)?, self.room(nano, ROWS * KV)?);
        let outputs = LentOutputs::Backward {
            dq: rows_mut(&mut dq),
            dk: rows_mut(&mut dk),
            dv: rows_mut(&mut dv),
        };
        let over = session.wait_lent(ticket, outputs, &self.streams[nano])?;
        self.streams[nano].wait_for(&over)?;
        Ok([dq, dk, dv])
    }

    fn read(&mut self, nano: usize, tensor: &Buffer<f32>) -> Result<Vec<f32>, Failure> {
        let mut numbers = vec![0.0; tensor.len()];
        tensor.read(&self.streams[nano], 0, &mut numbers)?;
        Ok(numbers)
    }
}
