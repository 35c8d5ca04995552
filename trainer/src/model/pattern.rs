//! How far each layer of a model sees: a pattern that repeats over the layers.
//!
//! In: the words of `--layers`. Out: a [`Pattern`], and of it and a number of layers the [`Layers`] of a job.
//!
//! | word | a row keeps |
//! |---|---|
//! | `full` | its own key and all keys of its document before it: what models call full attention, the mask `causal` |
//! | `window:N` | its own key and the `N - 1` before it: what models call sliding attention of a window of N |
//!
//! Invariant: a pattern has a word, and every word of it is of some layer.

use std::fmt;
use std::str::FromStr;

use cadre_planner::Mask;
use cadre_worker::session::{Kind, Layers};

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pattern(Vec<Kind>);

/// `full`, as models were before there were windows.
impl Default for Pattern {
    fn default() -> Self {
        Self(vec![Kind::CAUSAL])
    }
}

/// Why a pattern is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PatternError {
    /// Neither word.
    #[error(
        "{word:?} is no kind of layers; write full or window:ROWS, with at least 1 row, for each layer of the pattern"
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
}

impl Pattern {
    /// The kinds of a model's layers: the pattern from the first layer on, again and again.
    ///
    /// # Errors
    ///
    /// [`PatternError::Long`].
    ///
    /// # Panics
    ///
    /// More layers than a job can number.
    pub fn over(&self, layers: usize) -> Result<Layers, PatternError> {
        let Self(kinds) = self;
        if kinds.len() > layers {
            return Err(PatternError::Long {
                pattern: self.to_string(),
                words: kinds.len(),
                layers,
            });
        }
        let all = kinds.iter().copied().cycle().take(layers);
        Ok(Layers::new(all).expect("presets have between 1 and 65,535 layers"))
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let kind = |word: &str| match word {
            "full" => Ok(Kind::CAUSAL),
            _ => match word.parse() {
                Ok(mask @ Mask::Window { .. }) => Ok(Kind { mask }),
                Ok(Mask::Causal | Mask::Full) | Err(_) => {
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
        for (index, Kind { mask }) in kinds.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match mask {
                Mask::Causal => write!(f, "{comma}full")?,
                Mask::Full | Mask::Window { .. } => write!(f, "{comma}{mask}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_repeats_over_the_layers() {
        let near = Kind { mask: Mask::Window { left: 63 } };
        for (text, layers, expected) in [
            ("full", 3, vec![Kind::CAUSAL; 3]),
            ("window:64", 2, vec![near; 2]),
            // As in Gemma, whose layers need not be a multiple of the pattern.
            ("window:64, window:64,full", 5, vec![near, near, Kind::CAUSAL, near, near]),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            assert_eq!(pattern.over(layers).unwrap(), Layers::new(expected).unwrap());
            assert_eq!(pattern.to_string(), text.replace(' ', ""));
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
            ("window:8,chunk:8", "chunk:8"),
        ] {
            let refused = text.parse::<Pattern>().unwrap_err();
            assert_eq!(refused, PatternError::Word { word: word.into() });
        }
        let pattern: Pattern = "window:64,full,full".parse().unwrap();
        let refused = pattern.over(2).unwrap_err().to_string();
        let expected =
            "the pattern window:64,full,full has 3 layers, more than the 2 of the model;";
        assert!(refused.starts_with(expected), "{refused}");
    }
}
