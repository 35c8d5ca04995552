//! Logs of the pods of a pool or a job.
//!
//! In: pods. Out: their lines, each with the pod's name before it. Following ends when all streams have.

use std::io::Write;

use futures_util::{AsyncBufReadExt as _, StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
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
    /// The run before the present one; of a job, the attempt before the newest.
    pub previous: bool,
}

/// Pods whose logs tell about an object: servers of a pool, trainers of a job's newest attempt, or of the one before it that
/// is still there where the `previous` run is wanted. Those without a node have said nothing.
pub fn pods<'a>(seen: &'a Seen, home: &str, target: &Target, wanted: Wanted) -> Vec<&'a Pod> {
    let mut pods = match target.kind {
        Kind::Pool => seen.pool(home, &target.name).map_or_else(Vec::new, |it| seen.servers(it)),
        Kind::Job => {
            let Some(job) = seen.job(home, &target.name) else { return Vec::new() };
            let newest = seen.attempt(job).and_then(|it| of_attempt(&it.metadata));
            let number = |it: &Pod| of_attempt(&it.metadata);
            let mut pods = seen.trainers(job);
            if wanted.previous {
                let before =
                    pods.iter().filter_map(|it| number(it)).filter(|it| newest > Some(*it));
                let before = before.max();
                pods.retain(|it| before.is_some() && number(it) == before);
            } else {
                pods.retain(|it| newest.is_none() || number(it) == newest);
            }
            pods
        }
    };
    pods.retain(|it| node(it).is_some());
    pods
}

/// Number of the attempt that an object belongs to.
fn of_attempt(meta: &ObjectMeta) -> Option<u32> {
    label(meta, LABEL_ATTEMPT)?.parse().ok()
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
        // A trainer's container runs once: the run before it is another pod.
        let previous = wanted.previous && of_attempt(&pod.metadata).is_none();
        let wanted = Wanted { previous, ..wanted };
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
