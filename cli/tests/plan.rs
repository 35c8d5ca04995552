//! `cadre plan` as a user calls it: what it reports can be computed again from the plan that it writes.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic, too")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use common::cadre;

fn planned(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    cadre(folder, &[&["plan", "--workload", "w.json"], args].concat())
}

fn place(workload: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("w.json"), workload.to_string()).unwrap();
    folder
}

/// Four ranks; the first document spans two of them.
fn workload() -> Value {
    json!({"name": "four", "tokens_per_rank": 8192, "num_ranks": 4, "seed": 7,
        "ranks": [[12000, 4384], [8192], [1000, 3000, 192, 2000, 2000]]})
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn range(value: &Value) -> (u64, u64) {
    (number(&value[0]), number(&value[1]))
}

/// Loads, and bytes of Q and of K and V that are pulled, from the file alone.
fn account(file: &Value) -> (Vec<u64>, u64, u64) {
    let mut home: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    for (rank, stretches) in file["ranks"].as_array().unwrap().iter().enumerate() {
        for it in stretches.as_array().unwrap() {
            let (start, end) = range(&it["rows"]);
            home.extend((start..end).map(|row| ((number(&it["doc"]), row), rank)));
        }
    }
    let (mut loads, mut q_bytes) = (vec![0; 4], 0);
    let mut keys: BTreeMap<(usize, u64, u64), u64> = BTreeMap::new();
    for task in file["tasks"].as_array().unwrap() {
        let (document, slot) = (number(&task["doc"]), number(&task["slot"]) as usize);
        let ((first, end), (_, last)) = (range(&task["q"]), range(&task["k"]));
        assert_eq!(last, end, "a causal task keeps the keys up to its last row");
        let heads = range(&task["kv_heads"]);
        let count = heads.1 - heads.0;
        loads[slot] += (first..end).map(|row| (row + 1) * count * 4).sum::<u64>();
        let away = (first..end).filter(|row| home[&(document, *row)] != slot).count() as u64;
        q_bytes += away * count * 4 * 128 * 2;
        for head in heads.0..heads.1 {
            let most = keys.entry((slot, document, head)).or_default();
            *most = last.max(*most);
        }
    }
    let away = |((slot, document, _), last): (&(usize, u64, u64), &u64)| {
        (0..*last).filter(|row| home[&(*document, *row)] != *slot).count() as u64
    };
    let kv_bytes = keys.iter().map(away).sum::<u64>() * 2 * 128 * 2;
    (loads, q_bytes, kv_bytes)
}

#[test]
fn a_report_can_be_computed_again_from_the_plan() {
    let folder = place(&workload());
    for args in [&["--lanes", "8"][..], &["--lanes", "1", "--layout", "head-tail"]] {
        let args = [&["--json", "--out", "plan.json"], args].concat();
        let (code, out, said) = planned(folder.path(), &args);
        assert_eq!((code, said.as_str()), (Some(0), ""));
        assert_eq!(out.lines().count(), 1);
        let report: Value = serde_json::from_str(&out).unwrap();
        let file = fs::read(folder.path().join("plan.json")).unwrap();
        let (loads, q_bytes, kv_bytes) = account(&serde_json::from_slice(&file).unwrap());
        assert_eq!(loads.iter().sum::<u64>(), 32 * pairs(), "every pair is computed once");
        let (most, sum) = (*loads.iter().max().unwrap() as f64, loads.iter().sum::<u64>() as f64);
        let balance = report["max_over_mean"].as_f64().unwrap();
        assert!((balance - 4.0 * most / sum).abs() < 1e-9 && balance < 1.002, "{balance}");
        assert_eq!((number(&report["q_bytes"]), number(&report["kv_bytes"])), (q_bytes, kv_bytes));
        assert_eq!((number(&report["slots"]), number(&report["documents"])), (4, 8));
        assert!(report["max_over_mean_before"].as_f64().unwrap() > 1.2);
        assert!(report["gap_bytes"].as_f64().unwrap() > 0.0, "no plan is below the bound");
    }
}

fn pairs() -> u64 {
    let lengths = workload()["ranks"].clone();
    let lengths = lengths.as_array().unwrap().iter().flat_map(|it| it.as_array().unwrap().clone());
    lengths.map(|it| number(&it) * (number(&it) + 1) / 2).sum()
}

#[test]
fn slots_of_their_own_share_by_weight() {
    let folder = place(&workload());
    let args = ["--slots", "3", "--weights", "100,200,400", "--json"];
    let (code, out, said) = planned(folder.path(), &args);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let report: Value = serde_json::from_str(&out).unwrap();
    assert!(report["max_over_mean"].as_f64().unwrap() < 1.02, "{out}");
    let (code, table, _) = planned(folder.path(), &[]);
    assert_eq!(code, Some(0));
    assert!(table.contains("max/mean") && table.contains("busiest link"), "{table}");
}

/// Gaps and bounds of the plan are in the table, as they are in the JSON; the picture has each rank and each slot.
#[test]
fn what_is_known_of_a_plan_is_said_and_drawn() {
    let folder = place(&workload());
    let args = ["--slots", "3", "--lanes", "8", "--picture", "p.svg"];
    let (_, out, _) = planned(folder.path(), &[&args[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&out).unwrap();
    let (_, table, _) = planned(folder.path(), &args);
    let percent = |name: &str| format!("{:.0} %", 100.0 * report[name].as_f64().unwrap());
    let least = number(&report["least_memory_bytes"]) as f64 / 1e9;
    assert!(least > 0.0 && number(&report["memory_bytes"]) as f64 / 1e9 >= least);
    says(&table, "above their bound", &percent("gap_bytes"));
    says(&table, "above its bound", &percent("gap_link"));
    says(&table, "memory of a slot", &format!("at least {least:.2} GB"));
    let picture = fs::read_to_string(folder.path().join("p.svg")).unwrap();
    for (bar, times) in [("trainer 0", 1), ("trainer 3", 1), ("server 2", 1), ("server 3", 0)] {
        assert_eq!(picture.matches(&format!(">{bar}<")).count(), times, "{bar}");
    }
}

fn says(table: &str, name: &str, value: &str) {
    let is_row = |line: &str| line.contains(name) && line.contains(value);
    assert!(table.lines().any(is_row), "{name}: {value}\n{table}");
}

#[test]
fn what_may_be_uneven_asks_less_of_the_busiest_link() {
    let folder = place(&workload());
    let of = |args: &[&str]| {
        let (code, out, said) =
            planned(folder.path(), &[&["--json", "--lanes", "8"], args].concat());
        assert_eq!((code, said.as_str()), (Some(0), ""));
        let report: Value = serde_json::from_str(&out).unwrap();
        let float = |name: &str| report[name].as_f64().unwrap();
        let link = float("max_link_seconds_forward") + float("max_link_seconds_backward");
        (float("max_over_mean"), link)
    };
    let (usual, uneven) = (of(&[]), of(&["--tolerance", "1.1"]));
    assert!(usual.0 <= 1.002 && uneven.0 <= 1.1 && uneven.1 < usual.1, "{usual:?} {uneven:?}");
}

#[test]
fn documents_have_the_mask_that_the_workload_names() {
    let keys = |mask: &str| {
        let mut workload = workload();
        workload["mask"] = json!(mask);
        let folder = place(&workload);
        let (code, _, said) = planned(folder.path(), &["--out", "plan.json"]);
        assert_eq!((code, said.as_str()), (Some(0), ""));
        let file = fs::read(folder.path().join("plan.json")).unwrap();
        let file: Value = serde_json::from_slice(&file).unwrap();
        let of_task = |it: &Value| (number(&it["doc"]), range(&it["q"]), range(&it["k"]));
        file["tasks"].as_array().unwrap().iter().map(of_task).collect::<Vec<_>>()
    };
    let lengths = [12_000, 4_384, 8_192, 1_000, 3_000, 192, 2_000, 2_000];
    for (document, (first, end), kept) in keys("window:600") {
        assert_eq!(kept, (first.saturating_sub(599), end), "document {document}");
    }
    for (document, _, kept) in keys("full") {
        assert_eq!(kept, (0, lengths[document as usize]), "document {document}");
    }
}

#[test]
fn bad_workloads_and_options_are_refused_by_name() {
    let check = |change: &dyn Fn(&mut Value), args: &[&str], expected: &str| {
        let mut workload = workload();
        change(&mut workload);
        let folder = place(&workload);
        let (code, out, said) = planned(folder.path(), args);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains(expected), "{said} does not contain {expected}");
    };
    let same = |_: &mut Value| {};
    check(&|it| it["ranks"][1][0] = json!(0), &[], "ranks[1][0] is 0");
    check(&|it| it["ranks"][1][0] = json!(-5), &[], "expected u32");
    check(&|it| it["ranks"][1][0] = json!(9000), &[], "33576 tokens");
    check(&|it| it["ranks"][1][0] = json!(1_u64 << 40), &[], "expected u32");
    check(&|it| it["tokens_per_rank"] = json!(0), &[], "tokens_per_rank is 0");
    check(&|it| it["num_ranks"] = json!(0), &[], "num_ranks is 0");
    check(&|it| it["num_ranks"] = json!("NaN"), &[], "expected u32");
    check(&|it| *it = json!([]), &[], "w.json");
    check(&|it| it["mask"] = json!("window:0"), &[], "workload w.json: mask \"window:0\" is not");
    check(&|it| it["mask"] = json!(7), &[], "expected a string");
    check(&same, &["--weights", "100,100"], "2 numbers for 4 slots");
    check(&same, &["--weights", "100,100,0,100"], "slot 2 is 0");
    check(&same, &["--weights", "100,-1,100,100"], "weights");
    for ratio in ["0.9", "NaN", "2.1", "two"] {
        check(&same, &["--tolerance", ratio], "give a ratio from 1 to 2, such as 1.002");
    }
    check(&same, &["--slots", "0"], "slots");
    check(&same, &["--lanes", "3"], "lanes");
    check(&same, &["--hidden-q", "4000"], "--hidden-q is 4000");
    check(&same, &["--hidden-kv", "1000"], "--hidden-kv is 1000");
    check(&same, &["--out", "missing/plan.json"], "cannot write missing/plan.json");
}

/// The demo's pool and job, as the test needs them.
fn sized(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible.yaml");
    let manifest = manifest.to_str().expect("the tree's path is text");
    cadre(folder, &[&["plan", "-f", manifest], args].concat())
}

#[test]
fn a_job_is_sized_and_drawn_before_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let report = |args: &[&str]| -> Value {
        let (code, out, said) = sized(folder.path(), &[&["--json"], args].concat());
        assert_eq!((code, said.as_str()), (Some(0), ""));
        serde_json::from_str(&out).unwrap()
    };
    let (rows, keys) = ([128, 8192], [0, 8192]);
    let table = |direction: &str, times: [[u64; 2]; 2]| {
        json!({"head_dim": 64, "direction": direction, "kept": "causal", "rows": rows, "keys": keys,
            "picoseconds": times})
    };
    let profile = json!({"version": 1, "processor": "made up", "source": "a test", "task_nanoseconds": 1,
            "linear_operations": 100, "links": [{"distance": "far", "rate": 9_000_000, "latency": 1}], "kernels": [
                table("forward", [[10_000_000, 1_100_000_000], [33_558_528_000, 100_667_392_000]]),
                table("backward", [[20_000_000, 2_200_000_000], [67_117_056_000, 201_334_784_000]])]});
    fs::write(folder.path().join("p.json"), profile.to_string()).unwrap();
    let at = |nodes: &'static str| {
        report(&["--nodes", nodes, "--profile", "p.json", "--picture", "p.svg"])
    };
    let (enough, few) = (at("9"), at("3"));
    assert_eq!(few["nodes_needed"], 4);
    assert!(few["because"][0].as_str().unwrap().contains("needs 4 nodes"), "{few}");
    assert_eq!(enough["fits"], enough["because"].as_array().unwrap().is_empty());
    let slowest = |it: &Value| it["steps_per_second"][0].as_f64().unwrap();
    let fastest = enough["steps_per_second"][1].as_f64().unwrap();
    assert!(0.0 < slowest(&enough) && slowest(&enough) <= fastest, "{enough}");
    assert!(
        enough["max_over_mean"].as_f64().unwrap()
            < enough["max_over_mean_before"].as_f64().unwrap()
    );
    let picture = fs::read_to_string(folder.path().join("p.svg")).unwrap();
    assert!(
        picture.starts_with("<svg")
            && picture.contains("server 1")
            && picture.contains("trainer 0")
    );
    let (most, least) = (number(&enough["memory_bytes"]), number(&enough["least_memory_bytes"]));
    let bytes = number(&enough["header_bytes"]);
    assert!(0 < least && least <= most && bytes > 100, "{enough}");
    let (_, table, _) = sized(folder.path(), &["--nodes", "9", "--profile", "p.json"]);
    let gap = |name: &str| format!("{:.1} %", 100.0 * enough[name].as_f64().unwrap());
    says(&table, "above the bounds", &format!("finish {}", gap("gap_compute")));
    says(&table, "above the bounds", &format!("busiest link {}", gap("gap_link")));
    says(&table, "memory of a slot", &format!("at least {:.2} GB", least as f64 / 1e9));
    says(&table, "header of a step", &format!("{:.1} KB", bytes as f64 / 1e3));
    // Windows are less attention than documents without, but each layer waits for its own.
    let manifest = folder.path().join("near.yaml");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible.yaml");
    let text = fs::read_to_string(demo).unwrap();
    let model = "            - --model=small\n";
    let with = |layers: &str, args: &[&str]| -> Value {
        let layers = format!("{model}            - --layers={layers}\n");
        fs::write(&manifest, text.replace(model, &layers)).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args(["plan", "--nodes", "9", "--profile", "p.json", "--json", "-f"])
            .arg(&manifest)
            .args(args)
            .current_dir(folder.path())
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let mixed = with("window:64,window:64,chunk:64,full", &["--picture", "mixed.svg"]);
    assert_eq!((&enough["servers_needed"], &mixed["servers_needed"]), (&json!(2), &json!(2)));
    for less in ["window:64", "chunk:64", "none,none,none,chunk:64"] {
        assert_eq!(with(less, &[])["servers_needed"], 1, "{less}");
    }
    let said = mixed["layers"].as_str().unwrap().replace(" heads 4/2 dim 64", "");
    assert_eq!(said, "2 × window:64, 1 × chunk:64, 1 × causal");
    let wide = with("window:64 heads 2/1,full heads 16/2", &[]);
    let each = "1 × window:64 heads 2/1 dim 64, 1 × causal heads 16/2 dim 64";
    assert_eq!(wide["layers"], format!("{each}, {each}"));
    assert!(slowest(&wide) < slowest(&enough), "{wide}");
    assert!(slowest(&mixed) >= slowest(&enough));
    assert!(slowest(&with("none,none,none,full", &[])) > slowest(&mixed));
    let picture = fs::read_to_string(folder.path().join("mixed.svg")).unwrap();
    for kind in ["window:64", "chunk:64", "causal"] {
        let planned = format!("attention as planned, {kind} heads 4/2 dim 64<");
        assert_eq!(picture.matches(&planned).count(), 1, "{kind}");
    }
    // What no slot can hold has no speed.
    let small = text.replace("[--threads, \"1\"]", "[--memory-mib, \"1\"]");
    fs::write(
        &manifest,
        small.replace(model, &format!("{model}            - --layers=window:1,full\n")),
    )
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(["plan", "--nodes", "9", "--profile", "p.json", "--json", "-f"])
        .arg(&manifest)
        .current_dir(folder.path())
        .output()
        .unwrap();
    let small: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&small["fits"], &small["steps_per_second"]),
        (&json!(false), &Value::Null),
        "{small}"
    );

    let (_, table, _) = sized(folder.path(), &["--nodes", "9"]);
    assert!(table.contains("steps a second") && table.contains("h200-hopper"), "{table}");
}

