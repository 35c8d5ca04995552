//! The control plane: etcd, API server, controller manager, scheduler.
//!
//! In: programs, a folder, certificates in it. Out: it serves. A node that is silent for 6 s counts as
//! lost and its pods leave it 2 s later, where a cluster of people waits for 50 s and 300 s, and
//! clients inside are not slowed down: a test should not wait for defaults.

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

/// The running parts, in the order in which they end.
#[derive(Debug)]
pub(crate) struct Plane {
    scheduler: Process,
    manager: Process,
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
                "--enable-admission-plugins=NodeRestriction".into(),
                "--allow-privileged=true".into(),
                "--enable-priority-and-fairness=false".into(),
                "--profiling=false".into(),
                "--default-not-ready-toleration-seconds=2".into(),
                "--default-unreachable-toleration-seconds=2".into(),
            ]),
        )?;
        let config = kubeconfig(folder, "admin", &User::Certificate("admin"))?;
        let client = client(&config).await?;
        until("the API server", async || {
            server.check()?;
            let mut command = Command::new(programs.path("kubectl")?);
            command.arg("--kubeconfig").arg(&config).args(["get", "--raw", "/readyz"]);
            Ok((output(&mut command)? == "ok").then_some(()))
        })
        .await?;
        let own = |name: &str| -> Result<Vec<String>> {
            let config = kubeconfig(folder, name, &User::Certificate(name))?;
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
        };
        let manager = Process::start(
            "kube-controller-manager",
            folder,
            Command::new(programs.path("kube-controller-manager")?)
                .args(own("controller-manager")?)
                .args([
                    "--use-service-account-credentials=true".to_owned(),
                    format!("--service-account-private-key-file={}", file("tokens.key")),
                    format!("--root-ca-file={}", file("ca.crt")),
                    "--node-monitor-grace-period=6s".into(),
                    "--node-monitor-period=1s".into(),
                    "--node-eviction-rate=100".into(),
                    "--secondary-node-eviction-rate=100".into(),
                    "--terminated-pod-gc-threshold=1000".into(),
                ]),
        )?;
        let scheduler = Process::start(
            "kube-scheduler",
            folder,
            Command::new(programs.path("kube-scheduler")?).args(own("scheduler")?),
        )?;
        Ok((Self { scheduler, manager, server, etcd }, client))
    }

    /// Fails if a part has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.etcd.check()?;
        self.server.check()?;
        self.manager.check()?;
        self.scheduler.check()
    }
}

/// How somebody shows who they are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum User<'a> {
    /// Name of a certificate.
    Certificate(&'a str),
    /// A token.
    Token(&'a str),
}

/// Writes the file by which a client finds the API server. Out: its path.
pub(crate) fn kubeconfig(folder: &Path, name: &str, user: &User<'_>) -> Result<PathBuf> {
    let keys = folder.join("keys");
    let keys = keys.display();
    let user = match user {
        User::Certificate(it) => {
            format!("client-certificate: {keys}/{it}.crt, client-key: {keys}/{it}.key")
        }
        User::Token(it) => format!("token: {it}"),
    };
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

/// A client of the cluster that a file names.
pub(crate) async fn client(config: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(config).with_context(|| config.display().to_string())?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.context("a kubeconfig")?).context("a client of the API server")
}
