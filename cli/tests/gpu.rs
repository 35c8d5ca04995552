//! `cadre run` and `cadre calibrate` over a driver and a cuBLASLt whose GPU is emulated (`kernels/emulation`).
//!
//! In: a small job with bf16 rows. Out: the same first loss in place and on two servers, near that of the CPU; the same bits whether
//! rows go through sockets or stay on the GPU, also when a server is killed; a server whose GPU is lost, or does not copy, leaves with
//! the reason, and the job goes on, and so does one whose memory is short; processes take turns at several GPUs; pulls that fail after their copies have begun cost no bits. Says nothing of speed, nor of a real driver.

#[path = "../../kernels/emulation/built.rs"]
mod built;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// The folders of the emulated driver and of the emulated cuBLASLt on top; none in a build without GPU kernels.
fn driver() -> Option<OsString> {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return None;
    }
    Some(built::driver_and_blas())
}

/// A run of the job.
struct Job<'a> {
    /// Of trainer and servers.
    engine: &'a str,
    servers: u32,
    /// What else is other in its manifest.
    changes: &'a [(&'a str, &'a str)],
    /// Further words of the command line.
    words: &'a [&'a str],
    /// Of the emulated driver.
    environment: &'a [(&'a str, &'a str)],
}

impl Job<'_> {
    /// Runs it; gives what it said, and its events.
    fn run(&self, place: &Path, name: &str) -> (Output, Vec<Value>) {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible");
        let text = include_str!("../../bench/gpu/job.yaml")
            .replace("SERVERS", &self.servers.to_string())
            .replace("TRAINERS", "1")
            .replace(
                "inPlace: true",
                if self.servers == 0 { "inPlace: true" } else { "inPlace: false" },
            )
            .replace("ENGINE", self.engine)
            .replace("DATA", &data.display().to_string())
            .replace("STEPS", "2")
            .replace("TOKENS", "128")
            .replace("--threads=8", "--threads=1");
        let text = self.changes.iter().fold(text, |text, (from, to)| text.replace(from, to));
        let job = place.join(format!("{name}.yaml"));
        std::fs::write(&job, text).expect("a small file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cadre"));
        command.arg("run").arg("-f").arg(job).arg("--out").arg(place.join(name)).arg("--json");
        command.args(self.words).envs(self.environment.iter().copied());
        command.env("LD_LIBRARY_PATH", driver().expect("checked by the caller"));
        let output = command.output().expect("the binary starts");
        let lines = String::from_utf8_lossy(&output.stdout);
        let events = lines.lines().filter_map(|it| serde_json::from_str(it).ok()).collect();
        (output, events)
    }

    /// Losses of the job, which is expected to end well, in two steps.
    fn losses(&self, place: &Path, name: &str) -> Vec<(String, f64)> {
        let (output, events) = self.run(place, name);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}: {said}");
        let losses = losses(&events);
        assert_eq!(losses.len(), 2, "{name}: {said}");
        losses
    }
}

fn losses(events: &[Value]) -> Vec<(String, f64)> {
    let steps = events.iter().filter(|it| it["event"] == "step");
    let loss = |it: &Value| {
        (it["loss_bits"].as_str().unwrap_or("").to_owned(), it["loss"].as_f64().unwrap_or(f64::NAN))
    };
    steps.map(loss).collect()
}

#[test]
fn a_job_trains_on_the_gpu_in_place_and_on_servers() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let of = |name, engine, servers| {
        Job { engine, servers, changes: &[], words: &[], environment: &[] }
            .losses(place.path(), name)
    };
    let (cpu, home, servers) = (of("cpu", "cpu", 0), of("home", "gpu", 0), of("pool", "gpu", 2));
    assert_eq!(home[0].0, servers[0].0, "a forward row's bits depend on its document alone");
    assert_ne!(home[0].0, cpu[0].0, "nothing was computed on the GPU");
    for (gpu, cpu) in home.iter().chain(&servers).zip(cpu.iter().chain(&cpu)) {
        assert!((gpu.1 - cpu.1).abs() < 5e-3, "{gpu:?} {cpu:?}");
    }
}

#[test]
fn a_job_trains_by_the_portable_kernels_where_a_gpu_runs_no_others() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let of = |name, servers, words: &[&str], capability| {
        let environment = [("CADRE_EMULATED_CAPABILITY", capability), ("CADRE_LOG", "info")];
        Job { engine: "gpu", servers, changes: &[], words, environment: &environment }
            .losses(place.path(), name)
    };
    let home = of("home", 0, &[], "80");
    assert!(
        logs(place.path(), "home").contains("portable kernels, as compute capability 8.0 has no"),
        "{}",
        logs(place.path(), "home")
    );
    let pool = of("pool", 2, &["--exchange=tcp"], "80");
    assert_eq!(home[0].0, pool[0].0, "a forward row's bits depend on its document alone");
    assert_eq!(of("node", 2, &["--exchange=node"], "80"), pool);
    let hopper = of("hopper", 0, &[], "90");
    assert_ne!(hopper[0].0, home[0].0, "the same kernels ran on both");
    for (hopper, portable) in hopper.iter().zip(&home) {
        assert!((hopper.1 - portable.1).abs() < 5e-3, "{hopper:?} {portable:?}");
    }
}

