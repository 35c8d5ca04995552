//! What to plan: layout, heads, slots and costs of one nano-batch.
//!
//! In: numbers from the step's header. Out: a [`Problem`] whose [`Problem::check`] says that all
//! arithmetic of planning stays inside 64 bits.
//!
//! It holds no state of servers (who fills a slot, who is alive): that is the view's, and reaches
//! the planner only through [`crate::reassign`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::memory;
use crate::{
    Costs, Document, DocumentId, Error, Layout, Links, Mask, RankId, TILE_ROWS, Tolerance,
};

/// Most cost of all work, and most head start: finishing times at weight 1 fit 64 bits.
pub(crate) const MOST_COST: u64 = 1 << 57;
/// Longest time in which one slot alone may do all work, head start included: any finish, and twice as much, fits 62 bits.
const MOST_TIME: u64 = 1 << 60;
/// Longest time, in nanoseconds, that one link may need for all bytes: the sum of a phase forward and one backward fits 62 bits.
const MOST_NANOSECONDS: u64 = 1 << 61;
/// Most bytes of all rows, with keys in every slot.
const MOST_BYTES: u64 = 1 << 62;
const MOST_SLOTS: usize = 1 << 20;

/// Index of a slot in [`Problem::slots`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct SlotId(pub u32);

/// Heads of the model's attention.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Heads {
    /// Query heads, a multiple of `kv`.
    pub query: u16,
    /// Key and value heads.
    pub kv: u16,
    /// Elements of one head.
    pub dim: u16,
}

impl Heads {
    /// Query heads that read the KV heads `kv_heads`.
    pub fn query_heads(self, kv_heads: Range<u16>) -> Range<u16> {
        let ratio = self.query / self.kv.max(1);
        kv_heads.start.saturating_mul(ratio)..kv_heads.end.saturating_mul(ratio)
    }

    /// Number of query heads that read the KV heads `kv_heads`.
    pub(crate) fn query_count(self, kv_heads: &Range<u16>) -> u64 {
        self.query_heads(kv_heads.clone()).len() as u64
    }
}

/// A place for a server.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Slot {
    /// Speed, 100 for the nominal one. Zero is a **standby** slot: the plan gives it nothing, but
    /// [`crate::reassign`] may, as if its weight were 100.
    pub weight: u32,
    /// Cost that the slot's processor works off before it begins with attention.
    pub head_start: u64,
    /// The rank at which the slot stands; `None` for a dedicated slot.
    pub home: Option<RankId>,
    /// Bytes for two phases and the reserve.
    pub memory: u64,
}

impl Slot {
    /// Whether the plan leaves it empty.
    pub fn is_standby(&self) -> bool {
        self.weight == 0
    }

    /// When the slot is done with `load`, in cost at weight 100; standby counts as 100.
    pub fn finish(&self, load: u64) -> u64 {
        let weight = if self.is_standby() { 100 } else { self.weight };
        // In a checked problem, whose loads stay below 2^57, nothing saturates.
        self.head_start.saturating_add(load.saturating_mul(100) / u64::from(weight))
    }
}

/// Everything a plan depends on.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Problem {
    /// Documents and where their rows are.
    pub layout: Layout,
    /// Heads of the model.
    pub heads: Heads,
    /// Bytes of an element on the wire: 2 (bf16) or 4 (f32).
    pub element_bytes: u8,
    /// Processors of a rank and of a slot, each with an equal share of the KV heads and a link of its
    /// own. With one, KV heads of a document may part; with more, all move together.
    pub lanes: u16,
    /// Places for servers, by [`SlotId`].
    pub slots: Vec<Slot>,
    /// What work costs.
    pub costs: Costs,
    /// How fast rows travel.
    #[serde(default)]
    pub links: Links,
    /// How uneven a plan may be.
    #[serde(default)]
    pub tolerance: Tolerance,
}

impl Problem {
    /// Checks all numbers, but not whether the slots' memory suffices.
    ///
    /// # Errors
    ///
    /// The first number that is out of range, by name.
    pub fn check(&self) -> Result<(), Error> {
        let Self { layout, heads, element_bytes, lanes, slots, costs, links, tolerance: _ } = self;
        let Heads { query, kv, dim } = *heads;
        if query == 0 || kv == 0 || dim == 0 || !query.is_multiple_of(kv) {
            return Err(Error::BadHeads { query, kv, dim });
        }
        if !matches!(element_bytes, 2 | 4) {
            return Err(Error::BadElement { bytes: *element_bytes });
        }
        if *lanes == 0 || !kv.is_multiple_of(*lanes) {
            return Err(Error::BadLanes { lanes: *lanes, kv });
        }
        let rows = costs.task_rows;
        if rows == 0 || !rows.is_multiple_of(TILE_ROWS) || rows > 1 << 24 {
            return Err(Error::BadTaskRows { rows });
        }
        if slots.is_empty() {
            return Err(Error::NoSlot);
        }
        if slots.len() > MOST_SLOTS {
            let (count, most) = (slots.len() as u64, MOST_SLOTS as u64);
            return Err(Error::TooMany { things: "slots", count, most });
        }
        for (slot, it) in (0..).map(SlotId).zip(slots) {
            let ranks = layout.ranks().len() as u32;
            if let Some(home) = it.home.filter(|home| home.0 >= ranks) {
                return Err(Error::UnknownHome { slot, home, ranks });
            }
            if it.head_start > MOST_COST {
                let head_start = it.head_start;
                return Err(Error::LongHeadStart { slot, head_start, most: MOST_COST });
            }
        }
        links.check(self.places().1)?;
        self.check_work()
    }

