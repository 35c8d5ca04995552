//! Sums a vector over all trainers: ring all-reduce (reduce-scatter, then all-gather) over TCP.
//!
//! In: the same number of f32 on every trainer. Out: their sum, in place, the same bits everywhere.
//! One thread, no polling loop that spins: it sends to the next and receives from the previous trainer
//! as the sockets allow. How neighbours find each other is in `ring/meet.rs`.
//!
//! Does not find the others' addresses, and once it stands it does not retry: any failure ends the ring.
//!
//! Invariants: chunk c is summed in the order of ranks c, c + 1, …, c + world − 1 (modulo world), so the
//! bits do not depend on time; every wait ends when the interrupt is used.

mod meet;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use cadre_worker::session::links::{Greeter, PeerId, Stream, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// This trainer's place in the ring.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    world: usize,
    deadline: Duration,
    /// What all trainers train, by its digest.
    job: u64,
    sequence: u64,
    links: Option<Links>,
    landing: Vec<f32>,
}

#[derive(Debug)]
struct Links {
    next: Stream,
    previous: Stream,
    interrupt: Waker,
}

/// Addresses and identities of the ring's trainers.
#[derive(Debug)]
pub struct Members<'a> {
    /// Identifies this trainer, and proves that it belongs to the job.
    pub greeter: &'a Greeter,
    /// Where the previous trainer finds this one. It does not block.
    pub listener: &'a TcpListener,
    /// All trainers of this attempt and where they listen, by rank.
    pub trainers: &'a [(PeerId, SocketAddr)],
    /// Digest of what this trainer trains. All have to train the same.
    pub job: u64,
    /// Once used, ends every wait of the ring with [`RingError::Interrupted`].
    pub interrupt: &'a Waker,
}

impl Ring {
    /// A ring of one, which needs no link.
    pub fn alone() -> Self {
        let (deadline, landing) = (Duration::MAX, Vec::new());
        Self { rank: 0, world: 1, deadline, job: 0, sequence: 0, links: None, landing }
    }

    /// Links this trainer with the next and the previous one. It takes calls and calls itself until both links
    /// stand: one that does not listen yet, and any number of strangers, cost time only. `within` bounds this call,
    /// `deadline` every later time without a byte from a peer: it has to be longer than the longest step of the
    /// slowest trainer.
    ///
    /// # Errors
    ///
    /// [`RingError::Apart`] when a neighbour was not there in time, [`RingError::Interrupted`].
    ///
    /// # Panics
    ///
    /// When the greeter is of no trainer in the list.
    pub fn connect(
        members: &Members<'_>,
        within: Duration,
        deadline: Duration,
    ) -> Result<Self, RingError> {
        let (rank, world) = (usize::from(members.greeter.me().index), members.trainers.len());
        assert_eq!(members.greeter.me(), members.trainers[rank].0, "a list of other trainers");
        if world == 1 {
            return Ok(Self::alone());
        }
        let links = Some(meet::meet(members, within)?);
        let (job, landing) = (members.job, Vec::new());
        Ok(Self { rank, world, deadline, job, sequence: 0, links, landing })
    }

    /// Trainers in the ring.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Sums `values` over all trainers, in place.
    ///
    /// # Errors
    ///
    /// A peer that closed its link, sent nothing for the deadline, or sums another vector, or the interrupt. The
    /// ring and `values` are then of no further use.
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

    /// Checks with both neighbours that this is the same sum of as many numbers over as many trainers of one job.
    fn agree(&mut self, length: usize) -> Result<(), RingError> {
        self.sequence += 1;
        let mut mine = [0; 32];
        mine[..8].copy_from_slice(&self.sequence.to_le_bytes());
        mine[8..16].copy_from_slice(&(length as u64).to_le_bytes());
        // Numbers travel as they lie in memory, so the byte order is part of it.
        mine[16..20].copy_from_slice(&1_u32.to_ne_bytes());
        mine[20..24].copy_from_slice(&(self.world as u32).to_le_bytes());
        mine[24..].copy_from_slice(&self.job.to_le_bytes());
        let mut theirs = [0; 32];
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
        while !send.is_empty() || links.next.has_unsent() || !receive.is_empty() {
            let mut moved = false;
            if !send.is_empty() {
                match links.next.write(send) {
                    Ok(0) => return Err(RingError::Closed { peer: to }),
                    Ok(count) => (send, moved) = (&send[count..], true),
                    Err(error) => refused(to, "sending", error)?,
                }
            } else if links.next.has_unsent() {
                match links.next.flush() {
                    // That may have been all that there was to do.
                    Ok(()) => moved = true,
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
            // A trainer that has sent everything does not watch the next one, which may be done and
            // gone. If the next one broke down, the break reaches this trainer through the previous
            // one.
            let late = if receive.is_empty() { to } else { from };
            let mut wait = vec![PollFd::new(&links.interrupt, PollFlags::IN)];
            if !send.is_empty() || links.next.has_unsent() {
                wait.push(PollFd::new(&links.next, PollFlags::OUT));
            }
            if !receive.is_empty() {
                wait.push(PollFd::new(&links.previous, PollFlags::IN));
            }
            match ready(&mut wait, self.deadline) {
                Ok(_) if !wait[0].revents().is_empty() => return Err(RingError::Interrupted),
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

/// Waits until one of the sockets in `wait` is ready; false when the time is over.
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

/// Why the ring is broken, or never stood.
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
    /// A peer is in another sum, sums a vector of another length, or trains something else.
    #[error(
        "trainer {peer} trains something else; give all trainers the same build, arguments, documents (--data) and checkpoint"
    )]
    Disagree {
        /// Rank of the peer.
        peer: usize,
    },
    /// No link with a neighbour came about.
    #[error(
        "the gradient ring has no link {way} trainer {peer} after {after:?}: {why}; see its log, \
         and check the network between them"
    )]
    Apart {
        /// Rank of the peer.
        peer: usize,
        /// `to` or `from`.
        way: &'static str,
        /// The deadline.
        after: Duration,
        /// What came last of trying.
        why: String,
    },
    /// The job ends.
    #[error("the gradient ring was interrupted, because the job ends")]
    Interrupted,
    /// The system refused.
    #[error("link to trainer {peer} failed while {what}: {source}; check the network between them")]
    Link {
        /// Rank of the peer.
        peer: usize,
        /// The operation that failed.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests;
