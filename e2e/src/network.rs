//! The network of a run, in its own namespace: a bridge with this process on it, later the nodes too.
//!
//! ```text
//! bridge `cluster`   172.30.0.1/24   API server, DNS        node number N   172.30.0.1N, pods 10.244.N.0/24
//! ```
//!
//! What pods of one node send to those of another goes through us: we are the router of the nodes.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::process::output;
use crate::programs::system;

/// Address of the control plane.
pub(crate) const HOST: &str = "172.30.0.1";
/// The bridge.
const BRIDGE: &str = "cluster";
/// Its own address of the link layer. Without one it has the lowest of its ports, so when the node with that port is gone, the
/// others send to nobody until they ask for the address anew, for longer than a node may be silent.
const BRIDGE_LINK_ADDRESS: &str = "02:00:00:00:00:01";

/// Makes it. The namespace is new and empty.
pub(crate) fn up() -> Result<()> {
    ip("link set lo up")?;
    ip(&format!("link add {BRIDGE} address {BRIDGE_LINK_ADDRESS} type bridge"))?;
    ip(&format!("address add {HOST}/24 dev {BRIDGE}"))?;
    ip(&format!("link set {BRIDGE} up"))?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("forwarding between nodes")
}

/// Address of a node.
pub(crate) fn address(node: usize) -> String {
    format!("172.30.0.1{node}")
}

/// Addresses of a node's pods.
pub(crate) fn pods(node: usize) -> String {
    format!("10.244.{node}.0/24")
}

/// Puts the network namespace of a process onto the bridge, and its pods into our routes.
pub(crate) fn join(node: usize, process: u32) -> Result<()> {
    let link = format!("node-{node}");
    ip(&format!("link add {link} type veth peer name eth0 netns {process}"))?;
    ip(&format!("link set {link} master {BRIDGE} up"))?;
    ip(&format!("route replace {} via {}", pods(node), address(node)))
}

/// Takes a node's link away as if the cable were pulled; its routes go with it.
pub(crate) fn leave(node: usize) -> Result<()> {
    ip(&format!("link delete node-{node}"))
}

fn ip(arguments: &str) -> Result<()> {
    output(Command::new(system("ip")?).args(arguments.split(' '))).map(drop)
}
