//! A pull whose bytes UCX reads. It is kept here while something may write to its landing.
//!
//! In: a claimed pull, and where its bytes are. Out: reads, and the pull when it has no read in flight.
//!
//! Invariant: the landing of a pull stays where it is from its claim to its end, and its bytes are the target of this pull alone; so
//! a read may write there as long as the pull is here.

#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::net::{Begun, GetId, Net, Read};
use crate::tcp::{Pull, Tcp};

/// See the module.
pub(crate) struct Flying {
    pull: Pull,
    flying: usize,
}

/// A read of rows that was begun.
pub(crate) struct Fly {
    pub(crate) get: GetId,
    pub(crate) bytes: u64,
}

impl Flying {
    pub(crate) fn new(pull: Pull) -> Self {
        Self { pull, flying: 0 }
    }

    pub(crate) fn pull(&self) -> &Pull {
        &self.pull
    }

    /// Restarts its deadline.
    pub(crate) fn watch_anew(&mut self, tcp: &mut Tcp) {
        tcp.watch_anew(&mut self.pull);
    }

    /// The publication that the pull has to bring.
    pub(crate) fn is_to_be_of(&mut self, number: u64) {
        self.pull.is_to_be_of(number);
    }

    /// Whether reads of the pull are in flight.
    pub(crate) fn is_flying(&self) -> bool {
        self.flying > 0
    }

    /// Whether all its reads were begun.
    pub(crate) fn is_begun(&self) -> bool {
        self.pull.is_whole()
    }

    /// Begins to read the next bytes, at most `most`. `place` returns where a byte of the region is, and the contiguous bytes
    /// from there on. An error ends the way; reads that began before go on.
    pub(crate) fn go_on(
        &mut self,
        tcp: &mut Tcp,
        net: &mut Net,
        most: u64,
        place: impl Fn(u64) -> Option<(Read, u64)>,
    ) -> (Vec<Fly>, Result<(), String>) {
        let (mut begun, mut result) = (Vec::new(), Ok(()));
        tcp.copy_on(&mut self.pull, most, |mut from, mut to| {
            while result.is_ok() && !to.is_empty() {
                let Some((read, left)) = place(from) else {
                    result = Err("rows lie where no key is for".to_owned());
                    return;
                };
                let most = (left as usize).min(net.reach(NonNull::from(&mut *to).cast()));
                let (now, later) = to.split_at_mut(to.len().min(most));
                let (place, bytes) = (NonNull::from(&mut *now).cast(), now.len());
                // SAFETY: these bytes are the target of this pull alone, and its landing stays until it ends, which is not before
                // its reads have ended or their worker is gone.
                let is_begun = unsafe { net.begin(read, place, bytes) };
                match is_begun {
                    Ok(Begun::Over) => {}
                    Ok(Begun::Flying(get)) => {
                        self.flying += 1;
                        begun.push(Fly { get, bytes: bytes as u64 });
                    }
                    Err(why) => result = Err(why),
                }
                from += bytes as u64;
                to = later;
            }
        });
        (begun, result)
    }

    /// A read of it has ended.
    pub(crate) fn ended(&mut self) {
        self.flying -= 1;
    }

    /// Returns the pull once nothing writes for it any more.
    ///
    /// # Panics
    ///
    /// While reads are under way.
    pub(crate) fn into_pull(self) -> Pull {
        assert_eq!(self.flying, 0, "a pull whose landing is written to stays here");
        self.pull
    }
}
