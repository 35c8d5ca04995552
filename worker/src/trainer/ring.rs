//! Sums a vector over all trainers: ring all-reduce (reduce-scatter, then all-gather) over TCP.
//!
//! In: the same number of f32 on every trainer. Out: their sum, in place, the same bits everywhere.
//! One thread, no polling loop that spins: it sends to the next and receives from the previous trainer
//! as the sockets allow.
//!
//! Does not find the others' addresses, and does not retry: any failure ends the ring.
//!
//! Invariant: chunk c is summed in the order of ranks c, c + 1, …, c + world − 1 (modulo world), so the
//! bits do not depend on time.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// This trainer's place in the ring.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    world: usize,
    deadline: Duration,
    sequence: u64,
    links: Option<Links>,
    landing: Vec<f32>,
}

#[derive(Debug)]
struct Links {
    next: TcpStream,
    previous: TcpStream,
}

/// Who takes part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// This trainer.
    pub rank: usize,
    /// All trainers.
    pub world: usize,
    /// Names the job and attempt; a peer with another token is refused.
    pub token: u64,
}

impl Ring {
    /// A ring of one, which needs no link.
    pub fn alone() -> Self {
        Self::over(Place { rank: 0, world: 1, token: 0 }, Duration::MAX, None)
    }

    /// Links this trainer with the next (whose listener is at `next`) and the previous one (which
    /// connects to `listener`). `connect_within` bounds this call, `deadline` every later time without
    /// a byte from a peer: it has to be longer than the longest step of the slowest trainer.
    pub fn connect(
        place: Place,
        listener: &TcpListener,
        next: SocketAddr,
        connect_within: Duration,
        deadline: Duration,
    ) -> Result<Self, RingError> {
        let Place { rank, world, .. } = place;
        assert!(rank < world, "trainer {rank} of {world}");
        if world == 1 {
            return Ok(Self::over(place, deadline, None));
        }
        let until = Instant::now() + connect_within;
        let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
        let failed = |peer, what| move |source| RingError::Link { peer, what, source };
        // The listeners exist before their addresses are told, so one attempt is enough.
        let mut sender =
            TcpStream::connect_timeout(&next, left(until).max(Duration::from_millis(1)))
                .map_err(failed(to, "connecting"))?;
        sender.write_all(&hello(place)).map_err(failed(to, "greeting"))?;
        listener.set_nonblocking(true).map_err(failed(from, "accepting"))?;
        let mut receiver = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut wait = [PollFd::new(listener, PollFlags::IN)];
                    if !ready(&mut wait, left(until)).map_err(failed(from, "accepting"))? {
                        return Err(RingError::Late { peer: from, after: connect_within });
                    }
                }
                Err(error) => return Err(failed(from, "accepting")(error)),
            }
        };
        receiver.set_nonblocking(false).map_err(failed(from, "accepting"))?;
        receiver
            .set_read_timeout(Some(left(until).max(Duration::from_millis(1))))
            .map_err(failed(from, "accepting"))?;
        let mut greeting = [0; HELLO];
        receiver.read_exact(&mut greeting).map_err(failed(from, "greeting"))?;
        if greeting != hello(Place { rank: from, ..place }) {
            return Err(RingError::Stranger { peer: from });
        }
        for stream in [&sender, &receiver] {
            stream
                .set_nodelay(true)
                .and_then(|()| stream.set_nonblocking(true))
                .map_err(failed(from, "setting up the link"))?;
        }
        Ok(Self::over(place, deadline, Some(Links { next: sender, previous: receiver })))
    }

    fn over(place: Place, deadline: Duration, links: Option<Links>) -> Self {
        let Place { rank, world, .. } = place;
        Self { rank, world, deadline, sequence: 0, links, landing: Vec::new() }
    }

    /// Trainers in the ring.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Sums `values` over all trainers, in place.
    ///
    /// # Errors
    ///
    /// A peer that closed its link, sent nothing for the deadline, or sums another vector. The ring
    /// and `values` are then of no further use.
    pub fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), RingError> {
        let Self { rank, world, .. } = *self;
        if world == 1 {
            return Ok(());
        }
        self.agree(values.len())?;
        let length = values.len();
        let chunk = |index: usize| {
            let index = index % world;
            index * length / world..(index + 1) * length / world
        };
        let mut landing = std::mem::take(&mut self.landing);
        landing.resize(length.div_ceil(world), 0.0);
        for round in 0..world - 1 {
            let (send, receive) = (chunk(rank + world - round), chunk(rank + world - round - 1));
            let landed = &mut landing[..receive.len()];
            self.exchange(bytemuck::cast_slice(&values[send]), bytemuck::cast_slice_mut(landed))?;
            for (sum, value) in values[receive].iter_mut().zip(landed) {
                *sum += *value;
            }
        }
        for round in 0..world - 1 {
            let (send, receive) = (chunk(rank + 1 + world - round), chunk(rank + world - round));
            let landed = &mut landing[..receive.len()];
            self.exchange(bytemuck::cast_slice(&values[send]), bytemuck::cast_slice_mut(landed))?;
            values[receive].copy_from_slice(landed);
        }
        self.landing = landing;
        Ok(())
    }

    /// Checks with both neighbours that this is the same sum of as many numbers.
    fn agree(&mut self, length: usize) -> Result<(), RingError> {
        self.sequence += 1;
        let mut mine = [0; 16];
        mine[..8].copy_from_slice(&self.sequence.to_le_bytes());
        mine[8..].copy_from_slice(&(length as u64).to_le_bytes());
        let mut theirs = [0; 16];
        self.exchange(&mine, &mut theirs)?;
        if mine == theirs {
            Ok(())
        } else {
            Err(RingError::Disagree { peer: (self.rank + self.world - 1) % self.world })
        }
    }

    /// Sends to the next and receives from the previous trainer, both as they come.
    fn exchange(&mut self, mut send: &[u8], mut receive: &mut [u8]) -> Result<(), RingError> {
        let (to, from) = ((self.rank + 1) % self.world, (self.rank + self.world - 1) % self.world);
        let links = self.links.as_mut().expect("a ring of more than one has links");
        while !send.is_empty() || !receive.is_empty() {
            let mut moved = false;
            if !send.is_empty() {
                match links.next.write(send) {
                    Ok(0) => return Err(RingError::Closed { peer: to }),
                    Ok(count) => (send, moved) = (&send[count..], true),
                    Err(error) => refused(to, "sending", error)?,
                }
            }
            if !receive.is_empty() {
                match links.previous.read(receive) {
                    Ok(0) => return Err(RingError::Closed { peer: from }),
                    Ok(count) => (receive, moved) = (&mut receive[count..], true),
                    Err(error) => refused(from, "receiving", error)?,
                }
            }
            if moved {
                continue;
            }
            // Who has sent everything does not watch the next trainer, which may be done and gone; if it
            // broke down, that comes round through the previous one.
            let late = if receive.is_empty() { to } else { from };
            let mut wait = Vec::with_capacity(2);
            if !send.is_empty() {
                wait.push(PollFd::new(&links.next, PollFlags::OUT));
            }
            if !receive.is_empty() {
                wait.push(PollFd::new(&links.previous, PollFlags::IN));
            }
            match ready(&mut wait, self.deadline) {
                Ok(true) => {}
                Ok(false) => return Err(RingError::Late { peer: late, after: self.deadline }),
                Err(source) => return Err(RingError::Link { peer: late, what: "waiting", source }),
            }
        }
        Ok(())
    }
}

