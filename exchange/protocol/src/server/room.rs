//! Room for bundles in a server's memory: two planned phases, and a reserve for bundles of lost servers.
//!
//! Flow: bundles of the server's own slot wait by phase; the two earliest phases have room. Every other
//! bundle waits for the reserve, which takes bundles once all their rows are readable, the earliest
//! first, and small ones beside each other. Where memory is too small for all that two live steps
//! would hold, a phase gets planned room only if it leaves the largest reserve of all steps up to its
//! own; until it does, its bundles go through the reserve, like moved ones. The same holds while a step older than theirs may still begin.
//!
//! Guarantees: a step whose two phases and reserve fit the memory, or that plans nothing here, runs, whatever the
//! steps beside it need and in whatever order they begin. Take the earliest phase that is not passed, of step S.
//! Phases before it hold room only until their pulls end. A bundle in the reserve waits for nobody: its rows can be
//! pulled, and its readers have reserved their landing space. Works that run ahead (`ahead`), whose copies of rows
//! are in the reserve too, wait for nobody either. So the reserve becomes empty. Later phases with planned room may
//! wait for S. But each got room only when S had begun here, and left the reserve of S free. No bundle of S is
//! larger than that reserve, so each has its turn.
//!
//! Assumptions: `pass` says when a phase is passed, `over` when a step holds nothing more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Command, Server};
use crate::{At, Bundle, End, Filler, Nanos, Step};

/// How many phases have planned room at a time.
const AREAS: usize = 2;
/// The reserve takes bundles beside each other up to the memory divided by this, also where the largest one is smaller: small ones
/// one after the other would cost a round of messages each.
const BESIDE: u64 = 8;

/// What waits for room, and what has it.
#[derive(Debug)]
pub(super) struct Rooms {
    memory: u64,
    /// Bytes of a phase and of the reserve, by step begun and not over.
    sizes: BTreeMap<u64, Sizes>,
    /// The last step that was here and is over.
    over: Option<u64>,
    passed: Option<At>,
    /// Bundles of own slots and their bytes, by phase, waiting.
    planned: BTreeMap<At, Waiting>,
    /// Bundles of phases that have planned room, which are not active yet: a slice of them becomes so at a time.
    admitted: VecDeque<(At, Bundle, u64)>,
    /// Phases that have planned room, with the bundles that still hold some.
    areas: BTreeMap<At, usize>,
    areas_used: u64,
    /// Other bundles, waiting.
    pub(super) moved: BTreeSet<(At, Bundle)>,
    reserve_used: u64,
    /// No bundle gets the reserve before something changes: what waits, what can be pulled, or what is free.
    idle: bool,
    /// Of the bundles that wait for the reserve, those before this one are not complete: to walk over all of them for each that
    /// leaves the reserve would take the square of their number.
    pub(super) first: (At, Bundle),
}

/// Before all bundles.
pub(super) const FRONT: (At, Bundle) = (At::new(0, 0), Bundle(0));

/// Bundles of a phase, ascending, with their bytes, and all of these together.
#[derive(Debug, Default)]
struct Waiting {
    bundles: VecDeque<(Bundle, u64)>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    phase: u64,
    reserve: u64,
}

/// Where a bundle has its room.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Room {
    Planned,
    Reserve,
}

impl Rooms {
    pub(super) fn new(memory: u64) -> Self {
        Self {
            memory,
            sizes: BTreeMap::new(),
            over: None,
            passed: None,
            planned: BTreeMap::new(),
            admitted: VecDeque::new(),
            areas: BTreeMap::new(),
            areas_used: 0,
            moved: BTreeSet::new(),
            reserve_used: 0,
            idle: true,
            first: FRONT,
        }
    }

    /// Something changed: any bundle that waits may get the reserve.
    pub(super) fn look_again(&mut self) {
        self.idle = false;
        self.first = FRONT;
    }

    pub(super) fn budget(&self) -> u64 {
        let phase = self.sizes.values().map(|it| it.phase).max().unwrap_or(0);
        let reserve = self.sizes.values().map(|it| it.reserve).max().unwrap_or(0);
        (AREAS as u64 * phase + reserve.max(self.memory / BESIDE)).min(self.memory)
    }

