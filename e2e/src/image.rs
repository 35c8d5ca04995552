//! An image of built programs, without a registry and without a build of images.
//!
//! In: programs. Out: a file that `ctr images import` takes: one layer with the programs, stripped, and the
//! shared libraries that they load; a user `nonroot`; nothing else, no shell. What users get is the
//! Dockerfile's; this one has the same programs in the same places.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::process::output;
use crate::programs::system;

/// What an image is made of.
#[derive(Clone, Debug)]
pub(crate) struct Image<'a> {
    /// Name and tag.
    pub(crate) reference: &'a str,
    /// Place in the image, and the program that goes there.
    pub(crate) programs: &'a [(&'a str, PathBuf)],
    /// What runs when a container names no command.
    pub(crate) entrypoint: &'a str,
}

impl Image<'_> {
    /// Writes it to `NAME.tar` in `folder`. Out: its path.
    pub(crate) fn write(&self, folder: &Path, name: &str) -> Result<PathBuf> {
        let work = folder.join(format!("{name}.image"));
        let root = work.join("root");
        for place in ["etc", "tmp", "proc", "sys", "dev", "run", "var/lib"] {
            fs::create_dir_all(root.join(place)).context("a folder of the image")?;
        }
        let users =
            "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin\n";
        fs::write(root.join("etc/passwd"), users).context("users of the image")?;
        for (place, program) in self.programs {
            put(&root, place, program)?;
        }
        let layer = work.join("layer.tar");
        pack(&root, &layer, &["."])?;
        let config = json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": [self.entrypoint], "Env": ["PATH=/usr/local/bin"], "User": "65532:65532",
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer)?)]},
            "history": [{"created_by": "cadre-e2e"}],
        });
        let file = work.join("config.json");
        fs::write(&file, config.to_string()).context("an image's configuration")?;
        let config = format!("{}.json", digest(&file)?);
        fs::rename(&file, work.join(&config)).context("an image's configuration")?;
        let manifest =
            json!([{"Config": config, "RepoTags": [self.reference], "Layers": ["layer.tar"]}]);
        fs::write(work.join("manifest.json"), manifest.to_string())
            .context("an image's manifest")?;
        let archive = folder.join(format!("{name}.tar"));
        pack(&work, &archive, &["manifest.json", config.as_str(), "layer.tar"])?;
        fs::remove_dir_all(&work).context("an image's parts")?;
        Ok(archive)
    }
}

/// A program and the libraries that it loads.
fn put(root: &Path, place: &str, program: &Path) -> Result<()> {
    let target = root.join(place.trim_start_matches('/'));
    folder_of(&target)?;
    output(Command::new(system("strip")?).arg("-o").arg(&target).arg(program))?;
    let loaded = output(Command::new(system("ldd")?).arg(program))?;
    // `NAME => PATH (ADDRESS)`, and `PATH (ADDRESS)` for the loader; the kernel's own has no path.
    let paths = loaded.split_whitespace().filter(|it| it.starts_with('/'));
    for path in paths {
        let target = root.join(path.trim_start_matches('/'));
        if !target.exists() {
            folder_of(&target)?;
            fs::copy(path, &target).with_context(|| format!("library {path}"))?;
        }
    }
    Ok(())
}

fn folder_of(path: &Path) -> Result<()> {
    fs::create_dir_all(path.parent().expect("a path in the image")).context("a folder of the image")
}

fn pack(folder: &Path, archive: &Path, files: &[&str]) -> Result<()> {
    let mut tar = Command::new(system("tar")?);
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-cf"]);
    output(tar.arg(archive).arg("-C").arg(folder).args(files)).map(drop)
}

fn digest(file: &Path) -> Result<String> {
    let line = output(Command::new(system("sha256sum")?).arg(file))?;
    Ok(line.split_whitespace().next().context("a digest")?.to_owned())
}

fn architecture() -> &'static str {
    if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" }
}
