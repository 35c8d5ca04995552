//! Layers of several kinds: windows beside layers that see all of a document.

use super::{JOB, Job, Place, close, rows};
use crate::fs;

/// The first layer of the model has a window, shorter than documents and than tiles.
const MIXED: Job = Job { every: "--checkpoint-every=2, '--layers=window:40,full'", ..JOB };

#[test]
fn layers_of_two_kinds_have_the_bits_of_local_attention() {
    let place = Place::new();
    let local = place.bits("local", MIXED, &["--attention", "local"]);
    close(&place.bits("pool", MIXED, &[]), &local);
    close(&place.bits("in-place", Job { servers: 1, in_place: true, ..MIXED }, &[]), &local);
    let full = place.bits("full", JOB, &["--attention", "local"]);
    assert_ne!(full.losses[0], local.losses[0], "a window is seen from the first step on");
    // Where nothing is cut, not even gradients of keys are summed otherwise.
    let alone = Job { trainers: 1, servers: 1, ..MIXED };
    let local = place.bits("alone-local", alone, &["--attention", "local"]);
    assert_eq!(place.bits("alone", alone, &[]), local);
}

#[test]
fn a_lost_server_changes_no_bit_of_any_kind_of_layers() {
    let place = Place::new();
    let calm = place.bits("calm", MIXED, &[]);
    for (name, fault) in [
        ("killed-forward", "kill-server:0@1:fwd"),
        ("killed-backward", "kill-server:1@2:bwd"),
        ("stopped", "stop-server:0@1:bwd"),
    ] {
        let run = place.run(name, MIXED, &["--fault", fault]);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        assert_eq!(run.bits(), calm, "{name}");
        assert!(run.failovers() > 0, "{name}: no slot was lost");
    }
}

#[test]
fn a_replay_or_a_resume_with_other_layers_is_refused_by_name() {
    let place = Place::new();
    let calm = place.bits("calm", MIXED, &[]);
    let log = place.path("calm").join("headers.jsonl");
    for header in rows(&log) {
        assert_eq!(header["layers"]["kinds"].as_array().map_or(0, Vec::len), 2, "{header}");
    }
    let replay = ["--headers", &log.display().to_string()];
    assert_eq!(place.bits("replayed", MIXED, &replay), calm);
    let refused = |name: &str, job: Job, args: &[&str], expected: &str| {
        let run = place.run(name, job, args);
        assert_eq!(run.code, Some(2), "{name}: {}\n{}", run.said, run.logs());
        assert!(run.said.contains(expected), "{name}: {}", run.said);
    };
    refused("other", JOB, &replay, "layers of step 0 differs from this run's");
    // A log of the version in which layers were a number.
    let older =
        fs::read_to_string(&log).expect("a log").lines().fold(String::new(), |all, line| {
            let mut header: serde_json::Value = serde_json::from_str(line).expect("a header");
            header["layers"] = 2.into();
            all + &header.to_string() + "\n"
        });
    let path = place.path("older.jsonl");
    fs::write(&path, older).expect("a small file");
    let older = ["--headers", &path.display().to_string()];
    refused("older", MIXED, &older, "was written before layers had kinds");
    let expected = "another pattern of --layers: 1 × window:40, 1 × causal, the job has 2 × causal";
    refused("calm", JOB, &["--resume"], expected);
    for (pattern, expected) in [
        ("--layers=window:0", "\"window:0\" is no kind of layers"),
        ("'--layers=full,full,window:40'", "more than the 2 of the model"),
    ] {
        refused("wrong", Job { every: pattern, ..JOB }, &[], expected);
    }
}
