//! What each layer of a model is: a pattern that repeats over the layers.
//!
//! In: the words of `--layers`, and what all layers have in common ([`Scores`]), and heads of those that say no others. Out: a
//! [`Pattern`], and of it and a number of layers the [`Stack`] of a model.
//!
//! | word | a row keeps |
//! |---|---|
//! | `full` | its own key and all keys of its document before it: what models call full attention, the mask `causal` |
//! | `window:N` | its own key and the `N - 1` before it: what models call sliding attention of a window of N |
//! | `chunk:N` | its own key and those before it in its chunk; a document has one from each `N`th row on |
//! | `none` | nothing: the layer has no core attention, as the linear layers of hybrid models |
//!
//! Behind a word that keeps rows may stand `heads QUERY/KV` and `dim N`, where the layer has other heads than the model says:
//! `window:512 heads 8/4 dim 64,full heads 4/1 dim 256`.
//!
//! Invariant: a pattern has a word, and every word of it is of some layer.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use cadre_worker::session::{Factor, Heads, Kind, Mask, Sinks, dim_in, heads_in};

use super::stack::{Stack, StackError};

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pattern(Vec<Option<Word>>);

/// Most query heads of a layer.
const MAX_QUERY_HEADS: u16 = 1_024;

/// What a pattern says about one layer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Word {
    /// Keys behind its own that a row keeps at most.
    window: Option<u32>,
    chunk: Option<NonZeroU32>,
    /// Query heads and KV heads, in place of the model's.
    heads: Option<(u16, u16)>,
    dim: Option<u16>,
}

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
        Self(vec![Some(Word::default())])
    }
}

/// Why a pattern is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PatternError {
    /// The word names no kind of layers.
    #[error(
        "{word:?} is no kind of layers; write full, window:ROWS, chunk:ROWS (with at least 1 row) or none for each layer of the pattern"
    )]
    Word {
        /// The word as it was written.
        word: String,
    },
    /// The heads of a word cannot be read, or no layer can have them.
    #[error("{word:?}: {why}; other heads than the model's are written as `full heads 8/2 dim 64`")]
    Heads {
        /// The word as it was written.
        word: String,
        /// Why the heads are refused.
        why: String,
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
    /// The kinds of a model's layers: the pattern from the first layer on, again and again. Layers that say no heads have
    /// `heads`.
    ///
    /// # Errors
    ///
    /// [`PatternError::Long`], [`PatternError::Stack`].
    pub fn over(&self, layers: usize, heads: Heads, scores: Scores) -> Result<Stack, PatternError> {
        let Self(words) = self;
        if words.len() > layers {
            return Err(PatternError::Long {
                pattern: self.to_string(),
                words: words.len(),
                layers,
            });
        }
        let kinds = words.iter().map(|it| it.map(|it| it.kind(heads, scores)));
        Ok(Stack::new(kinds.cycle().take(layers).collect())?)
    }
}

impl Word {
    fn kind(self, all: Heads, Scores { scale, softcap, sinks }: Scores) -> Kind {
        let Self { window, chunk, heads, dim } = self;
        let (query, kv) = heads.unwrap_or((all.query, all.kv));
        let heads = Heads { query, kv, dim: dim.unwrap_or(all.dim) };
        let mask = window.map_or(Mask::Causal, |left| Mask::Window { left });
        Kind { heads, mask, chunk, scale, softcap, sinks }
    }

