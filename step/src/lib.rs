//! What describes a step, the same at every worker: who holds which rows, what is planned, which bytes travel, in which order.
//!
//! ```text
//! lengths of every trainer ─▶ conduct ─▶ header ─▶ planned: plans, transfer lists (lowering), order of phases
//!                                          │
//!                                          └── envelope, words: how workers tell each other
//! ```
//!
//! In and out: plain values. It reads no file and no clock, sends nothing and holds no rows.
//!
//! Invariant: the same header gives every worker the same [`planned::PlannedStep`], bit by bit.

pub mod certificate;
pub mod conduct;
pub mod encoding;
pub mod envelope;
pub mod header;
mod kind;
pub mod layers;
pub mod lowering;
pub mod packing;
pub mod phases;
pub mod planned;
pub mod turns;
pub mod words;
