//! The supervisor with real processes: this test program, started again as trainer or server.
//!
//! `acts_as_worker` is the worker, see [`worker`].

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one event out of many")]

mod worker;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use cadre_supervisor::{Interrupt, Limits, Outcome, Role, RunConfig, RunError, RunEvent, run};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;

const PATIENCE: Duration = Duration::from_mins(1);
/// Steps of every job here.
const STEPS: u64 = 6;

#[test]
fn acts_as_worker() {
    let Ok(role) = std::env::var("CADRE_ROLE") else { return };
    std::process::exit(if role == "trainer" { worker::trainer() } else { worker::server() });
}

// ---- the runs ----

/// A folder of one test, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cadre-run-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).expect("a folder of this test");
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn config(out: &Path, at_step_3: &str, faults: &[&str], max_restarts: u32) -> RunConfig {
    let container = |name: &str| {
        json!({"spec": {"containers": [{
            "name": name,
            "command": ["cadre"],
            "args": ["--exact", "acts_as_worker", "--nocapture"],
            "env": [{"name": "AT_STEP_3", "value": at_step_3}],
        }]}})
    };
    let pool = json!({
        "metadata": {"name": "pool"},
        "spec": {"replicas": 2, "inPlace": false, "template": container("server")},
    });
    let job = json!({
        "metadata": {"name": "job"},
        "spec": {
            "template": container("trainer"), "nodes": 2,
            "attention": {"poolRef": {"name": "pool"}},
            "failurePolicy": {"maxRestarts": max_restarts},
        },
    });
    let pool = serde_json::from_value(pool).expect("a pool");
    let job = serde_json::from_value(job).expect("a job");
    let program = std::env::current_exe().expect("this program");
    RunConfig {
        steps: Some(STEPS),
        faults: faults.iter().map(|text| text.parse().expect("a fault")).collect(),
        limits: Limits { survivors: Duration::from_millis(200), ..Limits::default() },
        ..RunConfig::new(pool, job, out.to_owned(), program)
    }
}

type Ended = Result<Outcome, RunError>;

fn start(config: RunConfig) -> (JoinHandle<Ended>, Receiver<RunEvent>, Interrupt) {
    start_with(config, 1 << 16)
}

/// With room for so many events.
fn start_with(
    config: RunConfig,
    room: usize,
) -> (JoinHandle<Ended>, Receiver<RunEvent>, Interrupt) {
    let (events, received) = sync_channel(room);
    let interrupt = Interrupt::default();
    let handle = interrupt.clone();
    (std::thread::spawn(move || run(config, events, &handle)), received, interrupt)
}

/// Runs to the end and asserts that no process is left.
fn complete(config: RunConfig) -> (Ended, Vec<RunEvent>) {
    let (running, events, _) = start(config);
    let ended = running.join().expect("the supervisor does not panic");
    let events: Vec<RunEvent> = events.iter().collect();
    for pid in pids(&events) {
        assert!(!lives(pid), "process {pid} is left");
    }
    (ended, events)
}

fn pids(events: &[RunEvent]) -> Vec<u32> {
    let pid = |event: &RunEvent| match event {
        RunEvent::Process(record) => Some(record.pid),
        _ => None,
    };
    events.iter().filter_map(pid).collect()
}

fn lives(pid: u32) -> bool {
    let pid = Pid::from_raw(pid.cast_signed()).expect("above 0");
    test_kill_process(pid).is_ok()
}

fn steps(events: &[RunEvent]) -> Vec<u64> {
    let step = |event: &RunEvent| match event {
        RunEvent::Step(record) => Some(record.step),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

#[test]
fn a_job_runs_to_its_end_and_leaves_nothing() {
    let folder = Folder::new();
    let (ended, events) = complete(config(&folder.0, "", &[], 0));
    let outcome = ended.expect("completed");
    assert_eq!(outcome, Outcome { attempts: 1, sample: Some("In the beginning".into()) });
    assert_eq!(steps(&events), [0, 1, 2, 3, 4, 5]);
    assert!(matches!(events.last(), Some(RunEvent::Finished(_))));
    for log in ["trainer-0-0", "trainer-1-0", "server-0-0", "server-1-0"] {
        assert!(folder.0.join("logs").join(format!("{log}.log")).exists(), "{log}");
    }
}

#[test]
fn killed_servers_are_replaced_in_the_middle_of_a_step() {
    let folder = Folder::new();
    let (ended, events) = complete(config(&folder.0, "", &["kill-server:1@2", "add-server@4"], 0));
    ended.expect("completed");
    assert_eq!(steps(&events), [0, 1, 2, 3, 4, 5]);
    let servers: Vec<String> = events
        .iter()
        .filter_map(|event| match event {
            RunEvent::Process(it) if it.worker.role == Role::Server && it.address.is_empty() => {
                Some(format!("{}.{}", it.worker.index, it.worker.incarnation))
            }
            _ => None,
        })
        .collect();
    assert_eq!(servers, ["0.0", "1.0", "1.1", "2.0"]);
}

#[test]
fn a_killed_trainer_fails_the_job_or_restarts_it_as_the_policy_says() {
    let folder = Folder::new();
    let (ended, events) = complete(config(&folder.0, "", &["kill-trainer:0@2"], 0));
    let error = ended.expect_err("no restart is allowed");
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("trainer 0: killed by SIGKILL"), "{error}");
    assert_eq!(steps(&events), [0, 1]);

    let folder = Folder::new();
    std::fs::create_dir_all(folder.0.join("checkpoints/step-1")).expect("room");
    std::fs::create_dir_all(folder.0.join("checkpoints/step-10.partial")).expect("room");
    let (ended, events) = complete(config(&folder.0, "", &["kill-trainer:0@2"], 1));
    assert_eq!(ended.expect("the second attempt completes").attempts, 2);
    let attempts: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            RunEvent::Attempt(attempt) => Some((attempt.number, attempt.first_step)),
            _ => None,
        })
        .collect();
    assert_eq!(attempts, [(1, 0), (2, 1)]);
}

