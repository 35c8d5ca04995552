//! Opens ways: pulls the owner's card, looks at its board once, and fetches the keys of its memory.
//!
//! In: connected peers, and their cards and keys. Out: ways that are open, or shut.
//!
//! Invariant: an answer counts only for the way that asked for it.

use std::collections::BTreeSet;
use std::time::Instant;

use super::card::{self, CARD, CARD_BYTES, Card, KEY_BYTES, PackedKey, STRETCH_BYTES};
use super::pulls::Step;
use super::way::{Key, Onward, Stage, Way};
use super::{Asked, For, PATIENCE, Remote};
use crate::buffer::Buffer;
use crate::paths::copies::Better;
use crate::paths::{NO_UCX, Path, Paths};
use crate::peer::{PeerId, Piece, RegionKey};
use crate::provider::{Event, LandingId, Provider as _, PullError, PullId, PullRequest};
use crate::shared::{ENTRY_BYTES, Found};
use crate::ucx::{Transports, is_rdma};

impl Remote {
    /// The path that a peer's rows take now.
    pub(in crate::paths) fn path(&self, peer: PeerId) -> Option<Path> {
        let path = self.ways.get(&peer).map(Way::path);
        // Rows take the link, though a way is open, while landings cannot be registered.
        path.map(|it| if it == Path::Ucx && self.falls_back() { Path::Tcp } else { it })
    }

    fn falls_back(&self) -> bool {
        self.unheld.is_some() && !self.required
    }

    /// Why the way to a peer is shut.
    pub(in crate::paths) fn why_shut(&self, peer: PeerId) -> Option<&str> {
        let unheld = self.unheld.as_deref().filter(|_| self.falls_back());
        self.ways.get(&peer).and_then(|it| it.why_shut().or(unheld))
    }

    /// Whether a way that is shut has rested long enough.
    pub(in crate::paths) fn is_to_be_tried(&self, peer: PeerId, now: Instant) -> bool {
        let again = |it: &Way| matches!(it.stage, Stage::Shut { again, .. } if again <= now);
        self.ways.get(&peer).is_some_and(again)
    }
}

impl Paths {
    /// Asks a peer for its card.
    pub(in crate::paths) fn ask_card(&mut self, peer: PeerId) {
        // Pulls that UCX may still write for begin again later.
        let (left, _) = self.close_way(peer);
        let Some(remote) = &mut self.remote else { return };
        remote.rounds += 1;
        let round = remote.rounds;
        let before = remote.ways.remove(&peer);
        remote.ways.insert(peer, Way::asked(round, before, self.demanded.is_shut(peer)));
        for pull in left {
            self.begin_again(pull);
        }
        self.ask_owner(peer, round, CARD, CARD_BYTES, None);
    }

    /// Asks a peer for its card, unless it was asked already or the way's pause is not over.
    pub(in crate::paths) fn ask_card_if_due(&mut self, peer: PeerId) {
        let now = self.tcp.now();
        let is_due = |it: &Remote| !it.ways.contains_key(&peer) || it.is_to_be_tried(peer, now);
        if self.remote.as_ref().is_some_and(is_due) && self.tcp.is_opening(peer) {
            self.ask_card(peer);
        }
    }

    fn ask_owner(
        &mut self,
        peer: PeerId,
        round: u64,
        key: RegionKey,
        bytes: usize,
        stretch: Option<(u64, u32)>,
    ) {
        let landing = self.tcp.land(Buffer::zeroed(bytes));
        let pieces = vec![Piece { remote: 0, local: 0, bytes: bytes as u64 }];
        let request = PullRequest { peer, key, pieces, landing, patience: PATIENCE };
        let pull = self.tcp.pull(request);
        if let Some(remote) = &mut self.remote {
            remote.asked.insert(pull, Asked { peer, round, landing, stretch });
        }
    }

    /// Takes the card or key that a peer has published, if this pull asked for it.
    pub(in crate::paths) fn take_said(
        &mut self,
        pull: PullId,
        result: &Result<u64, PullError>,
    ) -> bool {
        let asked = self.remote.as_mut().and_then(|it| it.asked.remove(&pull));
        let Some(Asked { peer, round, landing, stretch }) = asked else { return false };
        let said = self.said(landing, result);
        let is_there = |it: &Remote| it.ways.get(&peer).is_some_and(|it| it.round == round);
        if self.remote.as_ref().is_some_and(is_there) {
            let is_odd = stretch.is_some() || !matches!(result, Err(PullError::Gone));
            let taken = match stretch {
                None => said.and_then(|it| self.take_card(peer, round, &it)),
                Some(place) => said.and_then(|it| self.take_key(peer, place, &it)),
            };
            if let Err(why) = taken {
                self.leave(peer, &why, is_odd, &Onward::Link(BTreeSet::new()));
            }
        }
        true
    }

