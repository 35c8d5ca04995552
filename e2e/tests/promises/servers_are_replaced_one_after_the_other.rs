//! On nodes that run pods: servers become ready and the status says so, a new template replaces them one
//! after the other, a cordoned node is left, a failed trainer makes a second attempt, and pods of a
//! plain Job join a pool by its label.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{AttentionPool, AttentionPoolStatus, TrainingJob};
use cadre_e2e::{Cluster, Fake, Operator, until};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};

use crate::objects::{SERVERS, all, find, job, of_job, of_pool, pods, pool, pool_with};

const HERE: &str = "fleet";
const FLEET: Fake = Fake { nodes: 4, gpus: 8, rack: 2 };
const FAILED: &str = r#"{"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer",
  "image": "i", "imageID": "", "ready": false, "restartCount": 0,
  "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "out of cheese"}}}]}}"#;

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.add_fake_nodes(FLEET).await?;
    let operator = Operator::leading(cluster, 8088).await?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &pool(8))?;
    status(cluster, "eight servers ready", |it| it.ready == 8).await?;
    let table = cluster.kubectl(&["get", "attnpool", "p", "--namespace", HERE, "--no-headers"])?;
    let row: Vec<_> = table.split_whitespace().collect();
    ensure!(row.starts_with(&["p", "8", "8", "0"]), "the row is {table}");
    at_rest(cluster, &operator).await?;
    replaced(cluster).await?;
    cordoned(cluster).await?;
    restarted(cluster).await?;
    joined(cluster).await?;
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE, "--timeout=60s"])?;
    ensure!(!operator.log().contains("Forbidden"), "the role suffices:\n{}", operator.log());
    operator.stop()?;
    cluster.remove_fake_nodes().await
}

async fn status(
    cluster: &Cluster,
    what: &str,
    holds: impl Fn(&AttentionPoolStatus) -> bool,
) -> Result<AttentionPoolStatus> {
    until(what, async || {
        let pool = all::<AttentionPool>(cluster, HERE).get("p").await?;
        let settled = find(of_pool(&pool), "Progressing").is_some_and(|it| it.status == "False");
        let observed = pool.status.as_ref().map(|it| it.observed_generation);
        let current = observed == pool.metadata.generation;
        Ok(pool.status.filter(|it| settled && current && holds(it)))
    })
    .await
}

/// A pool at rest is not written, though its object is looked at.
async fn at_rest(cluster: &Cluster, operator: &Operator) -> Result<()> {
    let looks = operator.metric("cadre_operator_reconciles_total")?;
    let label = serde_json::json!({"metadata": {"labels": {"looked": "at"}}});
    let pools = all::<AttentionPool>(cluster, HERE);
    let labelled = pools.patch("p", &PatchParams::default(), &Patch::Merge(label)).await?;
    let labelled = labelled.resource_version().unwrap_or_default();
    until("a look", async || {
        Ok((operator.metric("cadre_operator_reconciles_total")? > looks).then_some(()))
    })
    .await?;
    let pool = pools.get("p").await?;
    let now = pool.resource_version().unwrap_or_default();
    ensure!(now == labelled, "a look at rest wrote the status: {:?}", pool.status);
    Ok(())
}

/// A new template: all servers are new in the end, and never were two missing.
async fn replaced(cluster: &Cluster) -> Result<()> {
    let before = pods(cluster, HERE, SERVERS).await?;
    let template =
        "  template: {spec: {containers: [{name: server, image: 'example.com/server:2'}]}}\n";
    cluster.apply(HERE, &pool_with(8, template))?;
    let (mut least, mut when) = (usize::MAX, String::new());
    let after = until("eight other servers", async || {
        let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(SERVERS)).await?;
        let ready = found.iter().filter(|it| is_ready(it)).count();
        if ready < least && no_node_is_silent(cluster).await? {
            let row =
                |it: &Pod| (it.name_any(), is_ready(it), it.metadata.deletion_timestamp.clone());
            (least, when) = (ready, format!("{:?}", found.iter().map(row).collect::<Vec<_>>()));
        }
        let now = pods(cluster, HERE, SERVERS).await?;
        let other = now.len() == 8 && ready == 8 && now.iter().all(|it| !before.contains(it));
        Ok(other.then_some(now))
    })
    .await;
    if after.is_err() {
        println!(
            "{}",
            cluster.kubectl(&["get", "attnpool", "p", "--namespace", HERE, "-o", "yaml"])?
        );
    }
    let after = after?;
    ensure!(least >= 7, "only {least} of 8 servers were ready at a time: {when}");
    ensure!(after.len() == 8, "{after:?}");
    let done = status(cluster, "eight servers of the only revision", |it| {
        it.ready == 8 && it.updated_replicas == 8 && it.current_revision == it.update_revision
    })
    .await?;
    let kept = ["get", "controllerrevisions", "-n", HERE, "-o", "name"];
    let kept = cluster.kubectl(&kept)?;
    let expected = format!("controllerrevision.apps/{}", done.update_revision);
    ensure!(kept.trim() == expected, "`{kept}` are kept, of which {expected} is needed");
    Ok(())
}