#[test]
fn a_reproducible_job_leaves_out_a_server_that_runs_other_kernels() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let environment = [("CADRE_EMULATED_CAPABILITY", "server-1:80")];
    let words = ["--exchange=tcp"];
    let job =
        Job { engine: "gpu", servers: 2, changes: &[], words: &words, environment: &environment };
    let (output, events) = job.run(place.path(), "mixed");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut notices = events.iter().filter_map(|it| it["text"].as_str());
    let refused = notices.find(|it| it.contains("the job says reproducible"));
    let refused = refused.unwrap_or_else(|| panic!("{said}"));
    assert!(refused.contains("sm_80 portable ") && refused.contains("gpu sm_90a "), "{refused}");
    assert!(output.status.success(), "{said}");
    assert!(events.iter().any(|it| it["event"] == "step"), "{said}");
}

#[test]
fn rows_that_stay_on_the_gpu_give_the_bits_of_rows_that_go_through_sockets() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let of = |name, servers, changes: &[(&str, &str)], words: &[&str]| {
        Job { engine: "gpu", servers, changes, words, environment: &[] }.losses(place.path(), name)
    };
    let tcp = of("tcp", 2, &[], &["--exchange=tcp"]);
    assert_eq!(of("node", 2, &[], &["--exchange=node"]), tcp);
    assert_eq!(of("home-node", 0, &[], &["--exchange=node"]), tcp);
    // Killed in the middle of a step, forward and backward.
    let faults = ["--exchange=node", "--fault=kill-server@0:bwd", "--fault=kill-server@1:fwd"];
    assert_eq!(of("killed", 2, &[], &faults), tcp);
    // Documents over two trainers, which compute beside a server: own rows and those of others in one landing.
    let mixed = [
        ("procsPerNode: 1", "procsPerNode: 2"),
        ("inPlace: false", "inPlace: true"),
        ("--cap=128", "--cap=256"),
    ];
    let tcp = of("mixed-tcp", 1, &mixed, &["--exchange=tcp"]);
    assert_eq!(of("mixed-node", 1, &mixed, &["--exchange=node"]), tcp);
    assert_eq!(of("local-node", 1, &mixed, &["--exchange=node", "--attention=local"])[0], tcp[0]);
}

#[test]
fn a_server_whose_gpu_is_lost_says_so_and_its_work_moves() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    for (name, words, lost) in [
        // A step has 24 launches, all of them on one server: it is lost in the second step.
        ("lost", &["--exchange=tcp"][..], ("CADRE_EMULATED_LOST", "30")),
        ("lost-node", &["--exchange=node"], ("CADRE_EMULATED_LOST", "30")),
        // A server makes fewer copies of one step's rows than of two steps': it is lost in the second one.
        ("copies", &["--exchange=node"], ("CADRE_EMULATED_COPIES", "server:100")),
    ] {
        let job = Job { engine: "gpu", servers: 2, changes: &[], words, environment: &[lost] };
        let (output, events) = job.run(place.path(), name);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let notices = || events.iter().filter_map(|it| it["text"].as_str());
        assert!(notices().any(|it| it.contains("leaves: the GPU is lost")), "{name}: {said}");
        assert!(notices().any(|it| it.contains("its work moves")), "{name}: {said}");
        assert!(output.status.success() && losses(&events).len() == 2, "{name}: {said}");
    }
}

/// What the processes of a run have written.
fn logs(place: &Path, name: &str) -> String {
    let logs = std::fs::read_dir(place.join(name).join("logs")).expect("logs");
    logs.map(|it| std::fs::read_to_string(it.expect("a log").path()).expect("a log is text"))
        .collect()
}

#[test]
fn a_server_whose_gpu_is_too_small_for_one_bundle_says_so_and_its_work_moves() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let calm = Job {
        engine: "gpu",
        servers: 2,
        changes: &[],
        words: &["--exchange=tcp"],
        environment: &[],
    };
    let calm = calm.losses(place.path(), "calm");
    let environment = [("CADRE_EMULATED_MEMORY", "server-1:8000")];
    let words = ["--exchange=tcp"];
    let job =
        Job { engine: "gpu", servers: 2, changes: &[], words: &words, environment: &environment };
    let (output, events) = job.run(place.path(), "short");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let notices = || events.iter().filter_map(|it| it["text"].as_str());
    let left = notices().find(|it| it.contains("leaves: GPU memory is too small for"));
    let left = left.unwrap_or_else(|| panic!("{said}"));
    assert!(left.starts_with("server 1") && left.contains(" of bundle "), "{left}");
    assert!(left.contains("--gpu") && left.contains("--cap"), "{left}");
    assert!(notices().any(|it| it.contains("its work moves")), "{said}");
    assert!(output.status.success(), "{said}");
    assert_eq!(losses(&events), calm);
}

