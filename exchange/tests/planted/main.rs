//! The tests of the node have teeth: bugs that are planted in it must make them fail.
//!
//! In: this crate's sources, cargo with the packages that this build has fetched. Out: for each bug of [`list`] a build of a copy
//! of the crate and a failure of the test of `tests/node.rs` that is named. Without the bug its tests pass, which is looked at
//! first and last.
//!
//! Invariant: that of [`common`], which is the kernels' and shared with them.

#[path = "../../../kernels/tests/common/mod.rs"]
mod common;
mod list;

use std::path::Path;
use std::process::{Command, Output};

use common::{Copied, is_caught, said};
use list::PLANTED;

#[test]
fn every_bug_that_is_planted_in_the_node_is_caught() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted-exchange");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let parts = ["src", "tests/node.rs", "tests/common", "benches", "Cargo.toml"];
    let copied = Copied::new(folder, &parts, &place, "node");
    let passes = || {
        let program = copied.build().expect("the crate compiles without a bug");
        let done = run(&program, &[]);
        assert!(done.status.success(), "{}", said(&done));
    };
    passes();
    let mut survivors = Vec::new();
    for bug in PLANTED {
        let try_it = || copied.build().map(|program| run(&program, &["--exact", bug.test]));
        if !is_caught(bug, &copied.folder, try_it) {
            survivors.push(bug.name);
        }
    }
    assert!(survivors.is_empty(), "no test noticed: {survivors:?}");
    // What made the tests fail were the bugs.
    passes();
}

fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).arg("--nocapture").output().expect("it was just built")
}
