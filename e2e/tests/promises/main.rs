//! What Cadre promises on a real API server and real kubelets, one file per promise.
//!
//! One cluster serves all of them, one after the other, each in a namespace of its own. Words on the
//! command line choose promises whose name holds one of them. A tier that is missing is said aloud with
//! its reason; `CADRE_E2E_TIERS` names tiers that must not be missing. `CADRE_E2E_KUBECONFIG` names a cluster to take instead of
//! our own: one to throw away, since definitions, rights and objects are put there.

mod a_drained_trainer_costs_no_restart;
mod a_job_becomes_pods_when_its_queue_says_so;
mod a_job_resumes_from_its_checkpoint;
mod a_job_trains_to_the_bits_of_a_local_run;
mod a_node_that_dies_in_a_step_costs_no_bits;
mod a_pool_gets_its_servers_or_says_why_not;
mod a_pool_is_resized_while_a_job_trains;
mod a_pool_is_whole_again_on_another_node;
mod a_quota_for_some_servers_is_told_and_lifts_by_itself;
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
mod release;
mod servers_are_replaced_one_after_the_other;
mod servers_give_way_to_urgent_pods_and_come_back;
mod servers_sit_where_their_trainers_are;
mod the_chart_makes_the_recorded_manifests;
mod training;
mod training_goes_on_when_a_gpu_is_taken;
mod training_goes_on_without_an_operator;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use cadre_e2e::programs::Programs;
use cadre_e2e::{Cluster, Tier, namespaces};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

/// One promise.
struct Promise {
    name: &'static str,
    tier: Tier,
    keep: for<'a> fn(&'a mut Cluster) -> LocalBoxFuture<'a, Result<()>>,
}

macro_rules! promises {
    ($($tier:ident: $($module:ident)*;)*) => {
        &[$($(Promise {
            name: stringify!($module),
            tier: Tier::$tier,
            keep: |cluster| $module::keep(cluster).boxed_local(),
        },)*)*]
    };
}

/// All of them, those of the smallest tier first.
const PROMISES: &[Promise] = promises! {
    ControlPlane:
        bad_objects_are_refused_in_our_words
        every_bad_field_is_refused_or_told
        the_chart_makes_the_recorded_manifests
        explain_names_the_cause_and_the_remedy
        a_pool_gets_its_servers_or_says_why_not
        a_job_becomes_pods_when_its_queue_says_so
        another_operator_takes_over_and_changes_no_pod
        an_operator_also_serves_a_cluster_of_the_user
        only_the_operator_makes_servers
        an_uninstall_never_hangs;
    FakeNodes:
        servers_are_replaced_one_after_the_other
        servers_give_way_to_urgent_pods_and_come_back
        an_autoscaler_sizes_an_external_pool
        servers_sit_where_their_trainers_are;
    RealNodes:
        helm_installs_upgrades_and_uninstalls
        a_job_trains_to_the_bits_of_a_local_run
        training_goes_on_without_an_operator
        a_pool_is_resized_while_a_job_trains
        a_job_resumes_from_its_checkpoint
        training_goes_on_when_a_gpu_is_taken
        plain_pods_join_a_pool_and_train
        busy_servers_get_company
        a_drained_trainer_costs_no_restart
        a_quota_for_some_servers_is_told_and_lifts_by_itself
        an_uninstall_in_mid_training_ends
        a_node_that_dies_in_a_step_costs_no_bits
        a_pool_is_whole_again_on_another_node;
};

/// Those that hold on a cluster of the user, whatever its nodes are.
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
    tokio::runtime::Runtime::new().context("a runtime")?.block_on(async {
        let mut cluster = Cluster::of_user(folder.path(), config).await?;
        keep_all(&mut cluster, &chosen, &mut failed).await
    })?;
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
    let runtime = tokio::runtime::Runtime::new().context("a runtime")?;
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
    if !real.is_empty() || !others.is_empty() {
        runtime.block_on(async {
            let began = Instant::now();
            let mut cluster = Cluster::start(folder).await.context("the control plane")?;
            println!("control plane after {:.1} s", began.elapsed().as_secs_f64());
            keep_all(&mut cluster, &others, &mut failed).await?;
            if real.is_empty() {
                return Ok(());
            }
            // Whether the kernel lets a node run shows when one does.
            match cluster.real_nodes().await {
                Ok(()) => keep_all(&mut cluster, &real, &mut failed).await,
                Err(reason) => {
                    failed.extend(missing(Tier::RealNodes, &reason, &demanded));
                    anyhow::Ok(())
                }
            }
        })?;
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
    let kinds = "nodes,attnpool,cadjob,jobs,pods";
    match cluster.kubectl(&["get", kinds, "--all-namespaces", "--output=wide"]) {
        Ok(table) => println!("{table}"),
        Err(error) => println!("{error:#}"),
    }
}

/// Takes away what a broken promise may have left and what would break others: parts of the API whose server is gone. A
/// cluster of the user keeps its own.
fn take_away(cluster: &Cluster) {
    if !cluster.is_ours() {
        return;
    }
    for it in ["apiservice/v1beta1.metrics.k8s.io", "crd/pods.metrics.k8s.io"] {
        if let Err(error) = cluster.kubectl(&["delete", it, "--ignore-not-found", "--timeout=30s"])
        {
            println!("{it} stays: {error:#}");
        }
    }
}

async fn keep_all(
    cluster: &mut Cluster,
    chosen: &[&Promise],
    failed: &mut Vec<String>,
) -> Result<()> {
    for promise in chosen {
        let began = Instant::now();
        let kept = std::panic::AssertUnwindSafe((promise.keep)(cluster)).catch_unwind().await;
        let seconds = began.elapsed().as_secs_f64();
        match kept {
            Ok(Ok(())) => println!("promise {:<48} kept   {seconds:>6.1} s", promise.name),
            Ok(Err(error)) => {
                println!("promise {:<48} BROKEN {seconds:>6.1} s: {error:#}", promise.name);
                show(cluster);
                take_away(cluster);
                failed.push(promise.name.to_owned());
            }
            // The panic has said why.
            Err(_) => {
                println!("promise {:<48} BROKEN {seconds:>6.1} s", promise.name);
                failed.push(promise.name.to_owned());
            }
        }
        cluster.check()?;
        // What a broken promise has left would break the next ones.
        cluster.remove_fake_nodes().await?;
    }
    Ok(())
}
