//! Who waits at the door: links that were accepted and have not proved who opened them.
//!
//! In: strangers, by token, in the order in which they came, and where they came from. Out: those who lose their place, and those
//! who took too long. No socket here.
//!
//! ```text
//! came ──▶ silent ──a whole hello──▶ greeted ──its proof──▶ (admitted)
//!            └──── no place left, or too late ────┴──▶ (turned away)
//! ```
//!
//! Who has said a hello of this protocol is more likely to be a peer than who has said nothing: each has places of its own, so that
//! silence, noise and cut greetings take none from real peers. Of too many, the oldest of the source that has most goes; of sources
//! that have as many, the oldest of all.
//!
//! Invariant: never more than the places of either; tokens rise with the time at which strangers came.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Longest time that a peer needs from its hello to its proof, unless its machine is very busy.
const GRACE: Duration = Duration::from_millis(200);

/// How far a stranger has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Said {
    Nothing,
    Hello,
}

/// See the module.
pub(super) struct Lobby<T> {
    places: usize,
    /// How long a hello and a whole greeting may take.
    patience: [Duration; 2],
    held: BTreeMap<u64, Held<T>>,
    silent: Queue,
    greeted: Queue,
}

struct Held<T> {
    stranger: T,
    source: IpAddr,
    since: Instant,
    said: Said,
}

#[derive(Default)]
struct Queue {
    order: BTreeSet<u64>,
    by_source: BTreeMap<IpAddr, BTreeSet<u64>>,
}

impl<T> Lobby<T> {
    /// A lobby with `places` (at least 1) for links without a hello, and as many for links without
    /// a proof.
    pub(super) fn new(places: usize, hello: Duration, greeting: Duration) -> Self {
        let patience = [hello.min(greeting), greeting];
        let (silent, greeted) = (Queue::default(), Queue::default());
        Self { places: places.max(1), patience, held: BTreeMap::new(), silent, greeted }
    }

    /// Takes a stranger in. Out: one that loses its place for it.
    pub(super) fn enter(
        &mut self,
        token: u64,
        stranger: T,
        source: IpAddr,
        since: Instant,
    ) -> Option<T> {
        self.held.insert(token, Held { stranger, source, since, said: Said::Nothing });
        self.silent.insert(token, source);
        self.make_room(Said::Nothing)
    }

    /// A stranger has said its hello. Out: one that loses its place for it.
    pub(super) fn greeted(&mut self, token: u64) -> Option<T> {
        let held = self.held.get_mut(&token).filter(|it| it.said == Said::Nothing)?;
        held.said = Said::Hello;
        self.silent.remove(token, held.source);
        self.greeted.insert(token, held.source);
        self.make_room(Said::Hello)
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut T> {
        self.held.get_mut(&token).map(|it| &mut it.stranger)
    }

    pub(super) fn leave(&mut self, token: u64) -> Option<T> {
        let held = self.held.remove(&token)?;
        self.queue(held.said).remove(token, held.source);
        Some(held.stranger)
    }

    /// Whether strangers that may soon prove themselves take every place of those with a hello.
    /// Then further links had better wait in the kernel's queue.
    pub(super) fn is_crowded(&self, now: Instant) -> bool {
        let oldest = self.greeted.order.first().and_then(|it| self.held.get(it));
        self.greeted.order.len() >= self.places && oldest.is_some_and(|it| now < it.since + GRACE)
    }

    /// Removes one of the links without a hello, if there is one.
    pub(super) fn drop_silent(&mut self) -> Option<T> {
        let token = self.silent.victim()?;
        self.leave(token)
    }

    /// When the next one takes too long.
    pub(super) fn next_late(&self) -> Option<Instant> {
        [Said::Nothing, Said::Hello]
            .into_iter()
            .filter_map(|it| self.oldest(it))
            .map(|it| it.1)
            .min()
    }

    /// A link that has taken too long.
    pub(super) fn late(&self, now: Instant) -> Option<u64> {
        let oldest = [Said::Nothing, Said::Hello].into_iter().filter_map(|it| self.oldest(it));
        { oldest }.find(|it| it.1 <= now).map(|it| it.0)
    }

    /// The oldest link in a stage, and the time at which it has taken too long.
    fn oldest(&self, said: Said) -> Option<(u64, Instant)> {
        let (queue, patience) = match said {
            Said::Nothing => (&self.silent, self.patience[0]),
            Said::Hello => (&self.greeted, self.patience[1]),
        };
        let token = *queue.order.first()?;
        self.held.get(&token).map(|it| (token, it.since + patience))
    }

    fn make_room(&mut self, said: Said) -> Option<T> {
        let places = self.places;
        let queue = self.queue(said);
        let victim = if queue.order.len() > places { queue.victim() } else { None };
        victim.and_then(|it| self.leave(it))
    }

    fn queue(&mut self, said: Said) -> &mut Queue {
        match said {
            Said::Nothing => &mut self.silent,
            Said::Hello => &mut self.greeted,
        }
    }
}

impl Queue {
    fn insert(&mut self, token: u64, source: IpAddr) {
        self.order.insert(token);
        self.by_source.entry(source).or_default().insert(token);
    }

