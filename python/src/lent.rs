//! Phases whose tensors lie on a GPU: their rows are lent where they lie, behind the caller's stream.
//!
//! In: tensors with addresses of a GPU, which GPU, and the handle of the stream on which PyTorch makes them. Out: as the session's calls,
//! with the stream waiting for the session's copies: what PyTorch puts on it next may read the results, or use the memory again.
//!
//! Nothing is computed here, and nothing waits for a GPU. Invariant: the thread has the context that it had before.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use cadre_kernels::device::{CallersContext, Gpu, Stream};
use cadre_worker::session::{self, Error, LentInputs, LentOutputs, PhaseAt};
use pyo3::prelude::*;

use crate::refusal::{NotFinite, failed, refused, told};
use crate::tensor::{Side, Tensor};

/// Number of a GPU of this process, and the handle of a stream there; 0 is its default one.
pub(crate) type Behind = (usize, u64);

/// Q, K and V; and O, LSE and dO with dLSE, of a backward.
type Phase<'a> = (&'a [Tensor; 3], Option<&'a ([Tensor; 3], Option<Tensor>)>);

/// Where memory of tensors is.
pub(crate) fn side_of(lent: Option<Behind>) -> Side {
    if lent.is_none() { Side::Host } else { Side::Gpu }
}

/// A stream of PyTorch's, on a GPU that is opened if need be: once a process.
pub(crate) fn stream((number, handle): Behind) -> PyResult<Stream> {
    static OPENED: Mutex<Vec<(usize, Gpu)>> = Mutex::new(Vec::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|it| it.0 == number).map(|it| it.1.clone());
    let gpu = if let Some(gpu) = known {
        gpu
    } else {
        let gpu = Gpu::open(number).map_err(|error| {
            let remedy = "hand over tensors on the CPU";
            refused(format!("rows on GPU {number} cannot be used there: {error}; {remedy}"))
        })?;
        opened.push((number, gpu.clone()));
        gpu
    };
    // SAFETY: PyTorch's streams live as long as its process.
    Ok(unsafe { Stream::foreign(&gpu, handle) })
}

/// As [`session::Rank::submit_lent`].
pub(crate) fn submit(
    session: &session::Session,
    behind: Behind,
    phase: PhaseAt,
    ([q, k, v], gradients): Phase<'_>,
) -> PyResult<session::Ticket> {
    let _kept = CallersContext::keep();
    let stream = stream(behind)?;
    let (q, k, v) = (q.lent(), k.lent(), v.lent());
    let inputs = match gradients {
        None => LentInputs::Forward { q, k, v },
        Some(([o, lse, dout], dlse)) => {
            let (o, lse, dout) = (o.lent(), lse.lent(), dout.lent());
            let dlse = dlse.as_ref().map(Tensor::lent);
            LentInputs::Backward { q, k, v, o, lse, dout, dlse }
        }
    };
    let (ticket, over) = session.submit_lent(phase, inputs, &stream).map_err(told)?;
    stream.wait_for(&over).map_err(failed)?;
    Ok(ticket)
}

/// As [`session::Rank::wait_lent_reporting`], or [`session::Rank::wait_lent`]; of a ticket that is asked for when nothing of the
/// results' form is refused any more.
pub(crate) fn wait(
    session: &session::Session,
    behind: Behind,
    ticket: impl FnOnce() -> PyResult<session::Ticket>,
    (results, not_finite): (&mut [Tensor], NotFinite),
) -> PyResult<Option<Error>> {
    let _kept = CallersContext::keep();
    let stream = stream(behind)?;
    let outputs = match results {
        [o, lse] => LentOutputs::Forward { o: o.lent_mut(), lse: lse.lent_mut() },
        [dq, dk, dv] => {
            let (dq, dk, dv) = (dq.lent_mut(), dk.lent_mut(), dv.lent_mut());
            LentOutputs::Backward { dq, dk, dv }
        }
        _ => unreachable!("there are as many tensors as names"),
    };
    let ticket = ticket()?;
    let (over, found) = match not_finite {
        NotFinite::Report => session.wait_lent_reporting(ticket, outputs, &stream),
        NotFinite::End => session.wait_lent(ticket, outputs, &stream).map(|over| (over, None)),
    }
    .map_err(told)?;
    stream.wait_for(&over).map_err(failed)?;
    Ok(found)
}
