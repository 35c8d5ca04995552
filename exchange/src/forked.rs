//! Tells which sockets of a process belong to the exchange. A forked process inherits them and has to close them, or peers do not
//! see when the process that it was forked from ends.
//!
//! In: sockets that the exchange opens. Out: whether a descriptor is one of them, by the address that it is bound to. Nothing is
//! closed here. A port stays marked as long as the process lives.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, getsockname};

/// Ports of links and listeners, one bit each.
static PORTS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
/// Names of doors.
static DOORS: Mutex<Vec<SocketAddrUnix>> = Mutex::new(Vec::new());

/// The address that a socket is bound to.
enum Bound {
    Port(u16),
    Name(SocketAddrUnix),
}

fn bound(socket: impl AsFd) -> Option<Bound> {
    let address = getsockname(socket).ok()?;
    if address.address_family() == AddressFamily::UNIX {
        return address.try_into().ok().map(Bound::Name);
    }
    SocketAddr::try_from(address).ok().map(|it| Bound::Port(it.port()))
}

/// Index of a port's word in `PORTS`, and the mask of its bit.
fn place(port: u16) -> (&'static AtomicU64, u64) {
    (&PORTS[usize::from(port / 64)], 1 << (port % 64))
}

/// Marks a socket as the exchange's, and with it every socket that is accepted there.
pub(crate) fn remember(socket: impl AsFd) {
    match bound(socket) {
        Some(Bound::Port(port)) => {
            let (word, bit) = place(port);
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Some(Bound::Name(name)) => {
            if let Ok(mut doors) = DOORS.lock() {
                doors.push(name);
            }
        }
        None => {}
    }
}

/// Whether a descriptor is a socket of the exchange. A process that was forked while another thread opened a door does not
/// recognise sockets of doors.
pub fn is_own_socket(descriptor: impl AsFd) -> bool {
    match bound(descriptor) {
        Some(Bound::Port(port)) => {
            let (word, bit) = place(port);
            word.load(Ordering::Relaxed) & bit != 0
        }
        Some(Bound::Name(name)) => DOORS.try_lock().is_ok_and(|it| it.contains(&name)),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn links_and_listeners_that_were_remembered_are_own_sockets_and_others_are_not() {
        let [own, other] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        remember(&own);
        let link = TcpStream::connect(own.local_addr().unwrap()).unwrap();
        let (accepted, _) = own.accept().unwrap();
        assert!(is_own_socket(&own) && is_own_socket(&accepted));
        assert!(!is_own_socket(&other) && !is_own_socket(&link));
        remember(&link);
        assert!(is_own_socket(&link) && !is_own_socket(std::io::stdin()));
    }
}
