//! A nano-batch: documents and which rank holds which of their rows, whatever layers let them attend to.
//!
//! In: lengths of documents, stretches of each rank. Out: a [`Packing`], and of it the [`Layout`] that a kind of layers is
//! planned from ([`Packing::layout`]). It plans nothing.
//!
//! Invariant: that of [`Layout`]: every row of every document is at exactly one place.

use cadre_planner::{Document, Error, Layout, Mask, Stretch};
use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Packing {
    /// Its masks mean nothing.
    rows: Layout,
}

/// The serialized form of [`Packing`].
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    /// Rows of each document.
    documents: Vec<u32>,
    ranks: Vec<Vec<Stretch>>,
}

impl Packing {
    /// Takes the rows of each document, and the stretches of each rank in the order of its stream.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`].
    pub fn new(documents: &[u32], ranks: Vec<Vec<Stretch>>) -> Result<Self, Error> {
        let document = |&rows: &u32| Document { rows, mask: Mask::Causal };
        Ok(Self { rows: Layout::new(documents.iter().map(document).collect(), ranks)? })
    }

    /// How many ranks hold it.
    pub fn ranks(&self) -> usize {
        self.rows.ranks().len()
    }

    /// What a kind of layers is planned from: all documents have its mask.
    pub fn layout(&self, mask: Mask) -> Layout {
        self.rows.masked(mask)
    }
}

impl From<&Layout> for Packing {
    /// Lets go of the masks.
    fn from(layout: &Layout) -> Self {
        Self { rows: layout.masked(Mask::Causal) }
    }
}

impl From<Packing> for Parts {
    fn from(Packing { rows }: Packing) -> Self {
        let documents = rows.documents().iter().map(|it| it.rows).collect();
        Self { documents, ranks: rows.ranks().to_vec() }
    }
}

impl TryFrom<Parts> for Packing {
    type Error = Error;

    fn try_from(Parts { documents, ranks }: Parts) -> Result<Self, Error> {
        Self::new(&documents, ranks)
    }
}

#[cfg(test)]
mod tests {
    use cadre_planner::DocumentId;

    use super::*;

    #[test]
    fn a_packing_says_where_rows_are_and_nothing_of_what_they_keep() {
        let stretch = |start, end| Stretch { document: DocumentId(0), start, end };
        let packing = Packing::new(&[9], vec![vec![stretch(0, 4)], vec![stretch(4, 9)]]).unwrap();
        assert_eq!(packing.ranks(), 2);
        for mask in [Mask::Causal, Mask::Full, Mask::Window { left: 3 }] {
            let layout = packing.layout(mask);
            assert_eq!(layout.documents(), [Document { rows: 9, mask }]);
            assert_eq!(layout.locate(DocumentId(0), 0..9).count(), 2);
            assert_eq!(Packing::from(&layout), packing);
        }
        let text = serde_json::to_string(&packing).unwrap();
        assert!(!text.contains("ausal"), "{text}");
        assert_eq!(serde_json::from_str::<Packing>(&text).unwrap(), packing);
        let hole = text.replacen("\"end\":4", "\"end\":3", 1);
        assert!(
            serde_json::from_str::<Packing>(&hole).unwrap_err().to_string().contains("rows 3..4")
        );
    }
}
