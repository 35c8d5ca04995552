//! Whether the rows of a work that was handed out early count: said once by either side, for both.
//!
//! In: the IO thread's word, when all pulls of the work's rows have ended; the launching thread's, when nobody wants the work. Out:
//! the first of them, at both. It moves nothing and waits for nothing.
//!
//! ```text
//! open ──keep──▶ kept     the work is answered, exactly once
//!   ├──break_──▶ broken   its rows were not what was published: nothing of it is answered, nor used
//!   └──refuse──▶ refused  it was not run, and is handed out again if its rows count after all
//! ```
//!
//! Invariant: no state but `open` is ever left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Whether the rows of a work count, shared by the work and the IO thread.
#[derive(Clone, Debug, Default)]
pub struct Promise(Arc<AtomicU8>);

/// State of a promise.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Word {
    /// Not decided yet.
    Open,
    /// The rows count.
    Kept,
    /// The rows do not count.
    Broken,
    /// The work will not run.
    Refused,
}

const WORDS: [Word; 4] = [Word::Open, Word::Kept, Word::Broken, Word::Refused];

impl Promise {
    /// Says that the rows count; false if the work will not run.
    pub fn keep(&self) -> bool {
        self.say(Word::Kept) == Word::Kept
    }

    /// Says that the rows do not count.
    pub fn break_(&self) {
        self.say(Word::Broken);
    }

    /// Says that the work will not run. Returns whether it has to be answered all the same, because
    /// its rows count already.
    pub fn refuse(&self) -> bool {
        self.say(Word::Refused) == Word::Kept
    }

    /// The state so far.
    pub fn word(&self) -> Word {
        WORDS[usize::from(self.0.load(Ordering::Acquire))]
    }

    /// The state from now on: `word`, or the one that was set before.
    fn say(&self, word: Word) -> Word {
        let order = (Ordering::AcqRel, Ordering::Acquire);
        match self.0.compare_exchange(Word::Open as u8, word as u8, order.0, order.1) {
            Ok(_) => word,
            Err(before) => WORDS[usize::from(before)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_holds_for_both_sides() {
        for word in [Word::Kept, Word::Broken, Word::Refused] {
            let promise = Promise::default();
            assert_eq!(promise.word(), Word::Open);
            assert_eq!(promise.say(word), word);
            let other = promise.clone();
            assert_eq!(other.keep(), word == Word::Kept);
            assert_eq!(other.refuse(), word == Word::Kept);
            other.break_();
            assert_eq!(promise.word(), word);
        }
    }
}
