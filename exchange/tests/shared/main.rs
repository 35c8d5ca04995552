//! Rows by shared memory: the cases of tcp, and what only memory that others see can get wrong, with real processes.
//!
//! In: `pulls.rs` and `links.rs`, whose nodes require shared memory in this program; children, which are this program again.
//! Out: which bytes land, by which path, and what is said where there is no path.

// Each of the files brings its own.
#![allow(clippy::duplicate_mod)]

mod children;
#[path = "../common/mod.rs"]
mod common;
mod limits;
#[path = "../links.rs"]
mod links;
mod pair;
mod processes;
#[path = "../pulls.rs"]
mod pulls;
mod ways;