    /// Reads one of a pattern; none of a layer without core attention.
    fn read(text: &str) -> Result<Option<Self>, PatternError> {
        let refused = || PatternError::Word { word: text.into() };
        let mut parts = text.split_whitespace();
        let first = parts.next().unwrap_or_default();
        let mut word = Self::default();
        match (first, first.strip_prefix("chunk:").map(str::parse), first.parse()) {
            ("full", _, _) => {}
            ("none", _, _) if parts.next().is_none() => return Ok(None),
            (_, Some(Ok(rows)), _) => word.chunk = Some(rows),
            (_, None, Ok(Mask::Window { left })) => word.window = Some(left),
            (_, Some(_), _) | (_, None, Ok(Mask::Causal | Mask::Full) | Err(_)) => {
                return Err(refused());
            }
        }
        let heads = |why: String| PatternError::Heads { word: text.into(), why };
        while let Some(name) = parts.next() {
            let mut value =
                || parts.next().ok_or_else(|| heads(format!("nothing follows {name:?}")));
            let before = match name {
                "heads" => {
                    let both = heads_in(value()?).map_err(heads)?;
                    if both.0 > MAX_QUERY_HEADS {
                        return Err(heads(format!(
                            "{} query heads are more than {MAX_QUERY_HEADS}",
                            both.0
                        )));
                    }
                    word.heads.replace(both).map(|_| ())
                }
                "dim" => word.dim.replace(dim_in(value()?).map_err(heads)?).map(|_| ()),
                _ => return Err(refused()),
            };
            if before.is_some() {
                return Err(heads(format!("{name:?} is there twice")));
            }
        }
        Ok(Some(word))
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { window, chunk, heads, dim } = self;
        match (window, chunk) {
            (None, None) => f.write_str("full")?,
            (Some(left), _) => Mask::Window { left: *left }.fmt(f)?,
            (None, Some(rows)) => write!(f, "chunk:{rows}")?,
        }
        if let Some((query, kv)) = heads {
            write!(f, " heads {query}/{kv}")?;
        }
        dim.map_or(Ok(()), |it| write!(f, " dim {it}"))
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        text.split(',').map(|it| Word::read(it.trim())).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(words) = self;
        for (index, word) in words.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match word {
                None => write!(f, "{comma}none")?,
                Some(word) => write!(f, "{comma}{word}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { query: 4, kv: 2, dim: 32 };

    #[test]
    fn a_pattern_repeats_over_the_layers() {
        let causal = Kind::causal(HEADS);
        let near = Some(Kind { mask: Mask::Window { left: 63 }, ..causal });
        let chunk = Some(Kind { chunk: NonZeroU32::new(64), ..causal });
        let full = Some(causal);
        let of = |heads, it: Option<Kind>| it.map(|it| Kind { heads, ..it });
        let narrow = Heads { query: 8, kv: 4, dim: 64 };
        let wide = Heads { dim: 256, ..HEADS };
        for (text, layers, expected) in [
            ("full", 3, vec![full; 3]),
            ("window:64", 2, vec![near; 2]),
            // As in Qwen3.5.
            ("none,none,none,full", 6, vec![None, None, None, full, None, None]),
            // As in Llama 4.
            ("chunk:64,chunk:64,chunk:64,full", 4, vec![chunk, chunk, chunk, full]),
            // As in Gemma, whose layers need not be a multiple of the pattern.
            ("window:64, window:64,full", 5, vec![near, near, full, near, near]),
            (
                "window:64 heads 8/4 dim 64, full dim 256,none",
                4,
                vec![of(narrow, near), of(wide, full), None, of(narrow, near)],
            ),
            ("chunk:64 heads 8/4,full", 2, vec![of(Heads { dim: 32, ..narrow }, chunk), full]),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            let plain = pattern.over(layers, HEADS, Scores::default()).unwrap();
            assert_eq!(plain, Stack::new(expected.clone()).unwrap());
            assert_eq!(pattern.to_string(), text.replace(", ", ","));
            let (scale, softcap) = ("0.5".parse().ok(), "50".parse().ok());
            let scores = Scores { scale, softcap, sinks: Sinks::Learnt };
            let of = |it| Kind { scale, softcap, sinks: Sinks::Learnt, ..it };
            let all = expected.into_iter().map(|it: Option<Kind>| it.map(of));
            let expected = Stack::new(all.collect()).unwrap();
            assert_eq!(pattern.over(layers, HEADS, scores).unwrap(), expected);
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
            ("none heads 2/1", "none heads 2/1"),
            ("full scale 2", "full scale 2"),
        ] {
            let refused = text.parse::<Pattern>().unwrap_err();
            assert_eq!(refused, PatternError::Word { word: word.into() });
        }
        for (text, why) in [
            ("full heads", "nothing follows"),
            ("full heads 3/2", "of which the first are a multiple"),
            ("full heads 2/0", "of which the first are a multiple"),
            ("full heads 1025/1", "more than 1024"),
            ("full,window:8 dim 20", "no head dim"),
            ("full dim 264", "no head dim"),
            ("full dim 8 dim 16", "there twice"),
        ] {
            let said = text.parse::<Pattern>().unwrap_err().to_string();
            let word = text.trim_start_matches("full,");
            assert!(said.starts_with(&format!("{word:?}: ")) && said.contains(why), "{said}");
        }
        let pattern: Pattern = "window:64,full,full".parse().unwrap();
        let refused = pattern.over(2, HEADS, Scores::default()).unwrap_err().to_string();
        let expected =
            "the pattern window:64,full,full has 3 layers, more than the 2 of the model;";
        assert!(refused.starts_with(expected), "{refused}");
        let nothing = "none".parse::<Pattern>().unwrap().over(2, HEADS, Scores::default());
        assert_eq!(nothing, Err(PatternError::Stack(StackError::NoAttention { layers: 2 })));
    }
}
