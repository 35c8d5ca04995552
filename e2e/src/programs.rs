//! Which programs there are to make a cluster of.
//!
//! In: `KUBEBUILDER_ASSETS`, then what `scripts/cluster-tools` has built; programs of the machine by
//! their usual places; the project's own binaries beside the test. Out: paths, or what is missing and
//! how to get it. Builds and installs nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process::output;
use crate::tier::Tier;

/// Folders of programs that only root has in its path.
const SYSTEM: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Where programs are.
#[derive(Clone, Debug)]
pub struct Programs {
    folders: Vec<PathBuf>,
    own: PathBuf,
}

impl Programs {
    /// Looks for them.
    pub fn find() -> Result<Self> {
        let test = std::env::current_exe().context("the test's own path")?;
        // target/release/deps/TEST, or target/release/BENCH.
        let folder = test.ancestors().skip(1).find(|it| it.join("cadre-operator").exists());
        let own = folder.context(
            "cadre-operator is not built; cargo build --release -p cadre-operator -p cadre",
        )?;
        let mut folders: Vec<PathBuf> =
            std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from).into_iter().collect();
        let built = output(Command::new(root().join("scripts/cluster-tools")).arg("--built"));
        match built {
            Ok(folder) => folders.push(folder.trim().into()),
            Err(_) if !folders.is_empty() => {}
            Err(error) => {
                return Err(error.context("the cluster's programs are not built; make cluster"));
            }
        }
        Ok(Self { folders, own: own.to_owned() })
    }

    /// A program of the cluster.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let found = self.folders.iter().map(|it| it.join(name)).find(|it| it.exists());
        found.with_context(|| {
            format!("{name} is in none of {:?}; make cluster builds it", self.folders)
        })
    }

    /// A program of the project.
    pub fn own(&self, name: &str) -> Result<PathBuf> {
        let path = self.own.join(name);
        if !path.exists() {
            bail!(
                "{} is not built; cargo build --release -p cadre-operator -p cadre",
                path.display()
            );
        }
        Ok(path)
    }

    /// Why a tier cannot be had here.
    pub fn missing_for(&self, tier: Tier) -> Result<()> {
        for name in [
            "etcd",
            "kube-apiserver",
            "kubectl",
            "kube-controller-manager",
            "kube-scheduler",
            "helm",
        ] {
            self.path(name)?;
        }
        if tier >= Tier::FakeNodes {
            self.path("kwok")?;
        }
        if tier == Tier::RealNodes {
            for name in ["kubelet", "kube-proxy", "coredns", "metrics-server"] {
                self.path(name)?;
            }
            for name in ["containerd", "ctr", "runc", "iptables", "conntrack", "strip"] {
                system(name)?;
            }
            cni()?;
            if !rustix::process::geteuid().is_root() {
                bail!("real nodes need root");
            }
        }
        Ok(())
    }
}

/// The root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate lies in the project")
        .to_owned()
}

/// A program of the machine.
pub(crate) fn system(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(SYSTEM.iter().map(PathBuf::from));
    let found = folders.map(|it| it.join(name)).find(|it| it.exists());
    found.with_context(|| format!("{name} is missing; scripts/machine cluster installs it"))
}

/// The folder of the network plugins.
pub(crate) fn cni() -> Result<PathBuf> {
    let folders = ["/usr/lib/cni", "/opt/cni/bin"].map(PathBuf::from);
    let found = folders.into_iter().find(|it| it.join("bridge").exists());
    found.context("network plugins are missing; scripts/machine cluster installs them")
}
