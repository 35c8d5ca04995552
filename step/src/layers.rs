//! The layers of a model by kind: layers of one kind have the same core attention, so they share their plans.
//!
//! In: the kind of each layer. Out: [`Layers`], which numbers the kinds. It says nothing of rows: a document lies where it
//! lies, whatever the layers let it attend to.
//!
//! Invariant: there is a layer, kinds differ from each other, and they are numbered in the order in which layers first have
//! them. So two lists of layers are equal exactly if every layer of theirs is.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::kind::{Factor, Kind, NoFactor, NoKind, Sinks, dim_in, heads_in};

/// The layers of a model with core attention, in order, by kind.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Layers {
    kinds: Vec<Kind>,
    /// The kind of each layer, as an index into `kinds`.
    each: Vec<u16>,
}

/// The serialized form of [`Layers`].
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Parts {
    kinds: Vec<Kind>,
    each: Vec<u16>,
}

/// Why these are no layers.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not one.
    #[error("there is no layer with core attention; give the model layers, or do without the pool")]
    None,
    /// More than can be numbered.
    #[error("{layers} layers are too many; at most {} are supported", u16::MAX)]
    TooMany {
        /// How many there are.
        layers: usize,
    },
    /// Kinds that are not numbered in the order in which layers first have them.
    #[error(
        "layer {layer} has kind {kind}, and kinds of the layers before it end at {known}; number kinds in the order of layers"
    )]
    Unordered {
        /// The layer.
        layer: usize,
        /// Kind of the layer.
        kind: u16,
        /// How many kinds there are before it.
        known: usize,
    },
    /// One number for two kinds, or two for one.
    #[error(
        "{kinds} kinds of layers are listed, and layers have {used} that differ; list each once"
    )]
    Unused {
        /// How many are listed.
        kinds: usize,
        /// How many are left of them.
        used: usize,
    },
}

impl Layers {
    /// Takes the kind of each layer, the first layer first.
    ///
    /// # Errors
    ///
    /// [`Error::None`], [`Error::TooMany`].
    pub fn new(kind_of_each: impl IntoIterator<Item = Kind>) -> Result<Self, Error> {
        let (mut kinds, mut each) = (Vec::new(), Vec::new());
        for kind in kind_of_each {
            let number = kinds.iter().position(|it| *it == kind).unwrap_or(kinds.len());
            if number == kinds.len() {
                kinds.push(kind);
            }
            each.push(number as u16);
            if each.len() > usize::from(u16::MAX) {
                return Err(Error::TooMany { layers: each.len() });
            }
        }
        if each.is_empty() { Err(Error::None) } else { Ok(Self { kinds, each }) }
    }

    /// `count` layers of one kind.
    ///
    /// # Errors
    ///
    /// [`Error::None`] of 0 layers.
    pub fn alike(kind: Kind, count: u16) -> Result<Self, Error> {
        Self::new(std::iter::repeat_n(kind, count.into()))
    }

    /// How many layers.
    pub fn count(&self) -> u16 {
        self.each.len() as u16
    }

    /// All kinds, by number.
    pub fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// The number of a layer's kind.
    ///
    /// # Panics
    ///
    /// There is no such layer.
    pub fn number_of(&self, layer: usize) -> usize {
        self.each[layer].into()
    }

    /// A layer's kind.
    ///
    /// # Panics
    ///
    /// There is no such layer.
    pub fn kind_of(&self, layer: usize) -> Kind {
        self.kinds[self.number_of(layer)]
    }

    /// How many layers have a kind.
    pub fn having(&self, number: usize) -> u16 {
        self.each.iter().filter(|it| usize::from(**it) == number).count() as u16
    }
}

/// Layer by layer; those that follow each other with one kind as `3 × window:64`.
impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, alike) in self.each.chunk_by(|one, next| one == next).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{} × {}", alike.len(), self.kinds[usize::from(alike[0])])?;
        }
        Ok(())
    }
}

