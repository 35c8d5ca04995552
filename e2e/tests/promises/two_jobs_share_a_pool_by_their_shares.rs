//! Two jobs of two namespaces train on one pool: three servers and one, as their shares say; two and two when a share is edited
//! meanwhile; all four for the job that is left. The status and `cadre top` say who has which server, no trainer restarts,
//! and each job's losses have the bits of its own headers.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use cadre_crds::{AttentionPool, Holder};
use cadre_e2e::{Cluster, until};
use serde_json::json;

use crate::objects::{all, cadre};
use crate::training::{MIDDLE, Training};

/// Servers of the pool.
const ALL: usize = 4;

pub(crate) async fn keep(cluster: &Cluster) -> Result<()> {
    let mut host = Training::prepare(cluster, "sharing").await?;
    let mut guest = host.beside("sharing-guest").await?;
    for training in [&mut host, &mut guest] {
        training.endless();
        training.job["spec"]["nodes"] = 1.into();
        training.attempted("j-1");
    }
    host.pool["spec"]["access"] = json!({"namespaces": [guest.here]});
    host.job["spec"]["attention"]["share"] = 300.into();
    guest.job["spec"]["attention"]["poolRef"]["namespace"] = host.here.into();
    host.start(4).await?;
    host.at(MIDDLE).await?;
    guest.cluster.apply(guest.here, &guest.job.to_string())?;
    share(&host, &guest, [3, 1]).await?;

    let equal = r#"{"spec":{"attention":{"share":100}}}"#;
    let patch = ["patch", "cadjob/j", "--type=merge", "--patch", equal, "--namespace", host.here];
    host.cluster.kubectl(&patch)?;
    share(&host, &guest, [2, 2]).await?;
    let of_guest = (guest.losses()?, guest.servers()?);
    never_restarted(&guest).await?;
    guest.remove()?;
    share(&host, &guest, [ALL, 0]).await?;
    never_restarted(&host).await?;
    let of_host = (host.losses()?, host.servers()?);
    // The jobs go before the same are made by themselves, which want their processors.
    host.remove()?;
    for (training, (losses, servers)) in [(&host, of_host), (&guest, of_guest)] {
        println!("{}: {} steps on {servers:?} servers", training.here, losses.len());
        ensure!(training.replayed(4, losses.len())? == losses, "{}: other bits", training.here);
    }
    Ok(())
}

/// Waits until the pool's servers are divided like this and each job that has some makes steps with just those.
async fn share(host: &Training<'_>, guest: &Training<'_>, numbers: [usize; 2]) -> Result<()> {
    let jobs = [(host, numbers[0]), (guest, numbers[1])];
    let pools = all::<AttentionPool>(host.cluster, host.here);
    let what = format!("{numbers:?} servers");
    let divided = until(&what, async || {
        let status = pools.get("p").await?.status.context("a status")?;
        let held = [host.here, guest.here].map(|namespace| {
            let of_job =
                |it: &&Holder| (it.namespace.as_str(), it.name.as_str()) == (namespace, "j");
            status.holders.iter().filter(of_job).flat_map(|it| &it.servers).collect::<Vec<_>>()
        });
        if held.each_ref().map(Vec::len) != numbers {
            return Ok(None);
        }
        let named: BTreeSet<_> = held.iter().flatten().collect();
        ensure!(named.len() == ALL, "one server for two jobs: {:?}", status.holders);
        Ok(Some(()))
    });
    let divided = divided.await;
    host.explained(divided)?;
    for (training, number) in jobs.into_iter().filter(|it| it.1 > 0) {
        training.at(training.steps() + MIDDLE).await?;
        let now = training.plans()?.pop().context("a step")?;
        ensure!(now == number, "{}: a step on {now} servers, not {number}", training.here);
    }
    let (is_well, table) = cadre(host.cluster, host.here, &["top"])?;
    ensure!(is_well, "{table}");
    for (training, number) in jobs {
        let job = format!(" {}/j ", training.here);
        let lines = table.lines().filter(|it| it.contains(&job)).count();
        ensure!(lines == number, "{lines} servers of {job}, not {number}: {table}");
    }
    Ok(())
}

async fn never_restarted(training: &Training<'_>) -> Result<()> {
    let status = training.look().await?.status.unwrap_or_default();
    ensure!((status.attempt, status.restarts, status.failovers) == (1, 0, 0), "{status:?}");
    Ok(())
}
