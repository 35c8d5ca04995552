//! The check on a GPU, rehearsed: `bench/gpu/rehearsal.py` over a pack whose driver is the emulated one.
//!
//! In: this build's probe and kernels, `kernels/emulation/driver.cpp`, Python. Out: the rehearsal's verdict. Forms of the pack are
//! this build's kernels again; those that tell where they wait are marked so, which the emulated driver knows. Parts of the
//! rehearsal run at once, each with a pack of its own: runs of one pack refuse each other, and some change theirs.

#[path = "../../emulation/built.rs"]
mod built;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cadre_kernels::cubins::CUBINS;

/// Parts that run at once, on fewer processors, too: half of a rehearsal is waiting for what hangs.
const PARTS: usize = 4;
/// Bytes of an ELF header that nothing uses; the emulated driver looks there for the mark.
const MARK: (usize, &[u8]) = (9, b"WATCH");

fn pack(place: &Path) -> PathBuf {
    let pack = place.join("pack");
    let _ = std::fs::remove_dir_all(&pack);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sources = root.join("bench/gpu");
    for folder in ["", "workloads", "forms/watch", "forms/poll", "emulated"] {
        std::fs::create_dir_all(pack.join(folder)).expect("the test's own folder");
    }
    let copy = |from: &Path, to: &str| {
        let name = from.file_name().expect("a file");
        std::fs::copy(from, pack.join(to).join(name)).expect("a file of the tree");
    };
    for (folder, to) in [(sources.clone(), ""), (sources.join("workloads"), "workloads")] {
        let entries = std::fs::read_dir(&folder).expect("a folder of the tree");
        for path in entries.map(|it| it.expect("an entry").path()).filter(|it| it.is_file()) {
            copy(&path, to);
        }
    }
    copy(Path::new(env!("CARGO_BIN_EXE_cadre-gpu-probe")), "");
    // Beside the test programs, where cargo puts a library before it links it elsewhere.
    let programs = std::env::current_exe().expect("this program has a place");
    copy(&programs.with_file_name("libcadre_attention.so"), "");
    for cubin in CUBINS.iter().filter(|it| it.name != "rows") {
        let mut bytes = cubin.bytes.to_vec();
        std::fs::write(pack.join("forms/poll").join(format!("{}.cubin", cubin.name)), &bytes)
            .expect("the test's own folder");
        bytes[MARK.0..][..MARK.1.len()].copy_from_slice(MARK.1);
        std::fs::write(pack.join("forms/watch").join(format!("{}.cubin", cubin.name)), &bytes)
            .expect("the test's own folder");
    }
    std::fs::write(pack.join("pack.json"), r#"{"commit": "rehearsed", "cubins": "emulated"}"#)
        .expect("the test's own folder");
    copy(&built::driver().join("libcuda.so.1"), "emulated");
    // Programs try this name first.
    let emulated = pack.join("emulated");
    std::fs::copy(emulated.join("libcuda.so.1"), emulated.join("libcuda.so"))
        .expect("the test's own folder");
    pack
}

#[test]
fn every_trouble_comes_back_with_the_right_word() {
    if CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rehearsal");
    let running: Vec<Child> = (0..PARTS).map(|part| begin(&place, part)).collect();
    let ended = running.into_iter().map(|it| it.wait_with_output().expect("Python runs"));
    let ended: Vec<_> = ended.collect();
    for output in ended {
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("Ran 0 tests"), "{said}");
    }
    // Packs of a rehearsal that fails stay to be looked at.
    let _ = std::fs::remove_dir_all(&place);
}

/// One of the parts of the rehearsal.
fn begin(place: &Path, part: usize) -> Child {
    let pack = pack(&place.join(part.to_string()));
    let python = std::env::var("GPU_CHECK_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    Command::new(python)
        .args(["-B", "-m", "unittest"])
        .args(["rehearsal", "rehearsal_machine", "rehearsal_larger", "rehearsal_blame"])
        .current_dir(&pack)
        .env("CADRE_PACK", &pack)
        .env("CADRE_REHEARSED", format!("{part}/{PARTS}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("Python runs")
}
