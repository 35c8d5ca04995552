//! Takes our finalizers off all pools, so that an uninstall never hangs on them.
//!
//! In: nothing. Out: no pool waits for an operator any more. Servers that run then end with their pods'
//! grace period, as after an eviction.

use cadre_crds::AttentionPool;
use cadre_crds::contract::FINALIZER;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};

use crate::apply::finalizers;
use crate::caches::scoped;

pub(crate) async fn all(client: &Client, namespace: Option<&str>) -> anyhow::Result<()> {
    let pools: Api<AttentionPool> = scoped(client, namespace);
    let found = pools.list_metadata(&ListParams::default()).await?;
    for PartialObjectMeta { metadata, .. } in found {
        let guarded = metadata.finalizers.iter().flatten().any(|it| it == FINALIZER);
        if guarded {
            let pool = AttentionPool {
                metadata: ObjectMeta { resource_version: None, ..metadata },
                ..AttentionPool::default()
            };
            finalizers(client, &pool, false).await?;
            tracing::info!("pool {} is free to go", pool.name_any());
        }
    }
    Ok(())
}
