//! A real cluster on this machine, for as long as a test or a bench runs.
//!
//! In: the programs of `scripts/cluster-tools`, the built binaries of the project, and what the machine
//! allows. Out: a [`Cluster`] with an API server, and as far as asked nodes of kwok or real ones.
//!
//! ```text
//! namespaces   the test starts itself again in namespaces of its own (network, mounts, processes)
//! programs     which programs there are, and what is missing for which tier
//! plane        etcd, API server, controller manager, scheduler            control-plane
//! fake         nodes and pods that kwok says are running                  fake-nodes
//! node, image  containerd and kubelets, each in namespaces of its own     real-nodes
//! operator     our operator as a process, with the rights of the chart
//! ```
//!
//! Nothing of the machine is changed: addresses, mounts and processes live in namespaces that go with
//! the test, however it ends. It does not download anything, and it never touches another cluster
//! unless `CADRE_E2E_KUBECONFIG` names one.

mod access;
pub mod certificates;
mod cluster;
pub mod fake;
pub mod helm;
mod image;
pub mod namespaces;
mod network;
mod node;
mod operator;
mod plane;
mod process;
pub mod programs;
mod tier;
mod wait;

pub use access::{Access, SYSTEM_NAMESPACE};
pub use cluster::{Cluster, IMAGE};
pub use fake::Fake;
pub use helm::Release;
pub use node::Node;
pub use operator::{Operator, Sample};
pub use process::{Process, kill_pod};
pub use tier::Tier;
pub use wait::until;
