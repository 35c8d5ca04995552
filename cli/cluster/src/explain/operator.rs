//! Whether an operator looks at the objects at all.
//!
//! In: its pods, the leases beside them, and the generation that a status answers. Out: a finding if nobody does.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Finding, Verdict, pod};
use crate::facts::{Life, ago, life};
use crate::seen::Seen;

/// Seconds within which the operator has answered a change.
const ANSWERS_WITHIN_SECONDS: i64 = 30;

/// What keeps the operator from an object that it has not looked at since its last change.
pub(super) fn behind(seen: &Seen, meta: &ObjectMeta, answered: i64) -> Option<Finding> {
    if meta.generation.is_none_or(|it| it <= answered) {
        return None;
    }
    let what = "operator";
    let fresh = newest_change(meta)
        .is_some_and(|it| it.as_second() + ANSWERS_WITHIN_SECONDS > seen.now.as_second());
    if seen.unread.iter().any(|it| it.starts_with("operator")) {
        let says =
            "it has not looked at the last change of the object, and its pods may not be read";
        return Some(Finding::new(what, Verdict::Waiting, says));
    }
    if seen.operators.is_empty() {
        let says = "there is none in this cluster, so nothing is done for the object";
        return Some(
            Finding::new(what, Verdict::Bad, says)
                .with(Some("install the chart (docs/operations.md)")),
        );
    }
    let ready = seen.operators.iter().filter(|it| life(it) == Life::Ready).count();
    if ready == 0 {
        let pods: Vec<_> = seen.operators.iter().collect();
        let says = format!("none of its {} pods is ready", pods.len());
        return Some(Finding::new(what, Verdict::Bad, says).over(pod::all(
            seen,
            "operator pods",
            &pods,
        )));
    }
    let renewed = seen.leases.iter().filter_map(|it| it.spec.as_ref()?.renew_time.as_ref()).max();
    if let Some(renewed) =
        renewed.filter(|it| it.0.as_second() + ANSWERS_WITHIN_SECONDS < seen.now.as_second())
    {
        let says = format!("no operator leads since {}", ago(renewed.0, seen.now));
        return Some(Finding::new(what, Verdict::Bad, says).with(Some("read the log of its pods")));
    }
    let verdict = if fresh { Verdict::Waiting } else { Verdict::Bad };
    let says = "it has not looked at the last change of the object yet";
    Some(Finding::new(what, verdict, says).with((!fresh).then_some("read the log of its pods")))
}

/// When somebody but the operator last wrote the object.
fn newest_change(meta: &ObjectMeta) -> Option<k8s_openapi::jiff::Timestamp> {
    let made = meta.creation_timestamp.as_ref().map(|it| it.0);
    let written = meta.managed_fields.iter().flatten();
    let written = written.filter(|it| it.subresource.as_deref() != Some("status"));
    written.filter_map(|it| it.time.as_ref().map(|it| it.0)).chain(made).max()
}
