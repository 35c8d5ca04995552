//! What the operator costs on a real API server, with nodes and pods of kwok.
//!
//! A pool of 1000 servers is made, grows by a tenth, rests for a minute and goes; then a pool of 512
//! servers stands beside 50 jobs on 200 nodes of 8 GPUs. Wall times are until the status is right. Writes
//! `target/bench/operator.json`; without the cluster's programs it says so and writes an empty list.
//! Wall times hold what the API server, the scheduler, kwok and the operator take together on this machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cadre_crds::{AttentionPool, AttentionPoolStatus, TrainingJob};
use cadre_e2e::programs::{Programs, root};
use cadre_e2e::{Cluster, Fake, Operator, Tier, fake, namespaces, until};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

const HERE: &str = "bench";
const SERVERS: u32 = 1000;
const REST: Duration = Duration::from_mins(1);
const JOBS: usize = 50;

fn main() -> ExitCode {
    let result = namespaces::run(|folder| {
        let missing = Programs::find().and_then(|it| it.missing_for(Tier::FakeNodes));
        if let Err(reason) = missing {
            println!("operator is not measured here: {reason:#}");
            write(&[])?;
            return Ok(ExitCode::SUCCESS);
        }
        let runtime = tokio::runtime::Runtime::new().context("a runtime")?;
        write(&runtime.block_on(measure(folder))?)?;
        Ok(ExitCode::SUCCESS)
    });
    result.unwrap_or_else(|error| {
        println!("the bench has failed: {error:#}");
        ExitCode::FAILURE
    })
}

fn write(lines: &[Value]) -> Result<()> {
    let folder = root().join("target/bench");
    std::fs::create_dir_all(&folder).context("target/bench")?;
    let text = serde_json::to_string_pretty(lines).context("lines")?;
    std::fs::write(folder.join("operator.json"), text).context("target/bench/operator.json")
}

/// Lines of the result.
#[derive(Default)]
struct Lines(Vec<Value>);

impl Lines {
    fn add(&mut self, case: &str, ours: f64, unit: &str) {
        println!("{case:<64} {ours:>9.2} {unit}");
        self.0.push(json!({
            "case": case, "ours": ours, "peer": null, "peer_name": "none", "unit": unit, "ratio": null,
        }));
    }

    /// How often the operator asked for what since `before`.
    fn requests(
        &mut self,
        case: &str,
        cluster: &Cluster,
        before: &BTreeMap<String, u64>,
    ) -> Result<()> {
        for (verb, count) in cluster.operators_requests()? {
            let count = count - before.get(&verb).copied().unwrap_or(0);
            if count > 0 {
                self.add(&format!("{case}: requests {verb}"), count as f64, "");
            }
        }
        Ok(())
    }
}

async fn measure(folder: &Path) -> Result<Vec<Value>> {
    let mut lines = Lines::default();
    let mut cluster = Cluster::start(folder).await?;
    cluster.add_fake_nodes(Fake { nodes: 200, gpus: 8, rack: 10 }).await?;
    let operator = Operator::leading(&cluster, 8080).await?;
    cluster.namespace(HERE).await?;
    large_pool(&cluster, &operator, &mut lines).await?;
    many_jobs(&cluster, &operator, &mut lines).await?;
    Ok(lines.0)
}

async fn large_pool(cluster: &Cluster, operator: &Operator, lines: &mut Lines) -> Result<()> {
    let case = format!("pool of {SERVERS}");
    let start = operator.sample()?;
    let mut before = cluster.operators_requests()?;
    let began = Instant::now();
    cluster.apply(HERE, &pool(SERVERS, ""))?;
    ready(cluster, SERVERS).await?;
    lines.add(&format!("{case}: apply to all ready and said so"), seconds(began), "s");
    lines.requests(&format!("{case}, apply"), cluster, &before)?;

    before = cluster.operators_requests()?;
    let more = SERVERS + SERVERS / 10;
    let began = Instant::now();
    cluster.kubectl(&[
        "scale",
        "attnpool/p",
        &format!("--replicas={more}"),
        "--namespace",
        HERE,
    ])?;
    ready(cluster, more).await?;
    lines.add(&format!("{case}: a tenth more"), seconds(began), "s");
    lines.requests(&format!("{case}, a tenth more"), cluster, &before)?;

    let (rest, before) = (operator.sample()?, cluster.operators_requests()?);
    let writes = operator.metric("cadre_operator_status_writes_total")?;
    tokio::time::sleep(REST).await;
    let spent = operator.sample()?.processor_seconds - rest.processor_seconds;
    lines.add(&format!("{case}, at rest for 60 s: processor"), spent, "s");
    let written = operator.metric("cadre_operator_status_writes_total")? - writes;
    lines.add(&format!("{case}, at rest for 60 s: statuses written"), written as f64, "");
    lines.requests(&format!("{case}, at rest for 60 s"), cluster, &before)?;

    let before = cluster.operators_requests()?;
    let began = Instant::now();
    cluster.kubectl(&["delete", "attnpool", "p", "--namespace", HERE])?;
    gone(cluster).await?;
    lines.add(&format!("{case}: delete to the last pod gone"), seconds(began), "s");
    lines.requests(&format!("{case}, delete"), cluster, &before)?;
    let end = operator.sample()?;
    let spent = end.processor_seconds - start.processor_seconds;
    lines.add(&format!("{case}: processor of the operator, all of the above"), spent, "s");
    lines.add(&format!("{case}: most memory of the operator"), mebibytes(end.peak_bytes), "MiB");
    Ok(())
}

