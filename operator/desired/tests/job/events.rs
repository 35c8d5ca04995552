//! What happens to a job's cluster: users, failures, the platform, an API server that refuses.

use proptest::prelude::*;

use super::refusals::REFUSALS;

/// Why the platform takes pods away, as it says it in `DisruptionTarget`.
pub(crate) const REASONS: [&str; 5] = [
    "EvictionByEvictionAPI",
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "DeletionByPodGC",
    PUT_OUT,
];

/// Where the kubelet ends a pod for lack of memory or disk.
pub(crate) const PUT_OUT: &str = "TerminationByKubelet";

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Suspend(bool),
    End {
        pod: usize,
        code: i32,
    },
    Finish,
    Disrupt {
        pod: usize,
        reason: usize,
    },
    Spoil {
        pod: usize,
        code: Option<i32>,
    },
    Beside {
        pod: usize,
        code: i32,
    },
    GiveUp,
    /// A trainer of the newest attempt has written a checkpoint of so many steps.
    Save(u64),
    /// So many restarts are allowed from now on.
    Allow(u32),
    Nominate {
        pod: usize,
        holds: bool,
    },
    DeletePod(usize),
    LoseNode(usize),
    Preempt,
    DeleteJob,
    Pool(bool),
    Refuse(usize),
    /// The API server refuses nothing any more.
    Agree,
    Reconcile(usize),
    JobController,
    Kubelets,
    CollectGarbage,
    Calm,
    Wait(i64),
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let code = prop_oneof![Just(0), Just(1), Just(2), Just(3), Just(137)];
    let pod = 0_usize..2;
    let event = prop_oneof![
        1 => any::<bool>().prop_map(Event::Suspend),
        2 => (pod.clone(), code).prop_map(|(pod, code)| Event::End { pod, code }),
        1 => Just(Event::Finish),
        3 => (pod.clone(), 0..REASONS.len())
            .prop_map(|(pod, reason)| Event::Disrupt { pod, reason }),
        1 => (pod.clone(), prop::option::of(1..4))
            .prop_map(|(pod, code)| Event::Spoil { pod, code }),
        1 => (pod.clone(), 1..4).prop_map(|(pod, code)| Event::Beside { pod, code }),
        1 => Just(Event::GiveUp),
        2 => (0_u64..200).prop_map(Event::Save),
        1 => (0_u32..5).prop_map(Event::Allow),
        1 => (pod.clone(), any::<bool>())
            .prop_map(|(pod, holds)| Event::Nominate { pod, holds }),
        1 => pod.clone().prop_map(Event::DeletePod),
        1 => pod.prop_map(Event::LoseNode),
        1 => Just(Event::Preempt),
        1 => Just(Event::DeleteJob),
        1 => any::<bool>().prop_map(Event::Pool),
        1 => (0..REFUSALS.len()).prop_map(Event::Refuse),
        1 => Just(Event::Agree),
        4 => (0_usize..4).prop_map(Event::Reconcile),
        5 => Just(Event::Reconcile(usize::MAX)),
        3 => Just(Event::JobController),
        3 => Just(Event::Kubelets),
        2 => Just(Event::CollectGarbage),
        5 => Just(Event::Calm),
        1 => (0_i64..200).prop_map(Event::Wait),
    ];
    prop::collection::vec(event, 0..60)
}