    pub(super) fn begin(&mut self, step: &Step, fills: impl Fn(Filler) -> bool) -> Result<(), End> {
        self.look_again();
        let mine: Vec<bool> =
            step.table().fillers.iter().map(|it| it.is_some_and(&fills)).collect();
        let mut sizes = Sizes { phase: 0, reserve: 0 };
        for (shape, assignment) in step.shapes().iter().zip(&step.table().assignments) {
            let mut phase = 0;
            for bundle in shape.bundle_ids() {
                let bytes = shape.bundle_bytes(bundle);
                let slot = shape.bundles()[bundle.0 as usize].slot;
                let planned = assignment[bundle.0 as usize] == Some(slot);
                phase += if planned && mine[slot.0 as usize] { bytes } else { 0 };
                sizes.reserve = sizes.reserve.max(bytes);
            }
            sizes.phase = sizes.phase.max(phase);
        }
        self.sizes.insert(step.number(), sizes);
        let (needed, memory) = (AREAS as u64 * sizes.phase + sizes.reserve, self.memory);
        // Without work of its own it takes over what it can hold: trainers have less memory than servers.
        if sizes.phase > 0 && needed > memory {
            Err(End::Memory { step: step.number(), needed, memory })
        } else {
            Ok(())
        }
    }

    pub(super) fn expect(
        &mut self,
        at: At,
        bundle: Bundle,
        bytes: u64,
        planned: bool,
    ) -> Result<(), End> {
        if bytes > self.memory {
            return Err(End::Memory { step: at.step, needed: bytes, memory: self.memory });
        }
        self.look_again();
        if planned {
            let waiting = self.planned.entry(at).or_default();
            waiting.bundles.push_back((bundle, bytes));
            waiting.bytes += bytes;
        } else {
            self.moved.insert((at, bundle));
        }
        Ok(())
    }

    /// Whether every older step that may still run has begun here.
    fn older_begun(&self, step: u64) -> bool {
        let over =
            |older| self.over >= Some(older) || self.passed.is_some_and(|it| it.step > older);
        let mut may_run = (0..step).rev().take_while(|&it| !over(it));
        may_run.all(|it| self.sizes.contains_key(&it))
    }

    /// Gives the earliest phase that waits for planned room such, if it may have it now.
    fn admit_phase(&mut self) -> Option<()> {
        let (&at, waiting) = self.planned.first_key_value()?;
        if self.areas.len() >= AREAS || !self.older_begun(at.step) {
            return None;
        }
        let used = self.areas_used + waiting.bytes;
        let reserve = self.sizes.range(..=at.step).map(|it| it.1.reserve).max().unwrap_or(0);
        if used + reserve.max(self.reserve_used) > self.memory {
            return None;
        }
        let (at, Waiting { bundles, .. }) = self.planned.pop_first()?;
        self.areas.insert(at, bundles.len());
        self.areas_used = used;
        self.admitted.extend(bundles.into_iter().map(|(bundle, bytes)| (at, bundle, bytes)));
        Some(())
    }

    /// Whether bundles that have room, or may get some, are not active yet.
    pub(super) fn is_admitting(&self) -> bool {
        !self.admitted.is_empty() || !self.idle
    }

    /// The earliest bundle up to a phase that may go through the reserve and is `complete`: a moved one, or
    /// one of the phase that would have planned room if there were more memory.
    fn first(&self, last: At, complete: impl Fn(&(At, Bundle)) -> bool) -> Option<(At, Bundle)> {
        let mut moved = self.moved.range(self.first..).copied().take_while(|it| it.0 <= last);
        let refused = self.planned.first_key_value().filter(|_| self.areas.len() < AREAS);
        let mut refused = refused.into_iter().flat_map(|(&at, it)| {
            let known = it.bundles.partition_point(|it| (at, it.0) < self.first);
            it.bundles.range(known..).map(move |it| (at, it.0))
        });
        moved.find(&complete).into_iter().chain(refused.find(&complete)).min()
    }

    /// Whether the reserve has room now.
    pub(super) fn may_lend(&self, at: At, bytes: u64) -> bool {
        let used = self.reserve_used + bytes;
        used <= self.sizes[&at.step].reserve && self.areas_used + used <= self.memory
    }

