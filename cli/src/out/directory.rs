//! Chooses the directory of a run and holds it.
//!
//! In: the user's `--out` and `--resume`, the job's name. Out: a [`Directory`] that this process alone
//! writes to until it ends.
//!
//! Nothing that is there is ever overwritten: a finished run is left alone and the next free number
//! taken, a directory with anything else is refused.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use super::Error;

/// Where runs go when the user names no directory.
const HOME: &str = "runs";
/// A file that every run has from its start.
const MARK: &str = "steps.jsonl";
/// A file that a run has when it has finished.
pub(super) const END: &str = "summary.json";
/// What a run draws when it has finished.
pub(super) const PICTURE: &str = "picture.svg";

/// A directory that belongs to this run.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// There was nothing in it.
    fresh: bool,
    /// Directories that were made for it, outermost first.
    made: Vec<PathBuf>,
    /// Locked while this run lives.
    _lock: File,
}

/// What is in a directory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Content {
    Nothing,
    Finished,
    Unfinished,
    Foreign,
}

impl Directory {
    /// Finds or makes the directory.
    pub(crate) fn choose(out: Option<&Path>, job: &str, resume: bool) -> Result<Self, Error> {
        let base = out.map_or_else(|| Path::new(HOME).join(job), Path::to_path_buf);
        if resume {
            let held = Self::hold(match out {
                Some(_) => Self::resumable(base)?,
                None => Self::newest(&base)?,
            })?;
            return if has_checkpoint(held.path()) { Ok(held) } else { Err(held.unfinished()) };
        }
        match content(&base)? {
            Content::Nothing => Self::hold(base),
            Content::Foreign => Err(Error::Foreign { path: base }),
            // Held first: nobody is told to remove what another run still writes.
            Content::Unfinished if out.is_some() => Err(Self::hold(base)?.unfinished()),
            Content::Finished | Content::Unfinished => {
                let base = named(base)?;
                let mut number = 2_u32;
                loop {
                    let path = numbered(&base, number);
                    if content(&path)? == Content::Nothing {
                        return Self::hold(path);
                    }
                    number += 1;
                }
            }
        }
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what says that a run has finished: it goes on.
    pub(crate) fn reopen(&self) -> Result<(), Error> {
        for name in [END, PICTURE] {
            let path = self.path.join(name);
            if let Err(source) = std::fs::remove_file(&path)
                && source.kind() != std::io::ErrorKind::NotFound
            {
                return Err(Error::file("remove", &path, source));
            }
        }
        Ok(())
    }

    /// Removes what this run has made, unless it went on from an earlier one.
    pub(crate) fn withdraw(self) {
        if !self.fresh {
            return;
        }
        // Errors are ignored: the one that led here is reported, and files that stay are harmless,
        // since the next run in this directory names them.
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && !path.is_symlink() {
                std::fs::remove_dir_all(path).ok();
            } else {
                std::fs::remove_file(path).ok();
            }
        }
        for folder in self.made.iter().rev() {
            std::fs::remove_dir(folder).ok();
        }
    }

    /// What can be done about a run that has not finished.
    fn unfinished(self) -> Error {
        let has_checkpoint = has_checkpoint(&self.path);
        let path = self.path;
        if has_checkpoint { Error::Unfinished { path } } else { Error::NoCheckpoint { path } }
    }

    fn resumable(path: PathBuf) -> Result<PathBuf, Error> {
        match content(&path)? {
            Content::Finished | Content::Unfinished => Ok(path),
            Content::Nothing | Content::Foreign => Err(Error::NothingToResume { path }),
        }
    }

    fn newest(base: &Path) -> Result<PathBuf, Error> {
        let mut newest = Self::resumable(base.to_path_buf())?;
        for number in 2.. {
            match Self::resumable(numbered(base, number)) {
                Ok(path) => newest = path,
                Err(_) => break,
            }
        }
        Ok(newest)
    }

    fn hold(path: PathBuf) -> Result<Self, Error> {
        let fresh = content(&path)? == Content::Nothing;
        let made: Vec<PathBuf> = {
            let missing = |it: &&Path| !it.as_os_str().is_empty() && !it.exists();
            let mut made: Vec<_> =
                path.ancestors().take_while(missing).map(Path::to_path_buf).collect();
            made.reverse();
            made
        };
        std::fs::create_dir_all(&path).map_err(|source| Error::file("make", &path, source))?;
        let mark = path.join(MARK);
        let failed = |source| Error::file("open", &mark, source);
        let lock = OpenOptions::new().append(true).create(true).open(&mark).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path, fresh, made, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(Error::InUse { path }),
            Err(TryLockError::Error(source)) => Err(Error::file("lock", &mark, source)),
        }
    }
}

