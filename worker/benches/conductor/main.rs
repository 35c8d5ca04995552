//! What a step costs the conductor as jobs are by default, KV heads apart: its IO thread, as it runs, but for sockets and the
//! machines that its process has as any trainer has them; and its planning thread. Every process of the job plans the step and
//! places its bundles; what is left is what only the conductor does. Both are told, each beside the bar.
//!
//! Steps of 512 trainers, 64 dedicated servers, 64 layers, 4 nano-batches and 200,000 documents, each with the lengths and the
//! header of the next one while it runs; `CADRE_SCALE=32x8x4x2x2000` asks for another size. The third step counts, as one of a long
//! job: memory of earlier ones is used again. Each message and word comes in a turn of the IO thread of its own. The same is done
//! once more with twice the documents: what lengths and header cost the IO thread is to be the same. Prints processor time and the process's most memory, writes `target/bench/conductor.json` beside
//! the bars of 200 ms and 256 MiB.

#![allow(clippy::wildcard_enum_match_arm, reason = "a bench picks two of many")]

mod begin;
mod inputs;
mod mute;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use cadre_control::proto::ControllerMessage;
use cadre_exchange::{Event, PeerId};
use cadre_protocol::{At, Heartbeat, Message, Nanos, Round};
use cadre_step::envelope::{Envelope, Said, ServerStep, StepDone};
use cadre_step::planned::plans;
use cadre_step::words::{Body, Life, MAX_RIDING_BYTES, Published, Stream};
use cadre_worker::io::output::Output;
use cadre_worker::io::plan_thread;
use cadre_worker::io::planning::Wanted;
use cadre_worker::io::queues::Notices;
use cadre_worker::io::{Handle, Io};
use cadre_worker::memory::HostRows;
use rustix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::xxh3_64;

use self::begin::begin;
use self::inputs::{most_memory, told};
use self::mute::Mute;

const BAR_MILLIS: f64 = 200.0;
const BAR_MEBIBYTES: f64 = 256.0;

/// Processor time of this thread so far.
fn processor() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The conductor's process, its peers' words, and the processor time that its threads took.
struct Job {
    io: Io<Mute>,
    wanted: Receiver<Wanted>,
    handle: Handle<HostRows>,
    nanos: Arc<AtomicU64>,
    reports: Arc<AtomicUsize>,
    /// How many words each peer has said.
    said: BTreeMap<PeerId, u64>,
    publications: u32,
    took: Took,
    events: Vec<Event>,
    _lines: (SyncSender<ControllerMessage>, Notices<HostRows>),
}

/// Processor time of a step.
#[derive(Clone, Copy, Debug, Default)]
struct Took {
    io: Duration,
    /// The planning thread, all that it does.
    plan: Duration,
    /// Of that what every process does: plans, transfer lists, shapes, digest, assignment.
    every: Duration,
    /// Of that the making of the plans, without what is derived from them.
    search: Duration,
}

impl Job {
    /// Turns of the IO thread until nothing is left to do, and what the planning thread does for it.
    fn settle(&mut self) {
        loop {
            let start = processor();
            loop {
                self.io.turn();
                self.io.receive(Duration::ZERO, &mut self.events);
                if self.io.shared().provider.events.is_empty() {
                    break;
                }
            }
            self.io.turn();
            self.took.io += processor().saturating_sub(start);
            let heard = self.hear();
            match self.wanted.try_recv() {
                Ok(wanted) => self.plan(wanted),
                Err(_) if heard == 0 => return,
                Err(_) => {}
            }
        }
    }

    fn plan(&mut self, wanted: Wanted) {
        // Once more beside the clock, for what it costs alone.
        let (search, every) = match &wanted {
            Wanted::Own(it, _) => {
                let header = it.as_ref().clone().header();
                let start = processor();
                let made = plans(&header).expect("documents fit the servers");
                let search = processor().saturating_sub(start);
                drop(made);
                let start = processor();
                let done = plan_thread::done(Wanted::Plan(Box::new(header)));
                let every = processor().saturating_sub(start);
                drop(done);
                (search, every)
            }
            _ => (Duration::ZERO, Duration::ZERO),
        };
        let start = processor();
        let done = plan_thread::done(wanted);
        let whole = processor().saturating_sub(start);
        self.took.search += search;
        self.took.every += every;
        self.took.plan += whole;
        self.handle.send(done);
    }

