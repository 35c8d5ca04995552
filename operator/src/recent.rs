//! What this process has written and its caches have not seen yet.
//!
//! In: objects as the API server returned them after a write, pruned as the caches prune theirs. Out: a cache's
//! objects, with the newer of both. Without it a second look, before the watch has caught up, would do everything twice.
//!
//! An object leaves as soon as the cache has the same version or a newer one of it, or the cache's watch is past
//! that version and has none: then it is gone. A watch may be far behind, so no time decides about that.
//! Only after a relist the watch's position is unknown, and entries expire after [`LIFE`]. A look that was taken while
//! [`Recent::waits`] is followed by another after [`LOOK_AGAIN`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

/// Longest time that a write is remembered.
const LIFE: Duration = Duration::from_mins(10);
/// Pause until the next look while the cache has not seen all writes.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Writes of one kind, by uid.
#[derive(Debug)]
pub(crate) struct Recent<K> {
    prune: fn(&mut K),
    written: Mutex<BTreeMap<String, (Instant, Arc<K>)>>,
}

impl<K: Metadata<Ty = ObjectMeta> + kube::Resource> Recent<K> {
    pub(crate) fn new(prune: fn(&mut K)) -> Self {
        Self { prune, written: Mutex::default() }
    }

    /// Remembers what the API server returned.
    pub(crate) fn wrote(&self, mut object: K, now: Instant) {
        (self.prune)(&mut object);
        let Some(uid) = object.metadata().uid.clone() else { return };
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.insert(uid, (now, Arc::new(object)));
    }

    /// Remembers what the API server returned for a delete; nothing, if the object was gone at once.
    pub(crate) fn deleted(&self, uid: &str, left: Option<K>, now: Instant) {
        if let Some(mut object) = left {
            let going = &mut object.metadata_mut().deletion_timestamp;
            going.get_or_insert_with(|| Time(Timestamp::now()));
            self.wrote(object, now);
        } else {
            let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            written.remove(uid);
        }
    }

    /// Whether there are writes that no look has found in its cache yet.
    pub(crate) fn waits(&self) -> bool {
        !self.written.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Corrects the objects of a cache by writes that it has not seen. `ours` selects the writes
    /// that belong to them. `seen` is the newest version that the cache's watch has delivered; read
    /// it before the cache.
    pub(crate) fn correct(
        &self,
        mut cached: Vec<Arc<K>>,
        ours: impl Fn(&K) -> bool,
        seen: u64,
        now: Instant,
    ) -> Vec<Arc<K>> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|_, (at, _)| now.duration_since(*at) < LIFE);
        for object in &mut cached {
            let Some(uid) = object.metadata().uid.clone() else { continue };
            let Some((_, newer)) = written.get(&uid) else { continue };
            if version(object.as_ref()) >= version(newer.as_ref()) {
                written.remove(&uid);
            } else {
                *object = newer.clone();
            }
        }
        let mut unseen = Vec::new();
        if !written.is_empty() {
            let known: BTreeSet<_> = cached.iter().map(|it| it.metadata().uid.as_ref()).collect();
            written.retain(|uid, (_, object)| {
                if known.contains(&Some(uid)) || !ours(object) {
                    return true;
                }
                let going = object.metadata().deletion_timestamp.is_some();
                if going || version(object.as_ref()) <= seen {
                    return false;
                }
                unseen.push(object.clone());
                true
            });
        }
        cached.extend(unseen);
        cached
    }
}

/// Versions of objects of one kind are ordered numbers.
pub(crate) fn version<K: kube::Resource>(object: &K) -> u64 {
    let version = object.meta().resource_version.as_deref();
    version.and_then(|it| it.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    fn pod(uid: &str, version: u32) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.uid = Some(uid.into());
        pod.metadata.resource_version = Some(version.to_string());
        pod
    }

    fn look_at(recent: &Recent<Pod>, cached: Vec<Pod>, seen: u64, now: Instant) -> String {
        let cached = cached.into_iter().map(Arc::new).collect();
        let ours = |it: &Pod| it.metadata.uid.as_deref() != Some("other");
        let found = recent.correct(cached, ours, seen, now);
        let text = |it: &Arc<Pod>| {
            let version = it.metadata.resource_version.clone().expect("made with one");
            format!("{}{version}", it.metadata.uid.clone().expect("made with one"))
        };
        found.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_newer_of_cache_and_write_counts_and_old_writes_are_forgotten() {
        let recent = Recent::new(|_| {});
        let start = Instant::now();
        recent.wrote(pod("a", 9), start);
        recent.wrote(pod("b", 10), start);
        recent.wrote(pod("other", 10), start);
        let look = |cached: Vec<Pod>, now: Instant| look_at(&recent, cached, 0, now);
        let look_past = |seen: u64| look_at(&recent, vec![], seen, start);
        assert_eq!(look(vec![pod("a", 8)], start), "a9 b10", "an old cache");
        assert_eq!(look(vec![pod("a", 10), pod("b", 10)], start), "a10 b10", "a new one");
        assert_eq!(look(vec![pod("a", 10)], start), "a10", "b is gone");
        recent.wrote(pod("c", 11), start);
        assert_eq!(look(vec![], start + LIFE), "", "c was gone before it was seen");
        assert!(!recent.waits());
        recent.wrote(pod("e", 20), start);
        assert_eq!(look_past(19), "e20", "the watch is behind, however long");
        assert_eq!(look_past(20), "", "the watch is past it and has none: it is gone");
        recent.deleted("d", Some(pod("d", 12)), start);
        assert_eq!(look(vec![pod("d", 10)], start), "d12", "d is on its way out");
        assert_eq!(look(vec![], start), "", "d is gone, and no ghost of it stays");
    }
}
