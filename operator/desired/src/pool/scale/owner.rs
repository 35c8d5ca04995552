//! Whose number `spec.replicas` is, in mode `Auto`.
//!
//! In: the pool's `managedFields`, and its annotation about numbers that were taken over. Out: whether the number is the
//! operator's, who else wrote it, and whether others write again and again.
//!
//! The operator writes by server-side apply, with a field manager of its own ([`SCALER`]), because only that always leaves an
//! entry in `managedFields`: a write through the scale subresource leaves none where nobody had the field before. So a number is
//! the operator's where that manager has it. Any other number is foreign, also one that nobody has. The API server takes
//! the entry away when somebody else writes another number.
//!
//! Invariant: foreign numbers are taken over [`TAKEOVERS`] times in [`QUIET_SECONDS`] at most, whoever leads, since the times stand
//! in the object itself.

use cadre_crds::AttentionPool;
use cadre_crds::contract::ANNOTATION_TAKEN_OVER;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use k8s_openapi::jiff::Timestamp;

use crate::names::{SCALER, annotation};

/// Foreign numbers that are taken over within [`QUIET_SECONDS`]; the next one is left alone.
const TAKEOVERS: usize = 3;
/// Seconds without another foreign number after which the operator writes again.
pub(super) const QUIET_SECONDS: i64 = 3_600;

/// Whether an entry of a pool's `managedFields` is of somebody who has written `spec.replicas`.
pub fn writes_replicas(entry: &ManagedFieldsEntry) -> bool {
    entry.fields_v1.as_ref().is_some_and(|it| it.0.pointer("/f:spec/f:replicas").is_some())
}

fn writers(pool: &AttentionPool) -> impl Iterator<Item = &str> {
    let entries = pool.metadata.managed_fields.iter().flatten().filter(|it| writes_replicas(it));
    entries.filter_map(|it| it.manager.as_deref())
}

/// Whether the operator has written the number as it is.
pub(crate) fn is_ours(pool: &AttentionPool) -> bool {
    writers(pool).any(|it| it == SCALER)
}

/// Who else has written the number as it is, if `managedFields` say.
pub(crate) fn writer(pool: &AttentionPool) -> Option<&str> {
    writers(pool).find(|it| *it != SCALER)
}

/// When foreign numbers were taken over, the newest last.
fn takeovers(pool: &AttentionPool) -> Vec<Timestamp> {
    let text = annotation(&pool.metadata, ANNOTATION_TAKEN_OVER).unwrap_or_default();
    text.split(',').filter_map(|it| it.parse().ok()).collect()
}

/// Value of the annotation with the next write.
pub(super) fn noted(pool: &AttentionPool, now: Timestamp) -> String {
    let mut times = takeovers(pool);
    if !is_ours(pool) {
        times.push(now);
    }
    let many = times.len().saturating_sub(TAKEOVERS);
    let times: Vec<_> = times.split_off(many).iter().map(ToString::to_string).collect();
    times.join(",")
}

/// Whether so many numbers were taken over in the time before `came` that one that came then is left alone.
pub(super) fn is_full(pool: &AttentionPool, came: i64) -> bool {
    let times = takeovers(pool).into_iter().map(Timestamp::as_second);
    times.filter(|it| came - QUIET_SECONDS < *it && *it <= came).count() >= TAKEOVERS
}
