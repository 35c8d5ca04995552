//! The types and functions of UCX's C header that Cadre calls. The library is opened when the program runs.
//!
//! In: nothing; the library is where the loader finds `libucp.so.0`. Out: [`ucx`], or one line that says why there is none. No UCX
//! is needed to build, and a machine without one runs the program all the same.
//!
//! [`bindings`] are the header's, by hand: only what is called, as UCX 1.13 has it (BSD-3-Clause). Later versions of the library add
//! fields behind bits that we do not set. `tests/header.rs` compares them with the header where it is installed.
//!
//! This crate calls only what it needs to check the library. Callers of the other functions keep UCX's rules: `cadre-exchange`
//! does, in `src/ucx`.
//!
//! Invariant: a process opens one library, once, and never closes it.

#![allow(unsafe_code)]

pub mod bindings;
mod library;

pub use library::{Absent, OLDEST, Ucx, ucx};
