//! Jobs whose rows take shared memory.

use super::{JOB, Job, Place, Run};

/// Bytes of rows that came to the workers of a run that have left in order: by shared memory, by tcp.
fn bytes(run: &Run) -> (u64, u64) {
    let logs = run.logs();
    let of = |line: &str, path: &str| -> u64 {
        let (_, rest) = line.split_once(path).expect("both paths are named");
        let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("bytes")
    };
    let lines = logs.lines().filter(|it| it.contains("bytes of rows came"));
    lines
        .fold((0, 0), |(shared, tcp), it| (shared + of(it, "shared memory:"), tcp + of(it, "tcp:")))
}

#[test]
fn a_job_by_shared_memory_has_the_bits_of_tcp_and_loses_servers_as_well() {
    let place = Place::new();
    let right = place.bits("tcp", JOB, &["--exchange", "tcp"]);
    let encrypted = Job { wire: "F32, encryption: Tcp", ..JOB };
    for (name, job, args) in [
        ("shm", JOB, &["--exchange", "shm"][..]),
        ("encrypted", encrypted, &["--exchange", "shm"]),
        ("killed", JOB, &["--fault", "kill-server:0@1:bwd"]),
    ] {
        let run = place.run(name, job, args);
        assert_eq!((run.code, &run.bits()), (Some(0), &right), "{}\n{}", run.said, run.logs());
        let (shared, tcp) = bytes(&run);
        if name == "killed" {
            assert!(run.failovers() > 0, "no slot was lost");
            assert!(shared > tcp, "{shared} bytes by shared memory, {tcp} by tcp");
        } else {
            assert!(shared > 0 && tcp == 0, "{name}: {shared} by shared memory, {tcp} by tcp");
        }
    }
    let run = Run { code: None, out: place.path("tcp"), said: String::new() };
    assert_eq!(bytes(&run), (0, 0), "tcp says nothing of paths");
}
