//! Words between two processes' shells over real sockets: short and long ones, with links cut under them.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one word out of many")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::{Encryption, Event, Limits, PeerId, PullError, Tcp, TcpConfig};
use cadre_protocol::{Peer, TrainerId};
use cadre_step::envelope::{Lengths, NanoLengths};

use super::fetches::State;
use super::*;
use crate::io::clock::Clock;
use crate::io::encoded::{Read, Unread};
use crate::io::shared::peer_of;
use crate::trace::Tracer;

const CONDUCTOR: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 0, incarnation: 0 };
const TRAINER: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 1, incarnation: 0 };

/// One process's words.
struct Side {
    shared: Shared<Tcp>,
    told: Vec<Said>,
    /// Pulls of words that ended well.
    parts: usize,
    /// Those that found nothing.
    gone: usize,
    failed: Option<Error>,
    /// Whether somebody reads what has come.
    reads: bool,
}

impl Side {
    fn new(me: PeerId, limits: Limits) -> Self {
        let bind = std::net::Ipv4Addr::LOCALHOST.into();
        let secret = [1; 32];
        let encryption = Encryption::Off;
        let links =
            Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap();
        let shared = Shared::new(peer_of(me), (links, Clock::system()), Tracer::off());
        Self { shared, told: Vec::new(), parts: 0, gone: 0, failed: None, reads: true }
    }

    /// As the IO thread does it, for words alone.
    fn turn(&mut self) {
        self.shared.tell_again();
        let mut events = Vec::new();
        self.shared.provider.poll(Duration::from_millis(1), &mut events);
        for event in events {
            match event {
                Event::Message { from, bytes } => match postcard::from_bytes(&bytes).unwrap() {
                    Envelope::Word { stream, number, body } => {
                        match self.shared.word(peer_of(from), (stream, number), body) {
                            Ok(told) => self.told.extend(told),
                            Err(error) => self.failed = Some(error),
                        }
                    }
                    Envelope::Heard { by, stream, through } => {
                        self.shared.covered((peer_of(from), by), stream, through);
                    }
                    other @ (Envelope::Protocol(_) | Envelope::Beat { .. }) => panic!("{other:?}"),
                },
                Event::Pulled { pull, result } => match self.shared.fetched(pull, &result) {
                    Ok(()) => {
                        self.gone += usize::from(matches!(result, Err(PullError::Gone)));
                        self.parts += usize::from(result.is_ok());
                    }
                    Err(error) => self.failed = Some(error),
                },
                Event::Closed { peer, .. } => {
                    self.shared.cut(peer_of(peer));
                }
                Event::Connected(_)
                | Event::Begun { .. }
                | Event::Room { .. }
                | Event::Refused { .. }
                | Event::Unfit { .. }
                | Event::Broken { .. } => {}
            }
        }
        if self.reads {
            self.read();
        }
    }

    /// As the planning thread does it, and then the IO thread.
    fn read(&mut self) {
        while let Some(output) = self.shared.outputs.take() {
            let Output::Read(unread) = output else { panic!("{output:?}") };
            match self.shared.read(unread.read()) {
                Ok(told) => self.told.extend(told),
                Err(error) => self.failed = Some(error),
            }
        }
    }
}

fn pair() -> (Side, Side) {
    pair_within(Limits::default())
}

fn pair_within(limits: Limits) -> (Side, Side) {
    let (mut one, mut other) = (Side::new(CONDUCTOR, limits), Side::new(TRAINER, limits));
    let addresses = (one.shared.provider.address(), other.shared.provider.address());
    one.shared.know(TRAINER, &addresses.1);
    other.shared.know(CONDUCTOR, &addresses.0);
    (one, other)
}

/// Turns both sides until the condition holds; `cut` is asked before each.
fn until(
    (one, other): (&mut Side, &mut Side),
    mut condition: impl FnMut(&Side, &Side) -> bool,
    mut cut: impl FnMut(usize) -> bool,
) {
    let deadline = Instant::now() + Duration::from_mins(1);
    for turn in 0.. {
        if condition(one, other) {
            return;
        }
        assert!(Instant::now() < deadline, "words do not arrive");
        if cut(turn) {
            one.shared.provider.close(TRAINER);
            one.shared.cut(Peer::Trainer(TrainerId(1)));
        }
        one.turn();
        other.turn();
    }
}

fn lengths(step: u64, documents: u32) -> Lengths {
    let documents = (0..documents).map(|it| (it, 4)).collect();
    let nanos = vec![NanoLengths { documents, stretches: Vec::new() }];
    Lengths { step, turns: None, nanos }
}

