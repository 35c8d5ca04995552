//! What a step costs the conductor's IO thread: words and messages of all peers decoded, headers made and told, the watermark moved
//! and broadcast, the step reported. The system's part of sending and receiving is not counted, nor are the other machines of its
//! process; what the planning thread does is printed beside.
//!
//! One step of 512 trainers, 64 dedicated servers, 64 layers, 4 nano-batches and 200,000 documents, and the next one's header while
//! it runs; `CADRE_SCALE=32x8x4x2x2000` asks for another size. Prints milliseconds and the process's most memory, writes
//! `target/bench/conductor.json` beside the bars of 200 ms and 256 MiB.

#![allow(clippy::wildcard_enum_match_arm, reason = "a bench picks two of many")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cadre_control::{AttentionPlace, Settings as JobSettings};
use cadre_crds::{Encryption, OnPoolLoss, Wire};
use cadre_exchange::{
    Buffer, Error, Event, LandingId, PeerId, Piece, PullId, RegionKey, RingError, Waker,
};
use cadre_kernels::device;
use cadre_planner::{Costs, Document, Heads, Layout, Mask};
use cadre_protocol::conductor::Event as Conducted;
use cadre_protocol::{At, Heartbeat, Message, Nanos, Peer, Round, ServerId, Settings, TrainerId};
use cadre_step::conduct::{Draft, Offer, Standby, View};
use cadre_step::envelope::{Envelope, Lengths, NanoLengths, Said, ServerStep, StepDone};
use cadre_step::header::{KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};
use cadre_worker::io::Request;
use cadre_worker::io::clock::Clock;
use cadre_worker::io::conducting::Conducting;
use cadre_worker::io::exchange::Exchange;
use cadre_worker::io::output::Output;
use cadre_worker::io::planning::{self, Wanted};
use cadre_worker::io::shared::Shared;
use cadre_worker::memory::{Host, HostRows};
use cadre_worker::trace::Tracer;

const BAR_MILLIS: f64 = 200.0;
const BAR_MEBIBYTES: f64 = 256.0;

/// Takes all messages, and sends none.
struct Mute {
    waker: Waker,
    rings: u64,
}

impl Exchange for Mute {
    type Memory = HostRows;

    fn place(&self) -> &Host {
        &Host
    }

    fn path(&self, _peer: PeerId) -> &'static str {
        "mute"
    }

    fn resumes(&self) -> bool {
        false
    }

    fn address(&self) -> String {
        String::new()
    }

    fn connect(&mut self, _peer: PeerId, _address: &str) {}

    fn publish(&mut self, _key: RegionKey, _memory: &HostRows) {}

    fn withdraw(&mut self, _key: RegionKey) {}

    fn land(&mut self, _bytes: usize) -> Result<LandingId, device::Error> {
        unreachable!("the conductor pulls nothing here")
    }

    fn early(
        &mut self,
        _landing: LandingId,
        _own: &[(HostRows, &[Piece])],
    ) -> Result<Option<HostRows>, device::Error> {
        Ok(None)
    }

    fn is_busy(&self, _landing: LandingId) -> bool {
        false
    }

    fn take(&mut self, _landing: LandingId) -> Result<Buffer, Error> {
        unreachable!("the conductor pulls nothing here")
    }

    fn discard(&mut self, _landing: LandingId) {}

    fn pull(
        &mut self,
        _peer: PeerId,
        _key: RegionKey,
        _pieces: Vec<Piece>,
        _landing: LandingId,
        _patience: Duration,
    ) -> PullId {
        unreachable!("the conductor pulls nothing here")
    }

    fn ring(&mut self, _peer: PeerId, _message: &[u8]) -> Result<(), RingError> {
        self.rings += 1;
        Ok(())
    }

    fn poll(&mut self, _timeout: Duration, _events: &mut Vec<Event>) {}

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn close(&mut self, _peer: PeerId) {}
}

/// The conductor, what it shares, and the time that its threads took.
struct Job {
    conducting: Conducting,
    shared: Shared<Mute>,
    nanos: Arc<AtomicU64>,
    io: Duration,
    plan: Duration,
    reports: usize,
}

impl Job {
    /// The IO thread does something, and what follows from it.
    fn turn(&mut self, act: impl FnOnce(&mut Conducting, &mut Shared<Mute>)) {
        let start = Instant::now();
        act(&mut self.conducting, &mut self.shared);
        let mut wanted = self.settle();
        self.io += start.elapsed();
        while let Some(it) = wanted.pop() {
            let start = Instant::now();
            let done = planning::done(it);
            self.plan += start.elapsed();
            let start = Instant::now();
            match done {
                Request::Made(made) => self.conducting.made(&mut self.shared, *made),
                Request::Planned(planned) => {
                    self.conducting.planned(&mut self.shared, *planned);
                }
                other => panic!("{other:?}"),
            }
            wanted.extend(self.settle());
            self.io += start.elapsed();
        }
    }

