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

use super::call::{Error, Inputs, Outputs, Sizes, name};
use super::rows::{Rows, RowsMut};
use super::side::lock;
use super::{Rank, Ticket};

/// Rows of one phase, as [`Inputs`].
#[derive(Clone, Copy, Debug)]
pub enum LentInputs<'a> {
    /// Core attention.
    Forward {
        /// Queries, rotated, `[rows, query heads · dim]`.
        q: Lent<'a>,
        /// Keys, rotated, `[rows, KV heads · dim]`.
        k: Lent<'a>,
        /// Values, `[rows, KV heads · dim]`.
        v: Lent<'a>,
    },
    /// Its gradients.
    Backward {
        /// Queries, `[rows, query heads · dim]`.
        q: Lent<'a>,
        /// Keys, `[rows, KV heads · dim]`.
        k: Lent<'a>,
        /// Values, `[rows, KV heads · dim]`.
        v: Lent<'a>,
        /// O as the forward gave it, `[rows, query heads · dim]`.
        o: Lent<'a>,
        /// LSE as the forward gave it, f32, `[rows, query heads]`.
        lse: Lent<'a>,
        /// Gradient of O, `[rows, query heads · dim]`.
        dout: Lent<'a>,
        /// Gradient of LSE, where the loss depends on it, f32, `[rows, query heads]`.
        dlse: Option<Lent<'a>>,
    },
}

/// Where the results of one phase go, as [`Outputs`].
#[derive(Debug)]
pub enum LentOutputs<'a> {
    /// Of a forward phase.
    Forward {
        /// O, `[rows, query heads · dim]`.
        o: LentMut<'a>,
        /// Log-sum-exp, f32, `[rows, query heads]`.
        lse: LentMut<'a>,
    },
    /// Of a backward phase.
    Backward {
        /// `[rows, query heads · dim]`.
        dq: LentMut<'a>,
        /// `[rows, KV heads · dim]`.
        dk: LentMut<'a>,
        /// `[rows, KV heads · dim]`.
        dv: LentMut<'a>,
    },
}

/// A tensor that cannot be lent: its name, and why.
pub(super) type Refused = (&'static str, LentError);

/// f32 alone.
fn scalars(of: Element) -> Result<(), LentError> {
    match of {
        Element::F32 => Ok(()),
        Element::Bf16 => Err(LentError::Dtype),
    }
}

impl<'a> LentInputs<'a> {
    fn direction(&self) -> Direction {
        match self {
            Self::Forward { .. } => Direction::Forward,
            Self::Backward { .. } => Direction::Backward,
        }
    }

    fn check(&self, sizes: &Sizes, behind: &Stream) -> Result<(), Refused> {
        check_lender(behind).map_err(|why| ("Q", why))?;
        let gpu = behind.gpu();
        let rows = |name, rows: &Lent<'_>, width| {
            rows.check(gpu, sizes.rows, width).map_err(|why| (name, why))
        };
        let heads = |name, rows: &Lent<'_>| {
            scalars(rows.element()).map_err(|why| (name, why))?;
            rows.check(gpu, sizes.rows, sizes.query_heads).map_err(|why| (name, why))
        };
        let (query, kv) = (sizes.query(), sizes.kv());
        match self {
            Self::Forward { q, k, v } => {
                rows("Q", q, query)?;
                rows("K", k, kv)?;
                rows("V", v, kv)
            }
            Self::Backward { q, k, v, o, lse, dout, dlse } => {
                rows("Q", q, query)?;
                rows("K", k, kv)?;
                rows("V", v, kv)?;
                rows("O", o, query)?;
                rows("dO", dout, query)?;
                heads("LSE", lse)?;
                dlse.as_ref().map_or(Ok(()), |it| heads("dLSE", it))
            }
        }
    }

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
        let f32s = |at: usize| landed[at].slice::<f32>();
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
    fn direction(&self) -> Direction {
        match self {
            Self::Forward { .. } => Direction::Forward,
            Self::Backward { .. } => Direction::Backward,
        }
    }

    fn check(&self, sizes: &Sizes, behind: &Stream) -> Result<(), Refused> {
        let first = if self.direction() == Direction::Forward { "O" } else { "dQ" };
        check_lender(behind).map_err(|why| (first, why))?;
        let gpu = behind.gpu();
        let rows = |name, rows: &LentMut<'_>, width| {
            rows.check(gpu, sizes.rows, width).map_err(|why| (name, why))
        };
        match self {
            Self::Forward { o, lse } => {
                rows("O", o, sizes.query())?;
                scalars(lse.element()).map_err(|why| ("LSE", why))?;
                rows("LSE", lse, sizes.query_heads)
            }
            Self::Backward { dq, dk, dv } => {
                rows("dQ", dq, sizes.query())?;
                rows("dK", dk, sizes.kv())?;
                rows("dV", dv, sizes.kv())
            }
        }
    }

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
            (Self::Forward { o, .. }, [to_o, to_lse]) => {
                fill(Outputs::Forward { o: rows_mut(to_o, o.element()), lse: to_lse.slice_mut() })
            }
            (Self::Backward { dq, dk, dv }, [to_q, to_k, to_v]) => fill(Outputs::Backward {
                dq: rows_mut(to_q, dq.element()),
                dk: rows_mut(to_k, dk.element()),
                dv: rows_mut(to_v, dv.element()),
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
        let mut turn = lock(&self.turn);
        let due = self.due(&turn, phase, inputs.direction())?;
        let refused = |(tensor, source)| self.refuse_lent(due.at.step, phase, tensor, source);
        inputs.check(&due.sizes, behind).map_err(refused)?;
        let over = self.side.submit_lent((due.at, phase), &inputs, behind, (&due.sizes, &due.form));
        let over = over.map_err(|it| self.refuse(it))?;
        Ok((self.submitted(&mut turn, due, phase), over))
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
        outputs.check(&sizes, behind).map_err(refused)?;
        self.finished(self.side.wait_lent(&planned, (at, phase), &sizes, outputs, behind))
    }

    fn refuse_lent(&self, step: u64, phase: PhaseAt, tensor: &'static str, it: LentError) -> Error {
        let (rank, phase, source) = (self.rank(), name(step, phase), Box::new(it));
        self.refuse(Error::Lent { rank, phase, tensor, source })
    }
}
