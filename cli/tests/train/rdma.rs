//! Jobs whose rows take RDMA of a device, in the guest of `scripts/rdma`: the bits of tcp, by the card and not over links, also where
//! a server is killed.
//!
//! In: device `rxe0`, whose packets go out at `v0` and come back by `v1`. With netem at `v0` packets are lost; that changes no test.

use std::process::{Command, Output};

use super::ucx::bytes;
use super::{JOB, Place, Run};

/// Of the device's packets.
const PACKET_BYTES: u64 = 4096;

/// Counters of the machine.
#[derive(Clone, Copy)]
struct Counted {
    packets: u64,
    wire_bytes: u64,
    /// Of the loopback device, which all links take.
    link_bytes: u64,
}

fn counted() -> Counted {
    let read = |path: &str| -> u64 {
        let text = std::fs::read_to_string(path).expect("the guest of scripts/rdma has it");
        text.trim().parse().expect("a number")
    };
    Counted {
        packets: read("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"),
        wire_bytes: read("/sys/class/net/v0/statistics/tx_bytes"),
        link_bytes: read("/sys/class/net/lo/statistics/rx_bytes"),
    }
}

/// What was counted while something ran.
fn while_it<T>(run: impl FnOnce() -> T) -> (T, Counted) {
    let before = counted();
    let came = run();
    let after = counted();
    let packets = after.packets - before.packets;
    let wire_bytes = after.wire_bytes - before.wire_bytes;
    let link_bytes = after.link_bytes - before.link_bytes;
    (came, Counted { packets, wire_bytes, link_bytes })
}

/// A job whose servers may be silent for long: the guest's processor is emulated, and opening a device takes a server seconds.
fn command(place: &Place, name: &str, args: &[&str]) -> Command {
    let command = place.command(name, JOB, args);
    let manifest = place.path(&format!("{name}.yaml"));
    let text = std::fs::read_to_string(&manifest).expect("just written");
    let patient = "spec:\n  health: {suspectAfterMilliseconds: 20000}\n  replicas:";
    let text = text.replacen("spec:\n  replicas:", patient, 1);
    std::fs::write(&manifest, text).expect("a small file");
    command
}

fn run(place: &Place, name: &str, args: &[&str]) -> Run {
    let output = command(place, name, args).output().expect("the binary starts");
    ended(place, name, &output)
}

fn ended(place: &Place, name: &str, output: &Output) -> Run {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let run = Run { code: output.status.code(), out: place.path(name), said };
    assert_eq!(run.code, Some(0), "{name}: {}\n{}", run.said, run.logs());
    run
}

#[test]
#[ignore = "wants the guest of scripts/rdma: make soak PARTS=rdma"]
fn a_job_over_rdma_has_the_bits_of_tcp_by_the_card_and_loses_servers_as_well() {
    let place = Place::new();
    let (right, by_tcp) = while_it(|| run(&place, "tcp", &["--exchange", "tcp"]).bits());
    assert_eq!(by_tcp.packets, 0, "tcp takes no card");
    for (name, args) in [
        ("whole", &["--exchange", "ucx"][..]),
        ("killed", &["--exchange", "ucx", "--fault", "kill-server:0@1:bwd"]),
    ] {
        let (run, by_card) = while_it(|| run(&place, name, args));
        assert_eq!(run.bits(), right, "{name}");
        assert_eq!(run.failovers() > 0, name == "killed", "{}", run.logs());
        let (ucx, others) = bytes(&run);
        let Counted { packets, wire_bytes, link_bytes } = by_card;
        println!(
            "{name}: {ucx} bytes of rows by UCX, {others} by others; the card sent {packets} packets, {wire_bytes} bytes; links {link_bytes} bytes, where all rows take tcp {}",
            by_tcp.link_bytes
        );
        assert!(ucx > 0 && others < ucx / 10, "{name}: {ucx} bytes by UCX, {others} by others");
        assert!(packets >= ucx / PACKET_BYTES && wire_bytes >= ucx, "{name}: not by the card");
        assert!(link_bytes + ucx / 2 < by_tcp.link_bytes, "{name}: links carried rows");
    }
}
