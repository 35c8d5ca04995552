//! How much of a cluster a test needs.
//!
//! In: `CADRE_E2E_TIERS`, names of tiers parted by commas. Out: which tiers are demanded. A tier that
//! the machine cannot have is said aloud with the reason; demanded, it fails the run.

use std::fmt;

use anyhow::{Result, bail};

/// How much of a cluster a test needs; each has what those before it have.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tier {
    /// etcd, API server, controller manager and scheduler.
    ControlPlane,
    /// Nodes and pods that kwok says are running.
    FakeNodes,
    /// Two nodes with containerd and a kubelet.
    RealNodes,
}

impl Tier {
    /// All of them, the smallest first.
    pub const ALL: [Self; 3] = [Self::ControlPlane, Self::FakeNodes, Self::RealNodes];

    /// The tiers that must not be missing.
    pub fn demanded() -> Result<Vec<Self>> {
        let text = std::env::var("CADRE_E2E_TIERS").unwrap_or_default();
        let names = text.split(',').map(str::trim).filter(|it| !it.is_empty());
        names.map(Self::named).collect()
    }

    fn named(name: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|it| it.to_string() == name) {
            Some(tier) => Ok(tier),
            None => bail!(
                "CADRE_E2E_TIERS names `{name}`; the tiers are control-plane, fake-nodes and real-nodes"
            ),
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ControlPlane => "control-plane",
            Self::FakeNodes => "fake-nodes",
            Self::RealNodes => "real-nodes",
        })
    }
}