    /// Hands on what the conductor has put; what is left is the planning thread's.
    fn settle(&mut self) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        while let Some(output) = self.shared.outputs.take() {
            match output {
                Output::Plan(it) => wanted.push(it),
                Output::Begin(ready) => {
                    self.shared.begin(ready.planned, ready.first);
                    self.conducting.begun(&mut self.shared);
                }
                Output::Report(_) => self.reports += 1,
                Output::Ending(it) => panic!("the job ends: {it:?}"),
                _ => {}
            }
        }
        wanted
    }

    /// A peer's message or word comes.
    fn hear(&mut self, from: Peer, bytes: &[u8]) {
        self.turn(|conducting, shared| {
            match postcard::from_bytes(bytes).expect("what was encoded below") {
                Envelope::Protocol(message) => {
                    conducting.handle(shared, Conducted::Message { from, message });
                }
                other => panic!("{other:?}"),
            }
        });
    }

    fn word(&mut self, from: Peer, bytes: &[u8]) {
        self.turn(|conducting, shared| {
            let said: Said = postcard::from_bytes(bytes).expect("what was encoded below");
            conducting.told(shared, from, said);
        });
    }

    fn later(&mut self, span: Nanos) {
        self.nanos.fetch_add(span.0, Ordering::Relaxed);
        let now = self.shared.now();
        if self.conducting.next_deadline().is_some_and(|it| it <= now) {
            self.turn(|conducting, shared| conducting.handle(shared, Conducted::Tick));
        }
    }
}

fn main() {
    let text = std::env::var("CADRE_SCALE").unwrap_or_else(|_| "512x64x64x4x200000".into());
    let numbers: Vec<u32> = text.split('x').filter_map(|it| it.parse().ok()).collect();
    let &[trainers, servers, layers, nanos, documents] = &numbers[..] else {
        panic!("CADRE_SCALE={text} is not five numbers, such as 512x64x64x4x200000")
    };
    let [trainers, servers, layers] = [trainers, servers, layers].map(|it| it as u16);
    let mut job = begin(trainers, servers, layers);
    let peers: Vec<_> = (0..trainers)
        .map(|it| Peer::Trainer(TrainerId(it)))
        .chain((0..servers).map(|index| Peer::Server(ServerId { index, incarnation: 0 })))
        .collect();
    let (all, others) = peers.split_at(trainers.into());
    let lengths = |step| -> Vec<Vec<u8>> {
        let each = told(step, trainers, nanos, documents / nanos);
        each.into_iter().map(|it| encoded(&Said::Lengths(it))).collect()
    };
    let (first, second) = (lengths(0), lengths(1));
    let announce = |job: &mut Job, each: &[Vec<u8>]| {
        for (&from, bytes) in all.iter().zip(each) {
            job.word(from, bytes);
        }
    };
    announce(&mut job, &first);
    // From here on one step runs, as each of a long job does: with the lengths and the header of the next.
    (job.io, job.plan, job.shared.provider.rings) = (Duration::ZERO, Duration::ZERO, 0);
    announce(&mut job, &second);
    let header = job.io;
    let phases = 2 * u32::from(layers) * nanos;
    for phase in 0..phases {
        let at = At::new(0, phase);
        let done = protocol(Message::PhaseDone { at });
        for &from in all {
            job.hear(from, &done);
        }
        // Phases of 20 ms, and a heartbeat of everybody after ten.
        job.later(Nanos::from_millis(20));
        if phase % 10 == 9 {
            let rounds = vec![(0, Round(0)), (1, Round(0))];
            let of = |done| Heartbeat {
                watermark: Some(at),
                done,
                rounds: rounds.clone(),
                ..Heartbeat::default()
            };
            let beats = [Some(at), None].map(|it| protocol(Message::Heartbeat(of(it))));
            for (peers, bytes) in [all, others].into_iter().zip(&beats) {
                for it in peers {
                    job.hear(*it, bytes);
                }
            }
        }
    }
    let running = job.io;
    for (from, server) in (0..).zip(others) {
        let done = ServerStep { step: 0, tasks: from, busy_seconds: 1.0, bytes_pulled: 1 };
        job.word(*server, &encoded(&Said::ServerStep(done)));
    }
    let done = encoded(&Said::StepDone(StepDone::default()));
    for it in all {
        job.word(*it, &done);
    }
    assert_eq!(job.reports, 1, "the step is reported");
    let ms = |it: Duration| it.as_secs_f64() * 1e3;
    let memory = most_memory();
    println!(
        "conductor of {text}: IO thread {:.0} ms a step (lengths and header {:.0}, phases {:.0}, end {:.0}), bar {BAR_MILLIS} ms; \
         planning thread {:.0} ms; {} messages sent; {memory:.0} MiB, bar {BAR_MEBIBYTES} MiB",
        ms(job.io),
        ms(header),
        ms(running.saturating_sub(header)),
        ms(job.io.saturating_sub(running)),
        ms(job.plan),
        job.shared.provider.rings,
    );
    let case = |name: &str, ours: f64, bar: f64, unit: &str| serde_json::json!({"case": name, "ours": ours, "peer": bar, "peer_name": "bar", "unit": unit, "ratio": bar / ours});
    let list = vec![
        case(&format!("IO thread, a step of {text}"), ms(job.io), BAR_MILLIS, "ms"),
        case(&format!("most memory, {text}"), memory, BAR_MEBIBYTES, "MiB"),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&list).expect("plain data");
    std::fs::write(folder.join("conductor.json"), text).expect("the target folder can be written");
}

