//! Whole jobs as processes: the bits of losses and weights, faults, replay, resume, and that nothing is
//! left.
//!
//! Losses of a few steps hide how dK and dV were summed: it moves weights by less than a loss of f32
//! shows. So runs that promise the same bits are compared by the weights of their last checkpoint, too.
//!
//! Every test runs the real binary on a corpus of its own with a model small enough for seconds.
//! Nothing timed decides: a run that hangs is ended by its own deadlines, or by the test runner's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "train/accumulate.rs"]
mod accumulate;
#[path = "train/encrypted.rs"]
mod encrypted;
#[path = "train/ends.rs"]
mod ends;
#[path = "train/heads.rs"]
mod heads;
#[path = "train/layers.rs"]
mod layers;
#[path = "train/links.rs"]
mod links;
#[path = "train/rdma.rs"]
mod rdma;
#[path = "train/replays.rs"]
mod replays;
#[path = "train/shared.rs"]
mod shared;
#[path = "train/threads.rs"]
mod threads;
#[path = "train/together.rs"]
mod together;
#[path = "train/trainers.rs"]
mod trainers;
#[path = "train/ucx.rs"]
mod ucx;

/// Steps of a run.
const STEPS: usize = 6;

/// A folder with a corpus; runs go beside it.
struct Place(tempfile::TempDir);

/// How a run ended.
struct Run {
    code: Option<i32>,
    out: PathBuf,
    said: String,
}

/// What a run computed, bit for bit.
#[derive(PartialEq)]
struct Bits {
    losses: Vec<u32>,
    /// Files of the last checkpoint, without its state.
    weights: Vec<Vec<u8>>,
}

impl std::fmt::Debug for Bits {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.weights);
        write!(out, "losses {:x?}, weights with hash {hash:x}", self.losses)
    }
}

/// What a pool and job are made of.
#[derive(Clone, Copy)]
struct Job {
    servers: u16,
    in_place: bool,
    trainers: u16,
    wire: &'static str,
    on_pool_loss: &'static str,
    restarts: u16,
    /// Silence after which a trainer is dead, in seconds.
    silence: u16,
    /// How often checkpoints are written, if it is said.
    every: &'static str,
    /// Checkpoints that stay.
    keep: u16,
}

const JOB: Job = Job {
    servers: 2,
    in_place: false,
    trainers: 2,
    wire: "F32",
    on_pool_loss: "Wait",
    restarts: 0,
    silence: 30,
    every: "--checkpoint-every=2",
    keep: 3,
};

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a temporary folder"));
        fs::create_dir(place.path("data")).expect("a new folder");
        for (name, words, times) in [("a", "in the beginning was ", 300), ("b", "the word ", 500)] {
            fs::write(place.path("data").join(name), words.repeat(times)).expect("a small file");
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, name: &str, job: Job, args: &[&str]) -> Command {
        let Job { servers, in_place, trainers, wire, on_pool_loss, restarts, silence, every, keep } =
            job;
        let manifest = self.path(&format!("{name}.yaml"));
        let data = self.path("data");
        let text = format!(
            "apiVersion: cadre.dev/v1alpha1
kind: AttentionPool
metadata: {{name: pool}}
spec:
  replicas: {servers}
  inPlace: {in_place}
  template: {{spec: {{containers: [{{name: server, command: [cadre, serve]}}]}}}}
---
apiVersion: cadre.dev/v1alpha1
kind: TrainingJob
metadata: {{name: job}}
spec:
  nodes: {trainers}
  failurePolicy: {{maxRestarts: {restarts}, suspectAfterSeconds: {silence}}}
  checkpoint: {{keep: {keep}}}
  attention: {{poolRef: {{name: pool}}, wire: {wire}, reproducible: true, onPoolLoss: {on_pool_loss}, poolWaitSeconds: 30}}
  template:
    spec:
      containers:
        - name: trainer
          command: [cadre, train]
          args: [--data={}, --model=tiny, --steps={STEPS}, --tokens=256, --cap=400, {every}]
",
            data.display()
        );
        fs::write(&manifest, text).expect("a small file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
        command.arg("run").arg("-f").arg(manifest).arg("--out").arg(self.path(name)).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A reader of bytes that nobody has written computes no number.
        command.env("CADRE_POISON", "1");
        command
    }

    fn run(&self, name: &str, job: Job, args: &[&str]) -> Run {
        let output = self.command(name, job, args).output().expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Run { code: output.status.code(), out: self.path(name), said }
    }

    /// A run that has to complete.
    fn bits(&self, name: &str, job: Job, args: &[&str]) -> Bits {
        let run = self.run(name, job, args);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        let bits = run.bits();
        assert_eq!(bits.losses.len(), STEPS, "{name}: {}", run.said);
        bits
    }
}

