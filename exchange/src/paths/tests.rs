//! A reader and two owners to whom anything happens, by seed: rows change and go, ways are lost and tried again in the middle of
//! pulls, owners die and come again, links are closed, time passes.
//!
//! In: `CADRE_SEED`, `CADRE_PATHS_RUNS`. Out: every pull ends once, for a reason that there was, its landing is free then, and
//! what it brought is one publication that stood while it ran. At the end everything can be pulled again.

mod both;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::remote::Remote;
use super::{Paths, PathsConfig, Sharing};
use crate::clock::{Clock, Hand};
use crate::peer::{PeerId, Piece, RegionKey, Role};
use crate::pool::Pool;
use crate::provider::{Event, LandingId, Provider as _, PullError, PullId, PullRequest};
use crate::tcp::{Encryption, Limits, TcpConfig};
use crate::tests::{Random, setting};
use crate::ucx::Transports;

const READER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };
/// Words of the longest region.
const WORDS: usize = 20_000;
const PATIENCE: Duration = Duration::from_secs(40);
const KEYS: u32 = 3;

struct Owner {
    paths: Paths,
    id: PeerId,
}

struct Wanted {
    owner: PeerId,
    key: RegionKey,
    landing: LandingId,
    words: usize,
    /// What happened that may end it: of its owner, and of time, up to its beginning.
    began: Happened,
}

/// How often something happened so far.
#[derive(Clone, Copy, Debug, Default)]
struct Happened {
    publications: u32,
    withdrawals: u32,
    deaths: u32,
    closes: u32,
    losses: u32,
    rests: u32,
}

struct World {
    /// Of the owners.
    kind: Kind,
    sharing: Sharing,
    random: Random,
    hand: Hand,
    reader: Paths,
    owners: Vec<Owner>,
    pool: Arc<Pool>,
    /// Number and length of what each owner publishes.
    published: BTreeMap<(PeerId, RegionKey), (u32, usize)>,
    /// Publications of each region so far, with its length; in each word of a region stands its number.
    numbers: BTreeMap<u32, (PeerId, RegionKey, usize)>,
    wanted: BTreeMap<PullId, Wanted>,
    happened: Happened,
    events: Vec<Event>,
    came: u64,
}

/// Which ways processes have beside their links.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Shared,
    Ucx,
    Both,
}

fn open(me: PeerId, kind: Kind, sharing: Sharing, clock: Clock) -> Paths {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    // Reads of many parts, too.
    let (part_bytes, peer_window_bytes) = match sharing {
        Sharing::Ucx(_) => (4096, 16_384),
        Sharing::Off | Sharing::Auto | Sharing::Required => (1 << 20, 16 << 20),
    };
    let limits = Limits { peer_window_bytes, part_bytes, ..Limits::default() };
    let encryption = Encryption::Off;
    let tcp = TcpConfig { bind, me, secret: [3; 32], data_version: 1, encryption, limits };
    let mut paths = Paths::open_at(PathsConfig { tcp, sharing }, clock).unwrap();
    if kind == Kind::Both && sharing == Sharing::Auto {
        let remote = Remote::open(&mut paths.tcp, Transports::SharedMemory, false, limits);
        paths.remote = Some(remote.unwrap());
    }
    // A pull of many turns.
    if let Some(shared) = &mut paths.sharing {
        shared.turn_bytes = 8192;
    }
    paths
}

impl World {
    fn new(seed: u64, kind: Kind) -> Self {
        let mut random = Random::new(seed);
        let required = [Sharing::Auto, Sharing::Required][random.below(2)];
        let ucx = Sharing::Ucx(Transports::SharedMemory);
        let (sharing, required) = match kind {
            Kind::Shared => (Sharing::Auto, required),
            Kind::Ucx => (ucx, ucx),
            Kind::Both => (Sharing::Auto, Sharing::Auto),
        };
        let (clock, hand) = Clock::driven();
        let reader = open(READER, kind, required, clock);
        let owners = (0..2).map(|index| {
            let id = PeerId { role: Role::Trainer, index, incarnation: 0 };
            Owner { paths: open(id, kind, sharing, Clock::system()), id }
        });
        let owners = owners.collect();
        let pool = Pool::shared_and_poisoned(1 << 20).unwrap();
        let (published, numbers, wanted) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (happened, events) = (Happened::default(), Vec::new());
        Self {
            kind,
            sharing,
            random,
            hand,
            reader,
            owners,
            pool,
            published,
            numbers,
            wanted,
            happened,
            events,
            came: 0,
        }
    }

    fn key(&mut self) -> RegionKey {
        RegionKey([self.random.below(KEYS as usize) as u32; 4])
    }

