//! What this machine has, and what of it the manifests ask for.
//!
//! In: what is asked. Out: findings, each with a remedy where something is not there. Paths are tried for real.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use cadre_exchange::{
    Encryption, Error, Sharing, Transports, Trial, TrialError, allow_links, rdma_devices, try_path,
    ucx_here,
};
use cadre_kernels::{Choice, Engine, Threads};
use rustix::process::{Resource, getrlimit};

use super::devices::{self, Device, nearest};
use super::{Asked, Finding, State};
use crate::choices::{EngineChoice, ExchangeChoice};

/// Where the kernel tells of devices.
const SYS: &str = "/sys";
/// Memory that cards have to hold at least: the board of 32 MiB, two pieces of 64 MiB for rows, and two for landings.
const LEAST_LOCKED_BYTES: u64 = 288 << 20;

/// Names of findings that other modules look for.
pub(super) const SHARED: &str = "shared memory";
pub(super) const GPU: &str = "GPU";
pub(super) const RDMA: &str = "RDMA";

/// See the module.
pub(super) fn findings(asked: &Asked) -> Vec<Finding> {
    let encrypts = asked.encryption.is_some_and(|it| it != cadre_crds::Encryption::Off);
    vec![
        tried(
            "tcp",
            try_path(Encryption::Off, Sharing::Off),
            true,
            "let this user listen on the loopback address",
        ),
        tried(
            "tcp, encrypted",
            try_path(Encryption::Tcp, Sharing::Off),
            encrypts,
            "let this user listen on the loopback address",
        ),
        tried(
            SHARED,
            try_path(Encryption::Off, Sharing::Required),
            asked.exchange(ExchangeChoice::Shm),
            "run on Linux 5.1 or newer where memfd_create is allowed and limits (ulimit -f, -v) leave room, or say --exchange auto",
        ),
        ucx(),
        rdma(asked),
        gpu(asked),
        locked(
            getrlimit(Resource::Memlock).current,
            !rdma_devices().is_empty(),
            // Where UCX emulates reads, nothing is locked.
            asked.exchange(ExchangeChoice::Ucx) && Transports::asked() == Ok(Transports::Rdma),
        ),
        files(asked.trainers),
        memory(),
    ]
}

fn tried(
    name: &'static str,
    trial: Result<Trial, TrialError>,
    is_asked: bool,
    remedy: &str,
) -> Finding {
    match trial {
        Ok(Trial { bytes_per_second, .. }) => {
            let what = format!("{:.1} GiB/s between two of this machine", gib(bytes_per_second));
            Finding { name, state: State::Ok, what, remedy: None }
        }
        Err(error) => absent(name, is_asked, error.to_string(), remedy),
    }
}

fn absent(name: &'static str, is_asked: bool, what: String, remedy: &str) -> Finding {
    let state = if is_asked { State::Missing } else { State::Absent };
    Finding { name, state, what, remedy: Some(remedy.to_owned()) }
}

fn gpu(asked: &Asked) -> Finding {
    let is_asked = asked.engine(EngineChoice::Gpu) || asked.exchange(ExchangeChoice::Node);
    match Engine::choose(Choice::Gpu, Threads(NonZeroUsize::MIN)) {
        Ok(engine) => {
            let gpus: Vec<_> =
                devices::gpus(Path::new(SYS)).iter().map(Device::described).collect();
            let all =
                if gpus.is_empty() { String::new() } else { format!("; {}", gpus.join(", ")) };
            let what = engine.description() + &all;
            Finding { name: GPU, state: State::Ok, what, remedy: None }
        }
        Err(error) => {
            let remedy = "run where there is an NVIDIA GPU of compute capability 8.0 or newer, with its driver, or say \
                          --engine=auto";
            absent(GPU, is_asked, error.to_string(), remedy)
        }
    }
}

/// The library that RDMA needs, and over what it could move bytes.
fn ucx() -> Finding {
    let name = "UCX";
    match ucx_here() {
        Ok((version, devices)) => {
            let what = format!("{version}: {}", devices.join(", "));
            Finding { name, state: State::Ok, what, remedy: None }
        }
        // A job that demands RDMA is refused by the finding about RDMA.
        Err(why) => absent(name, false, why.to_string(), "none is needed without cards for RDMA"),
    }
}

