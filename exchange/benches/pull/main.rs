//! Pulls and rings over sockets beside raw ones, and by shared memory beside a pump of memcpy, interleaved in one run.
//!
//! Bandwidth: an owner rings one doorbell per unit, the reader pulls the unit and rings back; 64 KiB, 1 MiB and 16 MiB
//! a unit. The peer is a plain blocking writer and reader that move the same bytes between memory of the same size.
//! Round trip: 32 bytes there and back, beside a blocking ping-pong with the same socket options.
//! Shared memory: the same pulls from an arena, beside a thread that copies the same bytes from the same arena and rings
//! nobody, and beside our own pulls by tcp.
//! UCX: the same pulls over its shared memory and its sockets, which emulate reads, beside `ucx_perftest` with gets of that length
//! over the same transports and in the same error mode, where it is installed.
//! Encrypted: the same pulls, beside a blocking writer and reader of a plain rustls connection with the same cipher.
//!
//! An argument runs only the cases whose names hold it, for example `UCX`.
//! Prints a line a case (median of the runs, and their range), writes `target/bench/exchange.json`.

mod peers;
mod row;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Encryption, Event, LandingId, Limits, Paths, PathsConfig, PeerId, Piece, Pool,
    Provider, PullRequest, RegionKey, Sharing, TcpConfig, Transports, ucx_here,
};

use crate::peers::{perftest, pump, raw_ping_pong, raw_stream, tls_stream};
use crate::row::Row;

const RUNS: usize = 9;
/// Memory on either side of a bandwidth run.
const ARENA_BYTES: usize = 16 << 20;
const TOTAL_BYTES: usize = 256 << 20;
const ROUND_TRIPS: u32 = 2000;
const MESSAGE_BYTES: usize = 32;
const KEY: RegionKey = RegionKey([0; 4]);

const TCP: (Encryption, Sharing) = (Encryption::Off, Sharing::Off);
const TLS: (Encryption, Sharing) = (Encryption::Tcp, Sharing::Off);
const SHARED: (Encryption, Sharing) = (Encryption::Off, Sharing::Required);

/// MiB/s of the peer at units of so many bytes.
type Peer<'a> = &'a dyn Fn(usize) -> f64;

fn main() {
    // Of cases whose names hold these words.
    let words = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let mut rows = Vec::new();
    let mut compare = |name: &str, peer_name, ours: &dyn Fn(usize) -> f64, peer: Peer<'_>| {
        for unit_bytes in [64 << 10, 1 << 20, 16 << 20] {
            let name = format!("{name}, {} KiB a unit", unit_bytes >> 10);
            if name.contains(&words) {
                let rates = (0..RUNS).map(|_| (ours(unit_bytes), peer(unit_bytes)));
                rows.push(Row::new((name, peer_name), "MiB/s", rates, |ours, peer| ours / peer));
            }
        }
    };
    compare("pull and ring", "raw sockets", &|it| pulls(it, TCP), &raw_stream);
    compare("shared memory", "memcpy pump", &|it| pulls(it, SHARED), &pump);
    compare("shared memory", "our tcp", &|it| pulls(it, SHARED), &|it| pulls(it, TCP));
    for (over, name) in [(Transports::SharedMemory, "sysv,posix"), (Transports::Sockets, "tcp")] {
        if ucx_here().is_err() || perftest(64 << 10, name).is_none() {
            println!("skipped: UCX or ucx_perftest is not installed");
            continue;
        }
        let way = (Encryption::Off, Sharing::Ucx(over));
        let peer = |it| perftest(it, name).expect("it ran before");
        compare(&format!("UCX over {name}"), "ucx_perftest", &|it| pulls(it, way), &peer);
    }
    compare("encrypted", "plain rustls", &|it| pulls(it, TLS), &tls_stream);
    let name = format!("round trip of a ring, {MESSAGE_BYTES} bytes");
    if name.contains(&words) {
        let times = (0..RUNS).map(|_| (rings(), raw_ping_pong()));
        rows.push(Row::new((name, "raw sockets"), "us", times, |ours, peer| peer / ours));
    }

    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let json: Vec<_> = rows.iter().map(Row::json).collect();
    let json = format!("[\n  {}\n]\n", json.join(",\n  "));
    std::fs::write(folder.join("exchange.json"), json).expect("the target folder can be written");
}

fn mib_per_second(begin: Instant) -> f64 {
    TOTAL_BYTES as f64 / f64::from(1 << 20) / begin.elapsed().as_secs_f64()
}

fn open(me: PeerId, (encryption, sharing): (Encryption, Sharing)) -> Paths {
    let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
    let tcp = TcpConfig { bind, me, secret: [1; 32], data_version: 1, encryption, limits };
    Paths::open(PathsConfig { tcp, sharing }).expect("loopback is there")
}

/// Two providers with links both ways.
fn pair(over: (Encryption, Sharing)) -> (Paths, Paths) {
    let mut owner = open(PeerId::trainer(0, 0), over);
    let mut reader = open(PeerId::server(0, 0), over);
    owner.connect(PeerId::server(0, 0), &reader.address());
    reader.connect(PeerId::trainer(0, 0), &owner.address());
    let mut events = Vec::new();
    while events.len() < 2 {
        owner.poll(Duration::ZERO, &mut events);
        reader.poll(Duration::ZERO, &mut events);
    }
    (owner, reader)
}

