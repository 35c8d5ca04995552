//! A driver library whose GPU is emulated (`kernels/emulation`), and an emulated cuBLASLt on top of it.
//!
//! In: a folder. Out: both libraries in it, for the library path of a program. Needs a C++ compiler.

use std::path::Path;
use std::process::Command;

/// Builds both.
pub(crate) fn build(folder: &Path) {
    let driver = folder.join("libcuda.so.1");
    compile("driver.cpp", &driver, &["-O1", "-Wl,-soname,libcuda.so.1"]);
    let driver = driver.to_str().expect("a folder of the build has a plain name");
    compile("blas.cpp", &folder.join("libcublasLt.so"), &["-O2", driver]);
}

/// Makes a shared library of one of the emulation's sources.
fn compile(source: &str, library: &Path, words: &[&str]) {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let done = Command::new(&compiler)
        .args(["-std=c++17", "-DCADRE_EMULATION", "-fPIC", "-shared", "-I"])
        .arg(kernels.join("emulation"))
        .arg("-I")
        .arg(kernels.join("cuda"))
        .arg(kernels.join("emulation").join(source))
        .args(words)
        .arg("-o")
        .arg(library)
        .status()
        .unwrap_or_else(|error| panic!("cannot run the C++ compiler {compiler}: {error}"));
    assert!(done.success());
}
