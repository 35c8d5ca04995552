//! Layers of several kinds: windows and chunks beside layers that see all of a document and layers without core attention,
//! with bounded and scaled scores, sinks and heads of other sizes.

use serde_json::Value;

use super::{Command, JOB, Job, Place, STEPS, close, rows};
use crate::fs;

/// The first layer of the model has a window, shorter than documents and than tiles.
const MIXED: Job = Job { every: "--checkpoint-every=2, '--layers=window:40,full'", ..JOB };

/// All that layers can have, each with heads of its own.
const ALL: Job = Job {
    every: "--checkpoint-every=2, --depth=4, '--layers=chunk:100,none,window:40 heads 2/1 dim 64,full heads 4/4', --softcap=2, \
            --attention-scale=0.25, --sinks, --kv-heads=2, --query-heads=4, --head-dim=40, --feed-forward=90",
    ..JOB
};

#[test]
fn everything_that_layers_can_have_keeps_the_bits_of_local_attention() {
    let place = Place::new();
    let local = place.bits("local", ALL, &["--attention", "local"]);
    close(&place.bits("pool", ALL, &[]), &local);
    // Nothing of it may be left out without a trace.
    let all = ALL.every;
    for (index, part) in
        [" --softcap=2,", " --attention-scale=0.25,", " --sinks,", " heads 2/1 dim 64"]
            .into_iter()
            .enumerate()
    {
        let every = all.replace(part, "");
        assert_ne!(every, all, "{part}");
        let other = Job { every: every.leak(), ..ALL };
        let other = place.bits(&format!("other-{index}"), other, &["--attention", "local"]);
        assert_ne!(other.losses[0], local.losses[0], "{part} is seen from the first step on");
    }
    // Where nothing is cut but at chunks, not even gradients of keys are summed otherwise.
    let alone = Job { trainers: 1, servers: 1, ..ALL };
    let local = place.bits("alone-local", alone, &["--attention", "local"]);
    assert_eq!(place.bits("alone", alone, &[]), local);
}

