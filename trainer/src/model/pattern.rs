//! What each layer of a model is: a pattern that repeats over the layers.
//!
//! In: the words of `--layers`, and what all layers have in common ([`Scores`]). Out: a [`Pattern`], and of it and a number of
//! layers the [`Stack`] of a model.
//!
//! | word | a row keeps |
//! |---|---|
//! | `full` | its own key and all keys of its document before it: what models call full attention, the mask `causal` |
//! | `window:N` | its own key and the `N - 1` before it: what models call sliding attention of a window of N |
//! | `chunk:N` | its own key and those before it in its chunk; a document has one from each `N`th row on |
//! | `none` | nothing: the layer has no core attention, as the linear layers of hybrid models |
//!
//! Invariant: a pattern has a word, and every word of it is of some layer.

use std::fmt;
use std::str::FromStr;

use cadre_planner::Mask;
use cadre_worker::session::{Factor, Kind, Sinks};

use super::stack::{Stack, StackError};

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pattern(Vec<Option<Kind>>);

/// Scale and bound of the scores in every layer, and whether there are sinks.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Scores {
    /// Their factor; without one 1/√dim.
    pub scale: Option<Factor>,
    /// Their bound.
    pub softcap: Option<Factor>,
    /// Whether rows have sinks.
    pub sinks: Sinks,
}

/// `full`: every layer has all keys.
impl Default for Pattern {
    fn default() -> Self {
        Self(vec![Some(Kind::CAUSAL)])
    }
}

/// Why a pattern is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PatternError {
    /// None of the words.
    #[error(
        "{word:?} is no kind of layers; write full, window:ROWS, chunk:ROWS (with at least 1 row) or none for each layer of the pattern"
    )]
    Word {
        /// What was written.
        word: String,
    },
    /// Words that no layer would have.
    #[error(
        "the pattern {pattern} has {words} layers, more than the {layers} of the model; leave out those beyond, or take a larger model"
    )]
    Long {
        /// All of it.
        pattern: String,
        /// Its length.
        words: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Layers that are no model.
    #[error(transparent)]
    Stack(#[from] StackError),
}

impl Pattern {
    /// The kinds of a model's layers: the pattern from the first layer on, again and again.
    ///
    /// # Errors
    ///
    /// [`PatternError::Long`], [`PatternError::Stack`].
    pub fn over(&self, layers: usize, scores: Scores) -> Result<Stack, PatternError> {
        let Self(kinds) = self;
        if kinds.len() > layers {
            return Err(PatternError::Long {
                pattern: self.to_string(),
                words: kinds.len(),
                layers,
            });
        }
        let Scores { scale, softcap, sinks } = scores;
        let with = |it: &Option<Kind>| it.map(|it| Kind { scale, softcap, sinks, ..it });
        Ok(Stack::new(kinds.iter().map(with).cycle().take(layers).collect())?)
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let kind = |word: &str| match word {
            "full" => Ok(Some(Kind::CAUSAL)),
            "none" => Ok(None),
            _ => match (word.strip_prefix("chunk:").map(str::parse), word.parse()) {
                (Some(Ok(rows)), _) => Ok(Some(Kind { chunk: Some(rows), ..Kind::CAUSAL })),
                (None, Ok(mask @ Mask::Window { .. })) => Ok(Some(Kind { mask, ..Kind::CAUSAL })),
                (Some(Err(_)), _) | (None, Ok(Mask::Causal | Mask::Full) | Err(_)) => {
                    Err(PatternError::Word { word: word.into() })
                }
            },
        };
        text.split(',').map(|it| kind(it.trim())).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(kinds) = self;
        for (index, kind) in kinds.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match kind {
                None => write!(f, "{comma}none")?,
                Some(Kind::CAUSAL) => write!(f, "{comma}full")?,
                Some(kind) => write!(f, "{comma}{kind}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn a_pattern_repeats_over_the_layers() {
        let near = Some(Kind { mask: Mask::Window { left: 63 }, ..Kind::CAUSAL });
        let chunk = Some(Kind { chunk: NonZeroU32::new(64), ..Kind::CAUSAL });
        let full = Some(Kind::CAUSAL);
        for (text, layers, expected) in [
            ("full", 3, vec![full; 3]),
            ("window:64", 2, vec![near; 2]),
            // As in Qwen3.5.
            ("none,none,none,full", 6, vec![None, None, None, full, None, None]),
            // As in Llama 4.
            ("chunk:64,chunk:64,chunk:64,full", 4, vec![chunk, chunk, chunk, full]),
            // As in Gemma, whose layers need not be a multiple of the pattern.
            ("window:64, window:64,full", 5, vec![near, near, full, near, near]),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            let plain = pattern.over(layers, Scores::default()).unwrap();
            assert_eq!(plain, Stack::new(expected.clone()).unwrap());
            assert_eq!(pattern.to_string(), text.replace(' ', ""));
            let (scale, softcap) = ("0.5".parse().ok(), "50".parse().ok());
            let scores = Scores { scale, softcap, sinks: Sinks::Learnt };
            let of = |it| Kind { scale, softcap, sinks: Sinks::Learnt, ..it };
            let all = expected.into_iter().map(|it: Option<Kind>| it.map(of));
            let expected = Stack::new(all.collect()).unwrap();
            assert_eq!(pattern.over(layers, scores).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_pattern_of_a_model_is_refused_by_its_word() {
        for (text, word) in [
            ("window:0", "window:0"),
            ("full,window:", "window:"),
            ("full,", ""),
            ("", ""),
            ("causal", "causal"),
            ("window:8,chunk:0", "chunk:0"),
            ("chunk:", "chunk:"),
            ("chunk:window:8", "chunk:window:8"),
        ] {
            let refused = text.parse::<Pattern>().unwrap_err();
            assert_eq!(refused, PatternError::Word { word: word.into() });
        }
        let pattern: Pattern = "window:64,full,full".parse().unwrap();
        let refused = pattern.over(2, Scores::default()).unwrap_err().to_string();
        let expected =
            "the pattern window:64,full,full has 3 layers, more than the 2 of the model;";
        assert!(refused.starts_with(expected), "{refused}");
        let nothing = "none".parse::<Pattern>().unwrap().over(2, Scores::default());
        assert_eq!(nothing, Err(PatternError::Stack(StackError::NoAttention { layers: 2 })));
    }
}
