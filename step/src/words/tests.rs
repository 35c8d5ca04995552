//! Orders of words, losses and lives, drawn and by hand.

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
    // Should it come back, it waits for no word that it never heard: numbers begin anew.
    let anew = owed.owe(millis(1000), YOU, body(2)).unwrap();
    assert_eq!((anew.number, anew.stream.era), (0, 1));
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
    /// This side was away and comes back under its name.
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

    /// Whoever is owed words is found by the time when they are said again, and nobody else.
    fn check_index(&self) {
        let owed = self.owed.lanes.iter().filter(|it| !it.1.words.is_empty());
        let expected: BTreeSet<_> = owed.map(|(peer, lane)| (lane.due, *peer)).collect();
        assert_eq!(self.owed.due, expected);
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
            two.check_index();
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
    // The other side serves another job, and comes back.
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
    // The other side comes back once more when nothing is owed: it shows itself, and what is said then it hears.
    let (stream, through) = heard.through(ME);
    owed.covered(millis(11), again, stream, through);
    assert!(owed.is_empty() && !owed.lives(millis(12), YOU, Life(3)));
    assert!(owed.lives(millis(13), YOU, Life(4)) && !owed.lives(millis(14), YOU, Life(4)));
    let next = owed.owe(millis(15), YOU, body(8)).unwrap();
    assert_eq!((next.stream.era, next.number), (2, 0));
    // A copy of before that comes late changes nothing, and what is said again is known.
    let before = Stream { era: 0, ..due.stream };
    assert!(!heard.word(ME, before, 3, (*due.body).clone()));
    assert!(!heard.word(ME, due.stream, due.number, (*due.body).clone()));
    assert_eq!(heard.take(ME), None, "once");
}