/// Whether UCX reads by network cards alone; over cards with the part of the machine and the GPUs that each is near.
fn rdma(asked: &Asked) -> Finding {
    let gpus = devices::gpus(Path::new(SYS));
    let near = |card: &Device| {
        let near: Vec<_> = nearest(card, &gpus).iter().map(|it| it.name.as_str()).collect();
        let near =
            if near.is_empty() { String::new() } else { format!(" near {}", near.join(", ")) };
        card.described() + &near
    };
    let devices: Vec<_> = devices::cards(Path::new(SYS)).iter().map(near).collect();
    let devices = if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") };
    let is_asked = asked.exchange(ExchangeChoice::Ucx);
    let over = Transports::asked().map_err(|it| TrialError::from(Error::from(it)));
    let tried =
        over.and_then(|over| try_path(Encryption::Off, Sharing::Ucx(over)).map(|it| (over, it)));
    match tried {
        Ok((over, Trial { bytes_per_second, .. })) => {
            let how = match over {
                Transports::Rdma => "read by network cards",
                Transports::SharedMemory => "no RDMA: emulated over shared memory, for tests",
                Transports::Sockets => "no RDMA: emulated over sockets, for tests",
            };
            let what = format!(
                "{how}, {:.1} GiB/s between two of this machine; {devices}",
                gib(bytes_per_second)
            );
            Finding { name: RDMA, state: State::Ok, what, remedy: None }
        }
        Err(why) => absent(RDMA, is_asked, format!("{why}; {devices}"), without_rdma(is_asked)),
    }
}

/// What to do where no card reads.
fn without_rdma(is_asked: bool) -> &'static str {
    if is_asked {
        "run where there are cards for RDMA and UCX, or say auto instead of ucx in --exchange, or in CADRE_EXCHANGE of a \
         program other than cadre train"
    } else {
        "none is needed: with --exchange auto, rows between machines come by tcp then"
    }
}

/// Cards hold rows and landings in locked memory; nothing else does.
fn locked(limit: Option<u64>, has_cards: bool, is_asked: bool) -> Finding {
    let name = "locked memory";
    let Some(bytes) = limit else {
        return Finding { name, state: State::Ok, what: "unlimited".to_owned(), remedy: None };
    };
    let what = format!(
        "{:.0} MiB; cards for RDMA hold rows in it, nothing else does",
        bytes as f64 / f64::from(1 << 20)
    );
    if bytes < LEAST_LOCKED_BYTES && (has_cards || is_asked) {
        let remedy = "let processes lock all memory that rows need (ulimit -l unlimited, LimitMEMLOCK, or the container runtime's limit): rows beyond it come by tcp";
        return absent(name, is_asked, what, remedy);
    }
    Finding { name, state: State::Ok, what, remedy: None }
}

/// Checks the limit of open files as workers do when they join.
fn files(trainers: u64) -> Finding {
    let name = "open files";
    let peers = 2 * trainers;
    match allow_links(peers) {
        Ok(()) => {
            let most = getrlimit(Resource::Nofile).current;
            let most = most.map_or_else(|| "unlimited".to_owned(), |it| it.to_string());
            let what = format!("{most}, enough for links with {peers} peers");
            Finding { name, state: State::Ok, what, remedy: None }
        }
        Err(error) => {
            absent(name, true, error.to_string(), "raise the limit, or take fewer trainers")
        }
    }
}

/// Rows in shared memory count as memory of the process, and of its pod.
fn memory() -> Finding {
    let name = "memory";
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|it| it.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    });
    let pod = fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let pod = pod.and_then(|it| it.trim().parse::<u64>().ok());
    let mut what = match available {
        Some(kib) => format!("{:.1} GiB available", gib(kib * 1024)),
        None => "unknown".to_owned(),
    };
    if let Some(bytes) = pod {
        what = format!("{what}, {:.1} GiB at most in this container", gib(bytes));
    }
    Finding { name, state: State::Ok, what, remedy: None }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Name of the choice in the option `--engine`.
pub(super) fn engine_name(choice: EngineChoice) -> &'static str {
    match choice {
        EngineChoice::Auto => "auto",
        EngineChoice::Cpu => "cpu",
        EngineChoice::Gpu => "gpu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_rdma_is_not_told_that_none_is_needed() {
        assert!(without_rdma(false).starts_with("none is needed"));
        let asked = without_rdma(true);
        assert!(!asked.contains("none is needed") && asked.contains("say auto"), "{asked}");
    }

    #[test]
    fn locked_memory_is_judged_where_cards_hold_rows_in_it() {
        let few = Some(8 << 20);
        for (limit, has_cards, is_asked, expected) in [
            (few, false, false, State::Ok),
            (few, true, false, State::Absent),
            (few, true, true, State::Missing),
            (few, false, true, State::Missing),
            (Some((288 << 20) - 1), true, true, State::Missing),
            (Some(288 << 20), true, true, State::Ok),
            (None, true, true, State::Ok),
        ] {
            let found = locked(limit, has_cards, is_asked);
            assert_eq!(found.state, expected, "{limit:?}, {has_cards}, {is_asked}");
            assert_eq!(found.remedy.is_some(), expected != State::Ok);
        }
    }
}
