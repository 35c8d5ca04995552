//! `cadre simulate` as a user calls it.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic, too")]

mod common;

use std::fs;
use std::path::Path;

use serde_json::Value;

use common::cadre;

fn simulated(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    cadre(folder, &[&["simulate"], args].concat())
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let length = |it: u64| if it.is_multiple_of(50) { 66_000 } else { 500 + it * 37 % 9_000 };
    let lengths: Vec<u64> = (0..40_000).map(length).collect();
    fs::write(folder.path().join("lengths.json"), serde_json::to_string(&lengths).unwrap())
        .unwrap();
    folder
}

#[test]
fn every_table_has_rows_and_a_picture() {
    let folder = folder();
    for (args, picture, key) in [
        (&["--table", "churn"][..], "churn-prolong.svg", "spread_ppm"),
        (&["--table", "scale", "--slots", "128"], "scale-prolong.svg", "plan_seconds"),
        (&["--table", "ours", "--nodes", "8"], "ours-prolong.svg", "ideal_nanos"),
        (&["--table", "published"], "published-prolong.svg", "packed_nanos"),
    ] {
        let all = ["--lengths", "lengths.json", "--set", "prolong", "--batches", "1"];
        let args = [args, &all, &["--json", "--figures", "figures"]].concat();
        let (code, out, said) = simulated(folder.path(), &args);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{args:?}");
        let first: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
        assert!(first.get(key).is_some(), "{out}");
        let svg = fs::read_to_string(folder.path().join("figures").join(picture)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }
    let (code, table, _) =
        simulated(folder.path(), &["--table", "churn", "--lengths", "lengths.json"]);
    assert_eq!(code, Some(0));
    assert!(table.contains("weights 1:2:4") && table.contains("slot 1 is lost"), "{table}");
}

#[test]
fn bad_lengths_are_refused_by_name() {
    let folder = folder();
    let check = |text: &str, args: &[&str], expected: &str| {
        fs::write(folder.path().join("bad.json"), text).unwrap();
        let (code, out, said) = simulated(folder.path(), &[&["--table", "churn"], args].concat());
        assert_eq!((code, out.as_str()), (Some(2), ""), "{said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains(expected), "{said} does not contain {expected}");
    };
    let file = ["--lengths", "bad.json"];
    check("[]", &[], "--lengths is needed");
    check("[]", &["--lengths", "missing.json"], "missing.json");
    check("[]", &file, "lengths is empty");
    check("[5, 0]", &file, "lengths[1] is 0");
    check("[5, -1]", &file, "expected u64");
    check("[99999999999]", &file, "lengths[0] is 99999999999");
    check("[NaN]", &file, "bad.json");
    check("[100]", &file, "need more than the 1 documents");
    check("[100]", &["--batches", "0"], "--batches");
}

/// A job by its manifest, as `cadre plan -f` reads it.
fn of_job(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible.yaml");
    simulated(folder, &[&["-f", manifest.to_str().unwrap()], args].concat())
}

/// An 8B model on lanes of 8, 128K tokens a rank.
const LONG: [&str; 6] = ["--model", "8b", "--lanes", "8", "--tokens", "131072"];

fn report(folder: &Path, args: &[&str]) -> Value {
    let (code, out, said) = of_job(folder, &[&["--json"], args].concat());
    assert_eq!((code, said.as_str()), (Some(0), ""), "{args:?}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_job_is_simulated_at_home_in_place_dedicated_and_mixed() {
    let folder = tempfile::tempdir().unwrap();
    // One document in 40 is as long as a rank, all others short: at home one rank has far more attention than another.
    let lengths: Vec<u64> = (0..4_000).map(|it| if it % 40 == 0 { 131_072 } else { 700 }).collect();
    fs::write(folder.path().join("l.json"), serde_json::to_string(&lengths).unwrap()).unwrap();
    let long =
        [&LONG[..], &["--cap", "131072", "--lengths", "l.json", "--memory-gib", "600"]].concat();
    let with = |args: &[&str]| report(folder.path(), &[&long, args].concat());
    let it = with(&["--servers", "2", "--lose", "1,2", "--figures", "figures"]);
    let rows = it["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|it| it["attention"].as_str().unwrap()).collect();
    assert_eq!(names, ["at home", "in place", "dedicated", "mixed"], "{it}");
    let processors: Vec<u64> = rows.iter().map(|it| it["processors"].as_u64().unwrap()).collect();
    assert_eq!(processors, [16, 16, 32, 32]);
    let of = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert!(of(0, "max_over_mean") > 1.1 && of(1, "max_over_mean") < 1.02, "{it}");
    assert!(of(1, "step_seconds") < of(0, "step_seconds"), "{it}");
    assert!(of(3, "step_seconds") < of(1, "step_seconds"), "{it}");
    assert_eq!(it["pool"], "dedicated");
    let bottleneck = rows[0]["bottleneck"].as_str().unwrap();
    assert!(
        bottleneck.contains("attention of trainer") && bottleneck.contains("131072 rows"),
        "{it}"
    );
    let gain = of(1, "tokens_per_second_and_processor") / of(0, "tokens_per_second_and_processor");
    assert!(gain > 1.02 && it["gain"].as_f64().unwrap() >= gain - 1e-9, "{it}");
    assert!(it["verdict"].as_str().unwrap().starts_with("best: "), "{it}");
    // One server of two: what is left takes twice as long; none: the job waits.
    let [one, both] = [0, 1].map(|at| &it["lost"][at]);
    assert!(one["seconds_until_replaced"].as_f64().unwrap() > of(2, "step_seconds"), "{it}");
    let anew = one["seconds_planned_anew"].as_f64().unwrap();
    assert!(anew > of(2, "step_seconds") && one["seconds_at_once"].as_f64().unwrap() > 1.0, "{it}");
    assert!(both["because"].as_str().unwrap().contains("the job waits"), "{it}");
    // A slow link costs; the slower, the more.
    let slow = |it: &Value| it["slow_nic"]["step_seconds"].as_f64().unwrap();
    let slower = with(&["--servers", "2", "--slow-nic", "400"]);
    assert!(slow(&it) >= of(2, "step_seconds") && slow(&slower) > 2.0 * slow(&it), "{slower}");
    assert!(slower["slow_nic"]["place"].as_str().unwrap().contains("er "), "{slower}");
    // Weights on the links are never free.
    let sharded = with(&["--servers", "2", "--fsdp", "--slow-nic", "400"]);
    assert!(slow(&sharded) >= slow(&slower), "{sharded}");
    for name in ["in-place", "dedicated", "mixed"] {
        let svg = fs::read_to_string(folder.path().join(format!("figures/{name}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }
    // Each rank has one document of the same length: nothing to even out.
    fs::write(folder.path().join("alike.json"), "[131072]").unwrap();
    let alike = [&LONG[..], &["--cap", "131072", "--lengths", "alike.json", "--memory-gib", "600"]];
    let alike = report(folder.path(), &alike.concat());
    let verdict = alike["verdict"].as_str().unwrap();
    assert!(verdict.starts_with("no gain here: attention at home is even"), "{alike}");
    // Short documents: hardly any attention.
    fs::write(folder.path().join("short.json"), "[100, 90, 300]").unwrap();
    let short = [&LONG[..], &["--cap", "300", "--lengths", "short.json", "--memory-gib", "600"]];
    let short = report(folder.path(), &short.concat());
    assert!(short["verdict"].as_str().unwrap().contains("of the work"), "{short}");
    let (code, table, _) = of_job(folder.path(), &[]);
    assert!(code == Some(0) && table.contains("dedicated, 2 servers (the pool)"), "{table}");
    assert!(table.contains("servers lost") && table.contains("times slower"), "{table}");
}

#[test]
fn what_a_job_cannot_be_simulated_by_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("none.json"), "[]").unwrap();
    for (args, expected) in [
        (&["--lose", "3"][..], "--lose 3: the pool has 2 dedicated servers"),
        (&["--lose", "0"], "--lose"),
        (&["--servers", "0"], "--servers"),
        (&["--slow-nic", "0"], "--slow-nic"),
        (&["--lanes", "0"], "--lanes"),
        (&["--table", "churn"], "--table"),
        (&["--set", "prolong"], "--set"),
        (&["--profile", "a100"], "h200-hopper"),
        (&["--model", "70b"], "--model 70b"),
        (&["--lengths", "none.json"], "the list is empty"),
        (&["--lengths", "missing.json"], "missing.json"),
        (&["--memory-gib", "0"], "--memory-gib"),
        (&["--memory-gib", "17179869185"], "--memory-gib"),
    ] {
        let (code, out, said) = of_job(folder.path(), args);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{said}");
    }
    let (code, _, said) = simulated(folder.path(), &["--table", "scale", "--slots", "10"]);
    assert!(code == Some(2) && said.contains("--slots"), "{said}");
    let (code, _, said) = simulated(folder.path(), &["-f", "missing.yaml"]);
    assert!(code == Some(2) && said.contains("missing.yaml"), "{said}");
    let (code, _, said) = simulated(folder.path(), &[]);
    assert!(code == Some(2) && said.contains("--table"), "{said}");
}

/// A slow server gets less, and what the pool does not have is refused.
#[test]
fn unlike_speeds_are_planned_for_by_number() {
    let folder = folder();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible.yaml");
    let demo = demo.to_str().expect("the tree's path is text");
    let run = |command: &str, weights: &str| {
        let nodes: &[&str] = if command == "plan" { &["--nodes", "9"] } else { &[] };
        let args = [&[command, "--json", "--weights", weights, "-f", demo], nodes].concat();
        cadre(folder.path(), &args)
    };
    let of = |weights: &str| -> Value {
        let (code, out, said) = run("plan", weights);
        assert_eq!((code, said.as_str()), (Some(0), ""));
        serde_json::from_str(&out).unwrap()
    };
    let (alike, slow) = (of("100,100"), of("100,50"));
    assert_ne!(alike["plans"], slow["plans"]);
    // Known speeds leave slots even, in time; of 200 percent 150 are left.
    assert!(slow["max_over_mean"].as_f64().unwrap() < 1.02, "{slow}");
    let fastest = |it: &Value| it["steps_per_second"][1].as_f64().unwrap();
    assert!(fastest(&slow) <= fastest(&alike), "{slow} {alike}");
    let (code, out, _) = run("simulate", "100,50");
    assert_eq!(code, Some(0), "{out}");
    assert_ne!(out, run("simulate", "100,100").1);
    for (weights, expected) in [
        ("100,100,100", "--weights has 3 numbers for 2 slots"),
        ("100,0", "the weight of slot 1 is 0"),
    ] {
        for command in ["plan", "simulate"] {
            let (code, out, said) = run(command, weights);
            assert_eq!((code, out.as_str()), (Some(2), ""), "{said}");
            assert!(said.contains(expected), "{command}: {said}");
        }
    }
    // The number of servers that is asked for counts, not that of the pool.
    let asked = |servers: &str, weights: &str| {
        let args = ["simulate", "--json", "--servers", servers, "--weights", weights, "-f", demo];
        cadre(folder.path(), &args)
    };
    let (code, slowest, said) = asked("4", "100,100,100,25");
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert_ne!(slowest, asked("4", "100,100,100,100").1);
    for (servers, weights, slots) in [("4", "100,100,100,100,100", 4), ("1", "100,100", 1)] {
        let (code, _, said) = asked(servers, weights);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(&format!("numbers for {slots} slots")), "{said}");
    }
}

/// What the job's trainer cuts its documents at counts, unless another list is given.
#[test]
fn a_job_is_planned_with_its_own_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible.yaml");
    let text = fs::read_to_string(demo).unwrap();
    let (model, own) = ("            - --model=small\n", "            - --lengths=own.json\n");
    fs::write(folder.path().join("plain.yaml"), &text).unwrap();
    let with_own = text.replace(model, &format!("{model}{own}"));
    fs::write(folder.path().join("own.yaml"), with_own).unwrap();
    let of = |command: &str, file: &str, more: &[&str]| {
        let nodes: &[&str] = if command == "plan" { &["--nodes", "9"] } else { &[] };
        let args = [&[command, "--json", "-f", file], nodes, more].concat();
        cadre(folder.path(), &args)
    };
    let missing = "--lengths of the job's trainer: own.json is no list of lengths: ";
    for command in ["plan", "simulate"] {
        let (code, out, said) = of(command, "own.yaml", &[]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{command}: {said}");
        assert!(said.contains(missing) && said.contains("or --lengths sampler"), "{said}");
    }
    fs::write(folder.path().join("own.json"), "[700, 90]").unwrap();
    for command in ["plan", "simulate"] {
        let of = |file, more: &[&str]| {
            let (code, out, said) = of(command, file, more);
            assert_eq!((code, said.as_str()), (Some(0), ""), "{command}");
            out
        };
        let (shipped, own) = (of("plain.yaml", &[]), of("own.yaml", &[]));
        assert_ne!(own, shipped, "{command}");
        assert_eq!(of("plain.yaml", &["--lengths", "own.json"]), own, "{command}");
        assert_eq!(of("own.yaml", &["--lengths", "sampler"]), shipped, "{command}");
    }
}

/// Servers that are asked for beside trainers in place can be lost, though the pool of the manifest has none.
#[test]
fn servers_beside_a_pool_in_place_can_be_lost() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible-in-place.yaml");
    let args = ["-f", manifest.to_str().unwrap(), "--json", "--servers", "4", "--lose", "1"];
    let (code, out, said) = simulated(folder.path(), &args);
    assert_eq!(code, Some(0), "{said}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["pool"], "mixed", "{report}");
    let lost = report["lost"].as_array().unwrap();
    assert_eq!(lost.len(), 1, "{report}");
    let (code, _, said) = simulated(folder.path(), &[&args[..4], &["5", "--lose", "6"]].concat());
    assert!(code != Some(0), "{said}");
}

/// A link that is told to be slow is counted as such, and what may be uneven spares it.
#[test]
fn a_slow_link_that_is_told_is_counted_and_spared() {
    let folder = tempfile::tempdir().unwrap();
    let lengths: Vec<u64> = (0..4_000).map(|it| if it % 40 == 0 { 131_072 } else { 700 }).collect();
    fs::write(folder.path().join("l.json"), serde_json::to_string(&lengths).unwrap()).unwrap();
    let told = |name: &str, places: &Value| {
        let profile = cadre_planner::Profile::builtin("h200-hopper").unwrap();
        let mut profile = serde_json::to_value(profile).unwrap();
        profile["places"] = places.clone();
        fs::write(folder.path().join(name), profile.to_string()).unwrap();
    };
    let all = ["trainer-0", "trainer-1", "server-0", "server-1", "server-2"];
    told("alike.json", &serde_json::json!([{"of": all}]));
    let slow = serde_json::json!([{"of": all[..4]}, {"of": ["server-2"], "out": 500, "into": 500}]);
    told("slow.json", &slow);
    let long = ["--cap", "131072", "--lengths", "l.json", "--memory-gib", "600", "--servers", "3"];
    let long = [&LONG[..], &long].concat();
    let of = |args: &[&str]| report(folder.path(), &[&long, args].concat());
    let dedicated = |it: &Value| it["rows"][2]["step_seconds"].as_f64().unwrap();
    let (plain, alike) = (of(&[]), of(&["--profile", "alike.json"]));
    // Times of links that are all as fast as the network are those of a job that says nothing.
    assert!((dedicated(&plain) / dedicated(&alike) - 1.0).abs() < 0.02, "{plain} {alike}");
    let slow = of(&["--profile", "slow.json"]);
    let bottleneck = slow["rows"][2]["bottleneck"].as_str().unwrap();
    assert!(bottleneck.starts_with("link in of server 2"), "{slow}");
    assert!(dedicated(&slow) > 10.0 * dedicated(&alike), "{slow} {alike}");
    let spared = of(&["--profile", "slow.json", "--tolerance", "2"]);
    assert!(10.0 * dedicated(&spared) < dedicated(&slow), "{spared} {slow}");
    // The first server is lost: what is left is still the slow one, by its new number.
    let lost = slow["lost"][0]["seconds_planned_anew"].as_f64().unwrap();
    assert!(lost > dedicated(&slow), "{slow}");
}

/// A requirement alone is waived where what it asks for cannot be there.
#[test]
fn options_of_a_job_are_refused_beside_a_workload_or_a_table() {
    let both = [
        ("--profile", "h200-hopper"),
        ("--model", "8b"),
        ("--layers", "full"),
        ("--tokens", "5"),
        ("--cap", "4"),
        ("--nano-batches", "2"),
        ("--memory-gib", "3"),
    ];
    let of_plan = [("--nodes", "4"), ("--lengths", "l.json")];
    let of_simulate = [("--lanes", "3"), ("--servers", "7"), ("--lose", "1"), ("--slow-nic", "9")];
    let plan = ["plan", "--workload", "w.json"];
    let simulate = ["simulate", "--table", "churn", "--lengths", "l.json"];
    let planned = both.iter().chain(&of_plan).map(|it| (&plan[..], it));
    let simulated = both.iter().chain(&of_simulate).map(|it| (&simulate[..], it));
    for (command, (name, value)) in planned.chain(simulated) {
        let (code, _, said) = cadre(Path::new("."), &[command, &[name, value]].concat());
        assert!(code == Some(2) && said.contains(name), "{command:?} {name}: {said}");
    }
}

#[test]
fn nodes_too_few_for_the_longest_sequences_are_refused_by_the_option() {
    let words = ["--table", "ours", "--lengths", "l.json", "--nodes", "8,4"];
    let (code, _, said) = simulated(Path::new("."), &words);
    assert!(code == Some(2) && said.contains("--nodes") && said.contains("8.."), "{said}");
}
