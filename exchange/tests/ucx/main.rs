//! Rows by UCX: the cases of tcp, and what only reads that nobody can call back can get wrong, with real processes.
//!
//! In: `pulls.rs` and `links.rs`, whose nodes require UCX in this program, over shared memory and once more over sockets; children,
//! which are this program again. Out: which bytes land, by which path, and what is said where there is no path.
//!
//! No card for RDMA is needed: both transports emulate reads, so owners have to be polled here. Without UCX the cases run over links,
//! and that is said.

// Each of the files brings its own.
#![allow(clippy::duplicate_mod)]

#[path = "../shared/children.rs"]
mod children;
#[path = "../common/mod.rs"]
mod common;
#[path = "../links.rs"]
mod links;
#[path = "../shared/pair.rs"]
mod pair;
mod processes;
#[path = "../pulls.rs"]
mod pulls;
mod ways;
