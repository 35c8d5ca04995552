//! A member of the job that knows the secret and means harm: beside what its process says in earnest, it says anything.
//!
//! In: who it is, the job, random numbers. Out: envelopes for every process, well-formed ones with contents of its own choice and
//! spoilt ones: ids of others, indexes that do not exist, huge numbers, steps that are over or far away, words that only the
//! conductor may say, acknowledgements and suspicions without a reason. Most jobs hear a few kinds of them only, so that they get far.
//!
//! It cannot be kept from standing in the way: a job that waits for what it owes ends when its process does. What it may not do is
//! make another process panic, keep memory there, or change bits of those for whom it does not speak.

mod speaking;

use std::collections::BTreeSet;

use cadre_exchange::{Buffer, PeerId, RegionKey};
use cadre_planner::{DocumentId, Stretch};
use cadre_protocol::{
    Acks, At, Filler, Heartbeat, Message, Nanos, Round, ServerId, TrainerId, Why, Work,
};
use cadre_step::envelope::{
    Ending, Envelope, Lengths, NanoLengths, Said, ServerStep, Stands, StepDone,
};
use cadre_step::header::Header;
use cadre_step::words::{Body, Life, Published, Stream};

use crate::job::Job;
use crate::random::{Random, hash};

/// What it can say: messages of the protocol, words, answers to words, noise.
const KINDS: u64 = 24;

/// See the module.
pub(crate) struct Hostile {
    random: Random,
    /// What it says.
    kinds: Vec<u64>,
    /// In percent: envelopes that are spoilt, and those that it says under another name.
    spoilt: u64,
    others: u64,
    /// Names under which it has spoken.
    voices: BTreeSet<PeerId>,
    /// It has said in the conductor's name what may let rows go.
    lets_go: bool,
    publication: u64,
}

