//! The network between simulated processes: links, messages, pulls, and what goes wrong with them.
//!
//! It keeps the rules of `docs/exchange.md`: links are directed, a peer has one life, messages of a link arrive in their order or
//! not at all, replies come in the order of their requests, a newer incarnation shuts older ones out, every pull ends once. Of memory
//! there are two kinds: as over TCP, a reply is what was published when it began; as over RDMA, bytes are those that are there when
//! they are read, by then perhaps somebody else's, whatever has become of the link.
//!
//! Invariant: time is given from outside, and everything that happens later lies in one queue.

mod fast;
mod happening;
mod links;
mod lives;
mod pulls;
mod queue;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use cadre_exchange::{Buffer, Event, LandingId, PeerId, Piece, PullId, RegionKey, Role};
use cadre_step::words::Stream;

use self::fast::Fast;
pub(crate) use self::happening::{Chore, Happening, Signal, Thread};
use self::links::Link;
use self::queue::{Moment, Queue};
use crate::faults::Pulled;
use crate::random::Random;

/// Longest greeting, as in `cadre_exchange::Limits`.
const GREETING: u64 = 5_000_000_000;
/// Words of the region that servers measure with: its bytes are of no interest.
const PROBE: RegionKey = RegionKey([u32::MAX; 4]);

/// Number of a process's life; never used twice.
pub(crate) type Life = usize;

/// Where a link lies among all that ever were.
pub(crate) type LinkId = usize;

#[derive(Debug)]
enum Out {
    Message(Vec<u8>),
    Pull(PullId),
}

/// Rows that are published, and the number of the publication: no other one has it.
type Region = (u64, Arc<Buffer>);

#[derive(Debug)]
struct Pull {
    link: LinkId,
    peer: PeerId,
    key: RegionKey,
    pieces: Vec<Piece>,
    bytes: u64,
    /// What has landed, in the order of its pieces, and of which publication.
    landed: u64,
    publication: Option<u64>,
    landing: LandingId,
    /// It was reported; what comes only drains.
    ended: bool,
    /// With its link, and the device writes what it had begun to copy.
    cut_off: bool,
    asked: bool,
    /// The part that is on its way.
    part: u64,
    data: Option<Region>,
    /// When it ends, unless bytes have come over its link for less than its patience.
    deadline: Moment,
    patience: u64,
}

impl Pull {
    /// One byte of a word comes as another, with the part that it is in.
    fn spoil(&self, spoilt: Option<(Life, u64)>, room: &mut Landing) {
        let byte = spoilt.map_or(0, |it| it.1).min(self.bytes - 1);
        if (self.landed..self.landed + self.part).contains(&byte) {
            room.memory().bytes_mut()[byte as usize] ^= 0x10;
        }
    }
}

#[derive(Debug, Default)]
struct Landing {
    bytes: usize,
    /// The machine gives the memory when somebody writes there.
    memory: Option<Buffer>,
    /// What was pulled into it last.
    key: Option<RegionKey>,
    /// Pulls that write to it.
    busy: Vec<PullId>,
    /// What pulls that ended have left, by the first byte that they wrote.
    kept: BTreeMap<u64, Kept>,
    discarded: bool,
}

/// Where a pull goes on that is asked for again.
#[derive(Debug)]
struct Kept {
    peer: PeerId,
    key: RegionKey,
    pieces: Vec<Piece>,
    landed: u64,
    publication: u64,
    link: LinkId,
}

/// One process's end of the network.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) me: PeerId,
    /// When it began.
    pub(crate) opened: u64,
    pub(crate) alive: bool,
    /// Its machine answers that nobody is there.
    pub(crate) answers: bool,
    pub(crate) paused: bool,
    pub(crate) events: Vec<Event>,
    regions: Fast<RegionKey, Region>,
    landings: Fast<LandingId, Landing>,
    pulls: Fast<PullId, Pull>,
    /// Pulls of results of a step and phase.
    results: Fast<[u32; 2], usize>,
    /// By peer: the link that it opened to us, the one that we opened.
    links: BTreeMap<PeerId, [Option<LinkId>; 2]>,
    newest: BTreeMap<(Role, u16), u32>,
    held: Vec<Signal>,
    last_id: u64,
    /// Pulls that found another incarnation than the one that they were from.
    pub(crate) found: Fast<PullId, u32>,
}

/// Two processes that do not hear each other for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) ends: (Life, Life),
    pub(crate) since: u64,
    pub(crate) until: u64,
    /// Nothing is refused: what was sent arrives afterwards.
    pub(crate) silent: bool,
}

