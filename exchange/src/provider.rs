//! The interface of every provider: it moves memory between processes.
//!
//! In: memory to publish, memory to land in, pulls with deadlines, small messages. Out: [`Event`]s.
//! A provider decides nothing about steps, rounds or who is lost; it reports what happened to its links.
//!
//! Flow of a pull: the owner publishes a region and rings; the reader lands memory, pulls pieces into it,
//! sees [`Event::Pulled`] and takes its memory back.
//!
//! Guarantees:
//! * Nobody writes another's memory; a reader pulls, an owner only answers.
//! * Every pull ends exactly once, at the latest when its peer has sent nothing for as long as it may, if [`Provider::poll`]
//!   is called.
//! * What a pull brings is of one publication of the region, and of one life of its peer.
//! * Messages of one link arrive in the order they were rung, each once, or the link is reported closed.
//! * Bytes of a landing are the target of one pull at a time.
//!
//! Assumptions: one thread owns a provider and polls it; others only hold its [`Waker`].

use std::sync::Arc;
use std::time::Duration;

use crate::peer::{PeerId, Piece, RegionKey};
use crate::ucx_error::UcxError;
use crate::waker::Waker;

/// Longest message that [`Provider::ring`] takes, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Most pieces of one pull, counted after adjacent ones were merged.
pub const MAX_PIECES: usize = 1 << 16;

/// Memory handed to a provider by [`Provider::land`]; numbered by the provider.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LandingId(pub u64);

/// One pull, numbered by the provider. Later pulls have larger identities.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PullId(pub u64);

/// What a pull brings, and where it lands.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PullRequest {
    /// Who published the region.
    pub peer: PeerId,
    /// The region.
    pub key: RegionKey,
    /// Bytes of the region, and where in the landing each of them goes; read in this order.
    pub pieces: Vec<Piece>,
    /// What they land in.
    pub landing: LandingId,
    /// How long the peer may send nothing before the pull ends.
    pub patience: Duration,
}

/// Moves memory between processes.
pub trait Provider {
    /// Memory to publish and to land pulls in.
    type Memory;

    /// What peers pass to [`Provider::connect`] to reach this process.
    fn address(&self) -> String;

    /// Opens the link to `peer`, unless there is one or it is being opened. Does not block: ends in
    /// [`Event::Connected`] or [`Event::Closed`]. Rings and pulls may be queued before that.
    fn connect(&mut self, peer: PeerId, address: &str);

    /// Makes `memory` readable by every authenticated peer. A second publication of a key replaces the first.
    fn publish(&mut self, key: RegionKey, memory: Arc<Self::Memory>);

    /// Ends a publication: pulls that have not been answered whole find it gone. A part of a reply that is being written keeps
    /// its own `Arc` until it is written.
    fn withdraw(&mut self, key: RegionKey) -> Option<Arc<Self::Memory>>;

    /// Hands memory to the provider, as the target of pulls.
    fn land(&mut self, memory: Self::Memory) -> LandingId;

    /// Gives landed memory back to its owner.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] while a pull on it is outstanding, or a copy that cannot be called back;
    /// [`Error::UnknownLanding`] when it was taken or discarded.
    fn take(&mut self, landing: LandingId) -> Result<Self::Memory, Error>;

    /// Whether a copy to a landing is still in progress though its pull has ended. False for providers that can cancel every
    /// copy.
    fn is_busy(&self, landing: LandingId) -> bool;

    /// Frees landed memory as soon as no pull on it is outstanding. Its pulls still end as they would.
    fn discard(&mut self, landing: LandingId);

    /// Copies pieces of the peer's region into the landing. Ends exactly once, by [`Event::Pulled`].
    ///
    /// Pieces are read in their order. Their local bytes must lie in the landing, be disjoint, and not be the
    /// target of another outstanding pull, else the pull is refused.
    ///
    /// It ends with [`PullError::Deadline`] when nothing has come from the peer for its patience, for this pull or for another
    /// one: a pull that waits behind others is not late while they move. One that was interrupted (by a broken link, a deadline or
    /// [`Provider::close`]) and is asked for again, with the same peer, key, pieces and landing, goes on where it stopped, if the
    /// provider can and the peer still publishes the same; else it begins at byte 0.
    fn pull(&mut self, request: PullRequest) -> PullId;

    /// Sends a small message. It is written by the next [`Provider::poll`], in order, never behind data.
    ///
    /// # Errors
    ///
    /// [`RingError`]; then nothing was queued.
    fn ring(&mut self, peer: PeerId, message: &[u8]) -> Result<(), RingError>;

    /// Moves what can be moved and appends what happened. Returns as soon as there is an event, the waker was
    /// used, or `timeout` is over.
    fn poll(&mut self, timeout: Duration, events: &mut Vec<Event>);

    /// Ends a [`Provider::poll`] from other threads.
    fn waker(&self) -> Waker;

