//! Runs that are repeated from their headers, of each kind that computes otherwise than the rest. Those with a pool that grew are
//! in `train.rs`, those of other layers and of summed gradients beside their own tests.

use std::fs;

use serde_json::Value;

use super::{JOB, Job, Place, STEPS, rows};

/// Runs a job, and its headers again under `other`, which would plan otherwise.
fn replay(job: Job, args: &[&str], other: Job) {
    let place = Place::new();
    let first = place.bits("first", job, args);
    let slots = |name: &str| {
        let slots = |it: &Value| it["slots"].as_array().map_or(0, Vec::len);
        rows(&place.path(name).join("headers.jsonl")).iter().map(slots).collect::<Vec<_>>()
    };
    let headers = place.path("first").join("headers.jsonl").display().to_string();
    assert_eq!(slots("first").len(), STEPS, "a header for each step");
    assert_eq!(place.bits("again", other, &["--headers", &headers]), first);
    // The bits of so few steps seldom show how many slots there were.
    assert_eq!(slots("again"), slots("first"));
}

#[test]
fn headers_give_the_bits_of_rows_in_bf16_again() {
    let job = Job { wire: "Bf16", ..JOB };
    replay(job, &[], Job { servers: 3, ..job });
}

#[test]
fn headers_give_the_bits_of_attention_in_place_again() {
    let job = Job { servers: 0, in_place: true, ..JOB };
    replay(job, &[], job);
    replay(Job { servers: 1, ..job }, &[], Job { servers: 2, ..job });
}

/// It would wait for servers that nobody starts.
#[test]
fn headers_of_dedicated_servers_are_refused_where_none_will_be_there() {
    let place = Place::new();
    place.bits("first", JOB, &[]);
    let headers = place.path("first").join("headers.jsonl").display().to_string();
    let in_place = Job { servers: 0, in_place: true, ..JOB };
    for (job, args) in [(JOB, &["--attention", "local"][..]), (in_place, &[])] {
        let run = place.run("again", job, &[&["--headers", &headers], args].concat());
        assert_eq!(run.code, Some(2), "{}", run.said);
        let said = "step 0 was planned for dedicated servers, and this run has none; leave out --attention local";
        assert!(run.said.contains(said), "{}", run.said);
    }
}

/// The log goes on in the second attempt where the checkpoint is that it began with.
#[test]
fn headers_of_a_job_that_restarted_give_its_bits_again() {
    let job = Job { restarts: 1, ..JOB };
    replay(job, &["--fault", "kill-trainer:1@3:bwd"], Job { servers: 3, ..JOB });
}

/// A run that goes on drops the later rows of its log, so it cannot replay them.
#[test]
fn a_run_that_goes_on_does_not_replay_its_own_log() {
    let place = Place::new();
    place.bits("first", JOB, &[]);
    let out = place.path("first");
    let (log, link) = (out.join("headers.jsonl"), place.path("link.jsonl"));
    fs::hard_link(&log, &link).expect("a new name");
    fs::remove_dir_all(out.join(format!("checkpoints/step-{STEPS}"))).expect("it is there");
    let before = fs::read(&log).expect("a log");
    for name in [&log, &link] {
        let run = place.run("first", JOB, &["--resume", "--headers", &name.display().to_string()]);
        assert_eq!(run.code, Some(2), "{}", run.said);
        let said = format!("--headers {} is the log of this run itself", name.display());
        assert!(run.said.contains(&said) && run.said.contains("name the copy"), "{}", run.said);
        assert_eq!(fs::read(&log).expect("a log"), before);
    }
    let copy = place.path("copy.jsonl");
    fs::copy(&log, &copy).expect("a small file");
    place.bits("first", JOB, &["--resume", "--headers", &copy.display().to_string()]);
    assert_eq!(rows(&log).len(), STEPS);
}
