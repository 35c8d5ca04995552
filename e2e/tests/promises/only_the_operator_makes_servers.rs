//! With the chart's admission policy nobody but the operator makes a server, or says which server a pod is: whoever else may
//! create pods is refused with the remedy, also where a controller of Kubernetes creates them. What is no server is left alone.

use anyhow::{Result, bail, ensure};
use cadre_e2e::{Cluster, Operator, SYSTEM_NAMESPACE, helm, until};

use crate::objects::{SERVERS, pods, pool};

const HERE: &str = "servers-of-others";
const POLICY: &str = "templates/admission.yaml";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let operator = Operator::leading(cluster, 8095).await?;
    cluster.namespace(HERE).await?;
    let policy = helm::template(cluster, &["--show-only", POLICY])?;
    let system = ["--namespace", SYSTEM_NAMESPACE];
    cluster.kubectl_with(&[&["apply", "--validate=strict"], &system[..]].concat(), &policy)?;
    // A policy holds some time after it was taken.
    until("the policy", async || {
        let target = ["create", "--dry-run=server", "--namespace", HERE];
        Ok(cluster.kubectl_with(&target, &pod("s", "server", "")).is_err().then_some(()))
    })
    .await?;

    cluster.apply(HERE, &pool(2))?;
    let servers = until("two servers of the operator", async || {
        let found = pods(cluster, HERE, SERVERS).await?;
        Ok((found.len() == 2).then_some(found))
    })
    .await?;
    refusals(cluster, &servers[0].0)?;
    // A controller of Kubernetes creates no server for a user either.
    cluster.apply(HERE, REPLICAS)?;
    until("the ReplicaSet's trouble", async || {
        let said = cluster.kubectl(&["get", "rs", "x", "-n", HERE, "-o", "jsonpath={.status}"])?;
        Ok(said.contains("only the operator of Cadre makes servers").then_some(()))
    })
    .await?;
    // The operator drains, and Kubernetes takes its owner off what is orphaned.
    cluster.kubectl(&["scale", "attnpool/p", "--replicas=1", "--namespace", HERE])?;
    until(
        "one server",
        async || Ok((pods(cluster, HERE, SERVERS).await?.len() == 1).then_some(())),
    )
    .await?;
    cluster.kubectl(&["delete", "attnpool/p", "--cascade=orphan", "--namespace", HERE])?;
    until("a server without an owner", async || {
        let owners = "jsonpath={.items[*].metadata.ownerReferences}";
        let found = cluster.kubectl(&["get", "pods", "-l", SERVERS, "-n", HERE, "-o", owners])?;
        Ok(found.is_empty().then_some(()))
    })
    .await?;
    cluster.kubectl(&["delete", "pods,rs", "--all", "--force", "--namespace", HERE])?;
    cluster.kubectl_with(&[&["delete"], &system[..]].concat(), &policy)?;
    operator.stop()
}

/// What an administrator is refused, who may do everything else.
fn refusals(cluster: &Cluster, server: &str) -> Result<()> {
    let owner =
        "ownerReferences: [{apiVersion: cadre.dev/v1alpha1, kind: AttentionPool, name: p, uid: u}]";
    refused(create(cluster, &pod("s", "server", "")), "create an AttentionPool")?;
    refused(create(cluster, &pod("s", "trainer", owner)), "create an AttentionPool")?;
    create(cluster, &pod("t", "trainer", ""))?;
    // Of another class: another operator's policy is about it, and this one takes it for no server.
    let theirs = pod("theirs", "server, cadre.dev/class: another", "");
    create(cluster, &theirs)?;
    cluster.kubectl(&["delete", "pod", "theirs", "--force", "--namespace", HERE])?;
    let change = |verb: &str, name: &str, words: &str| {
        let words: Vec<_> = words.split(' ').collect();
        cluster.kubectl(&[&[verb, "pod", name, "--overwrite", "-n", HERE], &words[..]].concat())
    };
    for (verb, name, words, said) in [
        ("label", "t", "cadre.dev/role=server", "makes a pod a server"),
        ("label", server, "cadre.dev/role=trainer", "makes a pod a server"),
        ("label", server, "cadre.dev/slot=7", "says which server a pod is"),
        ("label", server, "cadre.dev/slot-", "says which server a pod is"),
        ("label", server, "cadre.dev/pool=other", "says which server a pod is"),
        ("label", server, "cadre.dev/class=another", "says which server a pod is"),
        ("annotate", server, "cadre.dev/incarnation=9", "says which server a pod is"),
    ] {
        refused(change(verb, name, words), said)?;
    }
    change("label", server, "team=x")?;
    change("label", "t", "cadre.dev/slot=7").map(drop)
}

fn refused(done: Result<String>, words: &str) -> Result<()> {
    match done {
        Ok(_) => bail!("the API server does it, where `{words}` was expected"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains(words), "`{words}` was expected: {said}");
            Ok(())
        }
    }
}

fn create(cluster: &Cluster, manifest: &str) -> Result<String> {
    cluster.kubectl_with(&["create", "--namespace", HERE], manifest)
}

fn pod(name: &str, role: &str, more: &str) -> String {
    let more = if more.is_empty() { String::new() } else { format!(", {more}") };
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, labels: {{cadre.dev/pool: p, cadre.dev/role: {role}, \
         cadre.dev/slot: '0'}}{more}}}, spec: {{containers: [{{name: c, image: 'example.com/i:1'}}]}}}}"
    )
}

/// Of a user who may create no pod by hand that is a server.
const REPLICAS: &str = "
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: x}
spec:
  replicas: 1
  selector: {matchLabels: {app: x}}
  template:
    metadata: {labels: {app: x, cadre.dev/pool: p, cadre.dev/role: server, cadre.dev/slot: '0'}}
    spec: {containers: [{name: c, image: 'example.com/i:1'}]}
";
