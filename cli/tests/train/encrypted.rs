//! Jobs whose workers encrypt what they send each other.

use super::{JOB, Job, Place, Run, close};

/// Three trainers, so that the gradient ring has more than two.
const ENCRYPTED: Job = Job { trainers: 3, wire: "F32, encryption: Tcp", ..JOB };

#[test]
fn an_encrypted_job_has_the_bits_of_a_plain_one_and_loses_servers_as_well() {
    let place = Place::new();
    let plain = place.bits("plain", Job { wire: "F32", ..ENCRYPTED }, &[]);
    assert_eq!(place.bits("encrypted", ENCRYPTED, &[]), plain);
    let says = |name: &str| {
        let logs = Run { code: None, out: place.path(name), said: String::new() }.logs();
        logs.matches("links between the job's workers are encrypted").count()
    };
    assert_eq!((says("plain"), says("encrypted")), (0, 5), "a line a worker");
    let run = place.run("killed", ENCRYPTED, &["--fault", "kill-server:0@1:bwd"]);
    assert_eq!((run.code, run.bits()), (Some(0), plain), "{}\n{}", run.said, run.logs());
    assert!(run.failovers() > 0, "no slot was lost");
    let in_place = Job { servers: 0, in_place: true, ..ENCRYPTED };
    let local = place.bits("local", ENCRYPTED, &["--attention", "local"]);
    close(&place.bits("in-place", in_place, &[]), &local);
}
