//! Whose number `spec.replicas` is, in mode `Auto`.
//!
//! In: the pool's `managedFields`, and what its disruption budget says about numbers that were taken over. Out: whether the
//! number is the operator's, who else wrote it, and when numbers of others were taken over.
//!
//! The operator writes by server-side apply, with a field manager of its own ([`SCALER`]), because only that always leaves an
//! entry in `managedFields`: a write through the scale subresource leaves none where nobody had the field before. So a number is
//! the operator's where that manager has it. Any other number is foreign, also one that nobody has. The API server takes
//! the entry away when somebody else writes another number.
//!
//! The times stand in an annotation of the budget, which nobody but the operator writes: whoever replaces the pool's object drops
//! each annotation of it that his own one lacks.
//!
//! Invariant: foreign numbers are taken over [`TAKEOVERS`] times in [`QUIET_SECONDS`] at most, whoever leads. A leader whose clock
//! goes ahead of the next one's does not lengthen that.

use cadre_crds::AttentionPool;
use cadre_crds::contract::ANNOTATION_TAKEN_OVER;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use crate::names::{SCALER, annotation, is_owned};

/// Foreign numbers that are taken over within [`QUIET_SECONDS`]; the next one is left alone.
pub(super) const TAKEOVERS: usize = 3;
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

/// When foreign numbers were taken over, as the pool's budget says, the newest last. What lies ahead of `now` is another clock's
/// time, and counts from now on.
pub(super) fn takeovers(observed: &Observed, now: Timestamp) -> Vec<Timestamp> {
    let own = observed.budget.iter().map(|it| &it.metadata);
    let mut own = own.filter(|it| is_owned(it, &observed.pool.metadata));
    let text = own.find_map(|it| annotation(it, ANNOTATION_TAKEN_OVER)).unwrap_or_default();
    let times = text.split(',').filter_map(|it| it.parse::<Timestamp>().ok());
    times.map(|it| it.min(now)).collect()
}

/// Whether so many numbers were taken over in the time before `came` that one that came then is left alone.
pub(super) fn is_full(times: &[Timestamp], came: i64) -> bool {
    let times = times.iter().map(|it| it.as_second());
    times.filter(|it| came - QUIET_SECONDS < *it).count() >= TAKEOVERS
}