    /// Whether the reserve has room for the smallest bundle there may be.
    pub(super) fn may_lend_anything(&self) -> bool {
        let most = self.sizes.values().map(|it| it.reserve).max().unwrap_or(0);
        self.reserve_used < most && self.areas_used + self.reserve_used < self.memory
    }

    /// Takes room in the reserve, or says that there is none yet.
    pub(super) fn lend(&mut self, at: At, bytes: u64) -> Option<()> {
        self.may_lend(at, bytes).then(|| self.reserve_used += bytes)
    }

    /// Takes room in the reserve for a waiting bundle, or says that there is none yet.
    fn reserve(&mut self, at: At, bundle: Bundle, bytes: u64) -> Option<()> {
        let used = self.reserve_used + bytes;
        let most = self.sizes[&at.step].reserve.max(self.memory / BESIDE);
        if used > most || self.areas_used + used > self.memory {
            return None;
        }
        self.reserve_used = used;
        if !self.moved.remove(&(at, bundle))
            && let Some(waiting) = self.planned.get_mut(&at)
        {
            if let Ok(index) = waiting.bundles.binary_search_by_key(&bundle, |it| it.0) {
                waiting.bundles.remove(index);
                waiting.bytes -= bytes;
            }
            if waiting.bundles.is_empty() {
                self.planned.remove(&at);
            }
        }
        Some(())
    }

    pub(super) fn free(&mut self, at: At, room: Room, bytes: u64) {
        self.idle = false;
        match room {
            Room::Reserve => self.reserve_used -= bytes,
            Room::Planned => {
                // The bundles of another phase may go through the reserve now.
                self.first = FRONT;
                self.areas_used -= bytes;
                let left = self.areas.get_mut(&at).expect("a planned bundle's phase has room");
                *left -= 1;
                if *left == 0 {
                    self.areas.remove(&at);
                }
            }
        }
    }

    /// Nothing up to `at` needs room any more.
    pub(super) fn pass(&mut self, at: At) {
        self.look_again();
        self.passed = self.passed.max(Some(at));
        while self.planned.first_key_value().is_some_and(|it| *it.0 <= at) {
            self.planned.pop_first();
        }
        // Phases get room in their order.
        while let Some((phase, _, bytes)) = self.admitted.pop_front_if(|it| it.0 <= at) {
            self.free(phase, Room::Planned, bytes);
        }
        while self.moved.first().is_some_and(|it| it.0 <= at) {
            self.moved.pop_first();
        }
    }

    /// Forgets a step that is over and holds nothing.
    pub(super) fn over(&mut self, step: u64) {
        self.look_again();
        self.sizes.remove(&step);
        self.over = self.over.max(Some(step));
    }
}

impl Server {
    /// Gives room to what may have it.
    pub(super) fn admit(&mut self, now: Nanos, out: &mut Vec<Command>) {
        while self.rooms.admit_phase().is_some() {}
        while self.slices[1] > 0
            && let Some((at, bundle, _)) = self.rooms.admitted.pop_front()
        {
            self.slices[1] -= 1;
            self.activate(now, (at, bundle), Room::Planned, out);
        }
        while !self.rooms.idle && self.slices[1] > 0 {
            let next = self.next_reserved().and_then(|(at, bundle)| {
                self.rooms.first = (at, bundle);
                let bytes = self.steps[&at.step].step.shape(at.phase).bundle_bytes(bundle);
                self.rooms.reserve(at, bundle, bytes).map(|()| (at, bundle))
            });
            match next {
                Some(key) => {
                    self.slices[1] -= 1;
                    self.activate(now, key, Room::Reserve, out);
                }
                None => self.rooms.idle = true,
            }
        }
    }

    /// The earliest bundle that would not wait for anybody, were it to have room in the reserve.
    fn next_reserved(&self) -> Option<(At, Bundle)> {
        if !self.settings.rules.reserve_takes_complete_bundles {
            return self.rooms.moved.first().copied();
        }
        let last = self.rung.last()?.0;
        self.rooms.first(last, |it| self.complete(it.0, it.1))
    }

    /// Whether all rows of a bundle are readable, and so all its readers are ready.
    pub(super) fn complete(&self, at: At, bundle: Bundle) -> bool {
        let parts = self.steps[&at.step].step.shape(at.phase).parts(bundle);
        parts.sources.iter().all(|&it| self.rung.contains(&(at, it)))
    }
}
