//! A job trains as pods on two nodes, with servers on both, through the operator that helm has installed: with the bits of a
//! local run, while one of the servers is killed in the middle.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::TrainingJob;
use cadre_e2e::{Cluster, until};
use serde_json::{Value, json};

use crate::installed::{clean, install, ready, restricted};
use crate::objects::{SERVERS, all, find, of_job, pods};

const HERE: &str = "trains";
/// Enough for a server to be killed in the middle.
const STEPS: u64 = 60;
/// Step from which it is.
const KILL: u64 = 5;

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    cluster.real_nodes().await?;
    clean(cluster)?;
    let release = install(cluster)?;
    cluster.namespace(HERE).await?;
    restricted(cluster, HERE)?;
    let data = cluster.folder().join("documents");
    fs::create_dir_all(&data).context("a folder for documents")?;
    for (file, words, times) in [("a", "in the beginning was ", 300), ("b", "the word ", 500)] {
        fs::write(data.join(file), words.repeat(times)).context("a document")?;
    }
    let expected = alone(cluster, data.to_str().context("a path in UTF-8")?)?;
    ensure!(expected.len() == STEPS as usize, "{} steps by itself", expected.len());
    let from = format!("--from-file={}", data.display());
    cluster.kubectl(&["create", "configmap", "documents", &from, "--namespace", HERE])?;
    cluster.apply(HERE, &pool().to_string())?;
    ready(cluster, HERE, 2).await?;
    cluster.apply(HERE, &job("/documents").to_string())?;

    let trained = train(cluster).await;
    if trained.is_err() {
        let told = cluster.kubectl(&["describe", "cadre,pods", "--namespace", HERE])?;
        println!("{told}\n{}", log(cluster).unwrap_or_else(|error| format!("{error:#}")));
    }
    trained?;
    let log = log(cluster)?;
    ensure!(losses(&log) == expected, "other bits than by itself:\n{log}");

    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=120s"])?;
    release.uninstall(cluster)
}

/// Waits for the end of the job, after a server was killed in the middle.
async fn train(cluster: &Cluster) -> Result<()> {
    let jobs = all::<TrainingJob>(cluster, HERE);
    until("steps", async || {
        let log = log(cluster).unwrap_or_default();
        Ok((losses(&log).len() as u64 >= KILL).then_some(()))
    })
    .await?;
    let victim = pods(cluster, HERE, SERVERS).await?.pop().context("two servers")?.0;
    let now = ["--grace-period=0", "--force", "--namespace", HERE];
    cluster.kubectl(&[&["delete", "pod", &victim], &now[..]].concat())?;
    until("the end of the job", async || {
        let job = jobs.get("j").await?;
        let failed = find(of_job(&job), "Failed").filter(|it| it.status == "True");
        ensure!(failed.is_none(), "the job failed: {failed:?}");
        Ok(find(of_job(&job), "Complete").filter(|it| it.status == "True").map(drop))
    })
    .await?;
    until("progress and the failover in the status", async || {
        let status = jobs.get("j").await?.status.unwrap_or_default();
        let step = status.progress.as_ref().map(|it| it.step);
        Ok((step == Some(STEPS) && status.failovers == 1 && status.attempt == 1).then_some(()))
    })
    .await
}

/// What trainer 0 has said.
fn log(cluster: &Cluster) -> Result<String> {
    let first = "batch.kubernetes.io/job-name=j-1,batch.kubernetes.io/job-completion-index=0";
    cluster.kubectl(&["logs", "--selector", first, "--tail=-1", "--namespace", HERE])
}

/// The bits of every step's loss, as the log of trainer 0 has them.
fn losses(log: &str) -> Vec<String> {
    let bits = |line: &str| Some(line.split_once(", bits ")?.1.get(..8)?.to_owned());
    log.lines().filter_map(bits).collect()
}

/// The same job by `cadre run`.
fn alone(cluster: &Cluster, data: &str) -> Result<Vec<String>> {
    let manifest = cluster.folder().join("run.yaml");
    fs::write(&manifest, format!("{}\n---\n{}\n", pool(), job(data))).context("a manifest")?;
    let out = cluster.folder().join("alone");
    let mut command = Command::new(cluster.programs().own("cadre")?);
    command.arg("run").arg("-f").arg(manifest).arg("--out").arg(&out);
    let done = command.output().context("cadre run")?;
    ensure!(done.status.success(), "cadre run: {}", String::from_utf8_lossy(&done.stderr));
    let log = fs::read_to_string(out.join("logs/trainer-0-0.log")).context("its log")?;
    Ok(losses(&log))
}

/// What a container needs under the level *restricted*; the rest the operator adds.
fn pod(container: &Value) -> Value {
    let user = json!({"runAsNonRoot": true, "runAsUser": 65532});
    json!({"spec": {"securityContext": user, "containers": [container]}})
}

fn pool() -> Value {
    let server = json!({"name": "server", "image": cadre_e2e::IMAGE, "command": ["cadre", "serve"],
        "args": ["--threads=1"]});
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool", "metadata": {"name": "p"},
        "spec": {"replicas": 2, "inPlace": false, "template": pod(&server)}})
}

fn job(data: &str) -> Value {
    let trainer = json!({"name": "trainer", "image": cadre_e2e::IMAGE, "command": ["cadre", "train"],
        "args": [format!("--data={data}"), "--model=tiny", format!("--steps={STEPS}"), "--tokens=256",
            "--cap=400", "--checkpoint-every=20", "--threads=1"],
        "volumeMounts": [{"name": "documents", "mountPath": "/documents"}]});
    let mut template = pod(&trainer);
    template["spec"]["restartPolicy"] = "Never".into();
    template["spec"]["volumes"] =
        json!([{"name": "documents", "configMap": {"name": "documents"}}]);
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "j"},
        "spec": {"nodes": 2, "attention": {"poolRef": {"name": "p"}, "wire": "F32",
            "reproducible": true, "poolWaitSeconds": 60}, "template": template}})
}
