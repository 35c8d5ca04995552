//! Reads the replies of one link, straight from the socket into landings.
//!
//! In: the pulls that were asked for, in order. Out: ended pulls. One read takes the rest of a reply and the
//! header of the next one.
//!
//! Invariant: a byte lands only where the pull whose reply it belongs to has reserved it.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::net::TcpStream;

use super::frame::{REPLY_HEADER_BYTES, ReplyHeader, Status};
use super::incoming::TURN_BYTES;
use super::ledger::{Ledger, Pull};
use super::socket::{self, LinkError};
use crate::provider::PullError;

/// How far the stream of replies was read.
pub(super) struct Replies {
    header: [u8; REPLY_HEADER_BYTES],
    header_read: usize,
    body: Option<Body>,
}

/// How far the data of the reply to the first pull was read.
#[derive(Clone, Copy)]
struct Body {
    run: usize,
    run_read: u64,
    left: u64,
}

impl Default for Replies {
    fn default() -> Self {
        Self { header: [0; REPLY_HEADER_BYTES], header_read: 0, body: None }
    }
}

impl Replies {
    /// Reads what came, until nothing is left or the turn is over; `ended` hears of every pull that ended.
    pub(super) fn read(
        &mut self,
        stream: &TcpStream,
        sent: &mut VecDeque<Pull>,
        ledger: &mut Ledger,
        mut ended: impl FnMut(&Pull),
    ) -> Result<(), LinkError> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let (asked, read) = match self.body {
                None => {
                    let space = &mut self.header[self.header_read..];
                    (space.len(), socket::read(stream, space)?)
                }
                Some(body) => {
                    let pull = sent.front().expect("a body belongs to the first pull");
                    let (mut slices, bytes) =
                        ledger.slices(pull.landing, &pull.runs[body.run..], body.run_read);
                    let mut asked = bytes as usize;
                    if bytes == body.left {
                        asked += REPLY_HEADER_BYTES;
                        slices.push(IoSliceMut::new(&mut self.header));
                    }
                    (asked, socket::read_vectored(stream, &mut slices)?)
                }
            };
            let Some(read) = read else { break };
            turn += read;
            self.count(read, sent, ledger, &mut ended)?;
            if read < asked {
                break;
            }
        }
        Ok(())
    }

    /// Counts bytes that were read into the body, and then the header.
    fn count(
        &mut self,
        read: usize,
        sent: &mut VecDeque<Pull>,
        ledger: &mut Ledger,
        ended: &mut impl FnMut(&Pull),
    ) -> Result<(), LinkError> {
        let mut read = read as u64;
        if let Some(body) = &mut self.body {
            let pull = sent.front().expect("a body belongs to the first pull");
            let data = read.min(body.left);
            body.count(data, pull);
            read -= data;
            if body.left > 0 {
                return Ok(());
            }
            self.body = None;
            end(sent, Ok(()), ledger, ended);
        }
        self.header_read += read as usize;
        if self.header_read < REPLY_HEADER_BYTES {
            return Ok(());
        }
        self.header_read = 0;
        let header = ReplyHeader::decode(&self.header)?;
        let next = sent.front().filter(|it| it.id.0 == header.pull).ok_or(LinkError::WrongReply)?;
        match header.status {
            Status::Data if header.bytes != next.bytes => return Err(LinkError::WrongReply),
            Status::Data if header.bytes == 0 => end(sent, Ok(()), ledger, ended),
            Status::Data => self.body = Some(Body { run: 0, run_read: 0, left: header.bytes }),
            Status::Gone => end(sent, Err(PullError::Gone), ledger, ended),
            Status::OutOfBounds => {
                let reason = "a piece ends behind the peer's region".to_owned();
                end(sent, Err(PullError::Refused { reason }), ledger, ended);
            }
        }
        Ok(())
    }
}

impl Body {
    fn count(&mut self, mut read: u64, pull: &Pull) {
        self.left -= read;
        while let Some(run) = pull.runs.get(self.run) {
            let rest = run.bytes - self.run_read;
            if read < rest {
                self.run_read += read;
                break;
            }
            (self.run, self.run_read, read) = (self.run + 1, 0, read - rest);
        }
    }
}

fn end(
    sent: &mut VecDeque<Pull>,
    result: Result<(), PullError>,
    ledger: &mut Ledger,
    ended: &mut impl FnMut(&Pull),
) {
    let pull = sent.pop_front().expect("a reply belongs to the first pull");
    ended(&pull);
    ledger.end(&pull, result.map(|()| pull.bytes));
}