/// See the module.
pub(crate) struct Net {
    pub(crate) now: u64,
    pub(crate) random: Random,
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) cuts: Vec<Cut>,
    /// Of whom what does not come to whom, where it is pulled.
    pub(crate) dry: Vec<(Life, Life, Pulled)>,
    /// Whose words, where they are pulled, come with which byte changed.
    pub(crate) spoilt: Option<(Life, u64)>,
    /// Nanoseconds that a message takes at most.
    pub(crate) slowest: u64,
    /// Nanoseconds of a byte of rows.
    pub(crate) byte: u64,
    pub(crate) rdma: bool,
    /// What a device has begun to copy it writes, whatever became of the pull.
    pub(crate) lasting: bool,
    /// Bytes of a part of a pull, but for pulls of more than a few parts.
    pub(crate) part: u64,
    /// Percent of the messages that come twice, the second time behind others.
    pub(crate) repeats: u64,
    /// Bytes that may wait for a peer.
    pub(crate) queue: usize,
    /// The moment of time 0, for whoever has a clock of the system.
    pub(crate) epoch: Instant,
    /// What a process did against the rules of the exchange.
    pub(crate) wrong: Option<String>,
    /// Messages that found a full queue, and how often a sender heard of room after that.
    pub(crate) full: [u64; 2],
    /// Parcels whose rows were copied out of a landing to which others were still to come.
    pub(crate) copied: u64,
    /// Parts of dK or dV that were taken while others of their phase were pulled.
    pub(crate) parts: u64,
    /// Words that were pulled.
    pub(crate) words: u64,
    /// Pulls that went on where they had stopped, and those of them that found another publication.
    pub(crate) resumed: [u64; 2],
    /// Whether the last word of each to each is kept.
    pub(crate) spies: bool,
    pub(crate) spied: BTreeMap<(Life, PeerId), (Stream, u64)>,
    publications: u64,
    /// All that ever were.
    links: Vec<Link>,
    happenings: Queue,
    /// By life: whether its turn comes.
    turns: Vec<bool>,
    /// By life: who listens now where it did.
    places: Vec<Life>,
}

impl Net {
    pub(crate) fn new(random: Random) -> Self {
        Self {
            now: 0,
            random,
            endpoints: Vec::new(),
            cuts: Vec::new(),
            dry: Vec::new(),
            spoilt: None,
            slowest: 1_000_000,
            byte: 1,
            rdma: false,
            lasting: false,
            part: u64::MAX,
            repeats: 0,
            queue: 8 << 20,
            epoch: Instant::now(),
            wrong: None,
            full: [0; 2],
            copied: 0,
            parts: 0,
            words: 0,
            resumed: [0; 2],
            spies: false,
            spied: BTreeMap::new(),
            publications: 0,
            links: Vec::new(),
            happenings: Queue::default(),
            turns: Vec::new(),
            places: Vec::new(),
        }
    }

    pub(crate) fn at(&mut self, when: u64, what: Happening) {
        self.happenings.at(when.max(self.now), what);
    }

    pub(crate) fn soon(&mut self, most: u64, what: Happening) {
        let when = self.now + self.random.within(1_000, most.max(1_001));
        self.at(when, what);
    }

    /// The next thing that happens; time goes on to it.
    pub(crate) fn pop(&mut self) -> Option<Happening> {
        let (when, what) = self.happenings.pop()?;
        self.now = when;
        if let Happening::Turn(life) = what {
            self.turns[life] = false;
        }
        Some(what)
    }

    /// A process has something to look at.
    pub(crate) fn wake(&mut self, life: Life) {
        if !self.endpoints[life].paused && !std::mem::replace(&mut self.turns[life], true) {
            self.happenings.turn(self.now, life);
        }
    }

    /// Whether the landing of a pull is kept until it is asked for again. It may be busy then, where a device writes what it likes.
    pub(crate) fn resumes(&self) -> bool {
        !self.rdma
    }

    /// Whose memory is read by RDMA where a process had its own: what came in its place.
    fn heir(&self, life: Life) -> Option<Life> {
        let gone = &self.endpoints[life];
        let (who, than) = ((gone.me.role, gone.me.index), gone.me.incarnation);
        if !self.rdma || gone.alive {
            return None;
        }
        let is_heir = |it: &Endpoint| {
            it.alive && (it.me.role, it.me.index) == who && it.me.incarnation > than
        };
        self.endpoints.iter().position(is_heir)
    }

    pub(crate) fn publish(&mut self, life: Life, key: RegionKey, rows: Arc<Buffer>) {
        self.publications += 1;
        self.endpoints[life].regions.insert(key, (self.publications, rows));
    }