    /// Peers hear the words that were said to them.
    fn hear(&mut self) -> usize {
        let words = std::mem::take(&mut self.io.shared_mut().provider.words);
        for (peer, bytes) in &words {
            let Ok(Envelope::Word { stream, number, .. }) = postcard::from_bytes(bytes) else {
                panic!("a word to {peer}")
            };
            let heard = Envelope::Heard { by: life_of(*peer), stream, through: number + 1 };
            self.come(*peer, &heard);
        }
        words.len()
    }

    /// A machine of this process gives something.
    fn own(&mut self, output: Output<HostRows>) {
        self.io.shared_mut().outputs.put(output);
    }

    fn come(&mut self, from: PeerId, envelope: &Envelope) {
        let bytes = postcard::to_stdvec(envelope).expect("a small message");
        self.io.shared_mut().provider.events.push_back(Event::Message { from, bytes });
    }

    /// A peer says a word, as its shell does.
    fn word(&mut self, from: PeerId, said: &[u8]) {
        let said = if said.len() <= MAX_RIDING_BYTES {
            Body::Here(said.to_vec())
        } else {
            self.publications += 1;
            let (bytes, digest) = (said.len() as u64, xxh3_64(said));
            self.io.shared_mut().provider.published.insert(self.publications, said.into());
            let publication = self.publications.into();
            Body::There(Published { publication, bytes, digest })
        };
        let number = self.said.entry(from).or_default();
        let stream = Stream { life: life_of(from), era: 0 };
        let word = Envelope::Word { stream, number: *number, body: said };
        *number += 1;
        self.come(from, &word);
    }

    fn later(&mut self, span: Nanos) {
        self.nanos.fetch_add(span.0, Ordering::Relaxed);
        self.settle();
    }
}

fn life_of(peer: PeerId) -> Life {
    Life(u64::from(peer.index) << 1 | u64::from(peer.role == cadre_exchange::Role::Server))
}

/// Steps that run before the one that counts.
const EARLIER: u64 = 2;

/// What the step that counts came to.
struct Run {
    /// Lengths and the header of the next step.
    header: Took,
    whole: Took,
    phases: Duration,
    rings: u64,
}

fn run([trainers, servers, layers]: [u16; 3], nanos: u32, documents: u32) -> Run {
    let mut job = begin(trainers, servers, layers);
    let all: Vec<_> = (0..trainers).map(|it| PeerId::trainer(it, 0)).collect();
    let others: Vec<_> = (0..servers).map(|it| PeerId::server(it, 0)).collect();
    let announce = |job: &mut Job, step| {
        let each = told(step, trainers, nanos, documents / nanos);
        let each: Vec<_> = each.into_iter().map(|it| encoded(&Said::Lengths(it))).collect();
        for (&from, said) in all.iter().zip(&each) {
            if from == PeerId::trainer(0, 0) {
                // From a thread of the same process.
                let said = postcard::from_bytes(said).expect("what was encoded above");
                job.own(Output::Conductor(said));
            } else {
                job.word(from, said);
            }
        }
        job.settle();
    };
    announce(&mut job, 0);
    for step in 0..EARLIER {
        announce(&mut job, step + 1);
        go_through(&mut job, (&all, &others), step, 2 * u32::from(layers) * nanos);
    }
    job.took = Took::default();
    job.io.shared_mut().provider.rings = 0;
    announce(&mut job, EARLIER + 1);
    let header = job.took;
    let phases = go_through(&mut job, (&all, &others), EARLIER, 2 * u32::from(layers) * nanos);
    Run { header, whole: job.took, phases, rings: job.io.shared().provider.rings }
}

