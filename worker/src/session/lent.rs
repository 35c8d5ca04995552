//! Rows of a phase that lie in memory of a GPU, where a framework of this process has them.
//!
//! In: lent rows ([`super::lent_rows`]), and the stream of the caller's behind whose work they are there. Out: as [`Rank::submit`]
//! and [`Rank::wait`], with an event: behind it the rows are the caller's again, or the results are there. The call itself waits for
//! neither.
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

use cadre_kernels::device::{Event, LentError, LentMut, Stream};
use cadre_step::phases::PhaseAt;

use super::call::Error;
use super::lent_rows::{LentInputs, LentOutputs, check};
use super::side::Awaited;
use super::{Rank, Ticket, lock};

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
        let (rank, phase, source) = (self.rank(), phase.in_words(step), Box::new(it));
        self.refuse(Error::Lent { rank, phase, tensor, source })
    }
}
