//! The header of a step: everything that the plan of the step depends on, and who fills the slots now.
//!
//! Written by the conductor alone, one a step; every trainer and server plans from it. It is also the
//! line of `headers.jsonl`: a run that is given the lines of another ([`Log`]) makes the same plans and,
//! for one numerics id, the same bits.
//!
//! Invariant: [`Header::digest`] covers what bits depend on (slots, weights, layout, seed, numerics),
//! never who fills a slot at the moment: a lost or replaced server changes no bit.

mod log;

use cadre_crds::Wire;
use cadre_planner::{Costs, Links, Slot, Tolerance};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::encoding::encoded;
use crate::layers::Layers;
use crate::packing::{self, Packing};
use crate::turns::Turns;

pub use self::log::{Error, Log};

/// Where core attention of a step is computed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// On the slots, as planned.
    #[default]
    Pool,
    /// Every query row at its trainer.
    Local,
}

/// Where the KV heads of a document may be computed.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvHeads {
    /// All at one slot; headers that do not say it mean this.
    #[default]
    Together,
    /// On different slots, each with the rows of its heads alone.
    Apart,
}

/// Number of a view: lease transitions of its author, then a counter. Larger is newer.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ViewNumber {
    /// Lease transitions of the controller.
    pub term: u64,
    /// Counts within a term.
    pub counter: u64,
}

/// What fills a slot.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Member {
    /// A dedicated server and where its exchange listens.
    Server {
        /// Index of the server in its pool.
        index: u16,
        /// Which life of it.
        incarnation: u32,
        /// Exchange address.
        address: String,
    },
    /// The trainer of that rank, in place.
    InPlace(u16),
    /// The trainer of that rank, only when the pool is lost.
    Standby(u16),
}

/// What a step is planned from.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Header {
    /// Counts from 0.
    pub step: u64,
    /// Layers of the model, by kind.
    pub layers: Layers,
    /// Whether the KV heads of a document may part.
    #[serde(default)]
    pub kv_heads: KvHeads,
    /// Type of rows on the wire.
    pub wire: Wire,
    /// Seed of the job.
    pub seed: u64,
    /// Numerics id that the bits are promised for: version and arithmetic of the kernels.
    pub numerics: String,
    /// Where core attention is computed.
    pub placement: Placement,
    /// Slots with weight and head start.
    pub slots: Vec<Slot>,
    /// What tasks cost, by kind of layers.
    pub costs: Vec<Costs>,
    /// How uneven plans may be; headers that do not say it mean the usual.
    #[serde(default)]
    pub tolerance: Tolerance,
    /// How fast rows travel between the ranks and the dedicated slots, and between which they cannot; headers that do not say it
    /// mean equal links.
    #[serde(default)]
    pub links: Links,
    /// In which order nano-batches go forward and backward, through which layers.
    pub turns: Turns,
    /// Documents and where their rows are, by nano-batch.
    pub nanos: Vec<Packing>,
    /// Number of the view that the slots come from.
    pub view: ViewNumber,
    /// The member that fills each slot; none while the slot is vacant.
    pub fillers: Vec<Option<Member>>,
}

/// Bytes of a stretch in a line of a log, as a rule.
const STRETCH_BYTES: usize = 44;

