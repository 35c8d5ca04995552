//! A cluster: the control plane of the run or one that the user names, with what is asked for on top.
//!
//! In: the run's folder. Out: what reaches it ([`Access`]), nodes, and the operator's rights as the chart has them. Everything goes
//! when the value is dropped; a cluster of the user keeps what was put there.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context as _, Result, ensure};
use kube::Client;
use serde_json::json;
use tokio::sync::OnceCell;

use crate::access::{Access, SYSTEM_NAMESPACE, lock};
use crate::certificates;
use crate::fake::{self, Fake};
use crate::network::HOST;
use crate::node::{Node, PAUSE};
use crate::plane::{self, Patience, Plane};
use crate::process::Process;
use crate::programs::Programs;
use crate::wait::{get, until};
use crate::{helm, image};

/// Image of the project's programs on real nodes.
pub const IMAGE: &str = "localhost/cadre:e2e";
/// More nodes of kwok than these renew their leases as seldom as elsewhere.
const MANY: usize = 32;
/// Port of the metrics server.
const METRICS: u16 = 4443;
/// MiB that the images of two nodes take, with what their pods write.
const ROOM: u64 = 2048;
/// How long the operator's token is good.
const TOKEN: &str = "--duration=2h";

/// A running cluster.
pub struct Cluster {
    access: Access,
    operator: OnceCell<PathBuf>,
    nodes: Mutex<Vec<Node>>,
    images: OnceCell<Vec<PathBuf>>,
    names: OnceCell<Process>,
    fake: Mutex<Option<Process>>,
    plane: Option<Mutex<Plane>>,
}

/// Who has a cluster can ask all of it.
impl Deref for Cluster {
    type Target = Access;

    fn deref(&self) -> &Access {
        &self.access
    }
}

impl Cluster {
    /// Starts a control plane of our own.
    pub async fn start(folder: &Path) -> Result<Self> {
        let programs = Programs::find()?;
        let keys = folder.join("keys");
        std::fs::create_dir_all(&keys).context("a folder for keys")?;
        certificates::make(&keys)?;
        let (plane, client) = Plane::start(&programs, folder).await?;
        let config = folder.join("admin.kubeconfig");
        Ok(Self::new(folder, programs, config, client, Some(plane)))
    }

    /// Uses the cluster of a kubeconfig.
    pub async fn of_user(folder: &Path, config: &Path) -> Result<Self> {
        let client = plane::client(config).await?;
        Ok(Self::new(folder, Programs::find()?, config.to_owned(), client, None))
    }

    fn new(
        folder: &Path,
        programs: Programs,
        config: PathBuf,
        client: Client,
        plane: Option<Plane>,
    ) -> Self {
        let plane = plane.map(Mutex::new);
        Self {
            access: Access::new(folder, programs, config, client),
            operator: OnceCell::new(),
            nodes: Mutex::default(),
            images: OnceCell::new(),
            names: OnceCell::new(),
            fake: Mutex::default(),
            plane,
        }
    }

    /// Whether this is a control plane of our own.
    pub fn is_ours(&self) -> bool {
        self.plane.is_some()
    }

    /// Makes nodes of kwok, until [`Self::remove_fake_nodes`].
    pub async fn add_fake_nodes(&self, wanted: Fake) -> Result<()> {
        let patience = if wanted.nodes > MANY { Patience::Long } else { Patience::Short };
        self.have_patience(patience)?;
        let fake = fake::start(self, wanted, patience).await?;
        *lock(&self.fake) = Some(fake);
        Ok(())
    }

    /// Takes them away, if there are any.
    pub async fn remove_fake_nodes(&self) -> Result<()> {
        if lock(&self.fake).is_none() {
            return Ok(());
        }
        fake::remove(self).await?;
        *lock(&self.fake) = None;
        self.have_patience(Patience::Short)
    }

    fn have_patience(&self, patience: Patience) -> Result<()> {
        match &self.plane {
            Some(plane) => lock(plane).have_patience(self.programs(), self.folder(), patience),
            None => Ok(()),
        }
    }

    /// Starts DNS and two real nodes with the project's image, unless they run.
    pub async fn real_nodes(&self) -> Result<()> {
        room(self.folder())?;
        self.names.get_or_try_init(|| self.dns()).await?;
        for number in 1..=2 {
            self.start_node(number).await?;
        }
        Ok(())
    }

    /// Starts a node that does not run, as after a crash.
    pub async fn start_node(&self, number: usize) -> Result<()> {
        if !lock(&self.nodes).iter().any(|it| it.number() == number) {
            let images = self.images.get_or_try_init(async || self.make_images()).await?;
            let node = Node::start(self, number, images).await?;
            lock(&self.nodes).push(node);
        }
        Ok(())
    }

    /// The node of this name crashes.
    pub fn kill_node(&self, name: &str) -> Result<()> {
        let mut nodes = lock(&self.nodes);
        let at = nodes.iter().position(|it| it.name() == name);
        nodes.remove(at.with_context(|| format!("{name} does not run"))?).kill()
    }

