//! Hands descriptors of shared memory to processes of this machine that know its ticket, and fetches those of others.
//!
//! In: descriptors with their tickets; where a peer's door is, and a ticket. Out: file descriptors, over a Unix socket: a file,
//! or a name that is no file and is gone with its process.
//!
//! ```text
//! asker                              owner
//!   ticket (32 bytes)          ───▶
//!                              ◀───  one byte 1 with the descriptor, or nothing
//! ```
//!
//! Tickets come over links whose both ends have proved the job's secret, so they are known inside the job only; beside it
//! both processes have to be of one user. Threads of its own do all this, since an owner that is stopped answers nobody.
//!
//! Invariants: a question waits for [`PATIENCE`] at most, or a moment longer where this process was stopped; whoever says nothing
//! at a door holds up nobody else there; a descriptor that is received is closed by whoever gets it.

mod asker;
mod hall;

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, socket_with, sockopt,
};

pub(crate) use self::asker::Asker;
use self::hall::Hall;
use crate::waker::Waker;

/// Random bytes that entitle a process to one descriptor. It gets them over an authenticated link.
pub(crate) type Ticket = [u8; 32];

/// Longest question, and longest visit.
const PATIENCE: Duration = Duration::from_secs(5);

/// Shortest wait for the other side: an asker that was stopped for longer than its patience takes what is there.
const LAST_LOOK: Duration = Duration::from_millis(100);

type Arenas = Arc<Mutex<BTreeMap<Ticket, OwnedFd>>>;

/// Address of a door.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Site {
    /// A socket file.
    File(PathBuf),
    /// A name in the abstract socket namespace of the machine's or the pod's network.
    Name([u8; 32]),
}

impl Site {
    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(match self {
            Self::File(path) => SocketAddrUnix::new(path.as_path())?,
            Self::Name(name) => SocketAddrUnix::new_abstract_name(name)?,
        })
    }
}

/// A listening socket that hands out descriptors. Dropping it removes its file.
#[derive(Debug)]
pub(crate) struct Door {
    site: Site,
    arenas: Arenas,
    over: Arc<AtomicBool>,
    waker: Waker,
}

impl Door {
    /// Opens a door under an unused name.
    pub(crate) fn open(site: Site) -> io::Result<Self> {
        if let Site::File(path) = &site {
            match std::fs::remove_file(path) {
                // A socket file that an earlier process of this name left.
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let listener = listen(&site)?;
        let (arenas, over, waker) = (Arenas::default(), Arc::default(), Waker::new()?);
        let mut hall = Hall::new(listener, Arc::clone(&arenas))?;
        let (ended, woken) = (Arc::<AtomicBool>::clone(&over), waker.clone());
        std::thread::Builder::new().name("arenas".into()).spawn(move || {
            while !ended.load(Ordering::Acquire) {
                hall.turn(&woken);
            }
        })?;
        Ok(Self { site, arenas, over, waker })
    }

    /// Gives `descriptor` to every process that shows `ticket`, from now on.
    pub(crate) fn show(&self, ticket: Ticket, descriptor: OwnedFd) {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, descriptor);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.waker.wake();
        if let Site::File(path) = &self.site {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn listen(site: &Site) -> io::Result<UnixListener> {
    let kind = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &site.address()?)?;
    // The longest queue that the kernel allows.
    rustix::net::listen(&socket, i32::MAX)?;
    crate::forked::remember(&socket);
    Ok(UnixListener::from(socket))
}

/// Checks that the process at the other end belongs to our user.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let theirs = sockopt::socket_peercred(stream)?.uid;
    if theirs != rustix::process::geteuid() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the process at the other end is of another user",
        ));
    }
    Ok(())
}

/// Fetches the descriptor that the ticket entitles to, from the owner at a door. Blocks.
fn ask(site: &Site, ticket: &Ticket) -> io::Result<OwnedFd> {
    ask_within(site, ticket, PATIENCE)
}

/// As [`ask`], but waits at most `patience` in all.
fn ask_within(site: &Site, ticket: &Ticket, patience: Duration) -> io::Result<OwnedFd> {
    let asked = exchange(site, ticket, Instant::now() + patience);
    asked.map_err(|error| {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
            io::Error::new(io::ErrorKind::TimedOut, "the owner does not answer at its door")
        } else {
            error
        }
    })
}

