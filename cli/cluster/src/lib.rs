//! What a cluster says about pools and jobs: why one waits, how all are, how busy servers are, their logs, and all of it in one file.
//!
//! In: what the API server has, read once. Out: text and archives for people. Changes nothing in the cluster.
//!
//! ```text
//! read ──▶ Seen ──▶ explain ──▶ Finding (a tree: object, pod, node, cause) ──▶ text
//!            │─────▶ status (tables)
//!            └─────▶ bundle (archive), with logs
//! ```
//!
//! Only [`read`], [`logs`], [`top`] and the log part of [`bundle`] talk to the API server; all else is a function of [`Seen`].

pub mod bundle;
pub mod explain;
mod facts;
pub mod logs;
pub mod read;
mod seen;
pub mod status;
pub mod top;

pub use explain::{Finding, Verdict};
pub use read::Error;
pub use seen::{Kind, Seen, Target};
