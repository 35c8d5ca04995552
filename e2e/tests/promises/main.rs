//! What Cadre promises on a real API server and real kubelets, one file per promise.
//!
//! One cluster serves all of them, each in a namespace of its own. Those that change only what is in their namespace run
//! beside each other, since most of their time is waiting; the others run alone. Words on the
//! command line choose promises whose name holds one of them. A tier that is missing is said aloud with
//! its reason; `CADRE_E2E_TIERS` names tiers that must not be missing. `CADRE_E2E_KUBECONFIG` names a cluster to take instead of
//! our own: one to throw away, since definitions, rights and objects are put there. `CADRE_E2E_SECONDS=1` says what a
//! promise waits for.

mod a_drained_trainer_costs_no_restart;
mod a_job_becomes_pods_when_its_queue_says_so;
mod a_job_resumes_from_its_checkpoint;
mod a_job_trains_to_the_bits_of_a_local_run;
mod a_node_that_dies_in_a_step_costs_no_bits;
mod a_pool_gets_its_servers_or_says_why_not;
mod a_pool_is_resized_while_a_job_trains;
mod a_pool_is_whole_again_on_another_node;
mod a_quota_for_some_servers_is_told_and_lifts_by_itself;
mod an_automatic_pool_loses_no_server_to_others;
mod an_autoscaler_sizes_an_external_pool;
mod an_operator_also_serves_a_cluster_of_the_user;
mod an_uninstall_in_mid_training_ends;
mod an_uninstall_never_hangs;
mod another_operator_takes_over_and_changes_no_pod;
mod bad_objects_are_refused_in_our_words;
mod busy_servers_get_company;
mod every_bad_field_is_refused_or_told;
mod explain_names_the_cause_and_the_remedy;
mod helm_installs_upgrades_and_uninstalls;
mod objects;
mod only_the_operator_makes_servers;
mod plain_pods_join_a_pool_and_train;
mod python_scripts_train_in_pods;
mod release;
mod servers_are_replaced_one_after_the_other;
mod servers_give_way_to_urgent_pods_and_come_back;
mod servers_sit_where_their_trainers_are;
mod the_chart_makes_the_recorded_manifests;
mod the_readmes_commands_are_taken_by_a_cluster;
mod trainers_of_one_pod_compute_in_place;
mod training;
mod training_goes_on_when_a_gpu_is_taken;
mod training_goes_on_without_an_operator;
mod two_jobs_share_a_pool_by_their_shares;
mod who_may_edit_a_namespace_trains_there;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use cadre_e2e::programs::Programs;
use cadre_e2e::{Cluster, Tier, namespaces};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::runtime::Runtime;

use Company::Beside;

/// Promises that run at the same time.
const AT_ONCE: usize = 3;

/// Whether a promise leaves to others what they need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Company {
    /// The promise changes only what is in its namespace.
    Beside,
    /// The promise changes nodes, or who leads.
    Alone,
}

/// One promise.
struct Promise {
    name: &'static str,
    tier: Tier,
    company: Company,
    keep: for<'a> fn(&'a Cluster) -> LocalBoxFuture<'a, Result<()>>,
}

macro_rules! promises {
    ($($tier:ident $company:ident: $($module:ident)*;)*) => {
        &[$($(Promise {
            name: stringify!($module),
            tier: Tier::$tier,
            company: Company::$company,
            keep: |cluster| $module::keep(cluster).boxed_local(),
        },)*)*]
    };
}

/// All of them, those of the smallest tier first. Of those beside each other the longest begin first.
const PROMISES: &[Promise] = promises! {
    ControlPlane Beside:
        another_operator_takes_over_and_changes_no_pod
        bad_objects_are_refused_in_our_words
        who_may_edit_a_namespace_trains_there
        the_chart_makes_the_recorded_manifests
        the_readmes_commands_are_taken_by_a_cluster;
    ControlPlane Alone:
        every_bad_field_is_refused_or_told
        explain_names_the_cause_and_the_remedy
        a_pool_gets_its_servers_or_says_why_not
        a_job_becomes_pods_when_its_queue_says_so
        an_operator_also_serves_a_cluster_of_the_user
        only_the_operator_makes_servers
        an_automatic_pool_loses_no_server_to_others
        an_uninstall_never_hangs;
    FakeNodes Alone:
        servers_are_replaced_one_after_the_other
        servers_give_way_to_urgent_pods_and_come_back
        an_autoscaler_sizes_an_external_pool
        servers_sit_where_their_trainers_are;
    RealNodes Alone:
        helm_installs_upgrades_and_uninstalls;
    RealNodes Beside:
        busy_servers_get_company
        a_job_resumes_from_its_checkpoint
        a_quota_for_some_servers_is_told_and_lifts_by_itself
        a_job_trains_to_the_bits_of_a_local_run
        training_goes_on_when_a_gpu_is_taken
        plain_pods_join_a_pool_and_train
        a_pool_is_resized_while_a_job_trains;
    RealNodes Alone:
        trainers_of_one_pod_compute_in_place
        two_jobs_share_a_pool_by_their_shares
        python_scripts_train_in_pods
        training_goes_on_without_an_operator
        a_drained_trainer_costs_no_restart
        a_node_that_dies_in_a_step_costs_no_bits
        a_pool_is_whole_again_on_another_node
        an_uninstall_in_mid_training_ends;
};

