//! A stream between two processes, as it is or encrypted. It never blocks.
//!
//! In: a socket, and whether to encrypt. Out: [`Stream`], read and written like a socket. Two things differ from one:
//! * bytes that were accepted may still wait in the channel for the socket ([`Stream::has_unsent`]),
//! * bytes that came may wait in the channel while the socket is silent ([`Stream::has_unread`]).
//!
//! An end without a farewell is an end like any other: frames have lengths, so what is cut is noticed.
//!
//! Invariant: while a read has not said that nothing is there, more may be in the channel.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustls::Connection;

use super::tls::{self, ChannelSecret, Tls};

/// See the module.
pub struct Stream {
    socket: TcpStream,
    channel: Option<Box<Channel>>,
}

struct Channel {
    connection: Connection,
    /// Bytes that have arrived and are not read.
    unread: usize,
    /// Whether anything came.
    heard: bool,
}

impl Stream {
    /// The connecting end, over a socket that does not block.
    pub(super) fn opener(socket: TcpStream, tls: Option<&Tls>) -> Self {
        Self::new(socket, tls.map(Tls::opener))
    }

    /// The listening end, over a socket that does not block.
    pub(super) fn acceptor(socket: TcpStream, tls: Option<&Tls>) -> Self {
        Self::new(socket, tls.map(Tls::acceptor))
    }

    fn new(socket: TcpStream, connection: Option<Connection>) -> Self {
        let channel =
            connection.map(|connection| Box::new(Channel { connection, unread: 0, heard: false }));
        Self { socket, channel }
    }

    /// Breaks it for both ends.
    pub(super) fn cut(&self) {
        // One that is not connected is broken already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// What went wrong with the socket since this was asked last.
    pub(super) fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    /// What only the two ends of the channel know. A channel has none before the peer's first word is read.
    pub(super) fn secret(&self) -> io::Result<ChannelSecret> {
        let channel = self.channel.as_ref();
        channel.map(|it| tls::secret(&it.connection).map_err(not_agreed)).transpose()
    }

    /// Whether bytes that were accepted wait for the socket: a flush sends them when it is writable.
    pub fn has_unsent(&self) -> bool {
        self.channel.as_ref().is_some_and(|it| it.connection.wants_write())
    }

    /// Whether anything came that is no word yet.
    pub(super) fn has_heard(&self) -> bool {
        self.channel.as_ref().is_some_and(|it| it.heard)
    }

    /// Whether the peer has begun a TLS channel correctly. This is as easy to forge as a hello.
    pub(super) fn has_begun(&self) -> bool {
        self.channel.as_ref().is_some_and(|it| it.connection.negotiated_cipher_suite().is_some())
    }

    /// Whether there are bytes to read without asking the socket.
    pub(super) fn has_unread(&self) -> bool {
        self.channel.as_ref().is_some_and(|it| it.unread > 0)
    }

    /// Whether another read may bring something, after one that brought `read` bytes and had room for `asked`. A channel brings
    /// one record at a time.
    pub(super) fn may_have_more(&self, read: usize, asked: usize) -> bool {
        self.channel.is_some() || read == asked
    }

    /// Whether the channel is still being opened; bytes that are written meanwhile wait in it.
    pub(super) fn is_opening(&self) -> bool {
        self.channel.as_ref().is_some_and(|it| it.connection.is_handshaking())
    }
}

impl Channel {
    /// Makes sure that there is something to read; false at the end.
    fn fill(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        while self.unread == 0 {
            if self.connection.read_tls(&mut socket)? == 0 {
                return Ok(false);
            }
            self.heard = true;
            let state = self.connection.process_new_packets();
            // The answers of a handshake, or why it failed: the peer may still hear it.
            let sent = self.send(socket);
            let state = state.map_err(not_agreed)?;
            self.unread = state.plaintext_bytes_to_read();
            // What came counts, whatever became of what we said.
            if self.unread == 0 {
                sent?;
                if state.peer_has_closed() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Sends what waits; whether that was all.
    fn send(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Takes in as much as there is room for, once nothing waits any more.
    fn write(
        &mut self,
        socket: &TcpStream,
        take: impl FnOnce(&mut rustls::Writer<'_>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if !self.send(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = take(&mut self.connection.writer())?;
        self.send(socket)?;
        // Only a handshake that is not over can leave no room.
        if bytes == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(bytes) }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(into)])
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(channel) = &mut self.channel else { return self.socket.read_vectored(into) };
        if !channel.fill(&self.socket)? {
            return Ok(0);
        }
        let mut total = 0;
        for slice in into {
            if channel.unread == 0 {
                break;
            }
            let bytes = channel.connection.reader().read(slice)?;
            channel.unread -= bytes;
            total += bytes;
        }
        Ok(total)
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.channel {
            None => self.socket.write(from),
            Some(channel) => channel.write(&self.socket, |it| it.write(from)),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.channel {
            None => self.socket.write_vectored(from),
            Some(channel) => channel.write(&self.socket, |it| it.write_vectored(from)),
        }
    }

    /// Sends what waits in the channel; [`io::ErrorKind::WouldBlock`] while the socket takes no more.
    fn flush(&mut self) -> io::Result<()> {
        let Some(channel) = &mut self.channel else { return Ok(()) };
        if channel.send(&self.socket)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.channel.is_some() { "encrypted" } else { "plain" };
        write!(out, "{how} {:?}", self.socket)
    }
}

fn not_agreed(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, NotAgreed(error))
}

/// The channel broke, or never was one.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}; is encryption the same in all processes of the job, or does somebody change what is sent?"
)]
struct NotAgreed(#[source] rustls::Error);
