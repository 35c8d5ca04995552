//! Why a layout, a problem, a plan or an assignment is refused.
//!
//! One enum for the crate: a planning process is one act for those who call it. Every message names
//! the object and says what to do.

use crate::{BundleId, DocumentId, RankId, SlotId};

/// Why there is no plan, or why a plan is wrong.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// The mask's name is none that the kernels know.
    #[error("mask {name:?} is not supported; use causal, full or window:ROWS with at least 1 row")]
    UnknownMask { name: String },
    /// Nothing to lay documents over.
    #[error("the layout has no rank; give it at least one")]
    NoRank,
    /// More ranks, slots or documents than their numbers can name.
    #[error("{count} {things} are too many; at most {most} are supported")]
    TooMany { things: &'static str, count: u64, most: u64 },
    /// A document without rows.
    #[error("document {} has no rows; leave it out", document.0)]
    EmptyDocument { document: DocumentId },
    /// A document longer than positions can count.
    #[error("document {} has {rows} rows, more than {most}; cut it", document.0)]
    LongDocument { document: DocumentId, rows: u32, most: u32 },
    /// Ranks that all hold nothing.
    #[error("no rank has rows; give one of them a document, or leave this out")]
    NoRows,
    /// More rows at one rank than its rows can be numbered.
    #[error("rank {} has {rows} rows, more than {}; give it fewer", rank.0, u32::MAX)]
    LongRank { rank: RankId, rows: u64 },
    /// A stretch that is empty, reversed, or beyond its document.
    #[error(
        "rank {} holds rows {start}..{end} of document {}, which is empty or beyond the document; correct the layout",
        rank.0, document.0
    )]
    BadStretch { rank: RankId, document: DocumentId, start: u32, end: u32 },
    /// Rows that no rank holds.
    #[error("rows {start}..{end} of document {} are at no rank; every row needs one", document.0)]
    Hole { document: DocumentId, start: u32, end: u32 },
    /// Rows that are held twice.
    #[error("rows {start}..{end} of document {} are at two ranks; keep them at one", document.0)]
    Overlap { document: DocumentId, start: u32, end: u32 },
    /// Head counts that do not fit together.
    #[error(
        "{query} query heads over {kv} kv heads of dim {dim}: each must be positive, and query heads a multiple of kv heads"
    )]
    BadHeads { query: u16, kv: u16, dim: u16 },
    /// Lanes that cannot share the KV heads.
    #[error("{lanes} lanes for {kv} kv heads: lanes must be positive and divide the kv heads")]
    BadLanes { lanes: u16, kv: u16 },
    /// A wire type of another size.
    #[error("elements of {bytes} bytes are not supported; use 2 (bf16) or 4 (f32)")]
    BadElement { bytes: u8 },
    /// A ratio that no plan is made for.
    #[error("tolerance {given} is not supported; give a ratio from 1 to 2, such as 1.002")]
    BadTolerance { given: String },
    /// Longest task that is no whole number of tiles.
    #[error("costs.task_rows is {rows}; use a positive multiple of 128")]
    BadTaskRows { rows: u32 },
    /// Nothing to plan onto.
    #[error("the problem has no slot; add a server, or plan at home")]
    NoSlot,
    /// Only standby slots.
    #[error("all {slots} slots have weight 0 (standby); give at least one a weight")]
    NoWeight { slots: u32 },
    /// A slot in place of a rank that the layout lacks.
    #[error("slot {} is in place at rank {}, but the layout has {ranks} ranks; correct its home", slot.0, home.0)]
    UnknownHome { slot: SlotId, home: RankId, ranks: u32 },
    /// A head start beyond what finishing times can count.
    #[error("slot {} has a head start of {head_start}, more than {most}; correct it", slot.0)]
    LongHeadStart { slot: SlotId, head_start: u64, most: u64 },
    /// Links of some places only.
    #[error(
        "links.places has {found} entries, but ranks and dedicated slots are {expected}; give each one, or none"
    )]
    LinkCount { found: u64, expected: u64 },
    /// A link without speed, or with one that cannot be.
    #[error("links.places[{place}].{way} is {rate}; give 1 to {most} bytes a microsecond")]
    BadRate { place: u32, way: &'static str, rate: u32, most: u32 },
    /// A distance without a price.
    #[error("links.prices.{distance} is {price}; give 1 to {most} percent")]
    BadPrice { distance: &'static str, price: u32, most: u32 },
    /// A pair of places that cannot be cut off from each other.
    #[error("links.unreachable has the pair {a} and {b}: give two different places below {places}")]
    BadPair { a: u32, b: u32, places: u32 },
    /// Rows whose ranks no slot reaches all.
    #[error(
        "no slot reaches all ranks that hold rows {start}..{end} of document {} and the keys before them; mend the links or add a slot that does",
        document.0
    )]
    OutOfReach { document: DocumentId, start: u32, end: u32 },
    /// A bundle at a slot that cannot pull its rows.
    #[error("bundle {} of document {} is at slot {}, which cannot reach rank {}; plan again with the links as they are", bundle.0, document.0, slot.0, rank.0)]
    CannotReach { bundle: BundleId, document: DocumentId, slot: SlotId, rank: RankId },
    /// More work than finishing times can count.
    #[error(
        "the attention work of the step is more than {most} pairs and heads; take fewer or shorter documents"
    )]
    TooMuchWork { most: u64 },
    /// More bytes than memory can count.
    #[error(
        "the rows of the step may need more than {most} bytes in one slot; take fewer documents or smaller heads"
    )]
    TooManyBytes { most: u64 },
    /// A slot so slow that its finishing times cannot be counted.
    #[error(
        "slot {} of weight {weight} alone would need longer than {most} for all work, in cost at weight 100; give it more weight, or none, or take fewer documents",
        slot.0
    )]
    SlowSlot { slot: SlotId, weight: u32, most: u64 },
    /// Links so slow that their times cannot be counted.
    #[error(
        "a link of {rate} bytes a microsecond may need longer than {most} nanoseconds for all rows at {percent} percent; correct links.places and links.prices, or take fewer documents"
    )]
    SlowLinks { rate: u32, percent: u32, most: u64 },
    /// Rows at home at a rank without a processor of its own.
    #[error("rank {} has no slot in place, so its rows cannot stay; add one", rank.0)]
    NoSlotAtHome { rank: RankId },
    /// A document whose keys and smallest task no slot can hold.
    #[error(
        "document {} does not fit any slot: one tile of its queries with its keys needs a slot of {needed} bytes, the largest has {largest}; raise the memory or cut the document",
        document.0
    )]
    DocumentTooLarge { document: DocumentId, needed: u64, largest: u64 },
    /// All fits alone, not together.
    #[error("the slots have no memory left for document {}; raise the memory of the slots or add some", document.0)]
    NoRoom { document: DocumentId },
    /// A slot that the plan fills beyond its memory.
    #[error("slot {} needs {needed} bytes for two phases and the reserve, but has {memory}; raise its memory", slot.0)]
    SlotFull { slot: SlotId, needed: u64, memory: u64 },
    /// A lost slot's bundle that no survivor can hold.
    #[error(
        "bundle {} of document {} needs {needed} bytes, but no slot alive has that in reserve; add a server or raise the memory",
        bundle.0, document.0
    )]
    BundleFitsNowhere { bundle: BundleId, document: DocumentId, needed: u64 },
    /// A lost slot's bundle that no survivor can pull.
    #[error(
        "bundle {} of document {} is out of reach of all slots alive that could hold it; mend the links or add a server",
        bundle.0, document.0
    )]
    BundleOutOfReach { bundle: BundleId, document: DocumentId },
    /// A plan, assignment or list of slots made for something else.
    #[error(
        "the {what} has {found} entries where {expected} are expected; it belongs to another plan"
    )]
    Mismatch { what: &'static str, found: u64, expected: u64 },
    /// A plan made from another problem.
    #[error(
        "the plan was made for problem {planned:016x}, this is problem {given:016x}; plan again"
    )]
    OtherProblem { planned: u64, given: u64 },
    /// An assignment that names a slot the problem lacks.
    #[error("bundle {} runs at slot {}, but the problem has {slots} slots", bundle.0, slot.0)]
    UnknownSlot { bundle: BundleId, slot: SlotId, slots: u32 },
    /// A bundle that breaks a promise of [`crate::Plan`].
    #[error("bundle {} of the plan is wrong: {why}; this is a bug of the planner", bundle.0)]
    BadBundle { bundle: BundleId, why: &'static str },
    /// A task that breaks a promise of [`crate::Plan`].
    #[error("task {task} of the plan is wrong: {why}; this is a bug of the planner")]
    BadTask { task: u32, why: &'static str },
    /// Rows of a KV head that are computed never or twice.
    #[error("row {row} of document {}, kv head {kv_head}, is not computed exactly once; this is a bug of the planner", document.0)]
    NotOnce { document: DocumentId, kv_head: u16, row: u32 },
    /// A certificate that is not that of its plan.
    #[error("the plan's bounds are not those of its tasks; this is a bug of the planner")]
    BadBounds,
}
