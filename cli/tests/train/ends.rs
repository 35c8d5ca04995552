//! Ends that come from outside, and runs that must not begin: signals to every process, a terminal that closes, ranks with other
//! documents, a resume with other lengths.

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::{JOB, Job, Place, STEPS, alive, processes, rows, rows_so_far, until};
use crate::fs;

/// So many steps that a signal always comes before the last one.
const MANY: &str = "--steps=100000";

fn signal(pid: u64, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process has a number");
    // It may have ended by itself just before.
    let _ = kill_process(pid, signal);
}

/// As at a shutdown of the machine.
#[test]
fn a_run_whose_processes_all_get_sigterm_leaves_a_checkpoint() {
    let place = Place::new();
    let job = Job { every: "--checkpoint-every=100000", ..JOB };
    let mut child = place.command("ended", job, &[MANY]).spawn().expect("the binary starts");
    let out = place.path("ended");
    until("the second step", || rows_so_far(&out.join("steps.jsonl")).len() > 1);
    for pid in processes(&out).into_iter().chain([child.id().into()]) {
        signal(pid, Signal::TERM);
    }
    assert_eq!(child.wait().expect("a child can be waited for").code(), Some(130));
    let done = rows(&out.join("steps.jsonl")).len();
    assert!(out.join(format!("checkpoints/step-{done}")).is_dir(), "{done} steps");
    assert!(alive(&out).is_empty(), "{:?}", alive(&out));
}

#[test]
fn a_run_that_ignores_hangups_outlives_its_terminal() {
    let place = Place::new();
    let run = place.command("outlives", JOB, &[]);
    let mut nohup = Command::new("nohup");
    nohup.arg(run.get_program()).args(run.get_args());
    nohup.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    nohup.stderr(std::process::Stdio::null());
    let mut child = nohup.spawn().expect("coreutils has nohup");
    let out = place.path("outlives");
    until("the first step", || !rows_so_far(&out.join("steps.jsonl")).is_empty());
    signal(child.id().into(), Signal::HUP);
    assert_eq!(child.wait().expect("a child can be waited for").code(), Some(0));
    assert_eq!(rows(&out.join("steps.jsonl")).len(), STEPS);
}

/// As where each node has its own copy of the documents.
#[test]
fn trainers_that_read_other_documents_do_not_train() {
    let place = Place::new();
    // Every process reads its own.
    std::os::unix::fs::symlink("/proc/self/environ", place.path("data").join("own"))
        .expect("a new name");
    let run = place.run("apart", JOB, &[]);
    assert_eq!(run.code, Some(3), "{}", run.said);
    assert!(run.said.contains("trains something else; give all trainers"), "{}", run.said);
    assert!(rows(&run.out.join("steps.jsonl")).is_empty(), "no step is done");
}

#[test]
fn a_resume_with_another_list_of_lengths_is_refused() {
    let place = Place::new();
    place.bits("first", JOB, &[]);
    let list = place.path("lengths.json");
    fs::write(&list, "[64, 128]").expect("a small file");
    let every = format!("--lengths={}", list.display());
    let other = Job { every: Box::leak(every.into_boxed_str()), ..JOB };
    let run = place.run("first", other, &["--resume", "--steps=8"]);
    assert_eq!(run.code, Some(2), "{}", run.said);
    assert!(run.said.contains("list of lengths"), "{}", run.said);
}
