//! Promises of the planner: exact cases, properties, refusals, and real workloads.

mod cases;
mod problems;
mod properties;
mod reassigning;
mod refusals;
mod workloads;
