//! Embeds the GPU kernels that `make kernels` has built.
//!
//! In: `target/kernels/*.cubin`, newer than every source in `cuda/`. Out: `OUT_DIR/cubins.rs`, a list of names and bytes,
//! empty where there are none; and then a line that says so. It never compiles CUDA: a laptop without nvcc builds the crate
//! with the CPU kernels alone.
//!
//! Invariant: what is embedded was built from the sources as they are now.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs, io};

const NAMES: [&str; 3] = ["forward", "backward", "rows"];

fn main() -> io::Result<()> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| manifest.join("../target"), PathBuf::from);
    let built = target.join("kernels");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    println!("cargo::rerun-if-changed={}", manifest.join("cuda").display());
    println!("cargo::rerun-if-changed={}", built.join("report.json").display());

    let newest_source = newest(&manifest.join("cuda"))?;
    let mut list = String::new();
    let mut missing = None;
    // The report is written last: without it a build was stopped.
    for name in
        ["report.json".to_owned()].into_iter().chain(NAMES.map(|name| format!("{name}.cubin")))
    {
        let path = built.join(&name);
        match fs::metadata(&path).and_then(|it| it.modified()) {
            Ok(time) if time >= newest_source => {
                if let Some(kernel) = name.strip_suffix(".cubin") {
                    let path = fs::canonicalize(&path)?;
                    let path = path.to_str().ok_or_else(|| {
                        io::Error::other(format!(
                            "{} is no UTF-8: build in another folder",
                            path.display()
                        ))
                    })?;
                    writeln!(
                        list,
                        "    Cubin {{ name: {kernel:?}, bytes: include_bytes!({path:?}) }},"
                    )
                    .expect("a String takes everything");
                }
            }
            Ok(_) => missing = Some(format!("{} is older than its source", path.display())),
            Err(_) => missing = Some(format!("{} does not exist", path.display())),
        }
    }
    if let Some(what) = missing {
        list.clear();
        println!("cargo::warning=built without GPU kernels: {what}; `make kernels` builds them");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("cubins.rs"), format!("&[\n{list}]\n"))
}

/// When the youngest file below `folder` was written.
fn newest(folder: &Path) -> io::Result<SystemTime> {
    let mut time = SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_source = entry.path().extension().is_some_and(|it| it == "cu" || it == "cuh");
        if entry.file_type()?.is_dir() {
            time = time.max(newest(&entry.path())?);
        } else if is_source {
            time = time.max(entry.metadata()?.modified()?);
        }
    }
    Ok(time)
}
