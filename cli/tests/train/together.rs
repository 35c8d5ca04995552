//! Servers that are lost together: two or three of five, killed or stopped in one moment, alone or with trainer 0; and servers that are
//! asked to end.
//!
//! Every case of them is in the soak (`make soak PARTS=together`); a test run takes one that the commit's tree draws.

use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Bits, JOB, Job, Place, Run, rows_so_far};
use crate::fs;

#[path = "../../../testing/seeds.rs"]
mod seeds;

const SERVERS: u16 = 5;
/// For so long trainer 0 stands still, less than a suspicion.
const PAUSE: Duration = Duration::from_millis(600);

/// Longer than a job may wait for a pool.
const HANGS: Duration = Duration::from_mins(3);

/// How servers are lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum How {
    /// By SIGKILL.
    Killed,
    /// By SIGSTOP.
    Stopped,
    /// By SIGSTOP, and trainer 0 stands still with them for [`PAUSE`].
    StoppedWithTrainer0,
    /// By SIGTERM: they leave.
    AskedToEnd,
}

impl How {
    /// Steps of a run, long enough for a signal to come in the middle, and for replacements of those that leave.
    fn steps(self) -> usize {
        if self == Self::AskedToEnd { 60 } else { 12 }
    }

    fn signal(self) -> Signal {
        match self {
            Self::Killed => Signal::KILL,
            Self::Stopped | Self::StoppedWithTrainer0 => Signal::STOP,
            Self::AskedToEnd => Signal::TERM,
        }
    }
}

/// Every pair and triple of the servers, in every way.
fn cases() -> Vec<(How, Vec<u16>)> {
    let all = 0..1_u16 << SERVERS;
    let some = all.filter(|it| [2, 3].contains(&it.count_ones()));
    let lists =
        some.map(|it| (0..SERVERS).filter(|index| it >> index & 1 == 1).collect::<Vec<_>>());
    let ways = [How::Killed, How::Stopped, How::StoppedWithTrainer0];
    lists.flat_map(|it| ways.map(|how| (how, it.clone()))).collect()
}

/// The first lives of workers of a run, once all are there.
fn pids(out: &std::path::Path, role: &str, count: u16) -> Option<Vec<Pid>> {
    let text = fs::read_to_string(out.join("processes.json")).ok()?;
    let list: Vec<serde_json::Value> = serde_json::from_str(&text).ok()?;
    let pid = |index| {
        let first = |it: &&serde_json::Value| {
            it["role"] == role && it["index"] == index && it["incarnation"] == 0
        };
        Pid::from_raw(i32::try_from(list.iter().find(first)?["pid"].as_i64()?).ok()?)
    };
    (0..count).map(pid).collect()
}

/// Ends with the test, also with one that fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn job() -> Job {
    Job { servers: SERVERS, every: "--checkpoint-every=0", ..JOB }
}

fn bits(run: &Run, how: How) -> Bits {
    let bits = |row: serde_json::Value| {
        let text = row["loss_bits"].as_str().expect("a step has its bits").to_owned();
        u32::from_str_radix(&text, 16).expect("8 hex digits")
    };
    let checkpoint = run.out.join(format!("checkpoints/step-{}", how.steps()));
    let file = |name: &str| fs::read(checkpoint.join(name)).expect("the last checkpoint");
    Bits {
        losses: super::rows(&run.out.join("steps.jsonl")).into_iter().map(bits).collect(),
        weights: ["model.safetensors", "optimizer.safetensors"].map(file).to_vec(),
    }
}

