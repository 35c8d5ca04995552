//! Revisions of a pool: what its servers are made from, and which one a new server gets.
//!
//! In: a pool, its servers and the `ControllerRevision`s that are kept. Out: [`Rollout`], the revision of each slot's next
//! server, and [`keep`], which revisions stay.
//!
//! The *update* revision is that of the spec as it is, the *current* one the oldest that is kept: the last that all servers
//! had. A change reaches one slot, and when the server there shows what it is, as many at a time as may be unavailable. A
//! server that is lost elsewhere has a successor of its own revision, so a template that never becomes ready takes one
//! server. Whoever asks for `OnDelete` gives the update revision to each new server, and so does a pool that had none.
//!
//! A digest is made from what the user wrote, not from what became of it: another version of the operator makes other
//! pods and replaces none.

use std::borrow::Cow;
use std::collections::BTreeMap;

use cadre_crds::contract::LABEL_REVISION;
use cadre_crds::{AttentionPool, AttentionPoolSpec, Fabric, Placement, UpdateType};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::server::Server;
use super::{Observed, meta};
use crate::action::{Action, Kind, Object, Reference};
use crate::names::{self, is_owned, label, name};
use crate::pod::State;

/// What servers are made from, as a `ControllerRevision` keeps it. A field that a later build adds has a default.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Parts {
    #[serde(default)]
    template: Option<PodTemplateSpec>,
    #[serde(default)]
    fabric: Fabric,
    #[serde(default)]
    placement: Placement,
}

/// One revision: its digest, and the pool as it was then.
#[derive(Clone, Debug)]
pub(crate) struct Revision<'a> {
    pub(crate) digest: String,
    pub(crate) pool: Cow<'a, AttentionPool>,
}

/// Digest of what servers are made from. Pods that run carry it, and another one replaces them: every build makes the same
/// of the same spec. So a field that a later build adds to these three counts only where it is set.
pub(crate) fn digest(spec: &AttentionPoolSpec) -> String {
    let parts = (&spec.template, &spec.fabric, &spec.placement);
    let text = serde_json::to_string(&parts).expect("a spec is plain data");
    format!("{:016x}", xxh3_64(text.as_bytes()))
}

/// Maximum servers that a change may make unavailable at a time; none if the operator replaces no
/// server for a change.
pub(crate) fn at_once(spec: &AttentionPoolSpec) -> Option<usize> {
    let strategy = &spec.update_strategy;
    match strategy.r#type {
        UpdateType::OnDelete => None,
        UpdateType::RollingUpdate => {
            let most = strategy.rolling_update.as_ref().map_or(1, |it| it.max_unavailable);
            Some(most as usize)
        }
    }
}

/// Servers of an old template that work for jobs of another data version than the new template's.
pub(crate) fn held_back(observed: &Observed, all: &[Server<'_>]) -> usize {
    let current = digest(&observed.pool.spec);
    let staying = all.iter().filter(|it| it.stays());
    let (new, old): (Vec<_>, Vec<_>) = staying.partition(|it| it.revision() == Some(&current));
    let came: Vec<_> = new.into_iter().filter(|it| it.report.is_some()).collect();
    old.iter().filter(|it| !may_follow(it, &came)).count()
}

/// Whether what this server does for a job can be done by those of the new template that are there; that is known once
/// they have come.
pub(crate) fn may_follow(server: &Server<'_>, successors: &[&Server<'_>]) -> bool {
    let Some(own) = server.report.filter(|it| it.serves) else { return true };
    let fits = |it: &&Server<'_>| it.report.is_some_and(|it| it.data_version == own.data_version);
    successors.iter().all(fits)
}

