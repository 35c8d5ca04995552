//! Rows of a phase that lie in memory of a GPU, where a framework of this process has them.
//!
//! In: [`Lent`] rows, and the stream of the caller's behind whose work they are there. Out: as [`Rank::submit`] and [`Rank::wait`], with
//! an event: behind it the rows are the caller's again, or the results are there. The call itself waits for neither.
//!
//! ```text
//! caller's stream  ─ makes rows ┐                                      ┌ waits for the event ─ reads results
//! ours                          └ copies ─ event                copies ┘
//! copies (thread)                            └ turns rows, rings      ▲
//! caller's thread  submit_lent ─▶ Ticket …            wait_lent ──────┘
//! ```
//!
//! Rows go through pinned memory of the host, where they are turned and rounded as rows of the host are. Invariant: the same rows give
//! the same bits, wherever they were handed over; and phases are submitted in the order of the calls, whichever rows they have.

use std::sync::Arc;

use cadre_kernels::device::{
    self, Coming, Element, Event, Ferry, Lent, LentError, LentMut, Pinned, Stream, check_lender,
};
use cadre_step::phases::{Direction, PhaseAt};

use super::call::{Error, Inputs, Outputs, PhaseInputs, PhaseOutputs, Sizes, Tensor, name};
use super::rows::{PerHead, PerHeadMut, Rows, RowsMut};
use super::side::{Awaited, lock};
use super::{Rank, Ticket};

/// Rows of one phase, as [`Inputs`], the heads of a row behind each other.
pub type LentInputs<'a> = PhaseInputs<Lent<'a>, Lent<'a>>;

/// Where the results of one phase go, as [`Outputs`], in the same form.
pub type LentOutputs<'a> = PhaseOutputs<LentMut<'a>, LentMut<'a>>;

/// A tensor that cannot be lent: its name, and why.
pub(super) type Refused = (&'static str, LentError);

/// f32 alone.
fn scalars(of: Element) -> Result<(), LentError> {
    match of {
        Element::F32 => Ok(()),
        Element::Bf16 => Err(LentError::Dtype),
    }
}

/// Refuses tensors that are not in memory of the stream's GPU, or of another form than announced, and a stream that is recorded;
/// `form` gives that of a tensor.
fn check<R>(
    tensors: &[Tensor<'_, R, R>],
    form: impl Fn(&R) -> Lent<'_>,
    (sizes, behind): (&Sizes, &Stream),
) -> Result<(), Refused> {
    let first = tensors.first().map_or("Q", |it| match it {
        Tensor::Rows(name, ..) | Tensor::Heads(name, _) => *name,
    });
    check_lender(behind).map_err(|why| (first, why))?;
    let gpu = behind.gpu();
    tensors.iter().try_for_each(|it| {
        let (name, it, width) = match it {
            Tensor::Rows(name, it, width) => (name, form(it), *width),
            Tensor::Heads(name, it) => {
                let it = form(it);
                scalars(it.element()).map_err(|why| (*name, why))?;
                (name, it, sizes.query_heads)
            }
        };
        it.check(gpu, sizes.rows, width).map_err(|why| (*name, why))
    })
}

impl<'a> LentInputs<'a> {
    /// Puts their copies behind the work that is on `behind` now.
    pub(super) fn down(&self, ferry: &Ferry, behind: &Stream) -> Result<Arriving, device::Error> {
        let all: Vec<Lent<'a>> = match *self {
            Self::Forward { q, k, v } => vec![q, k, v],
            Self::Backward { q, k, v, o, lse, dout, dlse } => {
                [q, k, v, o, lse, dout].into_iter().chain(dlse).collect()
            }
        };
        let elements = all.iter().map(Lent::element).collect();
        Ok(Arriving { direction: self.direction(), elements, coming: ferry.down(&all, behind)? })
    }
}

/// Rows of a phase on their way to the host.
#[derive(Debug)]
pub(super) struct Arriving {
    direction: Direction,
    elements: Vec<Element>,
    coming: Coming,
}

impl Arriving {
    /// When the caller's rows are its own again.
    pub(super) fn over(&self) -> Arc<Event> {
        Arc::clone(self.coming.over())
    }

    /// Waits for them, and gives them to `take`.
    pub(super) fn land<T>(
        self,
        take: impl FnOnce(Inputs<'_>) -> Result<T, device::Error>,
    ) -> Result<T, device::Error> {
        let landed = self.coming.land()?;
        let all: Vec<_> = landed.iter().zip(&self.elements).map(|it| rows(it.0, *it.1)).collect();
        let f32s = |at: usize| PerHead::f32(landed[at].slice());
        take(match self.direction {
            Direction::Forward => Inputs::Forward { q: all[0], k: all[1], v: all[2] },
            Direction::Backward => Inputs::Backward {
                q: all[0],
                k: all[1],
                v: all[2],
                o: all[3],
                lse: f32s(4),
                dout: all[5],
                dlse: (all.len() > 6).then(|| f32s(6)),
            },
        })
    }
}

fn rows(landed: &Pinned, element: Element) -> Rows<'_> {
    match element {
        Element::F32 => Rows::f32(landed.slice()),
        Element::Bf16 => Rows::bf16(landed.slice()),
    }
}

fn rows_mut(room: &mut Pinned, element: Element) -> RowsMut<'_> {
    match element {
        Element::F32 => RowsMut::f32(room.slice_mut()),
        Element::Bf16 => RowsMut::bf16(room.slice_mut()),
    }
}

