//! Words: messages from one worker to another that arrive once and in order, however often their links break.
//!
//! In: bodies to send, numbers that the other side has acknowledged, broken links, the time. Out: what is to be sent now,
//! and on the other side which word comes next. Pure: nothing is sent here, no clock is read.
//!
//! ```text
//! owe ──▶ said ──AGAIN_AFTER, or RETRY_AFTER a broken link──▶ said again ── ... ──▶ covered by "heard"
//! word ──▶ early ──all before it were taken──▶ next ──▶ taken            (known, or too far ahead: dropped)
//! ```
//!
//! A word is *covered* when its receiver has acknowledged it, and *owed* until then. Messages of the protocol are no words: its
//! machines repeat what they say ([`cadre_protocol`]).
//!
//! A server may serve another job meanwhile and come back under its old name. Then it has forgotten what it had heard, and numbers
//! its own words from 0. So each side draws a [`Life`], which goes with its words and its answers. After an answer of a new life a
//! lane begins a new [`Stream`], with the words that were not covered.
//!
//! Invariant: of the words that one worker owes another, one life of the other takes each exactly once and in their order; to
//! hear one twice changes nothing. What is owed to a peer that was given up is forgotten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cadre_protocol::{Nanos, Peer};
use serde::{Deserialize, Serialize};

/// How long a word waits for its acknowledgement until it is sent again.
const AGAIN_AFTER: Nanos = Nanos::from_millis(200);
/// Time after a broken link until its words are sent over a new one; doubled after each further
/// break in a row.
const RETRY_AFTER: Nanos = Nanos::from_millis(20);
/// Breaks in a row after which the wait grows no more: 1.3 s.
const MAX_DOUBLINGS: u32 = 6;
/// Maximum words that a peer may leave unacknowledged. A healthy peer leaves a few; one that leaves
/// more is given up.
const MAX_OWED: usize = 1024;
/// Maximum words that are kept while an earlier one is missing. Later ones are dropped, and their
/// sender sends them again.
const MAX_EARLY: u64 = 64;
/// Longest body, in bytes, that is sent in a ring. A longer one is published and pulled, so that
/// all receivers share one copy.
pub const MAX_RIDING_BYTES: usize = 4 << 10;

/// A random number of a process in one job. It tells apart processes that had one name after each other, and one process in two jobs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Life(pub u64);

/// Words of one life to one life of a peer, numbered from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Stream {
    /// The life of their sender.
    pub life: Life,
    /// How many lives of the peer came before, as far as the sender knows.
    pub era: u32,
}

/// Body of a word.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Body {
    /// The bytes.
    Here(Vec<u8>),
    /// The publication to pull the bytes from.
    There(Published),
}

/// A body that is to be pulled.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Published {
    /// Number of the publication; no other publication has it.
    pub publication: u64,
    /// Length of the body.
    pub bytes: u64,
    /// xxh3 of the bytes.
    pub digest: u64,
}

/// A word to say now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Due {
    /// Receiver.
    pub to: Peer,
    /// The stream of words to that receiver.
    pub stream: Stream,
    /// Number of the word in the stream, from 0.
    pub number: u64,
    /// Body of the word.
    pub body: Arc<Body>,
}

/// A peer has left too many words unacknowledged.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{peer} has answered none of the last {MAX_OWED} words; end it, or look at the network between"
)]
pub struct Full {
    /// The peer that does not answer.
    pub peer: Peer,
}

/// Words that this process has sent and that are not acknowledged.
#[derive(Debug)]
pub struct Owed {
    me: Life,
    lanes: BTreeMap<Peer, Lane>,
    /// Receivers with unacknowledged words, by the time at which these are sent again. So a turn of
    /// the IO thread visits only the receivers that are due.
    due: BTreeSet<(Nanos, Peer)>,
}

#[derive(Debug, Default)]
struct Lane {
    /// The life of the peer that acknowledges, once it has answered.
    peer: Option<Life>,
    era: u32,
    /// Number of the next word.
    next: u64,
    /// Words that were sent and are not acknowledged; the last has number `next - 1`.
    words: VecDeque<Arc<Body>>,
    /// Time at which the words are sent again.
    due: Nanos,
    /// Breaks of the link since the peer was last heard.
    breaks: u32,
}

impl Lane {
    /// Numbers the remaining words from 0 and sends them at once: the peer's new life has not heard
    /// the earlier ones.
    fn begin_anew(&mut self, now: Nanos) {
        self.era = self.era.wrapping_add(1);
        self.next = self.words.len() as u64;
        self.due = now;
    }
}

impl Owed {
    /// For a process in this life.
    pub fn new(me: Life) -> Self {
        Self { me, lanes: BTreeMap::new(), due: BTreeSet::new() }
    }

    /// Changes the lane of a peer, and the time by which it is found. `None` if there is no such lane.
    fn change<T>(&mut self, peer: Peer, change: impl FnOnce(&mut Lane) -> T) -> Option<T> {
        let lane = self.lanes.get_mut(&peer)?;
        let before = lane.due;
        let changed = change(lane);
        if before != lane.due || lane.words.is_empty() {
            self.due.remove(&(before, peer));
        }
        if !lane.words.is_empty() {
            self.due.insert((lane.due, peer));
        }
        Some(changed)
    }

