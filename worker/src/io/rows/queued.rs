//! Phases that the main thread has submitted and that wait for the window.
//!
//! In: phases in their order, with rows or without. Out: the first of them. When too many with rows wait, [`TooMany`]: to wait in
//! submit could be to wait for works that the same thread is to compute.
//!
//! Invariant: phases come out in the order in which they came.

use std::collections::VecDeque;

use cadre_protocol::At;

use crate::launch::PhaseRows;

/// Maximum phases with rows that wait for the window. A caller that submits phases before it waits for others has no more than a
/// layer has nano-batches.
const MAX_QUEUED: usize = 1024;

/// The main thread has submitted more than is kept.
#[derive(Debug, thiserror::Error)]
#[error(
    "rank {rank} has submitted a phase more ({phase}) while {MAX_QUEUED} before it wait until others are over; wait for the ticket of a phase before the next one is submitted"
)]
pub struct TooMany {
    pub(super) rank: u16,
    pub(super) phase: String,
}

/// A phase, with its rows if this rank has any.
type Phase<M> = (At, Option<Box<PhaseRows<M>>>);

/// See the module.
#[derive(Debug)]
pub(super) struct Queued<M> {
    phases: VecDeque<Phase<M>>,
    with_rows: usize,
}

impl<M> Queued<M> {
    pub(super) fn new() -> Self {
        Self { phases: VecDeque::new(), with_rows: 0 }
    }

    /// Whether no phase with rows may come.
    pub(super) fn is_full(&self) -> bool {
        self.with_rows >= MAX_QUEUED
    }

    pub(super) fn push(&mut self, at: At, rows: Option<PhaseRows<M>>) {
        self.with_rows += usize::from(rows.is_some());
        self.phases.push_back((at, rows.map(Box::new)));
    }

    pub(super) fn pop(&mut self) -> Option<Phase<M>> {
        let phase = self.phases.pop_front()?;
        self.with_rows -= usize::from(phase.1.is_some());
        Some(phase)
    }
}
