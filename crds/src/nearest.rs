//! The known word that a misspelt one was probably meant to be.
//!
//! In: a word and the words that would have been right. Out: the nearest within a third of its
//! letters, the first of equals. No dictionary, no state.

use strsim::levenshtein;

/// The candidate that needs the fewest edits, if it is near enough to be a slip of the hand.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let most = word.chars().count().div_ceil(3);
    candidates
        .into_iter()
        .map(|candidate| (levenshtein(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|&(edits, _)| edits <= most)
        .min_by_key(|&(edits, _)| edits)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised_and_strangers_are_not() {
        let known = ["replicas", "inPlace", "template", "drain"];
        assert_eq!(nearest("replica", known), Some("replicas"));
        assert_eq!(nearest("inplace", known), Some("inPlace"));
        assert_eq!(nearest("tempalte", known), Some("template"));
        assert_eq!(nearest("gpus", known), None);
        assert_eq!(nearest("", known), None);
    }
}
