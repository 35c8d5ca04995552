//! The program as a user calls it.

use std::path::Path;
use std::process::Command;

/// Runs `cadre` in a folder: its exit code, and what it wrote to stdout and to stderr.
pub(crate) fn cadre(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .args(args)
        .current_dir(folder)
        .output()
        .expect("the program was built for this test");
    let text = |bytes| String::from_utf8(bytes).expect("cadre writes text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}
