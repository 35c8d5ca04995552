//! On a fleet of racks servers sit where their trainers are: 12 jobs and 55 servers of two pools on 30 nodes of 8 GPUs. One
//! pool has to be in its trainers' racks and is, and a server that finds no room there waits, with the reason. The other would
//! like to be: most of it is, and the status says of how much that is true.
//!
//! `CADRE_E2E_FLEET` multiplies all of it; the soak has 210 nodes.

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
/// Nodes of a rack.
const RACK: usize = 6;
/// GPUs of a node.
const GPUS: usize = 8;
/// GPUs of a trainer: a node has room for servers beside one.
const TRAINER: usize = 4;
/// Servers of `bound` that find no room.
const TOO_MANY: usize = 8;

/// How large the fleet is, and what is on it.
#[derive(Clone, Copy, Debug)]
struct Fleet {
    /// Times the smallest.
    times: usize,
}

/// A pool, where its trainers may run, and how many servers it has.
struct Part {
    pool: &'static str,
    colocation: &'static str,
    racks: std::ops::Range<usize>,
    servers: usize,
}

impl Fleet {
    fn asked() -> Result<Self> {
        let times = std::env::var("CADRE_E2E_FLEET").unwrap_or_else(|_| "1".into());
        let times = times.parse().ok().filter(|it| (1..=20).contains(it));
        Ok(Self { times: times.context("CADRE_E2E_FLEET is a number from 1 to 20")? })
    }

    /// Jobs of each pool, of two trainers.
    fn jobs(self) -> usize {
        6 * self.times
    }

    /// Racks of a pool; as many again as half of them have no trainer.
    fn racks(self) -> usize {
        2 * self.times
    }

    fn nodes(self) -> Fake {
        Fake { nodes: (2 * self.racks() + self.times) * RACK, gpus: GPUS, rack: RACK }
    }

    /// Servers for which there is room in the racks of a pool.
    fn room(self) -> usize {
        self.racks() * RACK * GPUS - self.jobs() * 2 * TRAINER
    }

    /// The one that would like to be near, and the one that has to be.
    fn parts(self) -> [Part; 2] {
        let racks = self.racks();
        let (near, bound) = (self.room() / 4, self.room() * 9 / 10);
        [
            Part { pool: "near", colocation: "Preferred", racks: 0..racks, servers: near },
            Part { pool: "bound", colocation: "Required", racks: racks..2 * racks, servers: bound },
        ]
    }
}

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let fleet = Fleet::asked()?;
    cluster.add_fake_nodes(fleet.nodes()).await?;
    let operator = Operator::leading(cluster, 8090).await?;
    cluster.namespace(HERE).await?;
    // Jobs wait for their pool; servers that came before the trainers would be anywhere.
    let parts = fleet.parts();
    for part in &parts {
        cluster.apply(HERE, &pool(part, 0))?;
    }
    cluster.apply(HERE, &jobs(&parts, fleet.jobs()))?;
    let labels = "cadre.dev/role=trainer";
    until("all trainers", async || {
        let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(labels)).await?;
        let run = found.iter().filter(|it| node(it).is_some()).count();
        Ok((run == parts.len() * fleet.jobs() * 2).then_some(()))
    })
    .await?;
    let racks = racks(cluster).await?;
    // Who has to be near goes first: those of the other pool that are not near could take its room.
    let [near, bound] = &parts;
    for part in [bound, near] {
        cluster.apply(HERE, &pool(part, part.servers))?;
        settled(cluster, part, &racks).await?;
        if part.pool == bound.pool {
            too_many(cluster, bound, fleet.room(), &racks).await?;
        }
    }
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=100s"])?;
    until("no pod", async || {
        let left = all::<Pod>(cluster, HERE).list(&ListParams::default()).await?;
        Ok(left.items.is_empty().then_some(()))
    })
    .await?;
    ensure!(!operator.log().contains("Forbidden"), "the role suffices:\n{}", operator.log());
    operator.stop()?;
    cluster.remove_fake_nodes().await
}

