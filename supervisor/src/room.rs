//! The folder of the control socket.
//!
//! In: the temporary directory. Out: a [`Room`], a folder that only this user can enter. Dropping it removes the folder. The next
//! run removes the folder of a supervisor that was killed.
//!
//! ```text
//! made ──▶ locked ──dropped──────────────────▶ removed
//!             └─────killed──▶ free ──next run──▶ removed
//! ```
//!
//! Invariant: the room of a living supervisor is locked, and the kernel releases the lock when the process ends. Only the socket
//! and an empty folder are ever removed.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, geteuid, test_kill_process};

/// Longest path of a Unix socket that every kernel takes.
const MAX_SOCKET_PATH_BYTES: usize = 100;
/// Name of the socket.
const SOCKET: &str = "control";
/// Start of a room's name; the supervisor's process id and a few random digits follow.
const PREFIX: &str = "cadre-";
/// Random bytes in a name.
const RANDOM_BYTES: usize = 3;

/// A folder for the control socket.
#[derive(Debug)]
pub(super) struct Room {
    path: PathBuf,
    _lock: File,
}

impl Room {
    /// Makes a room, and removes those that killed supervisors left beside it.
    ///
    /// # Errors
    ///
    /// The temporary directory cannot be written, or locks nothing.
    pub(super) fn new() -> Result<Self, String> {
        let mut parent = std::env::temp_dir();
        // Ten digits are the longest process id.
        let longest = PREFIX.len() + 10 + 1 + 2 * RANDOM_BYTES + 1 + SOCKET.len();
        if parent.as_os_str().len() + 1 + longest > MAX_SOCKET_PATH_BYTES {
            parent = PathBuf::from("/tmp");
        }
        sweep(&parent);
        let failed = |source| format!("folder in {}: {source}; set TMPDIR", parent.display());
        loop {
            if let Some(room) = Self::within(&parent).map_err(failed)? {
                return Ok(room);
            }
        }
    }

    /// Where the control service listens.
    pub(super) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Makes a room. `None` if another run removed it before it was locked.
    fn within(parent: &Path) -> std::io::Result<Option<Self>> {
        let mut random = [0; RANDOM_BYTES];
        getrandom::fill(&mut random)?;
        let [a, b, c] = random;
        let path = parent.join(format!("{PREFIX}{}-{a:02x}{b:02x}{c:02x}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path)?;
        let swept = |error: &Error| error.kind() == ErrorKind::NotFound;
        let lock = match File::open(&path) {
            Err(error) if swept(&error) => return Ok(None),
            lock => lock?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => {
                remove(&path);
                return Err(error);
            }
        }
        match std::fs::metadata(&path) {
            Err(error) if swept(&error) => Ok(None),
            found => {
                let (there, mine) = (found?.ino(), lock.metadata()?.ino());
                Ok((there == mine).then_some(Self { path, _lock: lock }))
            }
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Removes the rooms of supervisors that are gone. What cannot be removed stays.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(supervisor_of) else { continue };
        // Symbolic links and files of other users are left alone.
        let ours = entry.metadata().is_ok_and(|it| it.is_dir() && it.uid() == geteuid().as_raw());
        // Containers that share the directory have process ids of their own, so a free id proves nothing. The lock does.
        if !ours || test_kill_process(pid).is_ok() {
            continue;
        }
        // The lock is held until the folder is gone, so that no supervisor takes it meanwhile.
        if let Ok(lock) = File::open(entry.path())
            && lock.try_lock().is_ok()
        {
            remove(&entry.path());
        }
    }
}

/// The process id in a room's name.
fn supervisor_of(name: &str) -> Option<Pid> {
    let (pid, random) = name.strip_prefix(PREFIX)?.split_once('-')?;
    let hex = random.len() == 2 * RANDOM_BYTES && random.bytes().all(|it| it.is_ascii_hexdigit());
    Pid::from_raw(pid.parse().ok().filter(|_| hex)?)
}

/// Removes the socket and the folder; a folder that holds anything else stays. The next run tries again,
/// so there is nothing to tell the user.
fn remove(room: &Path) {
    let _ = std::fs::remove_file(room.join(SOCKET));
    let _ = std::fs::remove_dir(room);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn names(parent: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(parent).expect("a folder of this test");
        let name = |it: std::io::Result<std::fs::DirEntry>| it.expect("readable").file_name();
        let mut names: Vec<_> =
            entries.map(name).map(|it| it.into_string().expect("plain names")).collect();
        names.sort();
        names
    }

    #[test]
    fn only_rooms_of_dead_supervisors_are_swept() {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let room = Room::within(parent.path()).expect("writable").expect("nobody sweeps here");
        drop(UnixListener::bind(room.socket()).expect("a short path"));
        let mut child = std::process::Command::new("true").spawn().expect("a small program");
        child.wait().expect("a child can be waited for");
        let dead = child.id();
        let make = |name: String, content: &str| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).expect("a new folder");
            std::fs::write(path.join(content), "").expect("a small file");
            path
        };
        make(format!("cadre-{dead}-00000a"), SOCKET);
        let locked = make(format!("cadre-{dead}-00000b"), SOCKET);
        let locked = File::open(locked).expect("a folder of this test");
        locked.lock().expect("nobody else locks it");
        make(format!("cadre-{dead}-00000c"), "thesis.txt");
        make(format!("cadre-{dead}-notes"), SOCKET);
        make(format!("cadre-{}-00000d", std::process::id()), SOCKET);
        let before = names(parent.path());

        sweep(parent.path());
        let swept = format!("cadre-{dead}-00000a");
        let mut left: Vec<_> = before.into_iter().filter(|it| *it != swept).collect();
        assert_eq!(names(parent.path()), left);

        let own = room.path.file_name().and_then(|it| it.to_str()).expect("a name").to_owned();
        drop(room);
        left.retain(|it| *it != own);
        assert_eq!(names(parent.path()), left);
    }
}