#[test]
fn bad_input_of_a_worker_ends_the_run_with_its_words() {
    let folder = Folder::new();
    let (ended, _) = complete(config(&folder.0, "refuse", &[], 3));
    let message = "no such data; give --data".to_owned();
    assert_eq!(ended, Err(RunError::BadInput { message }));
}

#[test]
fn a_program_that_is_not_there_is_bad_input() {
    let folder = Folder::new();
    let config = RunConfig { program: "/no/such/program".into(), ..config(&folder.0, "", &[], 0) };
    let (ended, _) = complete(config);
    let error = ended.expect_err("not there");
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("does not start: /no/such/program"), "{error}");
}

#[test]
fn an_impossible_fault_or_nothing_to_resume_is_refused_before_the_start() {
    let folder = Folder::new();
    let (ended, events) = complete(config(&folder.0, "", &["kill-server:2@2"], 0));
    assert_eq!(ended.expect_err("there are two").exit_code(), 2);
    assert!(events.is_empty());
    let (ended, _) = complete(RunConfig { resume: true, ..config(&folder.0, "", &[], 0) });
    assert!(ended.expect_err("no checkpoint").to_string().starts_with("nothing to resume: "));
}

#[test]
fn an_interrupt_ends_the_run_through_the_conductor() {
    let folder = Folder::new();
    let (running, events, interrupt) = start(config(&folder.0, "wait", &[], 0));
    let reached = |event: &RunEvent| matches!(event, RunEvent::Step(record) if record.step == 2);
    assert!(events.iter().any(|event| reached(&event)));
    interrupt.raise();
    assert_eq!(
        running.join().expect("no panic"),
        Err(RunError::Interrupted { resumes: Some(false) })
    );
    assert!(folder.0.join("done-1").exists(), "the conductor was asked");
}

/// Room for the start of a run, and not for its steps.
const LITTLE: usize = 10;

#[test]
fn a_run_whose_events_nobody_takes_trains_on_and_tells_all_of_them_later() {
    let folder = Folder::new();
    let (running, events, _) = start_with(config(&folder.0, "", &[], 0), LITTLE);
    let done = folder.0.join("done-1");
    until(|| done.exists());
    let events: Vec<RunEvent> = events.iter().collect();
    running.join().expect("no panic").expect("completed");
    assert_eq!(steps(&events), [0, 1, 2, 3, 4, 5]);
    let headers = events.iter().filter(|it| matches!(it, RunEvent::Header { .. })).count();
    assert_eq!(headers, 6);
    assert!(matches!(events.last(), Some(RunEvent::Finished(_))));
}

#[test]
fn a_run_whose_events_nobody_takes_hears_an_interrupt() {
    let folder = Folder::new();
    let (running, events, interrupt) = start_with(config(&folder.0, "wait", &[], 0), LITTLE);
    let (waits, asked) = (folder.0.join("waits"), folder.0.join("done-1"));
    until(|| waits.exists());
    interrupt.raise();
    until(|| asked.exists());
    let events: Vec<RunEvent> = events.iter().collect();
    assert_eq!(
        running.join().expect("no panic"),
        Err(RunError::Interrupted { resumes: Some(false) })
    );
    assert_eq!(steps(&events), [0, 1, 2]);
}

// ---- the supervisor dies ----

/// A supervisor in a process of its own: prints process ids, then waits to be killed.
#[test]
fn acts_as_supervisor() {
    let Ok(out) = std::env::var("SUPERVISE") else { return };
    let (_running, events, _) = start(config(Path::new(&out), "wait", &[], 0));
    let mut all = Vec::new();
    for event in events {
        all.push(event);
        if steps(&all).contains(&2) {
            std::fs::write(Path::new(&out).join("pids"), format!("{:?}", pids(&all)))
                .expect("room on the disk");
            std::fs::rename(Path::new(&out).join("pids"), Path::new(&out).join("up"))
                .expect("the same folder");
        }
    }
}

#[test]
fn nothing_is_left_when_the_supervisor_is_killed() {
    let folder = Folder::new();
    let mut supervisor = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "acts_as_supervisor", "--nocapture"])
        .env("SUPERVISE", &folder.0)
        .env("TMPDIR", &folder.0)
        .spawn()
        .expect("this program starts");
    let up = folder.0.join("up");
    until(|| up.exists());
    let text = std::fs::read_to_string(&up).expect("written whole");
    let pids: Vec<u32> = serde_json::from_str(&text).expect("a list of numbers");
    assert!(pids.len() >= 4 && pids.iter().all(|&pid| lives(pid)), "{pids:?}");
    let id = Pid::from_raw(supervisor.id().cast_signed()).expect("above 0");
    kill_process(id, Signal::KILL).expect("it runs");
    supervisor.wait().expect("it was started here");
    until(|| pids.iter().all(|&pid| !runs(pid)));
}

/// Whether a process runs; one that waits for its burial does not.
fn runs(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

fn until(condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(std::time::Instant::now() < end, "not within {PATIENCE:?}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
