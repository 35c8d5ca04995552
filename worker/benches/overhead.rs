//! A server's own time for each task: decode the doorbell, admit the task, issue its pulls, take the rows, hand the work to the
//! thread that computes, launch it, hand it back, publish and announce the results. Neither pulls nor the kernel are counted.
//!
//! An idle server, tasks of 128 query rows by 128 keys, one at a time. The parts of the IO thread are run here one by one,
//! over two providers on loopback; the thread that computes is the server's, over the server's queues. The kernel's time alone,
//! measured in this thread, is taken off.
//!
//! Most of the time on a machine at rest is that of processors that wake for the two hand-overs. So tasks are run twice: as the
//! machine is, beside a bare round trip between two threads, which waits for the same; and while threads of the lowest priority
//! keep every processor awake, as on a machine that trains, beside the bar of 50 µs. Prints medians and 99th percentiles, writes
//! `target/bench/overhead.json`.

#![allow(clippy::wildcard_enum_match_arm, reason = "a bench picks two of many")]

use std::num::{NonZeroU16, NonZeroUsize};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cadre_crds::Wire;
use cadre_exchange::{
    Buffer, Encryption, Event as Seen, Limits, PeerId, Provider as _, Tcp, TcpConfig,
};
use cadre_kernels::{Engine, Forward, Rows, RowsMut};
use cadre_planner::{Costs, Document, Heads, Layout, Links, Mask, Slot, Tolerance};
use cadre_protocol::server::{Event, Host};
use cadre_protocol::{Acks, At, Message, Peer, Round, ServerId, Settings, TrainerId};
use cadre_step::envelope::Envelope;
use cadre_step::header::{Header, KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};
use cadre_step::lowering::Tensor;
use cadre_step::packing::Packing;
use cadre_step::planned::PlannedStep;
use cadre_step::turns::Turns;
use cadre_worker::Threads;
use cadre_worker::compute::Compute;
use cadre_worker::io::clock::Clock;
use cadre_worker::io::output::Output;
use cadre_worker::io::queues::{Outlet, notices};
use cadre_worker::io::shared::{Shared, rows_key};
use cadre_worker::io::tasks::Tasks;
use cadre_worker::io::{Asked, Handle, Notice};
use cadre_worker::launch::AtOnce;
use cadre_worker::memory::HostRows;
use cadre_worker::trace::Tracer;
use rustix::process::setpriority_process;
use rustix::thread::gettid;

const TASKS: u16 = 2000;
const ROWS: u32 = 128;
const HEADS: Heads = Heads { query: 4, kv: 2, dim: 64 };
const BAR_MICROS: f64 = 50.0;

fn main() {
    let (rest, trips) = own_times(0, &mut |alone, times| times.push(round_trip(alone)));
    let awake = Awake::all();
    let (busy, _) = own_times(1, &mut |_, _| {});
    drop(awake);
    let at = |times: &[f64], percent: usize| times[times.len() * percent / 100];
    let (median, p99) = (at(&busy, 50), at(&busy, 99));
    let (idle, trip) = (at(&rest, 50), at(&trips, 50));
    println!(
        "own time of a server for a task: processors awake: median {median:.1} us, p99 {p99:.1} us, bar {BAR_MICROS} us; at rest: \
         median {idle:.1} us, a bare round trip between two threads {trip:.1} us"
    );
    let case = |name: &str, ours: f64, peer: f64, peer_name: &str| {
        serde_json::json!({
            "case": format!("own time of a server, {name}"), "ours": ours, "unit": "us",
            "peer": peer, "peer_name": peer_name, "ratio": peer / ours,
        })
    };
    let list = [
        case("processors awake, median", median, BAR_MICROS, "bar"),
        case("processors awake, p99", p99, BAR_MICROS, "bar"),
        case("processors at rest, median", idle, trip, "round trip of threads"),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&list).expect("plain data");
    std::fs::write(folder.join("overhead.json"), text).expect("the target folder can be written");
}

/// Threads of the lowest priority, one for each processor, that never sleep.
struct Awake(Arc<AtomicBool>);

