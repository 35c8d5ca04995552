//! What README.md tells a reader to type to a cluster, an API server takes: `kubectl` as it stands there, its changes as a
//! dry run that the server checks, and `helm` with the values that it stands with. Other commands of the page are those of
//! `scripts/readme`.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use cadre_e2e::programs::root;
use cadre_e2e::{Cluster, helm};

const HERE: &str = "a-reader";

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    cluster.definitions()?;
    cluster.namespace(HERE).await?;
    let page = fs::read_to_string(root().join("README.md")).context("README.md")?;
    let mut taken = Vec::new();
    for command in commands(&page) {
        let words: Vec<_> = command.split_whitespace().collect();
        match words[..] {
            ["kubectl", "get", ..] => cluster.kubectl(&words[1..]),
            ["kubectl", "apply", ..] => {
                // Files are those of the tree, wherever the test runs.
                let files = words[1..].iter().map(|it| match root().join(it) {
                    path if it.contains('/') => path.display().to_string(),
                    _ => (*it).to_owned(),
                });
                let more = ["--namespace", HERE, "--dry-run=server", "--validate=strict"];
                let files: Vec<_> = files.collect();
                let files = files.iter().map(String::as_str);
                cluster.kubectl(&files.chain(more).collect::<Vec<_>>())
            }
            ["helm", "install", ref more @ ..] => helm::dry_run(cluster, more),
            _ => bail!("{command}: say here how it is tried"),
        }
        .with_context(|| format!("README.md: {command}"))?;
        taken.push(command);
    }
    ensure!(taken.len() >= 4, "README.md says only {taken:?} to a cluster");
    Ok(())
}

/// Commands of the page's shell blocks that a cluster answers, each on one line and without its comment.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("\n```").filter_map(|it| it.strip_prefix("sh\n"));
    let lines = blocks.flat_map(|it| {
        let whole = it.replace("\\\n", " ");
        whole.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    lines
        .map(|it| it.split_once(" #").map_or(it.clone(), |(bare, _)| bare.to_owned()))
        .filter(|it| it.starts_with("kubectl ") || it.starts_with("helm "))
        .collect()
}