    fn make_images(&self) -> Result<Vec<PathBuf>> {
        let pause = self.programs().own("pause")?;
        let own = [
            ("/usr/local/bin/cadre", self.programs().own("cadre")?),
            ("/usr/local/bin/cadre-operator", self.programs().own("cadre-operator")?),
            ("/usr/local/bin/pause", pause.clone()),
        ];
        Ok(vec![
            image::write(&self.folder().join("pause.image"), PAUSE, &[("/pause", pause)])?,
            image::write(&self.folder().join("cadre.image"), IMAGE, &own)?,
        ])
    }

    /// Names of Services and pods, for the nodes' pods.
    async fn dns(&self) -> Result<Process> {
        let file = self.folder().join("Corefile");
        let text = format!(
            "cluster.local:53 in-addr.arpa:53 {{\n  bind {HOST}\n  errors\n  ready 127.0.0.1:8481\n  \
             kubernetes cluster.local in-addr.arpa {{\n    kubeconfig {}\n    pods insecure\n    \
             ttl 0\n  }}\n}}\n",
            self.config().display()
        );
        std::fs::write(&file, text).context("a Corefile")?;
        let mut command = Command::new(self.programs().path("coredns")?);
        let mut dns = Process::start("coredns", self.folder(), command.arg("-conf").arg(&file))?;
        until("DNS", async || {
            dns.check()?;
            Ok(get(8481, "/ready").ok().map(drop))
        })
        .await?;
        Ok(dns)
    }

    /// Starts a metrics server behind the API server; it asks the kubelets every 10 s, which is as often as it can.
    pub async fn metrics_server(&self) -> Result<Process> {
        let folder = self.folder().join("metrics-server");
        std::fs::create_dir_all(&folder).context("a folder of the metrics server")?;
        let config = self.config().display();
        let mut command = Command::new(self.programs().path("metrics-server")?);
        command.args([
            format!("--kubeconfig={config}"),
            format!("--authentication-kubeconfig={config}"),
            format!("--authorization-kubeconfig={config}"),
            format!("--bind-address={HOST}"),
            format!("--secure-port={METRICS}"),
            format!("--cert-dir={}", folder.display()),
            "--kubelet-insecure-tls".into(),
            "--kubelet-preferred-address-types=InternalIP".into(),
            "--kubelet-request-timeout=5s".into(),
            "--metric-resolution=10s".into(),
        ]);
        let mut process = Process::start("metrics-server", self.folder(), &mut command)?;
        let service = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Service",
                "metadata": {"name": "metrics-server", "namespace": "kube-system"},
                "spec": {"ports": [{"name": "https", "port": 443, "targetPort": METRICS}]}},
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {"name": "metrics-server", "namespace": "kube-system",
                    "labels": {"kubernetes.io/service-name": "metrics-server"}},
                "addressType": "IPv4", "endpoints": [{"addresses": [HOST], "conditions": {"ready": true}}],
                "ports": [{"name": "https", "port": METRICS, "protocol": "TCP"}]},
            {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
                "metadata": {"name": "v1beta1.metrics.k8s.io"},
                "spec": {"group": "metrics.k8s.io", "version": "v1beta1", "insecureSkipTLSVerify": true,
                    "groupPriorityMinimum": 100, "versionPriority": 100,
                    "service": {"name": "metrics-server", "namespace": "kube-system"}}}]});
        self.kubectl_with(&["apply"], &service.to_string())?;
        until("the metrics of both nodes", async || {
            process.check()?;
            let nodes = self.kubectl(&["get", "--raw", "/apis/metrics.k8s.io/v1beta1/nodes"])?;
            let nodes: serde_json::Value = serde_json::from_str(&nodes).context("metrics")?;
            Ok((nodes["items"].as_array().map_or(0, Vec::len) == 2).then_some(()))
        })
        .await?;
        Ok(process)
    }

    /// Fails if a part of the control plane has ended.
    pub fn check(&self) -> Result<()> {
        self.plane.as_ref().map_or(Ok(()), |it| lock(it).check())
    }

    /// Our definitions, and a kubeconfig with the operator's own rights.
    pub async fn operators_config(&self) -> Result<PathBuf> {
        self.operator.get_or_try_init(|| self.install()).await.cloned()
    }

    async fn install(&self) -> Result<PathBuf> {
        self.definitions()?;
        self.namespace(SYSTEM_NAMESPACE).await?;
        let access = helm::template(self, &["--show-only", "templates/access.yaml"])?;
        self.kubectl_with(&["apply", "--namespace", SYSTEM_NAMESPACE], &access)?;
        let account = format!("{}-operator", helm::NAME);
        let token = self
            .kubectl(&["create", "token", &account, "--namespace", SYSTEM_NAMESPACE, TOKEN])
            .context("a token of the operator's service account")?;
        plane::with_token(self.config(), self.folder(), "operator", token.trim())
    }
}

/// Refuses a disk on which two nodes would not find room for the images: what fails then does not say why.
fn room(folder: &Path) -> Result<()> {
    let disk = rustix::fs::statvfs(folder).context("the run's folder")?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
    ensure!(
        free >= ROOM,
        "{}: its disk has {free} MiB free, two nodes need {ROOM}; free some, or set TMPDIR to a folder of another disk",
        folder.display()
    );
    Ok(())
}