#[test]
fn a_lost_server_changes_no_bit_whatever_layers_have() {
    let place = Place::new();
    let calm = place.bits("calm", ALL, &[]);
    for (name, fault) in [
        ("killed-forward", "kill-server:0@1:fwd"),
        ("killed-backward", "kill-server:1@2:bwd"),
        ("stopped", "stop-server:0@1:bwd"),
    ] {
        let run = place.run(name, ALL, &["--fault", fault]);
        assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
        assert_eq!(run.bits(), calm, "{name}");
        assert!(run.failovers() > 0, "{name}: no slot was lost");
    }
    // No layer without core attention has a phase, and a checkpoint has what is learnt at the trainers.
    for header in rows(&place.path("calm").join("headers.jsonl")) {
        let layers = &header["layers"];
        assert_eq!(layers["each"].as_array().map_or(0, Vec::len), 3, "{header}");
        assert_eq!(layers["kinds"][0]["softcap"], "2", "{header}");
        let heads =
            |it: usize| ["query", "kv", "dim"].map(|of| layers["kinds"][it]["heads"][of].as_u64());
        let expected = [[4, 2, 40], [2, 1, 64], [4, 4, 40]].map(|it| it.map(Some));
        assert_eq!([0, 1, 2].map(heads), expected, "{header}");
    }
    let model =
        place.path("calm").join(format!("checkpoints/step-{}/model.safetensors", super::STEPS));
    let text = String::from_utf8_lossy(&fs::read(model).expect("a checkpoint")).into_owned();
    for (layer, has) in [(0, true), (1, false), (2, true), (3, true)] {
        let name = format!("model.layers.{layer}.self_attn.sinks");
        assert_eq!(text.contains(&name), has, "{name}");
    }
    let resumed = Job { every: ALL.every.replace("--softcap=2", "--softcap=3").leak(), ..ALL };
    let run = place.run("calm", resumed, &["--resume"]);
    let expected = "another list of layers: 1 × chunk:100 heads 4/2 dim 40 scale 0.25 softcap 2 sinks, 1 × none, ";
    assert_eq!(run.code, Some(2), "{}", run.said);
    assert!(run.said.contains(expected), "{}", run.said);
}

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
fn a_job_plans_with_its_calibration_and_as_cadre_plan_says() {
    let place = Place::new();
    // Long enough that no document drawn meets its end, which `cadre plan -f` does not know of.
    fs::write(place.path("data").join("c"), "and the earth was ".repeat(100_000)).expect("a file");
    let profile = |name: &str, text: &str| {
        fs::write(place.path(name), text).expect("a small file");
        place.path(name).display().to_string()
    };
    let here = format!("cpu-{}-7", cadre_kernels::instruction_set());
    let own = profile("own.json", &calibration(&here, 64, 40_000));
    // `cadre plan -f` has times of head dims that GPUs have kernels for.
    let every = "--checkpoint-every=0, --model=small, '--layers=window:40,full', --accumulate=2";
    let job = Job { servers: 1, in_place: true, every, ..MIXED };
    let mut digests = Vec::new();
    let uneven = ["--tolerance", "1.3"];
    for (name, args) in
        [("nominal", &[][..]), ("calibrated", &["--profile", &own]), ("uneven", &uneven)]
    {
        place.bits(name, job, args);
        let steps = rows(&place.path(name).join("steps.jsonl"));
        let plans: Vec<_> = steps.iter().map(|it| it["plans"].clone()).collect();
        assert!(steps.iter().all(|it| it["gap_compute"].as_f64().is_some()), "{steps:?}");
        let manifest = place.path(&format!("{name}.yaml"));
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args(["plan", "--json", "--nodes", "9", "-f"])
            .arg(manifest)
            .args(args)
            .output()
            .expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("a line of JSON");
        let planned = report["plans"].as_array().expect("a digest a step");
        assert_eq!(planned[..STEPS], plans, "{name}");
        digests.push(plans);
    }
    for other in &digests[1..] {
        assert!(
            digests[0].iter().zip(other).all(|it| it.0 != it.1),
            "what is asked is in the plans"
        );
    }
    assert_eq!(rows(&place.path("uneven").join("headers.jsonl"))[0]["tolerance"], 1.3);
    let costs = |name: &str| rows(&place.path(name).join("headers.jsonl"))[0]["costs"][1].clone();
    assert_eq!(
        (&costs("nominal")["task"], &costs("calibrated")["task"]),
        (&16_384.into(), &39_936.into())
    );

    for (name, text, expected) in [
        ("dim", calibration(&here, 32, 40_000), "no table for head dim 64, Forward"),
        ("gpu", calibration("gpu-nvidia-h200", 64, 40_000), "it is of gpu-nvidia-h200"),
        ("cut", calibration(&here, 64, 1)[..99].to_owned(), "EOF while parsing"),
        (
            "zero",
            calibration(&here, 64, 1).replace("\"linear_operations\":9", "\"linear_operations\":0"),
            "linear_operations is 0",
        ),
    ] {
        let path = profile(&format!("{name}.json"), &text);
        let run = place.run(name, job, &["--profile", &path]);
        assert_eq!(run.code, Some(2), "{name}: {}\n{}", run.said, run.logs());
        let remedy = "give a file of cadre calibrate, or one of h200-hopper";
        for part in [&path, expected, remedy] {
            assert!(run.said.contains(part), "{name}: {}", run.said);
        }
    }
}

