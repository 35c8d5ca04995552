//! The Llama of `make demo-pytorch` trains in pods, with the losses of one rank without a pool: in one of a `TrainingJob`, by one
//! torchrun with two ranks; and in two of a plain Indexed Job on two nodes, a rank each, which join the pool by its label.
//!
//! Python, torch and the package are folders of this machine, mounted for reading.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::programs::root;
use cadre_e2e::{Cluster, IMAGE, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::objects::{all, cadre, find, of_job};
use crate::plain_pods_join_a_pool_and_train::{ends, indexed};
use crate::training::{Training, claim, pod};

/// Steps of the job.
const STEPS: usize = 4;
/// Rows of a rank in a step.
const TOKENS: usize = 512;
/// Ranks of the job.
const RANKS: usize = 2;
/// Where a pod has the package and the examples.
const FILES: &str = "/files";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut training = Training::prepare(cluster, "python").await?;
    let python = Python::prepare(&training)?;
    let alone = python.alone()?;
    training.job = python.job();
    training.start(2).await?;
    training.attempted("j-1");
    has_servers(&training, "j").await?;
    let is_complete = |job: &_| find(of_job(job), "Complete").is_some_and(|it| it.status == "True");
    training.status("the end of the job", is_complete).await?;
    is_like(&losses(&training.log("j-1")?)?, &alone)?;
    has_steps(&training, "j")?;
    for it in [meeting(), python.plain()] {
        training.cluster.apply(training.here, &it.to_string())?;
    }
    training.attempted("plain");
    ends(&training).await?;
    let pods = all::<Pod>(training.cluster, training.here).list(&ListParams::default()).await?;
    let ranks = pods.iter().filter(|it| it.name_any().starts_with("plain-"));
    let nodes = ranks.filter_map(|it| it.spec.as_ref()?.node_name.clone());
    ensure!(nodes.collect::<BTreeSet<_>>().len() == 2, "both ranks are on one node");
    is_like(&losses(&training.log("plain")?)?, &alone)?;
    training.remove()
}

/// Python on this machine, and what a pod mounts of it.
struct Python {
    program: PathBuf,
    /// A folder of this machine with the package and the examples.
    files: PathBuf,
    script: String,
    /// Claims and where they are mounted.
    mounts: Vec<(&'static str, PathBuf)>,
}

impl Python {
    /// The package of this build and the examples in a folder, and claims to all that a pod needs.
    fn prepare(training: &Training<'_>) -> Result<Self> {
        let cluster = training.cluster;
        let requirements = root().join("python/requirements.txt");
        let mut command = Command::new(root().join("scripts/environment"));
        let environment = said(command.arg("pytorch").arg(requirements))?;
        let program = Path::new(&environment).join("bin/python");
        let base = said(Command::new(&program).args(["-c", "import sys; print(sys.base_prefix)"]))?;

        let files = cluster.folder().join("python");
        for from in ["python/cadre", "examples"] {
            let to = files.join(from);
            fs::create_dir_all(&to).context("a folder for Python")?;
            said(Command::new("cp").args(["-rL"]).arg(root().join(from).join(".")).arg(&to))?;
        }
        let native = cluster.programs().own("libcadre_python.so")?;
        fs::copy(native, files.join("python/cadre/_native.abi3.so")).context("the native half")?;

        let mut mounts = vec![
            ("usr", PathBuf::from("/usr")),
            ("environment", environment.into()),
            ("files", FILES.into()),
        ];
        if !Path::new(&base).starts_with("/usr") {
            mounts.push(("interpreter", base.into()));
        }
        for (name, place) in &mounts {
            let folder = if *name == "files" { &files } else { place };
            cluster.apply(training.here, &claim(training.here, name, folder).to_string())?;
        }
        let script = format!("{FILES}/examples/pytorch_llama.py");
        Ok(Self { program, files, script, mounts })
    }

    /// The losses of one rank that has all rows and no job.
    fn alone(&self) -> Result<Vec<f64>> {
        let mut command = Command::new(&self.program);
        let script = root().join("examples/pytorch_llama.py");
        command.arg(script).args(arguments(RANKS * TOKENS));
        losses(&said(command.env("PYTHONPATH", self.files.join("python")).envs(ENVIRONMENT))?)
    }

    /// Makes a container one that runs the script, by torchrun or as one rank.
    fn equip(&self, container: &mut Value, launcher: &[&str]) {
        container["image"] = IMAGE.into();
        let program = [self.program.to_string_lossy()];
        let words = program.iter().map(AsRef::as_ref).chain(launcher.iter().copied());
        container["command"] = words.chain([self.script.as_str()]).collect();
        container["args"] = json!(arguments(TOKENS));
        let mut push = |list: &str, one: Value| match container[list].as_array_mut() {
            Some(all) => all.push(one),
            None => container[list] = json!([one]),
        };
        push("env", json!({"name": "PYTHONPATH", "value": format!("{FILES}/python")}));
        for (name, value) in ENVIRONMENT {
            push("env", json!({"name": name, "value": value}));
        }
        for (name, place) in &self.mounts {
            push("volumeMounts", json!({"name": name, "mountPath": place, "readOnly": true}));
        }
    }