fn heard(side: &Side) -> Vec<Lengths> {
    let lengths = |it: &Said| match it {
        Said::Lengths(lengths) => lengths.clone(),
        other => panic!("{}", other.name()),
    };
    side.told.iter().map(lengths).collect()
}

/// Of these, the second is longer than a message of the exchange, the third than a part of a pull.
const DOCUMENTS: [u32; 5] = [3, 400_000, 1_200_000, 0, 2_000];

#[test]
fn words_of_any_length_arrive_in_order_and_their_memory_is_freed() {
    let (mut conductor, mut trainer) = pair();
    let said: Vec<_> = (0..).zip(DOCUMENTS).map(|(step, it)| lengths(step, it)).collect();
    for lengths in &said {
        trainer.shared.tell_conductor(Said::Lengths(lengths.clone()));
    }
    assert_eq!(trainer.shared.telling.publications.len(), 3);
    let covered = |_: &Side, trainer: &Side| trainer.shared.telling.is_covered();
    until((&mut conductor, &mut trainer), covered, |_| false);
    assert_eq!(heard(&conductor), said);
    assert_eq!(conductor.parts, 1 + 2 + 1);
    trainer.shared.tell_again();
    assert!(trainer.shared.telling.publications.is_empty());
    assert!(conductor.shared.telling.fetches.is_empty() && conductor.failed.is_none());
}

/// Neither its digest nor its layouts are looked at here: that takes as long as it has documents.
#[test]
fn a_long_word_is_looked_into_by_another_thread_and_those_behind_it_wait() {
    let (mut conductor, mut trainer) = pair();
    conductor.reads = false;
    let said = [lengths(0, 100_000), lengths(1, 3)];
    for lengths in &said {
        trainer.shared.tell_conductor(Said::Lengths(lengths.clone()));
    }
    let whole = |it: &Side, _: &Side| it.parts > 0;
    until((&mut conductor, &mut trainer), whole, |_| false);
    let Some(Output::Read(mut unread)) = conductor.shared.outputs.take() else { panic!("unread") };
    // Bytes that no word has are found by whoever reads them.
    let right = std::mem::replace(&mut unread.parts[0].0.bytes_mut()[50], 255);
    let (from, reading) = (unread.from, unread.reading);
    let parts = unread.parts.clone();
    let refused = unread.read();
    assert!(matches!(refused.said, Err(ReadError::Digest { .. })));
    for _ in 0..20 {
        conductor.turn();
        trainer.turn();
    }
    assert!(conductor.told.is_empty() && conductor.failed.is_none());
    assert!(!trainer.shared.telling.is_covered(), "nobody has taken the words");
    let Body::There(word) = *trainer.shared.compose(&Said::Lengths(said[0].clone())) else {
        panic!("a long word")
    };
    let mut unread = Unread { from, reading, word, parts };
    unread.parts[0].0.bytes_mut()[50] = right;
    conductor.told = conductor.shared.read(unread.read()).unwrap();
    assert_eq!(heard(&conductor), said);
    // Once it was taken, or its author is given up, the same reading brings nothing.
    let late = Read { from, reading, said: Ok(Said::Leaving) };
    assert!(conductor.shared.read(late).unwrap().is_empty());
}

#[test]
fn cut_links_lose_no_word_and_double_none() {
    for pace in [7, 31, 101] {
        let (mut conductor, mut trainer) = pair();
        let said: Vec<_> = (0..).zip(DOCUMENTS).map(|(step, it)| lengths(step, it)).collect();
        for lengths in &said {
            trainer.shared.tell_conductor(Said::Lengths(lengths.clone()));
        }
        let covered = |_: &Side, trainer: &Side| trainer.shared.telling.is_covered();
        // Cuts become rarer, so that a part comes through in the end.
        let mut next = pace;
        let cut = |turn| {
            let due = turn == next;
            next += if due { next } else { 0 };
            due
        };
        until((&mut conductor, &mut trainer), covered, cut);
        assert_eq!(heard(&conductor), said, "cut every {pace} turns");
    }
}

