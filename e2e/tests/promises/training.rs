//! A job that really trains in pods on two nodes: what the promises about training share.
//!
//! In: a cluster with the chart installed. Out: a pool `p`, a job `j`, how far it is, and the bits of its losses beside
//! those of `cadre run` with the same data. Checkpoints and the header log lie on a volume that this process can read too,
//! so looking at the progress asks nobody.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use cadre_crds::TrainingJob;
use cadre_e2e::{Cluster, Release, until};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::objects::{all, find, of_job};
use crate::release::{ready, restricted, shared};

/// Steps of a job: enough for something to happen in the middle. A soak asks for more.
pub(crate) static STEPS: LazyLock<u64> = LazyLock::new(|| {
    let asked = std::env::var("CADRE_E2E_STEPS").ok().and_then(|it| it.parse().ok());
    asked.unwrap_or(200)
});
/// The step after which something happens.
pub(crate) const MIDDLE: u64 = 10;
/// Steps of a job that does not end by itself.
const ENDLESS: u64 = 1_000_000;
/// The learning rate grows all the time, so that a step's is the same however many follow.
const RATE: [&str; 2] = ["--lr=10", "--warmup=1000000"];
/// Rows of a trainer in a step.
const TOKENS: u32 = 512;

/// A job on its way.
pub(crate) struct Training<'a> {
    pub(crate) cluster: &'a Cluster,
    /// The namespace.
    pub(crate) here: &'static str,
    /// The installed chart.
    pub(crate) release: Release,
    data: PathBuf,
    volume: PathBuf,
    /// Jobs that have made steps: one for each attempt.
    attempts: Vec<String>,
    /// Steps of the job.
    length: u64,
    /// The objects, before they are applied.
    pub(crate) pool: Value,
    pub(crate) job: Value,
}

impl<'a> Training<'a> {
    /// Installs the chart, unless it is, and makes what the job needs. Its objects are not there yet.
    pub(crate) async fn prepare(cluster: &'a Cluster, here: &'static str) -> Result<Self> {
        let release = shared(cluster)?;
        Self::within(cluster, here, release).await
    }

    /// Another one beside it, in a namespace of its own.
    pub(crate) async fn beside(&self, here: &'static str) -> Result<Self> {
        Self::within(self.cluster, here, self.release).await
    }

    async fn within(cluster: &'a Cluster, here: &'static str, release: Release) -> Result<Self> {
        cluster.namespace(here).await?;
        restricted(cluster, here)?;
        // Others run meanwhile, and read theirs.
        let data = cluster.folder().join(format!("documents-{here}"));
        fs::create_dir_all(&data).context("a folder for documents")?;
        for (file, words, times) in [("a", "in the beginning was ", 300), ("b", "the word ", 500)] {
            fs::write(data.join(file), words.repeat(times)).context("a document")?;
        }
        let from = format!("--from-file={}", data.display());
        cluster.kubectl(&["create", "configmap", "documents", &from, "--namespace", here])?;
        let volume = writable(&cluster.folder().join(format!("checkpoints-{here}")))?;
        cluster.apply(here, &claim(here, "checkpoints", &volume).to_string())?;
        let (pool, job, length) = (pool(2), job("/documents", *STEPS), *STEPS);
        let attempts = Vec::new();
        Ok(Self { cluster, here, release, data, volume, attempts, length, pool, job })
    }

    /// Gives the job more steps than it will make: it trains until the promise has seen enough, on a machine of any speed.
    pub(crate) fn endless(&mut self) {
        self.ends_after(ENDLESS);
    }

    /// Gives the job so many steps.
    pub(crate) fn ends_after(&mut self, steps: u64) {
        self.length = steps;
        self.job = job("/documents", self.length);
    }

    /// Makes the pool, waits for its servers, makes the job.
    pub(crate) async fn start(&mut self, servers: u32) -> Result<()> {
        self.pool["spec"]["replicas"] = servers.into();
        self.cluster.apply(self.here, &self.pool.to_string())?;
        ready(self.cluster, self.here, servers).await?;
        self.cluster.apply(self.here, &self.job.to_string()).map(drop)
    }