fn exchange(site: &Site, ticket: &Ticket, until: Instant) -> io::Result<OwnedFd> {
    let kind = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    let address = site.address()?;
    // A connect waits too, when the door's queue is full.
    within(&socket, sockopt::Timeout::Send, until, || connect(&socket, &address))?;
    let mut stream = UnixStream::from(socket);
    check_user(&stream)?;
    stream.write_all(ticket)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let parts = &mut [IoSliceMut::new(&mut byte)];
    within(&stream, sockopt::Timeout::Recv, until, || {
        recvmsg(&stream, parts, &mut message, RecvFlags::CMSG_CLOEXEC).map(|_| ())
    })?;
    for part in message.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = part
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(descriptor);
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the owner gave no descriptor"))
}

/// Calls `call`, which waits for the other side, until it has ended or the time is over. The kernel interrupts such a wait when
/// the process is stopped and resumed, also where no signal has a handler.
fn within(
    socket: impl AsFd,
    side: sockopt::Timeout,
    until: Instant,
    mut call: impl FnMut() -> rustix::io::Result<()>,
) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        sockopt::set_socket_timeout(&socket, side, Some(left.max(LAST_LOOK)))?;
        match call() {
            Err(rustix::io::Errno::INTR) if !left.is_zero() => {}
            ended => return Ok(ended?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, SeekFrom};

    use rustix::net::SendAncillaryMessage;

    use super::*;

    #[test]
    fn who_shows_a_ticket_gets_the_descriptor_and_nobody_else_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        for site in [Site::File(path.clone()), Site::Name([b'a'; 32])] {
            let door = Door::open(site.clone()).unwrap();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"rows").unwrap();
            door.show([3; 32], file.into());
            for _ in 0..2 {
                let mut file = std::fs::File::from(ask(&site, &[3; 32]).unwrap());
                let mut text = String::new();
                file.seek(SeekFrom::Start(0)).unwrap();
                file.read_to_string(&mut text).unwrap();
                assert_eq!(text, "rows");
            }
            let error = ask(&site, &[4; 32]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            drop(door);
            assert!(!path.exists());
        }
        let file = Site::File(path.clone());
        assert!(ask(&file, &[3; 32]).is_err());
        // A file that an earlier process left is no obstacle.
        std::fs::write(&path, b"").unwrap();
        drop(Door::open(file).unwrap());
    }

    #[test]
    fn whoever_says_nothing_at_a_door_holds_up_nobody_else() {
        let site = Site::Name([b'c'; 32]);
        let door = Door::open(site.clone()).unwrap();
        door.show([1; 32], tempfile::tempfile().unwrap().into());
        let connected = || {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            let socket = socket.unwrap();
            connect(&socket, &site.address().unwrap()).unwrap();
            UnixStream::from(socket)
        };
        // Stopped before they have said anything, or in the middle of it.
        let mut silent: Vec<_> = (0..hall::PLACES + 10).map(|_| connected()).collect();
        for stream in silent.iter_mut().step_by(2) {
            let _ = stream.write_all(&[1; 31]);
        }
        assert!(ask(&site, &[1; 32]).is_ok());
        drop(silent);
        assert!(ask(&site, &[1; 32]).is_ok());
    }

    #[test]
    fn an_owner_that_lets_nobody_in_is_given_up() {
        let site = Site::Name([b'd'; 32]);
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.unwrap();
        rustix::net::bind(&socket, &site.address().unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        // The first has the place that there is; it is not heard either.
        for _ in 0..3 {
            let error = ask_within(&site, &[1; 32], Duration::from_millis(20)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        }
    }

    #[test]
    fn descriptors_that_nobody_asked_for_are_closed() {
        let site = Site::Name([b'e'; 32]);
        let listener = listen(&site).unwrap();
        let answer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 32]).unwrap();
            // A pipe's end tells when its last copy is closed.
            let (from, to) = rustix::pipe::pipe().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut message = rustix::net::SendAncillaryBuffer::new(&mut space);
            let descriptors = [to.as_fd(); 3];
            message.push(SendAncillaryMessage::ScmRights(&descriptors));
            let flags = rustix::net::SendFlags::NOSIGNAL;
            rustix::net::sendmsg(&stream, &[io::IoSlice::new(&[1])], &mut message, flags).unwrap();
            from
        });
        let descriptor = ask(&site, &[1; 32]).unwrap();
        let from = answer.join().unwrap();
        drop(descriptor);
        assert_eq!(rustix::io::read(&from, &mut [0; 1]), Ok(0), "somebody holds one still");
    }
}