/// Whether a run left a checkpoint that `--resume` goes on from.
fn has_checkpoint(path: &Path) -> bool {
    let entries = std::fs::read_dir(path.join("checkpoints")).into_iter().flatten().flatten();
    entries.map(|it| it.file_name()).any(|name| {
        let steps = name.to_str().and_then(|it| it.strip_prefix("step-"));
        steps.is_some_and(|it| it.parse::<u64>().is_ok())
    })
}

/// The directory by a path that ends in its name, which `.` and `..` do not.
fn named(path: PathBuf) -> Result<PathBuf, Error> {
    if path.file_name().is_some() {
        return Ok(path);
    }
    std::fs::canonicalize(&path).map_err(|source| Error::file("read", &path, source))
}

/// A neighbour of a directory, whether its path ends in a slash or not.
fn numbered(base: &Path, number: u32) -> PathBuf {
    let mut name = base.file_name().unwrap_or_default().to_os_string();
    name.push(format!("-{number}"));
    base.with_file_name(name)
}

fn content(path: &Path) -> Result<Content, Error> {
    let failed = |source| Error::file("read", path, source);
    let mut entries = match std::fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Content::Nothing),
        Err(error) => return Err(failed(error)),
    };
    let empty = entries.next().transpose().map_err(failed)?.is_none();
    Ok(match (empty, path.join(MARK).is_file(), path.join(END).is_file()) {
        (true, ..) => Content::Nothing,
        (_, true, true) => Content::Finished,
        (_, true, false) => Content::Unfinished,
        _ => Content::Foreign,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(base: &Path, resume: bool) -> Result<Directory, String> {
        Directory::choose(Some(base), "job", resume).map_err(|error| error.to_string())
    }

    #[test]
    fn finished_runs_are_left_alone_and_unfinished_ones_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("a/b");
        assert_eq!(
            choose(&base, true).unwrap_err(),
            format!("{} holds no run to resume; name its directory with --out", base.display())
        );
        let first = choose(&base, false).unwrap();
        assert_eq!(first.path(), base);
        assert_eq!(
            choose(&base, true).unwrap_err(),
            format!(
                "{} is in use by another run; wait for it or name another --out",
                base.display()
            )
        );
        let in_use = choose(&base, false).unwrap_err();
        assert!(in_use.contains("is in use by another run"), "{in_use}");
        drop(first);
        // Neither remedy leads to the other refusal.
        let no_checkpoint = format!(
            "{0} holds a run that has no checkpoint to go on from; name another --out, or remove {0}",
            base.display()
        );
        std::fs::create_dir_all(base.join("checkpoints/step-draft")).unwrap();
        assert_eq!(choose(&base, false).unwrap_err(), no_checkpoint);
        assert_eq!(choose(&base, true).unwrap_err(), no_checkpoint);
        std::fs::create_dir(base.join("checkpoints/step-2")).unwrap();
        assert_eq!(
            choose(&base, false).unwrap_err(),
            format!(
                "{} holds an unfinished run; add --resume, or name another --out",
                base.display()
            )
        );
        assert_eq!(choose(&base, true).unwrap().path(), base);
        std::fs::write(base.join(END), "{}").unwrap();
        let second = choose(&base, false).unwrap();
        assert_eq!(second.path(), folder.path().join("a/b-2"));
        assert_eq!(std::fs::read_to_string(base.join(END)).unwrap(), "{}");
    }

    #[test]
    fn the_next_number_is_beside_the_directory_however_that_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("a");
        std::fs::create_dir_all(base.join("logs")).unwrap();
        std::fs::write(base.join(MARK), "").unwrap();
        std::fs::write(base.join(END), "{}").unwrap();
        let next = folder.path().canonicalize().unwrap().join("a-2");
        for written in ["a", "a/", "a//", "a/.", "a/logs/.."] {
            let chosen = choose(&folder.path().join(written), false).unwrap();
            assert_eq!(chosen.path().canonicalize().unwrap(), next, "{written}");
            chosen.withdraw();
            assert!(!next.exists(), "{written}");
        }
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(named(PathBuf::from(".")).unwrap(), here);
    }

    #[test]
    fn what_is_not_ours_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("thesis.txt"), "x").unwrap();
        let error = choose(folder.path(), false).unwrap_err();
        let expected = "is not empty and holds no run of cadre; name another --out";
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_run_that_came_to_nothing_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        choose(&folder.path().join("a/b"), false).unwrap().withdraw();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        choose(folder.path(), false).unwrap().withdraw();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "x").unwrap();
        let error = choose(&path, false).unwrap_err();
        assert!(error.starts_with(&format!("cannot read {}: ", path.display())), "{error}");
    }
}