/// A pair takes a nanosecond, backward twice as long, and a task as long as so many pairs.
pub(super) fn calibration(processor: &str, dim: u16, task: u64) -> String {
    let table = |direction: &str, pair: u64| {
        let time = |rows: u64, keys: u64| (rows * keys + rows * (rows + 1) / 2) * pair;
        let times = [128, 2048].map(|rows| [0, 8192].map(|keys| time(rows, keys)));
        serde_json::json!({"head_dim": dim, "direction": direction, "kept": "causal", "rows": [128, 2048],
            "keys": [0, 8192], "picoseconds": times})
    };
    serde_json::json!({"version": 1, "processor": processor, "source": "a test", "task_nanoseconds": task,
        "linear_operations": 9, "links": [], "kernels": [table("forward", 1000), table("backward", 2000)]})
    .to_string()
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
        run.said
    };
    refused("other", JOB, &replay, "layers of step 0 differs from this run's");
    // A log of the version in which all layers had the same heads.
    let older =
        fs::read_to_string(&log).expect("a log").lines().fold(String::new(), |all, line| {
            let mut header: serde_json::Value = serde_json::from_str(line).expect("a header");
            header["heads"] = header["layers"]["kinds"][0]["heads"].clone();
            for kind in header["layers"]["kinds"].as_array_mut().expect("kinds") {
                kind.as_object_mut().expect("a kind").remove("heads").expect("its heads");
            }
            all + &header.to_string() + "\n"
        });
    let path = place.path("older.jsonl");
    fs::write(&path, older).expect("a small file");
    let older = ["--headers", &path.display().to_string()];
    refused("older", MIXED, &older, "was written before each kind of layers had its heads");
    let expected = "another list of layers: 1 × window:40 heads 2/1 dim 32, 1 × causal heads 2/1 dim 32, the job has \
                    2 × causal heads 2/1 dim 32";
    let said = refused("calm", JOB, &["--resume"], expected);
    assert!([0, 1].iter().any(|it| said.contains(&format!("rank {it}: checkpoint"))), "{said}");
    for (pattern, expected) in [
        ("--layers=window:0", "\"window:0\" is no kind of layers"),
        ("'--layers=full,full,window:40'", "more than the 2 of the model"),
        ("--layers=none", "none of the 2 layers has core attention"),
        ("--kv-heads=3", "2 query heads are no multiple of 3 KV heads"),
        ("--head-dim=260", "--head-dim 260 does not fit"),
        ("'--layers=full heads 3/2'", "of which the first are a multiple"),
        ("'--layers=full dim 260'", "is no head dim"),
    ] {
        refused("wrong", Job { every: pattern, ..JOB }, &[], expected);
    }
}

#[test]
fn tokens_of_another_vocabulary_train_with_a_pool_as_without() {
    const JOB: Job = Job { every: "--checkpoint-every=2, --vocab-size=1000", ..super::JOB };
    let place = Place::new();
    for name in ["a", "b"] {
        fs::remove_file(place.path("data").join(name)).expect("it is there");
    }
    let ids = |document: u32| (0..3_000).map(move |at| (at * 37 + document) % 40 * 25);
    let lines: Vec<_> = (0..3)
        .map(|it| serde_json::json!({ "tokens": ids(it).collect::<Vec<u32>>() }).to_string())
        .collect();
    fs::write(place.path("data/ids.jsonl"), lines.join("\n")).expect("a small file");
    let local = place.bits("local", JOB, &["--attention", "local"]);
    let run = place.run("pool", JOB, &[]);
    assert_eq!(run.code, Some(0), "{}\n{}", run.said, run.logs());
    close(&run.bits(), &local);
    // At first each of a thousand tokens is as likely as any other.
    let first = f32::from_bits(local.losses[0]);
    assert!((first - 1_000_f32.ln()).abs() < 0.8, "{first}");
    let summary = fs::read_to_string(place.path("pool/summary.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    let sample = summary["sample"].as_str().expect("a sample");
    let ids: Result<Vec<u32>, _> = sample.split(' ').map(str::parse).collect();
    assert!(ids.is_ok_and(|it| it.len() == 160 && it.iter().all(|&it| it < 1_000)), "{sample}");
}
