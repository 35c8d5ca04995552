//! Bad input, given to the real program: exit code 2, one line, nothing left behind.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic, too")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

const MANIFEST: &str = "\
apiVersion: cadre.dev/v1alpha1
kind: AttentionPool
metadata: {name: p}
spec: {replicas: 1, inPlace: false}
---
apiVersion: cadre.dev/v1alpha1
kind: TrainingJob
metadata: {name: j}
spec:
  attention: {poolRef: {name: p}}
  template:
    spec:
      containers:
        - name: trainer
          command: [cadre, train]
          args: [--data=data, --steps=5, --tokens=128, --cap=128, --model=tiny]
";

/// A directory with a good manifest and data.
fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("data")).unwrap();
    fs::write(folder.path().join("data/text.txt"), "In the beginning.").unwrap();
    fs::write(folder.path().join("m.yaml"), MANIFEST).unwrap();
    folder
}

/// Runs `cadre` there; gives its exit code and stderr.
fn cadre(folder: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(args)
        .current_dir(folder)
        .output()
        .expect("the program was built for this test");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Changes the good place, runs, and expects one line with `expected` and nothing else.
fn check(change: impl FnOnce(&Path), args: &[&str], expected: &str) {
    let folder = place();
    change(folder.path());
    let before = entries(folder.path());
    let all: Vec<&str> = ["run", "-f", "m.yaml"].iter().chain(args).copied().collect();
    let (code, said) = cadre(folder.path(), &all);
    assert_eq!(code, Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("error: "), "{said}");
    assert!(said.contains(expected), "`{expected}` is not in: {said}");
    assert_eq!(entries(folder.path()), before);
}

/// Rewrites the manifest.
fn manifest(from: &'static str, to: &'static str) -> impl FnOnce(&Path) {
    assert_eq!(MANIFEST.matches(from).count(), 1);
    move |folder| fs::write(folder.join("m.yaml"), MANIFEST.replace(from, to)).unwrap()
}

#[test]
fn bad_manifests_are_refused() {
    check(|folder| fs::remove_file(folder.join("m.yaml")).unwrap(), &[], "m.yaml: No such file");
    check(manifest("replicas: 1", "replicas: ]"), &[], "m.yaml: not valid YAML: ");
    check(manifest("replicas: 1", "servers: 1"), &[], "m.yaml:4: AttentionPool p: spec.servers");
    check(manifest("replicas: 1", "replicas: 0"), &[], "so the pool has no server");
    check(manifest("poolRef: {name: p}", "poolRef: {name: q}"), &[], "the pool is called `p`");
    let serve = manifest("command: [cadre, train]", "command: [cadre, serve]");
    check(serve, &[], "is [cadre, serve]");
    let other = manifest("command: [cadre, train]", "command: [bash]");
    check(other, &["--steps=2"], "--steps is for cadre train, and the job's trainer is bash");
    check(manifest("--model=tiny", "--model=huge"), &[], "TrainingJob j: spec.template.spec");
    let uneven = manifest("{poolRef: {name: p}}", "{poolRef: {name: p}, tolerance: '3'}");
    let none = manifest("{poolRef: {name: p}}", "{poolRef: {name: p}, servers: 0}");
    check(none, &[], "spec.attention.servers");
    check(uneven, &[], "spec.attention.tolerance is `3`; write a ratio from 1 to 2");
    let alone = "--exchange is node for trainers, auto for servers; say the same in both";
    check(manifest("--model=tiny", "--exchange=node"), &[], alone);
    let apart = "--exchange is tcp for trainers, shm for servers; say the same in both";
    let serve = |folder: &Path| {
        let template = "replicas: 1, inPlace: false, template: {spec: {containers: [{name: server, command: [cadre, serve], args: [--exchange=shm]}]}}";
        let text = MANIFEST.replace("replicas: 1, inPlace: false", template);
        let text = text.replace("--model=tiny", "--exchange=tcp, --model=tiny");
        fs::write(folder.join("m.yaml"), text).unwrap();
    };
    check(serve, &[], apart);
    let on_gpu = |more: &str| {
        let template = "replicas: 0, inPlace: true";
        let text = MANIFEST.replace("replicas: 1, inPlace: false", template);
        let text = text.replace("--model=tiny", "--engine=gpu, --exchange=node, --model=tiny");
        let text = text.replace("{poolRef: {name: p}}", more);
        move |folder: &Path| fs::write(folder.join("m.yaml"), text).unwrap()
    };
    check(on_gpu("{poolRef: {name: p}}"), &[], "spec.attention.wire is not Bf16");
    let bf16 = on_gpu("{poolRef: {name: p}, wire: Bf16}");
    check(
        bf16,
        &[],
        "--model is tiny, whose layer 0 has head dim 32, which --exchange node does not take",
    );
}

#[test]
fn bad_options_are_refused() {
    check(|_| (), &["--steps", "0"], "--steps");
    check(|_| (), &["--what"], "unexpected argument '--what'");
    check(|_| (), &["--attention", "both"], "[possible values: pool, local]");
    check(|_| (), &["--exchange", "rdma"], "[possible values: auto, tcp, shm, ucx, node]");
    check(|_| (), &["--exchange", "node"], "not all workers say --engine gpu; say --engine=gpu");
    check(|_| (), &["--fault", "explode@1"], "kill-server[:I]@STEP");
    check(|_| (), &["--fault", "kill-server@5"], "can never fire");
    check(|_| (), &["--fault", "kill-server:7@1"], "can never fire");
    check(|_| (), &["--headers", "none.jsonl"], "none.jsonl");
    let short = |folder: &Path| fs::write(folder.join("short.jsonl"), "").unwrap();
    check(short, &["--headers", "short.jsonl"], "short.jsonl has no step 0");
    check(|_| (), &["--trace", "no/such/trace.json"], "cannot write no/such/trace.json");
    check(|_| (), &["--trace", "m.yaml"], "m.yaml exists; remove it or name another");
    for file in ["o", "o/", "o/trace", "o/steps.jsonl", "o/summary.json"] {
        let said = format!("{file} is a name that the run itself makes; name another file");
        check(|_| (), &["--out", "o", "--trace", file], &said);
    }
}

#[test]
fn bad_data_is_refused() {
    let empty = |folder: &Path| fs::remove_file(folder.join("data/text.txt")).unwrap();
    check(empty, &[], "data");
    let short = |folder: &Path| fs::write(folder.join("data/text.txt"), "x").unwrap();
    check(short, &[], "data holds no document of two tokens");
    let larger = manifest("--model=tiny", "--model=tiny, --vocab-size=300");
    check(larger, &[], "text.txt is text, whose tokens are the 256 bytes");
    let tokens = |folder: &Path| {
        manifest("--model=tiny", "--model=tiny, --vocab-size=512")(folder);
        fs::remove_file(folder.join("data/text.txt")).unwrap();
        fs::write(folder.join("data/a.jsonl"), "{\"tokens\": [1, 999]}").unwrap();
    };
    let said = "a.jsonl:1: token 1 (from 0) is 999, and the model has 512 tokens, 0 to 511; give --vocab-size 1000";
    check(tokens, &[], said);
    check(|_| (), &["--data", "nowhere"], "nowhere");
    check(|_| (), &["--stalled-after-seconds", "86401"], "write a number from 1 to 86400");
    check(|_| (), &["--memory-mib", "16777217"], "write a number from 1 to 16777216");
    check(|_| (), &["--data", "m.yaml"], "m.yaml");
    let looped = |folder: &Path| std::os::unix::fs::symlink("..", folder.join("data/up")).unwrap();
    check(looped, &[], "data/up");
}

#[test]
fn bad_directories_for_results_are_refused() {
    check(|_| (), &["--out", "data"], "data is not empty and holds no run of cadre");
    check(|_| (), &["--out", "m.yaml"], "cannot read m.yaml");
    check(|_| (), &["--resume"], "runs/j holds no run to resume");
    check(|_| (), &["--out", "/dev/null/x"], "/dev/null/x");
    // An unfinished run without a checkpoint stays as it is.
    let unfinished = |folder: &Path| {
        fs::create_dir(folder.join("old")).unwrap();
        fs::write(folder.join("old/steps.jsonl"), "").unwrap();
    };
    let said =
        "old holds a run that has no checkpoint to go on from; name another --out, or remove old";
    check(unfinished, &["--out", "old"], said);
    check(unfinished, &["--out", "old", "--resume"], said);
    let with_checkpoint = |folder: &Path| {
        unfinished(folder);
        fs::create_dir_all(folder.join("old/checkpoints/step-2")).unwrap();
    };
    check(with_checkpoint, &["--out", "old"], "old holds an unfinished run; add --resume");
}

/// Workers are told of folders in UTF-8.
#[test]
fn folders_for_results_whose_names_are_no_text_are_refused() {
    let folder = place();
    let odd = OsStr::from_bytes(b"odd-\xff");
    let run = |args: &[&OsStr], here: &Path| {
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args(["run", "-f"])
            .arg(folder.path().join("m.yaml"))
            .arg("--data")
            .arg(folder.path().join("data"))
            .args(args)
            .current_dir(here)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        said
    };
    let said = run(&[OsStr::new("--out"), odd], folder.path());
    assert!(said.starts_with("error: --out ") && said.contains("is not UTF-8; name a"), "{said}");
    let inside = folder.path().join(odd);
    assert!(!inside.exists());
    let said = run(&[OsStr::new("--headers"), odd], folder.path());
    assert!(said.starts_with("error: --headers ") && said.contains("is not UTF-8; na"), "{said}");
    fs::create_dir(&inside).unwrap();
    let said = run(&[], &inside);
    assert!(said.starts_with("error: --out ") && said.contains("is not UTF-8; name a"), "{said}");
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
}

#[test]
fn other_commands_answer() {
    let folder = place();
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args(args)
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run(&["version"]), format!("cadre {}\n", env!("CARGO_PKG_VERSION")));
    assert!(run(&["completions", "bash"]).contains("_cadre"));
    let help = run(&["run", "--help"]);
    assert!(help.contains("--no-replace") && help.contains("--fault"));
    let (code, said) = cadre(folder.path(), &["run"]);
    assert_eq!((code, said.lines().count()), (Some(2), 1), "{said}");
}

