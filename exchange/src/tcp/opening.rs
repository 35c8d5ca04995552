//! The opener's side of a greeting: from a stream that is being connected to one whose acceptor let us in.
//!
//! In: the stream, as it is readable or writable. Out: whether it is open, or why it will not be.
//!
//! ```text
//! Connecting ─▶ Greeting ─▶ Proving ─▶ open
//! ```
//!
//! Invariant: open only once the acceptor has proved that it is the wanted peer, and has said that we are welcome.

use super::greeting::{
    self, ANSWER_BYTES, GreetingError, Hello, Identity, Side, VERDICT_BYTES, Verdict,
};
use super::socket::{self, LinkError};
use super::stream::Stream;
use crate::peer::PeerId;

/// The greeting of a link that we open.
pub(super) struct Opening {
    to: PeerId,
    stage: Stage,
    input: [u8; ANSWER_BYTES],
    filled: usize,
}

enum Stage {
    Connecting,
    /// Our hello is out.
    Greeting(Hello),
    /// Our proof is out.
    Proving,
}

/// Whether the acceptor has let us in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Opened {
    Yes,
    NotYet,
}

impl Opening {
    /// To a peer, over a stream that is being connected.
    pub(super) fn new(to: PeerId) -> Self {
        Self { to, stage: Stage::Connecting, input: [0; ANSWER_BYTES], filled: 0 }
    }

    /// Whether it waits for the stream to be writable, not readable.
    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.stage, Stage::Connecting)
    }

    /// Whether the peer has sent a part of a message.
    pub(super) fn is_in_a_word(&self) -> bool {
        self.filled > 0
    }

    /// Goes on with whatever stage it is in.
    pub(super) fn advance(
        &mut self,
        stream: &mut Stream,
        me: &Identity,
        nonce: impl FnOnce() -> [u8; 32],
    ) -> Result<Opened, LinkError> {
        match &self.stage {
            Stage::Connecting => {
                if let Some(error) = stream.take_error().map_err(LinkError::Io)? {
                    return Err(LinkError::Io(error));
                }
                let hello = Hello::new(me, self.to, nonce());
                socket::write_whole(stream, &hello.encode())?;
                self.stage = Stage::Greeting(hello);
            }
            Stage::Greeting(sent) => {
                let sent = *sent;
                if self.receive(stream, ANSWER_BYTES)? {
                    let channel = stream.secret().map_err(LinkError::Io)?;
                    let answered = greeting::check_acceptor(me, &sent, &self.input, &channel)?;
                    let hellos = (&sent, &answered);
                    let proof = greeting::proof(&me.secret, Side::Opener, hellos, &channel);
                    socket::write_whole(stream, proof.as_bytes())?;
                    self.stage = Stage::Proving;
                }
            }
            Stage::Proving => {
                if self.receive(stream, VERDICT_BYTES)? {
                    Verdict::check(&self.input[..VERDICT_BYTES], me.me)?;
                    return Ok(Opened::Yes);
                }
            }
        }
        Ok(Opened::NotYet)
    }

    /// Reads towards `length` bytes of input; whether they are there.
    fn receive(&mut self, stream: &mut Stream, length: usize) -> Result<bool, LinkError> {
        if let Some(bytes) = socket::read(stream, &mut self.input[self.filled..length])? {
            self.filled += bytes;
            // Of another process's channel: what is read of ours is a hello or a verdict.
            if greeting::is_encrypted(&self.input[..self.filled]) {
                return Err(GreetingError::Encrypted.into());
            }
        }
        if self.filled < length {
            return Ok(false);
        }
        self.filled = 0;
        Ok(true)
    }
}
