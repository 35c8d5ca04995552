//! Words on the wire: says what is owed until it is covered, publishes what is long, pulls what others have published.
//!
//! In: what this process says ([`Said`]), words and news of peers, ends of pulls. Out: rings, publications, pulls, and what
//! peers said, each once and in order. [`cadre_step::words`] decides when to say what; who may say what is the inbox's business.
//!
//! ```text
//! Said ──encoded once──▶ short: rides in the ring
//!                    └─▶ long: published, read by all; withdrawn when nobody is owed it any more
//! word ──next in order──▶ rode here ──decoded here───────────────────────▶ told
//!                     └─▶ pulled in parts ──checked, decoded elsewhere──┘
//! ```
//!
//! Long words are made and read by other threads ([`Encoded`], [`Unread`](crate::io::encoded::Unread)): what this one does for a word
//! grows with its parts alone.
//!
//! Invariant: nothing that a peer says is believed before its length and digest are what the word says, and no more than one
//! word of a peer is pulled or read at a time, so that those behind it wait for it.

mod fetches;
mod fetching;

use std::sync::{Arc, Weak};

use cadre_exchange::{PullId, RegionKey};
use cadre_protocol::{Nanos, Peer};
use cadre_step::envelope::{Envelope, Said};
use cadre_step::words::{Body, Due, Heard, Life, MAX_RIDING_BYTES, Owed, Published, Stream};

use self::fetches::Fetches;
use super::encoded::{Encoded, ReadError};
use super::exchange::Exchange;
use super::output::Output;
use super::shared::Shared;
use crate::memory::Place as _;

/// Longest word. A header takes some 12 bytes a document.
const MAX_WORD_BYTES: u64 = 256 << 20;

/// Why what a peer says cannot be taken: the job ends with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its bytes are no word.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Longer than any word.
    #[error(
        "{from} says {bytes} bytes at once, more than {MAX_WORD_BYTES}; give a step fewer documents"
    )]
    TooLong {
        /// Who.
        from: Peer,
        /// How many.
        bytes: u64,
    },
    /// A trainer answers, and what it has published does not come.
    #[error(
        "what {from} has published does not come, not a byte in {} s, although {from} answers; look at the path between {me} and {from} (MTU, firewall)",
        .silent.millis() / 1000
    )]
    Unreachable {
        /// Who pulls.
        me: Peer,
        /// Whose word.
        from: Peer,
        /// Since a part of it came, or it was first asked for.
        silent: Nanos,
    },
    /// The exchange takes no such pull.
    #[error("what {from} has published cannot be pulled: {reason}; run one version everywhere")]
    Refused {
        /// Who.
        from: Peer,
        /// Why.
        reason: String,
    },
}

/// What this process owes and hears.
#[derive(Debug)]
pub struct Telling {
    /// Longest word that rides in its ring; [`MAX_RIDING_BYTES`], but in simulations with short words.
    pub riding: usize,
    /// So long a word of a trainer may bring nothing before this process gives up: a trainer that is dead is given up earlier.
    pub patience: Nanos,
    /// When somebody last heard a word more.
    pub heard_at: Nanos,
    me: Life,
    owed: Owed,
    heard: Heard,
    /// Long words, as long as somebody holds them.
    publications: Vec<(u64, Weak<Body>)>,
    next_publication: u64,
    /// The long word that is next of each peer.
    fetches: Fetches,
    next_reading: u64,
}

impl Telling {
    /// Of a process in this life.
    pub fn new(me: Life) -> Self {
        Self {
            riding: MAX_RIDING_BYTES,
            patience: patience(&cadre_protocol::Settings::default()),
            heard_at: Nanos(0),
            me,
            owed: Owed::new(me),
            heard: Heard::default(),
            publications: Vec::new(),
            next_publication: 0,
            fetches: Fetches::default(),
            next_reading: 0,
        }
    }

    /// When something is to be said or pulled again.
    pub fn next_deadline(&self) -> Option<Nanos> {
        Nanos::first_of(self.fetches.next_deadline(), self.owed.next_deadline())
    }

    /// Which life this process is in.
    pub fn life(&self) -> Life {
        self.me
    }

    /// Whether everything that this process has said was heard.
    pub fn is_covered(&self) -> bool {
        self.owed.is_empty()
    }

    /// Who has not heard everything.
    pub fn owed_to(&self) -> Vec<Peer> {
        self.owed.peers().collect()
    }

    /// How many peers it remembers: those that were told something, and those that have said something.
    pub fn peers(&self) -> [usize; 2] {
        [self.owed.count(), self.heard.count()]
    }

    /// Whether a pull of the exchange brings a word.
    pub fn is_mine(&self, pull: PullId) -> bool {
        self.fetches.brings(pull)
    }
}

/// See [`Telling::patience`].
pub fn patience(settings: &cadre_protocol::Settings) -> Nanos {
    settings.trainer_after.after(settings.trainer_after)
}

/// Name of a long word; no step has this number.
fn key(publication: u64) -> RegionKey {
    RegionKey([u32::MAX, u32::MAX - 1, publication as u32, (publication >> 32) as u32])
}