    /// Closes every link with `peer`, by force. Its outstanding pulls end as [`PullError::Cancelled`] with the
    /// next poll, no [`Event::Closed`] follows. It may connect again. A landing of its pulls is free when [`Self::is_busy`] says no:
    /// at once, unless a device still copies there.
    fn close(&mut self, peer: PeerId);
}

/// What happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// Our link to the peer is open: the peer has proved its identity.
    Connected(PeerId),
    /// The peer rang us.
    Message {
        /// Who.
        from: PeerId,
        /// Content of the message.
        bytes: Vec<u8>,
    },
    /// The device has begun to copy what a pull asked for. Work that waits for its copies may be enqueued now. Only
    /// [`Event::Pulled`] says whether the rows count. Comes from providers whose device copies by itself, at most once a pull,
    /// and before its end.
    Begun {
        /// Which.
        pull: PullId,
    },
    /// A pull ended.
    Pulled {
        /// Which.
        pull: PullId,
        /// Bytes that landed, or why they did not: then the landing's bytes are unspecified.
        result: Result<u64, PullError>,
    },
    /// Messages to the peer were refused with [`RingError::Full`], and now there is room again: they can be sent.
    Room {
        /// Who.
        peer: PeerId,
    },
    /// A link with the peer broke or could not be opened. Both directions are closed now; its pulls ended
    /// before this event.
    Closed {
        /// Who.
        peer: PeerId,
        /// Why.
        error: String,
    },
    /// A path has to be there, and the peer has none of its kind. Follows [`Event::Closed`], each time the link was opened.
    Unfit {
        /// Who.
        peer: PeerId,
        /// Why, and the remedy.
        reason: String,
    },
    /// Somebody was turned away at the door: without the secret, of another data version, stale, or no peer at all.
    Refused {
        /// The peer or its address; a stranger has another port at every attempt.
        from: String,
        /// The reason; the same text each time a stranger tries again.
        reason: String,
    },
    /// The device memory of this process, or its copies, failed. The provider can move nothing more, and pulls that it affects
    /// end as refused.
    Broken {
        /// Why.
        reason: String,
    },
}

/// Why a pull brought nothing.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PullError {
    /// The peer does not publish the region, or no longer.
    #[error("the peer does not publish this region, or no longer")]
    Gone,
    /// The link broke, or there is none.
    #[error("the link to the peer broke, or was never opened")]
    PeerFailed,
    /// Nothing came from the peer for too long.
    #[error("nothing came from the peer for too long: close it, or ask again")]
    Deadline,
    /// We closed the peer.
    #[error("the peer was closed here")]
    Cancelled,
    /// The pieces do not fit the region or the landing.
    #[error("refused: {reason}")]
    Refused {
        /// Which rule the pull breaks.
        reason: String,
    },
}

/// Why a message was not queued.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RingError {
    /// No link to the peer is open or being opened.
    #[error("no link to {peer}: connect first")]
    NotConnected {
        /// To whom.
        peer: PeerId,
    },
    /// The peer does not read. [`Event::Room`] comes when there is room again, or [`Event::Closed`].
    #[error("{queued} bytes for {peer} wait already: poll, or give the peer up")]
    Full {
        /// To whom.
        peer: PeerId,
        /// Bytes that wait.
        queued: usize,
    },
    /// The message is too long.
    #[error(
        "a message of {bytes} bytes is above {MAX_MESSAGE_BYTES}: publish it and let the peer pull"
    )]
    TooLong {
        /// Length of the message.
        bytes: usize,
    },
}

/// Why a provider refuses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The provider cannot be opened.
    #[error(
        "cannot open the exchange on {address}: {source}; choose an address of this machine, or end programs that hold its ports"
    )]
    Open {
        /// The address to listen on.
        address: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The process may not have enough open files.
    #[error(
        "links with {peers} peers need {needed} open files, {allowed} are allowed: raise the limit (ulimit -Hn, LimitNOFILE, or that of the container runtime)"
    )]
    Files {
        /// Peers that the job may have.
        peers: u64,
        /// Files that they need, with those of the process itself.
        needed: u64,
        /// Files that it may have.
        allowed: u64,
    },
    /// Memory that other processes can read cannot be had.
    #[error(
        "this machine gives no memory that processes can share: {source}; run on Linux 5.1 or newer where memfd_create is allowed, or say --exchange auto"
    )]
    Shared {
        /// What the system says.
        source: std::io::Error,
    },
    /// UCX, which must be there, is not.
    #[error("{source}")]
    Ucx {
        /// Why.
        #[from]
        source: UcxError,
    },
    /// A pull still writes there.
    #[error("landing {} is the target of {outstanding} pulls: wait for them or close their peers", landing.0)]
    Busy {
        /// Which.
        landing: LandingId,
        /// How many.
        outstanding: usize,
    },
    /// No such landing.
    #[error("landing {} is unknown: it was taken or discarded", landing.0)]
    UnknownLanding {
        /// Which.
        landing: LandingId,
    },
}