    pub(crate) fn withdraw(&mut self, life: Life, key: RegionKey) {
        self.endpoints[life].regions.remove(&key);
    }

    pub(crate) fn say(&mut self, life: Life, event: Event) {
        if self.endpoints[life].alive {
            self.endpoints[life].events.push(event);
            self.wake(life);
        }
    }

    pub(crate) fn open(&mut self, me: PeerId) -> Life {
        self.turns.push(false);
        self.places.push(self.endpoints.len());
        self.endpoints.push(Endpoint {
            me,
            opened: self.now,
            alive: true,
            answers: true,
            paused: false,
            events: Vec::new(),
            regions: Fast::default(),
            landings: Fast::default(),
            pulls: Fast::default(),
            results: Fast::default(),
            links: BTreeMap::new(),
            newest: BTreeMap::new(),
            held: Vec::new(),
            last_id: 0,
            found: Fast::default(),
        });
        self.endpoints.len() - 1
    }

    /// How long a life finds out over what rows come: not at all, for a while, or for longer than anybody waits.
    pub(crate) fn finds_for(life: Life) -> u64 {
        [0, 3_000_000_000, 6_000_000_000][life % 3]
    }

    /// Over what rows come, as far as a life knows.
    pub(crate) fn path(&self, life: Life) -> Option<&'static str> {
        let found = self.endpoints[life].opened + Self::finds_for(life);
        (found <= self.now).then_some("simulated")
    }

    /// The first life that listened there names the place.
    pub(crate) fn address(&self, life: Life) -> String {
        let place = self.places.iter().position(|it| *it == life).unwrap_or(life);
        format!("life:{place}")
    }

    /// A process listens where another one did.
    pub(crate) fn takes_place(&mut self, life: Life, of: Life) {
        for it in self.places.iter_mut().filter(|it| **it == of) {
            *it = life;
        }
    }

    fn cut(&self, a: Life, b: Life) -> Option<Cut> {
        let between = |it: &&Cut| it.ends == (a, b) || it.ends == (b, a);
        self.cuts.iter().filter(between).copied().find(|it| it.until > self.now)
    }

    fn delay(&mut self) -> u64 {
        // Most are fast, some are not.
        let most = if self.random.chance(90) { self.slowest / 8 } else { self.slowest };
        self.random.within(20_000, most.max(20_001))
    }

    /// When something that leaves now arrives, behind what left before.
    fn arrival(&mut self, link: LinkId, back: bool, bytes: u64) -> u64 {
        let delay = self.delay() + bytes * self.byte;
        let it = &self.links[link];
        let cut = it.acceptor.and_then(|acceptor| self.cut(it.opener, acceptor));
        let from = cut.map_or(self.now, |it| it.until);
        let it = &mut self.links[link];
        let when = (from + delay).max(it.last[usize::from(back)] + 1);
        it.last[usize::from(back)] = when;
        if back {
            it.come(when - bytes * self.byte, when, self.now);
        }
        when
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        match signal {
            Signal::Dial(link) => self.dialed(link),
            Signal::GreetingLate(link) => {
                let Link { opener, peer, opener_holds, open, .. } = self.links[link];
                if opener_holds && !open {
                    self.fail(opener, peer, "a silent greeting");
                }
            }
            Signal::Opened(link) => self.opened(link),
            Signal::Message(link, bytes) => self.message(link, bytes),
            Signal::Again(link, bytes) => self.again(link, bytes),
            Signal::Ask(link, life, id) => self.asked(link, life, id),
            Signal::Copied(link, life, id) => self.copied(link, life, id),
            Signal::Late(life, id) => self.late(life, id),
            Signal::Freed(life, id) => self.freed(life, id),
            Signal::Farewell(life, link) => self.farewell(life, link),
        }
    }

    /// Whether a server pulls what it measures a link with.
    pub(crate) fn is_measuring(&self) -> bool {
        let lands = |it: &Endpoint| it.landings.values().any(|it| it.key == Some(PROBE));
        // The end of a pull that it has not heard of yet: the next one may follow.
        let hears = |it: &Endpoint| !it.events.is_empty() && lands(it);
        let pulls = |it: &Endpoint| it.pulls.values().any(|it| it.key == PROBE);
        self.endpoints.iter().any(|it| it.alive && (pulls(it) || hears(it)))
    }

    /// What a process still holds.
    pub(crate) fn holdings(&self, life: Life) -> (usize, usize, usize) {
        let end = &self.endpoints[life];
        let regions = end.regions.keys().filter(|it| **it != PROBE).count();
        (regions, end.landings.len(), end.pulls.len())
    }
}
