//! The host's side of the GPU kernels, over a driver library whose GPU is emulated; or over the real one.
//!
//! In: `emulation/driver.cpp`, built as a libcuda by [`built`]. Out: the tests of [`emulated`], which this program runs in
//! itself with that library first on the search path. `cargo test --test device -- --ignored` on a machine with a Hopper
//! GPU runs the same tests on it, but for those that break the emulated one.
//!
//! It sees wrong tables, lists, arguments, copies and waits. It sees nothing that a real driver would do otherwise.

#[path = "../emulation/built.rs"]
mod built;
mod emulated;

use std::ffi::OsStr;
use std::process::Command;

/// Runs one test of [`emulated`] in a process whose driver is the emulated one.
fn run(test: &str, environment: &[(&str, &str)]) {
    run_with(test, environment, built::driver().as_os_str());
}

/// The same with libraries from `folders`.
fn run_with(test: &str, environment: &[(&str, &str)], folders: &OsStr) {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    run_in_process(test, environment, folders);
}

/// The same in a build without kernels, too.
fn run_in_process(test: &str, environment: &[(&str, &str)], folders: &OsStr) {
    let output = Command::new(std::env::current_exe().expect("a test is a program"))
        .args(["--ignored", "--exact", &format!("emulated::{test}"), "--nocapture"])
        .env("LD_LIBRARY_PATH", folders)
        .envs(environment.iter().copied())
        .output()
        .expect("this program runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{environment:?}: {said}");
}

#[test]
fn tables_lie_in_memory_as_the_kernels_read_them() {
    let output = Command::new(built::layout()).output().expect("it was just built");
    let theirs = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(theirs, cadre_kernels::device::tables::layouts());
}

#[test]
fn without_a_driver_there_is_an_error_and_no_panic() {
    // The emulated library is not on the path of this process.
    match cadre_kernels::device::Gpu::open(99) {
        Err(error) => assert!(!error.is_lost(), "{error}"),
        Ok(gpu) => panic!("there is no GPU 99, but it opened {gpu:?}"),
    }
}

#[test]
fn a_gpu_is_taken_where_there_is_one() {
    run("engine::with_gpu", &[]);
}

#[test]
fn processes_take_turns_at_gpus_and_a_gpu_that_is_named_has_no_substitute() {
    run("engine::of_three", &[("CADRE_EMULATED_GPUS", "3")]);
}

#[test]
fn a_machine_without_a_gpu_computes_on_the_cpu_unless_the_gpu_is_demanded() {
    // Neither an emulated GPU nor one of the machine.
    run_in_process("engine::without_gpu", &[("CUDA_VISIBLE_DEVICES", "")], OsStr::new(""));
}

#[test]
fn forward_is_that_of_f64_and_its_bits_do_not_depend_on_the_batch() {
    run("forward", &[]);
    run("forward", &[("CADRE_EMULATED_SEED", "3")]);
}

#[test]
fn backward_is_that_of_f64_and_its_bits_do_not_depend_on_the_batch() {
    run("backward", &[]);
    run("backward", &[("CADRE_EMULATED_SEED", "4")]);
}

#[test]
fn plans_run_again_over_segments_launches_and_streams() {
    run("plans", &[]);
}

#[test]
fn what_the_kernels_cannot_do_is_refused_before_a_launch() {
    run("refusals", &[("CADRE_EMULATED_LOST", "0")]);
}

#[test]
fn short_memory_divides_the_batch() {
    // The whole batch needs 800 kB, half of it 400.
    run("short_memory", &[("CADRE_EMULATED_MEMORY", "600000")]);
}

#[test]
fn a_lost_gpu_is_an_error_that_names_the_kernel_and_the_batch() {
    run("lost", &[("CADRE_EMULATED_LOST", "1")]);
}

#[test]
fn linear_layers_on_the_gpu_are_those_of_the_cpu_within_rounding() {
    let folders = built::driver_and_blas();
    run_with("linear::products", &[], &folders);
    run_with("linear::without_algorithm", &[("CADRE_EMULATED_NO_ALGORITHM", "1")], &folders);
}

