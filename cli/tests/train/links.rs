//! Jobs that are told of their links: what headers and plans have of it, before the run, in it and in a replay.

use std::sync::Arc;

use cadre_planner::{Pulls, SlotId};
use cadre_step::header::Header;
use cadre_step::planned::{PlannedStep, plans_digest};
use serde_json::{Value, json};

use super::{Command, JOB, Job, Place, STEPS, close, layers, rows};
use crate::fs;

/// With times of a head dim that GPUs have kernels for, which `cadre plan -f` needs.
const LINKED: Job = Job { every: "--checkpoint-every=2, --model=small", ..JOB };

/// A calibration of this machine, told more.
fn profile(place: &Place, name: &str, more: &Value) -> String {
    let here = format!("cpu-{}-7", cadre_kernels::instruction_set());
    let mut profile: Value =
        serde_json::from_str(&layers::calibration(&here, 64, 40_000)).expect("JSON");
    for (field, value) in more.as_object().expect("fields") {
        profile[field] = value.clone();
    }
    let path = place.path(&format!("{name}.json"));
    fs::write(&path, profile.to_string()).expect("a small file");
    path.display().to_string()
}

/// Digests of the plans of each step: of the run, and as `cadre plan -f` says.
fn digests(place: &Place, name: &str, args: &[&str]) -> [Vec<Value>; 2] {
    let steps = rows(&place.path(name).join("steps.jsonl"));
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(["plan", "--json", "--nodes", "9", "-f"])
        .arg(place.path(&format!("{name}.yaml")))
        .args(args)
        .output()
        .expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{name}: {said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a line of JSON");
    let planned = report["plans"].as_array().expect("a digest a step")[..STEPS].to_vec();
    [steps.iter().map(|it| it["plans"].clone()).collect(), planned]
}

/// Rows that the second server pulls from the first trainer in the steps of a run, as its headers are planned.
fn between_the_cut(place: &Place, name: &str) -> u64 {
    let text = fs::read_to_string(place.path(name).join("headers.jsonl")).expect("a log");
    let steps = rows(&place.path(name).join("steps.jsonl"));
    let mut pulled = 0;
    for (line, step) in text.lines().zip(steps) {
        let header: Header = serde_json::from_str(line).expect("a header");
        let planned = PlannedStep::new(Arc::new(header)).expect("it was planned");
        let digest = plans_digest(planned.plans.iter().map(|it| &*it.plan));
        assert_eq!(step["plans"], format!("{digest:016x}"), "{name}");
        for nano in &planned.plans {
            let pulls = Pulls::of(&nano.problem, &nano.plan);
            let all = pulls.queries_of(SlotId(1)).iter().chain(pulls.keys_of(SlotId(1)));
            let from_first = all.filter(|it| it.rank.0 == 0);
            pulled += from_first.map(|it| u64::from(it.rows.end - it.rows.start)).sum::<u64>();
        }
    }
    pulled
}

#[test]
fn a_job_plans_with_its_links_and_as_cadre_plan_says() {
    let place = Place::new();
    // Long enough that no document drawn meets its end, which `cadre plan -f` does not know of.
    fs::write(place.path("data").join("c"), "and the earth was ".repeat(100_000)).expect("a file");
    let links = json!([{"distance": "node", "rate": 400_000, "latency": 1},
        {"distance": "far", "rate": 50_000, "latency": 1}]);
    let plain = profile(&place, "plain", &json!({"links": links}));
    let near = json!([{"of": ["trainer-0", "server-0"], "node": 0},
        {"of": ["trainer-1", "server-1"], "node": 1, "out": 3_125, "into": 3_125}]);
    let near = profile(&place, "near", &json!({"links": links, "places": near}));
    let cut = profile(&place, "cut", &json!({"unreachable": [["trainer-0", "server-1"]]}));
    let mut digests_of = Vec::new();
    for (name, file) in [("plain", &plain), ("near", &near), ("cut", &cut)] {
        let run = format!("run-{name}");
        place.bits(&run, LINKED, &["--profile", file]);
        let [ran, planned] = digests(&place, &run, &["--profile", file]);
        assert_eq!(ran, planned, "{name}");
        digests_of.push(ran);
    }
    let [plain, near, cut] = &digests_of[..] else { unreachable!("three runs") };
    let all_differ = |one: &[Value], other: &[Value]| one.iter().zip(other).all(|it| it.0 != it.1);
    assert!(all_differ(plain, near) && all_differ(plain, cut), "links are in the digests");

    // What is told is in the header, in places: the trainers, then the servers.
    let header = |run: &str| rows(&place.path(run).join("headers.jsonl"))[0]["links"].clone();
    assert_eq!(header("run-plain")["places"], json!([]));
    let places = header("run-near")["places"].clone();
    let of_all = |field: &str| [0, 1, 2, 3].map(|it| places[it][field].as_u64());
    assert_eq!(of_all("node"), [0, 1, 0, 1].map(Some));
    assert_eq!(of_all("out"), [50_000, 3_125, 50_000, 3_125].map(Some));
    assert_eq!(
        header("run-near")["prices"],
        json!({"node": 13, "rail": 100, "leaf": 100, "far": 100})
    );
    assert_eq!(header("run-cut")["unreachable"], json!([[0, 3]]));

    // No plan of the job makes the pair that is cut meet, which it does where nobody is told.
    assert!(between_the_cut(&place, "run-plain") > 0);
    assert_eq!(between_the_cut(&place, "run-cut"), 0);

    // The log alone gives links and bits again.
    let log = place.path("run-near").join("headers.jsonl").display().to_string();
    let again = place.bits("again", LINKED, &["--headers", &log]);
    assert_eq!(
        again,
        place.bits(
            "run-near-again",
            LINKED,
            &["--profile", &place.path("near.json").display().to_string()]
        )
    );
    assert_eq!(header("again"), header("run-near"));
}

#[test]
fn a_server_that_alone_reaches_a_trainer_is_waited_for_and_changes_no_bit() {
    let place = Place::new();
    let cut = profile(&place, "cut", &json!({"unreachable": [["trainer-0", "server-1"]]}));
    let args = ["--profile", &cut];
    let calm = place.bits("calm", LINKED, &args);
    close(&place.bits("local", LINKED, &["--attention", "local"]), &calm);
    let fault = ["--profile", &cut, "--fault", "kill-server:0@1:bwd"];
    assert_eq!(place.bits("killed", LINKED, &fault), calm);

    // Nobody is left who could: the second server is alive, and may not be asked.
    let fails = Job { on_pool_loss: "Fail", ..LINKED };
    let run = place.run("fails", fails, &[&fault[..], &["--no-replace"]].concat());
    assert_eq!(run.code, Some(3), "{}", run.said);
}

#[test]
fn links_that_cannot_be_end_the_run_before_it_begins_by_field() {
    let place = Place::new();
    let all = json!([["trainer-0", "server-0"], ["trainer-0", "server-1"]]);
    for (name, more, expected) in [
        (
            "name",
            json!({"places": [{"of": ["trainr-0"]}]}),
            "places[0].of[0] is \"trainr-0\"; write trainer-N",
        ),
        (
            "rank",
            json!({"places": [{"of": ["trainer-2"]}]}),
            "places[0].of[0] is trainer-2, and the job has 2",
        ),
        (
            "rate",
            json!({"places": [{"of": ["trainer-1"], "out": 0}]}),
            "places[0].out is 0; give 1 to",
        ),
        ("field", json!({"places": [{"of": ["trainer-1"], "rack": 0}]}), "unknown field `rack`"),
        (
            "pair",
            json!({"unreachable": [["server-0", "server-0"]]}),
            "unreachable[0] is server-0 twice",
        ),
        ("reach", json!({"unreachable": all}), "no slot reaches all ranks that hold rows"),
    ] {
        let file = profile(&place, name, &more);
        let run = place.run(&format!("run-{name}"), LINKED, &["--profile", &file]);
        assert_eq!(run.code, Some(2), "{name}: {}\n{}", run.said, run.logs());
        assert!(run.said.contains(expected), "{name}: {}", run.said);
        let remedy = if name == "reach" { "unreachable in the file of --profile" } else { &file };
        assert!(run.said.contains(remedy), "{name}: {}", run.said);
    }
}
