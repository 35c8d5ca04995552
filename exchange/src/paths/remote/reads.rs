//! Begins reads from one peer, as far as its queues ask for them and the windows have room.
//!
//! In: queues of a way, bounds. Out: UCX reads in flight, each with its purpose.
//!
//! Invariant: the rows in flight do not exceed the windows, except for one small part of a peer that has nothing in flight.

use super::card::STRETCH_BYTES;
use super::pulls::{Step, Turn};
use super::way::{MOST_LOOKS, Stage, Way};
use super::{For, Remote};
use crate::peer::PeerId;
use crate::provider::PullId;
use crate::shared::{BUCKET_BYTES, ENTRY_BYTES, Found};
use crate::tcp::{Limits, Tcp};
use crate::ucx::Read;

/// Maximum bytes in flight from an idle peer while the windows are full.
const IDLE_PART_BYTES: u64 = 64 << 10;

impl Remote {
    /// Begins what the pulls of a peer can begin. An error ends its way.
    pub(super) fn read_from(
        &mut self,
        peer: PeerId,
        tcp: &mut Tcp,
        turn: &mut Turn,
    ) -> Result<(), String> {
        while !turn.is_over()
            && let Some(way) = self.ways.get(&peer)
            && let Some(&id) = way.to_read.first()
            && let Some(most) = room(self.limits, self.flying_bytes, way)
        {
            self.read_part(peer, id, most, tcp, turn)?;
        }
        while !turn.is_over()
            && let Some(way) = self.ways.get_mut(&peer)
            && way.looks < MOST_LOOKS
            && let Some(id) = way.to_look.pop_front()
        {
            // The pull may have ended already.
            let Some(reading) = self.reading.get(&id) else { continue };
            let (at, bytes) = match reading.step {
                Step::Finding => (Found::bucket(reading.flying.pull().key()), BUCKET_BYTES),
                Step::Again(found) => (found.place(), ENTRY_BYTES),
                Step::Keys(_) | Step::Rows(_) => continue,
            };
            turn.count(0);
            self.look(peer, at, bytes, For::Entry(id))?;
            if let Some(reading) = self.reading.get_mut(&id)
                && let Some(way) = self.ways.get_mut(&peer)
            {
                reading.is_looking = true;
                way.looks += 1;
            }
        }
        Ok(())
    }

    /// Begins the next part of a pull. Takes the pull out of the queue when all its parts have begun.
    fn read_part(
        &mut self,
        peer: PeerId,
        id: PullId,
        most: u64,
        tcp: &mut Tcp,
        turn: &mut Turn,
    ) -> Result<(), String> {
        let Some(way) = self.ways.get_mut(&peer) else { return Ok(()) };
        let reading = self.reading.get_mut(&id);
        let Some((reading, found)) = reading.and_then(|it| match it.step {
            Step::Rows(found) if !it.flying.is_begun() => Some((it, found)),
            Step::Rows(_) | Step::Finding | Step::Keys(_) | Step::Again(_) => None,
        }) else {
            way.to_read.remove(&id);
            self.look_again_if_whole(id);
            return Ok(());
        };
        let place = |at| Self::place(way, &found, at);
        let (begun, result) = reading.flying.go_on(tcp, &mut self.net, most, place);
        for it in begun {
            self.gets.insert(it.get, For::Rows(id, it.bytes));
            self.flying_bytes += it.bytes;
            way.flying_bytes += it.bytes;
        }
        turn.count(most);
        result
    }

    /// The address of a region's byte `at`, and the number of contiguous bytes from there on.
    fn place(way: &Way, found: &Found, at: u64) -> Option<(Read, u64)> {
        let Stage::Open { end, .. } = way.stage else { return None };
        let byte = found.spot.at.checked_add(at)?;
        let index = u32::try_from(byte / STRETCH_BYTES).ok()?;
        let key = (*way.keys.get(&(found.spot.arena, index))?)?;
        let within = byte % STRETCH_BYTES;
        Some((key.at(end, within), STRETCH_BYTES - within))
    }

    /// Begins to read `bytes` bytes of the board, from `at` on.
    pub(super) fn look(
        &mut self,
        peer: PeerId,
        at: u64,
        bytes: usize,
        what: For,
    ) -> Result<(), String> {
        let closed = || "its way is closed".to_owned();
        let way = self.ways.get(&peer).ok_or_else(closed)?;
        let (Stage::Looking { end, board, .. } | Stage::Open { end, board }) = way.stage else {
            return Err(closed());
        };
        let get = self.net.peek(board.at(end, at), bytes)?;
        self.gets.insert(get, what);
        Ok(())
    }
}

/// Maximum bytes of the next part; none while the windows are full.
fn room(limits: Limits, flying_bytes: u64, way: &Way) -> Option<u64> {
    let room = limits.window_bytes.saturating_sub(flying_bytes);
    let room = room.min(limits.peer_window_bytes.saturating_sub(way.flying_bytes));
    let part = limits.part_bytes.max(1);
    if part <= room {
        Some(part)
    } else if way.flying_bytes == 0 {
        Some(part.min(IDLE_PART_BYTES))
    } else {
        None
    }
}