/// Pods of a node that was silent are not ready for a moment: that replaces nobody.
async fn no_node_is_silent(cluster: &Cluster) -> Result<bool> {
    let nodes = Api::<Node>::all(cluster.client()).list(&ListParams::default()).await?;
    let ready = |it: &Node| {
        let conditions = it.status.as_ref().and_then(|it| it.conditions.as_ref());
        conditions.is_some_and(|it| it.iter().any(|it| it.type_ == "Ready" && it.status == "True"))
    };
    Ok(nodes.iter().all(ready))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|it| it.conditions.as_ref());
    pod.metadata.deletion_timestamp.is_none()
        && conditions
            .is_some_and(|it| it.iter().any(|it| it.type_ == "Ready" && it.status == "True"))
}

/// Servers leave a cordoned node by themselves, and the pool is whole again.
async fn cordoned(cluster: &Cluster) -> Result<()> {
    let at = |found: &[Pod], node: &str| {
        found
            .iter()
            .filter(|it| it.spec.as_ref().is_some_and(|it| it.node_name.as_deref() == Some(node)))
            .count()
    };
    let servers = async || -> Result<Vec<Pod>> {
        Ok(all::<Pod>(cluster, HERE).list(&ListParams::default().labels(SERVERS)).await?.items)
    };
    let found = servers().await?;
    let first = found.first().and_then(|it| it.spec.as_ref()?.node_name.clone());
    let node = first.context("a server has a node")?;
    cluster.kubectl(&["cordon", &node])?;
    until("servers elsewhere", async || {
        let found = servers().await?;
        Ok((at(&found, &node) == 0 && found.iter().filter(|it| is_ready(it)).count() == 8)
            .then_some(()))
    })
    .await?;
    cluster.kubectl(&["uncordon", &node]).map(drop)
}

/// A trainer that fails makes a second attempt, with the reason in the status on the way.
async fn restarted(cluster: &Cluster) -> Result<()> {
    cluster.apply(HERE, &job("  failurePolicy: {maxRestarts: 1}\n"))?;
    let running = |attempt: u32| async move {
        until(&format!("attempt {attempt}"), async || {
            let job = all::<TrainingJob>(cluster, HERE).get("j").await?;
            let runs = find(of_job(&job), "Running").is_some_and(|it| it.status == "True");
            Ok(job.status.filter(|it| runs && it.attempt == attempt))
        })
        .await
    };
    running(1).await?;
    fail(cluster, "j-1").await?;
    let status = running(2).await?;
    ensure!(status.restarts == 1, "the restart counts: {status:?}");
    fail(cluster, "j-2").await?;
    let failed = until("the end", async || {
        let job = all::<TrainingJob>(cluster, HERE).get("j").await?;
        Ok(find(of_job(&job), "Failed").filter(|it| it.status == "True").cloned())
    })
    .await?;
    ensure!(failed.reason == "RestartsUsedUp", "{failed:?}");
    ensure!(
        failed.message.contains("exit code 1"),
        "the message has the cause: {}",
        failed.message
    );
    cluster.kubectl(&["delete", "cadjob", "j", "--namespace", HERE]).map(drop)
}

async fn fail(cluster: &Cluster, attempt: &str) -> Result<()> {
    let name = format!("batch.kubernetes.io/job-name={attempt}");
    let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(&name)).await?;
    let pod = found.items.first().context("an attempt has pods")?.name_any();
    let target = ["pod", &pod, "--namespace", HERE, "--subresource=status", "--type=strategic"];
    // Said until it holds: kwok may say once more that the pod runs.
    until("a failed trainer", async || {
        let Some(found) = all::<Pod>(cluster, HERE).get_opt(&pod).await? else {
            return Ok(Some(()));
        };
        if found.status.and_then(|it| it.phase).as_deref() == Some("Failed") {
            return Ok(Some(()));
        }
        cluster.kubectl(&[&["patch"], &target[..], &["-p", FAILED]].concat())?;
        Ok(None)
    })
    .await
}

/// Pods of a kind that is not ours are trainers of a pool once they carry its label. None of them serves in place here: their
/// program never comes.
async fn joined(cluster: &Cluster) -> Result<()> {
    cluster.apply(HERE, &pool(1).replace("inPlace: false", "inPlace: true"))?;
    let plain = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: plain}\nspec:\n  completions: 3\n  \
                 parallelism: 3\n  completionMode: Indexed\n  template:\n    metadata: {labels: \
                 {cadre.dev/pool: p}}\n    spec:\n      restartPolicy: Never\n      containers: \
                 [{name: main, image: 'example.com/torch:1'}]\n";
    cluster.apply(HERE, plain)?;
    let trainers = |it: &AttentionPoolStatus| {
        let placed = it.conditions.iter().find(|it| it.type_ == "PlacementSatisfied");
        placed.is_some_and(|it| it.reason != "NoTrainer")
    };
    let three = status(cluster, "trainers", |it| trainers(it) && it.ready == 1).await?;
    ensure!(three.in_place_servers == 0, "{three:?}");
    cluster.kubectl(&["delete", "job", "plain", "--namespace", HERE])?;
    status(cluster, "no trainer", |it| !trainers(it)).await.map(drop)
}