/// Maximum slots that a change may have made unavailable now. It is one until the first server of
/// the new revision is ready and, if others work for a job, connected; while that server is on its
/// way it is 0.
pub(crate) fn at_once_now(observed: &Observed, all: &[Server<'_>]) -> Option<usize> {
    let most = at_once(&observed.pool.spec)?;
    let is_new = is_new(observed);
    let (new, old): (Vec<_>, Vec<_>) =
        all.iter().filter(|it| it.stays()).partition(|it| is_new(it));
    let serve = old.iter().any(|it| it.report.is_some_and(|it| it.serves));
    let shows = |it: &&Server<'_>| it.state == State::Ready && (it.report.is_some() || !serve);
    let most = if new.iter().any(shows) { most } else { usize::from(new.is_empty()) };
    Some(most)
}

/// Whether the pool has no servers when the change comes: then no slot has a former revision to
/// come back with.
fn meets_nothing(observed: &Observed, all: &[Server<'_>], update: &str) -> bool {
    let status = observed.pool.status.as_ref();
    let update = names::revision(name(&observed.pool.metadata), update);
    all.iter().all(|it| !it.is_present())
        && status.is_none_or(|it| it.replicas == 0 && it.update_revision != update)
}

/// Revisions of the pool that are kept, the oldest first.
fn kept(observed: &Observed) -> Vec<&ControllerRevision> {
    let ours = |it: &&ControllerRevision| {
        is_owned(&it.metadata, &observed.pool.metadata) && digest_of(it).is_some()
    };
    let mut kept: Vec<_> = observed.revisions.iter().map(AsRef::as_ref).filter(ours).collect();
    kept.sort_by_key(|it| (it.revision, it.metadata.name.clone()));
    kept
}

fn digest_of(revision: &ControllerRevision) -> Option<&str> {
    label(&revision.metadata, LABEL_REVISION)
}

fn parts(revision: &ControllerRevision) -> Option<Parts> {
    serde_json::from_value(revision.data.as_ref()?.0.get("spec")?.clone()).ok()
}

/// The pool with the template of a stored revision; none if that cannot be read.
fn as_it_was<'a>(observed: &'a Observed, kept: &ControllerRevision) -> Option<Revision<'a>> {
    let Parts { template, fabric, placement } = parts(kept)?;
    let mut pool = observed.pool.clone();
    (pool.spec.template, pool.spec.fabric, pool.spec.placement) = (template, fabric, placement);
    Some(Revision { digest: digest_of(kept)?.to_owned(), pool: Cow::Owned(pool) })
}

/// Digest of the last revision that all servers had.
fn current<'a>(observed: &'a Observed, update: &'a str) -> &'a str {
    kept(observed).into_iter().find_map(digest_of).unwrap_or(update)
}

/// Names of the current and of the update revision.
pub(crate) fn told(observed: &Observed) -> [String; 2] {
    let update = digest(&observed.pool.spec);
    let pool = name(&observed.pool.metadata);
    [current(observed, &update), &update].map(|it| names::revision(pool, it))
}

/// Whether a server is of the update revision.
pub(crate) fn is_new(observed: &Observed) -> impl Fn(&Server<'_>) -> bool + use<> {
    let update = digest(&observed.pool.spec);
    move |it| it.revision() == Some(update.as_str())
}

