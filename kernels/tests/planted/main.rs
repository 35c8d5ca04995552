//! The tests of the host's side have teeth: bugs that are planted in it must make them fail.
//!
//! In: this crate's sources, cargo with the packages that this build has fetched, a C++17 compiler. Out: for each bug of [`list`] a
//! build of a copy of the crate and a failure of the test that is named, over the emulated driver. The copy is a workspace of
//! its own, so nothing here is touched; without the bug its tests pass, which is looked at first.
//!
//! Invariant: the text that is replaced stands once in its file, and what does not compile is no bug that was caught.

mod list;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use list::PLANTED;

/// The copies, and what is built of them.
struct Copied {
    /// A workspace of the crate.
    root: PathBuf,
    /// What the emulated driver is made of; apart, since kernels that change make the crate's own too old.
    machine: PathBuf,
    target: PathBuf,
    driver: PathBuf,
}

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn every_bug_that_is_planted_on_the_host_s_side_is_caught() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let copied = Copied::new();
    let program = copied.build().expect("the crate compiles as it is");
    copied.passes(&program);
    let mut survivors = Vec::new();
    for bug in PLANTED {
        let of_kernel = Path::new(bug.file).extension().is_some_and(|it| it == "cuh");
        let file = if of_kernel {
            copied.machine.join(bug.file)
        } else {
            copied.root.join("kernels").join(bug.file)
        };
        let source = std::fs::read_to_string(&file).expect("a file of the copy");
        let places = source.matches(bug.right).count();
        assert_eq!(
            places, 1,
            "{}: `{}` stands {places} times in {}",
            bug.name, bug.right, bug.file
        );
        std::fs::write(&file, source.replace(bug.right, bug.wrong)).expect("the copy is ours");
        let done = if of_kernel {
            copied.compile_driver();
            copied.run(&program, bug.test)
        } else {
            let broken = copied.build();
            let broken =
                broken.unwrap_or_else(|why| panic!("{} does not compile: {why}", bug.name));
            copied.run(&broken, bug.test)
        };
        let words = said(&done);
        // A test that was not found would be no failure of it.
        assert!(words.contains("running 1 test"), "{}: {words}", bug.name);
        let told = words.lines().skip_while(|it| !it.contains("panicked at")).nth(1);
        eprintln!("{}: {}", bug.name, told.or(words.lines().last()).unwrap_or(""));
        if done.status.success() {
            survivors.push(bug.name);
        }
        std::fs::write(&file, source).expect("the copy is ours");
        if of_kernel {
            copied.compile_driver();
        }
    }
    assert!(survivors.is_empty(), "no test noticed: {survivors:?}");
    // What made the tests fail were the bugs.
    copied.passes(&copied.build().expect("the crate compiles as it was"));
}

impl Copied {
    fn new() -> Self {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted");
        let (root, target) = (place.join("copy"), place.join("target"));
        let machine = place.join("machine");
        for folder in [&root, &machine] {
            let _ = std::fs::remove_dir_all(folder);
        }
        for folder in ["cuda", "emulation"] {
            copy(&crate_folder().join(folder), &machine.join(folder));
        }
        for folder in ["src", "tests", "cuda", "emulation", "benches"] {
            copy(&crate_folder().join(folder), &root.join("kernels").join(folder));
        }
        for file in ["Cargo.toml", "build.rs"] {
            let text = std::fs::read(crate_folder().join(file)).expect("a file of the crate");
            std::fs::write(root.join("kernels").join(file), text).expect("the test's own folder");
        }
        let above = crate_folder().parent().expect("the crate is in a workspace");
        let workspace = std::fs::read_to_string(above.join("Cargo.toml")).expect("a workspace");
        let line = |it: &str| match it.split_once(" = ") {
            Some(("members", _)) => "members = [\"kernels\"]\n".to_owned(),
            _ => format!("{it}\n"),
        };
        let workspace: String = workspace.lines().map(line).collect();
        std::fs::write(root.join("Cargo.toml"), workspace).expect("the test's own folder");
        std::fs::copy(above.join("Cargo.lock"), root.join("Cargo.lock"))
            .expect("a workspace's lock");
        // Younger than the sources that were just copied, as the build wants them: these are of the same kernels.
        std::fs::create_dir_all(target.join("kernels")).expect("the test's own folder");
        for cubin in cadre_kernels::cubins::CUBINS {
            let path = target.join("kernels").join(format!("{}.cubin", cubin.name));
            std::fs::write(path, cubin.bytes).expect("the test's own folder");
        }
        std::fs::write(target.join("kernels/report.json"), "{}").expect("the test's own folder");
        let copied = Self { root, machine, target, driver: place.join("driver") };
        let _ = std::fs::remove_dir_all(&copied.driver);
        std::fs::create_dir_all(&copied.driver).expect("the test's own folder");
        copied.compile_driver();
        let driver = copied.driver.join("libcuda.so.1");
        copied.compile("blas.cpp", "libcublasLt.so", &[driver.to_str().expect("a plain name")]);
        copied
    }

    fn compile_driver(&self) {
        self.compile("driver.cpp", "libcuda.so.1", &["-Wl,-soname,libcuda.so.1"]);
    }

    fn compile(&self, source: &str, library: &str, words: &[&str]) {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-DCADRE_EMULATION", "-fPIC", "-shared", "-I"])
            .arg(self.machine.join("emulation"))
            .arg("-I")
            .arg(self.machine.join("cuda"))
            .arg(self.machine.join("emulation").join(source))
            .args(words)
            .arg("-o")
            .arg(self.driver.join(library))
            .output()
            .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
        assert!(output.status.success(), "{}", said(&output));
    }

    /// Builds the tests of the copy, as fast as it goes; gives the program.
    fn build(&self) -> Result<PathBuf, String> {
        let output = Command::new(env!("CARGO"))
            .args(["test", "--offline", "--no-run", "--message-format=json", "--test", "device"])
            .current_dir(self.root.join("kernels"))
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_INCREMENTAL", "1")
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .output()
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let program = text.lines().rev().find_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            message["executable"].as_str().map(PathBuf::from)
        });
        if output.status.success() {
            program.ok_or_else(|| "cargo names no program".to_owned())
        } else {
            Err(said(&output))
        }
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

fn said(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    format!("{out}{}", String::from_utf8_lossy(&output.stderr))
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the test's own folder");
    for entry in std::fs::read_dir(from).expect("a folder of the crate") {
        let entry = entry.expect("an entry of a folder of the crate");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            // Not `fs::copy`: the copy has to be as old as it is.
            let bytes = std::fs::read(entry.path()).expect("a file of the crate");
            std::fs::write(target, bytes).expect("the test's own folder takes files");
        }
    }
}