    fn said(
        &mut self,
        landing: LandingId,
        result: &Result<u64, PullError>,
    ) -> Result<Buffer, String> {
        let landed = self.tcp.take(landing).map_err(|it| it.to_string());
        match result {
            Ok(_) => landed,
            Err(PullError::Gone) => Err(NO_UCX.to_owned()),
            Err(why) => Err(format!("it does not say how its rows are read: {why}")),
        }
    }

    /// Opens the way to the owner of a card, and looks at its board for the first time.
    fn take_card(&mut self, peer: PeerId, round: u64, said: &Buffer) -> Result<(), String> {
        let card = Card::decode(said.bytes()).ok_or("its card is none of this build")?;
        let until = self.tcp.now() + PATIENCE;
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let end = remote.net.connect(&card.address).map_err(|it| it.to_string())?;
        let ready = remote.net.watch_reading(|it| self.tcp.watch_device(it));
        let id = match ready.and_then(|()| remote.net.unpack(end, &card.board.key)) {
            Ok(id) => id,
            Err(why) => {
                remote.net.close(end);
                return Err(why.to_string());
            }
        };
        let board = Key { id, start: card.board.start };
        if let Some(way) = remote.ways.get_mut(&peer) {
            way.stage = Stage::Looking { end, board, until };
        }
        remote.look(peer, 0, ENTRY_BYTES, For::Look(peer, round))
    }

    fn take_key(&mut self, peer: PeerId, place: (u64, u32), said: &Buffer) -> Result<(), String> {
        let PackedKey { start, key } =
            PackedKey::decode(said.bytes()).ok_or("its key is none of this build")?;
        let Some(remote) = &mut self.remote else { return Ok(()) };
        let Some(way) = remote.ways.get_mut(&peer) else { return Ok(()) };
        let Some(end) = way.end() else { return Ok(()) };
        let id = remote.net.unpack(end, &key).map_err(|it| it.to_string())?;
        way.keys.insert(place, Some(Key { id, start }));
        let theirs = remote.reading.iter().filter(|it| {
            it.1.peer() == peer
                && matches!(it.1.step, Step::Keys(found) if found.spot.arena == place.0)
        });
        for id in theirs.map(|it| *it.0).collect::<Vec<_>>() {
            remote.read_if_keys_are_here(id);
        }
        Ok(())
    }

    /// The first look at a peer's board has ended.
    pub(super) fn seen(&mut self, peer: PeerId) {
        let Some(remote) = &mut self.remote else { return };
        let over = remote.transports.names();
        let Some(way) = remote.ways.get_mut(&peer) else { return };
        let emulates = |lanes: &str| remote.transports == Transports::Rdma && !is_rdma(lanes);
        if let Some(end) = way.end()
            && emulates(&remote.net.lanes(end))
        {
            let why = "UCX would emulate reads with the owner's processor";
            return self.leave(peer, why, true, &Onward::Link(BTreeSet::new()));
        }
        way.open(peer, over);
        // The flag stays set until the endpoint is open; the way is logged once.
        let is_told = std::mem::replace(&mut way.is_told, true);
        if remote.required {
            if !is_told {
                self.events.push(Event::Connected(peer));
            }
            self.begin_waiting_remote(peer);
        }
    }

    /// Begins the pulls that waited for the way to a peer.
    fn begin_waiting_remote(&mut self, peer: PeerId) {
        let waiting = self.remote.as_mut().map(|it| it.waiting.take_from(peer));
        for mut pull in waiting.into_iter().flatten() {
            self.tcp.watch_anew(&mut pull);
            self.begin_remote(pull, Better::No);
        }
    }

    /// Pulls the keys of a region that this process lacks.
    pub(super) fn ask_keys(&mut self, id: PullId, found: &Found) {
        let Some(remote) = &mut self.remote else { return };
        let Some(reading) = remote.reading.get(&id) else { return };
        let (peer, reach) = (reading.peer(), reading.flying.pull().reach());
        let Some(way) = remote.ways.get_mut(&peer) else { return };
        let (round, spot) = (way.round, found.spot);
        let end =
            spot.at.checked_add(reach).and_then(|it| it.checked_next_multiple_of(STRETCH_BYTES));
        let stretches = end.map(|end| spot.at / STRETCH_BYTES..end / STRETCH_BYTES);
        // The bound is larger than the memory of any machine.
        let sound =
            stretches.filter(|it| it.end < 1 << 24 && it.end.saturating_sub(it.start) < 1 << 16);
        let Some(stretches) = sound else {
            let why = "its region ends behind every arena";
            return self.leave(peer, why, true, &Onward::Link(BTreeSet::new()));
        };
        let mut wanted = Vec::new();
        for index in stretches {
            let place = (spot.arena, index as u32);
            way.keys.entry(place).or_insert_with(|| {
                wanted.push(place);
                None
            });
        }
        for place in wanted {
            self.ask_owner(peer, round, card::key_region(place), KEY_BYTES, Some(place));
        }
    }
}
