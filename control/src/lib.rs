//! The control service: the protocol between workers and their controller.
//!
//! In: messages of `proto/cadre/control/v1alpha1/control.proto`. Out: the same, on the other side of
//! one gRPC stream per worker, over any transport. [`client::attach`] is a worker's side,
//! [`server::serve`] the controller's (the local supervisor or the operator).
//!
//! No decisions here: who is started, replaced or drained is the controller's business. Nothing of
//! the data plane waits for this stream, so a controller may go away and come back.

pub mod client;
pub mod endpoint;
pub mod expiry;
pub mod gate;
pub mod manifest;
pub mod secret;
pub mod server;
pub mod settings;
pub mod tls;
pub mod version;

/// The tolerance of uneven plans, a part of [`Settings`].
pub use cadre_planner::Tolerance;
pub use endpoint::{Credentials, Endpoint};
pub use gate::{Caller, Gate};
pub use secret::job_secret;
pub use settings::{AttentionPlace, Moment, Planning, Settings};
pub use version::{CONTROL_VERSION, DATA_VERSION};

/// Messages, generated from the protobuf, which documents them.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod proto {
    tonic::include_proto!("cadre.control.v1alpha1");
}

mod face;
