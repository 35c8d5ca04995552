//! What reaches a cluster: its kubeconfig, clients, `kubectl`.
//!
//! In: the run's folder, the programs that there are, an administrator's kubeconfig. Out: what `kubectl` writes, namespaces and our
//! definitions in the cluster, counts of requests. It starts nothing; [`crate::Cluster`] does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client};

use crate::plane::REQUESTS;
use crate::process::output;
use crate::programs::{Programs, root};
use crate::wait::until;

/// Where the operator lives.
pub const SYSTEM_NAMESPACE: &str = "cadre-system";

/// See the module.
pub struct Access {
    folder: PathBuf,
    programs: Programs,
    config: PathBuf,
    client: Client,
    installed: Mutex<bool>,
}

/// What a promise holds while it breaks is as good as before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Access {
    /// To the cluster of a kubeconfig.
    pub(crate) fn new(folder: &Path, programs: Programs, config: PathBuf, client: Client) -> Self {
        let folder = folder.to_owned();
        Self { folder, programs, config, client, installed: Mutex::default() }
    }

    /// A client with all rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Which programs there are.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The administrator's kubeconfig.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Forgets the chart that helm has installed, which is as nobody knows: the next one installs it anew.
    pub fn forget_release(&self) {
        *self.installed() = false;
    }

    /// Whether helm has installed the chart for all who share it; who installs it holds this meanwhile.
    pub(crate) fn installed(&self) -> MutexGuard<'_, bool> {
        lock(&self.installed)
    }

    /// Runs kubectl. Out: what it wrote; what it complained of is the error.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.kubectl_command()?.args(arguments))
    }

    /// Runs kubectl with a manifest on its standard input.
    pub fn kubectl_with(&self, arguments: &[&str], manifest: &str) -> Result<String> {
        let file = tempfile::NamedTempFile::with_suffix_in(".yaml", &self.folder)?;
        std::fs::write(file.path(), manifest).context("a manifest")?;
        let path = file.path().display().to_string();
        output(self.kubectl_command()?.args(arguments).args(["-f", &path]))
    }

    /// Applies a manifest as a user does.
    pub fn apply(&self, namespace: &str, manifest: &str) -> Result<String> {
        self.kubectl_with(&["apply", "--server-side", "--namespace", namespace], manifest)
    }

    /// A command that talks to this cluster.
    pub fn kubectl_command(&self) -> Result<Command> {
        let mut command = Command::new(self.programs.path("kubectl")?);
        command.arg("--kubeconfig").arg(&self.config).stdin(Stdio::null());
        // No discovery cache and no settings of the user.
        command.env("HOME", &self.folder).env_remove("KUBECONFIG");
        Ok(command)
    }

    /// Makes a namespace. Pods can be made in it when this returns.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let manifest = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n");
        self.kubectl_with(&["apply"], &manifest)?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), name);
        until("the default service account", async || Ok(accounts.get_opt("default").await?))
            .await?;
        Ok(())
    }

    /// How often the operator has asked the API server for what: `VERB RESOURCE` to a number. Watches count
    /// when they begin.
    pub fn operators_requests(&self) -> Result<BTreeMap<String, u64>> {
        let text = std::fs::read_to_string(self.folder.join(REQUESTS)).context("requests")?;
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let Ok(event) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let verb = event["verb"].as_str().unwrap_or_default();
            let stage = if verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
            if event["stage"] == stage {
                let of = &event["objectRef"];
                let part =
                    of["subresource"].as_str().map(|it| format!("/{it}")).unwrap_or_default();
                let resource = of["resource"].as_str().unwrap_or("other");
                *counts.entry(format!("{verb} {resource}{part}")).or_default() += 1;
            }
        }
        Ok(counts)
    }

    /// Our definitions.
    pub fn definitions(&self) -> Result<()> {
        let folder = root().join("charts/cadre/crds").display().to_string();
        self.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", &folder])?;
        let all = ["crd/attentionpools.cadre.dev", "crd/trainingjobs.cadre.dev"];
        self.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", all[0], all[1]])?;
        Ok(())
    }
}