#[test]
fn without_cublaslt_linear_layers_are_refused_or_stay_on_the_cpu() {
    run("linear::without_library", &[]);
}

#[test]
fn memory_of_an_arena_is_read_through_its_descriptor_in_the_order_of_a_stream() {
    run("arenas::memory", &[]);
}

#[test]
fn rooms_are_found_in_as_many_arenas_as_it_takes_and_read_when_they_are_written() {
    run("arenas::rooms", &[]);
    run("arenas::a_room_in_what_is_left", &[("CADRE_EMULATED_MEMORY", "8388608")]);
}

#[test]
fn rows_and_pieces_are_copied_by_the_thousand_in_one_launch() {
    run("rows::copies", &[]);
    run("rows::copies", &[("CADRE_EMULATED_SEED", "6")]);
    run("rows::pieces", &[]);
}

#[test]
fn lent_rows_come_as_their_stream_left_them_and_others_are_refused_by_name() {
    run("lent::rows", &[]);
    run("lent::refusals", &[("CADRE_EMULATED_ELSEWHERE", "164")]);
}

#[test]
fn gates_hold_a_stream_until_they_are_opened_and_always_open() {
    run("arenas::gates", &[]);
}

#[test]
fn sinks_take_part_in_the_softmax_and_have_a_gradient() {
    run("sinks::sinks", &[]);
}

#[test]
fn softcap_bounds_scores_and_has_its_slope_in_the_gradient() {
    run("softcap::softcap", &[]);
    run("softcap::refusals", &[("CADRE_EMULATED_LOST", "0")]);
}

#[test]
fn graphs_give_the_bits_of_plain_runs() {
    run("graphs::runs", &[]);
}

#[test]
fn a_kernel_can_be_recorded_before_it_ever_ran() {
    run("graphs::first", &[]);
}

#[test]
fn lists_are_put_without_waiting_for_a_stream() {
    run("uploads::lists", &[("CADRE_EMULATED_PAGEABLE", "0")]);
}

#[test]
fn memory_that_cannot_be_pinned_is_named_with_a_remedy() {
    run("uploads::unpinned", &[("CADRE_EMULATED_PINNED", "16")]);
}

#[test]
fn kernels_of_another_build_are_refused_by_name() {
    run("uploads::builds", &[]);
}

/// An A100.
const SM_80: (&str, &str) = ("CADRE_EMULATED_CAPABILITY", "80");
/// A GPU whose driver compiles the portable kernels.
const SM_120: (&str, &str) = ("CADRE_EMULATED_CAPABILITY", "120");

#[test]
fn a_gpu_without_kernels_of_its_own_runs_the_portable_ones() {
    run("forward", &[SM_80, ("CADRE_EMULATED_SEED", "3")]);
    run("backward", &[SM_120, ("CADRE_EMULATED_SEED", "4")]);
    run("plans", &[SM_80]);
    run("softcap::softcap", &[SM_80]);
}

#[test]
fn the_portable_kernels_take_any_head_dim_of_whole_16_bytes() {
    run("portable::other_head_dims", &[SM_80]);
}

#[test]
fn an_engine_says_which_kernels_run_and_names_them_by_compute_capability() {
    let wanted = |what| ("CADRE_TEST_KERNELS", what);
    let says = "portable kernels, as compute capability 8.9 has no others";
    run("portable::engine", &[("CADRE_EMULATED_CAPABILITY", "89"), wanted(says)]);
    let asked = ("CADRE_GPU_KERNELS", "portable");
    run("portable::engine", &[asked, wanted("portable kernels, as CADRE_GPU_KERNELS says")]);
    let old = "has compute capability 7.5, the kernels are for 8.0 and newer";
    run("portable::refused", &[("CADRE_EMULATED_CAPABILITY", "75"), wanted(old)]);
    let hopper = ("CADRE_GPU_KERNELS", "hopper");
    let unfit = wanted("CADRE_GPU_KERNELS is \"hopper\"");
    run("portable::refused", &[SM_80, hopper, unfit]);
    run("portable::refused_for_any_engine", &[SM_80, hopper, unfit]);
}