/// All phases and the end of a step whose next one is announced. What the IO thread took for the phases.
fn go_through(
    job: &mut Job,
    (all, others): (&[PeerId], &[PeerId]),
    step: u64,
    phases: u32,
) -> Duration {
    let before = job.took.io;
    let first = all[0];
    for phase in 0..phases {
        let at = At::new(step, phase);
        let done = Envelope::Protocol(Message::PhaseDone { at });
        for &from in all {
            if from == first {
                job.own(Output::Message(Message::PhaseDone { at }));
            } else {
                job.come(from, &done);
            }
        }
        job.settle();
        // Phases of 20 ms, and a heartbeat of everybody after ten.
        job.later(Nanos::from_millis(20));
        if phase % 10 == 9 {
            let rounds = vec![(step, Round(0)), (step + 1, Round(0))];
            let beat = |done| Heartbeat {
                watermark: Some(at),
                done,
                rounds: rounds.clone(),
                ..Heartbeat::default()
            };
            for (peers, done) in [(all, Some(at)), (others, None)] {
                for &it in peers.iter().filter(|it| **it != first) {
                    job.come(it, &Envelope::Protocol(Message::Heartbeat(Box::new(beat(done)))));
                }
            }
            job.own(Output::Message(Message::Heartbeat(Box::new(beat(Some(at))))));
            job.settle();
        }
    }
    let took = job.took.io.saturating_sub(before);
    for (tasks, server) in (0..).zip(others) {
        let done = ServerStep { step, tasks, busy_seconds: 1.0, bytes_pulled: 1 };
        job.word(*server, &encoded(&Said::ServerStep(done)));
    }
    let done = StepDone { step, ..StepDone::default() };
    let said = encoded(&Said::StepDone(done.clone()));
    for &it in all.iter().skip(1) {
        job.word(it, &said);
    }
    job.settle();
    job.own(Output::Conductor(Said::StepDone(done)));
    job.settle();
    assert_eq!(job.reports.load(Ordering::Relaxed) as u64, step + 1, "the step is reported");
    took
}

fn main() {
    let text = std::env::var("CADRE_SCALE").unwrap_or_else(|_| "512x64x64x4x200000".into());
    let numbers: Vec<u32> = text.split('x').filter_map(|it| it.parse().ok()).collect();
    let &[trainers, servers, layers, nanos, documents] = &numbers[..] else {
        panic!("CADRE_SCALE={text} is not five numbers, such as 512x64x64x4x200000")
    };
    let size = [trainers, servers, layers].map(|it| it as u16);
    let Run { header, whole, phases, rings } = run(size, nanos, documents);
    let memory = most_memory();
    let twice = run(size, nanos, 2 * documents).header;
    let ms = |it: Duration| it.as_secs_f64() * 1e3;
    let all = whole.io + whole.plan;
    let own = all.saturating_sub(whole.every);
    println!(
        "conductor of {text}, processor time of a step: {:.0} ms, of which only the conductor does {:.0}, bar {BAR_MILLIS} ms; IO \
         thread {:.0} (lengths and header {:.1}, phases {:.0}), planning thread {:.0} (what every process plans {:.0} of it, plans \
         {:.0} of that); {rings} messages sent; {memory:.0} MiB, bar {BAR_MEBIBYTES} MiB; lengths and header of twice the \
         documents: IO thread {:.1} ms",
        ms(all),
        ms(own),
        ms(whole.io),
        ms(header.io),
        ms(phases),
        ms(whole.plan),
        ms(whole.every),
        ms(whole.search),
        ms(twice.io),
    );
    let case = |name: &str, ours: f64, bar: Option<f64>, unit: &str| {
        serde_json::json!({
            "case": format!("{name}, {text}"), "ours": ours, "unit": unit,
            "peer": bar, "peer_name": bar.map(|_| "bar"), "ratio": bar.map(|it| it / ours),
        })
    };
    let list = [
        case("processor of a step", ms(all), Some(BAR_MILLIS), "ms"),
        case("of it what only the conductor does", ms(own), Some(BAR_MILLIS), "ms"),
        case("of it the IO thread", ms(whole.io), None, "ms"),
        case("of that lengths and header", ms(header.io), None, "ms"),
        case("the same of twice the documents", ms(twice.io), None, "ms"),
        case("of it the planning thread", ms(whole.plan), None, "ms"),
        case("of that what every process plans", ms(whole.every), None, "ms"),
        case("of that the plans", ms(whole.search), None, "ms"),
        case("most memory", memory, Some(BAR_MEBIBYTES), "MiB"),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&list).expect("plain data");
    std::fs::write(folder.join("conductor.json"), text).expect("the target folder can be written");
}

fn encoded(said: &Said) -> Vec<u8> {
    postcard::to_stdvec(said).expect("words are plain data")
}