impl From<Layers> for Parts {
    fn from(Layers { kinds, each }: Layers) -> Self {
        Self { kinds, each }
    }
}

impl TryFrom<Parts> for Layers {
    type Error = Error;

    fn try_from(Parts { kinds, each }: Parts) -> Result<Self, Error> {
        let mut known = 0;
        for (layer, &kind) in each.iter().enumerate() {
            if usize::from(kind) > known || usize::from(kind) >= kinds.len() {
                return Err(Error::Unordered { layer, kind, known });
            }
            known = known.max(usize::from(kind) + 1);
        }
        let layers = Self::new(each.iter().map(|it| kinds[usize::from(*it)]))?;
        if layers.kinds == kinds {
            Ok(layers)
        } else {
            Err(Error::Unused { kinds: kinds.len(), used: layers.kinds.len() })
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_planner::{Heads, Mask};

    use super::*;

    const CAUSAL: Kind = Kind::causal(Heads { query: 4, kv: 2, dim: 8 });
    const NEAR: Kind = Kind { mask: Mask::Window { left: 63 }, ..CAUSAL };

    #[test]
    fn kinds_are_numbered_as_layers_first_have_them() {
        let layers = Layers::new([NEAR, NEAR, CAUSAL, NEAR]).unwrap();
        assert_eq!((layers.count(), layers.kinds()), (4, &[NEAR, CAUSAL][..]));
        let numbers: Vec<_> = (0..4).map(|layer| layers.number_of(layer)).collect();
        assert_eq!((numbers, layers.kind_of(2)), (vec![0, 0, 1, 0], CAUSAL));
        assert_eq!((layers.having(0), layers.having(1)), (3, 1));
        let said = "2 × window:64 heads 4/2 dim 8, 1 × causal heads 4/2 dim 8, 1 × window:64 heads 4/2 dim 8";
        assert_eq!(layers.to_string(), said);
        let text = serde_json::to_string(&layers).unwrap();
        let rest = r#""chunk":null,"scale":null,"softcap":null,"sinks":"none""#;
        let heads = r#""heads":{"query":4,"kv":2,"dim":8}"#;
        let kinds = format!(
            r#"{{{heads},"mask":{{"Window":{{"left":63}}}},{rest}}},{{{heads},"mask":"Causal",{rest}}}"#
        );
        let expected = format!(r#"{{"kinds":[{kinds}],"each":[0,0,1,0]}}"#);
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<Layers>(&text).unwrap(), layers);
        // Heads alone are a kind, too.
        let wide = Kind { heads: Heads { query: 2, kv: 1, dim: 16 }, ..CAUSAL };
        let numbers = Layers::new([CAUSAL, wide, CAUSAL]).unwrap();
        assert_eq!((numbers.kinds(), numbers.number_of(1)), (&[CAUSAL, wide][..], 1));
    }

    #[test]
    fn layers_that_say_less_or_more_than_their_kinds_are_refused() {
        assert_eq!(Layers::alike(NEAR, 0), Err(Error::None));
        let many = Layers::new(std::iter::repeat_n(NEAR, 65_536));
        assert_eq!(many, Err(Error::TooMany { layers: 65_536 }));
        let read = |kinds: &[Kind], each: &[u16]| {
            Layers::try_from(Parts { kinds: kinds.to_vec(), each: each.to_vec() })
        };
        let two = [NEAR, CAUSAL];
        assert_eq!(read(&two, &[]), Err(Error::None));
        assert_eq!(read(&two, &[1, 0]), Err(Error::Unordered { layer: 0, kind: 1, known: 0 }));
        assert_eq!(read(&two, &[0, 1, 2]), Err(Error::Unordered { layer: 2, kind: 2, known: 2 }));
        assert_eq!(read(&two, &[0, 0]), Err(Error::Unused { kinds: 2, used: 1 }));
        assert_eq!(read(&[NEAR, NEAR], &[0, 1]), Err(Error::Unused { kinds: 2, used: 1 }));
    }
}