    /// All work stays below [`MOST_COST`], all bytes below [`MOST_BYTES`] and all times below [`MOST_TIME`] and
    /// [`MOST_NANOSECONDS`], however the documents are cut and wherever their pieces go. So no sum of these saturates, and plans
    /// that differ never look equal.
    fn check_work(&self) -> Result<(), Error> {
        let costs = &self.costs;
        let row = memory::bytes(self, &self.all_heads(), 1, 0).most();
        let key = memory::bytes(self, &self.all_heads(), 0, 1).most();
        let (mut cost, mut bytes) = (0_u128, 0_u128);
        for document in self.layout.documents() {
            let rows = u128::from(document.rows);
            let pairs = u128::from(document.mask.pairs(document.rows, 0..document.rows));
            let pieces = self.layout.ranks().len().min(document.rows as usize) as u128;
            let tiles = rows.div_ceil(u128::from(TILE_ROWS)) + pieces;
            cost += (pairs + tiles * u128::from(costs.tile)) * u128::from(self.heads.query);
            // Each KV head that goes elsewhere has tasks of its own.
            let columns = u128::from(if self.heads_may_part() { self.heads.kv } else { 1 });
            cost += tiles * u128::from(costs.task) * columns;
            // Slots that hold its keys have a tile of it each.
            let holders = (tiles * columns).min(self.slots.len() as u128);
            bytes += rows * (u128::from(row) + u128::from(key) * holders);
        }
        if cost > u128::from(MOST_COST) {
            return Err(Error::TooMuchWork { most: MOST_COST });
        }
        if bytes > u128::from(MOST_BYTES) {
            return Err(Error::TooManyBytes { most: MOST_BYTES });
        }
        for (slot, it) in (0..).map(SlotId).zip(&self.slots) {
            let weight = if it.is_standby() { 100 } else { it.weight };
            let time = u128::from(it.head_start) + cost * 100 / u128::from(weight);
            if time > u128::from(MOST_TIME) {
                return Err(Error::SlowSlot { slot, weight, most: MOST_TIME });
            }
        }
        let (rate, percent) = self.links.slowest();
        let time = bytes * u128::from(percent) * 10 / (u128::from(rate) * u128::from(self.lanes));
        if time > u128::from(MOST_NANOSECONDS) {
            return Err(Error::SlowLinks { rate, percent, most: MOST_NANOSECONDS });
        }
        Ok(())
    }

    /// Same on every machine for the same problem, for ever.
    pub fn digest(&self) -> u64 {
        let Self { layout, heads, element_bytes, lanes, slots, costs, links, tolerance } = self;
        let mut digest = Digest::new("problem");
        digest.u64(layout.documents().len() as u64);
        for &Document { rows, mask } in layout.documents() {
            let (kind, left) = match mask {
                Mask::Causal => (0, 0),
                Mask::Full => (1, 0),
                Mask::Window { left } => (2, left),
            };
            digest.u32s([rows, kind, left]);
        }
        digest.u64(layout.ranks().len() as u64);
        for stretches in layout.ranks() {
            digest.u64(stretches.len() as u64);
            for it in stretches {
                digest.u32s([it.document.0, it.start, it.end]);
            }
        }
        let Heads { query, kv, dim } = *heads;
        digest.u32s([
            query.into(),
            kv.into(),
            dim.into(),
            (*element_bytes).into(),
            (*lanes).into(),
        ]);
        digest.u64(slots.len() as u64);
        for &Slot { weight, head_start, home, memory } in slots {
            let home = home.map_or(0, |rank| rank.0 + 1);
            digest.u32s([weight, home]);
            digest.u64(head_start);
            digest.u64(memory);
        }
        costs.encode(&mut digest);
        links.encode(&mut digest);
        // Last, so that problems of the usual one keep their digest.
        if let Some(millionths) = tolerance.told() {
            digest.u64(millionths.into());
        }
        digest.value()
    }

    /// A document that a checked layout has.
    pub(crate) fn document(&self, document: DocumentId) -> Document {
        self.layout.documents()[document.0 as usize]
    }

    /// Cost of rows that stay together, with the KV heads that read them.
    pub(crate) fn cost(&self, document: DocumentId, kv: &Range<u16>, rows: &Range<u32>) -> u64 {
        self.costs.rows(self.document(document), self.heads.query_count(kv), rows)
    }

    /// Whether KV heads of a document may go to different slots.
    pub(crate) fn heads_may_part(&self) -> bool {
        self.lanes == 1 && self.heads.kv > 1
    }

    /// All KV heads.
    pub(crate) fn all_heads(&self) -> Range<u16> {
        0..self.heads.kv
    }
}
