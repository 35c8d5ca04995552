//! The chart passes helm's own checks, becomes the manifests that are recorded beside this file, is taken by the
//! API server with every field checked, and refuses values that it does not know.
//!
//! `CADRE_GENERATE=1` writes the recorded manifests anew.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use cadre_e2e::programs::root;
use cadre_e2e::{Cluster, SYSTEM_NAMESPACE, helm};
use serde_json::Value;

/// Names of recorded manifests, and the arguments that they are made with.
const CASES: [(&str, &[&str]); 3] = [
    ("default", &[]),
    (
        "one-namespace",
        &[
            "--set=namespace=team-a",
            "--set=operator.replicas=1",
            "--set=networkPolicy.enabled=false",
            "--set=image.repository=example.com/cadre,image.tag=v1",
            "--set=class=team-a",
            "--set=priorityClass.enabled=false",
            "--set=imagePullSecrets[0].name=registry",
        ],
    ),
    (
        "watched",
        &[
            "--set=serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus",
            "--set=alerts.enabled=true",
            "--set=dashboard.enabled=true",
            "--set=settings.gpuNodeSelector.nvidia\\.com/gpu\\.product=NVIDIA-H200",
            "--set=settings.serverPriorityClass=harvest",
            "--set=settings.serverPullSecrets[0].name=registry",
            "--set=settings.serverTolerations[0].key=gpu,settings.serverTolerations[0].operator=Exists",
            "--set=settings.serverResources.requests.memory=2Gi",
            "--set=operator.nodeSelector.role=system",
            "--set=operator.tolerations[0].key=system,operator.tolerations[0].operator=Exists",
            "--set=control.leaderAlone=false",
            DIGEST,
        ],
    ),
];
/// An image by its digest.
const DIGEST: &str =
    "--set=image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
/// Values that the schema refuses, and what it says of them.
const REFUSED: [(&str, &str); 10] = [
    ("--set=operator.replica=1", "replica"),
    ("--set=operator.replicas=0", "replicas"),
    ("--set=image.repository=", "repository"),
    ("--set=settings.levels=hostname", "levels"),
    ("--set=settings.serverResources.request.memory=2Gi", "request"),
    ("--set=settings.serverTolerations[0].operator=Exist", "operator"),
    ("--set=image.digest=sha256:0123", "digest"),
    ("--set=class=Team", "class"),
    ("--set=priorityClass.value=low", "value"),
    ("--set=control.leaderAlone=1", "leaderAlone"),
];

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.operators_config().await?;
    cluster
        .kubectl_with(&["apply"], "{apiVersion: v1, kind: Namespace, metadata: {name: team-a}}")?;
    for (name, arguments) in CASES {
        helm::lint(cluster, arguments)?;
        // Of a certificate that the chart makes each rendering has another.
        let named = [arguments, &["--set=control.existingSecret=certificate"]].concat();
        recorded(name, &helm::template(cluster, &named)?)?;
        let rendered = helm::template(cluster, arguments)?;
        ensure!(rendered.contains("kind: Secret"), "{name} has a certificate");
        same_nodes(cluster, &rendered).context(name)?;
        // Kinds of others are not known to this API server; all of ours are checked field by field.
        let known: Vec<_> = rendered
            .split("\n---\n")
            .filter(|it| !it.contains("monitoring.coreos.com/v1"))
            .collect();
        ensure!(known.len() > 5, "{name} has {} manifests", known.len());
        cluster
            .kubectl_with(
                &["apply", "--dry-run=server", "--validate=strict"],
                &known.join("\n---\n"),
            )
            .with_context(|| format!("the API server about {name}"))?;
    }
    for (argument, words) in REFUSED {
        match helm::template(cluster, &[argument]) {
            Ok(_) => bail!("the chart takes {argument}"),
            Err(error) => ensure!(format!("{error:#}").contains(words), "{argument}: {error:#}"),
        }
    }
    least_rights(cluster)
}

/// The pod that an uninstall needs finds a node where the operator's found one, and has its image.
fn same_nodes(cluster: &Cluster, rendered: &str) -> Result<()> {
    let parts = rendered.split("\n---\n").filter(|it| it.contains("containers:"));
    let mut found = Vec::new();
    for part in parts {
        let read = cluster.kubectl_with(&["create", "--dry-run=client", "--output=json"], part)?;
        let value: Value = serde_json::from_str(&read).context("what kubectl has read")?;
        let pod = &value["spec"]["template"]["spec"];
        if value["kind"] == "Deployment" || value["kind"] == "Job" {
            let image = &pod["containers"][0]["image"];
            found.push([&pod["nodeSelector"], &pod["tolerations"], image].map(Value::clone));
        }
    }
    ensure!(found.len() == 2 && found[0] == found[1], "operator and uninstall differ: {found:#?}");
    Ok(())
}

fn recorded(name: &str, rendered: &str) -> Result<()> {
    let file = root().join(format!("e2e/rendered/{name}.yaml"));
    if std::env::var_os("CADRE_GENERATE").is_some() {
        fs::create_dir_all(file.parent().context("a folder")?).context("recorded manifests")?;
        fs::write(&file, rendered).context("a recorded manifest")?;
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    let differs = found.lines().zip(rendered.lines()).find(|(old, new)| old != new);
    ensure!(
        found == rendered,
        "{name} is not what e2e/rendered/{name}.yaml says, first at {differs:?}; write it with CADRE_GENERATE=1"
    );
    Ok(())
}

/// The operator may do what it needs and nothing that would matter if its token were stolen.
fn least_rights(cluster: &Cluster) -> Result<()> {
    let operator = format!("--as=system:serviceaccount:{SYSTEM_NAMESPACE}:cadre-operator");
    let may = |verb: &str, resource: &str| -> Result<bool> {
        let mut command = cluster.kubectl_command()?;
        let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
        let part = format!("--subresource={part}");
        command.args(["auth", "can-i", verb, resource, &part, "--namespace", "team-a", &operator]);
        let said = command.output().context("kubectl auth can-i")?;
        Ok(String::from_utf8_lossy(&said.stdout).trim() == "yes")
    };
    for (verb, resource) in
        [("create", "pods"), ("patch", "attentionpools/status"), ("watch", "jobs")]
    {
        ensure!(may(verb, resource)?, "the operator needs to {verb} {resource}");
    }
    for (verb, resource) in [
        ("get", "secrets"),
        ("list", "secrets"),
        ("create", "pods/exec"),
        ("create", "serviceaccounts/token"),
        ("create", "attentionpools"),
        ("delete", "attentionpools"),
        ("patch", "nodes"),
        ("create", "rolebindings"),
        ("delete", "namespaces"),
    ] {
        ensure!(!may(verb, resource)?, "the operator may {verb} {resource}, which it never needs");
    }
    Ok(())
}
