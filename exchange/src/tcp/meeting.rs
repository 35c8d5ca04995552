//! The greeting of the exchange, for links that somebody else carries.
//!
//! In: streams. Out: the same streams, once each side knows that the other belongs to the job, and who it is. It moves
//! nothing else, and waits for nothing: whoever uses it polls the streams and keeps deadlines.
//!
//! Invariant: that of the greeting; a link of one [`Purpose`] is never taken for one of another.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::SILENCE;
use super::door::Stranger;
use super::greeting::{Identity, Purpose, Verdict};
use super::opening::{Opened, Opening};
use super::run::nonce;
use super::socket::{self, LinkError, Silence};
use super::stream::Stream;
use super::tls::{Encryption, Tls};
use crate::peer::PeerId;

/// Identity of this process, with its proof.
#[derive(Clone)]
pub struct Greeter {
    identity: Identity,
    silence: Duration,
}

impl fmt::Debug for Greeter {
    /// Without the secret.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Greeter of {} for {}", self.identity.me, self.identity.purpose)
    }
}

impl Greeter {
    /// Greets as `me`, with what only processes of the job know, for links of one purpose that are not encrypted; processes of
    /// another data version are turned away.
    pub fn new(purpose: Purpose, me: PeerId, secret: [u8; 32], data_version: u32) -> Self {
        let identity = Identity { me, secret, data_version, purpose, tls: None };
        Self { identity, silence: SILENCE }
    }

    /// As above, with or without encryption.
    #[must_use]
    pub fn with(mut self, encryption: Encryption) -> Self {
        self.identity.tls = Tls::of(encryption);
        self
    }

    /// As above; the kernel closes a link whose machine answers nothing for `silence`, in whole
    /// seconds. A peer whose process reads nothing keeps its link for any time.
    #[must_use]
    pub fn closing_after(mut self, silence: Duration) -> Self {
        self.silence = silence;
        self
    }

    /// Who we are.
    pub fn me(&self) -> PeerId {
        self.identity.me
    }

    /// Opens a listener on a free port, whose streams are for [`Guest::new`]. It does not block.
    ///
    /// # Errors
    ///
    /// The address is not of this machine, or no port or descriptor is left.
    pub fn listen(address: IpAddr) -> io::Result<TcpListener> {
        socket::listen(address)
    }

    /// Begins to connect to a peer.
    ///
    /// # Errors
    ///
    /// What the system refuses at once.
    pub fn dial(&self, peer: PeerId, address: SocketAddr) -> io::Result<Caller> {
        let stream = socket::dial(address, Silence::OfMachine(self.silence))?;
        let stream = Stream::opener(stream, self.identity.tls.as_ref());
        Ok(Caller { stream, since: Instant::now(), opening: Opening::new(peer) })
    }
}

/// A link that we open.
pub struct Caller {
    stream: Stream,
    since: Instant,
    opening: Opening,
}

impl Caller {
    /// To be polled: until it is connected for output, then for input.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether to poll for output.
    pub fn is_connecting(&self) -> bool {
        self.opening.is_connecting()
    }

    /// When it began.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Goes on as far as the stream allows; whether the peer has let us in.
    ///
    /// # Errors
    ///
    /// It is no link to that peer, or broke.
    pub fn advance(&mut self, greeter: &Greeter) -> Result<bool, GreetError> {
        let opened = self.opening.advance(&mut self.stream, &greeter.identity, nonce)?;
        Ok(opened == Opened::Yes)
    }

    /// The stream, of use once the peer has let us in.
    pub fn into_stream(self) -> Stream {
        self.stream
    }
}

/// A process that has connected to us.
pub struct Guest {
    stranger: Stranger,
    since: Instant,
}

impl Guest {
    /// Begins the greeting with a process that has connected from `address`.
    ///
    /// # Errors
    ///
    /// The stream broke.
    pub fn new(greeter: &Greeter, stream: TcpStream, address: SocketAddr) -> io::Result<Self> {
        socket::prepare(&stream, Silence::OfMachine(greeter.silence))?;
        let stream = Stream::acceptor(stream, greeter.identity.tls.as_ref());
        Ok(Self { stranger: Stranger::new(stream, address), since: Instant::now() })
    }

    /// To be polled for input.
    pub fn stream(&self) -> &Stream {
        &self.stranger.stream
    }

    /// Address of the process.
    pub fn address(&self) -> SocketAddr {
        self.stranger.address
    }

    /// When it came.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Whether it has sent anything: one that has not is a probe of the port, not worth a word.
    pub fn has_spoken(&self) -> bool {
        self.stranger.has_spoken()
    }

    /// Continues the greeting as far as the stream allows. Returns the peer once it has proved its
    /// identity.
    ///
    /// # Errors
    ///
    /// It is nobody of the job, or left.
    pub fn advance(&mut self, greeter: &Greeter) -> Result<Option<PeerId>, GreetError> {
        Ok(self.stranger.advance(&greeter.identity, nonce)?)
    }

    /// Accepts the process, which has proved its identity; returns the stream.
    ///
    /// # Errors
    ///
    /// The stream broke.
    pub fn welcome(self) -> Result<Stream, GreetError> {
        let mut stream = self.stranger.stream;
        socket::write_whole(&mut stream, &Verdict::Welcome.encode())?;
        Ok(stream)
    }

    /// Refuses the process, which has proved to be `found` where `wanted` is expected.
    pub fn turn_away(mut self, found: PeerId, wanted: PeerId) {
        let same = PeerId { incarnation: wanted.incarnation, ..found } == wanted;
        let verdict = if same && found.incarnation < wanted.incarnation {
            Verdict::Stale { newest: wanted.incarnation }
        } else {
            Verdict::Unexpected
        };
        // The process may not read it; the link ends in any case.
        let _ = socket::write_whole(&mut self.stranger.stream, &verdict.encode());
    }
}

/// Why a greeting came to nothing.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct GreetError(#[from] LinkError);