#[test]
fn what_a_job_cannot_be_sized_by_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("bad.json"), json!({"version": 2}).to_string()).unwrap();
    fs::write(folder.path().join("none.json"), "[]").unwrap();
    for (args, expected) in [
        (&["--nodes", "0"][..], "nodes"),
        (
            &["--nodes", "9", "--nano-batches", "40000"],
            "--nano-batches 40000 with --accumulate 1: 40000 nano-batches and 1 kinds of layers have more than 32767 plans",
        ),
        (&[], "--nodes"),
        (&["--nodes", "4", "--profile", "a100"], "h200-hopper"),
        (&["--nodes", "4", "--profile", "bad.json"], "bad.json"),
        (&["--nodes", "4", "--model", "70b"], "--model 70b"),
        (&["--nodes", "4", "--lengths", "none.json"], "the list is empty"),
        (&["--nodes", "4", "--picture", "missing/p.svg"], "cannot write missing/p.svg"),
        (&["--nodes", "4", "--workload", "w.json"], "cannot be used with"),
    ] {
        let (code, out, said) = sized(folder.path(), args);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{said}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{said}");
    }
}

#[test]
fn a_calibration_that_is_cut_is_kept_and_plans_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.json");
    let calibrate = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
        command.args(["calibrate", "--engine=cpu", "--head-dim=8", "--out=c.json"]);
        command.current_dir(folder.path()).stderr(Stdio::null()).spawn().unwrap()
    };
    let cut = |until: &dyn Fn() -> bool| {
        let mut child = calibrate();
        while !until() {
            assert_eq!(child.try_wait().unwrap(), None, "it ends before it is cut");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    };
    cut(&|| path.exists());
    let kept = || serde_json::from_slice::<Value>(&fs::read(&path).unwrap()).unwrap();
    let rows = |file: &Value| -> u64 {
        let words = file["partial"].as_str().unwrap();
        let (rows, rest) = words.split_once(' ').unwrap();
        assert_eq!(rest, "of 8 rows of its tables are measured");
        rows.parse().unwrap()
    };
    let first = kept();
    let measured = first["kernels"][0]["picoseconds"].as_array().unwrap().len();
    assert!((1..8).contains(&rows(&first)) && measured >= 1, "{first}");
    let (code, _, said) = sized(folder.path(), &["--nodes", "4", "--profile", "c.json"]);
    let remedy = "of its tables are measured; run cadre calibrate to its end";
    assert!(code == Some(2) && said.contains("it is partial: ") && said.contains(remedy), "{said}");
    // The next one begins anew.
    fs::write(&path, json!({"partial": "old"}).to_string()).unwrap();
    cut(&|| kept()["partial"] != "old");
    assert!((1..8).contains(&rows(&kept())));
}

#[test]
fn a_head_dim_that_no_kernel_has_is_not_calibrated() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(["calibrate", "--head-dim", "7", "--out", "c.json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--head-dim 7"));
    assert!(!folder.path().join("c.json").exists());
}