/// Signals the servers once two steps are done; `None` if the run was over before.
fn lose(place: &Place, name: &str, how: How, servers: &[u16]) -> Option<Run> {
    let steps = format!("--steps={}", how.steps());
    let mut command = place.command(name, job(), &[&steps]);
    let mut run = Running(command.spawn().expect("the binary starts"));
    let out = place.path(name);
    let start = Instant::now();
    while rows_so_far(&out.join("steps.jsonl")).len() < 2 {
        if run.0.try_wait().expect("a child can be waited for").is_some() {
            return None;
        }
        assert!(start.elapsed() < Duration::from_mins(1), "{name}: no step was done");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let all = pids(&out, "server", SERVERS).expect("servers have worked");
    let trainer = pids(&out, "trainer", 1).expect("trainers have worked")[0];
    let with_trainer = how == How::StoppedWithTrainer0;
    // The end of the run may come first.
    let mut hit = true;
    if with_trainer {
        hit &= kill_process(trainer, Signal::STOP).is_ok();
    }
    for index in servers {
        hit &= kill_process(all[usize::from(*index)], how.signal()).is_ok();
    }
    if with_trainer {
        std::thread::park_timeout(PAUSE);
        let _ = kill_process(trainer, Signal::CONT);
    }
    // The run ends by deadlines of its own.
    let limit = Instant::now();
    let mut code = None;
    while code.is_none() {
        assert!(limit.elapsed() < HANGS, "{name}: the run hangs");
        std::thread::park_timeout(Duration::from_millis(5));
        code = run.0.try_wait().expect("a child can be waited for");
    }
    let said = format!("{:?} after the signals", limit.elapsed());
    hit.then_some(Run { code: code.and_then(|it| it.code()), out, said })
}

fn check(place: &Place, calm: &Bits, how: How, servers: &[u16]) -> Run {
    let name = |number| format!("{how:?}-{servers:?}-{number}").replace(['[', ']', ',', ' '], "");
    let run = (0..5).find_map(|number| lose(place, &name(number), how, servers));
    let run = run.expect("signals come in the middle of one of five runs");
    let case = format!("servers {servers:?}, {how:?}");
    assert_eq!(run.code, Some(0), "{case}: {}\n{}", run.said, run.logs());
    assert_eq!(bits(&run, how), *calm, "{case}: {}", run.logs());
    println!("{case}: {} of failover, {}", run.failovers(), run.said);
    run
}

fn calm(place: &Place, how: How) -> Bits {
    let run = place.run("calm", job(), &[&format!("--steps={}", how.steps())]);
    assert_eq!(run.code, Some(0), "{}\n{}", run.said, run.logs());
    bits(&run, how)
}

#[test]
fn two_or_three_of_five_servers_lost_at_once_change_no_bit() {
    let place = Place::new();
    let cases = cases();
    let seeds = seeds::first_seeds("servers lost together", 0, 2);
    let drawn = seeds.last().expect("there are seeds").0 as usize % cases.len();
    let (how, servers) = &cases[drawn];
    let calm = calm(&place, *how);
    check(&place, &calm, *how, servers);
}

#[test]
fn servers_that_get_sigterm_leave_without_a_failover_and_are_replaced() {
    let place = Place::new();
    let how = How::AskedToEnd;
    let calm = calm(&place, how);
    let run = check(&place, &calm, how, &[0, 3]);
    assert_eq!(run.failovers(), 0, "{}", run.logs());
    let used = super::rows(&run.out.join("servers.jsonl"));
    for name in ["server-0", "server-3"] {
        let next = |it: &serde_json::Value| it["server"] == name && it["incarnation"] == 1;
        assert!(used.iter().any(next), "{name} was not replaced: {}", run.logs());
    }
}

#[test]
fn a_server_that_gets_sigterm_before_it_has_joined_ends_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let control = folder.path().join("control");
    // Nobody answers there.
    let _listener = UnixListener::bind(&control).expect("a free path");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
    command.arg("serve").env("CADRE_CONTROL", &control);
    command.envs([("CADRE_ROLE", "server"), ("CADRE_INDEX", "0"), ("CADRE_INCARNATION", "0")]);
    let mut server = Running(command.stderr(Stdio::null()).spawn().expect("the binary starts"));
    let pid = server.0.id();
    let hears = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let caught = status.lines().find_map(|it| it.strip_prefix("SigCgt:")).expect("a line");
        let caught = u64::from_str_radix(caught.trim(), 16).expect("hex digits");
        caught >> (Signal::TERM.as_raw() - 1) & 1 == 1
    };
    while !hears() {
        assert!(server.0.try_wait().expect("a child can be waited for").is_none());
        std::thread::park_timeout(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&server.0), Signal::TERM).expect("it runs");
    assert_eq!(server.0.wait().expect("a child can be waited for").code(), Some(143));
}

#[test]
#[ignore = "takes minutes: make soak PARTS=together"]
fn every_pair_and_triple_of_five_servers_lost_at_once_changes_no_bit() {
    let place = Place::new();
    let calm = calm(&place, How::Killed);
    for (how, servers) in cases() {
        let run = check(&place, &calm, how, &servers);
        let _ = fs::remove_dir_all(&run.out);
    }
}

#[test]
#[ignore = "takes minutes: make soak PARTS=together"]
fn a_step_of_131_000_documents_of_4_tokens_trains() {
    const DOCUMENTS: usize = 131_000;
    let place = Place::new();
    let lines = (0..DOCUMENTS).map(|it| format!("{{\"text\": \"{:04x}\"}}\n", it & 0xffff));
    let data = place.path("data");
    fs::remove_dir_all(&data).expect("a folder");
    fs::create_dir(&data).expect("a new folder");
    fs::write(data.join("all.jsonl"), lines.collect::<String>()).expect("a file");
    let job = Job { silence: 30, every: "--checkpoint-every=0", ..JOB };
    let mut command = place.command("many", job, &["--steps=2"]);
    let manifest = place.path("many.yaml");
    let text = fs::read_to_string(&manifest).expect("it was just written");
    // All of them in one step, over both trainers.
    let tokens = format!("--tokens={}", 4 * DOCUMENTS / 2);
    fs::write(&manifest, text.replace("--tokens=256", &tokens)).expect("a small file");
    let output = command.output().expect("the binary starts");
    let out = place.path("many");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let run = Run { code: output.status.code(), out, said };
    assert_eq!(run.code, Some(0), "{}\n{}", run.said, run.logs());
    let rows = super::rows(&run.out.join("steps.jsonl"));
    assert_eq!(rows.len(), 2, "{}", run.said);
    let headers = super::rows(&run.out.join("headers.jsonl"));
    let documents = |it: &serde_json::Value| {
        let nanos = it["nanos"].as_array().into_iter().flatten();
        nanos.filter_map(|it| it["documents"].as_array()).map(Vec::len).sum::<usize>()
    };
    let most = headers.iter().map(documents).max();
    assert!(most >= Some(DOCUMENTS * 9 / 10), "{most:?} documents in a step");
    println!("{most:?} documents in a step, {} s each", rows[1]["seconds"]);
}
