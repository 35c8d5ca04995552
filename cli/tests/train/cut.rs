//! Jobs whose whole network is down for seconds, in a namespace of their own: they go on, with the bits of a quiet run.
//!
//! In: the loopback device of the namespace, which all links between workers take, and the sockets of UCX. The controller's
//! socket is a file.

use std::process::{Command, Stdio};

use super::{Bits, JOB, Job, Place, Run};

/// Runs the words behind a file and a number of seconds. As soon as something stands in the file, the network is down for so long.
const CUT: &str = r#"ip link set lo up || exit 99
file=$1
seconds=$2
shift 2
"$@" &
until [ -s "$file" ] || ! kill -0 $! 2>/dev/null; do sleep 0.01; done
ip link set lo down
sleep "$seconds"
ip link set lo up
wait $!"#;

const APART: [&str; 2] = ["--map-root-user", "--net"];

/// Steps of a run that is not over before the network is down.
const STEPS: usize = 60;

fn job() -> Job {
    Job { every: "--checkpoint-every=0", ..JOB }
}

/// Runs a job whose network is down for so long, from its first step on.
fn cut(place: &Place, name: &str, seconds: u64, (exchange, over): (&str, Option<&str>)) -> Run {
    let steps = format!("--steps={STEPS}");
    let plain = place.command(name, job(), &[&steps, "--exchange", exchange]);
    let mut command = Command::new("unshare");
    command.args(APART).args(["sh", "-c", CUT, "sh"]).arg(place.path(name).join("steps.jsonl"));
    command.arg(seconds.to_string()).arg(plain.get_program()).args(plain.get_args());
    command.env("CADRE_POISON", "1").envs(over.map(|it| ("CADRE_UCX_OVER", it)));
    let output = command.stdin(Stdio::null()).output().expect("it was just tried");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Run { code: output.status.code(), out: place.path(name), said }
}

#[test]
fn a_job_whose_network_is_down_for_5_s_goes_on_with_the_same_bits() {
    let mut tried = Command::new("unshare");
    tried.args(APART).args(["ip", "link"]).stdout(Stdio::null()).stderr(Stdio::null());
    if !tried.status().is_ok_and(|it| it.success()) {
        return println!("skipped: no network namespace can be made here");
    }
    let place = Place::new();
    let quiet = place.run("quiet", job(), &[&format!("--steps={STEPS}")]);
    assert_eq!(quiet.code, Some(0), "{}\n{}", quiet.said, quiet.logs());
    let right: Bits = quiet.bits_after(STEPS);
    let mut paths = vec![("tcp", None)];
    match cadre_exchange::ucx_here() {
        Ok(_) => paths.push(("ucx", Some("tcp"))),
        Err(why) => println!("skipped: {why}"),
    }
    for path in paths {
        let run = cut(&place, path.0, 5, path);
        let all = || format!("{path:?}: {}\n{}", run.said, run.logs());
        assert_eq!(run.code, Some(0), "{}", all());
        assert_eq!(run.bits_after(STEPS), right, "{}", all());
        assert!(run.failovers() > 0, "the network was not down: {}", all());
    }
}