fn encoded(said: &Said) -> Vec<u8> {
    postcard::to_stdvec(said).expect("words are plain data")
}

fn protocol(message: Message) -> Vec<u8> {
    postcard::to_stdvec(&Envelope::Protocol(message)).expect("a small message")
}

/// The conductor of a job whose trainers and servers are all there.
fn begin(trainers: u16, servers: u16, layers: u16) -> Job {
    let draft = Draft {
        trainers,
        layers: Layers::alike(Kind::causal(Heads { query: 8, kv: 2, dim: 128 }), layers)
            .expect("there is a layer"),
        kv_heads: KvHeads::Together,
        wire: Wire::Bf16,
        seed: 1,
        numerics: "bench".into(),
        reproducible: true,
        placement: Placement::Pool,
        costs: vec![Costs::default()],
        standby: Standby::No,
        trainer_memory: 1 << 40,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    };
    let settings = JobSettings {
        job: "bench".into(),
        attempt: 1,
        trainers,
        attention: AttentionPlace::Pool,
        wire: Wire::Bf16,
        reproducible: true,
        encryption: Encryption::Off,
        on_pool_loss: OnPoolLoss::Fail,
        pool_wait_seconds: 0,
        suspect_after_milliseconds: 1000,
        trainer_suspect_after_seconds: 30,
        stalled_after_seconds: 600,
        checkpoints: "nowhere".into(),
        checkpoints_kept: 3,
        failovers: 0,
        resume: None,
        headers: None,
        faults: Vec::new(),
    };
    let nanos = Arc::<AtomicU64>::default();
    let clock = Clock::counted(Instant::now(), Arc::clone(&nanos));
    let waker = Waker::new().expect("an event counter");
    let mute = Mute { waker, rings: 0 };
    let mut shared = Shared::new(Peer::CONDUCTOR, (mute, clock), Tracer::off());
    let mut conducting = Conducting::new(draft, Settings::default(), 0, &settings, Nanos(0));
    let list: Vec<_> =
        (0..trainers).map(|it| (PeerId::trainer(it, 0), "127.0.0.1:1".to_owned())).collect();
    for (id, address) in &list {
        shared.know(*id, address);
    }
    conducting.trainers(&mut shared, list);
    let offer = |index| Offer {
        weight: 100,
        home: None,
        memory: Some(1 << 40),
        member: Some(Member::Server { index, incarnation: 0, address: "127.0.0.1:1".into() }),
        numerics: None,
    };
    let number = ViewNumber { term: 1, counter: 1 };
    conducting.view(&mut shared, View { number, slots: (0..servers).map(offer).collect() });
    let (io, plan) = (Duration::ZERO, Duration::ZERO);
    Job { conducting, shared, nanos, io, plan, reports: 0 }
}

/// What each trainer holds of a step: documents of 16 to 2,015 rows, end to end over all of them.
fn told(step: u64, trainers: u16, nanos: u32, documents: u32) -> Vec<Lengths> {
    let mut told = vec![Lengths { step, turns: None, nanos: Vec::new() }; trainers.into()];
    for nano in 0..nanos {
        let rows: Vec<u32> = (0..documents)
            .map(|it| 16 + (it * 7 + nano).wrapping_mul(2_654_435_761) % 2_000)
            .collect();
        let sum: u64 = rows.iter().map(|it| u64::from(*it)).sum();
        let own = u32::try_from(sum.div_ceil(trainers.into())).expect("a rank's rows are few");
        let document = |&rows: &u32| Document { rows, mask: Mask::Causal };
        let layout = Layout::end_to_end(rows.iter().map(document).collect(), own);
        let layout = layout.expect("documents fill the ranks");
        let empty = Vec::new();
        for (index, told) in told.iter_mut().enumerate() {
            let stretches = layout.ranks().get(index).unwrap_or(&empty).clone();
            let whole = |it: u32| (it, rows[it as usize]);
            let documents = stretches.iter().map(|it| whole(it.document.0)).collect();
            told.nanos.push(NanoLengths { documents, stretches });
        }
    }
    told
}

/// The most memory that this process had, in MiB: inputs of the bench among it.
fn most_memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|it| it.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kibibytes.unwrap_or(f64::NAN) / 1024.0
}