impl Run {
    fn bits(&self) -> Bits {
        let bits = |row: Value| {
            let text = row["loss_bits"].as_str().expect("a step has its bits").to_owned();
            u32::from_str_radix(&text, 16).expect("8 hex digits")
        };
        let checkpoint = self.out.join(format!("checkpoints/step-{STEPS}"));
        let file = |name: &str| fs::read(checkpoint.join(name)).expect("the last checkpoint");
        Bits {
            losses: rows(&self.out.join("steps.jsonl")).into_iter().map(bits).collect(),
            weights: ["model.safetensors", "optimizer.safetensors"].map(file).to_vec(),
        }
    }

    fn failovers(&self) -> u64 {
        rows(&self.out.join("steps.jsonl")).iter().filter_map(|it| it["failovers"].as_u64()).sum()
    }

    fn logs(&self) -> String {
        let folder = fs::read_dir(self.out.join("logs")).into_iter().flatten().flatten();
        let log = |it: fs::DirEntry| {
            let text = fs::read_to_string(it.path()).unwrap_or_default();
            format!("--- {}\n{text}", it.path().display())
        };
        folder.map(log).collect()
    }
}

fn rows(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Waits for something that has to come.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_mins(1), "{what} did not come");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn close(one: &Bits, other: &Bits) {
    assert_eq!(one.losses[0], other.losses[0], "the first forward pass depends on documents alone");
    for (one, other) in one.losses.iter().zip(&other.losses) {
        let (one, other) = (f32::from_bits(*one), f32::from_bits(*other));
        assert!((one - other).abs() < 1e-4, "{one} and {other}");
    }
}

#[test]
fn every_pool_gives_the_losses_of_local_attention() {
    let place = Place::new();
    let local = place.bits("local", JOB, &["--attention", "local"]);
    for servers in [1, 2, 4] {
        let name = format!("servers-{servers}");
        let job = Job { servers, ..JOB };
        close(&place.bits(&name, job, &[]), &local);
        let logs = Run { code: None, out: place.path(&name), said: String::new() }.logs();
        assert!(!logs.contains("refused"), "somebody who has left is called: {logs}");
    }
    close(&place.bits("in-place", Job { servers: 0, in_place: true, ..JOB }, &[]), &local);
    close(&place.bits("hybrid", Job { servers: 1, in_place: true, ..JOB }, &[]), &local);
}

#[test]
fn three_trainers_and_bf16_rows_work_too() {
    let place = Place::new();
    let job = Job { trainers: 3, ..JOB };
    let local = place.bits("local", job, &["--attention", "local"]);
    close(&place.bits("pool", job, &[]), &local);
    let job = Job { wire: "Bf16", ..JOB };
    let local = place.bits("bf16-local", job, &["--attention", "local"]);
    let pool = place.bits("bf16", job, &[]);
    assert_eq!(pool.losses[0], local.losses[0], "rows are rounded once, wherever they go");
}

#[test]
fn a_lost_server_changes_no_bit() {
    let place = Place::new();
    let calm = place.bits("calm", JOB, &[]);
    for (name, args) in [
        ("killed-forward", &["--fault", "kill-server:0@1:fwd"][..]),
        ("killed-backward", &["--fault", "kill-server:1@2:bwd"]),
        ("stopped", &["--fault", "stop-server:0@1:bwd"]),
        ("vacant", &["--fault", "kill-server:1@1:fwd", "--no-replace"]),
        ("twice", &["--fault", "kill-server:0@1:fwd", "--fault", "kill-server:1@3:bwd"]),
    ] {
        let run = place.run(name, JOB, args);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        assert_eq!(run.bits(), calm, "{name}");
        assert!(run.failovers() > 0, "{name}: no slot was lost");
    }
}

#[test]
fn headers_of_a_run_give_its_bits_again() {
    let place = Place::new();
    let grown = place.bits("grown", JOB, &["--fault", "add-server@2:fwd"]);
    let headers = place.path("grown").join("headers.jsonl");
    let slots = |it: &Value| it["slots"].as_array().map_or(0, Vec::len);
    let counts: Vec<_> = rows(&headers).iter().map(slots).collect();
    assert_eq!((counts[0], counts[STEPS - 1]), (2, 3), "a server was added: {counts:?}");
    let headers = headers.display().to_string();
    let again = Job { servers: 3, ..JOB };
    assert_ne!(place.bits("without-headers", again, &[]), grown, "slots are seen in the bits");
    assert_eq!(place.bits("replayed", again, &["--headers", &headers]), grown);
    // The bits of so few steps seldom show how many slots there were.
    let headers = place.path("replayed").join("headers.jsonl");
    let replayed: Vec<_> = rows(&headers).iter().map(slots).collect();
    assert_eq!(replayed, counts);
}

#[test]
fn the_last_server_lost_does_what_the_job_says() {
    let place = Place::new();
    let alone = Job { servers: 1, ..JOB };
    let calm = place.bits("calm", alone, &[]);
    let fault = ["--fault", "kill-server@2:bwd"];
    let waits = place.bits("waits", alone, &fault);
    assert_eq!(waits, calm, "a replacement fills the slot in the step");

    let local = Job { on_pool_loss: "Local", ..alone };
    let args = [&fault[..], &["--no-replace"]].concat();
    assert_eq!(place.bits("goes-local", local, &args), calm, "trainers take the bundles");

    let run = place.run("fails", Job { on_pool_loss: "Fail", ..alone }, &args);
    assert_eq!(run.code, Some(3), "{}", run.said);
    assert!(run.said.contains("no attention server is left in step 2"), "{}", run.said);
}

