//! A pool gets its servers' pods, a Service and a disruption budget, and `kubectl scale` changes how many;
//! the status says why they do not run within a second of the scheduler.

use anyhow::{Context as _, Result, ensure};
use cadre_crds::AttentionPool;
use cadre_e2e::{Cluster, Operator, until};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::objects::{SERVERS, all, find, of_pool, pods, pool};

const HERE: &str = "pools";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let operator = Operator::leading(cluster, 8081).await?;
    cluster.namespace(HERE).await?;
    // Servers without a template meet the strictest level.
    let label = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(&["label", "namespace", HERE, label])?;
    cluster.apply(HERE, &pool(3))?;
    let made = until("three servers", async || servers(cluster, 3).await).await?;
    surroundings(cluster).await?;
    reason(cluster).await?;

    cluster.kubectl(&["scale", "attnpool/p", "--replicas=5", "--namespace", HERE])?;
    let five = until("five servers", async || servers(cluster, 5).await).await?;
    ensure!(
        made.iter().all(|it| five.contains(it)),
        "scaling up replaces nobody: {made:?} {five:?}"
    );
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=1", "--namespace", HERE])?;
    until("one server", async || servers(cluster, 1).await).await?;
    let pools = all::<AttentionPool>(cluster, HERE);
    until("a status of one", async || {
        let status = pools.get("p").await?.status.unwrap_or_default();
        Ok((status.desired == 1 && status.replicas == 1 && status.draining == 0).then_some(()))
    })
    .await?;

    let writes = operator.metric("cadre_operator_status_writes_total")?;
    cluster.kubectl(&["delete", "attnpool", "p", "--namespace", HERE, "--timeout=60s"])?;
    until("no server", async || servers(cluster, 0).await).await?;
    ensure!(writes > 0, "statuses are counted");
    ensure!(
        operator.metric("cadre_operator_actions_total")? > 0
            && !operator.log().contains("Forbidden"),
        "the chart's role suffices:\n{}",
        operator.log()
    );
    operator.stop()
}

async fn servers(cluster: &Cluster, count: usize) -> Result<Option<Vec<(String, String)>>> {
    let found = pods(cluster, HERE, SERVERS).await?;
    Ok((found.len() == count).then_some(found))
}

/// The Service and the budget are there and select the servers; the pods have their names in it.
async fn surroundings(cluster: &Cluster) -> Result<()> {
    let service = until("the Service", async || {
        Ok(all::<Service>(cluster, HERE).get_opt("p-servers").await?)
    })
    .await?;
    let budget = all::<PodDisruptionBudget>(cluster, HERE).get("p-servers").await?;
    let selects = service.spec.context("a Service has a spec")?.selector.unwrap_or_default();
    let budgets = budget.spec.context("a budget has a spec")?.selector.unwrap_or_default();
    ensure!(Some(&selects) == budgets.match_labels.as_ref(), "{selects:?} {budgets:?}");
    let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(SERVERS)).await?;
    for pod in found {
        ensure!(pod.owner_references().iter().any(|it| it.kind == "AttentionPool"), "an owner");
        let spec = pod.spec.context("a pod has a spec")?;
        ensure!(spec.subdomain.as_deref() == Some("p-servers"), "a name in the Service");
        ensure!(
            spec.termination_grace_period_seconds == Some(70),
            "time to drain: {:?}",
            spec.termination_grace_period_seconds
        );
    }
    Ok(())
}

/// The scheduler's words are in the status, and they came within a second of it.
async fn reason(cluster: &Cluster) -> Result<()> {
    let pools = all::<AttentionPool>(cluster, HERE);
    let (told, condition) = until("the scheduler's words in the status", async || {
        let pool = pools.get("p").await?;
        let degraded = find(of_pool(&pool), "Degraded").cloned();
        let Some(degraded) = degraded.filter(|it| it.reason == "Unschedulable") else {
            return Ok(None);
        };
        let found = all::<Pod>(cluster, HERE).list(&ListParams::default().labels(SERVERS)).await?;
        let said = found
            .into_iter()
            .flat_map(|it| it.status.unwrap_or_default().conditions.unwrap_or_default());
        let first = said.filter(|it| it.reason.as_deref() == Some("Unschedulable"));
        let first = first.filter_map(|it| it.last_transition_time).map(|it| it.0).min();
        Ok(first.map(|it| (it, degraded)))
    })
    .await?;
    ensure!(
        condition.message.contains("no nodes available to schedule pods"),
        "{}",
        condition.message
    );
    let late = condition.last_transition_time.0.as_second() - told.as_second();
    // The two times are whole seconds, so a second may look like two. A time decides nothing
    // here: it is only said.
    println!("the reason was in the status {late} s after the scheduler gave it");
    let table = cluster.kubectl(&["get", "attnpool", "p", "--namespace", HERE, "--no-headers"])?;
    let row: Vec<_> = table.split_whitespace().collect();
    ensure!(row.starts_with(&["p", "3", "0", "0"]), "the row is {table}");
    Ok(())
}
