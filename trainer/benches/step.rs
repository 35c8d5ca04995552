//! One training step of `small` with local attention, beside the same model in PyTorch.
//!
//! Both start from the same parameters and see the same rows; steps alternate, losses have to agree to
//! 1e-4. Out: a line a case, and `target/bench/step.json`. Python with torch from
//! `CADRE_BENCH_PYTHON` (default `python3`); without it only our side is measured, and said so.

use std::io::{BufRead, BufReader, Write};
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use cadre_kernels::Threads;
use cadre_trainer::InProcess;
use cadre_trainer::corpus::Corpus;
use cadre_trainer::loader::{Lengths, Loader, Settings, Stream};
use cadre_trainer::model::{Config, Model, Stack};
use cadre_trainer::optimizer::{AdamW, Hyper, Schedule};
use cadre_trainer::ring::Ring;
use cadre_trainer::step::Trainer;
use cadre_worker::session::{Kind, PhaseOrder, Turns};
use serde_json::{Value, json};

const THREADS: usize = 2;
const STEPS: u64 = 9;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join("target/bench");
    std::fs::create_dir_all(&folder).expect("target/bench can be made");
    let corpus = Corpus::read(&root.join("examples/bible")).expect("the shipped text is readable");
    let corpus = Arc::new(corpus);
    let mut lines = Vec::new();
    for tokens in [2048, 4096] {
        lines.extend(case(&root, &folder, &corpus, tokens));
    }
    let text = serde_json::to_string_pretty(&lines).expect("JSON of numbers and words");
    std::fs::write(folder.join("step.json"), text).expect("target/bench can be written");
}

fn case(root: &Path, folder: &Path, corpus: &Arc<Corpus>, tokens: u32) -> Vec<Value> {
    let some = |it| NonZeroU32::new(it).expect("not zero");
    let settings = Settings {
        trainers: some(1),
        tokens: some(tokens),
        nano_batches: some(1),
        cap: some(4096),
        seed: 1,
    };
    let loader = Loader::new(Arc::clone(corpus), Lengths::shipped(), settings)
        .expect("the shipped text has targets");
    let config = Config::preset("small").expect("a preset");
    let schedule = Schedule { peak: 1e-3, warmup: 4, steps: 100 };
    let stack =
        Stack::alike(Kind::causal(config.heads()), config.layers).expect("a preset has layers");
    let model = Model::new(config, stack.clone(), 4096, Threads::new(THREADS));
    let parameters = model.parameters().initial(1);
    let mut peer = Peer::start(root, folder, &config, &parameters);
    let optimizer = AdamW::new(Hyper::new(schedule), model.parameters());
    let mut attention = InProcess::new(stack.core().clone(), Threads::new(THREADS));
    let order = PhaseOrder::new(&Turns::together(NonZeroU16::MIN), stack.core().count(), 1)
        .expect("turns of one nano-batch");
    let mut trainer = Trainer::new(model, parameters, optimizer);

    let (mut ours, mut theirs, mut peer_peak) = (Vec::new(), Vec::new(), None);
    for step in 0..STEPS {
        let stream = loader.stream(step, 0);
        let begin = Instant::now();
        attention.begin(vec![stream.documents().to_vec()]);
        let rows = vec![stream.rows(0)];
        let targets = stream.count();
        let result = trainer
            .step((step, &order), rows, targets, &mut attention, &mut Ring::alone(), &mut ())
            .expect("the step succeeds");
        let seconds = begin.elapsed().as_secs_f64();
        // The first step warms both sides up.
        if step > 0 {
            ours.push(seconds);
        }
        if let Some(peer) = &mut peer {
            let answer = peer.step(folder, &stream, schedule.rate(step));
            let loss = answer["loss"].as_f64().expect("a loss");
            let difference = (loss - f64::from(result.loss)).abs();
            assert!(difference < 1e-4, "step {step}: loss {} and {loss}", result.loss);
            if step > 0 {
                theirs.push(answer["seconds"].as_f64().expect("a time"));
            }
            peer_peak = answer["peak_mib"].as_f64();
        }
    }
    let name = peer.as_ref().map(|it| it.name.clone());
    let shape = format!("small, {tokens} tokens, {THREADS} threads");
    let peak = peak_mib();
    let (ours, spread) = median(&mut ours);
    let theirs = (!theirs.is_empty()).then(|| median(&mut theirs).0);
    println!("step {shape}: {:.1} ms (±{:.1})", ours * 1e3, spread * 1e3);
    vec![
        line(&format!("step, {shape}"), ours * 1e3, theirs.map(|it| it * 1e3), name.as_ref(), "ms"),
        line(&format!("peak memory, {shape}"), peak, peer_peak, name.as_ref(), "MiB"),
    ]
}

/// Less is better in every case.
fn line(case: &str, ours: f64, peer: Option<f64>, name: Option<&String>, unit: &str) -> Value {
    let ratio = peer.map(|it| it / ours);
    match (peer, ratio) {
        (Some(peer), Some(ratio)) => {
            println!("{case}: {ours:.1} {unit}, peer {peer:.1} {unit}, ratio {ratio:.2}");
        }
        _ => println!("{case}: {ours:.1} {unit}, no peer"),
    }
    json!({"case": case, "ours": ours, "peer": peer, "peer_name": name, "unit": unit, "ratio": ratio})
}

fn median(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |share: usize| values[(values.len() - 1) * share / 4];
    (at(2), (at(3) - at(1)) / 2.0)
}

fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|it| it.starts_with("VmHWM")).expect("Linux has it");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|it| it.parse().ok()).expect("KiB");
    kib / 1024.0
}

/// The Python child, which stays up for a case.
struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    name: String,
}

impl Peer {
    fn start(root: &Path, folder: &Path, config: &Config, parameters: &[f32]) -> Option<Self> {
        let python = std::env::var("CADRE_BENCH_PYTHON").unwrap_or_else(|_| "python3".into());
        let torch = Command::new(&python)
            .args(["-c", "import torch"])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|it| it.success());
        if !torch {
            println!("no peer: {python} cannot import torch; set CADRE_BENCH_PYTHON");
            return None;
        }
        let path: PathBuf = folder.join("step.parameters");
        std::fs::write(&path, bytemuck::cast_slice(parameters)).expect("target/bench is writable");
        let mut child = Command::new(python)
            .arg(root.join("bench/peers/step.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts, it did before");
        let orders = child.stdin.take().expect("it is piped");
        let answers = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut peer = Self { child, orders, answers, name: String::new() };
        let order = json!({"parameters": path, "config": config, "threads": THREADS});
        let answer = peer.ask(&order);
        answer["name"].as_str().expect("a name").clone_into(&mut peer.name);
        Some(peer)
    }

    fn step(&mut self, folder: &Path, stream: &Stream, rate: f32) -> Value {
        let rows = stream.rows(0);
        let mut bytes: Vec<u8> = rows.ids.iter().map(|&it| it as u8).collect();
        for target in rows.targets {
            bytes.extend(target.map_or(-1, |it| it as i16).to_ne_bytes());
        }
        let path = folder.join("step.rows");
        std::fs::write(&path, bytes).expect("target/bench is writable");
        self.ask(&json!({"step": path, "documents": stream.documents(), "rate": rate}))
    }

    fn ask(&mut self, order: &Value) -> Value {
        writeln!(self.orders, "{order}").expect("the peer reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the peer answers");
        serde_json::from_str(&answer).expect("the peer answers in JSON; its error is above")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
