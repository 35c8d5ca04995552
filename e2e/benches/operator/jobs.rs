//! 50 jobs of 2 nodes each with all of their GPUs, and 512 servers of one GPU in their racks, on 200 nodes.
//!
//! In: a cluster with fake nodes. Out: lines; how many servers are in a rack with trainers is read from the pods, not
//! from the status.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use cadre_crds::TrainingJob;
use cadre_e2e::{Cluster, Operator, fake, until};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use super::{Counted, HERE, Lines, gone, pool_of, ready};

const JOBS: usize = 50;
const SERVERS: u32 = 512;

pub(crate) async fn measure(cluster: &Cluster, lines: &mut Lines) -> Result<()> {
    let operator = Operator::leading(cluster, 8083).await?;
    for colocation in ["Preferred", "Required"] {
        let case = format!("{SERVERS} servers, {JOBS} jobs, 200 nodes of 8 GPUs, {colocation}");
        let counted = Counted::from_now(cluster, &operator)?;
        let placement = format!(
            "  fabric: {{gpusPerServer: 1}}\n  placement: {{levels: [{}], colocation: {colocation}}}\n",
            fake::RACK
        );
        let pool =
            |servers| pool_of("p", servers, &placement).replace("Place: false", "Place: true");
        let jobs: Vec<_> = (0..JOBS).map(job).collect();
        // Servers that came first would take GPUs of whole nodes.
        cluster.apply(HERE, &pool(0))?;
        cluster.apply(HERE, &jobs.join("---\n"))?;
        all_run(cluster).await?;
        counted.tell(&format!("{case}, jobs run"), lines)?;
        let counted = Counted::from_now(cluster, &operator)?;
        cluster.apply(HERE, &pool(SERVERS))?;
        let status = ready(cluster, SERVERS).await?;
        counted.tell(&format!("{case}, servers ready"), lines)?;
        let placed = status.conditions.iter().find(|it| it.type_ == "PlacementSatisfied");
        println!("{case}: the status says {:?}", placed.map(|it| &it.message));
        lines.add(&format!("{case}: servers in a rack with trainers"), near(cluster).await?, "");
        let counted = Counted::from_now(cluster, &operator)?;
        cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE])?;
        gone(cluster).await?;
        counted.tell(&format!("{case}, delete to the last pod gone"), lines)?;
    }
    operator.stop()
}

async fn all_run(cluster: &Cluster) -> Result<()> {
    let api: Api<TrainingJob> = Api::namespaced(cluster.client(), HERE);
    until("all jobs", async || {
        let found = api.list(&ListParams::default()).await?;
        let run = found.iter().filter(|it| {
            let conditions = it.status.as_ref().map_or(&[][..], |it| &it.conditions);
            conditions.iter().any(|it| it.type_ == "Running" && it.status == "True")
        });
        Ok((run.count() == JOBS).then_some(()))
    })
    .await
}

/// Servers whose rack has a trainer.
async fn near(cluster: &Cluster) -> Result<f64> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let racks: BTreeMap<String, String> = nodes
        .list(&ListParams::default())
        .await?
        .into_iter()
        .filter_map(|it| Some((it.name_any(), it.labels().get(fake::RACK)?.clone())))
        .collect();
    let pods: Api<Pod> = Api::namespaced(cluster.client(), HERE);
    let rack = |pod: &Pod| racks.get(pod.spec.as_ref()?.node_name.as_ref()?).cloned();
    let of = async |role: &str| -> Result<Vec<String>> {
        let labels = format!("cadre.dev/role={role}");
        let found = pods.list(&ListParams::default().labels(&labels)).await?;
        Ok(found.iter().filter_map(rack).collect())
    };
    let trainers: BTreeSet<String> = of("trainer").await?.into_iter().collect();
    let servers = of("server").await?;
    Ok(servers.iter().filter(|it| trainers.contains(*it)).count() as f64)
}

fn job(number: usize) -> String {
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: j{number}}}\nspec:\n  \
         nodes: 2\n  attention: {{poolRef: {{name: p}}}}\n  template:\n    spec:\n      containers:\n      \
         - {{name: trainer, image: 'example.com/trainer:1', resources: {{limits: {{nvidia.com/gpu: 8}}}}}}\n"
    )
}
