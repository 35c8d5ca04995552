//! Measures what a path gives on this machine: two nodes of this process, and pulls from one to the other.
//!
//! In: which links, and whether rows take shared memory. Out: a [`Trial`], or why there is none. It listens on the loopback alone,
//! and nothing of it stays.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::buffer::Buffer;
use crate::paths::{Path, Paths, PathsConfig, Sharing};
use crate::peer::{PeerId, Piece, RegionKey, Role};
use crate::pool::Pool;
use crate::provider::{Error, Event, LandingId, Provider as _, PullError, PullRequest};
use crate::tcp::{Encryption, Limits, TcpConfig};
#[cfg(test)]
use crate::ucx::Transports;

const OWNER: PeerId = PeerId { role: Role::Trainer, index: 0, incarnation: 0 };
const READER: PeerId = PeerId { role: Role::Server, index: 0, incarnation: 0 };
const KEY: RegionKey = RegionKey([0; 4]);
/// Bytes of a pull.
const BYTES: usize = 16 << 20;
/// Number of pulls; the fastest counts.
const TURNS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(5);

/// The measured rate of a path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Trial {
    /// The path that the bytes took.
    pub path: Path,
    /// Bytes a second of the fastest pull.
    pub bytes_per_second: u64,
}

/// Why a path gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// A node cannot be opened.
    #[error(transparent)]
    Open(#[from] Error),
    /// There is no memory for rows that others can read.
    #[error("this machine gives no memory that processes can share: {0}")]
    Memory(#[source] std::io::Error),
    /// The link was closed.
    #[error("{reason}")]
    Closed {
        /// Why.
        reason: String,
    },
    /// A pull failed.
    #[error("a pull on this machine failed: {0}")]
    Pull(#[from] PullError),
}

/// Tries links with this encryption, and shared memory where `sharing` says so.
///
/// # Errors
///
/// [`TrialError`].
pub fn try_path(encryption: Encryption, sharing: Sharing) -> Result<Trial, TrialError> {
    let mut secret = [0; 32];
    let filled = getrandom(&mut secret, GetRandomFlags::empty());
    assert_eq!(filled, Ok(secret.len()), "the kernel has 32 random bytes");
    let open = |me| {
        let (bind, limits) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Limits::default());
        let tcp = TcpConfig { bind, me, secret, data_version: 0, encryption, limits };
        Paths::open(PathsConfig { tcp, sharing })
    };
    let (mut owner, mut reader) = (open(OWNER)?, open(READER)?);
    let mut rows = match sharing {
        Sharing::Off => Buffer::zeroed(BYTES),
        Sharing::Auto | Sharing::Required | Sharing::Ucx(_) => {
            Pool::shared(BYTES).map_err(TrialError::Memory)?.take(BYTES)
        }
    };
    rows.bytes_mut().fill(1);
    owner.publish(KEY, Arc::new(rows));
    reader.connect(OWNER, &owner.address());
    let (over, waker) = (AtomicBool::new(false), owner.waker());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                owner.poll(PATIENCE, &mut Vec::new());
            }
        });
        let tried = measure(&mut reader);
        over.store(true, Ordering::Release);
        waker.wake();
        tried
    })
}

fn measure(reader: &mut Paths) -> Result<Trial, TrialError> {
    let landing = reader.land(Buffer::zeroed(BYTES));
    // Opens the link and, where there is one, the way.
    pull(reader, landing)?;
    let mut fastest = Duration::MAX;
    let before = reader.traffic();
    for _ in 0..TURNS {
        let began = Instant::now();
        pull(reader, landing)?;
        fastest = fastest.min(began.elapsed());
    }
    let (now, all) = (reader.traffic(), (TURNS * BYTES) as u64);
    let path = if now.shared_bytes - before.shared_bytes == all {
        Path::Shared
    } else if now.ucx_bytes - before.ucx_bytes == all {
        Path::Ucx
    } else {
        Path::Tcp
    };
    let rate = BYTES as f64 / fastest.as_secs_f64();
    Ok(Trial { path, bytes_per_second: rate as u64 })
}

fn pull(reader: &mut Paths, landing: LandingId) -> Result<(), TrialError> {
    let pieces = vec![Piece { remote: 0, local: 0, bytes: BYTES as u64 }];
    let (peer, key, patience) = (OWNER, KEY, PATIENCE);
    let wanted = reader.pull(PullRequest { peer, key, pieces, landing, patience });
    let mut events = Vec::new();
    loop {
        reader.poll(PATIENCE, &mut events);
        let mut ended = None;
        for event in events.drain(..) {
            match event {
                // The reason why the link ended says more than the pull that ended with it.
                Event::Closed { error: reason, .. }
                | Event::Unfit { reason, .. }
                | Event::Broken { reason } => {
                    return Err(TrialError::Closed { reason });
                }
                Event::Pulled { pull, result } if pull == wanted => ended = Some(result),
                Event::Pulled { .. }
                | Event::Connected(_)
                | Event::Message { .. }
                | Event::Begun { .. }
                | Event::Room { .. }
                | Event::Refused { .. } => {}
            }
        }
        if let Some(ended) = ended {
            return Ok(ended.map(drop)?);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_says_by_which_path_rows_come() {
        let path = |encryption, sharing| try_path(encryption, sharing).map(|it| it.path).unwrap();
        assert_eq!(path(Encryption::Off, Sharing::Off), Path::Tcp);
        assert_eq!(path(Encryption::Tcp, Sharing::Off), Path::Tcp);
        assert_eq!(path(Encryption::Tcp, Sharing::Required), Path::Shared);
        let ucx = |over| try_path(Encryption::Off, Sharing::Ucx(over)).map(|it| it.path);
        if let Err(why) = crate::ucx::ucx_here() {
            return println!("skipped: {why}");
        }
        for over in [Transports::SharedMemory, Transports::Sockets] {
            assert_eq!(ucx(over).unwrap(), Path::Ucx, "{over:?}");
        }
        let beside = Sharing::Ucx(Transports::SharedMemory);
        assert_eq!(path(Encryption::Tcp, beside), Path::Ucx, "links are encrypted, rows are not");
        if crate::ucx::rdma_devices().is_empty() {
            let said = ucx(Transports::Rdma).unwrap_err().to_string();
            assert!(
                said.starts_with("this machine has no device that UCX can use for RDMA"),
                "{said}"
            );
        }
        let refused = try_path(Encryption::Required, beside);
        assert!(refused.unwrap_err().to_string().starts_with("UCX sends rows in the clear"));
    }
}
