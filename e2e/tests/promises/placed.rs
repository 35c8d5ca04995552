//! On a large fleet servers sit where their trainers are: 50 jobs and 512 servers of two pools on 200 nodes of 8 GPUs. One
//! pool would like to be in its trainers' racks, the other has to be; racks without trainers stay empty, though they have
//! room, and a server that finds none near its trainers waits, with the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Fake, Operator, fake, until};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use crate::objects::{all, find, of_pool};

const HERE: &str = "placed";
const FLEET: Fake = Fake { nodes: 200, gpus: 8, rack: 10 };
/// Jobs of each pool, of two trainers with four GPUs each: a node has room for servers beside one.
const JOBS: usize = 25;

/// A pool, where its trainers may run, and how many servers it has.
struct Part {
    pool: &'static str,
    colocation: &'static str,
    racks: std::ops::Range<usize>,
    servers: u32,
}

/// The racks of `bound` have 640 GPUs, of which trainers take 200.
const PARTS: [Part; 2] = [
    Part { pool: "near", colocation: "Preferred", racks: 0..7, servers: 112 },
    Part { pool: "bound", colocation: "Required", racks: 7..15, servers: 400 },
];
/// What `bound` is scaled to: eight more than there is room for.
const TOO_MANY: u32 = 448;

pub(crate) async fn keep(cluster: &mut Cluster) -> Result<()> {
    cluster.add_fake_nodes(FLEET).await?;
    let operator = Operator::leading(cluster, 8090).await?;
    cluster.namespace(HERE).await?;
    // Jobs wait for their pool; servers that came before the trainers would be anywhere.
    for part in &PARTS {
        cluster.apply(HERE, &pool(part, 0))?;
    }
    cluster.apply(HERE, &jobs())?;
    let labels = "cadre.dev/role=trainer";
    until("all trainers", async || {
        let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(labels)).await?;
        let run = found.iter().filter(|it| node(it).is_some()).count();
        Ok((run == PARTS.len() * JOBS * 2).then_some(()))
    })
    .await?;
    for part in &PARTS {
        cluster.apply(HERE, &pool(part, part.servers))?;
    }
    let racks = racks(cluster).await?;
    for part in &PARTS {
        settled(cluster, part).await?;
        near_all(cluster, part, &racks).await?;
    }
    too_many(cluster, &PARTS[1], &racks).await?;
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=100s"])?;
    ensure!(!operator.log().contains("Forbidden"), "the role suffices:\n{}", operator.log());
    operator.stop()?;
    cluster.remove_fake_nodes().await
}

fn jobs() -> String {
    let mut text = String::new();
    for part in &PARTS {
        let racks: Vec<_> = part.racks.clone().map(|it| format!("rack-{it}")).collect();
        let racks = racks.join(", ");
        for number in 0..JOBS {
            let pool = part.pool;
            let rack = fake::RACK;
            // Writing into memory does not fail.
            let _ = write!(
                text,
                "---\napiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: {pool}-{number}}}\n\
                 spec:\n  nodes: 2\n  attention: {{poolRef: {{name: {pool}}}}}\n  template:\n    spec:\n      \
                 affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: \
                 {{nodeSelectorTerms: [{{matchExpressions: [{{key: {rack}, operator: In, values: \
                 [{racks}]}}]}}]}}}}}}\n      containers: [{{name: trainer, image: 'example.com/trainer:1', \
                 resources: {{limits: {{nvidia.com/gpu: 4}}}}}}]\n"
            );
        }
    }
    text
}

fn pool(part: &Part, servers: u32) -> String {
    let Part { pool, colocation, .. } = part;
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: {pool}}}\nspec:\n  \
         replicas: {servers}\n  inPlace: true\n  fabric: {{gpusPerServer: 1}}\n  placement: {{levels: \
         [{}], colocation: {colocation}}}\n",
        fake::RACK
    )
}

async fn settled(cluster: &Cluster, part: &Part) -> Result<()> {
    let pool = until(&format!("{} servers of {}", part.servers, part.pool), async || {
        let pool = all::<AttentionPool>(cluster, HERE).get(part.pool).await?;
        let ready = pool.status.as_ref().is_some_and(|it| it.ready == part.servers);
        let settled = find(of_pool(&pool), "Progressing").is_some_and(|it| it.status == "False");
        Ok((ready && settled).then_some(pool))
    })
    .await?;
    let placed = find(of_pool(&pool), "PlacementSatisfied").context("a condition")?;
    let text = format!("{0} of {0} servers are near to a trainer", part.servers);
    ensure!(placed.status == "True" && placed.message == text, "{}: {placed:?}", part.pool);
    Ok(())
}

/// Racks by node.
async fn racks(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let found = nodes.list(&ListParams::default()).await?;
    Ok(found
        .into_iter()
        .filter_map(|it| Some((it.name_any(), it.labels().get(fake::RACK)?.clone())))
        .collect())
}

/// Every server that has a node shares its rack with a trainer of its pool. Out: how many have none.
async fn near_all(
    cluster: &Cluster,
    part: &Part,
    racks: &BTreeMap<String, String>,
) -> Result<usize> {
    let of = async |role: &str| -> Result<Vec<Pod>> {
        let labels = format!("cadre.dev/pool={},cadre.dev/role={role}", part.pool);
        Ok(all::<Pod>(cluster, HERE).list(&ListParams::default().labels(&labels)).await?.items)
    };
    let rack = |pod: &Pod| node(pod).and_then(|it| racks.get(it)).cloned();
    let trainers: BTreeSet<String> = of("trainer").await?.iter().filter_map(rack).collect();
    let servers = of("server").await?;
    for server in &servers {
        if let Some(rack) = rack(server) {
            ensure!(
                trainers.contains(&rack),
                "{} is in {rack}, trainers of {} are in {trainers:?}",
                server.name_any(),
                part.pool
            );
        }
    }
    Ok(servers.iter().filter(|it| node(it).is_none()).count())
}

fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Elsewhere there is room, but not for these.
async fn too_many(cluster: &Cluster, part: &Part, racks: &BTreeMap<String, String>) -> Result<()> {
    let replicas = format!("--replicas={TOO_MANY}");
    let pool = format!("attnpool/{}", part.pool);
    cluster.kubectl(&["scale", &pool, &replicas, "--namespace", HERE])?;
    let message = until("the reason", async || {
        let pool = all::<AttentionPool>(cluster, HERE).get(part.pool).await?;
        let all_but_eight = pool.status.as_ref().is_some_and(|it| it.ready == TOO_MANY - 8);
        let degraded = find(of_pool(&pool), "Degraded").filter(|it| it.reason == "Unschedulable");
        Ok(degraded.filter(|_| all_but_eight).map(|it| it.message.clone()))
    })
    .await?;
    ensure!(message.contains("Insufficient nvidia.com/gpu"), "the scheduler's words: {message}");
    let waiting = near_all(cluster, part, racks).await?;
    ensure!(waiting == 8, "{waiting} servers wait for room in the racks of their trainers");
    Ok(())
}
