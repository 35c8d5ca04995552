//! The layers of a model: which of them have core attention, and of which kind.
//!
//! In: the kind of each layer, or none. Out: a [`Stack`], and of it the [`Layers`] that the pool hears of. A layer without core
//! attention has no phase and no plan: it is its feed-forward part alone.
//!
//! Invariant: a layer has core attention, and each is numbered twice: among all layers, as tensors are, and among those with
//! core attention, as phases are.

use std::fmt;
use std::ops::Range;

use cadre_worker::session::{Heads, Kind, Layers};
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "Vec<Option<Kind>>", into = "Vec<Option<Kind>>")]
pub struct Stack {
    layers: usize,
    core: Layers,
    /// The layer of each with core attention.
    with: Vec<usize>,
}

/// Layers that are no model.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StackError {
    /// Nothing to attend with.
    #[error(
        "none of the {layers} layers has core attention; write full, window:ROWS or chunk:ROWS for one of them"
    )]
    NoAttention {
        /// How many layers.
        layers: usize,
    },
    /// More than can be numbered.
    #[error("{layers} layers are too many; at most 65,535 are supported")]
    TooMany {
        /// How many layers.
        layers: usize,
    },
}

impl Stack {
    /// Takes the kind of each layer, the first layer first; `None` for one without core attention.
    ///
    /// # Errors
    ///
    /// [`StackError`].
    pub fn new(layers: Vec<Option<Kind>>) -> Result<Self, StackError> {
        let count = layers.len();
        if count > usize::from(u16::MAX) {
            return Err(StackError::TooMany { layers: count });
        }
        let with = (0..count).filter(|it| layers[*it].is_some()).collect();
        let core = Layers::new(layers.into_iter().flatten());
        let core = core.map_err(|_| StackError::NoAttention { layers: count })?;
        Ok(Self { layers: count, core, with })
    }

    /// `layers` layers of one kind.
    ///
    /// # Errors
    ///
    /// [`StackError`].
    pub fn alike(kind: Kind, layers: usize) -> Result<Self, StackError> {
        Self::new(vec![Some(kind); layers])
    }

    /// How many layers, those without core attention too.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// The layers with core attention.
    pub fn core(&self) -> &Layers {
        &self.core
    }

    /// The kind of a layer; `None` without core attention.
    pub fn kind_of(&self, layer: usize) -> Option<Kind> {
        self.with.binary_search(&layer).ok().map(|core| self.core.kind_of(core))
    }

    /// The layer whose number among the layers with core attention is `core`.
    ///
    /// # Panics
    ///
    /// There is no such layer.
    pub fn layer_of(&self, core: usize) -> usize {
        self.with[core]
    }

    /// Layers without core attention before the first that has it.
    pub fn before(&self) -> Range<usize> {
        0..self.with[0]
    }

    /// The layers without core attention between the one with number `core` and the next one that
    /// has it.
    ///
    /// # Panics
    ///
    /// There is no such layer.
    pub fn behind(&self, core: usize) -> Range<usize> {
        self.with[core] + 1..self.with.get(core + 1).copied().unwrap_or(self.layers)
    }

    /// The heads of all layers, if they have the same.
    pub fn heads(&self) -> Option<Heads> {
        let mut each = self.core.kinds().iter().map(|it| it.heads);
        let first = each.next()?;
        each.all(|it| it == first).then_some(first)
    }

    /// Why the stack is not a Llama: the first layer that is not causal, has more than a causal
    /// mask, or has other heads than the first layer. None if it is a Llama.
    pub fn beyond_llama(&self) -> Option<String> {
        let plain = Kind::causal(self.core.kind_of(0).heads);
        let (at, kind) = self.kinds().enumerate().find(|(_, kind)| *kind != Some(plain))?;
        let what = kind.map_or_else(|| "none".to_owned(), |it| it.to_string());
        Some(format!(
            "layer {at} is {what}, and all layers of a Llama are causal with the same heads and nothing more"
        ))
    }

    fn kinds(&self) -> impl Iterator<Item = Option<Kind>> + '_ {
        (0..self.layers).map(|it| self.kind_of(it))
    }
}