impl<'a> LentOutputs<'a> {
    /// Room on the host for each of them, behind the other in their order.
    pub(super) fn rooms(&self, ferry: &Ferry) -> Result<Vec<Pinned>, device::Error> {
        let all = match self {
            Self::Forward { o, lse } => vec![o, lse],
            Self::Backward { dq, dk, dv } => vec![dq, dk, dv],
        };
        all.into_iter().map(|it| ferry.room(it.len_bytes())).collect()
    }

    /// Gives `rooms` to `fill`, as the host's outputs.
    pub(super) fn fill<T>(&self, rooms: &mut [Pinned], fill: impl FnOnce(Outputs<'_>) -> T) -> T {
        match (self, rooms) {
            (Self::Forward { o, .. }, [to_o, to_lse]) => fill(Outputs::Forward {
                o: rows_mut(to_o, o.as_lent().element()),
                lse: PerHeadMut::f32(to_lse.slice_mut()),
            }),
            (Self::Backward { dq, dk, dv }, [to_q, to_k, to_v]) => fill(Outputs::Backward {
                dq: rows_mut(to_q, dq.as_lent().element()),
                dk: rows_mut(to_k, dk.as_lent().element()),
                dv: rows_mut(to_v, dv.as_lent().element()),
            }),
            (Self::Forward { .. } | Self::Backward { .. }, _) => {
                unreachable!("there is a room for each output")
            }
        }
    }

    /// Each room with the rows that it is for.
    pub(super) fn with(self, rooms: Vec<Pinned>) -> Vec<(Pinned, LentMut<'a>)> {
        let all = match self {
            Self::Forward { o, lse } => vec![o, lse],
            Self::Backward { dq, dk, dv } => vec![dq, dk, dv],
        };
        rooms.into_iter().zip(all).collect()
    }
}

impl Rank {
    /// As [`Rank::submit`], of rows in memory of a GPU that are there once the work is done which is on `behind` now. It waits for no
    /// GPU: behind the event the rows are the caller's again, and then the phase starts. All calls name streams of one GPU.
    ///
    /// # Errors
    ///
    /// As [`Rank::submit`], and [`Error::Lent`]; nothing of the phase is sent then.
    pub fn submit_lent(
        &self,
        phase: PhaseAt,
        inputs: LentInputs<'_>,
        behind: &Stream,
    ) -> Result<(Ticket, Arc<Event>), Error> {
        let _one = lock(&self.submits);
        let due = self.due(phase, inputs.direction())?;
        let refused = |(tensor, source)| self.refuse_lent(due.at.step, phase, tensor, source);
        let form = (&due.sizes, behind);
        check(&inputs.tensors(&due.sizes), |it| *it, form).map_err(refused)?;
        let over =
            self.side.submit_lent((due.at, phase), (&inputs, behind), (&due.sizes, &due.form));
        let over = over.map_err(|it| self.refuse(it))?;
        Ok((self.submitted(due, phase), over))
    }

    /// As [`Rank::wait`], into memory of a GPU that may be written once the work is done which is on `behind` now. Behind the event the
    /// results are there.
    ///
    /// # Errors
    ///
    /// As [`Rank::wait`], and [`Error::Lent`].
    pub fn wait_lent(
        &self,
        ticket: Ticket,
        outputs: LentOutputs<'_>,
        behind: &Stream,
    ) -> Result<Arc<Event>, Error> {
        match self.wait_lent_reporting(ticket, outputs, behind)? {
            (over, None) => Ok(over),
            (_, Some(not_finite)) => Err(self.refuse(not_finite)),
        }
    }

    /// As [`Rank::wait_reporting`], in the same way.
    ///
    /// # Errors
    ///
    /// Those of [`Self::wait_lent`], but for [`Error::NotFinite`].
    pub fn wait_lent_reporting(
        &self,
        ticket: Ticket,
        outputs: LentOutputs<'_>,
        behind: &Stream,
    ) -> Result<(Arc<Event>, Option<Error>), Error> {
        let Ticket { planned, at, phase } = ticket;
        let sizes = self.awaited(&planned, (at, phase), outputs.direction())?;
        let refused = |(tensor, source)| self.refuse_lent(at.step, phase, tensor, source);
        let form = (&sizes, behind);
        check(&outputs.tensors(&sizes), LentMut::as_lent, form).map_err(refused)?;
        let awaited = Awaited { planned: &planned, phase: (at, phase), sizes: &sizes };
        self.finished(self.side.wait_lent(&awaited, (outputs, behind)))
    }

    fn refuse_lent(&self, step: u64, phase: PhaseAt, tensor: &'static str, it: LentError) -> Error {
        let (rank, phase, source) = (self.rank(), name(step, phase), Box::new(it));
        self.refuse(Error::Lent { rank, phase, tensor, source })
    }
}