    /// Volumes of the claims.
    fn volumes(&self) -> Vec<Value> {
        let volume =
            |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
        self.mounts.iter().map(|it| volume(it.0)).collect()
    }

    /// Both ranks in one pod.
    fn job(&self) -> Value {
        let mut container = json!({"name": "trainer"});
        self.equip(&mut container, &["-m", "torch.distributed.run"]);
        let mut template = pod(&container);
        template["spec"]["restartPolicy"] = "Never".into();
        template["spec"]["volumes"] = self.volumes().into();
        json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "j"},
            "spec": {"nodes": 1, "procsPerNode": RANKS, "failurePolicy": {"maxRestarts": 0},
                "attention": {"poolRef": {"name": "p"}, "wire": "F32", "poolWaitSeconds": 60},
                "checkpoint": {"claimName": "checkpoints"}, "template": template}})
    }

    /// Each rank in a pod of a plain Job, on a node of its own.
    fn plain(&self) -> Value {
        let text = |name: &str, value: &str| json!({"name": name, "value": value});
        let meets = [("MASTER_ADDR", "plain-0.plain"), ("MASTER_PORT", "29500")];
        let mut container =
            json!({"name": "trainer", "env": meets.map(|it| text(it.0, it.1)), "volumeMounts": []});
        self.equip(&mut container, &[]);
        let mut job = indexed(container, &self.volumes());
        let spec = &mut job["spec"]["template"]["spec"];
        spec["subdomain"] = "plain".into();
        let each = json!({"matchLabels": {"batch.kubernetes.io/job-name": "plain"}});
        spec["topologySpreadConstraints"] = json!([{"maxSkew": 1, "labelSelector": each,
            "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}]);
        job
    }
}

/// Gives ranks of the plain Job names by which they find each other.
fn meeting() -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "plain"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": true,
            "selector": {"batch.kubernetes.io/job-name": "plain"}}})
}

/// `cadre status` shows the steps of a job.
fn has_steps(training: &Training<'_>, job: &str) -> Result<()> {
    let (good, text) = cadre(training.cluster, training.here, &["status"])?;
    let named = format!("{}/{job} ", training.here);
    let row = text.lines().find(|it| it.contains(&named)).unwrap_or_default();
    ensure!(good && row.contains(&format!("/{STEPS} ")), "no steps of {job} in: {text}");
    Ok(())
}

/// What keeps Python from writing and from asking the network.
const ENVIRONMENT: [(&str, &str); 3] =
    [("PYTHONDONTWRITEBYTECODE", "1"), ("HF_HUB_OFFLINE", "1"), ("HOME", "/tmp")];

fn arguments(tokens: usize) -> [String; 2] {
    [format!("--steps={STEPS}"), format!("--tokens={tokens}")]
}

/// What a program prints.
fn said(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8_lossy(&done.stdout).trim_end().to_owned())
}

/// The losses that the script prints.
fn losses(log: &str) -> Result<Vec<f64>> {
    let lines = log.lines().filter_map(|it| it.strip_prefix("step ")?.split_once(" loss "));
    let losses: Vec<f64> =
        lines.map(|it| it.1.parse()).collect::<Result<_, _>>().context("a loss")?;
    ensure!(losses.len() == STEPS, "{} losses of {STEPS} steps in: {log}", losses.len());
    Ok(losses)
}

/// Losses are those of one rank without a pool, but for the order of sums.
fn is_like(losses: &[f64], alone: &[f64]) -> Result<()> {
    let apart = losses.iter().zip(alone).map(|(one, other)| (one - other).abs());
    let apart = apart.fold(0.0, f64::max);
    ensure!(apart <= 1e-4, "{apart} apart: {losses:?} and {alone:?}");
    Ok(())
}

/// Waits until both servers work for a job. Only they compute: the pool has none in place, and a job without a server waits.
async fn has_servers(training: &Training<'_>, job: &str) -> Result<()> {
    let found = until("servers of the job", async || {
        let pool = all::<AttentionPool>(training.cluster, training.here).get("p").await?;
        let status = pool.status.context("a status")?;
        let held = status.holders.iter().filter(|it| it.name == job).flat_map(|it| &it.servers);
        Ok((held.count() == 2).then_some(()))
    });
    let found = found.await;
    training.explained(found)
}