impl Hostile {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(hash(&[seed, 83]));
        let all = random.chance(20);
        let some: Vec<_> = (0..random.within(1, 3)).map(|_| random.within(0, KINDS - 1)).collect();
        let kinds = if all { (0..KINDS).collect() } else { some };
        let (spoilt, others) = (*random.pick(&[0, 5, 30]), *random.pick(&[0, 0, 0, 10, 50]));
        Self {
            random,
            kinds,
            spoilt,
            others,
            voices: BTreeSet::new(),
            lets_go: false,
            publication: 1 << 40,
        }
    }

    /// Whether it has spoken under a name.
    pub(crate) fn speaks_for(&self, id: PeerId) -> bool {
        self.voices.contains(&id)
    }

    /// Whether a rank may find something wrong for it: one for whom it has spoken, since it may have acknowledged what did not come.
    /// In the conductor's name it may have let rows go that others still needed.
    pub(crate) fn may_break(&self, id: PeerId, wrong: &str) -> bool {
        self.speaks_for(id) || self.lets_go && wrong.contains("has wrong bits of")
    }

    /// Under how many names it has spoken.
    pub(crate) fn voices(&self) -> usize {
        self.voices.len()
    }

    /// Whether a reason names somebody for whom it has spoken, or what it has said.
    pub(crate) fn explains(&self, reason: &str) -> bool {
        let names = |id: &PeerId| {
            let rank = format!("rank {}", id.index);
            reason.contains(&format!("{} {}", id.role, id.index)) || reason.contains(&rank)
        };
        // Who has reset its lane of the conductor's words hears no end, and who was told other addresses in the conductor's name
        // reaches nobody; who waits for it in the all-reduce stands still.
        let deaf = ["nothing heard", " dead;"].iter().any(|it| reason.contains(it))
            && self.speaks_for(PeerId::trainer(0, 0));
        // A header that it has said in the conductor's name.
        let misled = reason.contains("give every rank the same model")
            && self.speaks_for(PeerId::trainer(0, 0));
        let waits = reason.contains("has not said that step");
        // It said so of itself, in words that are spoilt, or announced no rows.
        let said = ["look where the main thread of its process is", "no rank has rows"];
        self.voices.iter().any(names)
            || reason.contains(LIE)
            || deaf
            || misled
            || waits
            || said.iter().any(|it| reason.contains(it))
            || reason.contains("announced it")
    }

    fn small(&mut self, below: u64) -> u64 {
        let random = &mut self.random;
        match random.within(0, 19) {
            0 => u64::MAX,
            1 => u64::MAX - 1,
            2 => u32::MAX.into(),
            3 => below,
            _ => random.within(0, below.max(1) - 1),
        }
    }

    fn at(&mut self, job: &Job) -> At {
        let phases = u64::from(job.layers.count()) * job.nanos as u64 * 2;
        At::new(self.small(job.steps), self.small(phases) as u32)
    }

    fn trainer(&mut self, job: &Job) -> TrainerId {
        TrainerId(self.small(job.trainers.into()) as u16)
    }

    fn server(&mut self, job: &Job) -> ServerId {
        let index = self.small(job.servers.max(1).into()) as u16;
        ServerId { index, incarnation: self.small(2) as u32 }
    }

    fn somebody(&mut self, job: &Job) -> PeerId {
        if self.random.chance(50) {
            PeerId::trainer(self.trainer(job).0, *self.random.pick(&[0, 0, 0, 1]))
        } else {
            let ServerId { index, incarnation } = self.server(job);
            PeerId::server(index, incarnation)
        }
    }

    fn some<T>(&mut self, most: u64, mut of: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let most = if self.random.chance(3) { 50 * most } else { most };
        (0..self.random.within(0, most)).map(|_| of(self)).collect()
    }

    fn works(&mut self) -> Vec<Work> {
        self.some(4, |it| Work(it.small(8) as u32))
    }

    fn span(&mut self) -> Nanos {
        *self.random.pick(&[Nanos(0), Nanos::from_millis(60_000), Nanos(u64::MAX)])
    }

    fn acks(&mut self, job: &Job) -> Acks {
        let through = self.random.chance(30).then(|| self.at(job));
        Acks { through, works: self.some(4, |it| (it.at(job), Work(it.small(8) as u32))) }
    }

    fn message(&mut self, kind: u64, job: &Job) -> Message {
        match kind {
            0 => {
                let (at, acks) = (self.at(job), self.acks(job));
                let (round, digest) = (Round(self.small(3) as u32), self.random.next());
                Message::Doorbell { at, round, acks, digest }
            }
            1 => Message::Finished { at: self.at(job), works: self.works() },
            2 => Message::Ack { acks: self.acks(job) },
            3 => Message::PhaseDone { at: self.at(job) },
            4 => Message::Watermark { at: self.at(job) },
            5 => {
                let filler = |it: &mut Self| match it.random.within(0, 3) {
                    0 => None,
                    1 => Some(Filler::InPlace(it.trainer(job))),
                    2 => Some(Filler::Standby(it.trainer(job))),
                    _ => Some(Filler::Server(it.server(job))),
                };
                let slots = u64::from(job.servers) + 1;
                let tables = self.some(3, |it| it.some(slots, filler));
                let round =
                    if self.random.chance(80) { tables.len() as u64 } else { self.small(3) };
                Message::Round { step: self.small(job.steps), round: Round(round as u32), tables }
            }
            6 => Message::Suspect {
                server: self.server(job),
                why: match self.at(job) {
                    _ if self.random.chance(50) => Why::Broken,
                    At { step, phase } => Why::Late { step, phase },
                },
                lasting: self.span(),
            },
            7 => Message::Unreached { trainers: self.some(3, |it| (it.trainer(job), it.span())) },
            8 => Message::Leave { server: self.server(job) },
            9 => Message::Spare { watermark: self.random.chance(50).then(|| self.at(job)) },
            10 => {
                let watermark = self.random.chance(50).then(|| self.at(job));
                Message::Pulse { watermark, ask: self.some(3, |it| it.server(job)) }
            }
            _ => Message::Heartbeat(Box::new(self.beat(job))),
        }
    }

    fn beat(&mut self, job: &Job) -> Heartbeat {
        Heartbeat {
            watermark: self.random.chance(50).then(|| self.at(job)),
            done: self.random.chance(30).then(|| self.at(job)),
            rounds: self.some(3, |it| (it.small(job.steps), Round(it.small(3) as u32))),
            owes: self.random.chance(50).then(|| (self.at(job), self.span())),
            unreached: self.some(3, |it| (it.trainer(job), it.span())),
            reached: self.some(3, |it| it.server(job)),
            leaves: self.random.chance(20),
        }
    }

    fn lengths(&mut self, job: &Job, me: PeerId) -> Lengths {
        // As they should be, for another step or another rank; or anything.
        if self.random.chance(30) {
            let (step, of) = (self.small(job.steps), self.small(job.steps));
            let rank = if self.random.chance(50) { me.index } else { self.trainer(job).0 };
            return Lengths { step, ..job.lengths(of % job.steps, rank % job.trainers) };
        }
        let nano = |it: &mut Self| NanoLengths {
            documents: it.some(3, |it| (it.small(5) as u32, it.small(40) as u32)),
            stretches: it.some(3, |it| {
                let (start, end) = (it.small(10) as u32, it.small(40) as u32);
                Stretch { document: DocumentId(it.small(5) as u32), start, end }
            }),
        };
        let turns = job.turns(self.small(job.steps));
        Lengths { step: self.small(job.steps), turns, nanos: self.some(3, nano) }
    }

    fn said(&mut self, kind: u64, job: &Job, me: PeerId) -> Said {
        let number =
            |it: &mut Self| *it.random.pick(&[0.0, -1.0, 1.0, 1e300, f64::NAN, f64::INFINITY]);
        match kind {
            12 => Said::Lengths(self.lengths(job, me)),
            13 => Said::Steps(self.small(job.steps + 1)),
            14 if self.random.chance(50) => Said::Standing(Stands::No),
            14 => Said::Standing(Stands::Still(self.text())),
            15 => {
                let text = include_str!("../../../testing/header.json");
                let any: Header = serde_json::from_str(text).expect("a header");
                let header = Box::new(Header { step: self.small(job.steps), ..any });
                Said::Header { header, trainers: self.addresses(job) }
            }
            16 => Said::Addresses(self.addresses(job)),
            17 => {
                let (loss, seconds) = (number(self) as f32, number(self));
                let (step, tokens) = (self.small(job.steps), self.random.next());
                Said::StepDone(StepDone { step, loss, tokens, seconds, ..StepDone::default() })
            }
            18 => {
                let (step, tasks) = (self.small(job.steps), self.small(9) as u32);
                let (busy_seconds, bytes_pulled) = (number(self), self.random.next());
                Said::ServerStep(ServerStep { step, tasks, busy_seconds, bytes_pulled })
            }
            19 => Said::End(match self.random.within(0, 2) {
                0 => Ending::Completed,
                1 => Ending::Stopped { checkpoint: true },
                _ => Ending::Failed { reason: self.text(), bad_input: true },
            }),
            20 => Said::Leaving,
            _ => Said::Failed { reason: self.text(), bad_input: self.random.chance(50) },
        }
    }

    fn text(&mut self) -> String {
        let times = if self.random.chance(10) { 10_000 } else { 1 };
        LIE.repeat(times)
    }

    fn addresses(&mut self, job: &Job) -> Vec<(PeerId, String)> {
        self.some(3, |it| {
            let address = match it.random.within(0, 2) {
                0 => String::new(),
                1 => "nowhere".into(),
                _ => format!("life:{}", it.small(4)),
            };
            (it.somebody(job), address)
        })
    }

    /// Its envelope, and what it publishes for it.
    fn envelope(
        &mut self,
        job: &Job,
        me: PeerId,
        spied: Option<(Stream, u64)>,
    ) -> (Envelope, Option<(RegionKey, Buffer)>) {
        let kind = *self.random.pick(&self.kinds.clone());
        // The stream of its process, where that has said anything; or one of its own.
        let life = Life(*self.random.pick(&[7, 8, u64::MAX]));
        let own = Stream { life, era: self.small(2) as u32 };
        let (stream, next) = spied.filter(|_| self.random.chance(70)).unwrap_or((own, 0));
        match kind {
            11 => {
                let by = if self.random.chance(50) { life } else { stream.life };
                (Envelope::Beat { by, beat: Box::new(self.beat(job)) }, None)
            }
            0..11 => (Envelope::Protocol(self.message(kind, job)), None),
            22 => {
                let stream = Stream { era: self.small(2) as u32, ..stream };
                (Envelope::Heard { by: life, stream, through: self.small(5) }, None)
            }
            _ => {
                let number = next.wrapping_add(self.small(3));
                let bytes = postcard::to_stdvec(&self.said(kind, job, me)).expect("plain data");
                let (body, published) = self.body(bytes);
                (Envelope::Word { stream, number, body }, published)
            }
        }
    }

    fn body(&mut self, bytes: Vec<u8>) -> (Body, Option<(RegionKey, Buffer)>) {
        match self.random.within(0, 9) {
            0 => (Body::Here(self.some(40, |it| it.random.next() as u8)), None),
            // Of something that nobody has published, or of another length.
            1 => {
                let (publication, bytes) = (self.small(3), self.small(5_000));
                let digest = self.random.next();
                (Body::There(Published { publication, bytes, digest }), None)
            }
            2..5 => {
                self.publication += 1;
                let publication = self.publication;
                let mut rows = Buffer::zeroed(bytes.len());
                rows.bytes_mut().copy_from_slice(&bytes);
                let right = xxhash_rust::xxh3::xxh3_64(&bytes);
                let digest = if self.random.chance(80) { right } else { right ^ 1 };
                let bytes = bytes.len() as u64;
                let key = [u32::MAX, u32::MAX - 1, publication as u32, (publication >> 32) as u32];
                let there = Body::There(Published { publication, bytes, digest });
                (there, Some((RegionKey(key), rows)))
            }
            _ => (Body::Here(bytes), None),
        }
    }

    /// What comes over the wire.
    fn bytes(&mut self, envelope: &Envelope) -> Vec<u8> {
        let mut bytes = postcard::to_stdvec(envelope).expect("plain data");
        if self.random.chance(self.spoilt) {
            let at = self.random.within(0, bytes.len() as u64 - 1) as usize;
            match self.random.within(0, 3) {
                0 => bytes.truncate(at),
                1 => bytes[at] ^= 1 << self.random.within(0, 7),
                // A length that says more than there is.
                2 => bytes[at] = 0xff,
                _ => bytes = self.some(40, |it| it.random.next() as u8),
            }
        }
        bytes
    }
}

/// What its reasons say.
const LIE: &str = "a lie ";
