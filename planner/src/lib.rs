//! Documents and slots in, plan out.
//!
//! Core attention of a document costs one unit for each kept pair of query and key; the [`plan`]
//! cuts it into tasks and gives every task to a slot so that all slots finish together. In: a
//! [`Problem`], made from a step's header. Out: a [`Plan`], and for lost slots an [`Assignment`].
//!
//! Nothing here does IO, reads a clock, starts a thread or uses hash order, and floats are only added,
//! multiplied, divided and rooted, which is the same everywhere: trainers and servers plan on their
//! own and get the same bits. A plan is checked by everyone who makes one ([`Plan::check`]), and its
//! digest is compared between processes ([`Plan::digest`]).
//!
//! The crate does not know how rows travel; who lowers a plan to transfer lists asks
//! [`Layout::locate`] where rows are.

mod balance;
mod costs;
mod digest;
mod error;
mod home;
mod layout;
mod links;
mod mask;
mod memory;
mod plan;
mod problem;
mod profile;
mod reassign;
mod regions;
mod scale;
mod tolerance;
mod traffic;
mod weights;

pub use balance::{plan, plan_beside, plan_in_regions};
pub use costs::Costs;
pub use error::Error;
pub use home::{imbalance_at_home, plan_at_home};
pub use layout::{Document, DocumentId, Layout, Piece, RankId, Stretch};
pub use links::{Distance, Link, Links, NOMINAL_RATE, Prices};
pub use mask::Mask;
pub use memory::{
    BundleMemory, SlotMemory, check_beside, largest_bundle, memory_of, memory_of_slot,
    memory_of_slots,
};
pub use plan::{Bounds, Bundle, BundleId, Cuts, Plan, Task};
pub use problem::{Heads, Problem, Slot, SlotId};
pub use profile::{
    Direction, Kept, LinkMap, LinkTimes, Profile, ProfileError, Site, Table, TableError,
};
pub use reassign::{Assignment, reassign};
pub use regions::{Part, RankSum, Regions, SLOTS_OF_A_REGION, Sent};
pub use scale::servers_for;
pub use tolerance::Tolerance;
pub use traffic::{Flow, Least, Place, Pull, Pulls, Traffic, least, least_memory};
pub use weights::Learnt;

/// Rows of a query or key tile, counted from the document's start.
pub const TILE_ROWS: u32 = 128;