    fn publish(&mut self, owner: usize, key: RegionKey) {
        let words = 1 + self.random.below(WORDS);
        self.happened.publications += 1;
        let number = self.happened.publications;
        let owner = &mut self.owners[owner];
        if self.random.below(2) == 0 {
            // Else the memory of the one before is free only afterwards.
            drop(owner.paths.withdraw(key));
        }
        let mut rows = self.pool.take(words * 4);
        bytemuck::cast_slice_mut(rows.bytes_mut()).fill(number);
        owner.paths.publish(key, Arc::new(rows));
        self.published.insert((owner.id, key), (number, words));
        self.numbers.insert(number, (owner.id, key, words));
    }

    fn withdraw(&mut self, owner: usize, key: RegionKey) {
        self.happened.withdrawals += 1;
        let owner = &mut self.owners[owner];
        drop(owner.paths.withdraw(key));
        self.published.remove(&(owner.id, key));
    }

    fn pull(&mut self, owner: usize, key: RegionKey, words: usize) {
        let owner = self.owners[owner].id;
        let landing = self.reader.land(self.pool.take(words * 4));
        let bytes = words as u64 * 4;
        // In two pieces that change their places.
        let cut = self.random.below(words) as u64 * 4;
        let pieces = vec![
            Piece { remote: cut, local: 0, bytes: bytes - cut },
            Piece { remote: 0, local: bytes - cut, bytes: cut },
        ];
        let request = PullRequest { peer: owner, key, pieces, landing, patience: PATIENCE };
        let pull = self.reader.pull(request);
        let began = self.happened;
        self.wanted.insert(pull, Wanted { owner, key, landing, words, began });
    }

    fn poll(&mut self, nodes: usize) {
        let mut ignored = Vec::new();
        for owner in &mut self.owners[..nodes] {
            owner.paths.poll(Duration::ZERO, &mut ignored);
        }
        self.reader.poll(Duration::ZERO, &mut self.events);
        let events = std::mem::take(&mut self.events);
        // A link's end may stand behind the ends of its pulls.
        let is_end = |it: &&Event| matches!(it, Event::Closed { .. });
        self.happened.losses += events.iter().filter(is_end).count() as u32;
        for event in events {
            match event {
                Event::Pulled { pull, result } => self.ended(pull, result),
                Event::Broken { reason } => panic!("{reason}"),
                Event::Closed { .. }
                | Event::Unfit { .. }
                | Event::Connected(_)
                | Event::Message { .. }
                | Event::Begun { .. }
                | Event::Room { .. }
                | Event::Refused { .. } => {}
            }
        }
    }

    fn ended(&mut self, pull: PullId, result: Result<u64, PullError>) {
        let it = self.wanted.remove(&pull).expect("a pull ends once");
        if self.reader.is_busy(it.landing) {
            // A read that cannot be called back.
            assert!(result.is_err() && self.kind != Kind::Shared);
            self.reader.take(it.landing).expect_err("it may be written");
            self.reader.discard(it.landing);
            return;
        }
        let landed = self.reader.take(it.landing).expect("its landing is free");
        let (then, now) = (it.began, self.happened);
        match result {
            Ok(bytes) => {
                assert_eq!(bytes, it.words as u64 * 4);
                let words: &[u32] = bytemuck::cast_slice(landed.bytes());
                let number = words[0];
                assert!(words.iter().all(|it| *it == number), "bytes of two publications");
                let of = self.numbers.get(&number).map(|of| (of.0, of.1));
                assert_eq!(of, Some((it.owner, it.key)), "rows of another region");
                let mut before = self.numbers.range(..=then.publications).rev();
                let newest = before.find(|of| (of.1.0, of.1.1) == (it.owner, it.key));
                assert!(
                    newest.is_none_or(|of| *of.0 <= number),
                    "rows from before it was asked for"
                );
                self.came += 1;
            }
            Err(PullError::Gone) => {
                let there = |at: &(PeerId, RegionKey)| self.published.contains_key(at);
                let withdrawn = now.withdrawals > then.withdrawals;
                assert!(
                    withdrawn
                        || now.publications > then.publications
                        || !there(&(it.owner, it.key))
                );
            }
            Err(PullError::PeerFailed | PullError::Cancelled) => {
                // Time that passes ends greetings, too.
                let happened = now.closes + now.deaths + now.losses + now.rests;
                assert!(happened > 0, "nothing was closed or lost");
            }
            Err(PullError::Deadline) => assert!(now.rests > then.rests, "no time has passed"),
            Err(PullError::Refused { reason }) => {
                // A later publication may be shorter.
                assert!(now.publications > then.publications, "{reason}");
            }
        }
    }

