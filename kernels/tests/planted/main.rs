//! The tests of the host's side have teeth: bugs that are planted in it must make them fail.
//!
//! In: this crate's sources, cargo with the packages that this build has fetched, a C++17 compiler. Out: for each bug of [`list`] a
//! build of a copy of the crate and a failure of the test that is named, over the emulated driver. Without the bug its tests
//! pass, which is looked at first and last.
//!
//! Invariant: that of [`common`].

#[path = "../common/mod.rs"]
mod common;
mod list;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Copied, copy, is_caught, said};
use list::PLANTED;

/// The copies, and what is built of them.
struct Machine {
    copied: Copied,
    /// What the emulated driver is made of; apart, since kernels that change make the crate's own too old.
    sources: PathBuf,
    driver: PathBuf,
}

#[test]
fn every_bug_that_is_planted_on_the_host_s_side_is_caught() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let machine = Machine::new();
    let program = machine.copied.build().expect("the crate compiles as it is");
    machine.passes(&program);
    let mut survivors = Vec::new();
    for bug in PLANTED {
        let of_kernel = Path::new(bug.file).extension().is_some_and(|it| it == "cuh");
        let caught = if of_kernel {
            let caught = is_caught(bug, &machine.sources, || {
                machine.compile_driver();
                Ok(machine.run(&program, bug.test))
            });
            machine.compile_driver();
            caught
        } else {
            is_caught(bug, &machine.copied.folder, || {
                machine.copied.build().map(|program| machine.run(&program, bug.test))
            })
        };
        if !caught {
            survivors.push(bug.name);
        }
    }
    assert!(survivors.is_empty(), "no test noticed: {survivors:?}");
    // What made the tests fail were the bugs.
    machine.passes(&machine.copied.build().expect("the crate compiles as it was"));
}

impl Machine {
    fn new() -> Self {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let sources = place.join("machine");
        let _ = std::fs::remove_dir_all(&sources);
        for part in ["cuda", "emulation"] {
            copy(&folder.join(part), &sources.join(part));
        }
        let parts = ["src", "tests", "cuda", "emulation", "benches", "Cargo.toml", "build.rs"];
        let copied = Copied::new(folder, &parts, &place, "device");
        // Younger than the sources that were just copied, as the build wants them: these are of the same kernels.
        let built = copied.target.join("kernels");
        std::fs::create_dir_all(&built).expect("the test's own folder");
        for cubin in cadre_kernels::cubins::CUBINS {
            let path = built.join(format!("{}.cubin", cubin.name));
            std::fs::write(path, cubin.bytes).expect("the test's own folder");
        }
        std::fs::write(built.join("report.json"), "{}").expect("the test's own folder");
        let machine = Self { copied, sources, driver: place.join("driver") };
        let _ = std::fs::remove_dir_all(&machine.driver);
        std::fs::create_dir_all(&machine.driver).expect("the test's own folder");
        machine.compile_driver();
        let driver = machine.driver.join("libcuda.so.1");
        machine.compile("blas.cpp", "libcublasLt.so", &[driver.to_str().expect("a plain name")]);
        machine
    }

    fn compile_driver(&self) {
        self.compile("driver.cpp", "libcuda.so.1", &["-Wl,-soname,libcuda.so.1"]);
    }

    fn compile(&self, source: &str, library: &str, words: &[&str]) {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-DCADRE_EMULATION", "-fPIC", "-shared", "-I"])
            .arg(self.sources.join("emulation"))
            .arg("-I")
            .arg(self.sources.join("cuda"))
            .arg(self.sources.join("emulation").join(source))
            .args(words)
            .arg("-o")
            .arg(self.driver.join(library))
            .output()
            .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
        assert!(output.status.success(), "{}", said(&output));
    }

    /// Runs every test that a bug is for.
    fn passes(&self, program: &Path) {
        let tests: BTreeSet<_> = PLANTED.iter().map(|it| it.test).collect();
        for test in tests {
            let done = self.run(program, test);
            assert!(done.status.success(), "{test}: {}", said(&done));
        }
    }

    fn run(&self, program: &Path, test: &str) -> Output {
        Command::new(program)
            .args(["--ignored", "--exact", &format!("emulated::{test}"), "--nocapture"])
            .env("LD_LIBRARY_PATH", &self.driver)
            .output()
            .expect("it was just built")
    }
}