/// Moves the total by doorbells, pulls and rings back; MiB/s as the owner sees it.
fn pulls(unit_bytes: usize, over: (Encryption, Sharing)) -> f64 {
    let (mut owner, mut reader) = pair(over);
    owner.publish(KEY, Arc::new(rows(over.1)));
    if over.1 != Sharing::Off {
        reach(&mut owner, &mut reader);
    }
    let units = TOTAL_BYTES / unit_bytes;
    let landing = Buffer::from(vec![0.0; ARENA_BYTES / 4]);
    let reading = thread::spawn(move || read(reader, landing, unit_bytes, units));
    let begin = Instant::now();
    let mut events = Vec::new();
    for unit in 0..units {
        owner.ring(PeerId::server(0, 0), &unit.to_le_bytes()).expect("doorbells are few");
    }
    let mut back = 0;
    while back < units {
        let all_is_sent = reading.is_finished();
        owner.poll(Duration::from_secs(1), &mut events);
        assert!(!(all_is_sent && events.is_empty()), "the reader ended early: its words are above");
        back += events.drain(..).filter(|it| matches!(it, Event::Message { .. })).count();
    }
    let rate = mib_per_second(begin);
    reading.join().expect("the reader has read all");
    rate
}

fn read(mut reader: Paths, landing: Buffer, unit_bytes: usize, units: usize) {
    let owner = PeerId::trainer(0, 0);
    let slots = ARENA_BYTES / unit_bytes;
    let landing: LandingId = reader.land(landing);
    // Pulls may end in another order than they began.
    let (mut free, mut under_way) = ((0..slots).collect::<VecDeque<_>>(), HashMap::new());
    let (mut rung, mut begun, mut done) = (0, 0, 0);
    let patience = Duration::from_mins(1);
    let mut events = Vec::new();
    while done < units {
        reader.poll(Duration::from_secs(10), &mut events);
        for event in events.drain(..) {
            match event {
                Event::Message { .. } => rung += 1,
                Event::Pulled { pull, result } => {
                    assert_eq!(result, Ok(unit_bytes as u64));
                    free.push_back(under_way.remove(&pull).expect("a pull ends once"));
                    reader.ring(owner, &[0; 8]).expect("rings back are few");
                    done += 1;
                }
                Event::Connected(_) | Event::Begun { .. } | Event::Room { .. } => {}
                Event::Closed { .. }
                | Event::Refused { .. }
                | Event::Unfit { .. }
                | Event::Broken { .. } => {
                    panic!("{event:?}")
                }
            }
        }
        // A slot of the landing is one pull's at a time.
        while begun < rung
            && let Some(slot) = free.pop_front()
        {
            let at = (slot * unit_bytes) as u64;
            let pieces = vec![Piece { remote: at, local: at, bytes: unit_bytes as u64 }];
            let pull =
                reader.pull(PullRequest { peer: owner, key: KEY, pieces, landing, patience });
            under_way.insert(pull, slot);
            begun += 1;
        }
    }
    reader.poll(Duration::ZERO, &mut events);
}

/// What an owner publishes.
fn rows(sharing: Sharing) -> Buffer {
    match sharing {
        Sharing::Off => Buffer::from(vec![1.0; ARENA_BYTES / 4]),
        Sharing::Auto | Sharing::Required | Sharing::Ucx(_) => {
            let mut rows = Pool::shared(ARENA_BYTES).expect("shared memory").take(ARENA_BYTES);
            rows.f32s_mut().fill(1.0);
            rows
        }
    }
}

/// Has the arena mapped, and each of its pages, as in a job whose arenas are used again.
fn reach(owner: &mut Paths, reader: &mut Paths) {
    let landing = reader.land(Buffer::zeroed(ARENA_BYTES));
    let pieces = vec![Piece { remote: 0, local: 0, bytes: ARENA_BYTES as u64 }];
    let (peer, patience) = (PeerId::trainer(0, 0), Duration::from_mins(1));
    reader.pull(PullRequest { peer, key: KEY, pieces, landing, patience });
    let mut events = Vec::new();
    while !events.iter().any(|it| matches!(it, Event::Pulled { .. })) {
        owner.poll(Duration::ZERO, &mut Vec::new());
        reader.poll(Duration::ZERO, &mut events);
    }
    let traffic = reader.traffic();
    assert_eq!(traffic.shared_bytes + traffic.ucx_bytes, ARENA_BYTES as u64, "{events:?}");
}

/// Microseconds of one ring there and one back, each side sleeping in its poll.
fn rings() -> f64 {
    let (mut owner, mut reader) = pair(TCP);
    let echo = thread::spawn(move || {
        let mut events = Vec::new();
        for _ in 0..ROUND_TRIPS {
            message(&mut reader, &mut events);
            reader.ring(PeerId::trainer(0, 0), &[2; MESSAGE_BYTES]).expect("one at a time");
        }
        reader.poll(Duration::ZERO, &mut events);
    });
    let begin = Instant::now();
    let mut events = Vec::new();
    for _ in 0..ROUND_TRIPS {
        owner.ring(PeerId::server(0, 0), &[1; MESSAGE_BYTES]).expect("one at a time");
        message(&mut owner, &mut events);
    }
    let time = begin.elapsed();
    echo.join().expect("it echoes");
    time.as_secs_f64() * 1e6 / f64::from(ROUND_TRIPS)
}

fn message(tcp: &mut Paths, events: &mut Vec<Event>) {
    while !events.drain(..).any(|it| matches!(it, Event::Message { .. })) {
        tcp.poll(Duration::from_secs(10), events);
    }
}