fn jobs(parts: &[Part], each: usize) -> String {
    let mut text = String::new();
    for part in parts {
        let racks: Vec<_> = part.racks.clone().map(|it| format!("rack-{it}")).collect();
        let racks = racks.join(", ");
        for number in 0..each {
            let pool = part.pool;
            let rack = fake::RACK;
            // Writing into memory does not fail.
            let _ = write!(
                text,
                "---\napiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: {pool}-{number}}}\n\
                 spec:\n  nodes: 2\n  attention: {{poolRef: {{name: {pool}}}}}\n  template:\n    spec:\n      \
                 affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: \
                 {{nodeSelectorTerms: [{{matchExpressions: [{{key: {rack}, operator: In, values: \
                 [{racks}]}}]}}]}}}}}}\n      topologySpreadConstraints: [{{maxSkew: 1, topologyKey: {rack}, \
                 whenUnsatisfiable: DoNotSchedule, labelSelector: {{matchLabels: {{cadre.dev/pool: {pool}, \
                 cadre.dev/role: trainer}}}}}}]\n      containers: [{{name: trainer, image: 'example.com/trainer:1', \
                 resources: {{limits: {{nvidia.com/gpu: {TRAINER}}}}}}}]\n"
            );
        }
    }
    text
}

fn pool(part: &Part, servers: usize) -> String {
    let Part { pool, colocation, .. } = part;
    format!(
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {{name: {pool}}}\nspec:\n  \
         replicas: {servers}\n  inPlace: true\n  fabric: {{gpusPerServer: 1}}\n  placement: {{levels: \
         [{}], colocation: {colocation}}}\n",
        fake::RACK
    )
}

/// Waits until all servers of a part are ready, and looks whether the status says where they are.
async fn settled(cluster: &Cluster, part: &Part, racks: &BTreeMap<String, String>) -> Result<()> {
    let pool = until(&format!("{} servers of {}", part.servers, part.pool), async || {
        let pool = all::<AttentionPool>(cluster, HERE).get(part.pool).await?;
        let ready = pool.status.as_ref().is_some_and(|it| it.ready as usize == part.servers);
        let settled = find(of_pool(&pool), "Progressing").is_some_and(|it| it.status == "False");
        Ok((ready && settled).then_some(pool))
    })
    .await?;
    let placed = find(of_pool(&pool), "PlacementSatisfied").context("a condition")?;
    let (near, _) = near(cluster, part, racks).await?;
    let text = format!("{near} of {} servers are near to a trainer", part.servers);
    let all = near == part.servers;
    ensure!(placed.message.starts_with(&text), "{}, {near} near: {placed:?}", part.pool);
    ensure!((placed.status == "True") == all, "{}, {near} near: {placed:?}", part.pool);
    // Of many nodes the scheduler looks at some, and what is preferred may not be among them.
    let enough = if part.colocation == "Required" { part.servers } else { part.servers / 2 };
    ensure!(near >= enough, "only {near} servers of {} are near", part.pool);
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

/// Servers of a pool that share their rack with one of its trainers, and those that have no node.
async fn near(
    cluster: &Cluster,
    part: &Part,
    racks: &BTreeMap<String, String>,
) -> Result<(usize, usize)> {
    let of = async |role: &str| -> Result<Vec<Pod>> {
        let labels = format!("cadre.dev/pool={},cadre.dev/role={role}", part.pool);
        Ok(all::<Pod>(cluster, HERE).list(&ListParams::default().labels(&labels)).await?.items)
    };
    let rack = |pod: &Pod| node(pod).and_then(|it| racks.get(it)).cloned();
    let trainers: BTreeSet<String> = of("trainer").await?.iter().filter_map(rack).collect();
    let servers = of("server").await?;
    let near = servers.iter().filter_map(rack).filter(|it| trainers.contains(it)).count();
    Ok((near, servers.iter().filter(|it| node(it).is_none()).count()))
}

fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Elsewhere there is room, but not for these.
async fn too_many(
    cluster: &Cluster,
    part: &Part,
    room: usize,
    racks: &BTreeMap<String, String>,
) -> Result<()> {
    let replicas = format!("--replicas={}", room + TOO_MANY);
    let pool = format!("attnpool/{}", part.pool);
    cluster.kubectl(&["scale", &pool, &replicas, "--namespace", HERE])?;
    let message = until("the reason", async || {
        let pool = all::<AttentionPool>(cluster, HERE).get(part.pool).await?;
        let full = pool.status.as_ref().is_some_and(|it| it.ready as usize == room);
        let degraded = find(of_pool(&pool), "Degraded").filter(|it| it.reason == "Unschedulable");
        Ok(degraded.filter(|_| full).map(|it| it.message.clone()))
    })
    .await?;
    ensure!(message.contains("Insufficient nvidia.com/gpu"), "the scheduler's words: {message}");
    let (near, waiting) = near(cluster, part, racks).await?;
    let sums = (near, waiting) == (room, TOO_MANY);
    ensure!(
        sums,
        "{near} servers are near, {waiting} wait for room in the racks of their trainers"
    );
    Ok(())
}
