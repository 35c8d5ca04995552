//! Attention beside PyTorch's SDPA in f32 on the same machine, two threads, run by turns.
//!
//! Prints a line a case and writes `target/bench/attention.json`. The peer is a Python process that
//! stays up (`bench/peers/sdpa.py`); the interpreter comes from `CADRE_BENCH_PYTHON`, else `python3`.
//! Without PyTorch there it says so, and the peer's numbers are null. Any argument narrows the cases to
//! those whose name contains it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use cadre_kernels::{
    Backward, BackwardRows, Forward, Heads, Mask, Rows, RowsMut, Threads, backward, forward,
    instruction_set, key_tiles,
};
use serde_json::{Value, json};

const THREADS: usize = 2;
/// Turns per case, each of both sides: more for short cases, whose times scatter more.
const TURNS: std::ops::RangeInclusive<usize> = 5..=41;
/// Seconds that the turns of a case take together, within the limits above.
const TOGETHER: f64 = 1.5;

struct Case {
    name: String,
    lengths: Vec<u32>,
    heads: Heads,
}

fn main() {
    let filter = std::env::args().skip(1).find(|it| !it.starts_with('-')).unwrap_or_default();
    let mut peer = Peer::start();
    println!("attention on {} with {THREADS} threads, {}", instruction_set(), peer.name());
    let mut lines = Vec::new();
    for case in cases().iter().filter(|it| it.name.contains(&filter)) {
        let mut own = Own::new(case);
        let first = own.run();
        peer.run(case, 1);
        let turns = (TOGETHER / (2.0 * (first.0 + first.1))) as usize;
        let (mut ours, mut theirs) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..turns.clamp(*TURNS.start(), *TURNS.end()) {
            let (forward, backward) = own.run();
            ours[0].push(forward);
            ours[1].push(backward);
            if let Some((forward, backward)) = peer.run(case, 1) {
                theirs[0].push(forward);
                theirs[1].push(backward);
            }
        }
        for (pass, (ours, theirs)) in
            ["forward", "backward"].iter().zip(ours.into_iter().zip(theirs))
        {
            let (ours, theirs) = (median(ours).expect("turns were run"), median(theirs));
            let name = format!("{} {pass}", case.name);
            let work = case.operations() * if *pass == "forward" { 1.0 } else { 2.5 } / 1e9;
            let ratio = theirs.map(|it| it / ours);
            println!(
                "{name:<44} {:9.2} ms {:7.1} GFLOP/s  peer {:>9} ms  ratio {}",
                ours * 1e3,
                work / ours,
                theirs.map_or("-".into(), |it| format!("{:.2}", it * 1e3)),
                ratio.map_or("-".into(), |it| format!("{it:.2}")),
            );
            let theirs = theirs.map(|it| it * 1e3);
            lines.push(json!({"case": name, "ours": ours * 1e3, "peer": theirs,
                "peer_name": peer.name(), "unit": "ms", "ratio": ratio}));
        }
    }
    let target = target().join("bench");
    let file = target.join("attention.json");
    let text = serde_json::to_string_pretty(&lines).expect("numbers and names are JSON");
    std::fs::create_dir_all(&target)
        .and_then(|()| std::fs::write(&file, text + "\n"))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    println!("written: {}", file.display());
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (query, kv, dim) in [(4, 4, 64), (4, 4, 128), (4, 2, 64), (4, 2, 128)] {
        let heads = Heads { query, kv, dim };
        for length in [1024, 2048, 4096, 8192] {
            let name = format!("causal {length}, heads {query}:{kv}, dim {dim}");
            cases.push(Case { name, lengths: vec![length], heads });
        }
        let name = format!("packed mix, heads {query}:{kv}, dim {dim}");
        let lengths = vec![2900, 1400, 700, 700, 350, 350, 350, 170, 170, 170, 90, 90, 90, 33, 33];
        cases.push(Case { name, lengths, heads });
    }
    cases
}

impl Case {
    /// Multiplications and additions of the forward pass.
    fn operations(&self) -> f64 {
        let pairs: f64 =
            self.lengths.iter().map(|&it| f64::from(it) * (f64::from(it) + 1.0) / 2.0).sum();
        pairs * (self.heads.query * self.heads.dim) as f64 * 4.0
    }
}

