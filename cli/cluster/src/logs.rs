//! Logs of the pods of a pool or a job.
//!
//! In: pods. Out: their lines, each with the pod's name before it. Following ends when all streams have.

use std::io::Write;

use futures_util::{AsyncBufReadExt as _, StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;

use cadre_crds::contract::{LABEL_ATTEMPT, SERVER_CONTAINER, TRAINER_CONTAINER};

use crate::facts::node;
use crate::read::{Cluster, Error};
use crate::seen::{Kind, Seen, Target, is_server, label, name, namespace};

/// Which lines.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Go on with what comes.
    pub follow: bool,
    /// Last lines of each pod.
    pub tail: Option<i64>,
    /// The run before the present one.
    pub previous: bool,
}

/// Pods whose logs tell about an object: servers of a pool, trainers of a job's newest attempt. Those without a node have
/// said nothing.
pub fn pods<'a>(seen: &'a Seen, home: &str, target: &Target) -> Vec<&'a Pod> {
    let mut pods = match target.kind {
        Kind::Pool => seen.pool(home, &target.name).map_or_else(Vec::new, |it| seen.servers(it)),
        Kind::Job => {
            let Some(job) = seen.job(home, &target.name) else { return Vec::new() };
            let newest = seen.attempt(job).and_then(|it| label(&it.metadata, LABEL_ATTEMPT));
            let mut pods = seen.trainers(job);
            pods.retain(|it| newest.is_none() || label(&it.metadata, LABEL_ATTEMPT) == newest);
            pods
        }
    };
    pods.retain(|it| node(it).is_some());
    pods
}

/// Writes the logs of pods, line by line as they come.
///
/// # Errors
///
/// None of the pods has a log that can be read, or the output is gone.
pub async fn print(
    cluster: &Cluster,
    pods: &[&Pod],
    wanted: Wanted,
    out: &mut impl Write,
) -> Result<(), Error> {
    let mut streams = Vec::new();
    let mut refused = None;
    for pod in pods {
        let named = name(&pod.metadata).to_owned();
        let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace(&pod.metadata));
        match api.log_stream(&named, &parameters(pod, wanted)).await {
            Ok(lines) => streams.push(lines.lines().map_ok(move |it| format!("{named} {it}"))),
            Err(error) => {
                let error = Error::request(format!("log of {named}"), &error);
                let _ = writeln!(out, "{error}");
                refused = Some(error);
            }
        }
    }
    if let Some(error) = refused.filter(|_| streams.is_empty()) {
        return Err(error);
    }
    let mut lines = stream::select_all(streams);
    while let Some(line) = lines.next().await {
        let line = line.unwrap_or_else(|error| format!("error: the log broke off: {error}"));
        // A reader that has gone away wants no more.
        if writeln!(out, "{line}").is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// The whole log of a pod, or its last lines.
pub(crate) async fn text(cluster: &Cluster, pod: &Pod, wanted: Wanted) -> Result<String, Error> {
    let named = name(&pod.metadata);
    let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace(&pod.metadata));
    let text = api.logs(named, &parameters(pod, wanted)).await;
    text.map_err(|error| Error::request(format!("log of {named}"), &error))
}

fn parameters(pod: &Pod, wanted: Wanted) -> LogParams {
    let ours = if is_server(pod) { SERVER_CONTAINER } else { TRAINER_CONTAINER };
    let containers = pod.spec.iter().flat_map(|it| &it.containers).map(|it| it.name.as_str());
    let container = containers.clone().find(|it| *it == ours).or_else(|| containers.clone().next());
    LogParams {
        container: container.map(str::to_owned),
        follow: wanted.follow,
        tail_lines: wanted.tail,
        previous: wanted.previous,
        ..LogParams::default()
    }
}