/// Broken promises in a row after which the cluster is taken for broken: each of the rest would wait for its deadline.
const HOPELESS: usize = 4;
/// Newest lines of a table that are shown.
const LINES: usize = 60;

/// Promises that hold on a cluster of the user, whatever its nodes are.
const ANYWHERE: [&str; 4] = [
    "bad_objects_are_refused_in_our_words",
    "the_chart_makes_the_recorded_manifests",
    "another_operator_takes_over_and_changes_no_pod",
    "an_uninstall_never_hangs",
];

fn main() -> ExitCode {
    let code = match std::env::var_os("CADRE_E2E_KUBECONFIG") {
        Some(config) => on_cluster_of_user(Path::new(&config)),
        None => namespaces::run(inner).or_else(|error| {
            println!("all tiers are missing here, all promises are SKIPPED: {error:#}");
            let demanded = Tier::demanded()?;
            Ok(if demanded.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }),
    };
    code.unwrap_or_else(|error| {
        println!("{error:#}");
        ExitCode::FAILURE
    })
}

/// Promises whose name holds a word of the command line; all if there is none.
fn chosen() -> impl Iterator<Item = &'static Promise> {
    let words: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    PROMISES
        .iter()
        .filter(move |it| words.is_empty() || words.iter().any(|word| it.name.contains(word)))
}

fn on_cluster_of_user(config: &Path) -> Result<ExitCode> {
    let folder = tempfile::Builder::new().prefix("cadre-e2e-").tempdir().context("a folder")?;
    let (chosen, others): (Vec<_>, Vec<_>) = chosen().partition(|it| ANYWHERE.contains(&it.name));
    for it in others {
        println!("promise {:<48} SKIPPED: it needs a cluster of our own", it.name);
    }
    let mut failed = Vec::new();
    let runtime = Runtime::new().context("a runtime")?;
    let cluster = runtime.block_on(Cluster::of_user(folder.path(), config))?;
    keep_all(&runtime, &cluster, &chosen, &mut failed)?;
    Ok(ended(&failed))
}

fn ended(failed: &[String]) -> ExitCode {
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("FAILED: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn inner(folder: &Path) -> Result<ExitCode> {
    let runtime = Runtime::new().context("a runtime")?;
    let demanded = Tier::demanded()?;
    let mut failed = Vec::new();
    let mut possible = Vec::new();
    for tier in Tier::ALL {
        match Programs::find().and_then(|it| it.missing_for(tier)) {
            Ok(()) => possible.push(tier),
            Err(reason) => failed.extend(missing(tier, &reason, &demanded)),
        }
    }
    if possible.contains(&Tier::RealNodes) {
        let other = if namespaces::is_version_2() { 1 } else { 2 };
        println!(
            "cgroups of version {other} are not what this machine has, so they are not tested"
        );
    }
    let chosen: Vec<_> = chosen().filter(|it| possible.contains(&it.tier)).collect();
    let (real, others): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|it| it.tier == Tier::RealNodes);
    if real.is_empty() && others.is_empty() {
        return Ok(ended(&failed));
    }
    let began = Instant::now();
    let cluster = runtime.block_on(Cluster::start(folder)).context("the control plane")?;
    println!("control plane after {:.1} s", began.elapsed().as_secs_f64());
    keep_all(&runtime, &cluster, &others, &mut failed)?;
    if !real.is_empty() {
        // Whether the kernel lets a node run shows when one does.
        match runtime.block_on(cluster.real_nodes()) {
            Ok(()) => keep_all(&runtime, &cluster, &real, &mut failed)?,
            Err(reason) => failed.extend(missing(Tier::RealNodes, &reason, &demanded)),
        }
    }
    Ok(ended(&failed))
}

/// Says that a tier is missing. Out: what has failed, if it was demanded.
fn missing(tier: Tier, reason: &anyhow::Error, demanded: &[Tier]) -> Option<String> {
    println!("tier {tier} is missing here, its promises are SKIPPED: {reason:#}");
    demanded.contains(&tier).then(|| format!("tier {tier}"))
}