/// 50 jobs of 2 nodes each with all of their GPUs, and 512 servers of one GPU in their racks.
async fn many_jobs(cluster: &Cluster, operator: &Operator, lines: &mut Lines) -> Result<()> {
    let case = format!("512 servers, {JOBS} jobs, 200 nodes of 8 GPUs");
    let before = cluster.operators_requests()?;
    let writes = operator.metric("cadre_operator_status_writes_total")?;
    let began = Instant::now();
    let placement = format!(
        "  fabric: {{gpusPerServer: 1}}\n  placement: {{levels: [{}], colocation: Preferred}}\n",
        fake::RACK
    );
    let jobs: Vec<_> = (0..JOBS).map(job).collect();
    cluster.apply(HERE, &jobs.join("---\n"))?;
    cluster.apply(HERE, &pool(512, &placement))?;
    let running = async || -> Result<Option<()>> {
        let api: Api<TrainingJob> = Api::namespaced(cluster.client(), HERE);
        let found = api.list(&ListParams::default()).await?;
        let run = found.iter().filter(|it| {
            let conditions = it.status.as_ref().map_or(&[][..], |it| &it.conditions);
            conditions.iter().any(|it| it.type_ == "Running" && it.status == "True")
        });
        Ok((run.count() == JOBS).then_some(()))
    };
    until("all jobs", running).await?;
    lines.add(&format!("{case}: jobs running"), seconds(began), "s");
    let status = ready(cluster, 512).await?;
    lines.add(&format!("{case}: servers ready"), seconds(began), "s");
    let placed = status.conditions.iter().find(|it| it.type_ == "PlacementSatisfied");
    let words = placed.map_or("", |it| it.message.as_str());
    println!("{case}: {words}");
    let near = words.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0.0);
    lines.add(&format!("{case}: servers in a rack with trainers"), near, "");
    let written = operator.metric("cadre_operator_status_writes_total")? - writes;
    lines.add(&format!("{case}: statuses written"), written as f64, "");
    lines.requests(&case, cluster, &before)?;
    let began = Instant::now();
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE])?;
    gone(cluster).await?;
    lines.add(&format!("{case}: delete to the last pod gone"), seconds(began), "s");
    let peak = mebibytes(operator.sample()?.peak_bytes);
    lines.add(&format!("{case}: most memory of the operator"), peak, "MiB");
    Ok(())
}

fn pool(servers: u32, more: &str) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: p}}\nspec:\n  \
         replicas: {servers}\n  inPlace: false\n{more}"
    )
}

fn job(number: usize) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: j{number}}}\nspec:\n  \
         nodes: 2\n  attention: {{poolRef: {{name: p}}}}\n  template:\n    spec:\n      containers:\n      \
         - {{name: trainer, image: 'example.com/trainer:1', resources: {{limits: {{nvidia.com/gpu: 8}}}}}}\n"
    )
}

async fn ready(cluster: &Cluster, servers: u32) -> Result<AttentionPoolStatus> {
    let pools: Api<AttentionPool> = Api::namespaced(cluster.client(), HERE);
    until(&format!("{servers} servers"), async || {
        let status = pools.get("p").await?.status;
        Ok(status.filter(|it| {
            let settled = it.conditions.iter().find(|it| it.type_ == "Progressing");
            it.ready == servers && settled.is_some_and(|it| it.status == "False")
        }))
    })
    .await
}

async fn gone(cluster: &Cluster) -> Result<()> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client(), HERE);
    // One object is enough to know.
    let any = ListParams::default().limit(1);
    until("the last pod's end", async || {
        Ok(pods.list_metadata(&any).await?.items.is_empty().then_some(()))
    })
    .await
}

fn seconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64()
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
