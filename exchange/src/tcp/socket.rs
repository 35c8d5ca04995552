//! Sockets that never block, and what can go wrong with a link.
//!
//! In: addresses and streams. Out: streams, counts of bytes, [`LinkError`]. Buffers of the sockets are left to
//! the kernel's own tuning: a fixed size would switch it off.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

use super::frame::FrameError;
use super::greeting::GreetingError;
use super::stream::Stream;
use crate::forked;

/// Questions to a machine that is silent, before the link is closed.
const QUESTIONS: u32 = 4;

/// Opens a listener on a free port.
pub(super) fn listen(address: IpAddr) -> io::Result<TcpListener> {
    let address = SocketAddr::new(address, 0);
    let socket = open(address)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    // The longest queue that the system allows, since many peers connect at once when a job starts.
    socket.listen(4096)?;
    forked::remember(&socket);
    Ok(socket.into())
}

/// A stream that is to be dialled later.
pub(super) fn undialled(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = open(address)?;
    forked::remember(&socket);
    Ok(socket.into())
}

/// Begins to connect; the stream is writable as soon as that ended.
pub(super) fn dial(address: SocketAddr, silence: Silence) -> io::Result<TcpStream> {
    let socket = open(address)?;
    socket.set_tcp_nodelay(true)?;
    silence.bound(&socket)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
        other => other?,
    }
    forked::remember(&socket);
    Ok(socket.into())
}

/// Prepares a stream that was accepted.
pub(super) fn prepare(stream: &TcpStream, silence: Silence) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    silence.bound(stream)?;
    stream.set_nodelay(true)
}

/// What makes the kernel close a link.
#[derive(Clone, Copy, Debug)]
pub(super) enum Silence {
    /// The other machine answers no keepalive for so long while nothing is sent. What is sent and
    /// not acknowledged ends the link after the system's own limit of tries, a quarter of an hour.
    /// The machine of a process that reads nothing still answers.
    OfMachine(Duration),
    /// The other machine acknowledges neither data nor keepalives for so long, or its process reads
    /// nothing while its buffers are full: the kernel counts that too (`TCP_USER_TIMEOUT`).
    OfProcess(Duration),
}

impl Silence {
    fn bound(self, socket: impl AsFd) -> io::Result<()> {
        let (Self::OfMachine(silence) | Self::OfProcess(silence)) = self;
        let each = (silence / (QUESTIONS + 1)).max(Duration::from_secs(1));
        sockopt::set_tcp_keepidle(&socket, each)?;
        sockopt::set_tcp_keepintvl(&socket, each)?;
        sockopt::set_tcp_keepcnt(&socket, QUESTIONS)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        if let Self::OfProcess(silence) = self {
            let millis = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
            sockopt::set_tcp_user_timeout(&socket, millis)?;
        }
        Ok(())
    }
}

fn open(address: SocketAddr) -> io::Result<Socket> {
    // The standard flags of socket2 close it on exec.
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Reads available bytes; `None` if there are none.
pub(super) fn read(stream: &mut Stream, into: &mut [u8]) -> Result<Option<usize>, LinkError> {
    progress(|| stream.read(into))
}

/// Reads available bytes into several buffers, one after the other.
pub(super) fn read_vectored(
    stream: &mut Stream,
    into: &mut [IoSliceMut<'_>],
) -> Result<Option<usize>, LinkError> {
    progress(|| stream.read_vectored(into))
}

/// Writes what there is room for: `None` when there is none.
pub(super) fn write(stream: &mut Stream, from: &[u8]) -> Result<Option<usize>, LinkError> {
    progress(|| stream.write(from))
}

/// Writes what there is room for from several places, one after the other.
pub(super) fn write_vectored(
    stream: &mut Stream,
    from: &[IoSlice<'_>],
) -> Result<Option<usize>, LinkError> {
    progress(|| stream.write_vectored(from))
}

/// Writes the few bytes of a greeting, for which a fresh socket always has room.
pub(super) fn write_whole(stream: &mut Stream, from: &[u8]) -> Result<(), LinkError> {
    let whole = write(stream, from)? == Some(from.len());
    // Bytes that are written before a channel is open wait in it.
    if whole && (stream.is_opening() || !stream.has_unsent()) {
        Ok(())
    } else {
        Err(LinkError::NoRoom)
    }
}

/// Sends what waits in the stream; whether that was all.
pub(super) fn flush(stream: &mut Stream) -> Result<bool, LinkError> {
    Ok(progress(|| stream.flush().map(|()| 1))?.is_some())
}

fn progress(mut call: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>, LinkError> {
    loop {
        match call() {
            Ok(0) => return Err(LinkError::Ended),
            Ok(bytes) => return Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(LinkError::Io(error)),
        }
    }
}

/// Why a link is closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("the peer closed the link, or died")]
    Ended,
    #[error("the link broke: {0}")]
    Io(#[source] io::Error),
    #[error("the peer has no room for a greeting")]
    NoRoom,
    #[error("the greeting took too long: is the peer stopped?")]
    Silent,
    #[error(
        "the peer turned the link away {tries} times without a word: it has no room, since strangers knock at its port, or it ends"
    )]
    Crowded { tries: u32 },
    #[error("a reply to a pull that was not next: the peer does not speak this protocol")]
    WrongReply,
    #[error("more pulls at once than a link may have: the peer does not speak this protocol")]
    TooManyPulls,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Greeting(#[from] GreetingError),
}