#[test]
fn processes_of_a_run_take_turns_at_the_gpus_of_their_machine() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let of = |name, words: &[&str], changes: &[(&str, &str)]| {
        let environment = [("CADRE_EMULATED_GPUS", "3"), ("CADRE_LOG", "info")];
        let job = Job { engine: "gpu", servers: 3, changes, words, environment: &environment };
        (job.losses(place.path(), name), logs(place.path(), name))
    };
    let (apart, said) = of("apart", &["--exchange=tcp"], &[]);
    for (process, gpu) in [("server 0", 1), ("server 1", 2), ("server 2", 0)] {
        let line = format!("{process} (incarnation 0) computes core attention: GPU {gpu}, ");
        assert!(said.contains(&line), "{line}: {said}");
    }
    assert!(said.contains("core attention in place: GPU 0, "), "{said}");
    // With rows that stay on a GPU, all have the same one.
    let (together, said) = of("together", &["--exchange=node"], &[]);
    assert!(!said.contains("GPU 1, ") && said.contains("GPU 0, "), "{said}");
    assert_eq!(together, apart);
    let named = [
        ("[--engine=gpu, ", "[--gpu=2, --engine=gpu, "),
        ("- --engine=gpu", "- --engine=gpu\n            - --gpu=1"),
    ];
    let named = named.map(|(from, to)| (from, to));
    let (losses, said) = of("named", &["--exchange=tcp"], &named);
    assert!(!said.contains("GPU 0, "), "{said}");
    assert_eq!(said.matches("computes core attention: GPU 2, ").count(), 3, "{said}");
    assert!(said.contains("core attention in place: GPU 1, "), "{said}");
    assert_eq!(losses, apart);
}

#[test]
fn a_gpu_that_is_named_and_not_there_ends_the_run_with_a_remedy() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let named = [("- --engine=gpu", "- --engine=gpu\n            - --gpu=5")];
    let job = Job { engine: "gpu", servers: 0, changes: &named, words: &[], environment: &[] };
    let (output, _) = job.run(place.path(), "named");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("there is no GPU 5") && said.contains("name another one"), "{said}");
}

#[test]
fn a_server_puts_lists_of_launches_without_waiting_for_a_stream() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let environment = [("CADRE_EMULATED_PAGEABLE", "server:1")];
    let words = ["--exchange=node"];
    let job =
        Job { engine: "gpu", servers: 2, changes: &[], words: &words, environment: &environment };
    job.losses(place.path(), "listed");
}

#[test]
fn a_gpu_is_no_part_of_what_rows_of_f32_depend_on() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let changes = [("wire: Bf16", "wire: F32"), ("- --engine=gpu", "- --engine=cpu")];
    let of = |name, engine| {
        let words = ["--exchange=tcp"];
        Job { engine, servers: 1, changes: &changes, words: &words, environment: &[] }
            .losses(place.path(), name)
    };
    // The job is reproducible: a server of other arithmetic would be refused.
    assert_eq!(of("gpu", "gpu"), of("cpu", "cpu"));
}

#[test]
fn pulls_that_fail_after_their_copies_have_begun_cost_time_and_no_bits() {
    if driver().is_none() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let of = |name: &str, fault: (&str, &str)| {
        let (words, environment) =
            (&["--exchange=node"], [fault, ("CADRE_LOG", "cadre_worker=debug")]);
        let job = Job { engine: "gpu", servers: 2, changes: &[], words, environment: &environment };
        let (output, events) = job.run(place.path(), name);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name}: {said}");
        let logs = std::fs::read_dir(place.path().join(name).join("logs")).expect("logs");
        let logs = logs.map(|it| std::fs::read_to_string(it.expect("a log").path()));
        let logs: String = logs.map(|it| it.expect("a log is text")).collect();
        (losses(&events), said, logs)
    };
    let (calm, _, logs) = of("calm", ("CADRE_EMULATED_CUT", ""));
    assert!(calm.len() == 2 && !logs.contains("emulated driver"), "{logs}");
    // A server dies while the trainer copies its results: its work moves.
    let (losses, said, logs) = of("orphan", ("CADRE_EMULATED_ORPHAN", "trainer:25"));
    assert!(logs.contains("is killed while its rows are copied"), "{logs}");
    assert!(said.contains("its work moves"), "{said}");
    assert_eq!(losses, calm);
    // Servers lose their links while launches wait for copies: these count no more, and rows are pulled anew.
    let (losses, said, logs) = of("cut", ("CADRE_EMULATED_CUT", "server:3"));
    assert!(logs.contains("all links are cut while a launch waits"), "{logs}");
    assert!(logs.contains("went out early for nothing"), "{logs}");
    assert!(!said.contains("its work moves"), "{said}");
    assert_eq!(losses, calm);
}

#[test]
fn a_gpu_that_is_demanded_and_not_there_is_refused() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(["calibrate", "--engine=gpu", "--out"])
        .arg(place.path().join("costs.json"))
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--engine gpu: "), "{said}");
}