    /// Waits until so many steps are done, as long as it takes: only standing still is a failure.
    pub(crate) async fn at(&self, step: u64) -> Result<()> {
        ensure!(step <= self.length, "{} is too fast: {step} of {} steps", self.here, self.length);
        let mut done = self.steps();
        while done < step {
            let next = step.min(done + MIDDLE);
            let what = format!("step {next}");
            let found = until(&what, async || Ok((self.steps() >= next).then_some(()))).await;
            self.explained(found)?;
            done = self.steps();
        }
        Ok(())
    }

    /// Steps that are done.
    pub(crate) fn steps(&self) -> u64 {
        let Ok(log) = self.headers() else { return 0 };
        fs::read_to_string(log).unwrap_or_default().lines().count() as u64
    }

    /// The job's header log.
    pub(crate) fn headers(&self) -> Result<PathBuf> {
        let mut jobs = fs::read_dir(&self.volume).context("the volume")?.flatten();
        let job = jobs.next().context("the job has a folder on the volume")?;
        Ok(job.path().join("headers.jsonl"))
    }

    /// Servers that each step was planned for: slots that are not vacant.
    pub(crate) fn plans(&self) -> Result<Vec<usize>> {
        let text = fs::read_to_string(self.headers()?).context("the header log")?;
        let count = |line: &str| -> Result<usize> {
            let header: Value = serde_json::from_str(line).context("a header")?;
            let fillers = header["fillers"].as_array().context("the header's fillers")?;
            Ok(fillers.iter().filter(|it| !it.is_null()).count())
        };
        text.lines().map(count).collect()
    }

    /// The numbers among them.
    pub(crate) fn servers(&self) -> Result<BTreeSet<usize>> {
        Ok(self.plans()?.into_iter().collect())
    }

    /// What was made of the job.
    pub(crate) async fn look(&self) -> Result<TrainingJob> {
        Ok(all::<TrainingJob>(self.cluster, self.here).get("j").await?)
    }

    /// Waits until the job's status is as wanted.
    pub(crate) async fn status(
        &self,
        what: &str,
        holds: impl Fn(&TrainingJob) -> bool,
    ) -> Result<()> {
        let found = until(what, async || {
            let job = self.look().await?;
            let failed = find(of_job(&job), "Failed").filter(|it| it.status == "True");
            ensure!(failed.is_none(), "the job failed: {failed:?}");
            Ok(holds(&job).then_some(()))
        });
        let found = found.await;
        self.explained(found)
    }

    /// Waits for the end of the job.
    pub(crate) async fn ends(&self) -> Result<()> {
        self.at(self.length).await?;
        let is =
            |job: &TrainingJob| find(of_job(job), "Complete").is_some_and(|it| it.status == "True");
        self.status("the end of the job", is).await
    }

    /// Waits for the end of the job, and for its figures in the status.
    pub(crate) async fn complete(&self) -> Result<()> {
        self.ends().await?;
        let last = |job: &TrainingJob| {
            let progress = job.status.as_ref().and_then(|it| it.progress.as_ref());
            progress.is_some_and(|it| it.step == self.length)
        };
        self.status("the last step in the status", last).await
    }

    /// The Job of this name is the next one to make steps.
    pub(crate) fn attempted(&mut self, job: &str) {
        self.attempts.push(job.to_owned());
    }

    /// The bits of every step's loss so far, as the last attempt that made the step has them; nothing for steps of attempts
    /// whose pods are gone. Of a job that has ended all steps are there.
    pub(crate) fn losses(&self) -> Result<Vec<String>> {
        let mut losses = Vec::new();
        for attempt in &self.attempts {
            for (step, bits) in losses_of(&self.log(attempt)?) {
                losses.resize(losses.len().max(step), String::new());
                losses[step - 1] = bits;
            }
        }
        let (found, length) = (losses.len() as u64, self.length);
        ensure!(found == length || length == ENDLESS, "losses of {found} steps of {length}");
        Ok(losses)
    }