/// What there is when a promise is broken.
fn show(cluster: &Cluster) {
    let taints = "--output=custom-columns=NODE:.metadata.name,TAINTS:.spec.taints[*].key";
    let looks: [&[&str]; 3] = [
        &["get", "nodes,attnpool,cadjob,jobs,pods", "--all-namespaces", "--output=wide"],
        &["get", "nodes", taints],
        &["get", "events", "--all-namespaces", "--field-selector=type=Warning"],
    ];
    for look in looks {
        match cluster.kubectl(look) {
            Ok(table) => {
                let lines: Vec<_> = table.lines().collect();
                println!("{}", lines[lines.len().saturating_sub(LINES)..].join("\n"));
            }
            Err(error) => println!("{error:#}"),
        }
    }
}

/// Takes away what a broken promise may have left and what would break others: parts of the API whose server is gone, jobs
/// that train, pods that hold a node's GPUs, cordons. The chart is installed anew for the next one. A cluster of the user keeps its own.
fn take_away(cluster: &Cluster) {
    if !cluster.is_ours() {
        return;
    }
    cluster.forget_release();
    let left: [&[&str]; 5] = [
        &["delete", "apiservice/v1beta1.metrics.k8s.io", "--ignore-not-found", "--timeout=30s"],
        &["delete", "crd/pods.metrics.k8s.io", "--ignore-not-found", "--timeout=30s"],
        &["delete", "cadre,jobs", "--all", "--all-namespaces", "--timeout=90s"],
        &["delete", "pods", "--all", "--all-namespaces", "--timeout=90s"],
        &["uncordon", "--selector=kubernetes.io/os=linux"],
    ];
    for it in left {
        if let Err(error) = cluster.kubectl(it) {
            println!("{}: {error:#}", it.join(" "));
        }
    }
}

/// Keeps promises, group by group.
fn keep_all(
    runtime: &Runtime,
    cluster: &Cluster,
    chosen: &[&Promise],
    failed: &mut Vec<String>,
) -> Result<()> {
    let in_a_row = AtomicUsize::new(0);
    for group in chosen.chunk_by(|one, next| (one.company, next.company) == (Beside, Beside)) {
        let broken = keep_group(runtime, cluster, group, &in_a_row);
        cluster.check()?;
        runtime.block_on(cluster.remove_fake_nodes())?;
        if !broken.is_empty() {
            take_away(cluster);
            failed.extend(broken);
            if group.iter().any(|it| it.tier == Tier::RealNodes) {
                runtime.block_on(cluster.real_nodes())?;
            }
        }
    }
    Ok(())
}

/// Keeps promises beside each other. `in_a_row`: how many were broken since one was kept. Out: names of those that are broken,
/// and of those that were not tried.
fn keep_group(
    runtime: &Runtime,
    cluster: &Cluster,
    group: &[&Promise],
    in_a_row: &AtomicUsize,
) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let broken = Mutex::new(Vec::new());
    let lane = || {
        while let Some(promise) = group.get(next.fetch_add(1, Ordering::Relaxed)) {
            if in_a_row.load(Ordering::Relaxed) >= HOPELESS {
                println!("promise {:<48} NOT TRIED: too many before it were broken", promise.name);
            } else if is_kept(runtime, cluster, promise) {
                in_a_row.store(0, Ordering::Relaxed);
                continue;
            } else {
                in_a_row.fetch_add(1, Ordering::Relaxed);
            }
            broken.lock().expect("nobody panics with it").push(promise.name.to_owned());
        }
    };
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(group.len()) {
            scope.spawn(lane);
        }
    });
    broken.into_inner().expect("nobody panics with it")
}

/// Keeps a promise, in a thread of its name.
fn is_kept(runtime: &Runtime, cluster: &Cluster, promise: &Promise) -> bool {
    let began = Instant::now();
    let kept = thread::scope(|scope| {
        let named = thread::Builder::new().name(promise.name.to_owned());
        let thread = named.spawn_scoped(scope, || runtime.block_on((promise.keep)(cluster)));
        thread.expect("a thread can be started").join()
    });
    let seconds = began.elapsed().as_secs_f64();
    match &kept {
        Ok(Ok(())) => println!("promise {:<48} kept   {seconds:>6.1} s", promise.name),
        Ok(Err(error)) => {
            println!("promise {:<48} BROKEN {seconds:>6.1} s: {error:#}", promise.name);
            show(cluster);
        }
        // The panic has said why.
        Err(_) => println!("promise {:<48} BROKEN {seconds:>6.1} s", promise.name),
    }
    matches!(kept, Ok(Ok(())))
}
