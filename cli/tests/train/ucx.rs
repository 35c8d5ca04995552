//! Jobs whose rows take UCX, over what it emulates reads with on a machine without RDMA.

use super::{JOB, Job, Place, Run};

/// Bytes of rows that came to the workers of a run that have left in order: by UCX, by all else.
pub(super) fn bytes(run: &Run) -> (u64, u64) {
    let logs = run.logs();
    let of = |line: &str, path: &str| -> u64 {
        let (_, rest) = line.split_once(path).expect("all paths are named");
        let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("bytes")
    };
    let lines = logs.lines().filter(|it| it.contains("bytes of rows came"));
    lines.fold((0, 0), |(ucx, others), it| {
        (ucx + of(it, "UCX:"), others + of(it, "shared memory:") + of(it, "tcp:"))
    })
}

#[test]
fn a_job_by_ucx_has_the_bits_of_tcp_and_loses_servers_as_well() {
    if let Err(why) = cadre_exchange::ucx_here() {
        return println!("skipped: {why}");
    }
    let place = Place::new();
    let right = place.bits("tcp", JOB, &["--exchange", "tcp"]);
    // Links are encrypted, and rows take UCX beside them.
    let encrypted = Job { wire: "F32, encryption: Tcp", ..JOB };
    for (name, job, over, args) in [
        ("sockets", JOB, "tcp", &["--exchange", "ucx"][..]),
        ("encrypted", encrypted, "shm", &["--exchange", "ucx"]),
        ("killed", JOB, "shm", &["--exchange", "ucx", "--fault", "kill-server:0@1:bwd"]),
    ] {
        let mut command = place.command(name, job, args);
        let output = command.env("CADRE_UCX_OVER", over).output().expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let run = Run { code: output.status.code(), out: place.path(name), said };
        assert_eq!((run.code, &run.bits()), (Some(0), &right), "{}\n{}", run.said, run.logs());
        let (ucx, others) = bytes(&run);
        assert!(ucx > 0 && others < ucx / 10, "{name}: {ucx} bytes by UCX, {others} by others");
        assert_eq!(run.failovers() > 0, name == "killed");
    }
}
