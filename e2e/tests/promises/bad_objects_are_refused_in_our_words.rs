//! Bad objects are refused by the API server itself, in our words; good ones get our defaults, columns that
//! answer "is it fine?", and may be applied again and by several.

use anyhow::{Result, bail, ensure};
use cadre_crds::{AttentionPool, AttentionPoolSpec, ScalingMode};
use cadre_e2e::Cluster;

use crate::objects::{all, job, pool, pool_with};

const HERE: &str = "definitions";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.definitions()?;
    cluster.namespace(HERE).await?;
    refusals(cluster)?;
    refused_changes(cluster)?;
    defaults(cluster).await?;
    columns(cluster)?;
    appliers(cluster).await
}

/// The manifest is refused with these words.
fn refused(cluster: &Cluster, manifest: &str, words: &str) -> Result<()> {
    match cluster.apply(HERE, manifest) {
        Ok(_) => bail!("the API server takes, where `{words}` was expected:\n{manifest}"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains(words), "`{words}` was expected, the API server says: {said}");
            Ok(())
        }
    }
}

fn refusals(cluster: &Cluster) -> Result<()> {
    let template = |containers: &str| {
        pool_with(1, &format!("  template: {{spec: {{containers: [{containers}]}}}}\n"))
    };
    let long = "p".repeat(53);
    for (manifest, words) in [
        (pool(0), "the pool has no server; set spec.replicas to 1 or more"),
        (pool(4097), "spec.replicas in body should be less than or equal to 4096"),
        (pool_with(1, "  scaling: {mode: Auto}\n"), "spec.scaling.max is missing"),
        (pool_with(1, "  scaling: {min: 3, max: 2}\n"), "is below spec.scaling.min"),
        (
            pool_with(1, "  scaling: {mode: Manual}\n"),
            "supported values: \"Fixed\", \"Auto\", \"External\"",
        ),
        (
            pool_with(1, "  health: {suspectAfterMilliseconds: 399}\n"),
            "greater than or equal to 400",
        ),
        (
            pool_with(1, "  placement: {levels: [a, b, a]}\n"),
            "spec.placement.levels: duplicate entries",
        ),
        (pool_with(1, "  drains: {}\n"), "field not declared in schema"),
        (template("{name: other}"), "must be exactly one container, named `server`"),
        (template("{name: server}, {name: other}"), "must be exactly one container"),
        (
            template("{name: server, env: [{name: CADRE_INDEX, value: '1'}]}"),
            "Cadre sets this variable itself; remove it",
        ),
        (
            pool(1).replace("name: p}", &format!("name: {long}}}")),
            "metadata.name is longer than 52",
        ),
        (pool(1).replace("name: p}", "name: a.b}"), "holds a dot"),
        (job("").replace("nodes: 2", "nodes: 4096\n  procsPerNode: 2"), "more than 4096 trainers"),
        (job("").replace("name: trainer", "name: server"), "named `trainer`"),
        (job("").replace("nodes: 2", "nodes: 0"), "greater than or equal to 1"),
        (
            job("  failurePolicy: {suspectAfterSeconds: 40, stalledAfterSeconds: 40}\n"),
            "stalledAfterSeconds is not above spec.failurePolicy.suspectAfterSeconds",
        ),
        (job("  checkpoint: {claimName: a, hostPath: /b}\n"), "keep one of them"),
        (job("  checkpoint: {resumeFrom: i-0123abcd}\n"), "resumeFrom is set without storage"),
        (
            job("  checkpoint: {claimName: a, resumeFrom: ../i-0123abcd}\n"),
            "resumeFrom is no folder of a job's checkpoints; write NAME-UID",
        ),
        (
            job("").replace("image:", "env: [{name: WORLD_SIZE, value: '2'}], image:"),
            "Cadre sets this variable itself",
        ),
        (
            job("  attention: {}\n").replacen("  attention: {poolRef: {name: p}}\n", "", 1),
            "poolRef: Required value",
        ),
    ] {
        refused(cluster, &manifest, words)?;
    }
    Ok(())
}

