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
mod tests {
    use cadre_protocol::TrainerId;
    use proptest::prelude::*;

    use super::*;

    const ME: Peer = Peer::Trainer(TrainerId(1));
    const YOU: Peer = Peer::CONDUCTOR;
    const MINE: Life = Life(1);
    const YOURS: (Peer, Life) = (YOU, Life(2));
    const FIRST: Stream = Stream { life: MINE, era: 0 };

    fn body(it: u8) -> Arc<Body> {
        Arc::new(Body::Here(vec![it]))
    }

    fn millis(it: u64) -> Nanos {
        Nanos::from_millis(it)
    }

    fn numbers(due: &[Due]) -> Vec<u64> {
        due.iter().map(|it| it.number).collect()
    }

    #[test]
    fn a_word_is_said_again_until_it_is_covered() {
        let mut owed = Owed::new(MINE);
        assert_eq!(owed.next_deadline(), None);
        assert_eq!(owed.owe(millis(0), YOU, body(1)).unwrap().number, 0);
        assert_eq!(owed.owe(millis(50), YOU, body(2)).unwrap().number, 1);
        assert_eq!(owed.next_deadline(), Some(AGAIN_AFTER));
        assert!(owed.due(millis(199)).is_empty());
        assert_eq!(numbers(&owed.due(millis(200))), [0, 1]);
        assert_eq!(owed.next_deadline(), Some(millis(400)));
        // Over a fresh link at once.
        assert_eq!(owed.broken(millis(210), YOU), 1);
        assert_eq!(numbers(&owed.due(millis(230))), [0, 1]);
        owed.covered(millis(240), YOURS, FIRST, 1);
        assert_eq!(owed.next_deadline(), Some(millis(440)));
        assert_eq!(numbers(&owed.due(millis(440))), [1]);
        owed.covered(millis(450), YOURS, FIRST, 2);
        assert!(owed.is_empty() && owed.next_deadline().is_none());
        // Old news, and news of words that were never said, change nothing.
        owed.owe(millis(500), YOU, body(3)).unwrap();
        owed.covered(millis(500), YOURS, FIRST, 0);
        owed.covered(millis(500), YOURS, FIRST, 9);
        assert_eq!(numbers(&owed.due(millis(700))), [2]);
    }

    #[test]
    fn who_was_given_up_is_owed_nothing_and_the_others_keep_their_words() {
        let mut owed = Owed::new(MINE);
        owed.owe(millis(0), YOU, body(1)).unwrap();
        owed.owe(millis(0), ME, body(1)).unwrap();
        owed.forget(YOU);
        let due = owed.due(millis(1000));
        assert_eq!((due.len(), due[0].to), (1, ME));
        assert_eq!(owed.owe(millis(1000), YOU, body(2)).unwrap().number, 1);
    }

    #[test]
    fn a_peer_that_never_answers_is_named_when_the_queue_is_full() {
        let mut owed = Owed::new(MINE);
        for _ in 0..MAX_OWED {
            owed.owe(millis(0), YOU, body(1)).unwrap();
        }
        let full = owed.owe(millis(0), YOU, body(1)).unwrap_err();
        assert_eq!(full.peer, YOU);
        assert!(full.to_string().contains("trainer 0"), "{full}");
        owed.owe(millis(0), ME, body(1)).unwrap();
    }

    #[test]
    fn words_far_ahead_are_dropped_and_bound_what_is_kept() {
        let mut heard = Heard::default();
        for number in (1..10 * MAX_EARLY).rev() {
            heard.word(ME, FIRST, number, Body::Here(vec![0]));
        }
        assert!(heard.next(ME).is_none());
        assert_eq!(heard.lanes[&ME].early.len() as u64, MAX_EARLY - 1);
        heard.word(ME, FIRST, 0, Body::Here(vec![7]));
        while heard.take(ME).is_some() {}
        assert_eq!(heard.through(ME), (FIRST, MAX_EARLY));
    }