    fn connect(&mut self, owner: usize) {
        let owner = &self.owners[owner];
        self.reader.connect(owner.id, &owner.paths.address());
    }

    fn step(&mut self) {
        let (owner, key) = (self.random.below(2), self.key());
        match self.random.below(20) {
            0..4 => self.publish(owner, key),
            4 => self.withdraw(owner, key),
            5..9 => {
                let id = self.owners[owner].id;
                let words = self.published.get(&(id, key)).map_or(100, |it| it.1);
                self.connect(owner);
                self.pull(owner, key, words);
            }
            9 => {
                // The way is lost.
                let (id, now) = (self.owners[owner].id, self.reader.tcp.now());
                self.happened.losses += 1;
                let is_shared = self.kind == Kind::Shared || self.random.below(2) == 0;
                match &mut self.reader.sharing {
                    Some(shared) if is_shared => {
                        let answer = shared.ways.shut(id, "a test".to_owned(), false, now);
                        self.reader.take_answer(answer);
                    }
                    Some(_) | None => self.reader.lose_way(id),
                }
            }
            10 if self.random.below(2) == 0 => {
                self.happened.rests += 1;
                self.hand.advance(Duration::from_secs(35));
            }
            11 if self.random.below(2) == 0 => {
                self.happened.closes += 1;
                let id = self.owners[owner].id;
                self.reader.close(id);
            }
            12 if self.random.below(4) == 0 => {
                self.happened.deaths += 1;
                let PeerId { role, index, incarnation } = self.owners[owner].id;
                let id = PeerId { role, index, incarnation: incarnation + 1 };
                let paths = open(id, self.kind, self.sharing, Clock::system());
                self.owners[owner] = Owner { paths, id };
                self.published.retain(|it, _| it.0.index != index);
            }
            // The other one, or both, stand still meanwhile.
            13..16 => self.poll(0),
            16 => self.poll(1),
            _ => self.poll(2),
        }
    }

    fn finish(&mut self) {
        let until = Instant::now() + Duration::from_secs(30);
        while !self.wanted.is_empty() {
            assert!(Instant::now() < until, "a pull never ends");
            self.poll(2);
            // Pauses before a link is tried again, and deadlines, are over some time.
            self.happened.rests += 1;
            self.hand.advance(Duration::from_millis(20));
        }
    }

    fn run(mut self) -> u64 {
        for _ in 0..60 {
            self.step();
        }
        self.finish();
        // Whatever was, what is there can be had.
        for owner in 0..2 {
            for key in 0..KEYS {
                self.publish(owner, RegionKey([key; 4]));
            }
        }
        let until = Instant::now() + Duration::from_secs(30);
        let mut left: Vec<_> = self.published.iter().map(|(at, it)| (*at, it.1)).collect();
        while let Some(((id, key), words)) = left.last().copied() {
            assert!(Instant::now() < until, "{id} cannot be had any more");
            let before = self.came;
            let owner = usize::from(id.index);
            self.connect(owner);
            self.pull(owner, key, words);
            self.finish();
            if self.came > before {
                left.pop();
            }
        }
        if let Some(shared) = &self.reader.sharing {
            assert!(shared.copying.is_empty() && shared.waiting.is_empty());
            assert!(shared.asked.len() <= 2);
        }
        // A card may be asked for still.
        while !self.reader.remote.as_ref().is_none_or(Remote::is_idle) {
            assert!(Instant::now() < until, "something of UCX never ends");
            self.poll(2);
        }
        self.came
    }
}

#[test]
fn whatever_happens_to_ways_and_owners_a_pull_ends_once_and_brings_one_publication() {
    let first = setting("CADRE_SEED").unwrap_or(1);
    let runs = setting("CADRE_PATHS_RUNS").unwrap_or(60);
    let (mut came, mut seed) = (0, first);
    while seed < first + runs {
        println!("CADRE_SEED={seed} CADRE_PATHS_RUNS=1");
        came += World::new(seed, Kind::Shared).run();
        seed += 1;
    }
    assert!(came > runs * 6, "{came} pulls brought rows");
}

#[test]
fn whatever_happens_to_ways_of_ucx_a_pull_ends_once_and_brings_one_publication() {
    if let Err(why) = crate::ucx::ucx_here() {
        return println!("skipped: {why}");
    }
    let first = setting("CADRE_SEED").unwrap_or(1);
    let runs = setting("CADRE_PATHS_RUNS").unwrap_or(60) / 6;
    let mut came = 0;
    for seed in first..first + runs {
        println!("CADRE_SEED={seed} CADRE_PATHS_RUNS=6");
        came += World::new(seed, [Kind::Ucx, Kind::Both][seed as usize % 2]).run();
    }
    assert!(came > runs * 6, "{came} pulls brought rows");
}
