//! Words: what one worker tells another so that it arrives, once and in order, however often their links break.
//!
//! In: bodies to say, numbers that the other side has heard, broken links, the time. Out: what is to be said now,
//! and on the other side which word comes next. Pure: nothing is sent here, no clock is read.
//!
//! ```text
//! owe ──▶ said ──AGAIN_AFTER, or RETRY_AFTER a broken link──▶ said again ── ... ──▶ covered by "heard"
//! word ──▶ early ──all before it were taken──▶ next ──▶ taken            (known, or too far ahead: dropped)
//! ```
//!
//! Messages of the protocol are no words: each is covered by what its machines say later ([`cadre_protocol`]).
//!
//! A server that other jobs had meanwhile comes back under its old name with nothing of what it had heard, and with words of its
//! own from 0. So each side has a [`Life`], which goes with what it says; a lane to a peer that lives anew begins anew, as another
//! [`Stream`], with what was not covered.
//!
//! Invariant: of the words that one worker owes another, one life of the other takes each exactly once and in their order; to
//! hear one twice changes nothing. What is owed to a peer that was given up is forgotten.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cadre_protocol::{Nanos, Peer};
use serde::{Deserialize, Serialize};

/// A word that nobody covered for so long is said again.
const AGAIN_AFTER: Nanos = Nanos::from_millis(200);
/// After a link broke its words are said over a fresh one; after each further break in a row twice as late.
const RETRY_AFTER: Nanos = Nanos::from_millis(20);
/// Breaks in a row after which the wait grows no more: 1.3 s.
const MAX_DOUBLINGS: u32 = 6;
/// Words that may be owed to one peer. A healthy one is owed a few; one that owes so many answers is no member any more.
const MAX_OWED: usize = 1024;
/// Words that are kept ahead of one that is missing; what is further ahead is dropped, and said again by its sender.
const MAX_EARLY: u64 = 64;
/// A longer body is published by its sender and pulled: one copy in memory, whoever reads it.
pub const MAX_RIDING_BYTES: usize = 4 << 10;

/// Tells the processes apart that had a name one after the other, and what one process was in several jobs: no two are alike.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Life(pub u64);

/// Words of one life to one life of a peer, numbered from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Stream {
    /// Of whoever says them.
    pub life: Life,
    /// How often the peer began anew meanwhile.
    pub era: u32,
}

/// What a word says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Body {
    /// This.
    Here(Vec<u8>),
    /// What its sender has published.
    There(Published),
}

/// A body that is to be pulled.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Published {
    /// Which publication of the sender; none has the number of another.
    pub publication: u64,
    /// Length.
    pub bytes: u64,
    /// xxh3 of the bytes.
    pub digest: u64,
}

/// A word to say now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Due {
    /// To whom.
    pub to: Peer,
    /// Which stream of words to this peer.
    pub stream: Stream,
    /// Counts the words of the stream, from 0.
    pub number: u64,
    /// What it says.
    pub body: Arc<Body>,
}

/// More is owed than a member leaves uncovered.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{peer} has answered none of the last {MAX_OWED} words; end it, or look at the network between"
)]
pub struct Full {
    /// Who does not answer.
    pub peer: Peer,
}

/// What this process owes others.
#[derive(Debug)]
pub struct Owed {
    me: Life,
    lanes: BTreeMap<Peer, Lane>,
}

#[derive(Debug, Default)]
struct Lane {
    /// Which life of the peer hears them, once it has answered.
    peer: Option<Life>,
    era: u32,
    /// Number of the next word.
    next: u64,
    /// Said and not covered; the last is `next - 1`.
    words: VecDeque<Arc<Body>>,
    /// When the words are said again.
    due: Nanos,
    /// Breaks of the link since something was heard.
    breaks: u32,
}

impl Owed {
    /// Of a process in this life.
    pub fn new(me: Life) -> Self {
        Self { me, lanes: BTreeMap::new() }
    }

    /// Owes a peer one word more, which is to be said now.
    ///
    /// # Errors
    ///
    /// [`Full`]: nothing was added.
    pub fn owe(&mut self, now: Nanos, to: Peer, body: Arc<Body>) -> Result<Due, Full> {
        let lane = self.lanes.entry(to).or_default();
        if lane.words.len() >= MAX_OWED {
            return Err(Full { peer: to });
        }
        if lane.words.is_empty() {
            lane.due = now.after(AGAIN_AFTER);
        }
        let number = lane.next;
        lane.next += 1;
        lane.words.push_back(Arc::clone(&body));
        let stream = Stream { life: self.me, era: lane.era };
        Ok(Due { to, stream, number, body })
    }

