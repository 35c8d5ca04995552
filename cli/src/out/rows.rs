//! A file of rows: one JSON object a line, each about a step.
//!
//! In: rows in the order of their steps. Out: the file, and the rows at hand in memory.
//!
//! A line that was cut off when a process was killed, or by a full disk, is dropped on opening. Lines
//! of a step and of all later ones can be dropped, which is how a run goes on from a checkpoint.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Error;

/// Something about a step.
pub(crate) trait Row: DeserializeOwned + Serialize {
    /// The step.
    fn step(&self) -> u64;
}

/// A file of rows that is open for appending.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    path: PathBuf,
    file: File,
    read: Vec<T>,
    /// Where each row ends in the file.
    ends: Vec<u64>,
}

impl<T: Row> Rows<T> {
    /// Opens or makes a file.
    pub(crate) fn open(path: PathBuf) -> Result<Self, Error> {
        let failed = |source| Error::file("open", &path, source);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(failed)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        let (mut rows, mut ends, mut end) = (Vec::new(), Vec::new(), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            if line.last() != Some(&b'\n') {
                break;
            }
            let row = serde_json::from_slice(line).map_err(|source| Error::Row {
                path: path.clone(),
                line: rows.len() + 1,
                source,
            })?;
            end += line.len() as u64;
            rows.push(row);
            ends.push(end);
        }
        let mut opened = Self { path, file, read: rows, ends };
        opened.cut(opened.read.len())?;
        Ok(opened)
    }

    /// All rows.
    pub(crate) fn rows(&self) -> &[T] {
        &self.read
    }

    /// Appends a row.
    pub(crate) fn push(&mut self, row: T) -> Result<(), Error> {
        let line = serde_json::to_string(&row).expect("records have text as keys");
        self.push_line(row, &line)
    }

    /// Appends a row that is written as `line`.
    pub(crate) fn push_line(&mut self, row: T, line: &str) -> Result<(), Error> {
        let mut text = line.replace(['\n', '\r'], " ");
        text.push('\n');
        if let Err(source) = self.file.write_all(text.as_bytes()) {
            let error = Error::file("write", &self.path, source);
            // Removes the part of the line that was written. If that fails too, the first error is
            // reported.
            self.cut(self.read.len()).ok();
            return Err(error);
        }
        self.read.push(row);
        self.ends.push(self.ends.last().unwrap_or(&0) + text.len() as u64);
        Ok(())
    }

    /// Waits until the rows so far are on the disk, where a crash of the machine leaves them.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(|source| Error::file("write", &self.path, source))
    }

    /// The rows that are missing of steps before `first_step`, one sentence; none where all are there.
    pub(crate) fn lost(&self, first_step: u64) -> Option<String> {
        let missing = first_step.saturating_sub(self.read.len() as u64);
        let path = self.path.display();
        (missing > 0).then(|| {
            format!(
                "{path} lacks {missing} rows of steps before {first_step}, as after a crash of the machine: put a whole copy \
                 there and resume again, or go on without them"
            )
        })
    }

    /// Drops the first row of `step` or a later one, and all behind it.
    pub(crate) fn drop_from(&mut self, step: u64) -> Result<(), Error> {
        match self.read.iter().position(|row| row.step() >= step) {
            Some(kept) => self.cut(kept),
            None => Ok(()),
        }
    }

    fn cut(&mut self, kept: usize) -> Result<(), Error> {
        self.read.truncate(kept);
        self.ends.truncate(kept);
        let end = *self.ends.last().unwrap_or(&0);
        self.file
            .set_len(end)
            .and_then(|()| self.file.seek(SeekFrom::Start(end)))
            .map(|_| ())
            .map_err(|source| Error::file("write", &self.path, source))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
    struct Sample {
        step: u64,
        value: f64,
        text: String,
    }

    impl Row for Sample {
        fn step(&self) -> u64 {
            self.step
        }
    }

    fn samples() -> impl Strategy<Value = Vec<Sample>> {
        prop::collection::vec((0_u64..20, any::<i32>(), ".{0,8}"), 0..20).prop_map(|mut rows| {
            rows.sort_by_key(|row| row.0);
            let row = |(step, value, text)| Sample { step, value: f64::from(value), text };
            rows.into_iter().map(row).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever was cut off in mid-line, what is read again is a prefix, and a run that goes on
        /// from any step ends with the rows of an undisturbed one.
        #[test]
        fn rows_survive_kills_and_restarts(
            rows in samples(),
            lost in 0_usize..40,
            step in 0_u64..20,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("rows.jsonl");
            let mut file = Rows::open(path.clone()).unwrap();
            for row in &rows {
                file.push(row.clone()).unwrap();
            }
            let text = std::fs::read(&path).unwrap();
            std::fs::write(&path, &text[..text.len().saturating_sub(lost)]).unwrap();
            let mut file = Rows::<Sample>::open(path.clone()).unwrap();
            prop_assert!(rows.starts_with(file.rows()));
            file.drop_from(step).unwrap();
            let kept = file.rows().len();
            prop_assert!(file.rows().iter().all(|row| row.step < step));
            for row in &rows[kept..] {
                file.push(row.clone()).unwrap();
            }
            drop(file);
            let file = Rows::<Sample>::open(path.clone()).unwrap();
            prop_assert_eq!(file.rows(), &rows[..]);
            prop_assert_eq!(std::fs::read(&path).unwrap(), text);
        }
    }

    #[test]
    fn foreign_rows_are_named_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "{\"step\":0,\"value\":0,\"text\":\"\"}\nhello\n").unwrap();
        let error = Rows::<Sample>::open(path.clone()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{} line 2: ", path.display())), "{error}");
    }

    #[test]
    fn a_full_disk_is_named_and_leaves_no_part_of_a_row() {
        // Not through `open`, which would read the device, and it never ends.
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let mut file = Rows::<Sample> { path, file, read: Vec::new(), ends: Vec::new() };
        // No disk is behind it.
        let error = file.sync().unwrap_err().to_string();
        assert!(error.starts_with("cannot write /dev/full: "), "{error}");
        let row = Sample { step: 0, value: 0.0, text: String::new() };
        let error = file.push(row).unwrap_err().to_string();
        assert!(error.contains("free space there"), "{error}");
        assert!(file.rows().is_empty());
    }
}