/// Layer by layer; those that follow each other and are alike as `3 × window:64`.
impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.kinds().collect();
        for (index, alike) in all.chunk_by(|one, next| one == next).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let kind = alike[0].map_or_else(|| "none".to_owned(), |it| it.to_string());
            write!(f, "{comma}{} × {kind}", alike.len())?;
        }
        Ok(())
    }
}

impl From<Stack> for Vec<Option<Kind>> {
    fn from(stack: Stack) -> Self {
        stack.kinds().collect()
    }
}

impl TryFrom<Vec<Option<Kind>>> for Stack {
    type Error = StackError;

    fn try_from(layers: Vec<Option<Kind>>) -> Result<Self, StackError> {
        Self::new(layers)
    }
}

#[cfg(test)]
mod tests {
    use cadre_worker::session::{Mask, Sinks};

    use super::*;

    const CAUSAL: Kind = Kind::causal(Heads { query: 2, kv: 1, dim: 32 });
    const NEAR: Kind = Kind { mask: Mask::Window { left: 63 }, ..CAUSAL };

    #[test]
    fn layers_are_numbered_among_all_and_among_those_with_attention() {
        let each = vec![None, Some(NEAR), None, None, Some(CAUSAL), Some(NEAR), None];
        let stack = Stack::new(each.clone()).unwrap();
        assert_eq!((stack.layers(), stack.core().count()), (7, 3));
        assert_eq!(stack.core(), &Layers::new([NEAR, CAUSAL, NEAR]).unwrap());
        assert_eq!((0..7).map(|it| stack.kind_of(it)).collect::<Vec<_>>(), each);
        // Visits every layer once: those before the first core attention, then each core layer with
        // those behind it.
        let mut order: Vec<_> = stack.before().collect();
        for core in 0..3 {
            order.push(stack.layer_of(core));
            order.extend(stack.behind(core));
        }
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6]);
        let text = "1 × none, 1 × window:64, 2 × none, 1 × causal, 1 × window:64, 1 × none";
        assert_eq!(stack.to_string().replace(" heads 2/1 dim 32", ""), text);
        let json = serde_json::to_string(&stack).unwrap();
        assert_eq!(serde_json::from_str::<Stack>(&json).unwrap(), stack);
        let beyond = |layers: &[Option<Kind>]| Stack::new(layers.to_vec()).unwrap().beyond_llama();
        let (near, causal) = (Some(NEAR), Some(CAUSAL));
        let why = |what| {
            Some(format!(
                "{what}, and all layers of a Llama are causal with the same heads and nothing more"
            ))
        };
        assert_eq!(beyond(&[causal, near]), why("layer 1 is window:64 heads 2/1 dim 32"));
        assert_eq!(beyond(&[None, causal]), why("layer 0 is none"));
        let sinks = Some(Kind { sinks: Sinks::Learnt, ..CAUSAL });
        let wide = Some(Kind::causal(Heads { query: 2, kv: 1, dim: 64 }));
        assert_eq!(
            beyond(&[causal, causal, sinks]),
            why("layer 2 is causal heads 2/1 dim 32 sinks")
        );
        assert_eq!(beyond(&[causal, wide]), why("layer 1 is causal heads 2/1 dim 64"));
        assert_eq!(beyond(&[wide, wide]), None);
        let heads = |layers: &[Option<Kind>]| Stack::new(layers.to_vec()).unwrap().heads();
        assert_eq!(heads(&[None, near, causal]), Some(CAUSAL.heads));
        assert_eq!(heads(&[causal, wide]), None);
        assert_eq!(beyond(&[causal, causal]), None);
    }

    #[test]
    fn layers_that_are_no_model_are_refused() {
        assert_eq!(Stack::new(vec![None; 2]), Err(StackError::NoAttention { layers: 2 }));
        assert_eq!(Stack::new(Vec::new()), Err(StackError::NoAttention { layers: 0 }));
        let many = Stack::alike(NEAR, 65_536);
        assert_eq!(many, Err(StackError::TooMany { layers: 65_536 }));
    }
}