    fn remove(&mut self, token: u64, source: IpAddr) {
        self.order.remove(&token);
        if let Some(tokens) = self.by_source.get_mut(&source) {
            tokens.remove(&token);
            if tokens.is_empty() {
                self.by_source.remove(&source);
            }
        }
    }

    /// The oldest link of the address with the most links; of several such addresses, of the one that has the oldest.
    fn victim(&self) -> Option<u64> {
        self.by_source.values().max_by_key(|it| (it.len(), Reverse(it.first())))?.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Duration = Duration::from_secs(2);
    const GREETING: Duration = Duration::from_secs(5);

    fn source(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn silence_takes_no_place_from_who_has_said_hello() {
        let (mut lobby, now) = (Lobby::new(4, HELLO, GREETING), Instant::now());
        assert_eq!(lobby.enter(0, 0, source(1), now), None);
        assert_eq!(lobby.greeted(0), None);
        let gone: Vec<_> = (1..600).filter_map(|it| lobby.enter(it, it, source(1), now)).collect();
        assert_eq!(gone, (1..596).collect::<Vec<_>>(), "the oldest first");
        assert_eq!(lobby.leave(0), Some(0), "who said hello is still there");
    }

    #[test]
    fn a_source_that_takes_many_places_loses_its_own() {
        let (mut lobby, now) = (Lobby::new(4, HELLO, GREETING), Instant::now());
        assert_eq!(lobby.enter(0, 0, source(1), now), None);
        for token in 1..20 {
            lobby.enter(token, token, source(2), now);
        }
        assert_eq!(
            lobby.leave(0),
            Some(0),
            "older than all others, and the only one of its source"
        );
        for token in 20..40 {
            lobby.enter(token, token, source(2), now);
            lobby.greeted(token);
        }
        assert_eq!(lobby.greeted.order.len(), 4);
        assert_eq!(lobby.silent.order.len(), 3);
    }

    #[test]
    fn of_sources_with_as_many_links_the_oldest_loses_its_place_and_not_who_just_came() {
        let (mut lobby, now) = (Lobby::new(4, HELLO, GREETING), Instant::now());
        for token in 1..5 {
            assert_eq!(lobby.enter(token, token, source(token as u8), now), None);
        }
        assert_eq!(lobby.enter(9, 9, source(9), now), Some(1));
        assert_eq!(lobby.enter(10, 10, source(0), now), Some(2));
    }

    #[test]
    fn a_crowd_of_peers_has_time_to_prove_itself() {
        let (mut lobby, now) = (Lobby::new(2, HELLO, GREETING), Instant::now());
        for token in 0..2 {
            assert!(!lobby.is_crowded(now));
            lobby.enter(token, token, source(1), now);
            lobby.greeted(token);
        }
        assert!(lobby.is_crowded(now));
        assert!(!lobby.is_crowded(now + GRACE), "they have had it");
        lobby.leave(1);
        assert!(!lobby.is_crowded(now));
    }

    #[test]
    fn who_says_nothing_is_late_before_who_has_said_hello() {
        let (mut lobby, now) = (Lobby::new(4, HELLO, GREETING), Instant::now());
        lobby.enter(0, 'a', source(1), now);
        lobby.enter(1, 'b', source(1), now);
        lobby.greeted(0);
        assert_eq!(lobby.next_late(), Some(now + HELLO));
        assert_eq!(lobby.late((now + HELLO).checked_sub(Duration::from_nanos(1)).unwrap()), None);
        assert_eq!(lobby.late(now + HELLO), Some(1));
        assert_eq!(lobby.leave(1), Some('b'));
        assert_eq!(lobby.late(now + HELLO), None);
        assert_eq!(
            (lobby.next_late(), lobby.late(now + GREETING)),
            (Some(now + GREETING), Some(0))
        );
        assert_eq!(lobby.leave(0), Some('a'));
        assert_eq!(lobby.next_late(), None);
    }
}