    /// A life of a peer has taken every word of a stream before number `through`.
    pub fn covered(&mut self, now: Nanos, by: (Peer, Life), stream: Stream, through: u64) {
        let (by, life) = by;
        let Some(lane) = self.lanes.get_mut(&by) else { return };
        let current = Stream { life: self.me, era: lane.era };
        // Words that were never said are of another life of this process.
        if stream != current || through > lane.next {
            return;
        }
        lane.breaks = 0;
        let untouched = lane.words.len() as u64 == lane.next;
        if lane.peer.replace(life).is_some_and(|it| it != life) && !untouched {
            // This life has not heard the beginning: what is left is said to it from 0 on, at once.
            lane.era = lane.era.wrapping_add(1);
            lane.next = lane.words.len() as u64;
            lane.due = now;
            return;
        }
        let left = (lane.next - through) as usize;
        while lane.words.len() > left {
            lane.words.pop_front();
            lane.due = now.after(AGAIN_AFTER);
        }
    }

    /// The link with a peer broke: what was on its way is lost. How often in a row it did, without a word covered between.
    pub fn broken(&mut self, now: Nanos, peer: Peer) -> u32 {
        let Some(lane) = self.lanes.get_mut(&peer) else { return 0 };
        lane.due = now.after(Nanos(RETRY_AFTER.0 << lane.breaks.min(MAX_DOUBLINGS)));
        lane.breaks = lane.breaks.saturating_add(1);
        lane.breaks
    }

    /// What is to be said again at `now`.
    pub fn due(&mut self, now: Nanos) -> Vec<Due> {
        let mut due = Vec::new();
        for (&to, lane) in &mut self.lanes {
            if lane.words.is_empty() || lane.due > now {
                continue;
            }
            lane.due = now.after(AGAIN_AFTER);
            let first = lane.next - lane.words.len() as u64;
            let words = (first..).zip(&lane.words);
            let stream = Stream { life: self.me, era: lane.era };
            let due_of = |(number, body)| Due { to, stream, number, body: Arc::clone(body) };
            due.extend(words.map(due_of));
        }
        due
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.lanes.values().filter(|it| !it.words.is_empty()).map(|it| it.due).min()
    }

    /// Owes a peer nothing any more: it was given up. Later words to it are numbered on.
    pub fn forget(&mut self, peer: Peer) {
        if let Some(lane) = self.lanes.get_mut(&peer) {
            lane.words.clear();
        }
    }

    /// Whether every word was covered.
    pub fn is_empty(&self) -> bool {
        self.lanes.values().all(|it| it.words.is_empty())
    }
}

/// What others have told this process.
#[derive(Debug, Default)]
pub struct Heard {
    lanes: BTreeMap<Peer, Hearing>,
}

#[derive(Debug, Default)]
struct Hearing {
    stream: Stream,
    /// Number of the word that is to be taken next.
    next: u64,
    early: BTreeMap<u64, Body>,
}

impl Heard {
    /// A word came. It is kept until those before it were taken, unless it is known, too far ahead, or a copy of an older
    /// stream that was long on its way. Whether it is of another stream than those before it: then nothing of theirs is wanted
    /// any more.
    pub fn word(&mut self, from: Peer, stream: Stream, number: u64, body: Body) -> bool {
        let lane = self.lanes.entry(from).or_default();
        if stream.life == lane.stream.life && stream.era < lane.stream.era {
            return false;
        }
        let anew = lane.stream != stream;
        if anew {
            *lane = Hearing { stream, ..Hearing::default() };
        }
        if (lane.next..lane.next + MAX_EARLY).contains(&number) {
            lane.early.entry(number).or_insert(body);
        }
        anew
    }

    /// The word of a peer that is to be taken now, if it is here.
    pub fn next(&self, from: Peer) -> Option<&Body> {
        let lane = self.lanes.get(&from)?;
        lane.early.get(&lane.next)
    }

    /// Takes the word that [`Self::next`] shows.
    pub fn take(&mut self, from: Peer) -> Option<Body> {
        let lane = self.lanes.get_mut(&from)?;
        let body = lane.early.remove(&lane.next)?;
        lane.next += 1;
        Some(body)
    }

    /// Every word of this stream of a peer before this number was taken: what it is told, so that it says them no more.
    pub fn through(&self, from: Peer) -> (Stream, u64) {
        self.lanes.get(&from).map_or_else(Default::default, |it| (it.stream, it.next))
    }
}

#[cfg(test)]
mod tests;
