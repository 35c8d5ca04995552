//! Bugs planted in a copy of a crate, to see that its tests have teeth.
//!
//! In: a crate's folder, a place for the copy, cargo with the packages that this build has fetched. Out: programs of the copy's
//! tests, with and without a bug. The copy is a workspace of its own, so nothing of the crate is touched.
//!
//! Invariant: the text that is replaced stands once in its file, and what does not compile is no bug that was caught.

// Every test program compiles this one for itself and uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A planted bug.
pub(crate) struct Planted {
    /// What is wrong, in a few words.
    pub(crate) name: &'static str,
    /// Below the crate's folder.
    pub(crate) file: &'static str,
    /// What stands there.
    pub(crate) right: &'static str,
    /// What is planted.
    pub(crate) wrong: &'static str,
    /// The test that must fail.
    pub(crate) test: &'static str,
}

pub(crate) const fn planted(
    test: &'static str,
    file: &'static str,
    name: &'static str,
    right: &'static str,
    wrong: &'static str,
) -> Planted {
    Planted { name, file, right, wrong, test }
}

/// A copy of a crate.
pub(crate) struct Copied {
    /// A workspace of the crate.
    pub(crate) root: PathBuf,
    /// The crate in it.
    pub(crate) folder: PathBuf,
    pub(crate) target: PathBuf,
    /// Test target that is built.
    program: &'static str,
}

impl Copied {
    /// Copies those of `parts` that the crate in `folder` has, files and folders, to `place`.
    pub(crate) fn new(folder: &Path, parts: &[&str], place: &Path, program: &'static str) -> Self {
        let (root, target) = (place.join("copy"), place.join("target"));
        let _ = std::fs::remove_dir_all(&root);
        let name = folder.file_name().and_then(|it| it.to_str()).expect("a crate has a plain name");
        for part in parts {
            copy(&folder.join(part), &root.join(name).join(part));
        }
        let above = folder.parent().expect("the crate is in a workspace");
        let workspace = std::fs::read_to_string(above.join("Cargo.toml")).expect("a workspace");
        let line = |it: &str| match it.split_once(" = ") {
            Some(("members", _)) => format!("members = [{name:?}]\n"),
            // Other crates of the workspace stay where they are.
            Some((_, rest)) if rest.starts_with("{ path = \"") => {
                let path = format!("{{ path = \"{}/", above.display());
                format!("{}\n", it.replace("{ path = \"", &path))
            }
            _ => format!("{it}\n"),
        };
        let workspace: String = workspace.lines().map(line).collect();
        std::fs::write(root.join("Cargo.toml"), workspace).expect("the test's own folder");
        copy(&above.join("Cargo.lock"), &root.join("Cargo.lock"));
        Self { folder: root.join(name), root, target, program }
    }

    /// Builds the tests of the copy in a folder of its own, as fast as it goes; gives the program.
    pub(crate) fn build(&self) -> Result<PathBuf, String> {
        self.build_by(|cargo| {
            cargo
                .env("CARGO_TARGET_DIR", &self.target)
                .env("CARGO_INCREMENTAL", "1")
                .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
                .env("CARGO_PROFILE_DEV_DEBUG", "0");
        })
    }

    /// The same with what `how` says about target and profile.
    pub(crate) fn build_by(&self, how: impl FnOnce(&mut Command)) -> Result<PathBuf, String> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "test",
            "--offline",
            "--no-run",
            "--message-format=json",
            "--test",
            self.program,
        ]);
        // What cargo said to this test of its own crate: build scripts would take it for a change.
        let own = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_", "CARGO_PRIMARY_"];
        for (name, _) in std::env::vars() {
            if own.iter().any(|it| name.starts_with(it)) {
                cargo.env_remove(name);
            }
        }
        how(cargo.current_dir(&self.folder));
        let output = cargo.output().map_err(|error| error.to_string())?;
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
}

/// Plants `bug` in the files of `folder`, lets `try_it` build and run, and takes it out again; whether it was caught.
pub(crate) fn is_caught(
    bug: &Planted,
    folder: &Path,
    mut try_it: impl FnMut() -> Result<Output, String>,
) -> bool {
    let file = folder.join(bug.file);
    let source = replace(&file, bug.name, bug.right, bug.wrong);
    let done = try_it().unwrap_or_else(|why| panic!("{} does not compile: {why}", bug.name));
    std::fs::write(&file, source).expect("the copy is ours");
    let words = said(&done);
    // A test that was not found would be no failure of it.
    assert!(words.contains("running 1 test"), "{}: {words}", bug.name);
    let told = words.lines().skip_while(|it| !it.contains("panicked at")).nth(1);
    eprintln!("{}: {}", bug.name, told.or(words.lines().last()).unwrap_or(""));
    !done.status.success()
}

/// Replaces the only place where `right` stands in `file`; gives what was there before.
pub(crate) fn replace(file: &Path, name: &str, right: &str, wrong: &str) -> String {
    let source = std::fs::read_to_string(file).expect("a file of the copy");
    let places = source.matches(right).count();
    assert_eq!(places, 1, "{name}: `{right}` stands {places} times in {}", file.display());
    std::fs::write(file, source.replace(right, wrong)).expect("the copy is ours");
    source
}

/// Both streams.
pub(crate) fn said(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    format!("{out}{}", String::from_utf8_lossy(&output.stderr))
}

/// Copies a file, or a folder with all that is in it. Copies are as old as they are: builds go by times.
pub(crate) fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        let bytes = std::fs::read(from).expect("a file of the crate");
        std::fs::create_dir_all(to.parent().expect("a file is in a folder"))
            .expect("the test's own folder");
        return std::fs::write(to, bytes).expect("the test's own folder takes files");
    }
    std::fs::create_dir_all(to).expect("the test's own folder");
    for entry in std::fs::read_dir(from).expect("a folder of the crate") {
        let entry = entry.expect("an entry of a folder of the crate");
        copy(&entry.path(), &to.join(entry.file_name()));
    }
}
