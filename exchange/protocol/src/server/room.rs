//! Room for bundles: two planned phases, and a reserve for what other servers leave behind.
//!
//! Flow: bundles of the server's own slot wait by phase; the two earliest phases have room. Every other
//! bundle waits for the reserve, which takes a bundle once all its rows are readable, the earliest
//! first.
//!
//! Guarantees: a phase with room never waits for a later one. A bundle in the reserve waits for nobody:
//! its rows can be pulled, its readers have reserved their landing space. So the reserve is always free
//! again after a while, and the largest bundle of the step fits it.
//!
//! Assumptions: steps begin in order; one that does not gets the reserve only.

use std::collections::{BTreeMap, BTreeSet};

use super::{Command, Server};
use crate::{At, Bundle, End, Filler, Nanos, Step};

/// Phases with planned room at a time.
const AREAS: usize = 2;

/// What waits for room, and what has it.
#[derive(Debug)]
pub(super) struct Rooms {
    memory: u64,
    /// Bytes of a phase and of the reserve, by step begun and not over.
    sizes: BTreeMap<u64, Sizes>,
    /// Bundles of own slots, by phase, waiting.
    planned: BTreeMap<At, Vec<Bundle>>,
    /// Phases that have room, with the bundles that still hold some.
    areas: BTreeMap<At, usize>,
    /// Other bundles, waiting.
    pub(super) moved: BTreeSet<(At, Bundle)>,
    reserve_used: u64,
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
            planned: BTreeMap::new(),
            areas: BTreeMap::new(),
            moved: BTreeSet::new(),
            reserve_used: 0,
        }
    }

    pub(super) fn budget(&self) -> u64 {
        let phase = self.sizes.values().map(|it| it.phase).max().unwrap_or(0);
        let reserve = self.sizes.values().map(|it| it.reserve).max().unwrap_or(0);
        AREAS as u64 * phase + reserve
    }

    pub(super) fn begin(&mut self, step: &Step, fills: impl Fn(Filler) -> bool) -> Result<(), End> {
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
        let (needed, memory) = (self.budget(), self.memory);
        if needed > memory {
            Err(End::Memory { step: step.number(), needed, memory })
        } else {
            Ok(())
        }
    }

    pub(super) fn expect(&mut self, at: At, bundle: Bundle, planned: bool) {
        if planned {
            self.planned.entry(at).or_default().push(bundle);
        } else {
            self.moved.insert((at, bundle));
        }
    }

    /// The earliest phase that waits for planned room and gets it now.
    fn next_planned(&mut self) -> Option<(At, Vec<Bundle>)> {
        if self.areas.len() >= AREAS {
            return None;
        }
        let (at, bundles) = self.planned.pop_first()?;
        self.areas.insert(at, bundles.len());
        Some((at, bundles))
    }

    /// Takes room in the reserve, or says that there is none yet.
    fn reserve(&mut self, at: At, bytes: u64) -> Option<()> {
        let used = self.reserve_used + bytes;
        (used <= self.sizes[&at.step].reserve).then(|| self.reserve_used = used)
    }

    pub(super) fn free(&mut self, at: At, room: Room, bytes: u64) {
        match room {
            Room::Reserve => self.reserve_used -= bytes,
            Room::Planned => {
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
        self.planned.retain(|it, _| *it > at);
        self.moved.retain(|it| it.0 > at);
    }

    /// Forgets a step that is over and holds nothing.
    pub(super) fn over(&mut self, step: u64) {
        self.sizes.remove(&step);
    }
}

impl Server {
    /// Gives room to what may have it.
    pub(super) fn admit(&mut self, now: Nanos, out: &mut Vec<Command>) {
        while let Some((at, bundles)) = self.rooms.next_planned() {
            for bundle in bundles {
                self.activate(now, (at, bundle), Room::Planned, out);
            }
        }
        while let Some((at, bundle)) = self.next_moved() {
            let bytes = self.steps[&at.step].step.shape(at.phase).bundle_bytes(bundle);
            if self.rooms.reserve(at, bytes).is_none() {
                break;
            }
            self.rooms.moved.remove(&(at, bundle));
            self.activate(now, (at, bundle), Room::Reserve, out);
        }
    }

    /// The earliest moved bundle that would not wait for anybody, were it to have room.
    fn next_moved(&mut self) -> Option<(At, Bundle)> {
        if !self.settings.rules.reserve_takes_complete_bundles {
            return self.rooms.moved.first().copied();
        }
        let last = self.rung.last()?.0;
        let wanted = self.rooms.moved.range(..=(last, Bundle(u32::MAX)));
        wanted.copied().find(|&(at, bundle)| self.complete(at, bundle))
    }

    /// Whether all rows of a bundle are readable, and so all its readers are ready.
    pub(super) fn complete(&self, at: At, bundle: Bundle) -> bool {
        let parts = self.steps[&at.step].step.shape(at.phase).parts(bundle);
        parts.sources.iter().all(|&it| self.rung.contains(&(at, it)))
    }

    /// The earliest phase with work whose rows are all readable and which has not run.
    pub(super) fn owes(&self) -> Option<At> {
        let idle = |it: &(At, Bundle)| self.complete(it.0, it.1);
        let mut active = self.active.iter().filter(|it| it.1.unfinished()).map(|it| *it.0);
        let active = active.find(|it| !self.passed(it.0) && idle(it));
        let moved = self.rooms.moved.iter().copied().find(idle);
        active.into_iter().chain(moved).map(|it| it.0).min()
    }
}
