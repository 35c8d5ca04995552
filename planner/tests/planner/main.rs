//! Promises of the planner: exact cases, properties, refusals, and real workloads.

#![allow(clippy::unwrap_used)] // helpers of tests fail like tests

mod bounds;
mod cases;
mod checked;
mod constructs;
mod draws;
mod known;
mod links;
mod memory;
mod optimal;
mod problems;
mod properties;
mod reassigning;
mod recorded;
mod refusals;
mod regions;
#[allow(clippy::disallowed_methods)] // tests read their seed
#[path = "../../../testing/seeds.rs"]
mod seeds;
mod tolerance;
mod traffic;
mod windows;
mod workloads;