impl Awake {
    fn all() -> Self {
        let over = Arc::<AtomicBool>::default();
        let count = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        for _ in 0..count {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                setpriority_process(Some(gettid()), 19).expect("a thread may be slower");
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(over)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Microseconds until a thread that sleeps has worked for a while and has answered, less that while. Whoever asks has slept, too.
fn round_trip(works: Duration) -> f64 {
    static LINES: OnceLock<(SyncSender<Duration>, Mutex<Receiver<()>>)> = OnceLock::new();
    let (ask, answers) = LINES.get_or_init(|| {
        let (ask, asked) = sync_channel(1);
        let (answer, answers) = sync_channel(1);
        std::thread::spawn(move || {
            while let Ok(works) = asked.recv() {
                let start = Instant::now();
                while start.elapsed() < works {
                    std::hint::spin_loop();
                }
                answer.send(()).expect("somebody has asked");
            }
        });
        (ask, Mutex::new(answers))
    });
    let answers = answers.lock().expect("one thread asks");
    std::thread::sleep(works);
    let start = Instant::now();
    ask.send(works).expect("somebody answers");
    answers.recv().expect("somebody answers");
    start.elapsed().saturating_sub(works).as_secs_f64() * 1e6
}

/// Microseconds of each task, ascending, of a server and a trainer of this number; and what is measured between two tasks.
fn own_times(
    number: u16,
    between: &mut impl FnMut(Duration, &mut Vec<f64>),
) -> (Vec<f64>, Vec<f64>) {
    let server = PeerId::server(number, 0);
    let mut trainer = open(PeerId::trainer(0, 0));
    let mut shared = Shared::new(
        Peer::Server(ServerId { index: number, incarnation: 0 }),
        (open(server), Clock::system()),
        Tracer::off(),
    );
    shared.know(PeerId::trainer(0, 0), &trainer.address());
    trainer.connect(server, &shared.provider.address());
    let id = ServerId { index: number, incarnation: 0 };
    let mut tasks = Tasks::new(
        Host::Dedicated(id),
        1 << 30,
        Settings::default(),
        (&shared.provider, shared.now()),
    );

    let planned =
        Arc::new(PlannedStep::new(Arc::new(header(number))).expect("one document on one slot"));
    let first = planned.assign(None, &[true]).expect("the slot is filled");
    let step = planned.protocol_step(&first).expect("lists of one document");
    shared.begin(Arc::clone(&planned), first);
    tasks.begin(0);
    tasks.handle(&mut shared, Event::Begin(Arc::new(step)));

    let row = usize::from(HEADS.dim) * 4;
    let q = Arc::new(Buffer::from(vec![0.5; ROWS as usize * usize::from(HEADS.query) * row / 4]));
    let k = Arc::new(Buffer::from(vec![0.5; ROWS as usize * usize::from(HEADS.kv) * row / 4]));
    let (mut outlet, told) = notices(shared.provider.waker());
    let (handle, requests) = Handle::channel(shared.provider.waker());
    std::thread::spawn(move || {
        let launcher = AtOnce::new(Engine::cpu(Threads::ONE));
        Compute::new(launcher, "compute", handle, Tracer::off()).serve(&told)
    });
    let alone = kernel(&q, &k);
    let (mut times, mut others) = (Vec::new(), Vec::new());
    for phase in 0..u32::from(TASKS) {
        let at = At::new(0, phase);
        for (tensor, rows) in [(Tensor::Q, &q), (Tensor::K, &k), (Tensor::V, &k)] {
            trainer.publish(rows_key(at, tensor), Arc::clone(rows));
        }
        let through = phase.checked_sub(1).map(|it| At::new(0, it));
        let acks = Acks { through, works: Vec::new() };
        let message = Message::Doorbell { at, round: Round(0), acks, digest: planned.digest };
        let bytes = postcard::to_stdvec(&Envelope::Protocol(message)).expect("a small message");
        let lines = (&mut outlet, &requests);
        let whole = one(&mut shared, &mut tasks, &mut trainer, lines, &bytes);
        times.push(whole.saturating_sub(alone).as_secs_f64() * 1e6);
        for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
            trainer.withdraw(rows_key(at, tensor));
        }
        between(alone, &mut others);
    }
    for it in [&mut times, &mut others] {
        it.sort_by(f64::total_cmp);
    }
    (times, others)
}

/// One task from its doorbell to its announcement; the time of the parts that count, and of the kernel.
fn one(
    shared: &mut Shared<Tcp>,
    tasks: &mut Tasks<HostRows>,
    trainer: &mut Tcp,
    (outlet, requests): (&mut Outlet<HostRows>, &Receiver<Asked<HostRows>>),
    bytes: &[u8],
) -> Duration {
    let from = Peer::Trainer(TrainerId(0));
    let start = Instant::now();
    tasks.handle(shared, Event::Tick);
    let envelope: Envelope = postcard::from_bytes(bytes).expect("what was encoded above");
    let Envelope::Protocol(message) = envelope else { unreachable!("a doorbell") };
    tasks.handle(shared, Event::Message { from, message });
    let mut own = start.elapsed();
    let (mut seen, mut theirs) = (Vec::new(), Vec::new());
    let mut ready = Vec::new();
    while ready.is_empty() {
        shared.provider.poll(Duration::ZERO, &mut seen);
        trainer.poll(Duration::ZERO, &mut theirs);
        let start = Instant::now();
        for event in seen.drain(..) {
            if let Seen::Pulled { pull, result } = event {
                shared.pulled(pull, result);
            }
        }
        while let Some(output) = shared.outputs.take() {
            match output {
                Output::Pulled(_, pull, result) => tasks.pulled(shared, pull, result),
                Output::Ready(work, _) => ready.push(*work),
                _ => {}
            }
        }
        if !ready.is_empty() {
            own += start.elapsed();
        }
    }
    let start = Instant::now();
    for work in ready {
        outlet.tell(Notice::Work(Box::new(work)));
    }
    let done = loop {
        match requests.try_recv() {
            Ok(Asked::Ran(done)) => break done,
            Ok(other) => unreachable!("{other:?}"),
            Err(_) => shared.provider.poll(Duration::from_secs(1), &mut seen),
        }
    };
    tasks.ran(shared, vec![done]);
    own += start.elapsed();
    while !theirs.iter().any(|it| matches!(it, Seen::Message { .. })) {
        shared.provider.poll(Duration::ZERO, &mut seen);
        trainer.poll(Duration::ZERO, &mut theirs);
    }
    own
}

/// Median time of the kernel alone, warm as the server's is: a task of each KV head, as a launch hands them in.
fn kernel(q: &Buffer, k: &Buffer) -> Duration {
    let mut engine = Engine::cpu(Threads::ONE);
    let heads = cadre_kernels::Heads {
        query: usize::from(HEADS.query / HEADS.kv),
        kv: 1,
        dim: HEADS.dim.into(),
    };
    let (rows, count) = (ROWS as usize * heads.query, usize::from(HEADS.kv));
    let (mut out, mut lse) = (vec![0.0; count * rows * heads.dim], vec![0.0; count * rows]);
    let keys = ROWS as usize * heads.dim;
    let mut once = || {
        let to = out.chunks_exact_mut(rows * heads.dim).zip(lse.chunks_exact_mut(rows));
        let from = q.f32s().chunks_exact(rows * heads.dim).zip(k.f32s().chunks_exact(keys));
        let task = |((q, k), (out, lse))| Forward {
            heads,
            mask: cadre_kernels::Mask::Causal,
            scale: 0.125,
            softcap: None,
            document_rows: ROWS,
            q: Rows::F32(q),
            k: Rows::F32(k),
            v: Rows::F32(k),
            rows: 0..ROWS,
            keys: 0..ROWS,
            out: RowsMut::F32(out),
            lse,
        };
        let mut tasks: Vec<_> = from.zip(to).map(task).collect();
        let start = Instant::now();
        engine.forward(&mut tasks).expect("sound tasks");
        start.elapsed()
    };
    let mut times: Vec<_> = (0..TASKS).map(|_| once()).collect();
    times.sort();
    times[times.len() / 2]
}

fn open(me: PeerId) -> Tcp {
    let bind = std::net::Ipv4Addr::LOCALHOST.into();
    let config = TcpConfig {
        bind,
        me,
        secret: [7; 32],
        data_version: 1,
        encryption: Encryption::Off,
        limits: Limits::default(),
    };
    Tcp::open(config).expect("loopback listens")
}

fn header(server: u16) -> Header {
    let documents = vec![Document { rows: ROWS, mask: Mask::Causal }];
    let layout = Layout::end_to_end(documents, ROWS).expect("one document on one rank");
    Header {
        step: 0,
        layers: Layers::alike(Kind::causal(HEADS), TASKS).expect("tasks are layers"),
        kv_heads: KvHeads::Together,
        wire: Wire::F32,
        seed: 0,
        numerics: String::new(),
        placement: Placement::Pool,
        slots: vec![Slot { weight: 100, head_start: 0, home: None, memory: 1 << 30 }],
        costs: vec![Costs::default()],
        tolerance: Tolerance::USUAL,
        links: Links::equal(),
        turns: Turns::together(NonZeroU16::MIN),
        nanos: vec![Packing::from(&layout)],
        view: ViewNumber::default(),
        fillers: vec![Some(Member::Server {
            index: server,
            incarnation: 0,
            address: String::new(),
        })],
    }
}
