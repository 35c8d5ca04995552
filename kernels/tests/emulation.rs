//! The GPU kernels' own source, compiled for the CPU over emulated primitives, against attention in f64.
//!
//! In: `cuda/` and `emulation/`, a C++17 compiler (`c++`, or what `CXX` names). Out: every shape of
//! `emulation/shapes.hpp` for every head dim, forward and backward, under several seeds of stalls, and shapes that are drawn, half
//! of them by the commit (`testing/seeds.rs`); the portable kernels on fewer, and on all in the soak. It sees no speed and no GPU.
//!
//! Invariant: the checks have teeth: `scripts/planted kernels` plants the bugs of `planted/kernels.toml`, and each must be caught.

#[path = "../emulation/built.rs"]
mod built;
#[path = "../../testing/seeds.rs"]
mod seeds;

use std::path::Path;
use std::process::Command;

fn check(words: &[&str]) {
    check_with(&built::checks(), words);
}

fn check_with(program: &Path, words: &[&str]) {
    let output = Command::new(program).args(words).output().expect("it was built");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said));
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

/// Forms that are built for comparison on a GPU (`scripts/kernels --forms`).
#[test]
fn backward_by_whole_panels_is_right_too() {
    let words =
        ["-DCADRE_WHOLE_PANELS", "-DCADRE_DIM=64", "-DCADRE_CAP=Plain", "-DCADRE_ONLY_BACKWARD"];
    check_with(&built::checks_of_form("panels", &words), &["backward", "64", "2"]);
}

#[test]
fn backward_with_gradients_a_step_later_is_right_too() {
    let words = ["-DCADRE_LATER", "-DCADRE_DIM=128", "-DCADRE_ONLY_BACKWARD"];
    let program = built::checks_of_form("later", &words);
    check_with(&program, &["backward", "128", "3"]);
    check_with(&program, &["backward-softcap", "128", "2"]);
    for part in ["backward", "backward-softcap"] {
        let shapes = drawn();
        let words = [part, "128", "2"].into_iter().chain(shapes.iter().map(String::as_str));
        check_with(&program, &words.collect::<Vec<_>>());
    }
}

/// With an eighth of the exponentials by a polynomial, whose error is in the bounds.
#[test]
fn forward_by_tall_tiles_is_right_too() {
    let words = ["-DCADRE_TALL", "-DCADRE_DIM=64", "-DCADRE_ONLY_FORWARD"];
    let program = built::checks_of_form("tall", &words);
    for part in ["forward", "forward-softcap"] {
        check_with(&program, &[part, "64", "3"]);
        let shapes = drawn();
        let words = [part, "64", "2"].into_iter().chain(shapes.iter().map(String::as_str));
        check_with(&program, &words.collect::<Vec<_>>());
    }
}

#[test]
fn softcap_is_right_on_all_shapes() {
    check(&["forward-softcap", "0", "2"]);
    check(&["backward-softcap", "64", "2"]);
    check(&["backward-softcap", "128", "1"]);
    check(&["backward-softcap", "256", "1"]);
}

/// Shapes that are drawn, half of them by the commit. A seed of stalls each: odd ones sum dQ in one order, and compare bits over
/// cuts and launches.
fn drawn() -> Vec<String> {
    let mut shapes = Vec::new();
    for (first, cases) in seeds::first_seeds("shapes of kernels", 36, 8) {
        shapes.extend((first..first + cases).map(|seed| format!("random {seed}")));
    }
    shapes
}

/// Each number is within the bound that `emulation/reference.hpp` derives for it; no tolerance is fitted to shapes that were seen.
#[test]
fn shapes_that_are_drawn_are_within_the_bounds_of_their_roundings() {
    let shapes = drawn();
    for part in ["forward", "backward", "forward-softcap", "backward-softcap"] {
        let words = [part, "0", "2"].into_iter().chain(shapes.iter().map(String::as_str));
        check(&words.collect::<Vec<_>>());
    }
}

/// Shapes that have most of what can go wrong: many key tiles that add to one tile of dQ, edges, masks, segments, rows without
/// keys, several tasks and bundles.
const TELLING: [&str; 6] = [
    "one row late in its document",
    "two bundles of one document",
    "window over keys held in part",
    "rows before the first key",
    "ragged documents, causal",
    "segments",
];

/// The first `count` of [`TELLING`]; the second seed sums dQ in one order, and compares bits over cuts and launches.
fn check_telling(part: &str, dim: &str, count: usize) {
    check(&[&[part, dim, "2"][..], &TELLING[..count]].concat());
}

#[test]
fn the_portable_forward_is_right_and_its_bits_do_not_depend_on_cuts() {
    check(&["portable-forward", "64", "2"]);
    check_telling("portable-forward", "128", 6);
    check_telling("portable-forward", "256", 4);
    check_telling("portable-forward-softcap", "64", 6);
}

#[test]
fn the_portable_backward_is_right_and_its_bits_do_not_depend_on_cuts() {
    check_telling("portable-backward", "64", 6);
    check_telling("portable-backward", "128", 6);
    check_telling("portable-backward", "256", 3);
    check_telling("portable-backward-softcap", "64", 6);
}

#[test]
#[ignore = "takes minutes: make soak PARTS=kernels"]
fn the_portable_kernels_are_right_on_all_shapes() {
    let drawn: Vec<String> = (0..100).map(|seed| format!("random {seed}")).collect();
    for part in ["portable-forward", "portable-backward"] {
        for capped in ["", "-softcap"] {
            let part = format!("{part}{capped}");
            for dim in ["0", "24", "80", "96", "112", "200"] {
                check(&[&part, dim, "3"]);
            }
            let words = [part.as_str(), "0", "2"].into_iter();
            check(&words.chain(drawn.iter().map(String::as_str)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn rows_move_as_their_lists_say() {
    check(&["rows"]);
}
