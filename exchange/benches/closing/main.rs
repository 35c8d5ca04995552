//! How soon a pull ends when its owner is killed or stopped, by each path, with real processes.
//!
//! In: nothing; an argument runs only the cases whose names hold it. Out: a line a case, and `target/bench/closing.json`.
//!
//! Killed: the owner gets SIGKILL when some bytes of a pull have landed; counted is from there to the end of the pull. Stopped: the
//! owner gets SIGSTOP before a pull begins; counted is from the pull's deadline to its end. By shared memory rows of an owner that is
//! stopped can be had, so that case has no deadline. The owner is this program again, and ends with it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_exchange::{
    Buffer, Encryption, Event, LandingId, Limits, Paths, PathsConfig, PeerId, Piece, Pool,
    Provider, PullError, PullId, PullRequest, RegionKey, Role, Sharing, TcpConfig, Transports,
    ucx_here,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const OWNER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };
const KEY: RegionKey = RegionKey([1; 4]);
/// More than the windows.
const BYTES: usize = 40 << 20;
/// Names the way of an owner that is started.
const WAY: &str = "CADRE_CLOSING_WAY";
const KILLED_RUNS: usize = 30;
const STOPPED_RUNS: usize = 200;
const PATIENCE: Duration = Duration::from_millis(100);
/// Bars, in milliseconds.
const KILLED_MS: f64 = 500.0;
const STOPPED_MS: f64 = 10.0;

const WAYS: [(&str, Encryption, Sharing); 4] = [
    ("tcp", Encryption::Off, Sharing::Off),
    ("tcp, encrypted", Encryption::Tcp, Sharing::Off),
    ("shared memory", Encryption::Off, Sharing::Required),
    ("UCX over shared memory", Encryption::Off, Sharing::Ucx(Transports::SharedMemory)),
];

