//! Embeds the GPU kernels that `make kernels` has built.
//!
//! In: `target/kernels/*.cubin` and `target/kernels/portable`, newer than every source in `cuda/`. Out: `OUT_DIR/cubins.rs`,
//! a list of names and bytes, and `OUT_DIR/portable.rs`, both empty where there are none; and then a line that says so. It never compiles CUDA: a laptop without nvcc builds the crate
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
    let (mut cubins, mut portable) = (String::new(), String::new());
    let mut missing = None;
    let mut found = |name: String| match place_of(&built.join(name), newest_source) {
        Ok(place) => place,
        Err(why) => {
            missing = Some(why);
            String::new()
        }
    };
    // The report is written last: without it a build was stopped.
    found("report.json".to_owned());
    for name in NAMES {
        let cubin = |place| format!("Cubin {{ name: {name:?}, bytes: include_bytes!({place:?}) }}");
        let of_hopper = cubin(found(format!("{name}.cubin")));
        let of_any = cubin(found(format!("portable/{name}.cubin")));
        let ptx = found(format!("portable/{name}.fatbin"));
        writeln!(cubins, "    {of_hopper},").expect("a String takes everything");
        let ptx = format!("include_bytes!({ptx:?})");
        writeln!(portable, "    PortableKernels {{ cubin: {of_any}, ptx: {ptx} }},")
            .expect("a String takes everything");
    }
    if let Some(what) = missing {
        (cubins, portable) = (String::new(), String::new());
        println!("cargo::warning=built without GPU kernels: {what}; `make kernels` builds them");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("cubins.rs"), format!("&[\n{cubins}]\n"))?;
    fs::write(out.join("portable.rs"), format!("&[\n{portable}]\n"))
}

/// The whole name of a file that was built of the sources as they are, or what is wrong with it.
fn place_of(path: &Path, newest_source: SystemTime) -> Result<String, String> {
    let time = fs::metadata(path).and_then(|it| it.modified());
    let time = time.map_err(|_| format!("{} does not exist", path.display()))?;
    if time < newest_source {
        return Err(format!("{} is older than its source", path.display()));
    }
    let whole = fs::canonicalize(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let place = whole.to_str().map(str::to_owned);
    place.ok_or_else(|| format!("{} is no UTF-8: build in another folder", whole.display()))
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
