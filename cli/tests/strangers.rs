//! A whole job at whose ports strangers knock from the first moment: it computes the bits of a quiet run.
//!
//! In: the real binary, and connections of silence, noise and cut greetings at every port that a process of the job listens on,
//! as a port scanner makes them, as soon as the port is there. Nothing timed decides.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Resource, Rlimit};
use serde_json::Value;

const STEPS: usize = 4;
/// At each port, of all kinds together.
const STRANGERS: usize = 600;

const JOB: &str = "apiVersion: cadre.dev/v1alpha1
kind: AttentionPool
metadata: {name: pool}
spec:
  replicas: 2
  template: {spec: {containers: [{name: server, command: [cadre, serve]}]}}
---
apiVersion: cadre.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  nodes: 2
  failurePolicy: {maxRestarts: 0}
  attention: {poolRef: {name: pool}, wire: F32, reproducible: true, onPoolLoss: Wait, poolWaitSeconds: 30}
  template:
    spec:
      containers:
        - name: trainer
          command: [cadre, train]
          args: [--data=DATA, --model=tiny, --steps=STEPS, --tokens=256, --cap=400]
";

fn start(folder: &Path, name: &str) -> Child {
    let data = folder.join("data");
    let manifest = folder.join(format!("{name}.yaml"));
    let text =
        JOB.replace("DATA", &data.display().to_string()).replace("STEPS", &STEPS.to_string());
    fs::write(&manifest, text).expect("a small file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
    command.arg("run").arg("-f").arg(manifest).arg("--out").arg(folder.join(name));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("the binary starts")
}

/// Losses of the steps, bit for bit, and slots that were lost.
fn losses(folder: &Path, name: &str, child: Child) -> (Vec<String>, u64) {
    let output = child.wait_with_output().expect("a child can be waited for");
    let out = folder.join(name);
    let logs = fs::read_dir(out.join("logs")).into_iter().flatten().flatten();
    let log = |it: fs::DirEntry| fs::read_to_string(it.path()).unwrap_or_default();
    let logs = || logs.map(log).collect::<String>();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}\n{}", logs());
    let text = fs::read_to_string(out.join("steps.jsonl")).expect("a run that completed");
    let rows: Vec<Value> =
        text.lines().map(|it| serde_json::from_str(it).expect("a line of JSON")).collect();
    assert_eq!(rows.len(), STEPS, "{name}: {said}");
    let bits = |it: &Value| it["loss_bits"].as_str().expect("a step has its bits").to_owned();
    let lost = rows.iter().filter_map(|it| it["failovers"].as_u64()).sum();
    (rows.iter().map(bits).collect(), lost)
}

/// Where processes of the job listen.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Door {
    Tcp(u16),
    Unix(String),
}

/// Doors of a process and of its children.
fn doors(parent: u32) -> BTreeSet<Door> {
    let child = |it: fs::DirEntry| {
        let pid: u32 = it.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(it.path().join("stat")).ok()?;
        // The name, in brackets, may hold anything.
        let of: u32 = stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?;
        (pid == parent || of == parent).then_some(pid)
    };
    let pids: Vec<u32> =
        fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(child).collect();
    let sockets: BTreeSet<String> = pids
        .iter()
        .filter_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok())
        .flat_map(Iterator::flatten)
        .filter_map(|it| fs::read_link(it.path()).ok())
        .filter_map(|it| {
            Some(it.to_str()?.strip_prefix("socket:[")?.trim_end_matches(']').to_owned())
        })
        .collect();
    let tcp = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let tcp = tcp.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let listens = *words.get(3)? == "0A" && sockets.contains(*words.get(9)?);
        let port = u16::from_str_radix(words[1].split(':').nth(1)?, 16).ok()?;
        listens.then_some(Door::Tcp(port))
    });
    let unix = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let unix = unix.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let listens = *words.get(3)? == "00010000" && sockets.contains(*words.get(6)?);
        listens.then(|| words.get(7).map(|it| Door::Unix((*it).to_owned())))?
    });
    tcp.chain(unix).collect()
}

/// Opens a socket of a path, or of an abstract name, which `/proc/net/unix` shows behind an `@`.
fn dial(path: &str) -> std::io::Result<UnixStream> {
    match path.strip_prefix('@') {
        Some(name) => UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?),
        None => UnixStream::connect(path),
    }
}

/// Opens a door and says something; whoever is turned away at once has knocked all the same.
fn enter(door: &Door, words: &[u8]) -> std::io::Result<Box<dyn Send>> {
    match door {
        Door::Tcp(port) => {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(50))?;
            let _ = stream.write_all(words);
            Ok(Box::new(stream))
        }
        Door::Unix(path) => {
            let mut stream = dial(path)?;
            let _ = stream.write_all(words);
            Ok(Box::new(stream))
        }
    }
}

/// Strangers who stay until they are dropped: all of them, or as many as came before the door was closed. Whoever finds its queue
/// full waits there.
fn knock(door: &Door) -> Vec<Box<dyn Send>> {
    let noise = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(4);
    let kinds: [&[u8]; 3] = [b"", &noise, b"cadrex01\x01\0\0\0\0\0\0\0"];
    let mut all = Vec::new();
    for words in kinds.iter().cycle().take(STRANGERS) {
        let stranger = loop {
            match enter(door, words) {
                Err(full) if matches!(full.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                }
                entered => break entered,
            }
        };
        let Ok(stranger) = stranger else { break };
        all.push(stranger);
    }
    all
}

#[test]
fn strangers_at_every_port_from_the_first_moment_change_no_bit() {
    // Each stranger is an open file.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(Resource::Nofile, most).expect("as many as the system allows");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    fs::create_dir(folder.join("data")).expect("a new folder");
    fs::write(folder.join("data/a"), "in the beginning was ".repeat(300)).expect("a small file");
    let quiet = start(folder, "quiet");
    let quiet = losses(folder, "quiet", quiet);
    let mut job = start(folder, "crowded");
    let (mut known, mut strangers) = (BTreeSet::new(), Vec::new());
    let began = std::time::Instant::now();
    while job.try_wait().expect("a child of ours").is_none() {
        assert!(began.elapsed() < Duration::from_mins(5), "the job stands still");
        for door in doors(job.id()) {
            if known.insert(door.clone()) {
                strangers.push(std::thread::spawn(move || {
                    let all = knock(&door);
                    (door, all)
                }));
            }
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
    let knocked = strangers.into_iter().map(|it| it.join().expect("it only knocks"));
    let crowds: Vec<_> = knocked.map(|(door, all)| (door, all.len())).collect();
    println!("who knocked: {crowds:?}");
    let whole = |kind: fn(&Door) -> bool| {
        crowds.iter().filter(|it| kind(&it.0) && it.1 == STRANGERS).count()
    };
    let rows = |it: &Door| matches!(it, Door::Unix(path) if path.starts_with("@cadre-rows"));
    // Ports of exchanges, sockets at which rows of shared memory are asked for, and the controller's; the ring's close as soon as
    // it stands.
    assert!(whole(|it| matches!(it, Door::Tcp(_))) >= 4, "{crowds:?}");
    assert!(whole(rows) >= 4, "{crowds:?}");
    let controllers =
        |it: &Door| matches!(it, Door::Unix(path) if !path.starts_with("@cadre-rows"));
    assert!(whole(controllers) >= 1, "{crowds:?}");
    let crowded = losses(folder, "crowded", job);
    assert_eq!(crowded, quiet, "{crowds:?}");
    assert_eq!(quiet.1, 0);
}
