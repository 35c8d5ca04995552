//! What a layer's core attention is: its heads, which keys a row keeps, and how scores are scaled and bounded.
//!
//! In: heads, a mask and numbers. Out: a [`Kind`], by which plans and launches are made. It knows no layer and no row.
//!
//! Invariant: a kind is written without a float, and reads back to the same bits.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use cadre_planner::{Heads, Mask};
use serde::{Deserialize, Serialize};

/// What all layers of one kind have in common.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Kind {
    /// Query heads, KV heads, and the dimension of a head.
    pub heads: Heads,
    /// Which keys a row keeps, of its chunk where documents have chunks, of its document else.
    pub mask: Mask,
    /// Documents are cut into chunks of this many rows; no row keeps a key of another chunk.
    pub chunk: Option<NonZeroU32>,
    /// Factor of the scores; without one 1/√dim.
    pub scale: Option<Factor>,
    /// Bounds the scores: what is scaled becomes softcap · tanh(score / softcap), before the mask.
    pub softcap: Option<Factor>,
    /// Whether the trainers give every finished row a sink. No plan and no server depends on it.
    pub sinks: Sinks,
}

/// Whether layers have attention sinks: learnt numbers that stay with the trainers.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Sinks {
    /// None.
    #[default]
    None,
    /// One learnt sink for each query head.
    Learnt,
}

impl Kind {
    /// Rows keep all keys of their document up to their own; scores have the factor 1/√dim and no bound.
    pub const fn causal(heads: Heads) -> Self {
        let (mask, sinks) = (Mask::Causal, Sinks::None);
        Self { heads, mask, chunk: None, scale: None, softcap: None, sinks }
    }

    /// Factor of the scores.
    pub fn scale_of(&self) -> f32 {
        self.scale.map_or_else(|| 1.0 / f32::from(self.heads.dim).sqrt(), Factor::get)
    }

    /// Reads what [`fmt::Display`] writes. A kind that does not say its heads, or their dimension, has those of `heads`.
    ///
    /// # Errors
    ///
    /// [`NoKind`].
    pub fn read(text: &str, heads: Heads) -> Result<Self, NoKind> {
        read_kind(text, heads).map_err(|why| NoKind { text: text.to_owned(), why })
    }

    /// Rows of a document's pieces that attention does not cross, the first one first.
    pub fn pieces(&self, document_rows: u32) -> impl Iterator<Item = u32> + use<> {
        let most = self.chunk.map_or(document_rows.max(1), NonZeroU32::get);
        (0..document_rows.div_ceil(most)).map(move |it| most.min(document_rows - it * most))
    }
}

/// As `window:64 in chunks of 512 heads 8/2 dim 64 scale 0.5 softcap 30 sinks`; a causal mask in chunks as `chunk:512`.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { heads: Heads { query, kv, dim }, mask, chunk, scale, softcap, sinks } = self;
        match (mask, chunk) {
            (mask, None) => mask.fmt(f)?,
            (Mask::Causal, Some(rows)) => write!(f, "chunk:{rows}")?,
            (mask, Some(rows)) => write!(f, "{mask} in chunks of {rows}")?,
        }
        write!(f, " heads {query}/{kv} dim {dim}")?;
        for (name, factor) in [("scale", scale), ("softcap", softcap)] {
            if let Some(factor) = factor {
                write!(f, " {name} {factor}")?;
            }
        }
        match sinks {
            Sinks::None => Ok(()),
            Sinks::Learnt => f.write_str(" sinks"),
        }
    }
}

/// A text that is no [`Kind`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{text:?} is no kind of layer: {why}; write a mask and what differs from it, such as `causal`, `chunk:512` or \
     `window:128 in chunks of 512 heads 8/2 dim 64 scale 0.0625 softcap 50`"
)]
pub struct NoKind {
    /// The text as it was written.
    pub text: String,
    /// The part that is wrong.
    pub why: String,
}

