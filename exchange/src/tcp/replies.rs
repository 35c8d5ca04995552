//! Reads the replies of one link, straight from the socket into landings.
//!
//! In: the parts that were asked for, in order. Out: ended pulls. One read takes the rest of a reply and the
//! header of the next one.
//!
//! Invariant: a byte lands only where the pull whose reply it belongs to has spoken for it.

use std::io::IoSliceMut;

use super::frame::{REPLY_HEADER_BYTES, ReplyHeader};
use super::incoming::TURN_BYTES;
use super::ledger::Ledger;
use super::pulls::Pulls;
use super::socket::{self, LinkError};
use super::stream::Stream;

/// Bytes that are read at once of a reply that no pull wants any more.
const DRAIN_BYTES: usize = 64 << 10;

/// How far the stream of replies was read.
#[derive(Default)]
pub(super) struct Replies {
    header: [u8; REPLY_HEADER_BYTES],
    header_read: usize,
    /// Data of the current reply that is still to come.
    left: u64,
    /// Receives data that no pull wants any more; allocated while such data arrives.
    drain: Vec<u8>,
}

impl Replies {
    /// Reads what came, until nothing is left or the turn is over: how many bytes.
    pub(super) fn read(
        &mut self,
        stream: &mut Stream,
        pulls: &mut Pulls,
        ledger: &mut Ledger,
    ) -> Result<usize, LinkError> {
        let mut turn = 0;
        while turn < TURN_BYTES || stream.has_unread() {
            let (asked, read) = match pulls.target() {
                _ if self.left == 0 => {
                    let space = &mut self.header[self.header_read..];
                    (space.len(), socket::read(stream, space)?)
                }
                target => {
                    let (mut slices, bytes) = if let Some(pull) = target {
                        ledger.slices(pull, self.left)
                    } else {
                        self.drain.resize(DRAIN_BYTES, 0);
                        let bytes = self.left.min(DRAIN_BYTES as u64);
                        (vec![IoSliceMut::new(&mut self.drain[..bytes as usize])], bytes)
                    };
                    let mut asked = bytes as usize;
                    if bytes == self.left {
                        asked += REPLY_HEADER_BYTES;
                        slices.push(IoSliceMut::new(&mut self.header));
                    }
                    (asked, socket::read_vectored(stream, &mut slices)?)
                }
            };
            let Some(read) = read else { break };
            turn += read;
            self.count(read, pulls, ledger)?;
            if !stream.may_have_more(read, asked) {
                break;
            }
        }
        Ok(turn)
    }

    /// Counts bytes that were read into the data, and then the header.
    fn count(
        &mut self,
        read: usize,
        pulls: &mut Pulls,
        ledger: &mut Ledger,
    ) -> Result<(), LinkError> {
        let mut read = read as u64;
        if self.left > 0 {
            let data = read.min(self.left);
            self.left -= data;
            pulls.came(data, self.left, ledger);
            read -= data;
            if self.left > 0 {
                return Ok(());
            }
            self.drain = Vec::new();
        }
        self.header_read += read as usize;
        if self.header_read == REPLY_HEADER_BYTES {
            self.header_read = 0;
            self.left = pulls.header(ReplyHeader::decode(&self.header)?, ledger)?;
        }
        Ok(())
    }
}