    /// Owes a peer one word more, which is to be said now.
    ///
    /// # Errors
    ///
    /// [`Full`]: nothing was added.
    pub fn owe(&mut self, now: Nanos, to: Peer, body: Arc<Body>) -> Result<Due, Full> {
        self.lanes.entry(to).or_default();
        let life = self.me;
        let owe = |lane: &mut Lane| {
            if lane.words.len() >= MAX_OWED {
                return Err(Full { peer: to });
            }
            if lane.words.is_empty() {
                lane.due = now.after(AGAIN_AFTER);
            }
            let number = lane.next;
            lane.next += 1;
            lane.words.push_back(Arc::clone(&body));
            Ok(Due { to, stream: Stream { life, era: lane.era }, number, body })
        };
        self.change(to, owe).expect("the lane was just made")
    }

    /// Notes the life of a peer. Returns whether it replaces the life that acknowledged words so
    /// far. Then a new stream begins, with the words that are not acknowledged.
    pub fn lives(&mut self, now: Nanos, peer: Peer, life: Life) -> bool {
        let lives = self.change(peer, |lane| {
            let anew = lane.peer.replace(life).is_some_and(|it| it != life);
            if anew {
                lane.begin_anew(now);
            }
            anew
        });
        lives.unwrap_or(false)
    }

    /// A life of a peer has taken every word of a stream before number `through`. Out: as of [`Self::lives`].
    pub fn covered(&mut self, now: Nanos, by: (Peer, Life), stream: Stream, through: u64) -> bool {
        let (by, life) = by;
        let me = self.me;
        let covered = self.change(by, |lane| {
            let current = Stream { life: me, era: lane.era };
            // Words that were never said are of another life of this process.
            if stream != current || through > lane.next {
                return false;
            }
            lane.breaks = 0;
            let untouched = lane.words.len() as u64 == lane.next;
            if lane.peer.replace(life).is_some_and(|it| it != life) && !untouched {
                lane.begin_anew(now);
                return true;
            }
            let left = (lane.next - through) as usize;
            while lane.words.len() > left {
                lane.words.pop_front();
                lane.due = now.after(AGAIN_AFTER);
            }
            false
        });
        covered.unwrap_or(false)
    }

    /// How many words a peer has not heard.
    pub fn words(&self, peer: Peer) -> usize {
        self.lanes.get(&peer).map_or(0, |it| it.words.len())
    }

    /// The link with a peer broke, and what was on its way is lost. Out: how often in a row it did, without a word covered between.
    pub fn broken(&mut self, now: Nanos, peer: Peer) -> u32 {
        let breaks = self.change(peer, |lane| {
            lane.due = now.after(Nanos(RETRY_AFTER.0 << lane.breaks.min(MAX_DOUBLINGS)));
            lane.breaks = lane.breaks.saturating_add(1);
            lane.breaks
        });
        breaks.unwrap_or(0)
    }

    /// Words to send again at `now`.
    pub fn due(&mut self, now: Nanos) -> Vec<Due> {
        let mut due = Vec::new();
        let life = self.me;
        while let Some(&(_, to)) = self.due.first().filter(|it| it.0 <= now) {
            self.change(to, |lane| {
                lane.due = now.after(AGAIN_AFTER);
                let first = lane.next - lane.words.len() as u64;
                let words = (first..).zip(&lane.words);
                let stream = Stream { life, era: lane.era };
                let due_of = |(number, body)| Due { to, stream, number, body: Arc::clone(body) };
                due.extend(words.map(due_of));
            });
        }
        due
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.due.first().map(|it| it.0)
    }

    /// Drops all words to a peer that was given up or has left. If it comes back, its stream begins
    /// anew, so that it does not wait for a word that it never got.
    pub fn forget(&mut self, peer: Peer) {
        self.change(peer, |lane| {
            if !lane.words.is_empty() {
                lane.words.clear();
                lane.era = lane.era.wrapping_add(1);
                lane.next = 0;
            }
        });
    }

    /// Forgets a peer that never comes back: it is told nothing more, under this name.
    pub fn remove(&mut self, peer: Peer) {
        if let Some(lane) = self.lanes.remove(&peer) {
            self.due.remove(&(lane.due, peer));
        }
    }

    /// How many peers were told something, and were not removed.
    pub fn count(&self) -> usize {
        self.lanes.len()
    }

    /// Peers with unacknowledged words.
    pub fn peers(&self) -> impl Iterator<Item = Peer> {
        self.lanes.iter().filter(|it| !it.1.words.is_empty()).map(|it| *it.0)
    }

    /// Whether every word was covered.
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}

/// Words that other processes have sent to this one.
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
    /// A word came. It is kept until those before it were taken, unless it is known, too far ahead, or a late copy of an older
    /// stream. Out: whether it begins another stream; then nothing of the former one is wanted any more.
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

    /// Forgets a peer that never comes back, and is not heard any more.
    pub fn remove(&mut self, peer: Peer) {
        self.lanes.remove(&peer);
    }

    /// How many peers have said something, and were not removed.
    pub fn count(&self) -> usize {
        self.lanes.len()
    }

    /// The acknowledgement for a peer: every word of this stream before this number was taken.
    pub fn through(&self, from: Peer) -> (Stream, u64) {
        self.lanes.get(&from).map_or_else(Default::default, |it| (it.stream, it.next))
    }
}

#[cfg(test)]
mod tests;
