//! Images for the nodes, without a registry.
//!
//! In: programs. Out: a file that `ctr images import` takes, written by `scripts/image`, as users make theirs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::process::output;
use crate::programs::root;

/// Writes the image `reference` of the programs, each with its place, into `folder`. What runs is the first.
pub(crate) fn write(
    folder: &Path,
    reference: &str,
    programs: &[(&str, PathBuf)],
) -> Result<PathBuf> {
    let mut command = Command::new(root().join("scripts/image"));
    command.arg("--reference").arg(reference).arg("--output").arg(folder);
    for (place, program) in programs {
        command.arg("--program").arg(format!("{place}={}", program.display()));
    }
    output(&mut command)?;
    Ok(folder.join("archive.tar"))
}
