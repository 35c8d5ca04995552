//! What to do about what is known to go wrong.
//!
//! In: a reason of the operator, or words of the scheduler and the kubelet. Out: one sentence, or nothing where
//! nothing is known.

/// Reasons of the operator's conditions and events.
pub(super) fn of_reason(reason: &str) -> Option<&'static str> {
    let known = REASONS.iter().find(|it| it.0 == reason)?;
    Some(known.1)
}

/// What the scheduler says about a pod without a node.
pub(super) fn of_scheduling(message: &str) -> Option<&'static str> {
    find(&SCHEDULING, message)
}

/// Why a container waits.
pub(super) fn of_waiting(reason: &str, message: &str) -> Option<&'static str> {
    find(&WAITING, reason).or_else(|| find(&WARNINGS, message))
}

/// What a warning says.
pub(super) fn of_warning(message: &str) -> Option<&'static str> {
    find(&WARNINGS, message)
}

/// How a container ended.
pub(super) fn of_end(code: i32, reason: &str) -> Option<&'static str> {
    if reason == "OOMKilled" {
        return Some("raise the container's memory limit, or give it fewer tokens");
    }
    match code {
        2 => Some("correct what the last line names: the input is wrong, a restart does not help"),
        3 => Some("read the log: the job could not go on (`cadre logs`)"),
        126 | 127 => Some("correct the image or the command: there is no such program"),
        137 => Some("it was killed; look at the node's memory and the grace period"),
        139 => Some("it crashed in native code; collect `cadre bundle` and report it"),
        _ => None,
    }
}

