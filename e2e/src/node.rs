//! A real node: containerd and a kubelet in network, mount and process namespaces of their own.
//!
//! ```text
//! start ─▶ ready ──kill──▶ gone ──start──▶ ready          a crash, and a reboot
//! ```
//!
//! In: a cluster, a number, images. Out: the node is ready and runs pods. The machine's own containerd, if
//! it has one, is not touched. Cgroups of version 1 and 2 are both provided for; the run says which of
//! them the machine does not have, since that one is not tested.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;

use crate::access::Access;
use crate::fake::is_ready;
use crate::namespaces;
use crate::network;
use crate::plane::kubeconfig;
use crate::process::Process;
use crate::programs::{cni, root, system};
use crate::wait::until;

/// A running node.
#[derive(Debug)]
pub struct Node {
    name: String,
    number: usize,
    folder: PathBuf,
    process: Process,
}

impl Node {
    /// Starts node `number`, from 1, with these images; returns when it is ready.
    pub async fn start(cluster: &Access, number: usize, images: &[PathBuf]) -> Result<Self> {
        let name = name(number);
        let folder = cluster.folder().join(&name);
        configure(cluster, number, &folder)?;
        let images: Vec<_> = images.iter().map(|it| it.display().to_string()).collect();
        let mut command = Command::new(system("unshare")?);
        command
            .args(["--net", "--mount", "--propagation", "private", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc", "--"])
            .arg(root().join("e2e/node/start"))
            .env("NAME", &name)
            .env("ADDRESS", network::address(number))
            .env("FOLDER", &folder)
            .env("CONFIGS", cluster.folder())
            .env("KUBELET", cluster.programs().path("kubelet")?)
            .env("KUBE_PROXY", cluster.programs().path("kube-proxy")?)
            .env("IMAGES", images.join(" "));
        let mut process = Process::start(&name, cluster.folder(), &mut command)?;
        let own = fs::read_link("/proc/self/ns/net").context("our network namespace")?;
        until("the node's network namespace", async || {
            process.check()?;
            let its = fs::read_link(format!("/proc/{}/ns/net", process.id()))?;
            Ok((its != own).then_some(()))
        })
        .await?;
        network::join(number, process.id())?;
        let nodes: Api<NodeObject> = Api::all(cluster.client());
        until(&format!("node {name}"), async || {
            process.check()?;
            Ok(nodes.get_opt(&name).await?.filter(is_ready).map(drop))
        })
        .await?;
        Ok(Self { name, number, folder, process })
    }

    /// Name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of the node, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The log of its kubelet.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("kubelet.log")).unwrap_or_default()
    }

    /// The machine crashes: everything on it is gone at once, its network too.
    pub fn kill(self) -> Result<()> {
        network::leave(self.number)?;
        self.process.kill()
    }
}

fn name(number: usize) -> String {
    format!("node-{}", ["a", "b"][number - 1])
}

fn configure(cluster: &Access, number: usize, folder: &Path) -> Result<()> {
    let name = name(number);
    for part in ["cni", "kubelet", "opt", "plugins", "logs", "addresses"] {
        fs::create_dir_all(folder.join(part)).context("a folder of a node")?;
    }
    for user in [name.as_str(), "kube-proxy"] {
        kubeconfig(cluster.folder(), user)?;
    }
    let write = |file: &str, text: String| {
        fs::write(folder.join(file), text).with_context(|| format!("{file} of {name}"))
    };
    write("containerd.toml", containerd(folder)?)?;
    write("cni/10-pods.conflist", pods(number, folder))?;
    write("resolv.conf", format!("nameserver {}\n", network::HOST))?;
    write("kubelet.yaml", kubelet(cluster, number, folder, &cgroup(&name)?))
}

fn containerd(folder: &Path) -> Result<String> {
    let at = folder.display();
    Ok(format!(
        r#"version = 2
root = "{at}/containerd/root"
state = "{at}/containerd/state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{at}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{at}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
# A process may not lower its own score in a container.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{at}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "{runc}"
"#,
        cni = cni()?.display(),
        runc = system("runc")?.display(),
    ))
}

/// Image that holds a pod's network.
pub(crate) const PAUSE: &str = "localhost/pause:e2e";

fn pods(number: usize, folder: &Path) -> String {
    let subnet = network::pods(number);
    let at = folder.display();
    format!(
        r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {{"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true, "ipMasq": false,
    "ipam": {{"type": "host-local", "dataDir": "{at}/addresses", "ranges": [[{{"subnet": "{subnet}"}}]],
             "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
]}}
"#
    )
}

fn kubelet(cluster: &Access, number: usize, folder: &Path, cgroup: &str) -> String {
    let at = folder.display();
    format!(
        r"apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {ca}}}}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: {cgroup}
clusterDNS: [{dns}]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://{at}/containerd.sock
evictionHard: {{memory.available: 100Mi, nodefs.available: 64Mi, imagefs.available: 64Mi, nodefs.inodesFree: 1k}}
failCgroupV1: false
failSwapOn: false
healthzBindAddress: 127.0.0.1
imageGCHighThresholdPercent: 100
nodeLeaseDurationSeconds: 4
nodeStatusUpdateFrequency: 2s
podLogsDir: {at}/logs
resolvConf: {at}/resolv.conf
syncFrequency: 10s
volumePluginDir: {at}/plugins
",
        address = network::address(number),
        ca = cluster.folder().join("keys/ca.crt").display(),
        dns = network::HOST,
    )
}

/// Makes the cgroup below which a node keeps its own. Out: its path.
fn cgroup(node: &str) -> Result<String> {
    let run = namespaces::cgroup();
    for hierarchy in namespaces::hierarchies() {
        // The second version beside the first one has no controllers.
        if hierarchy.ends_with("unified") {
            continue;
        }
        let mut parent = hierarchy;
        for part in [run.as_str(), node] {
            let folder = parent.join(part);
            fs::create_dir_all(&folder)
                .with_context(|| format!("{}: cannot be made", folder.display()))?;
            // An empty set of processors takes no process; version 2 inherits by itself.
            if folder.join("cpuset.cpus").exists() && !namespaces::is_version_2() {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let set = fs::read_to_string(parent.join(file)).context("a cpuset")?;
                    fs::write(folder.join(file), set).context("a cpuset")?;
                }
            }
            parent = folder;
        }
    }
    Ok(format!("/{run}/{node}"))
}
