//! Trainers among themselves: strangers at their ports, and one that stops where the others wait for it.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::{JOB, Job, Place, processes, rows_so_far, until};
use crate::{fs, state};

/// The process of a trainer in its first life.
fn pid_of(out: &std::path::Path, trainer: u64) -> Option<u64> {
    let text = fs::read_to_string(out.join("processes.json")).ok()?;
    let list: Vec<serde_json::Value> = serde_json::from_str(&text).ok()?;
    let first = |it: &&serde_json::Value| {
        it["role"] == "trainer" && it["index"] == trainer && it["incarnation"] == 0
    };
    list.iter().find(first)?["pid"].as_u64()
}

/// Ports at which a process listens.
fn ports(pid: u64) -> Vec<u16> {
    let sockets: Vec<String> = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|it| fs::read_link(it.path()).ok())
        .filter_map(|it| Some(it.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, local, _, "0A", _, _, _, _, _, inode, ..] = fields[..] else { return None };
        let ours = sockets.iter().any(|it| it == inode);
        u16::from_str_radix(local.split_once(':')?.1, 16).ok().filter(|_| ours)
    };
    table.lines().filter_map(port).collect()
}

/// Steps of the checkpoints of a run, ascending.
fn checkpoints(out: &std::path::Path) -> Vec<usize> {
    let folders = fs::read_dir(out.join("checkpoints")).into_iter().flatten().flatten();
    let mut steps: Vec<usize> = folders
        .filter_map(|it| it.file_name().to_str()?.strip_prefix("step-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

/// Ends with the test, also with one that fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn strangers_at_every_port_from_the_first_moment_change_nothing() {
    let place = Place::new();
    let calm = place.bits("calm", JOB, &[]);
    let mut run = Running(place.command("strangers", JOB, &[]).spawn().expect("the binary starts"));
    let out = place.path("strangers");
    let (mut seen, mut open) = (std::collections::BTreeSet::new(), Vec::new());
    until("the end of the run", || {
        for port in processes(&out).into_iter().flat_map(ports) {
            if !seen.insert(port) {
                continue;
            }
            for words in
                [&b""[..], &[9; 200], &b"cadrex01"[..], &[0; 64], &b"GET / HTTP/1.1\r\n\r\n"[..]]
            {
                // Who has ended meanwhile takes nobody.
                if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                    let _ = stream.write_all(words);
                    open.push(stream);
                }
            }
        }
        run.0.try_wait().expect("a child can be waited for").is_some()
    });
    // Ports of the ring close as soon as the ring stands, often before anybody has looked: its own tests knock at them.
    assert!(seen.len() >= 4, "one port of the exchange in each process: {seen:?}");
    let ended = super::Run { code: Some(0), out, said: String::new() };
    assert_eq!(ended.bits(), calm, "{}", ended.logs());
}

/// Whether the main thread waits for sockets: that is in the all-reduce alone.
fn is_in_the_ring(pid: u64) -> bool {
    fs::read_to_string(format!("/proc/{pid}/wchan")).is_ok_and(|it| it.contains("poll"))
}

/// Starts a run, and stops trainer `victim` when the other one waits for it in the all-reduce. `None` when the run was
/// over before that came about.
fn catch_in_the_all_reduce(
    mut command: std::process::Command,
    out: &std::path::Path,
    [victim, other]: [u64; 2],
) -> Option<Running> {
    let mut run = Running(command.spawn().expect("the binary starts"));
    loop {
        if run.0.try_wait().expect("a child can be waited for").is_some() {
            return None;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(2));
        let (Some(victim), Some(other)) = (pid_of(out, victim), pid_of(out, other)) else {
            continue;
        };
        if rows_so_far(&out.join("steps.jsonl")).len() < 2 || !is_in_the_ring(other) {
            continue;
        }
        let pid = Pid::from_raw(victim as i32).expect("a process has a number");
        // The end of the run may come first.
        if kill_process(pid, Signal::STOP).is_err() {
            continue;
        }
        until("a stopped trainer", || matches!(state(victim), Some('T' | 'Z' | 'X') | None));
        // What was on its way has to have come.
        let waits = (0..20).all(|_| {
            std::thread::park_timeout(std::time::Duration::from_millis(5));
            is_in_the_ring(other)
        });
        if waits {
            return Some(run);
        }
        let _ = kill_process(pid, Signal::CONT);
    }
}

/// Stops trainer `victim` while the other one waits for it in the all-reduce, and checks that nothing but the step in
/// progress is done again.
fn stopped_in_the_all_reduce(victim: u64, other: u64) {
    const LONG: usize = 40;
    let place = Place::new();
    let steps = format!("--steps={LONG}");
    let calm = place.run("calm", JOB, &[&steps]);
    assert_eq!(calm.code, Some(0), "{}", calm.said);
    // No checkpoint on the way: what is kept is what the survivor writes.
    let job = Job { restarts: 1, silence: 2, every: "--checkpoint-every=0", ..JOB };
    // A run may pass without a moment in which one trainer alone waits for long enough to be seen.
    let caught = (0..20).find_map(|number| {
        let name = format!("stopped-{number}");
        let command = place.command(&name, job, &[&steps]);
        let run = catch_in_the_all_reduce(command, &place.path(&name), [victim, other])?;
        Some((name, run))
    });
    let (name, mut run) = caught.expect("a trainer in the all-reduce in one of twenty runs");
    let out = place.path(&name);
    let done = rows_so_far(&out.join("steps.jsonl")).len();
    // The run ends by deadlines of its own.
    let code = run.0.wait().expect("a child can be waited for").code();
    let kept = |name: &str| {
        let rows = super::rows(&place.path(name).join("steps.jsonl"));
        rows.iter().map(|it| it["loss_bits"].clone()).collect::<Vec<_>>()
    };
    let logs = super::Run { code: None, out: out.clone(), said: String::new() }.logs();
    assert_eq!((code, kept(&name)), (Some(0), kept("calm")), "{logs}");
    assert_eq!(kept("calm").len(), LONG);
    // Checkpoints are of two moments: the survivor's, and the end's.
    let steps = checkpoints(&out);
    assert_eq!((steps.len(), steps.last()), (2, Some(&LONG)), "{steps:?}\n{logs}");
    assert!(steps[0] >= done, "{} steps of {done} were kept\n{logs}", steps[0]);
}

#[test]
fn a_trainer_that_stops_inside_the_all_reduce_costs_one_step() {
    stopped_in_the_all_reduce(1, 0);
}

#[test]
fn a_conductor_that_stops_inside_the_all_reduce_costs_one_step() {
    stopped_in_the_all_reduce(0, 1);
}

#[test]
fn a_job_that_is_killed_as_a_whole_goes_on_from_a_checkpoint_by_default() {
    let place = Place::new();
    let (job, steps) = (Job { every: "", keep: 1, ..JOB }, "--steps=25");
    let calm = place.run("calm", job, &[steps]);
    assert_eq!((calm.code, checkpoints(&calm.out)), (Some(0), vec![25]), "{}", calm.said);
    // The run waits for the stopped server until that one is declared lost, so the kill comes in time.
    let mut command = place.command("killed", job, &[steps, "--fault", "stop-server:0@22:bwd"]);
    let mut run = Running(command.spawn().expect("the binary starts"));
    let out = place.path("killed");
    // The row of a step comes after its checkpoint.
    let rows = out.join("steps.jsonl");
    until("a checkpoint", || checkpoints(&out) == [20] && rows_so_far(&rows).len() >= 20);
    let all = processes(&out);
    run.0.kill().expect("it runs");
    // The run holds its folder until it has ended.
    run.0.wait().expect("it was killed");
    until("the end of all workers", || !all.iter().any(|&it| super::runs(it)));
    // As if the kill had come while a checkpoint was written.
    let half = out.join("checkpoints/.step-21-0");
    fs::create_dir(&half).expect("a new folder");
    fs::write(half.join("model.safetensors"), "half").expect("a small file");

    let resumed = place.run("killed", job, &[steps, "--resume"]);
    assert_eq!(resumed.code, Some(0), "{}\n{}", resumed.said, resumed.logs());
    let losses = |out: &std::path::Path| {
        let rows = super::rows(&out.join("steps.jsonl"));
        rows.iter().map(|it| it["loss_bits"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(losses(&resumed.out), losses(&calm.out));
    assert_eq!(checkpoints(&out), [25]);
    assert!(!half.exists(), "half a checkpoint stays");
}

#[test]
fn a_job_that_is_resumed_with_more_steps_says_that_its_learning_rate_changes() {
    let place = Place::new();
    let first = place.run("longer", JOB, &["--steps=2"]);
    assert_eq!(first.code, Some(0), "{}", first.said);
    let same = place.run("longer", JOB, &["--steps=2", "--resume"]);
    assert!(!same.said.contains("the learning rate"), "{}", same.said);
    let longer = place.run("longer", JOB, &["--steps=3", "--resume"]);
    assert_eq!(longer.code, Some(0), "{}\n{}", longer.said, longer.logs());
    let expected = "the learning rate goes another way from step 2 on";
    let was = "it was --lr 0.003 after --warmup 10, falling until --steps 2";
    assert!(longer.said.contains(expected) && longer.said.contains(was), "{}", longer.said);
}

#[test]
fn the_learning_rate_and_the_norm_of_the_gradient_of_each_step_are_told() {
    let place = Place::new();
    let run = place.run("told", JOB, &["--steps=3"]);
    assert_eq!(run.code, Some(0), "{}", run.said);
    let rows = super::rows(&run.out.join("steps.jsonl"));
    let of =
        |name: &str| rows.iter().map(|it| it[name].as_f64().unwrap_or(-1.0)).collect::<Vec<_>>();
    // Ten steps of warm-up to the default of 3e-3.
    for (step, rate) in of("lr").into_iter().enumerate() {
        assert!((rate - 3e-4 * (step + 1) as f64).abs() < 1e-9, "{rate} in step {step}");
    }
    assert!(of("gradient_norm").iter().all(|it| *it > 1e-3 && *it < 1e3), "{rows:?}");
}

#[test]
fn a_step_that_nobody_told_of_is_in_the_logs_of_who_goes_on_from_its_checkpoint() {
    let place = Place::new();
    let calm = place.run("told", JOB, &["--steps=3"]);
    assert_eq!(calm.code, Some(0), "{}", calm.said);
    // As if trainer 0 had died when all had done the step, and had told nobody.
    let files = ["steps.jsonl", "headers.jsonl"].map(|it| calm.out.join(it));
    let whole = files.clone().map(|it| fs::read_to_string(it).expect("a log"));
    for (path, text) in files.iter().zip(&whole) {
        let two: String = text.split_inclusive('\n').take(2).collect();
        fs::write(path, two).expect("a small file");
    }
    let resumed = place.run("told", JOB, &["--steps=4", "--resume"]);
    assert_eq!(resumed.code, Some(0), "{}\n{}", resumed.said, resumed.logs());
    let [steps, headers] = files.map(|it| super::rows(&it));
    assert_eq!((steps.len(), headers.len()), (4, 4));
    let line = |text: &str, at: usize| -> serde_json::Value {
        serde_json::from_str(text.lines().nth(at).expect("a row")).expect("a line of JSON")
    };
    assert_eq!(headers[2], line(&whole[1], 2));
    for field in ["step", "loss_bits", "lr", "gradient_norm", "tokens", "view"] {
        assert_eq!(steps[2][field], line(&whole[0], 2)[field], "{field}");
    }
}

#[test]
fn documents_that_are_held_out_are_evaluated_alike_with_a_pool_and_without() {
    let place = Place::new();
    let every = "--checkpoint-every=2, --validate=0.3, --validate-every=4";
    let job = Job { every, ..JOB };
    let losses = |name: &str, args: &[&str]| {
        let run = place.run(name, job, args);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        let rows = super::rows(&run.out.join("steps.jsonl"));
        rows.iter().map(|it| it["validation_loss"].as_f64()).collect::<Vec<_>>()
    };
    let calm = losses("calm", &[]);
    // After four steps, and after the last one.
    let [None, None, None, Some(first), None, Some(last)] = calm[..] else { panic!("{calm:?}") };
    assert!(last < first && first < 6.0, "{calm:?}");
    assert_eq!(losses("killed", &["--fault", "kill-server:0@3:bwd"]), calm);
    let local = losses("local", &["--attention", "local"]);
    for (pool, local) in calm.iter().flatten().zip(local.iter().flatten()) {
        assert!((pool - local).abs() < 1e-4, "{calm:?} {local:?}");
    }
    // What is held out is not trained on.
    let all = place.run("calm", Job { every: "--checkpoint-every=2", ..JOB }, &["--resume"]);
    assert_eq!(all.code, Some(2), "{}", all.said);
    assert!(all.said.contains("has another corpus"), "{}", all.said);
}

#[test]
fn a_rank_that_cannot_write_its_checkpoint_ends_the_job_and_the_others_write_theirs() {
    let place = Place::new();
    let mut command = place.command("full", JOB, &[]);
    let run = command.spawn().expect("the binary starts");
    let out = place.path("full");
    let folder = out.join("checkpoints");
    until("the folder of checkpoints", || folder.is_dir());
    // Where trainer 0 writes its draft, and it alone, there is something else.
    fs::write(folder.join(".step-2-0"), "full").expect("a small file");
    let output = run.wait_with_output().expect("a child can be waited for");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("trainer 0: cannot write checkpoint"), "{said}");
    assert_eq!(said.matches("cannot write checkpoint").count(), 1, "{said}");
    let done = rows_so_far(&out.join("steps.jsonl")).len();
    assert!(done >= 2 && checkpoints(&out).contains(&done), "{done} steps: {said}");
    // Every rank ends for that reason, and as one whose user has to act.
    for rank in [0, 1] {
        let log = fs::read_to_string(out.join(format!("logs/trainer-{rank}-0.log")));
        let log = log.expect("a log");
        assert!(log.contains("error: ") && log.contains("cannot write checkpoint"), "{log}");
    }
}

#[test]
fn a_pool_of_more_servers_than_a_rank_has_files_for_is_refused_with_the_number() {
    let place = Place::new();
    // Enough for both trainers and two servers; the fourth server is the fifth peer.
    let run = |servers| {
        let job = Job { servers, ..JOB };
        let command = place.command(&format!("servers-{servers}"), job, &[]);
        let limited = "ulimit -Sn 1037 && ulimit -Hn 1037 && exec \"$0\" \"$@\"";
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(limited).arg(command.get_program()).args(command.get_args());
        let output = shell.stdin(Stdio::null()).output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = run(2);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run(4);
    assert_eq!(code, Some(2), "{said}");
    let number = "links with 5 peers need 1039 open files, 1037 are allowed";
    let named = |rank| said.contains(&format!("trainer {rank}: {number}"));
    assert!(named(0) || named(1), "{said}");
}

#[test]
fn too_little_memory_in_place_is_refused_by_the_names_of_what_sets_it() {
    let place = Place::new();
    let job = Job { servers: 0, in_place: true, ..JOB };
    let large = place.bits("large", job, &["--memory-mib", "64"]);
    assert_eq!(large, place.bits("default", job, &[]));
    let tight = place.run(
        "tight",
        Job { every: "--model=small, --tokens=2048, --cap=2048", ..job },
        &["--memory-mib", "1"],
    );
    assert_eq!(tight.code, Some(2), "{}\n{}", tight.said, tight.logs());
    for expected in ["step 0", "--memory-mib", "spec.attention.inPlaceMemoryMebibytes"] {
        assert!(tight.said.contains(expected), "{}", tight.said);
    }
}