impl<P: Exchange> Shared<P> {
    /// Encodes what is to be said, once for all who are to hear it; publishes what is long, for as long as the body is held.
    pub fn compose(&mut self, said: &Said) -> Arc<Body> {
        self.compose_encoded(Encoded::of(said))
    }

    /// As [`Self::compose`], of what is encoded.
    pub fn compose_encoded(&mut self, encoded: Encoded) -> Arc<Body> {
        let (rows, bytes, digest) = match encoded {
            Encoded::Short(bytes) if bytes.len() <= self.telling.riding => {
                return Arc::new(Body::Here(bytes));
            }
            Encoded::Short(bytes) => return self.compose_encoded(Encoded::long(&bytes)),
            Encoded::Long { rows, bytes, digest } => (rows, bytes, digest),
        };
        let publication = self.telling.next_publication;
        self.telling.next_publication += 1;
        match self.provider.place().hold(rows) {
            Ok(memory) => self.provider.publish(key(publication), &memory),
            Err(why) => self.broke(&why),
        }
        let body = Arc::new(Body::There(Published { publication, bytes, digest }));
        self.telling.publications.push((publication, Arc::downgrade(&body)));
        body
    }

    /// Says something to another process, until it has heard it.
    pub fn tell(&mut self, to: Peer, body: &Arc<Body>) {
        match self.telling.owed.owe(self.now(), to, Arc::clone(body)) {
            Ok(due) => self.say(due),
            Err(full) => {
                // A server that hears nothing is lost sooner or later; without a trainer there is no job.
                tracing::error!("{full}");
                if matches!(to, Peer::Trainer(_)) {
                    self.broke(&full);
                }
            }
        }
    }

    /// Tells the conductor, in whichever process it lives.
    pub fn tell_conductor(&mut self, said: Said) {
        if self.me == Peer::CONDUCTOR {
            self.outputs.put(Output::Conductor(said));
        } else {
            let body = self.compose(&said);
            self.tell(Peer::CONDUCTOR, &body);
        }
    }

    fn say(&mut self, due: Due) {
        let Due { to, stream, number, body } = due;
        self.ring(to, &Envelope::Word { stream, number, body: Body::clone(&body) });
    }

    /// Says and pulls again what is due, and withdraws what nobody is owed any more.
    pub fn tell_again(&mut self) {
        let now = self.now();
        for due in self.telling.owed.due(now) {
            tracing::debug!("word {} to {} is said again", due.number, due.to);
            self.say(due);
        }
        for from in self.telling.fetches.due(now) {
            self.fetch(from);
        }
        let provider = &mut self.provider;
        self.telling.publications.retain(|(publication, body)| {
            let held = body.strong_count() > 0;
            if !held {
                provider.withdraw(key(*publication));
            }
            held
        });
    }

    /// A life of a peer has heard what a stream said before this number. Out: as of [`Self::lives`].
    pub fn covered(&mut self, by: (Peer, Life), stream: Stream, through: u64) -> bool {
        let now = self.now();
        let owed = self.telling.owed.words(by.0);
        let is_another = self.telling.owed.covered(now, by, stream, through);
        if self.telling.owed.words(by.0) < owed {
            self.telling.heard_at = now;
        }
        is_another
    }

    /// A life of a peer shows itself. Out: whether it came in the place of one that has heard words: this one has heard none of them.
    pub fn lives(&mut self, peer: Peer, life: Life) -> bool {
        let now = self.now();
        self.telling.owed.lives(now, peer, life)
    }

    /// Tells a peer how far this process has heard it.
    fn answer(&mut self, from: Peer) {
        let (by, (stream, through)) = (self.telling.me, self.telling.heard.through(from));
        self.ring(from, &Envelope::Heard { by, stream, through });
    }

    /// The link with a peer broke. How often in a row it did.
    pub fn cut(&mut self, peer: Peer) -> u32 {
        let now = self.now();
        self.telling.owed.broken(now, peer)
    }

    /// A peer was given up: it is told nothing more.
    pub fn forget(&mut self, peer: Peer) {
        self.telling.owed.forget(peer);
        self.drop_fetch(peer);
    }

    /// Forgets a peer that never comes back, as if it had never been there.
    pub(super) fn forget_replaced(&mut self, peer: Peer) {
        self.drop_fetch(peer);
        self.telling.owed.remove(peer);
        self.telling.heard.remove(peer);
    }

    /// A peer says a word. Out: what it has said, in order, as far as it is here.
    ///
    /// # Errors
    ///
    /// [`Error`]: nothing more of this peer can be taken.
    pub fn word(
        &mut self,
        from: Peer,
        (stream, number): (Stream, u64),
        body: Body,
    ) -> Result<Vec<Said>, Error> {
        if self.telling.heard.word(from, stream, number, body) {
            self.drop_fetch(from);
        }
        let mut told = Vec::new();
        let result = self.advance(from, &mut told);
        self.answer(from);
        result.map(|()| told)
    }
}

#[cfg(test)]
mod tests;