    /// Checks that these losses have the bits of the same by `cadre run` on so many servers. Out: steps that are known.
    pub(crate) fn are_those_of(&self, servers: u32, losses: &[String]) -> Result<usize> {
        let expected = self.alone(servers, losses.len())?;
        let known = losses.iter().position(|it| !it.is_empty()).context("steps in the logs")?;
        ensure!(
            losses[known..] == expected[known..],
            "other bits than by itself from step {known}"
        );
        Ok(losses.len() - known)
    }

    /// Removes everything but the chart, which stays for the next one.
    pub(crate) fn remove(&self) -> Result<()> {
        let all = ["delete", "cadre,jobs", "--all", "--namespace", self.here, "--timeout=120s"];
        self.cluster.kubectl(&all).map(drop)
    }

    /// The losses of the first steps by `cadre run`, which needs no cluster.
    pub(crate) fn alone(&self, servers: u32, steps: usize) -> Result<Vec<String>> {
        // One run for all promises, unless one of them asks for more steps.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = if self.is_in_place() { "in-place" } else { "dedicated" };
        let out = self.cluster.folder().join(format!("alone-{servers}-{kind}"));
        let mut losses = by_itself(&out).unwrap_or_default();
        if losses.len() < steps {
            if out.exists() {
                fs::remove_dir_all(&out).context("a shorter run")?;
            }
            let least = if self.is_in_place() { 0 } else { *STEPS };
            self.run_alone(servers, &out, least.max(steps as u64), &[])?;
            losses = by_itself(&out)?;
        }
        losses.truncate(steps);
        ensure!(losses.len() == steps, "{} of {steps} steps by itself", losses.len());
        Ok(losses)
    }

    /// The losses of the first steps by `cadre run` with the headers of this job.
    pub(crate) fn replayed(&self, servers: u32, steps: usize) -> Result<Vec<String>> {
        let out = self.cluster.folder().join(format!("alone-{}", self.here));
        let log = self.headers()?.display().to_string();
        self.run_alone(servers, &out, steps as u64, &["--headers", &log])?;
        by_itself(&out)
    }

    fn is_in_place(&self) -> bool {
        self.pool["spec"]["inPlace"] == true
    }

    fn run_alone(&self, servers: u32, out: &Path, steps: u64, arguments: &[&str]) -> Result<()> {
        let data = self.data.to_str().context("a path in UTF-8")?;
        let manifest = out.with_extension("yaml");
        let (mut pool, mut job) = (pool(servers), job(data, steps));
        pool["spec"]["inPlace"] = self.is_in_place().into();
        for field in ["nodes", "procsPerNode"] {
            if let Some(value) = self.job["spec"].get(field) {
                job["spec"][field] = value.clone();
            }
        }
        let text = format!("{pool}\n---\n{job}\n");
        fs::write(&manifest, text).context("a manifest")?;
        let mut command = Command::new(self.cluster.programs().own("cadre")?);
        command.arg("run").arg("-f").arg(manifest).arg("--out").arg(out).args(arguments);
        let done = command.output().context("cadre run")?;
        ensure!(done.status.success(), "cadre run: {}", String::from_utf8_lossy(&done.stderr));
        Ok(())
    }

    /// What trainer 0 of a Job has said.
    pub(crate) fn log(&self, job: &str) -> Result<String> {
        let first = format!(
            "batch.kubernetes.io/job-name={job},batch.kubernetes.io/job-completion-index=0"
        );
        self.cluster.kubectl(&["logs", "--selector", &first, "--tail=-1", "--namespace", self.here])
    }

