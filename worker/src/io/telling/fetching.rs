//! Long words of peers: pulled part by part, read by another thread, taken in their order.
//!
//! In: words that are next of a peer, ends of pulls. Out: pulls; what peers said. A part that did not come is pulled again, into
//! the memory where some of it may have landed, so that the exchange goes on where it stopped.

use std::time::Duration;

use cadre_exchange::{Piece, PullError, PullId, PullRequest};
use cadre_protocol::{Nanos, Peer};
use cadre_step::envelope::Said;
use cadre_step::words::Body;

use super::fetches::{Fetch, State};
use super::{Error, MAX_WORD_BYTES, key};
use crate::io::encoded::{Read, Unread, decoded};
use crate::io::exchange::Exchange;
use crate::io::output::Output;
use crate::io::shared::Shared;
use crate::memory::Place as _;

/// Bytes of one pull of a long word.
const PART_BYTES: u64 = 4 << 20;
/// Longest wait for a part; then it is pulled again.
const PART_WITHIN: Duration = Duration::from_secs(10);
/// Before a part is pulled again that did not come.
const RETRY_AFTER: Nanos = Nanos::from_millis(50);

impl<P: Exchange> Shared<P> {
    /// What comes of a peer is not wanted any more.
    pub(super) fn drop_fetch(&mut self, of: Peer) {
        let Some((Fetch { begun, .. }, state)) = self.telling.fetches.give_up(of) else { return };
        if let Some(landing) = begun {
            self.provider.discard(landing);
        }
        match state {
            State::Pulling { landing, .. } => self.provider.discard(landing),
            State::Reading(_) | State::Waiting(_) => {}
        }
    }

    /// A pull of a word ended. A word that is whole is put out to be read.
    ///
    /// # Errors
    ///
    /// As [`Self::word`].
    pub fn fetched(&mut self, pull: PullId, result: &Result<u64, PullError>) -> Result<(), Error> {
        let now = self.now();
        let Some(from) = self.telling.fetches.ended(pull) else { return Ok(()) };
        let Some((fetch, State::Pulling { landing, bytes, .. })) =
            self.telling.fetches.get_mut(from)
        else {
            return Ok(());
        };
        match result {
            Ok(_) => {}
            Err(PullError::Refused { reason }) => {
                self.provider.discard(landing);
                return Err(Error::Refused { from, reason: reason.clone() });
            }
            // Who owes the word says it again, and then it is pulled again; who has withdrawn it owes it no more.
            Err(PullError::Gone) => {
                self.provider.discard(landing);
                self.telling.fetches.end(from);
                return Ok(());
            }
            Err(error) => {
                tracing::debug!("a word of {from} did not come: {error}");
                let silent = now.since(fetch.since);
                if self.provider.resumes() {
                    fetch.begun = Some(landing);
                } else {
                    self.provider.discard(landing);
                }
                self.telling.fetches.set(from, State::Waiting(now.after(RETRY_AFTER)));
                // A server that says nothing is lost sooner or later, and nobody waits for its words.
                if silent >= self.telling.patience && matches!(from, Peer::Trainer(_)) {
                    return Err(Error::Unreachable { me: self.me, from, silent });
                }
                if matches!(error, PullError::Deadline) {
                    let seconds = silent.millis() / 1000;
                    tracing::warn!("a word of {from} does not come, for {seconds} s now");
                }
                return Ok(());
            }
        }
        let room = self.provider.take(landing).map_err(|it| it.to_string());
        let part =
            room.and_then(|room| self.provider.place().unload(room).map_err(|it| it.to_string()));
        match part {
            Ok(part) => {
                fetch.parts.push((part, bytes as usize));
                fetch.bytes += bytes;
                fetch.since = now;
            }
            Err(why) => {
                self.broke(&why);
                return Ok(());
            }
        }
        if fetch.bytes < fetch.word.bytes {
            self.fetch(from);
            return Ok(());
        }
        let (word, parts) = (fetch.word, std::mem::take(&mut fetch.parts));
        let reading = self.telling.next_reading;
        self.telling.fetches.set(from, State::Reading(reading));
        self.telling.next_reading += 1;
        self.outputs.put(Output::Read(Box::new(Unread { from, reading, word, parts })));
        Ok(())
    }

    /// A long word was read. Out: what its author has said, in order, as far as it is here; nothing, if the author has begun anew
    /// since, or was given up.
    ///
    /// # Errors
    ///
    /// As [`Self::word`].
    pub fn read(&mut self, Read { from, reading, said }: Read) -> Result<Vec<Said>, Error> {
        if !self.telling.fetches.is_read(from, reading) {
            return Ok(Vec::new());
        }
        self.telling.fetches.end(from);
        let mut told = vec![said?];
        self.telling.heard.take(from);
        self.advance(from, &mut told)?;
        self.answer(from);
        Ok(told)
    }

    /// Takes the words of a peer that are next, until one has to be pulled first.
    pub(super) fn advance(&mut self, from: Peer, told: &mut Vec<Said>) -> Result<(), Error> {
        if self.telling.fetches.get(from).is_some() {
            return Ok(());
        }
        while let Some(body) = self.telling.heard.next(from) {
            match body {
                Body::Here(bytes) => {
                    let said = decoded(from, bytes)?;
                    self.telling.heard.take(from);
                    told.push(said);
                }
                Body::There(word) if word.bytes > MAX_WORD_BYTES => {
                    return Err(Error::TooLong { from, bytes: word.bytes });
                }
                Body::There(word) => {
                    let (word, since) = (*word, self.now());
                    let (parts, bytes, begun) = (Vec::new(), 0, None);
                    let fetch = Fetch { word, parts, bytes, begun, since };
                    self.telling.fetches.begin(from, fetch, State::Waiting(since));
                    self.fetch(from);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Pulls the next part of a word. While a former word of this peer is still pulled or read, the next one waits: an author may
    /// begin anew as often as it likes, and each of its words holds memory here.
    pub(super) fn fetch(&mut self, from: Peer) {
        let now = self.now();
        let retry = State::Waiting(now.after(RETRY_AFTER));
        let draining = self.telling.fetches.is_draining(from);
        let Some((fetch, _)) = self.telling.fetches.get_mut(from) else { return };
        if draining {
            return self.telling.fetches.set(from, retry);
        }
        let (word, remote) = (fetch.word, fetch.bytes);
        let bytes = (word.bytes - remote).min(PART_BYTES);
        // One that a former pull may still write takes no other.
        let begun = fetch.begun.take().filter(|it| {
            let is_free = !self.provider.is_busy(*it);
            if !is_free {
                self.provider.discard(*it);
            }
            is_free
        });
        let landed = begun.map_or_else(|| self.provider.land(bytes as usize), Ok);
        let state = match (self.id_of(from), landed) {
            (Some(id), Ok(landing)) => {
                let pieces = vec![Piece { remote, local: 0, bytes }];
                let (key, patience) = (key(word.publication), PART_WITHIN);
                let pull =
                    self.pull_region(PullRequest { peer: id, key, pieces, landing, patience });
                State::Pulling { pull, landing, bytes }
            }
            (None, Ok(landing)) => {
                self.provider.discard(landing);
                retry
            }
            (_, Err(why)) => {
                self.broke(&why);
                retry
            }
        };
        self.telling.fetches.set(from, state);
    }
}
