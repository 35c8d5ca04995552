//! How many threads a launch uses, and how they share its units.
//!
//! In: a number of units, independent of each other, dearest first. Out: each of them was run once.
//!
//! With one thread no other thread is involved. Pools are made once per size and process, and kept: a forked child has none of its
//! parent's threads.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Threads of a launch, the caller's among them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Threads(pub NonZeroUsize);

impl Threads {
    /// The caller's thread alone.
    pub const ONE: Self = Self(NonZeroUsize::MIN);

    /// `count` threads; none counts as one.
    pub fn new(count: usize) -> Self {
        Self(NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN))
    }

    /// Runs `unit(0)` to `unit(units - 1)`, each once; threads take the next one as they get free.
    pub fn run(self, units: usize, unit: impl Fn(usize) + Sync) {
        let helpers = self.0.get().min(units) - usize::from(units > 0);
        let pool = (helpers > 0).then(|| pool(self.0.get() - 1)).flatten();
        let Some(pool) = pool else {
            (0..units).for_each(unit);
            return;
        };
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= units {
                    break;
                }
                unit(index);
            }
        };
        pool.in_place_scope(|scope| {
            for _ in 0..helpers {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

/// The pool of `size` helper threads. None where the system refuses threads; then the caller works alone.
fn pool(size: usize) -> Option<Arc<ThreadPool>> {
    static POOLS: Mutex<BTreeMap<(u32, usize), Arc<ThreadPool>>> = Mutex::new(BTreeMap::new());
    /// The process that made the first pool.
    static FIRST: OnceLock<u32> = OnceLock::new();
    let key = (std::process::id(), size);
    let mut pools = if *FIRST.get_or_init(|| key.0) == key.0 {
        POOLS.lock().unwrap_or_else(PoisonError::into_inner)
    } else {
        match POOLS.try_lock() {
            Ok(it) => it,
            Err(TryLockError::Poisoned(it)) => it.into_inner(),
            // In a forked child it may be held for ever.
            Err(TryLockError::WouldBlock) => return None,
        }
    };
    if let Some(pool) = pools.get(&key) {
        return Some(Arc::clone(pool));
    }
    let name = |index| format!("kernels-{index}");
    let pool = Arc::new(ThreadPoolBuilder::new().num_threads(size).thread_name(name).build().ok()?);
    pools.insert(key, Arc::clone(&pool));
    Some(pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_runs_once_whatever_the_number_of_threads() {
        for (threads, units) in [(1, 5), (3, 0), (3, 1), (2, 100), (8, 3)] {
            let times: Vec<_> = (0..units).map(|_| AtomicUsize::new(0)).collect();
            Threads::new(threads).run(units, |unit| {
                times[unit].fetch_add(1, Ordering::Relaxed);
            });
            assert!(times.iter().all(|it| it.load(Ordering::Relaxed) == 1), "{threads} {units}");
        }
    }
}
