//! What moves the rows of a process, as its IO thread sees it: the best path of each pair for rows in the host's memory, a node for
//! rows that processes of one machine share on a GPU, or what a test puts in their place.
//!
//! In and out: what a [`cadre_exchange::Provider`] takes and gives, with rows as its [`Memory`]. Which of them it is is a type, chosen once, when the
//! process joins its job ([`How`]); nobody else asks.
//!
//! Invariant: rows live where this moves them: its memory is a type, and all room comes from its own [`Memory::Place`].

mod by_gpu;
mod by_host;
mod opening;

use std::time::Duration;

use cadre_exchange::{
    Error, Event, LandingId, PeerId, Piece, PullId, PullRequest, RegionKey, RingError, Waker,
};
use cadre_kernels::device;

pub use self::by_gpu::ByGpu;
pub use self::by_host::OnHost;
pub use self::opening::{ByNode, ByPaths, Choice, How, Open, OpenError, open_paths};
use crate::memory::Memory;

/// See the module. What is not said here is as [`cadre_exchange::Provider`] says.
pub trait Exchange {
    /// Rows that it moves.
    type Memory: Memory;

    /// Where rows live.
    fn place(&self) -> &<Self::Memory as Memory>::Place;

    /// Over what rows of a peer come, for reports; none while that is being found out.
    fn path(&self, peer: PeerId) -> Option<&'static str>;

    /// Why they come by tcp; empty where they do not, or where nobody says.
    #[expect(clippy::unnecessary_literal_bound, reason = "others say what they keep")]
    fn why_tcp(&self, _peer: PeerId) -> &str {
        ""
    }

    /// Whether a pull that was interrupted and is asked for again, into the same landing, goes on where it stopped.
    fn resumes(&self) -> bool;

    /// What peers pass to [`Self::connect`].
    fn address(&self) -> String;

    /// Asks the machine for what links with so many peers need.
    ///
    /// # Errors
    ///
    /// [`Error::Files`]: it does not give as much.
    fn allow(&self, _peers: u64) -> Result<(), Error> {
        Ok(())
    }

    /// Opens the link to a peer, unless there is one.
    fn connect(&mut self, peer: PeerId, address: &str);

    /// Lets peers read rows.
    fn publish(&mut self, key: RegionKey, memory: &Self::Memory);

    /// Ends that.
    fn withdraw(&mut self, key: RegionKey);

    /// Makes a target of pulls, with room of its own place: whatever stands in it.
    ///
    /// # Errors
    ///
    /// There is no room.
    fn land(&mut self, bytes: usize) -> Result<LandingId, device::Error>;

    /// Rows of a landing whose copies are enqueued and not yet done: the launches that read them are enqueued behind these
    /// copies, and behind the copies of `own` rows into the landing. None where rows are there only when their pulls have ended.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn early(
        &mut self,
        _landing: LandingId,
        _own: &[(Self::Memory, &[Piece])],
    ) -> Result<Option<Self::Memory>, device::Error> {
        Ok(None)
    }

    /// Whether rows that have landed can be copied while pulls write others to the same landing.
    fn copies_landed(&self) -> bool {
        false
    }

    /// Copies pieces of a landing to which no pull writes any more; others may write beside them.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownLanding`], also where [`Self::copies_landed`] says no.
    fn copy_landed(
        &self,
        from: LandingId,
        _pieces: &[Piece],
        _to: &mut <Self::Memory as Memory>::Room,
    ) -> Result<(), Error> {
        Err(Error::UnknownLanding { landing: from })
    }

    /// Whether a copy to a landing that cannot be called back is under way, though its pull has ended.
    fn is_busy(&self, landing: LandingId) -> bool;

    /// Gives landed memory back.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`], [`Error::UnknownLanding`].
    fn take(&mut self, landing: LandingId) -> Result<<Self::Memory as Memory>::Room, Error>;

    /// Frees landed memory as soon as no pull writes to it.
    fn discard(&mut self, landing: LandingId);

    /// Copies pieces of a peer's rows into a landing.
    fn pull(&mut self, request: PullRequest) -> PullId;

    /// The incarnation that the rows of a pull which ended well are of, where no link names their owner: in memory that another
    /// process may have by now. None where the rows are of the peer that was asked.
    fn found(&self, _pull: PullId) -> Option<u32> {
        None
    }

    /// Sends a small message.
    ///
    /// # Errors
    ///
    /// [`RingError`].
    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError>;

    /// Moves what can be moved, and appends what happened.
    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>);

    /// Ends a poll from other threads.
    fn waker(&self) -> Waker;

    /// Closes every link with a peer.
    fn close(&mut self, peer: PeerId);
}

#[cfg(test)]
mod tests;
