//! What the operator costs on a real API server, with nodes and pods of kwok.
//!
//! ```text
//! pool         1000 servers are made, a tenth more, rest for a minute, go; the reason of one that cannot start
//! connections  1000 workers on the control service of an operator that has just started
//! jobs         50 jobs on 200 nodes of 8 GPUs beside a pool of 512 servers near to them
//! ```
//!
//! Words on the command line choose among these. Wall times are until the status is right, and hold what the API
//! server, the scheduler, kwok and the operator take together on this machine. Writes
//! `target/bench/operator.json`; without the cluster's programs it says so and writes an empty list.

mod connections;
mod jobs;
mod pool;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use cadre_crds::{AttentionPool, AttentionPoolStatus};
use cadre_e2e::programs::{Programs, root};
use cadre_e2e::{Cluster, Fake, Operator, Tier, namespaces, until};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

/// Namespace of everything.
const HERE: &str = "bench";

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    let result = namespaces::run(|folder| {
        let missing = Programs::find().and_then(|it| it.missing_for(Tier::FakeNodes));
        if let Err(reason) = missing {
            println!("operator is not measured here: {reason:#}");
            write(&[])?;
            return Ok(ExitCode::SUCCESS);
        }
        let runtime = tokio::runtime::Runtime::new().context("a runtime")?;
        write(&runtime.block_on(measure(folder, &words))?)?;
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

async fn measure(folder: &Path, words: &[String]) -> Result<Vec<Value>> {
    let chosen = |name: &str| words.is_empty() || words.iter().any(|it| it == name);
    let mut lines = Lines::default();
    let cluster = Cluster::start(folder).await?;
    cluster.add_fake_nodes(Fake { nodes: 200, gpus: 8, rack: 10 }).await?;
    cluster.namespace(HERE).await?;
    if chosen("pool") {
        pool::measure(&cluster, &mut lines).await?;
    }
    if chosen("connections") {
        connections::measure(&cluster, &mut lines).await?;
    }
    if chosen("jobs") {
        jobs::measure(&cluster, &mut lines).await?;
    }
    Ok(lines.0)
}

/// Lines of the result.
#[derive(Default)]
struct Lines(Vec<Value>);

impl Lines {
    fn add(&mut self, case: &str, ours: f64, unit: &str) {
        println!("{case:<72} {ours:>9.2} {unit}");
        self.0.push(json!({
            "case": case, "ours": ours, "peer": null, "peer_name": "none", "unit": unit, "ratio": null,
        }));
    }
}

/// Everything that is counted, from one moment on.
struct Counted<'a> {
    cluster: &'a Cluster,
    operator: &'a Operator,
    requests: BTreeMap<String, u64>,
    writes: u64,
    looks: u64,
    processor: f64,
    began: Instant,
}

impl<'a> Counted<'a> {
    fn from_now(cluster: &'a Cluster, operator: &'a Operator) -> Result<Self> {
        Ok(Self {
            cluster,
            operator,
            requests: cluster.operators_requests()?,
            writes: operator.metric("cadre_operator_status_writes_total")?,
            looks: operator.metric("cadre_operator_reconciles_total")?,
            processor: operator.sample()?.processor_seconds,
            began: Instant::now(),
        })
    }

    /// Tells all of it.
    fn tell(&self, case: &str, lines: &mut Lines) -> Result<()> {
        let wall = self.began.elapsed().as_secs_f64();
        let sample = self.operator.sample()?;
        lines.add(&format!("{case}: wall"), wall, "s");
        let spent = sample.processor_seconds - self.processor;
        lines.add(&format!("{case}: processor of the operator"), spent, "s");
        lines.add(
            &format!("{case}: most memory of the operator so far"),
            mebibytes(sample.peak_bytes),
            "MiB",
        );
        let looks = self.operator.metric("cadre_operator_reconciles_total")? - self.looks;
        lines.add(&format!("{case}: looks"), looks as f64, "");
        let writes = self.operator.metric("cadre_operator_status_writes_total")? - self.writes;
        lines.add(&format!("{case}: statuses written"), writes as f64, "");
        for (verb, count) in self.cluster.operators_requests()? {
            let count = count - self.requests.get(&verb).copied().unwrap_or(0);
            if count > 0 {
                lines.add(&format!("{case}: requests {verb}"), count as f64, "");
            }
        }
        Ok(())
    }
}

/// A pool `p` without trainers that serve, with more in its spec, lines of YAML in two spaces.
fn pool_of(name: &str, servers: u32, more: &str) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: {name}}}\nspec:\n  \
         replicas: {servers}\n  inPlace: false\n{more}"
    )
}

/// Waits until all servers are ready and the status says so.
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

/// Waits until no pod is left.
async fn gone(cluster: &Cluster) -> Result<()> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client(), HERE);
    // One object is enough to know.
    let any = ListParams::default().limit(1);
    until("the last pod's end", async || {
        Ok(pods.list_metadata(&any).await?.items.is_empty().then_some(()))
    })
    .await
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Median and largest.
fn middle_and_most(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |it: usize| times.get(it).copied().unwrap_or(f64::NAN);
    (at(times.len() / 2), at(times.len().saturating_sub(1)))
}
