//! Gradients that are summed over several micro-batches of a step, each of which goes forward and backward before the next.

use super::{JOB, Job, Place, close, rows};

/// Two micro-batches of one nano-batch.
const SUMMED: Job = Job { every: "--checkpoint-every=2, --nano-batches=1, --accumulate=2", ..JOB };

/// The same rows, all of them forward before one goes backward.
const TOGETHER: Job = Job { every: "--checkpoint-every=2, --nano-batches=2", ..JOB };

#[test]
fn summed_gradients_keep_the_bits_of_local_attention_though_servers_are_killed() {
    let place = Place::new();
    // Where nothing is cut, not even gradients of keys are summed otherwise: local attention has all bits.
    let alone = Job { trainers: 1, servers: 1, ..SUMMED };
    let local = place.bits("alone-local", alone, &["--attention", "local"]);
    let killed = |name: &str, job: Job, fault: &str| {
        let run = place.run(name, job, &["--fault", fault]);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        assert!(run.failovers() > 0, "{name}: no slot was lost");
        run.bits()
    };
    assert_eq!(killed("alone", alone, "kill-server:0@1:bwd"), local);

    let local = place.bits("local", SUMMED, &["--attention", "local"]);
    let calm = place.bits("calm", SUMMED, &[]);
    close(&calm, &local);
    assert_eq!(killed("killed", SUMMED, "kill-server:1@2:bwd"), calm);
    close(&place.bits("together", TOGETHER, &[]), &calm);
}

#[test]
fn a_replay_or_a_resume_that_sums_otherwise_is_refused_by_name() {
    let place = Place::new();
    let calm = place.bits("calm", SUMMED, &[]);
    let log = place.path("calm").join("headers.jsonl");
    for header in rows(&log) {
        let turns = header["turns"].as_array().expect("turns");
        let written = turns.iter().map(|it| (it["direction"].as_str(), it["nanos"][0].as_u64()));
        let [forward, backward] = [Some("forward"), Some("backward")];
        let expected = [(forward, 0), (backward, 0), (forward, 1), (backward, 1)];
        assert!(written.eq(expected.map(|(way, nano)| (way, Some(nano)))), "{header}");
    }
    let replay = ["--headers", &log.display().to_string()];
    assert_eq!(place.bits("replayed", SUMMED, &replay), calm);
    let refused = |name: &str, job: Job, args: &[&str], expected: &str| {
        let run = place.run(name, job, args);
        assert_eq!(run.code, Some(2), "{name}: {}\n{}", run.said, run.logs());
        assert!(run.said.contains(expected), "{name}: {}", run.said);
    };
    refused("other", TOGETHER, &replay, "turns of step 0 differs from this run's");
    let micro = Job { every: "--nano-batches=1", ..JOB };
    let expected = "another number of micro-batches: 2, the job has 1";
    refused("calm", micro, &["--resume"], expected);
    let many = Job { every: "--nano-batches=256, --accumulate=256", ..JOB };
    refused(
        "many",
        many,
        &[],
        "--nano-batches 256 with --accumulate 256: turns have more than 65535",
    );
    let plans = Job { every: "--nano-batches=1, --accumulate=40000", ..JOB };
    let expected = "--nano-batches 1 with --accumulate 40000: 40000 nano-batches and 1 kinds of layers have more than 32767 plans";
    refused("plans", plans, &[], expected);
}
