//! The control plane: etcd, API server, controller manager, scheduler.
//!
//! In: programs, a folder, certificates in it. Out: it serves. A node that is silent for 12 s counts as
//! lost, because one of a machine under load is silent for some, and its pods leave it 2 s later, where
//! a cluster of people waits for 50 s and 300 s; clients inside are not slowed down: a test should not
//! wait for defaults. With many nodes leases are renewed as seldom as elsewhere ([`Patience`]), since the
//! API server would do little else.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::network::HOST;
use crate::process::{Process, output};
use crate::programs::Programs;
use crate::wait::until;

/// Where etcd listens.
const ETCD: &str = "http://127.0.0.1:2379";

/// The operator's requests, a line of JSON each.
pub(crate) const REQUESTS: &str = "requests.log";
/// What is noted of requests: the operator's alone, without their content.
const AUDIT: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
                     - {level: Metadata, users: ['system:serviceaccount:cadre-system:cadre-operator']}\n\
                     - {level: None}\n";

/// How long a node may be silent before it counts as lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Patience {
    /// Some seconds, for promises about lost nodes.
    Short,
    /// The default of Kubernetes.
    Long,
}

impl Patience {
    /// Seconds for which a node's lease is good, and after which the node counts as lost.
    pub(crate) fn seconds(self) -> (u32, u32) {
        match self {
            Self::Short => (4, 12),
            Self::Long => (40, 50),
        }
    }
}

/// The running parts, in the order in which they end.
#[derive(Debug)]
pub(crate) struct Plane {
    scheduler: Process,
    manager: Option<Process>,
    patience: Patience,
    server: Process,
    etcd: Process,
}

impl Plane {
    /// Starts it. Out: it, and a client with all rights.
    pub(crate) async fn start(programs: &Programs, folder: &Path) -> Result<(Self, Client)> {
        let keys = folder.join("keys");
        let file = |name: &str| keys.join(name).display().to_string();
        let etcd = Process::start(
            "etcd",
            folder,
            Command::new(programs.path("etcd")?).args([
                format!("--data-dir={}", folder.join("etcd").display()),
                format!("--listen-client-urls={ETCD}"),
                format!("--advertise-client-urls={ETCD}"),
                "--listen-peer-urls=http://127.0.0.1:2380".into(),
                // Nothing has to survive the machine.
                "--unsafe-no-fsync".into(),
            ]),
        )?;
        std::fs::write(folder.join("audit.yaml"), AUDIT).context("an audit policy")?;
        let mut server = Process::start(
            "kube-apiserver",
            folder,
            Command::new(programs.path("kube-apiserver")?).args([
                format!("--etcd-servers={ETCD}"),
                format!("--bind-address={HOST}"),
                format!("--advertise-address={HOST}"),
                format!("--tls-cert-file={}", file("apiserver.crt")),
                format!("--tls-private-key-file={}", file("apiserver.key")),
                format!("--client-ca-file={}", file("ca.crt")),
                format!("--cert-dir={}", keys.display()),
                format!("--audit-policy-file={}", folder.join("audit.yaml").display()),
                format!("--audit-log-path={}", folder.join(REQUESTS).display()),
                "--authorization-mode=Node,RBAC".into(),
                format!("--service-account-key-file={}", file("tokens.pub")),
                format!("--service-account-signing-key-file={}", file("tokens.key")),
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
                "--service-cluster-ip-range=10.96.0.0/16".into(),
                format!("--kubelet-client-certificate={}", file("to-kubelet.crt")),
                format!("--kubelet-client-key={}", file("to-kubelet.key")),
                "--kubelet-preferred-address-types=InternalIP".into(),
                format!("--proxy-client-cert-file={}", file("front-proxy.crt")),
                format!("--proxy-client-key-file={}", file("front-proxy.key")),
                format!("--requestheader-client-ca-file={}", file("ca.crt")),
                "--requestheader-allowed-names=front-proxy-client".into(),
                "--requestheader-username-headers=X-Remote-User".into(),
                "--requestheader-group-headers=X-Remote-Group".into(),
                "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
                // No kube-proxy runs where the API server does.
                "--enable-aggregator-routing=true".into(),
                "--enable-admission-plugins=NodeRestriction".into(),
                "--allow-privileged=true".into(),
                "--enable-priority-and-fairness=false".into(),
                "--profiling=false".into(),
                "--default-not-ready-toleration-seconds=2".into(),
                "--default-unreachable-toleration-seconds=2".into(),
            ]),
        )?;
        let config = kubeconfig(folder, "admin")?;
        let client = client(&config).await?;
        until("the API server", async || {
            server.check()?;
            let mut command = Command::new(programs.path("kubectl")?);
            command.arg("--kubeconfig").arg(&config).args(["get", "--raw", "/readyz"]);
            Ok((output(&mut command)? == "ok").then_some(()))
        })
        .await?;
        let patience = Patience::Short;
        let manager = Some(manager(programs, folder, patience)?);
        let scheduler = Process::start(
            "kube-scheduler",
            folder,
            Command::new(programs.path("kube-scheduler")?).args(inside(folder, "scheduler")?),
        )?;
        Ok((Self { scheduler, manager, patience, server, etcd }, client))
    }

