//! Workers that wait at the door.
//!
//! In: pods whose workers are turned away for now. Out: whether it is time to tell that of one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a worker waits at the door before it is told on its pod; most come too early by a second.
const WAIT_IS_LONG: Duration = Duration::from_secs(10);
/// After this time without another try its wait is over.
const WAIT_IS_OVER: Duration = Duration::from_mins(1);

/// Pods whose workers wait at the door, by uid.
#[derive(Debug, Default)]
pub(super) struct Waiting(BTreeMap<String, Wait>);

#[derive(Debug)]
struct Wait {
    first: Instant,
    last: Instant,
    is_told: bool,
}

impl Waiting {
    /// A worker was turned away for now. Out: whether that is to be told on its pod: once, if it waits for long.
    pub(super) fn is_long(&mut self, pod: &str, now: Instant) -> bool {
        self.0.retain(|_, it| now.duration_since(it.last) < WAIT_IS_OVER);
        let new = || Wait { first: now, last: now, is_told: false };
        let wait = self.0.entry(pod.to_owned()).or_insert_with(new);
        wait.last = now;
        let is_long = now.duration_since(wait.first) >= WAIT_IS_LONG;
        is_long && !std::mem::replace(&mut wait.is_told, is_long)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_once_when_it_is_long_and_one_that_was_given_up_begins_anew() {
        let (mut waiting, start) = (Waiting::default(), Instant::now());
        let mut told = |pod, at| waiting.is_long(pod, start + Duration::from_secs(at));
        let tries: Vec<u64> = (0..40).chain(100..120).filter(|it| told("u", *it)).collect();
        assert_eq!(tries, [10, 110]);
        assert!(!told("other", 900));
        assert_eq!(waiting.0.len(), 1, "the first one has given up");
    }
}
