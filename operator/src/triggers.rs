//! Objects that a controller has to look at again.
//!
//! In: keys, from watches. Out: a stream of them, each once however often it was put in meanwhile. So
//! the queue is never longer than there are objects, also while nobody leads and takes any out.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{Stream, stream};
use tokio::sync::Notify;

/// Namespace and name.
pub(crate) type Key = (String, String);

/// Keys that wait.
#[derive(Clone, Debug, Default)]
pub(crate) struct Triggers {
    waiting: Arc<Mutex<BTreeSet<Key>>>,
    news: Arc<Notify>,
}

impl Triggers {
    pub(crate) fn put(&self, key: Key) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        self.news.notify_one();
    }

    /// Takes them out, one by one, for ever. One taker at a time.
    pub(crate) fn taken(&self) -> impl Stream<Item = Key> + Send + 'static + use<> {
        stream::unfold(self.clone(), |own| async move {
            loop {
                let first = own.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_first();
                match first {
                    Some(key) => return Some((key, own)),
                    None => own.news.notified().await,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn a_key_is_taken_once_however_often_it_was_put() {
        let triggers = Triggers::default();
        for name in ["b", "a", "b", "a"] {
            triggers.put(("n".into(), name.into()));
        }
        let mut taken = std::pin::pin!(triggers.taken());
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("a"));
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("b"));
        triggers.put(("n".into(), "c".into()));
        assert_eq!(taken.next().await.map(|it| it.1).as_deref(), Some("c"));
    }
}
