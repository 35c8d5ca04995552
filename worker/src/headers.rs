//! The header log of an earlier run, from its file.
//!
//! In: the path of a `headers.jsonl`. Out: a [`Log`] to replay. It writes none: a job's controller does, in pods trainer 0.

use std::fs;
use std::path::Path;

use cadre_step::header::{Error, Log};

/// Reads a log.
///
/// # Errors
///
/// [`Error::Unreadable`], [`Error::Malformed`].
pub fn read(path: &Path) -> Result<Log, Error> {
    let text = fs::read_to_string(path)
        .map_err(|source| Error::Unreadable { path: path.into(), source })?;
    Log::parse(path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_read_is_refused_by_its_path() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("absent.jsonl"), folder.path().into()] {
            assert!(matches!(read(&path), Err(Error::Unreadable { path: it, .. }) if it == path));
        }
    }
}