fn read_kind(text: &str, heads: Heads) -> Result<Kind, String> {
    let rows = |it: &str| it.parse().map_err(|_| format!("{it:?} is no number of rows from 1"));
    let mut words = text.split_whitespace();
    let first = words.next().unwrap_or_default();
    let mut kind = if let Some(it) = first.strip_prefix("chunk:") {
        Kind { chunk: Some(rows(it)?), ..Kind::causal(heads) }
    } else {
        let mask = first.parse::<Mask>().map_err(|it| it.to_string())?;
        Kind { mask, ..Kind::causal(heads) }
    };
    let (mut own_heads, mut own_dim) = (None, None);
    while let Some(word) = words.next() {
        let mut next = || words.next().ok_or_else(|| format!("nothing follows {word:?}"));
        let is_new = match word {
            "in" => {
                if [next()?, next()?] != ["chunks", "of"] {
                    return Err("`in chunks of` has other words".into());
                }
                kind.chunk.replace(rows(next()?)?).is_none()
            }
            "heads" => own_heads.replace(heads_in(next()?)?).is_none(),
            "dim" => own_dim.replace(dim_in(next()?)?).is_none(),
            "scale" => kind.scale.replace(factor(next()?)?).is_none(),
            "softcap" => kind.softcap.replace(factor(next()?)?).is_none(),
            "sinks" => std::mem::replace(&mut kind.sinks, Sinks::Learnt) == Sinks::None,
            _ => return Err(format!("{word:?} is none of its words")),
        };
        if !is_new {
            return Err(format!("{word:?} is there twice"));
        }
    }
    let (query, kv) = own_heads.unwrap_or((heads.query, heads.kv));
    kind.heads = Heads { query, kv, dim: own_dim.unwrap_or(heads.dim) };
    Ok(kind)
}

/// Reads `8/2`: query heads and the KV heads that they share.
///
/// # Errors
///
/// What is wrong, in words.
pub fn heads_in(text: &str) -> Result<(u16, u16), String> {
    let both = text.split_once('/').and_then(|(query, kv)| {
        Some((query.parse::<u16>().ok()?, kv.parse::<u16>().ok().filter(|it| *it > 0)?))
    });
    let both = both.filter(|(query, kv)| *query > 0 && query.is_multiple_of(*kv));
    both.ok_or_else(|| {
        format!("{text:?} is no query heads and KV heads, of which the first are a multiple; write them as 8/2")
    })
}

/// Reads the dimension of a head.
///
/// # Errors
///
/// What is wrong, in words.
pub fn dim_in(text: &str) -> Result<u16, String> {
    let dim = text.parse::<u16>().ok().filter(|it| (8..=256).contains(it) && it.is_multiple_of(8));
    dim.ok_or_else(|| format!("{text:?} is no head dim; write a multiple of 8 up to 256"))
}

fn factor(text: &str) -> Result<Factor, String> {
    text.parse().map_err(|it: NoFactor| it.to_string())
}

/// A number from 2^-20 to 2^20. It is written as text: its shortest digits, which read back to the same bits.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Factor(f32);

/// A factor is never NaN.
impl Eq for Factor {}

/// A text that is no factor or bound of scores.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{text:?} is no number from 2^-20 to 2^20; write one such as 0.0625 or 50")]
pub struct NoFactor {
    /// The text as it was written.
    pub text: String,
}

impl Factor {
    /// The number.
    pub fn get(self) -> f32 {
        self.0
    }
}

impl FromStr for Factor {
    type Err = NoFactor;

    fn from_str(text: &str) -> Result<Self, NoFactor> {
        let bounds = 1.0 / 1_048_576.0..=1_048_576.0;
        let number = text.parse().ok().filter(|it| bounds.contains(it));
        number.map(Self).ok_or_else(|| NoFactor { text: text.to_owned() })
    }
}

impl TryFrom<String> for Factor {
    type Error = NoFactor;

    fn try_from(text: String) -> Result<Self, NoFactor> {
        text.parse()
    }
}