#[test]
fn a_dead_trainer_restarts_the_job_from_its_checkpoint() {
    let place = Place::new();
    let calm = place.bits("calm", JOB, &[]);
    let fault = ["--fault", "kill-trainer:1@3:fwd"];
    let run = place.run("fails", JOB, &fault);
    assert_eq!(run.code, Some(3), "{}", run.said);
    assert!(run.out.join("checkpoints/step-3").is_dir(), "{}\n{}", run.said, run.logs());
    let restarted = place.bits("restarts", Job { restarts: 1, ..JOB }, &fault);
    assert_eq!(restarted, calm);
    let first =
        place.run("first-dies", Job { restarts: 1, ..JOB }, &["--fault", "kill-trainer:0@3:bwd"]);
    assert_eq!((first.code, first.bits()), (Some(0), calm), "{}", first.said);
}

#[test]
fn an_interrupted_job_goes_on_with_the_same_bits() {
    let place = Place::new();
    let calm = place.bits("calm", JOB, &[]);
    // The run waits for the stopped server until that one is declared lost, so the signal comes in time.
    let fault = ["--fault", "stop-server:0@2:bwd"];
    let mut child = place.command("stopped", JOB, &fault).spawn().expect("the binary starts");
    let out = place.path("stopped");
    until("the first step", || !rows_so_far(&out.join("steps.jsonl")).is_empty());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    assert_eq!(child.wait().expect("a child can be waited for").code(), Some(130));
    let done = rows(&out.join("steps.jsonl")).len();
    assert!(out.join(format!("checkpoints/step-{done}")).is_dir(), "{done} steps");
    assert!(alive(&out).is_empty(), "{:?}", alive(&out));

    let state = out.join(format!("checkpoints/step-{done}/state.json"));
    let good = fs::read(&state).expect("a whole checkpoint");
    let files = || ["steps.jsonl", "summary.json"].map(|it| fs::read(out.join(it)).expect("there"));
    let before = files();
    fs::write(&state, "{").expect("a small file");
    let damaged = place.run("stopped", JOB, &["--resume"]);
    assert_eq!(damaged.code, Some(2), "{}", damaged.said);
    assert!(damaged.said.contains("state.json is damaged"), "{}", damaged.said);
    assert_eq!(files(), before, "a refused run changes nothing");
    fs::write(&state, good).expect("a small file");

    assert_eq!(place.bits("stopped", JOB, &["--resume"]), calm);
    assert!(alive(&out).is_empty(), "{:?}", alive(&out));
}

#[test]
fn nothing_outlives_a_killed_supervisor() {
    let place = Place::new();
    let rooms = place.path("t");
    fs::create_dir(&rooms).expect("a new folder");
    let left = || fs::read_dir(&rooms).expect("it is there").count();
    let alone = Job { servers: 1, ..JOB }; // It waits for its stopped server, which cannot leave by itself.
    let mut command = place.command("orphans", alone, &["--fault", "stop-server@1:fwd"]);
    let mut child = command.env("TMPDIR", &rooms).spawn().expect("the binary starts");
    let out = place.path("orphans");
    until("a stopped server", || processes(&out).iter().any(|&it| state(it) == Some('T')));
    let pids = processes(&out);
    assert_eq!((pids.len(), left()), (3, 1));
    threads::are_those_of_the_page(&out, child.id());
    child.kill().expect("it runs");
    child.wait().expect("a child can be waited for");
    until("the end of all workers", || !pids.iter().any(|&it| runs(it)));

    assert_eq!(left(), 1, "nobody could remove the folder of the control socket");
    let next = place.command("next", JOB, &[]).env("TMPDIR", &rooms).status();
    assert!(next.expect("the binary starts").success());
    assert_eq!(left(), 0, "the next run does");
}

/// Whole lines of a file that is being written.
fn rows_so_far(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(ToOwned::to_owned).collect()
}

/// Processes that a run has started and not ended.
fn processes(out: &Path) -> Vec<u64> {
    let text = fs::read_to_string(out.join("processes.json")).unwrap_or_default();
    let list: Vec<Value> = serde_json::from_str(&text).unwrap_or_default();
    list.iter().filter_map(|it| it["pid"].as_u64()).collect()
}

fn alive(out: &Path) -> Vec<u64> {
    processes(out).into_iter().filter(|&it| runs(it)).collect()
}

/// Whether a process is there and no zombie.
fn runs(pid: u64) -> bool {
    state(pid).is_some_and(|it| !matches!(it, 'Z' | 'X'))
}

/// What the kernel says of a process.
fn state(pid: u64) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}