/// Our side: one launch for all documents.
struct Own<'a> {
    case: &'a Case,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl<'a> Own<'a> {
    fn new(case: &'a Case) -> Self {
        let rows = case.lengths.iter().sum::<u32>() as usize;
        let Heads { query, kv, dim } = case.heads;
        let (q, kv) = (rows * query * dim, rows * kv * dim);
        Self {
            case,
            q: numbers(1, q),
            k: numbers(2, kv),
            v: numbers(3, kv),
            dout: numbers(4, q),
            out: vec![0.0; q],
            lse: vec![0.0; rows * query],
            delta: vec![0.0; rows * query],
            dq: vec![0.0; q],
            dk: vec![0.0; kv],
            dv: vec![0.0; kv],
        }
    }

    /// Seconds of a forward and of a backward pass; Δ counts as backward.
    fn run(&mut self) -> (f64, f64) {
        let Heads { query, kv, dim } = self.case.heads;
        let (scale, threads) = ((dim as f32).powf(-0.5), Threads::new(THREADS));
        let start = Instant::now();
        let (mut out, mut lse) = (&mut self.out[..], &mut self.lse[..]);
        let mut tasks = Vec::new();
        let mut first = 0;
        for &length in &self.case.lengths {
            let rows = first..first + length as usize;
            first = rows.end;
            tasks.push(Forward {
                heads: self.case.heads,
                mask: Mask::Causal,
                scale,
                softcap: None,
                document_rows: length,
                rows: 0..length,
                keys: 0..length,
                q: Rows::F32(&self.q[rows.start * query * dim..rows.end * query * dim]),
                k: Rows::F32(&self.k[rows.start * kv * dim..rows.end * kv * dim]),
                v: Rows::F32(&self.v[rows.start * kv * dim..rows.end * kv * dim]),
                out: RowsMut::F32(
                    out.split_off_mut(..rows.len() * query * dim).expect("rows add up"),
                ),
                lse: lse.split_off_mut(..rows.len() * query).expect("rows add up"),
            });
        }
        forward(&mut tasks, threads).expect("the case is well formed");
        drop(tasks);
        let middle = Instant::now();
        let rows = self.out.chunks_exact(dim).zip(self.dout.chunks_exact(dim));
        for (delta, (o, d)) in self.delta.iter_mut().zip(rows) {
            *delta = o.iter().zip(d).map(|(o, d)| o * d).sum();
        }
        let (mut dq, mut dk, mut dv) = (&mut self.dq[..], &mut self.dk[..], &mut self.dv[..]);
        let mut bundles = Vec::new();
        let mut first = 0;
        for &length in &self.case.lengths {
            let rows = first..first + length as usize;
            first = rows.end;
            let (queries, keys) = (rows.len() * query * dim, rows.len() * kv * dim);
            let part = BackwardRows {
                rows: 0..length,
                q: Rows::F32(&self.q[rows.start * query * dim..rows.end * query * dim]),
                dout: Rows::F32(&self.dout[rows.start * query * dim..rows.end * query * dim]),
                lse: &self.lse[rows.start * query..rows.end * query],
                delta: &self.delta[rows.start * query..rows.end * query],
                dq: dq.split_off_mut(..queries).expect("rows add up"),
            };
            bundles.push(Backward {
                heads: self.case.heads,
                mask: Mask::Causal,
                scale,
                softcap: None,
                document_rows: length,
                keys: 0..length,
                k: Rows::F32(&self.k[rows.start * kv * dim..rows.end * kv * dim]),
                v: Rows::F32(&self.v[rows.start * kv * dim..rows.end * kv * dim]),
                parts: vec![part],
                dk: dk.split_off_mut(..keys).expect("rows add up"),
                dv: dv.split_off_mut(..keys).expect("rows add up"),
                key_tiles: 0..key_tiles(&(0..length)),
            });
        }
        backward(&mut bundles, threads).expect("the case is well formed");
        ((middle - start).as_secs_f64(), middle.elapsed().as_secs_f64())
    }
}

/// The peer's side of the bench.
struct Peer(Option<Process>);

struct Process {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Peer {
    fn start() -> Self {
        let python = std::env::var("CADRE_BENCH_PYTHON").unwrap_or_else(|_| "python3".into());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/peers/sdpa.py");
        let child =
            Command::new(&python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let refuse = |why: &str| {
            println!("NO PEER: {python}: {why}; set CADRE_BENCH_PYTHON to a Python with torch");
            Self(None)
        };
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return refuse(&error.to_string()),
        };
        let requests = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().expect("it is piped"));
        let hello = answer(&mut answers);
        let Some(version) = hello["torch"].as_str().map(str::to_owned) else {
            let _ = child.wait();
            return refuse(hello["error"].as_str().unwrap_or("the peer's script did not start"));
        };
        Self(Some(Process { child, requests, answers, version }))
    }

    fn name(&self) -> String {
        match &self.0 {
            Some(process) => format!("PyTorch {} SDPA f32", process.version),
            None => "PyTorch SDPA f32 (absent)".into(),
        }
    }

    fn run(&mut self, case: &Case, runs: usize) -> Option<(f64, f64)> {
        let Process { requests, answers, .. } = self.0.as_mut()?;
        let Heads { query, kv, dim } = case.heads;
        let request = json!({"lengths": case.lengths, "query": query, "kv": kv, "dim": dim,
            "threads": THREADS, "runs": runs});
        writeln!(requests.as_mut()?, "{request}")
            .expect("the peer has died, see its message above");
        let seconds = answer(answers);
        Some((seconds["forward"][0].as_f64()?, seconds["backward"][0].as_f64()?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its input ends the script.
        self.requests = None;
        let _ = self.child.wait();
    }
}

fn answer(from: &mut impl BufRead) -> Value {
    let mut line = String::new();
    from.read_line(&mut line).ok();
    serde_json::from_str(&line).unwrap_or(Value::Null)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from)
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let number = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 3.4
    };
    (0..count).map(number).collect()
}
