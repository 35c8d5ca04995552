//! The emulated GPU for tests: a libcuda, a cuBLASLt on top of it, and the program that checks kernels. Built once for all.
//!
//! In: the sources beside this file and in `cuda/`, a C++17 compiler (`c++`, or what `CXX` names). Out: folders for
//! `LD_LIBRARY_PATH`, and a program. They lie beside the test programs in a folder that is named by a digest of the sources, so
//! other test programs and the next run find them there. Tests of each crate include this file with `#[path]`.
//!
//! Invariant: what is found was built whole, and of the sources as they are.

// Every test program compiles this one for itself and uses a part of it.
#![allow(dead_code)]

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of a libcuda whose GPU is emulated.
pub(crate) fn driver() -> PathBuf {
    let words = ["-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"];
    folder_of(&built("driver.cpp", "driver/libcuda.so.1", &words))
}

/// The folder of a cuBLASLt that computes on the emulated GPU.
pub(crate) fn blas() -> PathBuf {
    let driver = driver().join("libcuda.so.1");
    let words = ["-O2", "-fPIC", "-shared", driver.to_str().expect("a plain name")];
    folder_of(&built("blas.cpp", "blas/libcublasLt.so", &words))
}

/// Both, as `LD_LIBRARY_PATH` takes them.
pub(crate) fn driver_and_blas() -> OsString {
    std::env::join_paths([driver(), blas()]).expect("no colon in a folder's name")
}

/// The program that runs the kernels on emulated primitives and compares them with f64.
pub(crate) fn checks() -> PathBuf {
    built("main.cpp", "checks/emulation", &["-O1"])
}

/// The same for a form of some kernels (`scripts/kernels --forms`): its flag, and what is compiled of it.
pub(crate) fn checks_of_form(form: &str, words: &[&str]) -> PathBuf {
    let words = [&["-O1", "-DCADRE_FAMILY=Hopper"][..], words].concat();
    built("main.cpp", &format!("checks-{form}/emulation"), &words)
}

/// The program that says how tables lie in the kernels' memory.
pub(crate) fn layout() -> PathBuf {
    built("layout.cpp", "layout/layout", &["-O1"])
}

fn folder_of(file: &Path) -> PathBuf {
    file.parent().expect("a file is in a folder").to_owned()
}

/// What `source` becomes, at `name` in the folder of this state of the sources. One builds it, others wait.
fn built(source: &str, name: &str, words: &[&str]) -> PathBuf {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Of a crate beside the kernels, or below them.
    let kernels = own.ancestors().skip(1).map(|it| it.join("kernels")).find(|it| it.is_dir());
    let kernels = kernels.expect("the tree has kernels");
    let program = std::env::current_exe().expect("a test is a program");
    let beside = program.parent().and_then(Path::parent).expect("it is in a target folder");
    let place = beside.join(format!("emulated-gpu-{:016x}", digest(&kernels, &compiler)));
    let file = place.join(name);
    fs::create_dir_all(folder_of(&file)).expect("the target folder takes files");
    let lock = File::create(place.join(format!("{source}.lock"))).expect("a file of the target");
    lock.lock().expect("a file can be locked");
    if file.exists() {
        return file;
    }
    let part = file.with_extension("part");
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-DCADRE_EMULATION", "-I"])
        .arg(kernels.join("emulation"))
        .arg("-I")
        .arg(kernels.join("cuda"))
        .arg(kernels.join("emulation").join(source))
        .args(words)
        .arg("-o")
        .arg(&part)
        .output()
        .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&part, &file).expect("a file of ours");
    file
}

/// Digest of everything that the compiler reads.
fn digest(kernels: &Path, compiler: &str) -> u64 {
    let mut state = DefaultHasher::new();
    compiler.hash(&mut state);
    for folder in ["emulation", "cuda"] {
        digest_folder(&kernels.join(folder), &mut state);
    }
    state.finish()
}

fn digest_folder(folder: &Path, state: &mut DefaultHasher) {
    let entries = fs::read_dir(folder).expect("a folder of the kernels");
    let mut paths: Vec<_> = entries.map(|it| it.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        path.file_name().hash(state);
        if path.is_dir() {
            digest_folder(&path, state);
        } else {
            fs::read(&path).expect("a source of the kernels").hash(state);
        }
    }
}
