//! Takes our finalizers off all pools of a class, so that an uninstall never hangs on them.
//!
//! In: the lease of the operators. Out: no pool waits for an operator any more. Servers that run then end with their
//! pods' grace period, as after an eviction. Where the definitions are gone, so are all pools.
//!
//! It holds the lease meanwhile. An operator that led would guard every pool whose servers are connected again; so
//! this waits until the last one has ended, and none leads until all pools are free.

use cadre_crds::contract::FINALIZER;
use cadre_crds::{AttentionPool, Bare as _, Readable};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client};

use crate::apply::finalizers;
use crate::caches::{Scope, scoped};
use crate::error::{Error, is_code};
use crate::leader::{self, Patience, Place};

pub(crate) async fn all(
    client: &Client,
    leases: Client,
    scope: &Scope,
    place: &Place,
) -> anyhow::Result<()> {
    tracing::info!("waiting for the lease {}: no operator may lead", place.name);
    let lease = leader::acquire(leases, place, Patience::default()).await;
    let result = release(client, scope).await;
    lease.give_back().await;
    result
}

async fn release(client: &Client, scope: &Scope) -> anyhow::Result<()> {
    let pools: Api<Readable<AttentionPool>> = scoped(client, scope.namespace.as_deref());
    let found = match pools.list(&ListParams::default()).await {
        Ok(found) => found,
        Err(error) if is_code(&error, 404) => {
            tracing::info!("the cluster has no definition of pools any more");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let ours = found.into_iter().filter(|it| it.object.class() == scope.class.as_deref());
    for metadata in ours.map(|it| it.object.metadata) {
        let api: Api<AttentionPool> = scoped(client, metadata.namespace.as_deref());
        let name = metadata.name.clone().unwrap_or_default();
        let mut now = Some(metadata);
        // If somebody else changed the object meanwhile, read it again instead of overwriting it.
        while let Some(metadata) = now.filter(is_guarded) {
            let pool = AttentionPool { metadata, ..AttentionPool::default() };
            match finalizers(client, &pool, false).await {
                Ok(_) => {
                    tracing::info!("pool {name} has no finalizer any more");
                    break;
                }
                Err(Error::Stale) => {
                    now = api.get_metadata_opt(&name).await?.map(|it| it.metadata);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn is_guarded(metadata: &ObjectMeta) -> bool {
    metadata.finalizers.iter().flatten().any(|it| it == FINALIZER)
}
