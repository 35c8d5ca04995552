//! The GPU kernels' own source, compiled for the CPU over emulated primitives, against attention in f64.
//!
//! In: `cuda/` and `emulation/`, a C++17 compiler (`c++`, or what `CXX` names). Out: every shape of
//! `emulation/shapes.hpp` for every head dim, forward and backward, under several seeds of stalls. It sees no speed and no GPU.
//!
//! Invariant: the checks have teeth. `mutants` plants the bugs of `MUTANTS` one by one, and each must be caught.

mod common;
mod mutants;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use common::{copy, replace, said};
use mutants::MUTANTS;

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Compiles the checks over the kernels in `sources` (`cuda/` and `emulation/` below it).
fn compile(sources: &Path, program: &Path, defines: &[&str]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-DCADRE_EMULATION"])
        .args(defines)
        .arg("-I")
        .arg(sources.join("emulation"))
        .arg("-I")
        .arg(sources.join("cuda"))
        .arg(sources.join("emulation/main.cpp"))
        .arg("-o")
        .arg(program)
        .output()
        .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).output().expect("the program was just built")
}

fn check(words: &[&str]) {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulation");
        compile(crate_folder(), &program, &[]);
        program
    });
    let output = run(program, words);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
}

#[test]
fn forward_is_right_on_all_shapes_and_its_bits_do_not_depend_on_cuts() {
    check(&["forward", "0", "3"]);
}

#[test]
fn backward_is_right_on_all_shapes_with_narrow_heads() {
    check(&["backward", "64", "3"]);
    check(&["backward", "128", "2"]);
}

#[test]
fn backward_is_right_on_all_shapes_with_wide_heads() {
    check(&["backward", "256", "3"]);
}

#[test]
fn softcap_is_right_on_all_shapes() {
    check(&["forward-softcap", "0", "2"]);
    check(&["backward-softcap", "64", "2"]);
    check(&["backward-softcap", "128", "1"]);
    check(&["backward-softcap", "256", "1"]);
}

#[test]
fn rows_move_as_their_lists_say() {
    check(&["rows"]);
}

#[test]
fn every_planted_bug_of_the_forward_kernel_is_caught() {
    plant("forward", "Plain");
}

#[test]
fn every_planted_bug_of_the_backward_kernel_is_caught() {
    plant("backward", "Plain");
}

#[test]
fn every_planted_bug_of_softcap_is_caught() {
    plant("forward-softcap", "Softcap");
    plant("backward-softcap", "Softcap");
}

/// Plants each bug of `part`, in the kernels with `cap`, and expects a check to fail or the emulated machine to stop.
fn plant(part: &str, cap: &str) {
    let pass = part.split('-').next().unwrap_or(part);
    let mut survivors = Vec::new();
    for mutant in MUTANTS.iter().filter(|it| it.part == part) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("mutants")
            .join(part)
            .join(mutant.name.replace(' ', "-"));
        let _ = std::fs::remove_dir_all(&folder);
        copy(&crate_folder().join("cuda"), &folder.join("cuda"));
        copy(&crate_folder().join("emulation"), &folder.join("emulation"));
        let file = folder.join("cuda").join(mutant.file);
        replace(&file, mutant.name, mutant.right, mutant.wrong);
        let program = folder.join("emulation.out");
        compile(
            &folder,
            &program,
            &[
                &format!("-DCADRE_DIM={}", mutant.dim),
                &format!("-DCADRE_CAP={cap}"),
                &format!("-DCADRE_ONLY_{}", pass.to_uppercase()),
            ],
        );
        let mut words = vec![part, mutant.dim, "12"];
        words.extend(mutant.shapes);
        if run(&program, &words).status.success() {
            survivors.push(mutant.name);
        }
    }
    assert!(survivors.is_empty(), "no check noticed: {survivors:?}");
}