fn main() {
    if let Ok(name) = std::env::var(WAY) {
        return own(&name);
    }
    let words = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let mut rows = Vec::new();
    for (name, encryption, sharing) in WAYS {
        if let (Sharing::Ucx(_), Err(why)) = (sharing, ucx_here()) {
            println!("skipped: {why}");
            continue;
        }
        let case = format!("killed owner, {name}: the longest of {KILLED_RUNS} ends");
        if case.contains(&words) {
            let runs = (0..KILLED_RUNS).map(|_| killed(name, encryption, sharing)).collect();
            rows.push(row(&case, runs, 1.0, KILLED_MS));
        }
        let case = format!("stopped owner, {name}: p99 of {STOPPED_RUNS} ends after the deadline");
        if case.contains(&words) && sharing != Sharing::Required {
            rows.push(row(&case, stopped(name, encryption, sharing), 0.99, STOPPED_MS));
        }
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let json = format!("[\n  {}\n]\n", rows.join(",\n  "));
    std::fs::write(folder.join("closing.json"), json).expect("the target folder can be written");
}

/// A line of the result; `share` says which of the sorted runs counts.
fn row(case: &str, mut runs: Vec<f64>, share: f64, bar: f64) -> String {
    runs.sort_by(f64::total_cmp);
    let ours = runs[((runs.len() as f64 * share).ceil() as usize).clamp(1, runs.len()) - 1];
    let middle = runs[runs.len() / 2];
    println!("{case}: {ours:.2} ms (median {middle:.2}), bar {bar} ms");
    serde_json::json!({"case": case, "ours": ours, "peer": bar, "peer_name": "the bar", "unit": "ms",
        "ratio": bar / ours})
    .to_string()
}

fn open(me: PeerId, encryption: Encryption, sharing: Sharing) -> Paths {
    let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
    let tcp = TcpConfig { bind, me, secret: [1; 32], data_version: 1, encryption, limits };
    Paths::open(PathsConfig { tcp, sharing }).expect("loopback is there")
}

/// Owns a region until nobody writes to it any more.
fn own(name: &str) {
    let way = WAYS.into_iter().find(|it| it.0 == name).expect("the parent names a way");
    let mut owner = open(OWNER, way.1, way.2);
    let mut rows = match way.2 {
        Sharing::Off => Buffer::zeroed(BYTES),
        Sharing::Auto | Sharing::Required | Sharing::Ucx(_) => {
            Pool::shared(BYTES).expect("shared memory").take(BYTES)
        }
    };
    rows.bytes_mut().fill(1);
    owner.publish(KEY, Arc::new(rows));
    println!("{}", owner.address());
    std::thread::spawn(|| {
        // The parent's end ends this one.
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    loop {
        owner.poll(Duration::from_secs(1), &mut Vec::new());
    }
}

struct Owner {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Owner {
    fn start(name: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        let command = command.env(WAY, name).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it is executable");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, said }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A reader that has pulled all of an owner once.
fn reader(owner: &mut Owner, encryption: Encryption, sharing: Sharing) -> Paths {
    let mut reader = open(READER, encryption, sharing);
    let mut address = String::new();
    owner.said.read_line(&mut address).expect("it says where it is");
    reader.connect(OWNER, address.trim());
    let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
    end(&mut reader, pull).expect("it is published");
    reader.discard(landing);
    reader
}

fn begin(reader: &mut Paths, patience: Duration) -> (PullId, LandingId) {
    let landing = reader.land(Buffer::zeroed(BYTES));
    let pieces = vec![Piece { remote: 0, local: 0, bytes: BYTES as u64 }];
    let request = PullRequest { peer: OWNER, key: KEY, pieces, landing, patience };
    (reader.pull(request), landing)
}

fn end(reader: &mut Paths, wanted: PullId) -> Result<u64, PullError> {
    let mut events = Vec::new();
    loop {
        reader.poll(Duration::from_secs(1), &mut events);
        for event in events.drain(..) {
            if let Event::Pulled { pull, result } = event
                && pull == wanted
            {
                return result;
            }
        }
    }
}

/// Milliseconds from the end of an owner to that of a pull of it.
fn killed(name: &str, encryption: Encryption, sharing: Sharing) -> f64 {
    let mut owner = Owner::start(name);
    let mut reader = reader(&mut owner, encryption, sharing);
    let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
    let mut events = Vec::new();
    while reader.landed(landing).is_ok_and(|it| it.bytes()[0] == 0) {
        reader.poll(Duration::ZERO, &mut events);
    }
    owner.child.kill().expect("our own child");
    let began = Instant::now();
    let is_over = |it: &Event| matches!(it, Event::Pulled { pull: of, .. } if *of == pull);
    if !events.iter().any(is_over) {
        // What was on its way already may be all of it.
        let _ = end(&mut reader, pull);
    }
    began.elapsed().as_secs_f64() * 1e3
}

/// Milliseconds from the deadlines of pulls to their ends, while their owner stands still.
fn stopped(name: &str, encryption: Encryption, sharing: Sharing) -> Vec<f64> {
    let mut owner = Owner::start(name);
    let mut reader = reader(&mut owner, encryption, sharing);
    let mut runs = Vec::new();
    for _ in 0..STOPPED_RUNS {
        kill_process(owner.pid(), Signal::STOP).expect("our own child");
        let stands = waitpid(Some(owner.pid()), WaitOptions::UNTRACED).expect("our own child");
        assert!(stands.is_some_and(|it| it.1.stopped()), "it stands still");
        let began = Instant::now();
        let (pull, landing) = begin(&mut reader, PATIENCE);
        assert_eq!(end(&mut reader, pull), Err(PullError::Deadline));
        runs.push(began.elapsed().saturating_sub(PATIENCE).as_secs_f64() * 1e3);
        reader.discard(landing);
        kill_process(owner.pid(), Signal::CONT).expect("our own child");
        let (pull, landing) = begin(&mut reader, Duration::from_mins(1));
        end(&mut reader, pull).expect("it is published");
        reader.discard(landing);
    }
    let stdin = owner.child.stdin.as_mut().expect("piped");
    writeln!(stdin).expect("it reads");
    runs
}
