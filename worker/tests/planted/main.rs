//! The tests of launches on rows that stay on the GPU have teeth: bugs that are planted in them must make them fail.
//!
//! In: this crate's sources, cargo with what this build has made of the other crates, a C++17 compiler. Out: for each bug of
//! [`list`] a build of a copy of the crate and a failure of the test of `tests/gpu_exchange` that is named, over the emulated
//! driver. Without the bug these tests pass, which is looked at first and last.
//!
//! Invariant: that of [`common`], which is the kernels' and shared with them.

#[path = "../../../kernels/tests/common/mod.rs"]
mod common;
mod list;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Copied, copy, is_caught, said};
use list::PLANTED;

/// The copy, and the driver that its tests run over.
struct Machine {
    copied: Copied,
    driver: PathBuf,
}

#[test]
fn every_bug_that_is_planted_in_launches_is_caught() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let machine = Machine::new();
    machine.passes();
    let mut survivors = Vec::new();
    for bug in PLANTED {
        let try_it = || machine.build().map(|program| machine.run(&program, bug.test));
        if !is_caught(bug, &machine.copied.folder, try_it) {
            survivors.push(bug.name);
        }
    }
    assert!(survivors.is_empty(), "no test noticed: {survivors:?}");
    // What made the tests fail were the bugs.
    machine.passes();
}

impl Machine {
    fn new() -> Self {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted-worker");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let parts = ["src", "tests/gpu_exchange", "benches", "Cargo.toml"];
        let copied = Copied::new(folder, &parts, &place, "gpu_exchange");
        // What the crate's own tests and sources include from beside it.
        let lengths = "examples/lengths.json";
        copy(&folder.join("..").join(lengths), &copied.root.join(lengths));
        let driver = place.join("driver");
        std::fs::create_dir_all(&driver).expect("the test's own folder");
        let kernels = folder.join("../kernels");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-DCADRE_EMULATION", "-fPIC", "-shared", "-I"])
            .arg(kernels.join("emulation"))
            .arg("-I")
            .arg(kernels.join("cuda"))
            .arg(kernels.join("emulation/driver.cpp"))
            .arg("-o")
            .arg(driver.join("libcuda.so.1"))
            .output()
            .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
        assert!(output.status.success(), "{}", said(&output));
        Self { copied, driver }
    }

    /// Everything but the copy as this test was built, so that it is there already; the copy as fast as it goes.
    fn build(&self) -> Result<PathBuf, String> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target");
        let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
        self.copied.build_by(|cargo| {
            cargo.args(["--profile", profile, "--target-dir"]).arg(target);
            for fast in ["opt-level=0", "incremental=true", "debug=0", "codegen-units=256"] {
                let package = format!("profile.{profile}.package.cadre-worker.{fast}");
                cargo.args(["--config", &package]);
            }
        })
    }

    /// Runs every test that a bug is for.
    fn passes(&self) {
        let program = self.build().expect("the crate compiles without a bug");
        let tests: BTreeSet<_> = PLANTED.iter().map(|it| it.test).collect();
        for test in tests {
            let done = self.run(&program, test);
            assert!(done.status.success(), "{test}: {}", said(&done));
        }
    }

    fn run(&self, program: &Path, test: &str) -> Output {
        Command::new(program)
            .args(["--ignored", "--exact", test, "--nocapture"])
            .env("LD_LIBRARY_PATH", &self.driver)
            .output()
            .expect("it was just built")
    }
}
