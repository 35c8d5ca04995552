//! The file of a calibration, which is there from the first row of a table on.
//!
//! In: a path; a [`Profile`] as it grows. Out: JSON. Until nothing is missing the file says that it is partial, which every reader
//! refuses ([`Profile::check`]): whoever is cut keeps what was measured. A whole calibration that was there before stays until
//! there is another whole one, and what is no file, such as a pipe, gets a whole one alone.
//!
//! Invariant: a file is replaced at once (`.NAME.new` is renamed), so a reader never sees a part of one.

use std::path::{Path, PathBuf};

use cadre_planner::Profile;

use super::CalibrateError;
use crate::printed;

pub(super) struct File {
    /// Behind links.
    path: PathBuf,
    is_replaced: bool,
    grows: bool,
}

impl File {
    /// Looks at the path before anything is measured.
    pub(super) fn new(path: &Path) -> Result<Self, CalibrateError> {
        if path.is_dir() {
            let source = std::io::ErrorKind::IsADirectory.into();
            return Err(CalibrateError::Unwritable { path: path.into(), source });
        }
        let is_whole = |text: Vec<u8>| {
            serde_json::from_slice::<Profile>(&text).is_ok_and(|it| it.partial.is_none())
        };
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
        let is_replaced = std::fs::metadata(&path).map_or(true, |it| it.is_file());
        let grows = is_replaced && !std::fs::read(&path).is_ok_and(is_whole);
        Ok(Self { path, is_replaced, grows })
    }

    /// Writes the unfinished calibration, of which `rows` rows of all tables were measured.
    pub(super) fn write_partial(
        &self,
        profile: &Profile,
        rows: usize,
        all: usize,
    ) -> Result<(), CalibrateError> {
        if !self.grows {
            return Ok(());
        }
        let partial = Some(format!("{rows} of {all} rows of its tables are measured"));
        self.write(&Profile { partial, ..profile.clone() })
    }

    /// Writes the whole calibration.
    pub(super) fn write(&self, profile: &Profile) -> Result<(), CalibrateError> {
        let text = printed::json(profile);
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let new = self.path.with_file_name(format!(".{name}.new"));
        let written = if self.is_replaced {
            std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &self.path))
        } else {
            std::fs::write(&self.path, text)
        };
        written.map_err(|source| {
            let _ = std::fs::remove_file(&new);
            CalibrateError::Unwritable { path: self.path.clone(), source }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_calibration_stays_until_there_is_another() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("c.json");
        let read = || -> Profile {
            serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("a calibration")
        };
        let first = Profile::builtin("h200-fa2").expect("it ships");
        let second = Profile { task_nanoseconds: 77, ..first.clone() };
        let file = File::new(&path).expect("no directory");
        file.write_partial(&first, 1, 8).expect("there is room");
        assert_eq!(read().partial.as_deref(), Some("1 of 8 rows of its tables are measured"));
        file.write(&first).expect("there is room");
        assert_eq!(read(), first);
        let file = File::new(&path).expect("no directory");
        file.write_partial(&second, 7, 8).expect("nothing is written");
        assert_eq!(read(), first);
        file.write(&second).expect("there is room");
        assert_eq!(read(), second);
        // Nothing beside it.
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }

    #[test]
    fn what_is_no_file_is_written_to_and_not_replaced() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).expect("a link");
        let profile = Profile::builtin("h200-fa2").expect("it ships");
        let file = File::new(&link).expect("no directory");
        file.write_partial(&profile, 1, 8).expect("nothing is written");
        file.write(&profile).expect("it takes everything");
        let file_type = std::fs::metadata("/dev/null").expect("it is there").file_type();
        assert!(!file_type.is_file());
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
