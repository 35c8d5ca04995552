//! Names, labels and owners of what the operator makes.
//!
//! In: a pool's or a job's name, at most [`NAME_LENGTH`](cadre_crds::validate::NAME_LENGTH)
//! characters. Out: names of at most 63 characters, by construction:
//!
//! ```text
//! attempt of a job    NAME-ATTEMPT            52 + 1 + 5; its pods NAME-ATTEMPT-INDEX, + 1 + 4
//! server of a pool    NAME-SLOT-INCARNATION   52 + 1 + 3 + 1 + 6, the numbers in base 36
//! revision of a pool  NAME-DIGEST             no label, so it may be longer
//! services, budget    NAME-trainers, NAME-servers   2 + 52 + 9
//! ```
//!
//! The name of a Service begins with a letter, before Kubernetes 1.36; where NAME begins with a digit, its Service's
//! begins with `n-`. Its budget's does not.

use std::collections::BTreeMap;

use cadre_crds::contract::{
    LABEL_JOB, LABEL_POOL, LABEL_ROLE, QUEUE_PREFIX, ROLE_SERVER, ROLE_TRAINER,
};
use k8s_openapi::Resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

/// Name under which the operator writes fields, labels and events.
pub const MANAGER: &str = "cadre-operator";
/// Name under which it writes `spec.replicas` of pools of mode `Auto`, and nothing else.
pub const SCALER: &str = "cadre-operator-scale";

/// Largest attempt that has a name.
pub(crate) const LAST_ATTEMPT: u32 = 99_999;
/// Largest incarnation of a server that has a name: 36⁶ − 1 seconds are 69 years.
pub(crate) const LAST_INCARNATION: u32 = 2_176_782_335;

pub(crate) type Labels = BTreeMap<String, String>;

pub(crate) fn attempt(job: &str, number: u32) -> String {
    format!("{job}-{}", number.min(LAST_ATTEMPT))
}

/// Name of the Service of a job's trainers.
pub fn trainers_service(job: &str) -> String {
    format!("{}{job}-trainers", letter(job))
}

/// Name of the Service of a pool's servers.
pub fn servers_service(pool: &str) -> String {
    format!("{}{pool}-servers", letter(pool))
}

/// Name of the disruption budget of a pool's servers.
pub fn servers_budget(pool: &str) -> String {
    format!("{pool}-servers")
}

/// What a name lacks to begin with a letter.
fn letter(name: &str) -> &'static str {
    if name.starts_with(|it: char| it.is_ascii_digit()) { "n-" } else { "" }
}

/// Name of a server's pod.
pub fn server(pool: &str, slot: u32, incarnation: u32) -> String {
    format!("{pool}-{}-{}", base36(slot), base36(incarnation.min(LAST_INCARNATION)))
}

/// Name of what servers of this digest are made from.
pub(crate) fn revision(pool: &str, digest: &str) -> String {
    format!("{pool}-{digest}")
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[(number % 36) as usize]);
        number /= 36;
        if number == 0 {
            break;
        }
    }
    digits.iter().rev().map(|&digit| char::from(digit)).collect()
}

/// Labels of every object that is made for a job.
pub(crate) fn job_labels(meta: &ObjectMeta, pool: &str) -> Labels {
    let mut labels = common(meta, ROLE_TRAINER);
    labels.insert(LABEL_JOB.into(), name(meta).into());
    labels.insert(LABEL_POOL.into(), pool.into());
    labels
}

/// Labels of every object that is made for a pool.
pub(crate) fn pool_labels(meta: &ObjectMeta) -> Labels {
    let mut labels = common(meta, ROLE_SERVER);
    labels.insert(LABEL_POOL.into(), name(meta).into());
    labels
}

fn common(meta: &ObjectMeta, role: &str) -> Labels {
    Labels::from([
        ("app.kubernetes.io/name".into(), "cadre".into()),
        ("app.kubernetes.io/component".into(), role.into()),
        ("app.kubernetes.io/instance".into(), name(meta).into()),
        ("app.kubernetes.io/managed-by".into(), MANAGER.into()),
        (LABEL_ROLE.into(), role.into()),
    ])
}

/// Labels that put the owner's objects into its queue.
pub(crate) fn queue_labels(meta: &ObjectMeta) -> Labels {
    let labels = meta.labels.iter().flatten();
    let queue = labels.filter(|(key, _)| key.starts_with(QUEUE_PREFIX));
    queue.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Labels that select the servers of a pool.
pub(crate) fn server_selector(pool: &str) -> Labels {
    Labels::from([(LABEL_POOL.into(), pool.into()), (LABEL_ROLE.into(), ROLE_SERVER.into())])
}

/// Makes `owner` the controller of an object: it goes when the owner goes.
pub(crate) fn owned_by<T: Resource>(owner: &ObjectMeta) -> OwnerReference {
    OwnerReference {
        api_version: T::API_VERSION.into(),
        kind: T::KIND.into(),
        name: name(owner).into(),
        uid: owner.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Whether `owner` is the controller of an object.
pub(crate) fn is_owned(meta: &ObjectMeta, owner: &ObjectMeta) -> bool {
    let mut owners = meta.owner_references.iter().flatten();
    owners.any(|it| it.controller == Some(true) && Some(&it.uid) == owner.uid.as_ref())
}

pub(crate) fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

pub(crate) fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cadre_crds::validate::{MAX_WORKERS, NAME_LENGTH};

    #[test]
    fn the_longest_names_fit_into_a_label() {
        let longest = "n".repeat(NAME_LENGTH);
        let pod = format!("{}-{}", attempt(&longest, u32::MAX), MAX_WORKERS - 1);
        assert_eq!(pod.len(), 63);
        assert_eq!(server(&longest, MAX_WORKERS - 1, u32::MAX).len(), 63);
        assert!(trainers_service(&longest).len() <= 63 && servers_service(&longest).len() <= 63);
        let digits = "7".repeat(NAME_LENGTH);
        assert!(trainers_service(&digits).len() <= 63 && servers_service(&digits).len() <= 63);
        assert_eq!(trainers_service("70b-run"), "n-70b-run-trainers");
        assert_eq!(servers_service("b-70"), "b-70-servers");
        assert_eq!(server("p", 37, 36 * 36), "p-11-100");
    }
}