/// That the exchange then asks for no byte again that has landed is for its own tests.
#[test]
fn a_part_that_broken_links_interrupt_is_pulled_again_into_the_same_memory() {
    const CHUNK: u64 = 64 << 10;
    let limits = Limits { part_bytes: CHUNK, peer_window_bytes: CHUNK, ..Limits::default() };
    let (mut conductor, mut trainer) = pair_within(limits);
    let said = lengths(0, 800_000);
    trainer.shared.tell_conductor(Said::Lengths(said.clone()));
    let (landings, cuts, due) = (RefCell::new(BTreeSet::new()), Cell::new(0), Cell::new(false));
    let covered = |conductor: &Side, trainer: &Side| {
        let fetch = conductor.shared.telling.fetches.get(Peer::Trainer(TrainerId(1)));
        if let Some((_, State::Pulling { landing, .. })) = fetch {
            landings.borrow_mut().insert(landing);
            let rows = conductor.shared.provider.landed(landing).unwrap().bytes();
            let chunks = rows.chunks(CHUNK as usize);
            let landed = chunks.take_while(|it| it.iter().any(|it| *it != 0)).count();
            due.set(landed >= 8 * (cuts.get() + 1));
        }
        trainer.shared.telling.is_covered()
    };
    let cut = |_| {
        let is_due = due.replace(false);
        cuts.set(cuts.get() + usize::from(is_due));
        is_due
    };
    until((&mut conductor, &mut trainer), covered, cut);
    assert!(cuts.get() >= 3, "{} cuts", cuts.get());
    assert_eq!(landings.borrow().len(), 1, "what had landed is thrown away");
    assert_eq!((heard(&conductor), conductor.parts), (vec![said], 1));
}

#[test]
fn one_publication_serves_all_who_are_told_and_lasts_as_long_as_its_author_wants() {
    let (mut conductor, mut trainer) = pair();
    let body = conductor.shared.compose(&Said::Lengths(lengths(0, 100_000)));
    for _ in 0..3 {
        conductor.shared.tell(Peer::Trainer(TrainerId(1)), &body);
    }
    assert_eq!(conductor.shared.telling.publications.len(), 1);
    let covered = |it: &Side, _: &Side| it.shared.telling.is_covered();
    until((&mut conductor, &mut trainer), covered, |_| false);
    assert_eq!(trainer.told.len(), 3);
    conductor.shared.tell_again();
    assert_eq!(conductor.shared.telling.publications.len(), 1);
    drop(body);
    conductor.shared.tell_again();
    assert!(conductor.shared.telling.publications.is_empty());
}

#[test]
fn a_word_that_was_withdrawn_is_pulled_as_long_as_its_author_owes_it() {
    let (mut conductor, mut trainer) = pair();
    let kept = trainer.shared.compose(&Said::Lengths(lengths(0, 100_000)));
    let Body::There(word) = *kept else { panic!("long words are published") };
    trainer.shared.provider.withdraw(key(word.publication));
    trainer.shared.tell(Peer::CONDUCTOR, &kept);
    until((&mut conductor, &mut trainer), |it, _| it.gone >= 3, |_| false);
    trainer.shared.forget(Peer::CONDUCTOR);
    let idle = |it: &Side, _: &Side| it.shared.telling.fetches.is_empty();
    until((&mut conductor, &mut trainer), idle, |_| false);
    assert_eq!(conductor.shared.telling.next_deadline(), None, "nobody owes it: it is let be");
    assert!(conductor.told.is_empty());
}

#[test]
fn what_cannot_be_taken_is_refused_by_name() {
    let body = |word: Published| Arc::new(Body::There(word));
    let (bytes, digest) = (100_000, 1);
    let check = |body: &dyn Fn(Published) -> Arc<Body>, expected: &str| {
        let (mut conductor, mut trainer) = pair();
        let kept = trainer.shared.compose(&Said::Lengths(lengths(0, 100_000)));
        let Body::There(word) = *kept else { panic!("long words are published") };
        trainer.shared.tell(Peer::CONDUCTOR, &body(word));
        let failed = |it: &Side, _: &Side| it.failed.is_some();
        until((&mut conductor, &mut trainer), failed, |_| false);
        let error = conductor.failed.unwrap().to_string();
        assert!(error.contains("trainer 1") && error.contains(expected), "{error}");
        assert!(conductor.told.is_empty());
    };
    check(&|it| body(Published { digest, ..it }), "another digest");
    check(&|it| body(Published { bytes, ..it }), "another digest");
    check(&|it| body(Published { bytes: u64::MAX, ..it }), "more than");
    check(&|it| body(Published { bytes: it.bytes + 1, ..it }), "cannot be pulled");
    check(&|_| Arc::new(Body::Here(vec![255; 9])), "unreadable");
}
