//! Jobs whose exchange fails by seed (`CADRE_FAULTS`): the right bits or a clear error, no hang, and nothing is left.
//!
//! In: seeds. Each run has namespaces of its own where the machine gives them, so whatever is left of it is seen: processes,
//! temporary files, shared memory.

use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::{Bits, JOB, Place, Run, fs};

#[path = "../../../testing/seeds.rs"]
mod seeds;

/// Longer than a job may wait for anything.
const HANGS: Duration = Duration::from_mins(3);

/// Namespaces in which a run is alone.
const ALONE: [&str; 6] =
    ["--map-root-user", "--mount", "--ipc", "--pid", "--mount-proc", "--kill-child"];

/// Runs the words behind a file and a folder for temporary files. What is left then is listed in the file.
const LISTED: &str = r#"mount -t tmpfs tmpfs /dev/shm || exit 99
left=$1
export TMPDIR=$2
shift 2
"$@"
code=$?
{
    for it in /proc/[0-9]*; do
        [ "$it" = "/proc/$$" ] || tr '\0' ' ' <"$it/cmdline"
    done
    ls -A /dev/shm
    ls -A "$TMPDIR"
    tail --lines=+2 /proc/sysvipc/shm
} >"$left" 2>&1
exit $code"#;

/// Whether this machine gives a run namespaces.
static HAS_NAMESPACES: LazyLock<bool> = LazyLock::new(|| {
    let mut tried = Command::new("unshare");
    tried.args(ALONE).args(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]);
    let has = tried.stderr(Stdio::null()).status().is_ok_and(|it| it.success());
    if !has {
        println!("skipped: no namespaces can be made here, so what a run leaves is not looked for");
    }
    has
});

/// Which paths rows of a run may take: those of `--exchange`, and over what UCX emulates reads.
fn paths(seed: u64) -> (&'static str, Option<&'static str>) {
    match seed % 4 {
        0 => ("tcp", None),
        1 if cadre_exchange::ucx_here().is_ok() => ("ucx", Some("shm")),
        _ => ("auto", None),
    }
}

/// Runs a job with faults: what was right in it, or the error that it named.
fn check(place: &Place, right: &Bits, seed: u64) -> Result<(), String> {
    let (exchange, over) = paths(seed);
    let name = format!("faults-{seed}");
    let plain = place.command(&name, JOB, &["--exchange", exchange]);
    let [left, rooms] = ["left", "rooms"].map(|it| place.path(&format!("{name}.{it}")));
    fs::create_dir(&rooms).expect("a new folder");
    let mut command = Command::new("unshare");
    if *HAS_NAMESPACES {
        command.args(ALONE).args(["sh", "-c", LISTED, "sh"]).args([&left, &rooms]);
        command.arg(plain.get_program());
        command.args(plain.get_args());
    } else {
        command = Command::new(plain.get_program());
        command.args(plain.get_args());
    }
    for (name, value) in plain.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.env("CADRE_FAULTS", seed.to_string()).env("TMPDIR", &rooms);
    command.envs(over.map(|it| ("CADRE_UCX_OVER", it)));
    let said = fs::File::create(place.path(&format!("{name}.said"))).expect("a small file");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut child = command.spawn().expect("the binary starts");
    let start = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status.code();
        }
        if start.elapsed() > HANGS {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    let said = fs::read_to_string(place.path(&format!("{name}.said"))).unwrap_or_default();
    let run = Run { code, out: place.path(&name), said };
    let case = format!("CADRE_FAULTS={seed} --exchange {exchange} {over:?}");
    let all = || format!("{case}, {:?}: {}\n{}", start.elapsed(), run.said, run.logs());
    assert!(start.elapsed() < HANGS, "the run hangs: {}", all());
    if *HAS_NAMESPACES {
        let left = fs::read_to_string(left).expect("it was listed");
        assert!(left.trim().is_empty(), "left of a run: {left}\n{}", all());
    }
    assert!(!run.said.contains("panicked") && !run.logs().contains("panicked"), "{}", all());
    assert!(run.logs().contains("CADRE_FAULTS: pulls, links and ways fail"), "{}", all());
    let result = match run.code {
        Some(0) => {
            assert_eq!(run.bits(), *right, "{}", all());
            Ok(())
        }
        Some(2 | 3) => {
            let error = run.said.lines().rev().find(|it| it.contains("error"));
            Err(error.unwrap_or_else(|| panic!("no error is named: {}", all())).to_owned())
        }
        _ => panic!("{}", all()),
    };
    println!("{case}: {:?}, {} failovers, {result:?}", start.elapsed(), run.failovers());
    let _ = fs::remove_dir_all(&run.out);
    result
}

fn check_all(firsts: Vec<(u64, u64)>) {
    let place = Place::new();
    let right = place.bits("calm", JOB, &["--exchange", "tcp"]);
    let runs: u64 = firsts.iter().map(|it| it.1).sum();
    let seeds = firsts.into_iter().flat_map(|(first, runs)| first..first + runs);
    let ended = seeds.filter(|seed| check(&place, &right, *seed).is_err()).count() as u64;
    assert!(ended <= runs / 4, "{ended} of {runs} jobs ended with an error");
}

#[test]
fn jobs_whose_exchange_fails_have_the_right_bits_or_a_clear_error_and_leave_nothing() {
    check_all(seeds::first_seeds("jobs whose exchange fails", 0, 20));
}

#[test]
#[ignore = "takes an hour: make soak PARTS=faults"]
fn a_thousand_jobs_whose_exchange_fails_have_the_right_bits_or_a_clear_error() {
    let asked = |name: &str| std::env::var(name).ok().and_then(|it| it.parse().ok());
    let first = asked("CADRE_FAULT_SEED").unwrap_or(1_000_000);
    check_all(vec![(first, asked("CADRE_FAULT_RUNS").unwrap_or(1000))]);
}
