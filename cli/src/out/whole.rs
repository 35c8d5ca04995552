//! Files that appear whole or not at all.
//!
//! In: a path and bytes. Out: the file, replaced by a rename within its directory. When the disk is
//! full, or the process dies, what was there before stays. No file is synced: a crash of the machine
//! may lose the last version, never mix two.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;

use super::Error;

/// Replaces a file.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_with(path, |file| file.write_all(bytes))
}

/// Replaces a file with indented JSON and a line end.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let mut text = serde_json::to_vec_pretty(value).expect("records have text as keys");
    text.push(b'\n');
    write(path, &text)
}

/// Replaces a file with what `fill` writes.
pub(super) fn write_with(
    path: &Path,
    fill: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> Result<(), Error> {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |source| Error::file("write", path, source);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    let mut file = tempfile::Builder::new()
        .prefix(".cadre-")
        .permissions(mode)
        .tempfile_in(folder)
        // The library's error would name the temporary file.
        .map_err(|error| failed(error.kind().into()))?;
    fill(file.as_file_mut()).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_json(&path, &1).unwrap();
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error = write_with(&path, |_| Err(full())).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
        assert!(error.ends_with("; free space there, or name another --out"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