/// Keeps the spec's revision, and of the others what servers may come back with: the current one, and those that a server
/// is of. Once all servers are of the spec's and ready, it is the only one, and so it is in a pool that had none.
pub(crate) fn keep(
    observed: &Observed,
    all: &[Server<'_>],
    wanted: usize,
    actions: &mut Vec<Action>,
) {
    let update = digest(&observed.pool.spec);
    let kept = kept(observed);
    if !kept.iter().any(|it| digest_of(it) == Some(&update)) {
        let number = kept.last().map_or(1, |it| it.revision + 1);
        let revision = object(&observed.pool, &update, number);
        actions.push(Action::Create(Object::Revision(Box::new(revision))));
    }
    let is_new = |it: &Server<'_>| it.revision() == Some(&update);
    let (staying, leaving): (Vec<_>, Vec<_>) = all.iter().partition(|it| it.stays());
    let is_whole = staying.len() == wanted
        && staying.iter().all(|it| is_new(it) && it.state == State::Ready)
        && leaving.iter().all(|it| is_new(it) || it.state == State::Ended)
        || meets_nothing(observed, all, &update);
    let is_needed = |it: &ControllerRevision| {
        let is_of = |server: &Server<'_>| server.revision() == digest_of(it);
        !is_whole
            && (kept.first().is_some_and(|old| old.revision == it.revision)
                || all.iter().any(is_of))
    };
    for it in &kept {
        if digest_of(it) != Some(&update) && !is_needed(it) {
            actions.push(Action::Delete(Reference::new(Kind::Revision, &it.metadata)));
        }
    }
}

fn object(pool: &AttentionPool, digest: &str, number: i64) -> ControllerRevision {
    let spec = pool.spec.clone();
    let parts = Parts { template: spec.template, fabric: spec.fabric, placement: spec.placement };
    let mut metadata = meta(pool, names::revision(name(&pool.metadata), digest));
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(LABEL_REVISION.into(), digest.to_owned());
    let data = RawExtension(serde_json::json!({"spec": parts}));
    ControllerRevision { metadata, data: Some(data), revision: number }
}

/// Which revision each slot's next server gets.
pub(crate) struct Rollout<'a> {
    update: Revision<'a>,
    /// What others are made from; none: all are made from the update revision.
    former: Option<Former<'a>>,
}

struct Former<'a> {
    observed: &'a Observed,
    /// The last revision that all servers had.
    current: Revision<'a>,
    /// Slots that the change may reach, beside those that it has reached already.
    room: usize,
    /// Revisions of other servers that were asked for.
    known: BTreeMap<String, Option<Revision<'a>>>,
}

impl<'a> Rollout<'a> {
    pub(crate) fn new(observed: &'a Observed, all: &[Server<'_>]) -> Self {
        let update = digest(&observed.pool.spec);
        let former = |it: &&ControllerRevision| digest_of(it) != Some(update.as_str());
        let mut former = kept(observed).into_iter().take_while(former);
        let current = former.find_map(|it| as_it_was(observed, it));
        let current = current.filter(|_| !meets_nothing(observed, all, &update));
        let former = at_once_now(observed, all).zip(current).map(|(most, current)| {
            let room = if held_back(observed, all) > 0 {
                0
            } else {
                most.saturating_sub(unready(all, &update))
            };
            Former { observed, current, room, known: BTreeMap::new() }
        });
        let pool = Cow::Borrowed(&observed.pool);
        Self { update: Revision { digest: update, pool }, former }
    }

    /// What the next server of a slot is made from, after its `last` one.
    pub(crate) fn next(&mut self, last: Option<&Server<'_>>) -> &Revision<'a> {
        let Self { update, former } = self;
        let Some(former) = former else { return update };
        if last.is_some_and(|it| is_reached(it, &update.digest)) {
            return update;
        }
        if former.room > 0 {
            former.room -= 1;
            return update;
        }
        let Former { observed, current, known, .. } = former;
        let Some(digest) = last.and_then(Server::revision) else { return current };
        let find = || {
            let all = kept(observed);
            let own = all.into_iter().find(|it| digest_of(it) == Some(digest))?;
            as_it_was(observed, own)
        };
        known.entry(digest.to_owned()).or_insert_with(find).as_ref().unwrap_or(current)
    }
}

/// A change has reached this slot: its server is of the update revision, or goes for one that is.
fn is_reached(last: &Server<'_>, update: &str) -> bool {
    last.revision() == Some(update) || last.is_updated()
}

/// Slots that a change has reached and that are not ready again.
fn unready(all: &[Server<'_>], update: &str) -> usize {
    let mut last: BTreeMap<u32, &Server<'_>> = BTreeMap::new();
    for server in all {
        // In the order of incarnations.
        last.insert(server.slot, server);
    }
    let is_ready = |it: &Server<'_>| it.revision() == Some(update) && it.state == State::Ready;
    last.into_values().filter(|it| is_reached(it, update) && !is_ready(it)).count()
}
