//! The chart, rendered and installed by helm itself.
//!
//! In: a cluster, arguments of helm. Out: rendered manifests, or a release that is uninstalled by
//! [`Release::uninstall`]. helm keeps its settings and caches in the run's folder.

use std::process::Command;

use anyhow::{Context as _, Result};

use crate::access::{Access, SYSTEM_NAMESPACE};
use crate::process::output;
use crate::programs::{Programs, root};

/// Name of the release.
pub(crate) const NAME: &str = "cadre";

/// An installed chart.
#[derive(Clone, Copy, Debug)]
pub struct Release;

impl Release {
    /// The one that is there, or what `install` makes: those that leave it as it is share it.
    pub fn shared(cluster: &Access, install: impl FnOnce() -> Result<Self>) -> Result<Self> {
        let mut installed = cluster.installed();
        if *installed {
            return Ok(Self);
        }
        let release = install()?;
        *installed = true;
        Ok(release)
    }

    /// Installs it, and waits until its pods are ready.
    pub fn install(cluster: &Access, arguments: &[&str]) -> Result<Self> {
        run(
            cluster,
            "install",
            &[&["--create-namespace", "--wait", "--timeout=3m"], arguments].concat(),
        )?;
        Ok(Self)
    }

    /// Upgrades it, and waits until its pods are ready.
    pub fn upgrade(&self, cluster: &Access, arguments: &[&str]) -> Result<()> {
        run(cluster, "upgrade", &[&["--wait", "--timeout=3m"], arguments].concat()).map(drop)
    }

    /// Uninstalls it, hooks and all.
    pub fn uninstall(self, cluster: &Access) -> Result<()> {
        *cluster.installed() = false;
        let mut command = helm(cluster.programs(), cluster)?;
        command.args([
            "uninstall",
            NAME,
            "--namespace",
            SYSTEM_NAMESPACE,
            "--wait",
            "--timeout=3m",
        ]);
        output(&mut command).map(drop)
    }
}

/// What the chart becomes.
pub fn template(cluster: &Access, arguments: &[&str]) -> Result<String> {
    run(cluster, "template", arguments)
}

/// An installation as a user types it, from the project's folder, of which nothing comes to be.
pub fn dry_run(cluster: &Access, arguments: &[&str]) -> Result<String> {
    let mut command = helm(cluster.programs(), cluster)?;
    command.current_dir(root()).arg("install").args(arguments).arg("--dry-run=client");
    output(&mut command).context("helm install")
}

/// helm's own checks, warnings being errors.
pub fn lint(cluster: &Access, arguments: &[&str]) -> Result<()> {
    let mut command = helm(cluster.programs(), cluster)?;
    command.args(["lint", "--strict", "--quiet"]).arg(root().join("charts/cadre"));
    output(command.args(["--namespace", SYSTEM_NAMESPACE]).args(arguments)).map(drop)
}

fn run(cluster: &Access, verb: &str, arguments: &[&str]) -> Result<String> {
    let mut command = helm(cluster.programs(), cluster)?;
    command.args([verb, NAME]).arg(root().join("charts/cadre"));
    command.args(["--namespace", SYSTEM_NAMESPACE]).args(arguments);
    output(&mut command).with_context(|| format!("helm {verb}"))
}

fn helm(programs: &Programs, cluster: &Access) -> Result<Command> {
    let mut command = Command::new(programs.path("helm")?);
    command.env("HOME", cluster.folder()).env("KUBECONFIG", cluster.config());
    for (variable, folder) in
        [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")]
    {
        command.env(variable, cluster.folder().join("helm").join(folder));
    }
    Ok(command)
}
