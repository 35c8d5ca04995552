//! The exchange between processes of one machine, and launches on rows that stay there, over memory of an emulated GPU.
//!
//! In: `kernels/emulation/driver.cpp`, built as a libcuda by [`built`]. Out: two processes, this program twice, of which one
//! publishes rows in its arena and the other pulls them; and one whose launches read rows that are still being copied. It sees
//! wrong places, lifetimes, orders and ends; no GPU, no speed.
//!
//! With `CADRE_TEST_DRIVER=machine` nothing is built and both run on the driver that the machine has: that is how
//! `make gpu-check` runs this program where there is a GPU.

mod answers;
#[path = "../../../kernels/emulation/built.rs"]
mod built;
mod case;
mod launches;
mod lent;
mod owner;
mod reader;
mod slow;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cadre_exchange::{Encryption, PeerId, RegionKey, TcpConfig};

/// The region that is pulled.
const KEY: RegionKey = RegionKey([1, 2, 3, 4]);
/// Its length.
const BYTES: u64 = 100_000;
const OWNER: PeerId = PeerId { role: cadre_exchange::Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: cadre_exchange::Role::Server, index: 1, incarnation: 2 };

/// Folder of sockets, for both.
const SOCKETS: &str = "CADRE_TEST_SOCKETS";
/// Address of the owner, for the reader.
const ADDRESS: &str = "CADRE_TEST_ADDRESS";

fn links(me: PeerId) -> TcpConfig {
    TcpConfig {
        bind: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        me,
        secret: [42; 32],
        data_version: 7,
        encryption: Encryption::Off,
        limits: cadre_exchange::Limits::default(),
    }
}

fn sockets() -> PathBuf {
    std::env::var_os(SOCKETS).expect("the other test sets it").into()
}

/// Byte `at` of the rows in their `version`.
fn pattern(at: u64, version: u8) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(17)) as u8 ^ version.wrapping_mul(101)
}

/// The folder of the emulated driver; none where that of the machine is to be used.
fn driver() -> Option<PathBuf> {
    let machine = std::env::var_os("CADRE_TEST_DRIVER").is_some_and(|it| it == "machine");
    (!machine).then(built::driver)
}

/// Starts one of the two.
fn start(test: &str, driver: Option<&Path>, folder: &Path, address: &str) -> Child {
    let mut program = Command::new(std::env::current_exe().expect("a test is a program"));
    if let Some(driver) = driver {
        program.env("LD_LIBRARY_PATH", driver);
    }
    program
        .args(["--ignored", "--exact", test, "--nocapture"])
        .env(SOCKETS, folder)
        .env(ADDRESS, address)
        // Rows of this length are for a test of what is refused.
        .env("CADRE_EMULATED_ELSEWHERE", "38412")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this program runs")
}

#[test]
fn rows_go_from_one_process_to_another_by_copies_of_the_gpu() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let (driver, folder) = (driver(), tempfile::tempdir().expect("a folder"));
    let mut owner = start("owner::publishes", driver.as_deref(), folder.path(), "");
    let address = folder.path().join("address");
    let until = std::time::Instant::now() + std::time::Duration::from_mins(1);
    while !address.exists() {
        let ended = owner.try_wait().expect("a child of ours");
        if ended.is_some() || std::time::Instant::now() > until {
            owner.kill().ok();
            let said = owner.wait_with_output().expect("a child of ours");
            panic!("the owner does not listen: {}", String::from_utf8_lossy(&said.stderr));
        }
        std::thread::yield_now();
    }
    let address = std::fs::read_to_string(&address).expect("it was renamed when it was whole");
    let reader = start("reader::pulls", driver.as_deref(), folder.path(), &address);
    let read = reader.wait_with_output().expect("a child of ours");
    owner.kill().ok();
    let owned = owner.wait_with_output().expect("a child of ours");
    let said = String::from_utf8_lossy(&read.stdout).into_owned()
        + &String::from_utf8_lossy(&read.stderr)
        + &String::from_utf8_lossy(&owned.stderr);
    assert!(read.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn launches_read_rows_where_they_land_while_they_are_copied() {
    alone(&["launches::launches", "answers::answers"]);
}

#[test]
fn rows_that_lie_on_a_gpu_have_the_bits_of_the_same_rows_of_the_host() {
    alone(&["lent::lent"]);
}

/// Runs tests in a process each, whose driver is the emulated one.
fn alone(tests: &[&str]) {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    for test in tests {
        let output = start(test, driver().as_deref(), Path::new(""), "").wait_with_output();
        let output = output.expect("a child of ours");
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}
