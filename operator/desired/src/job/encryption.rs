//! Whether the workers of an attempt encrypt what they send each other: links alone, all, or nothing.
//!
//! In: a job, its attempts, a trainer's pod. Out: one word for all workers of an attempt. It is fixed when the attempt is
//! made, as an annotation of its Job and its pods, so an edit of the spec, or another operator with another default, never parts the
//! processes of a running attempt.
//!
//! Attempts of an operator that did not write the annotation have what the spec said then: the first look at one puts it
//! into the status, before an edit can change it.

use cadre_crds::contract::ANNOTATION_ENCRYPTION;
use cadre_crds::{Encryption, TrainingJob};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::attempt::Attempt;
use crate::names::annotation;

/// What links of the next attempt are. One that the spec leaves open is encrypted in a new job; later attempts have what
/// those before had, since the image of a job that began without it may not know how.
pub(super) fn next(job: &TrainingJob) -> Encryption {
    let before = job.status.as_ref().filter(|it| it.attempt > 0);
    let before = before.map(|it| it.encryption.unwrap_or(Encryption::Off));
    job.spec.attention.encryption.or(before).unwrap_or(Encryption::Tcp)
}

/// What links of an attempt are.
pub(super) fn of_attempt(job: &TrainingJob, attempt: &Attempt<'_>) -> Encryption {
    let pinned = read(&attempt.job.metadata).ok().flatten();
    pinned.unwrap_or_else(|| unpinned(job))
}

/// What links of the attempt of a trainer's pod are. Pods of other kinds may have the annotation, too: all of a job the same.
///
/// # Errors
///
/// The annotation has another value than those of `spec.attention.encryption`.
pub fn encryption(pod: &Pod, job: Option<&TrainingJob>) -> Result<Encryption, String> {
    let open = || job.map_or(Encryption::Off, unpinned);
    Ok(read(&pod.metadata)?.unwrap_or_else(open))
}

fn read(meta: &ObjectMeta) -> Result<Option<Encryption>, String> {
    let Some(word) = annotation(meta, ANNOTATION_ENCRYPTION) else { return Ok(None) };
    match Encryption::of(word) {
        Some(it) => Ok(Some(it)),
        None => Err(format!(
            "its annotation {ANNOTATION_ENCRYPTION} is {word}; set it to Tcp, Required or Off"
        )),
    }
}

fn unpinned(job: &TrainingJob) -> Encryption {
    let told = job.status.as_ref().and_then(|it| it.encryption);
    told.or(job.spec.attention.encryption).unwrap_or(Encryption::Off)
}