/// What `cadre doctor` says of the good manifest with other arguments, where files may have so many KiB.
fn doctor(changed: &str, files: &str) -> (Option<i32>, serde_json::Value, String) {
    let folder = place();
    let text = MANIFEST.replace("--model=tiny]", &format!("--model=tiny{changed}]"));
    fs::write(folder.path().join("m.yaml"), text).unwrap();
    let program = env!("CARGO_BIN_EXE_cadre");
    let script = format!("ulimit -f {files}; exec {program} doctor -f m.yaml --json");
    let output = Command::new("sh").args(["-c", &script]).current_dir(&folder).output().unwrap();
    let said = serde_json::from_slice(&output.stdout).unwrap();
    (output.status.code(), said, String::from_utf8(output.stderr).unwrap())
}

fn state(said: &serde_json::Value, name: &str) -> String {
    let all = said["findings"].as_array().unwrap();
    let found = all.iter().find(|it| it["name"] == name).unwrap();
    found["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_doctor_tries_what_there_is_and_refuses_what_a_manifest_asks_for_in_vain() {
    let (code, said, stderr) = doctor("", "unlimited");
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert_eq!((state(&said, "tcp"), state(&said, "shared memory")), ("ok".into(), "ok".into()));
    assert_eq!(said["pairs"][0]["path"], "shared memory");
    let (code, said, _) = doctor(", --exchange=tcp", "unlimited");
    assert_eq!((code, &said["pairs"][0]["path"]), (Some(0), &"tcp".into()));
    // Files that are too short for shared memory: the next path, or a refusal where it must be there.
    let (code, said, _) = doctor("", "1024");
    assert_eq!((code, state(&said, "shared memory")), (Some(0), "absent".into()));
    assert_eq!(said["pairs"][0]["path"], "tcp");
    let (code, said, stderr) = doctor(", --exchange=shm", "1024");
    assert_eq!((code, state(&said, "shared memory")), (Some(2), "missing".into()));
    assert!(stderr.starts_with("error: the manifest asks for shared memory, which is not there: "));
    assert!(stderr.contains("ulimit -f") && stderr.lines().count() == 1, "{stderr}");
    let (code, said, stderr) = doctor(", --exchange=ucx", "unlimited");
    if state(&said, "RDMA") == "ok" {
        println!("skipped: this machine has RDMA");
    } else {
        assert_eq!(
            (code, &said["pairs"][0]["path"]),
            (Some(2), &"none: the job is refused here".into())
        );
        assert!(
            stderr.starts_with("error: the manifest asks for RDMA, which is not there: "),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(!stderr.contains("none is needed") && stderr.contains("say auto"), "{stderr}");
    }
    let (code, said, stderr) = doctor(", --engine=gpu", "unlimited");
    if state(&said, "GPU") == "ok" {
        return println!("skipped: this machine has a GPU");
    }
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.starts_with("error: the manifest asks for GPU, which is not there: "),
        "{stderr}"
    );
}

/// A trainer of another program says its exchange in its environment.
#[test]
fn a_doctor_reads_the_exchange_of_another_program() {
    let with = |way: &str| {
        let folder = place();
        let (head, _) = MANIFEST.split_once("          command: [cadre, train]").unwrap();
        let env = format!("          env: [{{name: CADRE_EXCHANGE, value: {way}}}]\n");
        let text = format!("{head}          command: [python, train.py]\n{env}");
        fs::write(folder.path().join("m.yaml"), text).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args(["doctor", "-f", "m.yaml", "--json"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), said, String::from_utf8(output.stderr).unwrap())
    };
    for (way, path) in [("auto", "shared memory"), ("tcp", "tcp")] {
        let (code, said, stderr) = with(way);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{way}");
        assert_eq!(said["pairs"][0]["path"], path, "{way}");
        let settings = said["settings"].as_array().unwrap();
        let told = settings.iter().find(|it| it["name"] == "--exchange of trainers").unwrap();
        assert_eq!(told["value"], way);
    }
    let (code, _, stderr) = with("rdma");
    assert_eq!(code, Some(2), "{stderr}");
    let expected = "TrainingJob j: CADRE_EXCHANGE is rdma; write auto, tcp, shm or ucx";
    assert!(stderr.contains(expected), "{stderr}");
}

#[test]
fn a_doctor_refuses_the_exchange_that_a_run_refuses() {
    let required =
        MANIFEST.replace("poolRef: {name: p}", "poolRef: {name: p}, encryption: Required");
    let of_trainers = |manifest: &str, way: &str| {
        manifest.replace("--model=tiny", &format!("--model=tiny, --exchange={way}"))
    };
    let rows_of_f32 = of_trainers(MANIFEST, "node");
    let in_the_clear = of_trainers(&required, "ucx");
    for text in [&rows_of_f32, &in_the_clear] {
        let said =
            [&["doctor", "-f", "m.yaml"][..], &["run", "-f", "m.yaml", "--out", "o"]].map(|args| {
                let folder = place();
                fs::write(folder.path().join("m.yaml"), text).unwrap();
                cadre(folder.path(), args)
            });
        for (code, said) in said {
            assert!(code == Some(2) && said.contains("TrainingJob j: --exchange is "), "{said}");
        }
    }
}

/// A controller of an earlier build would leave out what it does not know.
#[test]
fn a_trainer_of_a_job_names_the_variable_that_it_misses() {
    let folder = place();
    let trainer = |variables: &[(&str, &str)]| {
        let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
            .args([
                "train",
                "--data=data",
                "--steps=5",
                "--tokens=128",
                "--cap=128",
                "--model=tiny",
            ])
            .current_dir(folder.path())
            .envs([("CADRE_CONTROL", "/nowhere"), ("CADRE_ROLE", "trainer"), ("CADRE_INDEX", "0")])
            .envs([("CADRE_ATTEMPT", "1"), ("CADRE_INCARNATION", "0")])
            .envs(variables.iter().copied())
            .output()
            .expect("the program was built for this test");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = trainer(&[]);
    assert!(said.contains("CADRE_MEMORY_MIB is not set"), "{said}");
    let said = trainer(&[("CADRE_MEMORY_MIB", "64")]);
    assert!(said.contains("CADRE_RESUME is not set"), "{said}");
    let (memory, resume) = (("CADRE_MEMORY_MIB", "64"), ("CADRE_RESUME", "none"));
    let (world, rank) = (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"));
    let said = trainer(&[memory, resume]);
    assert!(said.contains("WORLD_SIZE is not set"), "{said}");
    let said = trainer(&[memory, resume, world]);
    assert!(said.contains("LOCAL_RANK is not set"), "{said}");
    // In a pod the loopback is nobody else's.
    let pod = [("CADRE_CONTROL", "https://nowhere:1"), ("CADRE_CONTROL_CA", "/nowhere")];
    let pod = [&pod[..], &[("CADRE_CONTROL_TOKEN", "/nowhere"), memory, resume, world, rank]];
    let said = trainer(&pod.concat());
    assert!(said.contains("CADRE_HOST is not set"), "{said}");
    let said = trainer(&[("CADRE_MEMORY_MIB", "much"), resume, world, rank]);
    assert!(said.contains("CADRE_MEMORY_MIB is \"much\", which is no"), "{said}");
    let said = trainer(&[memory, resume, world, rank, ("CADRE_EXCHANGE", "node")]);
    let told = "CADRE_EXCHANGE is \"node\", which is no way of rows on the host; write auto, tcp, shm or ucx";
    assert!(said.contains(told), "{said}");
}
