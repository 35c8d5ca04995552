//! Memory that pulls of a node write to, and which of its bytes are reserved.
//!
//! In: landed memory, the local bytes of pulls. Out: it back, once no pull writes to it. Nothing is copied here.
//!
//! Invariant: a byte is the target of one pull at a time.

use std::collections::BTreeMap;

use crate::peer::Piece;
use crate::provider::{Error, LandingId};

/// See the module.
#[derive(Debug)]
pub(super) struct Landings<M> {
    last: u64,
    held: BTreeMap<LandingId, Landing<M>>,
}

#[derive(Debug)]
struct Landing<M> {
    memory: M,
    bytes: u64,
    /// First byte and end of what a pull writes.
    busy: BTreeMap<u64, u64>,
    outstanding: usize,
    discarded: bool,
}

impl<M> Default for Landings<M> {
    fn default() -> Self {
        Self { last: 0, held: BTreeMap::new() }
    }
}

impl<M> Landings<M> {
    pub(super) fn land(&mut self, memory: M, bytes: u64) -> LandingId {
        self.last += 1;
        let id = LandingId(self.last);
        let (busy, outstanding) = (BTreeMap::new(), 0);
        self.held.insert(id, Landing { memory, bytes, busy, outstanding, discarded: false });
        id
    }

    pub(super) fn take(&mut self, id: LandingId) -> Result<M, Error> {
        let landing = self.held.get(&id).filter(|it| !it.discarded);
        match landing.ok_or(Error::UnknownLanding { landing: id })?.outstanding {
            0 => Ok(self.held.remove(&id).expect("it was just looked at").memory),
            outstanding => Err(Error::Busy { landing: id, outstanding }),
        }
    }

    pub(super) fn is_busy(&self, id: LandingId) -> bool {
        self.held.get(&id).is_some_and(|it| it.outstanding > 0)
    }

    pub(super) fn discard(&mut self, id: LandingId) {
        if let Some(landing) = self.held.get_mut(&id) {
            landing.discarded = true;
            self.forget(id);
        }
    }

    /// The memory of a landing that a pull has reserved.
    pub(super) fn memory(&self, id: LandingId) -> &M {
        &self.held.get(&id).expect("a reserved landing stays").memory
    }

    /// The memory of a landing that is neither taken nor discarded.
    pub(super) fn open(&mut self, id: LandingId) -> Option<&mut M> {
        let landing = self.held.get_mut(&id).filter(|it| !it.discarded);
        landing.map(|it| &mut it.memory)
    }

    /// Reserves the local bytes of `pieces` for a pull; the error is why that is not possible.
    pub(super) fn reserve(&mut self, id: LandingId, pieces: &[Piece]) -> Result<(), String> {
        let landing = self.held.get_mut(&id).filter(|it| !it.discarded);
        let landing = landing.ok_or_else(|| format!("landing {} was taken or discarded", id.0))?;
        for (index, piece) in pieces.iter().enumerate().filter(|(_, it)| it.bytes > 0) {
            let end = piece.local.checked_add(piece.bytes).filter(|end| *end <= landing.bytes);
            let before = end.and_then(|end| landing.busy.range(..end).next_back());
            let reason = match (end, before) {
                (None, _) => format!("a piece ends behind the landing of {} bytes", landing.bytes),
                (Some(_), Some((_, &other))) if other > piece.local => {
                    format!("byte {} of the landing is the target of a pull already", piece.local)
                }
                (Some(end), _) => {
                    landing.busy.insert(piece.local, end);
                    continue;
                }
            };
            for piece in pieces[..index].iter().filter(|it| it.bytes > 0) {
                landing.busy.remove(&piece.local);
            }
            return Err(reason);
        }
        landing.outstanding += 1;
        Ok(())
    }

    /// Frees what [`Self::reserve`] has reserved.
    pub(super) fn release(&mut self, id: LandingId, pieces: &[Piece]) {
        let landing = self.held.get_mut(&id).expect("a reserved landing stays");
        for piece in pieces.iter().filter(|it| it.bytes > 0) {
            landing.busy.remove(&piece.local);
        }
        landing.outstanding -= 1;
        self.forget(id);
    }

    fn forget(&mut self, id: LandingId) {
        if self.held.get(&id).is_some_and(|it| it.discarded && it.outstanding == 0) {
            self.held.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(local: &[(u64, u64)]) -> Vec<Piece> {
        local.iter().map(|&(local, bytes)| Piece { remote: 0, local, bytes }).collect()
    }

    #[test]
    fn a_byte_is_the_target_of_one_pull_at_a_time() {
        let mut landings = Landings::default();
        let id = landings.land((), 100);
        let first = pieces(&[(10, 10), (50, 10), (7, 0)]);
        landings.reserve(id, &first).unwrap();
        for refused in
            [&[(19, 1)][..], &[(0, 11)], &[(0, 101)], &[(u64::MAX, 2)], &[(20, 5), (24, 1)]]
        {
            assert!(landings.reserve(id, &pieces(refused)).is_err(), "{refused:?}");
        }
        let second = pieces(&[(20, 30), (0, 10), (60, 40)]);
        landings.reserve(id, &second).unwrap();
        assert!(landings.is_busy(id));
        assert!(matches!(landings.take(id), Err(Error::Busy { outstanding: 2, .. })));
        landings.release(id, &first);
        landings.reserve(id, &first).unwrap();
        landings.discard(id);
        assert!(landings.reserve(id, &[]).is_err());
        landings.release(id, &first);
        landings.release(id, &second);
        assert!(matches!(landings.take(id), Err(Error::UnknownLanding { .. })));
    }
}