    /// Counts nodes as lost sooner or later than now.
    pub(crate) fn have_patience(
        &mut self,
        programs: &Programs,
        folder: &Path,
        patience: Patience,
    ) -> Result<()> {
        if self.patience != patience {
            // The old one ends first: nobody elects a leader here.
            self.manager = None;
            self.manager = Some(manager(programs, folder, patience)?);
            self.patience = patience;
        }
        Ok(())
    }

    /// Fails if a part has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.etcd.check()?;
        self.server.check()?;
        self.manager.as_mut().map_or(Ok(()), Process::check)?;
        self.scheduler.check()
    }
}

/// What the controller manager and the scheduler are told alike.
fn inside(folder: &Path, name: &str) -> Result<Vec<String>> {
    let config = kubeconfig(folder, name)?;
    let config = config.display();
    Ok(vec![
        format!("--kubeconfig={config}"),
        format!("--authentication-kubeconfig={config}"),
        format!("--authorization-kubeconfig={config}"),
        "--bind-address=127.0.0.1".into(),
        "--leader-elect=false".into(),
        "--profiling=false".into(),
        "--kube-api-qps=500".into(),
        "--kube-api-burst=1000".into(),
    ])
}

fn manager(programs: &Programs, folder: &Path, patience: Patience) -> Result<Process> {
    let keys = folder.join("keys");
    let (_, lost) = patience.seconds();
    Process::start(
        "kube-controller-manager",
        folder,
        Command::new(programs.path("kube-controller-manager")?)
            .args(inside(folder, "controller-manager")?)
            .args([
                "--use-service-account-credentials=true".to_owned(),
                format!("--service-account-private-key-file={}", keys.join("tokens.key").display()),
                format!("--root-ca-file={}", keys.join("ca.crt").display()),
                format!("--node-monitor-grace-period={lost}s"),
                "--node-monitor-period=1s".into(),
                "--node-eviction-rate=100".into(),
                "--secondary-node-eviction-rate=100".into(),
                "--terminated-pod-gc-threshold=1000".into(),
                // Autoscalers look each second, and believe what a pod uses from its first second on.
                "--horizontal-pod-autoscaler-sync-period=1s".into(),
                "--horizontal-pod-autoscaler-cpu-initialization-period=1s".into(),
                "--horizontal-pod-autoscaler-initial-readiness-delay=1s".into(),
            ]),
    )
}

/// Writes the file by which the owner of a certificate finds the API server. Out: its path.
pub(crate) fn kubeconfig(folder: &Path, name: &str) -> Result<PathBuf> {
    let keys = folder.join("keys");
    let keys = keys.display();
    let user = format!("client-certificate: {keys}/{name}.crt, client-key: {keys}/{name}.key");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
         clusters: [{{name: it, cluster: {{server: 'https://{HOST}:6443', certificate-authority: {keys}/ca.crt}}}}]\n\
         users: [{{name: it, user: {{{user}}}}}]\n\
         contexts: [{{name: it, context: {{cluster: it, user: it}}}}]\n"
    );
    let path = folder.join(format!("{name}.kubeconfig"));
    std::fs::write(&path, text)
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(path)
}

/// Writes a kubeconfig for the cluster of another one, with a token in the place of its user. Out: its path.
pub(crate) fn with_token(config: &Path, folder: &Path, name: &str, token: &str) -> Result<PathBuf> {
    let read = || config.display().to_string();
    let mut file = Kubeconfig::read_from(config).with_context(read)?;
    let current =
        file.current_context.clone().with_context(|| format!("{}: no current-context", read()))?;
    let context = file.contexts.iter().find(|it| it.name == current);
    let cluster = context.and_then(|it| it.context.as_ref()).map(|it| it.cluster.clone());
    let cluster = cluster.with_context(|| format!("{}: no context {current}", read()))?;
    file.clusters.retain(|it| it.name == cluster);
    let text = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": name, "clusters": file.clusters,
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": cluster, "user": name}}],
    });
    let path = folder.join(format!("{name}.kubeconfig"));
    std::fs::write(&path, text.to_string())
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(path)
}

/// A client of the cluster that a file names.
pub(crate) async fn client(config: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(config).with_context(|| config.display().to_string())?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.context("a kubeconfig")?).context("a client of the API server")
}