    /// What happens on the way between two workers.
    #[derive(Clone, Debug)]
    enum Step {
        Say,
        /// So much time, then whatever is due is on its way.
        Wait(u64),
        /// The packet of this place arrives, and may arrive again.
        Arrive(usize),
        /// Everything on its way is lost, both ways.
        Break,
        /// The news of what was heard arrives.
        Cover,
        /// The other side was away and comes back under its name; its links are new.
        Return,
        /// This side does.
        Anew,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Say),
            4 => (0u64..300).prop_map(Step::Wait),
            12 => (0usize..64).prop_map(Step::Arrive),
            2 => Just(Step::Break),
            4 => Just(Step::Cover),
            1 => Just(Step::Return),
            1 => Just(Step::Anew),
        ]
    }

    /// Two sides, and what each life of the other has taken from each life of this one.
    struct Two {
        owed: Owed,
        heard: Heard,
        lives: u64,
        you: Life,
        said: u64,
        /// Numbers of bodies, by the lives of both.
        taken: BTreeMap<(u64, u64), Vec<u64>>,
    }

    impl Two {
        fn arrive(&mut self, due: &Due) {
            self.heard.word(ME, due.stream, due.number, (*due.body).clone());
            while let Some(Body::Here(bytes)) = self.heard.take(ME) {
                let lives = (self.owed.me.0, self.you.0);
                let taken = self.taken.entry(lives).or_default();
                taken.push(u64::from_le_bytes(bytes.try_into().unwrap()));
            }
        }

        fn cover(&mut self, now: u64) {
            let (stream, through) = self.heard.through(ME);
            self.owed.covered(millis(now), (YOU, self.you), stream, through);
        }

        fn life(&mut self) -> Life {
            self.lives += 1;
            Life(self.lives)
        }
    }

    proptest! {
        #[test]
        fn a_life_takes_each_word_once_and_in_order_whatever_is_lost_and_whoever_returns(
            steps in proptest::collection::vec(step(), 1..200)
        ) {
            let (owed, heard) = (Owed::new(Life(1)), Heard::default());
            let (taken, you) = (BTreeMap::new(), Life(2));
            let mut two = Two { owed, heard, lives: 2, you, said: 0, taken };
            let (mut now, mut wire) = (0, Vec::<Due>::new());
            for step in steps {
                match step {
                    Step::Say => {
                        let body = Arc::new(Body::Here(two.said.to_le_bytes().to_vec()));
                        wire.push(two.owed.owe(millis(now), YOU, body).unwrap());
                        two.said += 1;
                    }
                    Step::Wait(more) => {
                        now += more;
                        wire.extend(two.owed.due(millis(now)));
                    }
                    Step::Arrive(place) => {
                        if let Some(due) = wire.get(place) {
                            two.arrive(&due.clone());
                        }
                    }
                    Step::Break => {
                        wire.clear();
                        two.owed.broken(millis(now), YOU);
                    }
                    Step::Cover => two.cover(now),
                    Step::Return => {
                        wire.clear();
                        two.owed.broken(millis(now), YOU);
                        (two.heard, two.you) = (Heard::default(), two.life());
                    }
                    Step::Anew => {
                        wire.clear();
                        two.owed = Owed::new(two.life());
                    }
                }
            }
            // From here on nothing is lost.
            let mut rounds = 0;
            while !two.owed.is_empty() {
                now = two.owed.next_deadline().unwrap().millis().max(now) + 1;
                for due in two.owed.due(millis(now)) {
                    two.arrive(&due);
                }
                two.cover(now);
                rounds += 1;
                prop_assert!(rounds <= 3 + two.said / MAX_EARLY, "said again for ever");
            }
            for (lives, taken) in &two.taken {
                prop_assert!(taken.is_sorted_by(|one, next| one < next), "{lives:?}: {taken:?}");
            }
            // What the last life of this side said last has arrived.
            let words = two.owed.lanes.contains_key(&YOU);
            if let (true, Some(last)) = (words, two.said.checked_sub(1)) {
                let all = two.taken.iter().filter(|(lives, _)| lives.0 == two.owed.me.0);
                let newest = all.filter_map(|(_, taken)| taken.last()).max();
                prop_assert_eq!(newest, Some(&last));
            }
        }
    }

    #[test]
    fn a_peer_that_comes_back_under_its_name_hears_what_is_said_from_then_on() {
        let (mut owed, mut heard) = (Owed::new(MINE), Heard::default());
        for number in 0..3 {
            let due = owed.owe(millis(0), YOU, body(number)).unwrap();
            heard.word(ME, due.stream, due.number, (*due.body).clone());
            assert!(heard.take(ME).is_some());
        }
        let (stream, through) = heard.through(ME);
        owed.covered(millis(1), YOURS, stream, through);
        assert!(owed.is_empty());
        // It serves another job, and comes back.
        let (mut heard, again) = (Heard::default(), (YOU, Life(3)));
        let due = owed.owe(millis(9), YOU, body(7)).unwrap();
        heard.word(ME, due.stream, due.number, (*due.body).clone());
        assert!(heard.take(ME).is_none(), "it has not heard those before");
        let (stream, through) = heard.through(ME);
        owed.covered(millis(10), again, stream, through);
        let due = owed.due(millis(10)).remove(0);
        assert_eq!((due.stream.era, due.number), (1, 0));
        assert!(heard.word(ME, due.stream, due.number, (*due.body).clone()), "a stream of its own");
        assert_eq!(heard.take(ME), Some(Body::Here(vec![7])));
        // A copy of before that comes late changes nothing, and what is said again is known.
        let before = Stream { era: 0, ..due.stream };
        assert!(!heard.word(ME, before, 3, (*due.body).clone()));
        assert!(!heard.word(ME, due.stream, due.number, (*due.body).clone()));
        assert_eq!(heard.take(ME), None, "once");
    }
}