/// Nothing when the socket was merely not ready.
fn refused(peer: usize, what: &'static str, source: io::Error) -> Result<(), RingError> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, WouldBlock};
    let kind = source.kind();
    if matches!(kind, WouldBlock | Interrupted) {
        Ok(())
    } else if matches!(kind, BrokenPipe | ConnectionReset) {
        Err(RingError::Closed { peer })
    } else {
        Err(RingError::Link { peer, what, source })
    }
}

/// Waits for any of `wait`; false when the time is over.
fn ready(wait: &mut [PollFd<'_>], within: Duration) -> io::Result<bool> {
    // A duration beyond the system's range is as good as none.
    let limit = Timespec::try_from(within).ok();
    loop {
        match poll(wait, limit.as_ref()) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

const HELLO: usize = 32;

/// First bytes on a link. Numbers travel as they lie in memory, so the byte order is part of it.
fn hello(place: Place) -> [u8; HELLO] {
    let mut hello = [0; HELLO];
    hello[..8].copy_from_slice(b"cadrring");
    hello[8..12].copy_from_slice(&1_u32.to_ne_bytes());
    hello[12..16].copy_from_slice(&(place.rank as u32).to_le_bytes());
    hello[16..20].copy_from_slice(&(place.world as u32).to_le_bytes());
    hello[24..].copy_from_slice(&place.token.to_le_bytes());
    hello
}

/// Why the ring is broken.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A peer ended, or gave the ring up.
    #[error("trainer {peer} closed its link of the gradient ring; see its log for the reason")]
    Closed {
        /// Rank of the peer.
        peer: usize,
    },
    /// A peer sent nothing in time.
    #[error("trainer {peer} sent nothing to the gradient ring for {after:?}; see its log")]
    Late {
        /// Rank of the peer.
        peer: usize,
        /// The deadline.
        after: Duration,
    },
    /// A peer is in another sum, or sums a vector of another length: a bug.
    #[error("trainer {peer} sums another vector; all trainers need the same build and arguments")]
    Disagree {
        /// Rank of the peer.
        peer: usize,
    },
    /// Somebody else answered.
    #[error(
        "what connected as trainer {peer} belongs to another job or attempt; check the addresses"
    )]
    Stranger {
        /// Rank of the peer that was expected.
        peer: usize,
    },
    /// The system refused.
    #[error("link to trainer {peer} failed while {what}: {source}; check the network between them")]
    Link {
        /// Rank of the peer.
        peer: usize,
        /// What was done.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Runs one thread per trainer, each with its end of a ring.
    fn ring<T: Send>(
        world: usize,
        deadline: Duration,
        run: impl Fn(usize, Ring) -> T + Sync,
    ) -> Vec<T> {
        let listen = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let listeners: Vec<_> = (0..world).map(listen).collect();
        let run = &run;
        thread::scope(|scope| {
            let start = |rank: usize| {
                let next = listeners[(rank + 1) % world].local_addr().unwrap();
                let listener = &listeners[rank];
                scope.spawn(move || {
                    let place = Place { rank, world, token: 7 };
                    run(rank, Ring::connect(place, listener, next, SOON, deadline).unwrap())
                })
            };
            let threads: Vec<_> = (0..world).map(start).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        })
    }

    #[test]
    fn sums_have_the_same_bits_everywhere_and_every_time() {
        let value = |rank: usize, index: usize| ((rank * 31 + index * 7) as f32).sqrt() - 3.0;
        for (world, length) in [(1, 5), (2, 0), (2, 1), (2, 100_001), (3, 2), (3, 70_000), (5, 999)]
        {
            let sums = ring(world, SOON, |rank, mut ring| {
                let mut bits = Vec::new();
                for _ in 0..2 {
                    let mut values: Vec<_> = (0..length).map(|it| value(rank, it)).collect();
                    ring.all_reduce(&mut values).unwrap();
                    bits.push(values.iter().map(|it| it.to_bits()).collect::<Vec<_>>());
                }
                assert_eq!(bits[0], bits[1]);
                bits.remove(0)
            });
            assert!(sums.iter().all(|it| *it == sums[0]), "{world} trainers, {length} numbers");
            for (index, &sum) in sums[0].iter().enumerate() {
                let expected: f64 = (0..world).map(|it| f64::from(value(it, index))).sum();
                assert!((f64::from(f32::from_bits(sum)) - expected).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn a_trainer_that_goes_is_an_error_of_all_others_at_once() {
        let errors = ring(4, SOON, |rank, mut ring| {
            if rank == 2 {
                return String::new();
            }
            ring.all_reduce(&mut vec![1.0; 1 << 20]).unwrap_err().to_string()
        });
        for (rank, error) in errors.iter().enumerate().filter(|&(rank, _)| rank != 2) {
            assert!(error.contains("closed its link"), "{rank}: {error}");
        }
    }

    #[test]
    fn a_silent_trainer_is_late() {
        let silent = std::sync::Barrier::new(2);
        let errors = ring(2, Duration::from_millis(30), |rank, mut ring| {
            let error = (rank == 0).then(|| ring.all_reduce(&mut [1.0; 8]).unwrap_err());
            silent.wait();
            error
        });
        let error = errors[0].as_ref().unwrap().to_string();
        assert!(error.contains("trainer 1 sent nothing"), "{error}");
    }

    #[test]
    fn another_vector_and_another_job_are_refused() {
        let errors = ring(2, SOON, |rank, mut ring| {
            ring.all_reduce(&mut vec![0.0; rank + 1]).unwrap_err().to_string()
        });
        assert!(errors.iter().any(|it| it.contains("sums another vector")), "{errors:?}");

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&hello(Place { rank: 1, world: 2, token: 8 })).unwrap();
        let place = Place { rank: 0, world: 2, token: 7 };
        let elsewhere = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let next = elsewhere.local_addr().unwrap();
        let error = Ring::connect(place, &listener, next, SOON, SOON).unwrap_err();
        assert!(error.to_string().contains("another job or attempt"), "{error}");
        drop(elsewhere);
        let error = Ring::connect(place, &listener, next, SOON, SOON).unwrap_err();
        assert!(error.to_string().contains("failed while connecting"), "{error}");
    }
}
