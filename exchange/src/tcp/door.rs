//! Links that were accepted and have not yet proved who opened them.
//!
//! In: a fresh stream. Out: who it is, once it has proved it, or why it is turned away.
//!
//! Invariant: a stranger costs one socket and a few hundred bytes, for a limited time; where links are encrypted, up to 64 KiB
//! more and, once it has begun a handshake, the answer's signature.

use std::net::SocketAddr;

use super::greeting::{self, GreetingError, HELLO_BYTES, Hello, Identity, PROOF_BYTES, Side};
use super::socket::{self, LinkError};
use super::stream::Stream;
use crate::peer::PeerId;

/// A stranger at the door.
pub(super) struct Stranger {
    pub(super) stream: Stream,
    pub(super) address: SocketAddr,
    input: [u8; HELLO_BYTES],
    filled: usize,
    /// The caller's hello and ours, once both are sent.
    hellos: Option<(Hello, Hello)>,
}

impl Stranger {
    pub(super) fn new(stream: Stream, address: SocketAddr) -> Self {
        Self { stream, address, input: [0; HELLO_BYTES], filled: 0, hellos: None }
    }

    /// Whether it has sent anything: one that has not is a probe of the port, not worth a word.
    pub(super) fn has_spoken(&self) -> bool {
        self.filled > 0 || self.hellos.is_some() || self.stream.has_heard()
    }

    /// Whether it has sent a whole hello, or begun an encrypted link, and was answered.
    pub(super) fn has_greeted(&self) -> bool {
        self.hellos.is_some() || self.stream.has_begun()
    }

    /// Reads what has arrived. Returns the peer once it has proved its identity.
    pub(super) fn advance(
        &mut self,
        me: &Identity,
        nonce: impl FnOnce() -> [u8; 32],
    ) -> Result<Option<PeerId>, LinkError> {
        let length = if self.hellos.is_none() { HELLO_BYTES } else { PROOF_BYTES };
        let Some(bytes) = socket::read(&mut self.stream, &mut self.input[self.filled..length])?
        else {
            return Ok(None);
        };
        self.filled += bytes;
        if self.hellos.is_none() && !greeting::may_begin(&self.input[..self.filled]) {
            if greeting::is_encrypted(&self.input[..self.filled]) {
                // The peer may not read it; the link ends in any case.
                let _ = socket::write_whole(&mut self.stream, &greeting::REFUSAL_OF_TLS);
                return Err(GreetingError::Encrypted.into());
            }
            return Err(GreetingError::NoPeer.into());
        }
        if self.filled < length {
            return Ok(None);
        }
        let channel = self.stream.secret().map_err(LinkError::Io)?;
        let Some((opener, ours)) = &self.hellos else {
            let opener = Hello::decode(&self.input)?;
            let ours = Hello::new(me, opener.from, nonce());
            let proof = greeting::proof(&me.secret, Side::Acceptor, (&opener, &ours), &channel);
            // Said even to one that is turned away next, so that it can tell why.
            let answer = [&ours.encode()[..], proof.as_bytes()].concat();
            socket::write_whole(&mut self.stream, &answer)?;
            greeting::check_opener(me, &opener)?;
            self.hellos = Some((opener, ours));
            self.filled = 0;
            return Ok(None);
        };
        let proof = self.input.first_chunk().expect("a proof is shorter than a hello");
        greeting::check_proof(me, Side::Opener, (opener, ours), &channel, proof)?;
        Ok(Some(opener.from))
    }
}
