//! The C face as other programs call it: the examples, and calls that are wrong, over the emulated driver.
//!
//! In: `examples/attention.c`, `wrong.c`, `streams.c`, a C compiler (`cc`, or what `CC` names), this build's library. Out: what the program says. The
//! example in Python runs in `python/tests/test_kernels.py`, where PyTorch is.

#[path = "../../emulation/built.rs"]
mod built;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cadre_kernels::cubins::CUBINS;

/// Compiles a C program against the header and this build's library, warnings being errors, and runs it on an emulated GPU.
fn run(source: &Path, name: &str) -> Output {
    let crate_of = Path::new(env!("CARGO_MANIFEST_DIR"));
    let programs = std::env::current_exe().expect("this program has a place");
    // Beside the test programs, where cargo puts a library before it links it elsewhere.
    let library = programs.parent().expect("it is in a folder");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let done = Command::new(&compiler)
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(crate_of.join("include"))
        .arg(source)
        .arg("-L")
        .arg(library)
        .args(["-lcadre_attention", "-lm", "-pthread"])
        // What the examples call by the driver's names, and what the emulated one has for tests.
        .arg(built::driver().join("libcuda.so.1"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|error| panic!("cannot run the C compiler {compiler}: {error}"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let folders = std::env::join_paths([library.to_owned(), built::driver()]).expect("no colon");
    let mut program = Command::new(program);
    program.env("LD_LIBRARY_PATH", folders).env("CADRE_EMULATED_GPUS", "2");
    program.output().expect("it was just built")
}

fn source(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(name)
}

fn succeeds(output: &Output) -> String {
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn the_example_in_c_attends_as_a_loop_does() {
    if CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let said = succeeds(&run(&source("examples", "attention.c"), "attention"));
    assert!(said.starts_with("largest difference 0.00"), "{said}");
}

#[test]
fn a_wrong_call_has_words_and_harms_nothing() {
    if CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let said = succeeds(&run(&source("tests", "wrong.c"), "wrong"));
    let lines: Vec<_> = said.lines().collect();
    let words = [
        "gpu is null; hand in what the call that made it gave, if that succeeded",
        "head dim 80 has no GPU kernel here; those for Hopper take 64, 128 and 256, the portable ones (CADRE_GPU_KERNELS) each \
         multiple of 8 up to 256; use such, or the CPU",
        "3 query heads do not divide over 2 KV heads; hand in whole KV-head groups",
        "task 0 and 1 share row 50; give each its own",
        "tasks is null; hand in what the call that made it gave, if that succeeded",
        "task 1: mask, keys or dkv_row differ from those of bundle 0; give it a bundle of its own",
        "q has 63 numbers, the tasks reach to 6400; hand in the whole tensor",
        "out begins at address 0x2, which is no multiple of 16; align it",
        "plan is null; hand in what the call that made it gave, if that succeeded",
        "9 bytes do not fit memory of 8; copy no more than it has",
        "4294967295 launches share the key tiles, 1024 are the most; it mostly is 1",
        "the workspace is of GPU 0, the stream of GPU 1; hand in those of one GPU",
        "the plan is of GPU 0, the stream of GPU 1; hand in those of one GPU",
        "the memory is of GPU 0, the stream of GPU 1; hand in those of one GPU",
        "fine",
    ];
    assert_eq!(lines, words);
}

#[test]
fn streams_threads_and_captures_of_the_caller_are_kept_apart() {
    if CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let said = succeeds(&run(&source("tests", "streams.c"), "streams"));
    let lines: Vec<_> = said.lines().collect();
    let words = [
        "the caller's context stays: fine",
        "a stream is polled without leaving events: fine",
        "bytes of pinned memory have been read when a write returns: fine",
        "a plan of another thread waits for a run that is being enqueued: fine",
        "a forward plan runs on another stream than it was made on: fine",
        "its runs come one behind the other: fine",
        "so does a backward plan: fine",
        "and its runs: fine",
        "a plan on one stream leaves sums of another as they were: fine",
        "sinks on another stream come behind the run: fine",
        "a run that is refused in a capture leaves the workspace free: fine",
        "a run and its sinks are captured on another stream: fine",
        "and repeated: fine",
        "a graph holds addresses of the workspace, so it stays as it is; make another one for parts of O",
        "the plan runs as before: fine",
    ];
    assert_eq!(lines, words);
}
