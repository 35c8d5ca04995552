//! Links that were accepted and have not yet proved who opened them.
//!
//! In: a fresh stream. Out: who it is, once it has proved it, or why it is turned away.
//!
//! Invariant: a stranger costs one socket and a few hundred bytes, for a limited time.

use std::net::{SocketAddr, TcpStream};

use super::greeting::{self, GreetingError, HELLO_BYTES, Hello, Identity, PROOF_BYTES, Side};
use super::socket::{self, LinkError};
use crate::peer::PeerId;

/// A stranger at the door.
pub(super) struct Stranger {
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    input: [u8; HELLO_BYTES],
    filled: usize,
    /// Its hello and ours, as soon as they are said.
    hellos: Option<(Hello, Hello)>,
}

impl Stranger {
    pub(super) fn new(stream: TcpStream, address: SocketAddr) -> Self {
        Self { stream, address, input: [0; HELLO_BYTES], filled: 0, hellos: None }
    }

    /// Whether it has sent anything: one that has not is a probe of the port, not worth a word.
    pub(super) fn has_spoken(&self) -> bool {
        self.filled > 0 || self.hellos.is_some()
    }

    /// Whether it has said a whole hello, and was answered.
    pub(super) fn has_greeted(&self) -> bool {
        self.hellos.is_some()
    }

    /// Reads what came; who it is, once that is proved.
    pub(super) fn advance(
        &mut self,
        me: &Identity,
        nonce: impl FnOnce() -> [u8; 32],
    ) -> Result<Option<PeerId>, LinkError> {
        let length = if self.hellos.is_none() { HELLO_BYTES } else { PROOF_BYTES };
        let Some(bytes) = socket::read(&self.stream, &mut self.input[self.filled..length])? else {
            return Ok(None);
        };
        self.filled += bytes;
        if self.hellos.is_none() && !greeting::may_begin(&self.input[..self.filled]) {
            return Err(GreetingError::NoPeer.into());
        }
        if self.filled < length {
            return Ok(None);
        }
        let Some((opener, ours)) = &self.hellos else {
            let opener = Hello::decode(&self.input)?;
            let ours = Hello::new(me, opener.from, nonce());
            let proof = greeting::proof(&me.secret, Side::Acceptor, &opener, &ours);
            // Said even to one that is turned away next, so that it can tell why.
            socket::write_whole(&self.stream, &[&ours.encode()[..], proof.as_bytes()].concat())?;
            greeting::check_opener(me, &opener)?;
            self.hellos = Some((opener, ours));
            self.filled = 0;
            return Ok(None);
        };
        let proof = self.input.first_chunk().expect("a proof is shorter than a hello");
        greeting::check_proof(me, Side::Opener, opener, ours, proof)?;
        Ok(Some(opener.from))
    }
}
