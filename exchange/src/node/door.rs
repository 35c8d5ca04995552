//! Hands descriptors of arenas to processes of this machine that have read a slip, and fetches those of others.
//!
//! In: arenas with their tickets; the path of a peer's door and a ticket. Out: file descriptors, over a Unix socket.
//!
//! ```text
//! asker                              owner
//!   ticket (32 bytes)          ───▶
//!                              ◀───  one byte 1 with the descriptor, or nothing
//! ```
//!
//! Slips come over links whose both ends have proved the job's secret, so a ticket is known inside the job only; beside it
//! both processes have to be of one user. Threads of its own do all this, since an owner that is stopped answers nobody.
//!
//! Invariant: every call ends within [`PATIENCE`], and a descriptor that is received is closed by whoever gets it.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

use super::slip::Ticket;

/// How long the other side may think.
const PATIENCE: Duration = Duration::from_secs(5);

type Arenas = Arc<Mutex<BTreeMap<Ticket, OwnedFd>>>;

/// A socket at which descriptors can be had. Its file goes when this is dropped.
#[derive(Debug)]
pub(super) struct Door {
    path: PathBuf,
    arenas: Arenas,
    over: Arc<AtomicBool>,
}

impl Door {
    /// Opens a door at `path`, which nobody uses.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        match std::fs::remove_file(&path) {
            // What an earlier process of this name has left.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let listener = UnixListener::bind(&path)?;
        let (arenas, over) = (Arenas::default(), Arc::new(AtomicBool::new(false)));
        let (held, ended) = (Arc::clone(&arenas), Arc::clone(&over));
        std::thread::Builder::new().name("arenas".into()).spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::Acquire) {
                    return;
                }
                if let Err(error) = stream.and_then(|it| answer(it, &held)) {
                    tracing::debug!(%error, "a descriptor was asked for and not given");
                }
            }
        })?;
        Ok(Self { path, arenas, over })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// From now on whoever shows `ticket` gets `descriptor`.
    pub(super) fn show(&self, ticket: Ticket, descriptor: OwnedFd) {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, descriptor);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // Ends the thread's wait; where that fails, the next asker does.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn prepare(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let theirs = sockopt::socket_peercred(stream)?.uid;
    if theirs != rustix::process::geteuid() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the process at the other end is of another user",
        ));
    }
    Ok(())
}

fn answer(mut stream: UnixStream, arenas: &Arenas) -> io::Result<()> {
    prepare(&stream)?;
    let mut ticket: Ticket = [0; 32];
    stream.read_exact(&mut ticket)?;
    let arenas = arenas.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptor = arenas.get(&ticket).map(OwnedFd::try_clone).transpose()?;
    drop(arenas);
    let descriptor =
        descriptor.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "an unknown ticket"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    message.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&stream, &[IoSlice::new(&[1])], &mut message, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Asks the owner at `path` for the arena of `ticket`.
pub(super) fn ask(path: &Path, ticket: &Ticket) -> io::Result<OwnedFd> {
    let mut stream = UnixStream::connect(path)?;
    prepare(&stream)?;
    stream.write_all(ticket)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let parts = &mut [IoSliceMut::new(&mut byte)];
    recvmsg(&stream, parts, &mut message, RecvFlags::CMSG_CLOEXEC)?;
    for part in message.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = part
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(descriptor);
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the owner gave no descriptor"))
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, SeekFrom};

    use super::*;

    #[test]
    fn who_shows_a_ticket_gets_the_descriptor_and_nobody_else_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let door = Door::open(path.clone()).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"rows").unwrap();
        door.show([3; 32], file.into());
        for _ in 0..2 {
            let mut file = std::fs::File::from(ask(door.path(), &[3; 32]).unwrap());
            let mut text = String::new();
            file.seek(SeekFrom::Start(0)).unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "rows");
        }
        let error = ask(&path, &[4; 32]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        drop(door);
        assert!(!path.exists());
        assert!(ask(&path, &[3; 32]).is_err());
        // A file that an earlier process left is no obstacle.
        std::fs::write(&path, b"").unwrap();
        drop(Door::open(path).unwrap());
    }
}