    /// Says what there is when something did not come.
    pub(crate) fn explained<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            let told = self.cluster.kubectl(&["describe", "cadre,pods", "--namespace", self.here]);
            println!("{}", told.unwrap_or_else(|error| format!("{error:#}")));
            let attempt = self.attempts.last().map_or("j-1", String::as_str);
            let log = self.log(attempt).unwrap_or_else(|error| format!("{error:#}"));
            let lines: Vec<_> = log.lines().collect();
            println!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
        result
    }

    /// Names and uids of the trainers' pods, by name.
    pub(crate) async fn trainers(&self) -> Result<Vec<(String, String)>> {
        crate::objects::pods(self.cluster, self.here, "cadre.dev/role=trainer").await
    }

    /// Kills the program of a pod, as the kernel does when memory is short.
    pub(crate) async fn kill(&self, pod: &str) -> Result<()> {
        let pods = all::<k8s_openapi::api::core::v1::Pod>(self.cluster, self.here);
        let uid = pods.get(pod).await?.uid().context("a pod has a uid")?;
        cadre_e2e::kill_pod(&uid, "cadre")
    }
}

/// Losses of a run of `cadre run`.
fn by_itself(out: &Path) -> Result<Vec<String>> {
    let log = fs::read_to_string(out.join("logs/trainer-0-0.log")).context("its log")?;
    Ok(losses_of(&log).into_iter().map(|it| it.1).collect())
}

/// Steps, from 1, and the bits of their losses.
fn losses_of(log: &str) -> Vec<(usize, String)> {
    let bits = |line: &str| {
        let (before, after) = line.split_once(", bits ")?;
        let step = before.rsplit_once("step ")?.1.split(' ').next()?.parse().ok()?;
        Some((step, after.get(..8)?.to_owned()))
    };
    log.lines().filter_map(bits).collect()
}

/// A loss from its bits.
pub(crate) fn loss(bits: &str) -> Result<f32> {
    Ok(f32::from_bits(u32::from_str_radix(bits, 16).with_context(|| format!("bits {bits:?}"))?))
}

/// What a container needs under the level *restricted*; the rest the operator adds.
pub(crate) fn pod(container: &Value) -> Value {
    let user = json!({"runAsNonRoot": true, "runAsUser": 65532});
    json!({"spec": {"securityContext": user, "containers": [container]}})
}

fn pool(servers: u32) -> Value {
    let server = json!({"name": "server", "image": cadre_e2e::IMAGE, "command": ["cadre", "serve"],
        "args": ["--threads=1"]});
    // Of a machine that does other things too one server is slower than the next, which is no trouble here.
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "AttentionPool", "metadata": {"name": "p"},
        "spec": {"replicas": servers, "inPlace": false, "health": {"slowFactorPercent": 10000},
            "template": pod(&server)}})
}

/// The trainer's container.
pub(crate) fn trainer(data: &str, steps: u64) -> Value {
    json!({"name": "trainer", "image": cadre_e2e::IMAGE, "command": ["cadre", "train"],
        "args": [format!("--data={data}"), "--model=tiny", format!("--steps={steps}"),
            format!("--tokens={TOKENS}"), "--cap=400", "--checkpoint-every=50", "--threads=1", RATE[0],
            RATE[1]],
        "volumeMounts": [{"name": "documents", "mountPath": "/documents"}]})
}

fn job(data: &str, steps: u64) -> Value {
    let mut template = pod(&trainer(data, steps));
    template["spec"]["restartPolicy"] = "Never".into();
    template["spec"]["volumes"] =
        json!([{"name": "documents", "configMap": {"name": "documents"}}]);
    json!({"apiVersion": "cadre.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "j"},
        "spec": {"nodes": 2, "attention": {"poolRef": {"name": "p"}, "wire": "F32",
            "reproducible": true, "poolWaitSeconds": 60}, "checkpoint": {"claimName": "checkpoints"},
            "template": template}})
}

/// A folder that the trainers' user, who is not ours, may write.
fn writable(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).context("a folder for checkpoints")?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).context("its rights")?;
    Ok(folder.to_owned())
}

/// A volume on this machine and a claim to it, `name`.
pub(crate) fn claim(here: &str, name: &str, folder: &Path) -> Value {
    let (size, volume) = (json!({"storage": "1Gi"}), format!("{here}-{name}"));
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": folder},
                "claimRef": {"namespace": here, "name": name}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": volume,
                "resources": {"requests": size}}}]})
}
