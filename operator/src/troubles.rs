//! What keeps workers from the operator, whatever object they work for.
//!
//! In: what the API server refuses beside the looks at objects: the label by which workers find the pod that leads, and reviews of
//! their tokens. Out: a failure, which the status of each object tells that has workers; one look at all of them when it begins
//! or ends.
//!
//! Each is tried again all the time while it lasts, so what was not met for [`A_TROUBLE_LASTS`] is over.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cadre_desired::Failure;

/// Time after which a trouble that nobody meets any more is over.
const A_TROUBLE_LASTS: Duration = Duration::from_mins(1);

/// Time without a refusal of any after which reviews of tokens are well.
const ALL_WELL_FOR: Duration = Duration::from_secs(10);

/// What is in trouble.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum What {
    /// The label of the pod that leads.
    Mark,
    /// Reviews of tokens.
    Tokens,
}

impl What {
    fn failure(self, words: &str) -> Failure {
        match self {
            Self::Mark => Failure {
                reason: "NotMarked",
                message: format!("workers do not find the operator: {words}"),
            },
            Self::Tokens => Failure {
                reason: "TokensNotChecked",
                message: format!("no worker is let in: review a token: {words}"),
            },
        }
    }
}

/// The troubles that there are, and when each was met last.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<BTreeMap<What, (String, Instant)>>);

impl Troubles {
    /// Something was tried; `words` say why it was refused, if it was. Out: whether that is news.
    pub(crate) fn tell(&self, what: What, words: Option<String>, now: Instant) -> bool {
        let mut all = self.locked();
        let since = all.get(&what).map(|it| now.duration_since(it.1));
        let was_there = since.is_some_and(|it| it < A_TROUBLE_LASTS);
        match words {
            Some(words) => {
                all.insert(what, (words, now));
                !was_there
            }
            // Some of many reviews may fail for a while.
            None if what == What::Tokens && since.is_some_and(|it| it < ALL_WELL_FOR) => false,
            None => {
                all.remove(&what);
                was_there
            }
        }
    }

    /// What there is, and when it is over if nobody meets it any more.
    pub(crate) fn there(&self, now: Instant) -> Option<(Failure, Duration)> {
        let all = self.locked();
        let left = |at: &Instant| A_TROUBLE_LASTS.saturating_sub(now.duration_since(*at));
        let mut lasting = all.iter().filter(|it| !left(&it.1.1).is_zero());
        lasting.next().map(|(what, (words, at))| (what.failure(words), left(at)))
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<What, (String, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_told_while_it_lasts_and_is_news_when_it_begins_and_ends() {
        let (troubles, start) = (Troubles::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let no = || Some("no".to_owned());
        let reason = |seconds| troubles.there(at(seconds)).map(|it| it.0.reason);
        assert!(!troubles.tell(What::Mark, None, at(0)) && reason(0).is_none());
        assert!(troubles.tell(What::Tokens, no(), at(1)), "it begins");
        assert!(!troubles.tell(What::Tokens, no(), at(2)), "it lasts");
        assert!(troubles.tell(What::Mark, no(), at(3)));
        assert_eq!(reason(3), Some("NotMarked"), "who is not found checks no tokens");
        assert!(troubles.tell(What::Mark, None, at(4)), "it is over");
        assert_eq!((reason(4), reason(61)), (Some("TokensNotChecked"), Some("TokensNotChecked")));
        assert_eq!(reason(62), None, "nobody meets it any more");
        assert!(troubles.tell(What::Tokens, no(), at(63)), "it begins anew");
        // One in two is refused.
        let other = || Some("late".to_owned());
        assert!((64..70).all(|it| !troubles.tell(
            What::Tokens,
            other().filter(|_| it % 2 == 0),
            at(it)
        )));
        assert_eq!(reason(70), Some("TokensNotChecked"));
        assert!(troubles.tell(What::Tokens, None, at(80)) && reason(80).is_none());
    }
}
