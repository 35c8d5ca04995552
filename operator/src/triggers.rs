//! Objects that a controller has to look at again.
//!
//! In: keys, from watches. Out: a stream of them, each once however often it was put in meanwhile, [`TOGETHER`]
//! after it was put in first. So a thousand changes of a pool are a few looks, a pool that never stops changing is
//! looked at all the same, and the queue is never longer than there are objects, also while nobody leads and
//! takes any out.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{Stream, stream};
use kube::{Resource, ResourceExt as _};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Changes of one object within this time are one look.
const TOGETHER: Duration = Duration::from_millis(100);

/// Namespace and name.
pub(crate) type Key = (String, String);

/// That of an object.
pub(crate) fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// Keys that wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Triggers {
    waiting: Arc<Mutex<Waiting>>,
    news: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Since when, the oldest first.
    queue: VecDeque<(Instant, Key)>,
    keys: BTreeSet<Key>,
}

impl Triggers {
    pub(crate) fn put(&self, key: Key) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.keys.insert(key.clone()) {
            waiting.queue.push_back((Instant::now(), key));
            self.news.notify_one();
        }
    }

    /// Takes them out, one by one, for ever. One taker at a time.
    pub(crate) fn taken(&self) -> impl Stream<Item = Key> + Send + 'static + use<> {
        stream::unfold(self.clone(), |own| async move {
            loop {
                match own.next() {
                    Ok(key) => return Some((key, own)),
                    Err(Some(due)) => sleep_until(due).await,
                    Err(None) => own.news.notified().await,
                }
            }
        })
    }

    /// The first key, or when it may be taken if there is one.
    fn next(&self) -> Result<Key, Option<Instant>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let due = waiting.queue.front().map(|(since, _)| *since + TOGETHER);
        if due.is_none_or(|it| it > Instant::now()) {
            return Err(due);
        }
        let (_, key) = waiting.queue.pop_front().ok_or(None)?;
        waiting.keys.remove(&key);
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn a_key_is_taken_once_however_often_it_was_put() {
        let triggers = Triggers::default();
        for name in ["a", "b", "a", "b"] {
            triggers.put(("n".into(), name.into()));
        }
        let mut taken = std::pin::pin!(triggers.taken());
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("a"));
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("b"));
        triggers.put(("n".into(), "c".into()));
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("c"));
    }
}
