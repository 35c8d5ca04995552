//! `cadre explain`, `status`, `logs` and `bundle` say why something waits, down to the cause, with what to do; who may not
//! read something is told so.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_e2e::{Cluster, Operator, until};

use crate::objects::{all, cadre, find, job, of_job, of_pool, pool};

const HERE: &str = "explained";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.definitions()?;
    cluster.namespace(HERE).await?;
    cluster.apply(HERE, &pool(1))?;
    let operators = ask(cluster, &["explain", "attnpool/p"])?;
    ensure!(operators.contains("operator"), "nobody looks at it yet:\n{operators}");

    let operator = Operator::leading(cluster, 8092).await?;
    cluster.apply(HERE, &job("").replace("name: p}}", "name: missing}}"))?;
    let pools = all::<AttentionPool>(cluster, HERE);
    until("the scheduler's word", async || {
        let pool = pools.get("p").await?;
        let degraded = find(of_pool(&pool), "Degraded").filter(|it| it.status == "True");
        Ok(degraded.filter(|it| it.reason == "Unschedulable").map(drop))
    })
    .await?;
    until("the job's reason", async || {
        let job = all::<TrainingJob>(cluster, HERE).get("j").await?;
        Ok(find(of_job(&job), "Running").filter(|it| it.reason == "PoolNotFound").map(drop))
    })
    .await?;
    says(
        cluster,
        &["explain", "attnpool/p"],
        &["pod explained/p-", "cause:", "no nodes available", "remedy: add nodes"],
    )?;
    says(cluster, &["explain", "cadjob/j"], &["PoolNotFound", "remedy: create the pool"])?;
    says(cluster, &["status"], &["explained/p", "0/1", "bad", "explained/j", "PoolNotFound"])?;

    let refused = refusal(cluster, &["explain", "attnpool/q"])?;
    ensure!(refused.contains("is not in namespace explained: there are p"), "{refused}");
    let refused = refusal(cluster, &["logs", "attnpool/p"])?;
    ensure!(refused.starts_with("error: "), "no pod has started: {refused}");

    let archive = cluster.folder().join("report.tar.gz");
    let path = archive.to_str().context("a path in UTF-8")?;
    says(cluster, &["bundle", "--out", path], &["written"])?;
    let listed = Command::new("tar").args(["-xzOf", path]).output().context("tar")?;
    let text = String::from_utf8_lossy(&listed.stdout);
    for part in ["kind: AttentionPool", "PoolNotFound", "no nodes available", "kind: Pod"] {
        ensure!(text.contains(part), "{part} is not in the archive");
    }
    let refused = refusal(cluster, &["bundle", "--out", path])?;
    ensure!(refused.contains("choose another file"), "an older report stays: {refused}");

    cluster.kubectl(&[
        "delete",
        "attnpool,cadjob",
        "--all",
        "--namespace",
        HERE,
        "--timeout=60s",
    ])?;
    let empty = ask(cluster, &["status"])?;
    ensure!(empty.contains("no pools and no jobs"), "{empty}");
    operator.stop()
}

fn says(cluster: &Cluster, words: &[&str], parts: &[&str]) -> Result<()> {
    let text = ask(cluster, words)?;
    for part in parts {
        ensure!(text.contains(part), "`{part}` is not in the answer to {words:?}:\n{text}");
    }
    Ok(())
}

fn ask(cluster: &Cluster, words: &[&str]) -> Result<String> {
    let (good, text) = cadre(cluster, HERE, words)?;
    ensure!(good, "cadre {words:?}: {text}");
    Ok(text)
}

fn refusal(cluster: &Cluster, words: &[&str]) -> Result<String> {
    let (good, text) = cadre(cluster, HERE, words)?;
    ensure!(!good, "cadre {words:?} should be refused: {text}");
    Ok(text)
}