fn find(table: &[(&str, &'static str)], text: &str) -> Option<&'static str> {
    table.iter().find(|it| text.contains(it.0)).map(|it| it.1)
}

const REASONS: [(&str, &str); 38] = [
    ("Invalid", "correct the field that the message names and apply the object again"),
    ("PoolNotFound", "create the pool, or correct spec.attention.poolRef"),
    ("PoolRefuses", "add the job's namespace to the pool's spec.access.namespaces"),
    ("NameTaken", "rename the other Service or budget, or this object"),
    ("Queued", "wait for the queue, or raise its quota"),
    ("QueuePlaceLost", "wait for the queue, or raise its quota; each attempt begins at its end"),
    ("TakenBack", "wait for the queue, or raise its quota"),
    ("Suspended", "set spec.suspend to false"),
    ("NoTrainer", "start a job that names this pool, or give it dedicated servers (spec.replicas)"),
    ("NoServer", "see the pods below"),
    ("Unschedulable", "see the pod below"),
    ("NotStarting", "see the pod below"),
    (
        "NotJoined",
        "allow the pod to reach the operator (NetworkPolicy), set the nodes' clocks right, and read its log (`cadre logs`)",
    ),
    (
        "NotAdmitted",
        "create what the message names, such as the pod's TrainingJob, or delete the pod",
    ),
    (
        "NotMarked",
        "let the operator change labels of pods in its namespace (the chart's role), or set control.leaderAlone=false",
    ),
    (
        "TokensNotChecked",
        "let the operator create TokenReviews (the chart's ClusterRole), and see that the API server answers them",
    ),
    ("ServerFailed", "read the server's log (`cadre logs`)"),
    ("Quarantined", "look at the node of that server; another takes its slot"),
    ("Far", "free nodes near the trainers, or allow more in spec.placement"),
    ("SlowLink", "look at the RDMA resources of the pods and at the fabric between these nodes"),
    ("NotReached", "allow servers to reach the trainers: a NetworkPolicy keeps them apart, mostly"),
    ("Tcp", "look at the RDMA resources of the pods: bytes go over TCP"),
    ("NoCertificate", "mount ca.crt beside the control service's certificate"),
    ("Imbalanced", "look at the slowest servers in status.worstServers"),
    ("NoReports", "see whether servers are registered; without reports mode Auto keeps its number"),
    (
        "OthersScale",
        "leave spec.replicas out of what the message names, or set spec.scaling.mode to External",
    ),
    (
        "RestartsUsedUp",
        "correct the cause, then raise spec.failurePolicy.maxRestarts, and the job goes on",
    ),
    ("FailureRule", "the job's own rule ends it; correct the cause or spec.failurePolicy.rules"),
    ("BadInput", "correct what the message names; a restart does not help"),
    (
        "DeadlineExceeded",
        "create a new job with more spec.activeDeadlineSeconds, which goes on with spec.checkpoint.resumeFrom",
    ),
    (
        "Forbidden",
        "give the operator the right that the message names (the chart's role), or allow the pod in this namespace",
    ),
    ("Refused", "correct the template as the message says"),
    ("OldDefinitions", "apply charts/cadre/crds of the operator's build: Helm does not"),
    ("WaitsForJobs", "wait, or end the jobs that the message is about, for the new template now"),
    ("WaitsForDeletes", "delete the pods of the servers that are to have the new template"),
    ("OtherBuild", "give the pool's template and the job's image one build"),
    (
        "NotWhole",
        "see the pods of the trainers that have not come; when all have, the job gets servers",
    ),
    (
        "TrainerStalled",
        "look where the main thread of the trainer was, by the words in the message",
    ),
];

const SCHEDULING: [(&str, &str); 11] = [
    (
        "Insufficient nvidia.com/gpu",
        "free GPUs, or lower spec.replicas or spec.nodes; servers of a lower priority make room by themselves",
    ),
    (
        "Insufficient rdma/",
        "lower the RDMA resources of the template, or name the ones that these nodes have",
    ),
    ("Insufficient memory", "lower the memory request, or add nodes"),
    ("Insufficient cpu", "lower the CPU request, or add nodes"),
    ("Insufficient", "add nodes with that resource, or ask for less of it"),
    (
        "didn't match Pod's node affinity/selector",
        "label nodes as the template's nodeSelector asks, or correct it",
    ),
    (
        "didn't match pod affinity",
        "with spec.placement.colocation Required servers go only near trainers; free such nodes, or choose Preferred",
    ),
    ("untolerated taint", "add a toleration to the template, or take the taint off"),
    ("were unschedulable", "uncordon nodes"),
    ("no nodes available", "add nodes"),
    ("persistentvolumeclaim", "create the claim of spec.checkpoint, or correct its name"),
];

const WAITING: [(&str, &str); 7] = [
    ("ErrImageNeverPull", "load the image on the node, or let it be pulled"),
    ("ImagePull", "correct the image's name, or give the pod a pull secret"),
    ("ErrImagePull", "correct the image's name, or give the pod a pull secret"),
    ("InvalidImageName", "correct the image's name"),
    ("CreateContainerConfigError", "create the ConfigMap or Secret that the message names"),
    ("RunContainerError", "correct the command or the devices that the message names"),
    ("CrashLoopBackOff", "read the log of the last run (`cadre logs`)"),
];

const WARNINGS: [(&str, &str); 8] = [
    (
        "violates PodSecurity",
        "make the template meet the namespace's Pod Security level, or lower that level",
    ),
    ("exceeded quota", "raise the namespace's quota, or ask for less"),
    ("runAsNonRoot", "set runAsUser in the template: the image runs as root"),
    ("no such file or directory", "correct the command: the image has no such program"),
    ("configmap \"", "create the ConfigMap that the message names"),
    ("secret \"", "create the Secret that the message names"),
    ("MountVolume", "correct the volume that the message names"),
    ("Allocate failed", "look at the device plugin on that node"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The page for administrators lists the same reasons.
    #[test]
    fn every_reason_of_the_manual_has_a_remedy() {
        let page = include_str!("../../../../docs/operations.md");
        let table = page.split("| reason | object | what to do |").nth(1).expect("the table");
        let rows = table.lines().skip(2).take_while(|it| it.starts_with('|'));
        let mut told = 0;
        for row in rows {
            let first = row.split('|').nth(1).expect("a first column");
            for reason in first.split('`').skip(1).step_by(2) {
                told += 1;
                let news = [
                    "Restarting",
                    "ApiServerFailed",
                    "ServerLost",
                    "PoolLost",
                    "PoolBack",
                    "CheckpointWritten",
                ];
                assert!(
                    news.contains(&reason) || of_reason(reason).is_some(),
                    "{reason} has no remedy"
                );
            }
        }
        assert!(told > 10, "the table was found");
    }

    #[test]
    fn the_special_comes_before_the_general() {
        let gpu = of_scheduling("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.");
        assert!(gpu.expect("known").contains("GPUs"));
        assert!(of_scheduling("1 Insufficient example.com/x").is_some());
        assert!(of_scheduling("a new kind of trouble").is_none());
        assert!(of_waiting("ImagePullBackOff", "").expect("known").contains("image"));
        assert!(of_end(0, "OOMKilled").is_some() && of_end(77, "").is_none());
    }
}