fn refused_changes(cluster: &Cluster) -> Result<()> {
    cluster.apply(HERE, &job(""))?;
    let other = |from: &str, to: &str| job("").replace(from, to);
    for (manifest, words) in [
        (other("nodes: 2", "nodes: 3"), "spec.nodes changes only while spec.suspend is true"),
        (other("nodes: 2", "nodes: 2\n  procsPerNode: 2"), "spec.procsPerNode changes only while"),
        (other("{name: p}", "{name: q}"), "spec.attention.poolRef changes only while"),
        (job("  managedBy: example.com/other\n"), "spec.managedBy never changes"),
        (
            job("  checkpoint: {claimName: a, resumeFrom: i-0123abcd/step-40}\n"),
            "spec.checkpoint.resumeFrom never changes; create a new job",
        ),
    ] {
        refused(cluster, &manifest, words)?;
    }
    let suspended = other("nodes: 2", "nodes: 3") + "  suspend: true\n";
    cluster.apply(HERE, &suspended)?;
    cluster.kubectl(&["delete", "cadjob", "j", "--namespace", HERE])?;
    Ok(())
}

/// What the API server fills in is what the types say.
async fn defaults(cluster: &Cluster) -> Result<()> {
    let empty =
        "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {name: empty}\nspec: {}\n";
    cluster.apply(HERE, empty)?;
    let found = all::<AttentionPool>(cluster, HERE).get("empty").await?;
    ensure!(found.spec == AttentionPoolSpec::default(), "defaults are {:?}", found.spec);
    let raw = cluster.kubectl(&["get", "attnpool", "empty", "--namespace", HERE, "-o", "json"])?;
    let raw: serde_json::Value = serde_json::from_str(&raw)?;
    let spec = &raw["spec"];
    ensure!(spec["replicas"] == 0 && spec["scaling"]["mode"] == "Fixed", "stored is {spec}");
    ensure!(found.spec.scaling.mode == ScalingMode::Fixed, "mode {:?}", found.spec.scaling.mode);
    let scale = cluster.kubectl(&[
        "get",
        "--raw",
        &format!("/apis/cadre.dev/v1alpha1/namespaces/{HERE}/attentionpools/empty/scale"),
    ])?;
    let scale: serde_json::Value = serde_json::from_str(&scale)?;
    ensure!(scale["kind"] == "Scale" && scale["status"]["replicas"] == 0, "scale is {scale}");
    Ok(())
}

fn columns(cluster: &Cluster) -> Result<()> {
    cluster.apply(HERE, &job(""))?;
    let head = |kind: &str| -> Result<String> {
        let table = cluster.kubectl(&["get", kind, "--namespace", HERE])?;
        let first = table.lines().next().unwrap_or_default();
        Ok(first.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let pools = head("attnpool")?;
    ensure!(
        pools == "NAME DESIRED READY INPLACE UTIL BALANCED PLACEMENT AGE",
        "columns are {pools}"
    );
    let jobs = head("cadjob")?;
    ensure!(jobs == "NAME STEP PROGRESS TOKENS/S POOL STATUS AGE", "columns are {jobs}");
    let both = cluster.kubectl(&["get", "cadre", "--namespace", HERE, "-o", "name"])?;
    ensure!(both.lines().count() == 2, "the category has {both}");
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE])?;
    Ok(())
}

/// A second applier owns its own fields, and is told of those of others.
async fn appliers(cluster: &Cluster) -> Result<()> {
    cluster.apply(HERE, &pool(2))?;
    let by = |manager: &str, manifest: &str| {
        let manager = format!("--field-manager={manager}");
        cluster.kubectl_with(&["apply", "--server-side", &manager, "--namespace", HERE], manifest)
    };
    let conflict = by("other", &pool(3));
    let said = conflict.err().map(|it| format!("{it:#}")).unwrap_or_default();
    ensure!(said.contains(".spec.replicas"), "a conflict about replicas was expected: {said}");
    let placement = "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {name: p}\n\
                     spec: {placement: {levels: [kubernetes.io/hostname]}}\n";
    by("other", placement)?;
    let found = all::<AttentionPool>(cluster, HERE).get("p").await?;
    ensure!(
        found.spec.replicas == 2 && found.spec.placement.levels.len() == 1,
        "both appliers' fields stay: {:?}",
        found.spec
    );
    cluster.kubectl(&["delete", "cadre", "--all", "--namespace", HERE]).map(drop)
}