impl Header {
    /// The header as a line of a log: what `serde_json` writes, which takes several times as long for the stretches of a large step.
    pub fn to_line(&self) -> String {
        // A copy shares its nano-batches.
        let bare = Self { nanos: Vec::new(), ..self.clone() };
        let bare = serde_json::to_string(&bare).expect("a header is plain data");
        // Within a string each of these quotes would follow a backslash, and nothing else that has nano-batches has a view.
        let (before, behind) =
            bare.split_once(r#""nanos":[],"view":"#).expect("fields come in their order");
        let stretches: usize = self.nanos.iter().map(Packing::stretches).sum();
        let mut line = Vec::with_capacity(bare.len() + stretches * STRETCH_BYTES);
        line.extend_from_slice(before.as_bytes());
        line.extend_from_slice(br#""nanos":"#);
        packing::list(&mut line, &self.nanos, Packing::write);
        line.extend_from_slice(br#","view":"#);
        line.extend_from_slice(behind.as_bytes());
        line.shrink_to_fit();
        String::from_utf8(line).expect("text and digits")
    }

    /// Digest of everything that the bits of the step depend on.
    pub fn digest(&self) -> u64 {
        let Self {
            step,
            layers,
            kv_heads,
            wire,
            seed,
            numerics,
            placement,
            slots,
            costs,
            tolerance,
            links,
            turns,
            nanos,
            view: _,
            fillers: _,
        } = self;
        let bytes = encoded(&(
            (step, layers, wire, seed, numerics, placement, slots, costs, turns, nanos),
            kv_heads,
            tolerance,
            links,
        ))
        .expect("a header is plain data");
        xxh3_64(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use cadre_planner::{DocumentId, Heads, Mask, Stretch};

    use super::*;
    use crate::layers::Kind;

    pub(super) fn header(step: u64) -> Header {
        let any: Header = serde_json::from_str(include_str!("../../testing/header.json")).unwrap();
        Header { step, ..any }
    }

    pub(super) fn packing(rows: u32) -> Packing {
        let stretch = Stretch { document: DocumentId(0), start: 0, end: rows };
        Packing::new(&[rows], vec![vec![stretch]]).unwrap()
    }

    pub(super) const CAUSAL: Kind = Kind::causal(Heads { query: 4, kv: 2, dim: 8 });

    pub(super) fn layers(kinds: [Mask; 2]) -> Layers {
        Layers::new(kinds.map(|mask| Kind { mask, ..CAUSAL })).unwrap()
    }

    pub(super) fn slot(weight: u32) -> Slot {
        Slot { weight, head_start: 0, home: None, memory: 1 << 30 }
    }

    pub(super) fn unreachable() -> Links {
        Links { unreachable: vec![(0, 1)], ..Links::equal() }
    }

    #[test]
    fn a_line_is_what_serde_writes() {
        let stretch = |document, start, end| Stretch { document: DocumentId(document), start, end };
        let ranks = vec![
            vec![stretch(1, 0, 1_234_567), stretch(0, 0, 10)],
            Vec::new(),
            vec![stretch(2, 0, 9)],
        ];
        let many = Packing::new(&[10, 1_234_567, 9], ranks).unwrap();
        let text = r#"a "nanos":[],"view": \ in a name"#;
        for nanos in [Vec::new(), vec![packing(1)], vec![many.clone(), packing(300), many]] {
            let address = text.into();
            let fillers = vec![None, Some(Member::Server { index: 1, incarnation: 2, address })];
            let header = Header { nanos, fillers, numerics: text.into(), ..header(u64::MAX) };
            assert_eq!(header.to_line(), serde_json::to_string(&header).unwrap());
        }
    }

    #[test]
    fn the_digest_is_of_what_bits_depend_on() {
        let digest = header(3).digest();
        let softcap = "50".parse().ok();
        let scores = Layers::alike(Kind { softcap, ..CAUSAL }, 2).unwrap();
        let wide = Kind::causal(Heads { dim: 16, ..CAUSAL.heads });
        let view = ViewNumber { term: 1, counter: 1 };
        assert_eq!(Header { view, fillers: Vec::new(), ..header(3) }.digest(), digest);
        for other in [
            header(4),
            Header { placement: Placement::Local, ..header(3) },
            Header { kv_heads: KvHeads::Apart, ..header(3) },
            Header { slots: vec![slot(101)], ..header(3) },
            Header { costs: vec![Costs::pairs_only()], ..header(3) },
            Header { tolerance: Tolerance::new(1.05).unwrap(), ..header(3) },
            Header { links: unreachable(), ..header(3) },
            Header { nanos: vec![packing(299)], ..header(3) },
            Header { turns: Turns::forward(NonZeroU16::MIN), ..header(3) },
            Header { layers: layers([Mask::Causal, Mask::Full]), ..header(3) },
            Header { layers: layers([Mask::Full, Mask::Causal]), ..header(3) },
            Header { layers: scores.clone(), ..header(3) },
            Header { layers: Layers::alike(wide, 2).unwrap(), ..header(3) },
        ] {
            assert_ne!(other.digest(), digest, "{other:?}");
        }
    }
}