impl From<Factor> for String {
    fn from(factor: Factor) -> Self {
        factor.to_string()
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { query: 8, kv: 2, dim: 64 };

    #[test]
    fn a_kind_is_written_without_floats_and_reads_back_to_the_same_bits() {
        for text in ["0.1", "0.0721687853", "50", "0.00000095367431640625", "1048576"] {
            let factor: Factor = text.parse().unwrap();
            let kind = Kind {
                heads: Heads { dim: 8, ..HEADS },
                mask: Mask::Window { left: 7 },
                chunk: NonZeroU32::new(40),
                scale: Some(factor),
                softcap: Some(factor),
                sinks: Sinks::Learnt,
            };
            let json = serde_json::to_value(kind).unwrap();
            assert!(json["scale"].is_string() && json["softcap"].is_string(), "{json}");
            let read: Kind = serde_json::from_value(json).unwrap();
            assert_eq!((read, read.scale_of().to_bits()), (kind, factor.get().to_bits()));
        }
        assert_eq!(Kind::causal(HEADS).scale_of().to_bits(), 0.125_f32.to_bits());
        for text in ["0", "-1", "NaN", "inf", "1e-39", "1e9", "", "fifty"] {
            assert_eq!(text.parse::<Factor>(), Err(NoFactor { text: text.into() }));
            let json = format!(
                r#"{{"heads":{{"query":8,"kv":2,"dim":64}},"mask":"Causal","chunk":null,"scale":"{text}","softcap":null,"sinks":"none"}}"#
            );
            serde_json::from_str::<Kind>(&json).unwrap_err();
        }
    }

    #[test]
    fn a_kind_says_what_it_is() {
        let (chunk, factor) = (NonZeroU32::new(512), "0.5".parse().ok());
        let check = |kind: Kind, expected: &str| {
            let other = Heads { query: 1, kv: 1, dim: 8 };
            assert_eq!(kind.to_string(), expected);
            assert_eq!(Kind::read(expected, other), Ok(kind));
            // Where its heads are those that are read with it, it may leave them out.
            let short = expected.replacen(" heads 8/2 dim 64", "", 1);
            assert_eq!(Kind::read(&short, HEADS), Ok(kind));
            let heads = Heads { dim: 128, ..HEADS };
            assert_eq!(Kind::read(&(short + " dim 128"), HEADS), Ok(Kind { heads, ..kind }));
        };
        let (window, causal) = (Mask::Window { left: 63 }, Kind::causal(HEADS));
        check(causal, "causal heads 8/2 dim 64");
        check(Kind { chunk, ..causal }, "chunk:512 heads 8/2 dim 64");
        let both = Kind { chunk, mask: window, ..causal };
        check(both, "window:64 in chunks of 512 heads 8/2 dim 64");
        let scores = Kind { scale: factor, softcap: factor, ..causal };
        let all = Kind { sinks: Sinks::Learnt, ..scores };
        check(all, "causal heads 8/2 dim 64 scale 0.5 softcap 0.5 sinks");
    }

    #[test]
    fn a_text_that_is_no_kind_is_refused_by_its_words() {
        for (text, why) in [
            ("", "mask"),
            ("chunk:0", "no number of rows from 1"),
            ("window:0", "mask"),
            ("causal in chunks", "nothing follows"),
            ("causal in pieces of 3", "other words"),
            ("chunk:3 in chunks of 4", "there twice"),
            ("causal scale", "nothing follows"),
            ("causal scale 0", "no number from"),
            ("causal softcap 2 softcap 2", "there twice"),
            ("causal sinks sinks", "there twice"),
            ("causal ropes", "none of its words"),
            ("causal heads", "nothing follows"),
            ("causal heads 8", "write them as 8/2"),
            ("causal heads 8/0", "write them as 8/2"),
            ("causal heads 0/1", "write them as 8/2"),
            ("causal heads 8/3", "write them as 8/2"),
            ("causal heads 8/2 heads 8/2", "there twice"),
            ("causal dim 0", "a multiple of 8 up to 256"),
            ("causal dim 20", "a multiple of 8 up to 256"),
            ("causal dim 264", "a multiple of 8 up to 256"),
            ("causal dim 8 dim 8", "there twice"),
        ] {
            let said = Kind::read(text, HEADS).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn pieces_have_all_rows_of_a_document_and_none_more_than_a_chunk() {
        let pieces = |chunk: u32, rows| {
            let kind = Kind { chunk: NonZeroU32::new(chunk), ..Kind::causal(HEADS) };
            kind.pieces(rows).collect::<Vec<_>>()
        };
        assert_eq!(pieces(0, 9), [9]);
        assert_eq!(pieces(4, 9), [4, 4, 1]);
        assert_eq!(pieces(3, 9), [3, 3, 3]);
        assert_eq!(pieces(1, 2), [1, 1]);
        assert_eq!(pieces(u32::MAX, 2), [2]);
        assert_eq!(pieces(4, 0), [0; 0]);
    }
}
