//! The header of a step: everything that the plan of the step depends on, and who fills the slots now.
//!
//! Written by the conductor alone, one a step; every trainer and server plans from it. It is also the
//! line of `headers.jsonl`: a run that is given the lines of another ([`Log`]) makes the same plans and,
//! for one numerics id, the same bits.
//!
//! Invariant: [`Header::digest`] covers what bits depend on (slots, weights, layout, seed, numerics),
//! never who fills a slot at the moment: a lost or replaced server changes no bit.

use std::path::{Path, PathBuf};

use cadre_crds::Wire;
use cadre_planner::{Costs, Slot, Tolerance};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::layers::Layers;
use crate::packing::Packing;
use crate::turns::Turns;

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
    /// In which order nano-batches go forward and backward, through which layers.
    pub turns: Turns,
    /// Documents and where their rows are, by nano-batch.
    pub nanos: Vec<Packing>,
    /// Number of the view that the slots come from.
    pub view: ViewNumber,
    /// The member that fills each slot; none while the slot is vacant.
    pub fillers: Vec<Option<Member>>,
}

impl Header {
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
            turns,
            nanos,
            view: _,
            fillers: _,
        } = self;
        let bytes = postcard::to_stdvec(&(
            (step, layers, wire, seed, numerics, placement, slots, costs, turns, nanos),
            kv_heads,
            tolerance,
        ))
        .expect("a header is plain data");
        xxh3_64(&bytes)
    }
}

/// Headers of an earlier run, to be run again.
#[derive(Clone, Debug)]
pub struct Log {
    path: PathBuf,
    headers: Vec<Header>,
}

/// Why a header log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("header log {}: {source}; give a headers.jsonl of an earlier run", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line is no header.
    #[error("header log {} line {line}: {source}; give a headers.jsonl written by this version", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// A line is a header of another version.
    #[error(
        "header log {} line {line} was written before each kind of layers had its heads (data version 8 or older); replay it with the build that wrote it",
        path.display()
    )]
    Older {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// The log ends early.
    #[error("header log {} has no step {step}; run fewer steps or give a longer log", path.display())]
    Missing {
        /// Which file.
        path: PathBuf,
        /// The step that is asked for.
        step: u64,
    },
    /// The log is of another job.
    #[error(
        "header log {}: {what} of step {step} differs from this run's; replay with the same data, model, seed, tokens and build",
        path.display()
    )]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// The step.
        step: u64,
        /// Which field.
        what: &'static str,
    },
}

impl Log {
    /// The log that a file holds.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`], [`Error::Older`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, Error> {
        let mut headers: Vec<Header> = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            let header = serde_json::from_str(text).map_err(|source| {
                let path = path.into();
                if is_older(text) {
                    Error::Older { path, line }
                } else {
                    Error::Malformed { path, line, source }
                }
            })?;
            headers.push(header);
        }
        Ok(Self { path: path.into(), headers })
    }

    /// Checks that every step of a run is there.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] for the first that is not.
    pub fn covers(&self, mut steps: std::ops::Range<u64>) -> Result<(), Error> {
        let recorded: std::collections::BTreeSet<_> =
            self.headers.iter().map(|it| it.step).collect();
        match steps.find(|it| !recorded.contains(it)) {
            Some(step) => Err(Error::Missing { path: self.path.clone(), step }),
            None => Ok(()),
        }
    }

    /// The recorded slots of a step, if it is there.
    pub fn slots(&self, step: u64) -> Option<&[Slot]> {
        self.of(step).map(|it| &it.slots[..])
    }

    /// The last line of a step counts, since a resumed run writes a step again.
    fn of(&self, step: u64) -> Option<&Header> {
        self.headers.iter().rfind(|it| it.step == step)
    }

    /// The recorded decisions for the step of `fresh`: its slots, weights, costs, tolerance, placement and whether heads part,
    /// with the layout and the rest checked to be the same.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], [`Error::Foreign`].
    pub fn replay(&self, fresh: Header) -> Result<Header, Error> {
        let step = fresh.step;
        let recorded =
            self.of(step).ok_or_else(|| Error::Missing { path: self.path.clone(), step })?;
        let differs = [
            ("layers", recorded.layers == fresh.layers),
            ("wire", recorded.wire == fresh.wire),
            ("seed", recorded.seed == fresh.seed),
            ("numerics", recorded.numerics == fresh.numerics),
            ("turns", recorded.turns == fresh.turns),
            ("layout", recorded.nanos == fresh.nanos),
        ];
        if let Some((what, _)) = differs.into_iter().find(|(_, same)| !same) {
            return Err(Error::Foreign { path: self.path.clone(), step, what });
        }
        let Header { kv_heads, placement, slots, costs, tolerance, .. } = recorded.clone();
        Ok(Header { kv_heads, placement, slots, costs, tolerance, ..fresh })
    }
}

/// Whether a line is a header of data version 8 or older, when all layers had the same heads.
fn is_older(line: &str) -> bool {
    serde_json::from_str(line).is_ok_and(|it: serde_json::Value| {
        let has = |field| it.get(field).is_some();
        has("step") && has("layers") && has("nanos") && has("heads")
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use cadre_planner::{DocumentId, Heads, Mask, Stretch};

    use super::*;
    use crate::layers::Kind;

    fn header(step: u64) -> Header {
        let any: Header = serde_json::from_str(include_str!("../../testing/header.json")).unwrap();
        Header { step, ..any }
    }

    fn packing(rows: u32) -> Packing {
        let stretch = Stretch { document: DocumentId(0), start: 0, end: rows };
        Packing::new(&[rows], vec![vec![stretch]]).unwrap()
    }

    const CAUSAL: Kind = Kind::causal(Heads { query: 4, kv: 2, dim: 8 });

    fn layers(kinds: [Mask; 2]) -> Layers {
        Layers::new(kinds.map(|mask| Kind { mask, ..CAUSAL })).unwrap()
    }

    fn slot(weight: u32) -> Slot {
        Slot { weight, head_start: 0, home: None, memory: 1 << 30 }
    }

    fn log(text: &str) -> Result<Log, Error> {
        Log::parse(Path::new("headers.jsonl"), text)
    }

    fn lines(headers: &[Header]) -> String {
        headers.iter().map(|it| serde_json::to_string(it).unwrap() + "\n").collect()
    }

    #[test]
    fn a_replay_takes_decisions_from_the_last_line_of_a_step_and_members_from_now() {
        let first = header(3);
        let slots = vec![slot(50), slot(200)];
        let (placement, kv_heads) = (Placement::Local, KvHeads::Apart);
        let tolerance = Tolerance::new(1.05).unwrap();
        let again = Header { kv_heads, placement, slots, tolerance, ..header(3) };
        let log = log(&lines(&[first, again.clone()])).unwrap();
        let view = ViewNumber { term: 1, counter: 9 };
        let fresh = Header { fillers: vec![None], view, ..header(3) };
        let replayed = log.replay(fresh.clone()).unwrap();
        assert_eq!(replayed, Header { fillers: fresh.fillers, view, ..again.clone() });
        assert_eq!(replayed.digest(), again.digest());
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

    #[test]
    fn a_log_of_another_job_is_refused_by_the_field_that_differs() {
        let log = log(&lines(&[header(3)])).unwrap();
        let check = |fresh: Header, expected: &str| match log.replay(fresh) {
            Err(Error::Foreign { step: 3, what, .. }) => assert_eq!(what, expected),
            other => panic!("{expected}: {other:?}"),
        };
        let one = Layers::alike(CAUSAL, 1).unwrap();
        check(Header { layers: one, ..header(3) }, "layers");
        let near = Mask::Window { left: 63 };
        check(Header { layers: layers([near, Mask::Causal]), ..header(3) }, "layers");
        let heads = Kind::causal(Heads { query: 4, kv: 4, dim: 8 });
        check(Header { layers: Layers::alike(heads, 2).unwrap(), ..header(3) }, "layers");
        check(Header { wire: Wire::Bf16, ..header(3) }, "wire");
        check(Header { seed: 8, ..header(3) }, "seed");
        check(Header { numerics: "other".into(), ..header(3) }, "numerics");
        check(Header { turns: Turns::forward(NonZeroU16::MIN), ..header(3) }, "turns");
        check(Header { nanos: vec![packing(301)], ..header(3) }, "layout");
    }

    #[test]
    fn a_log_that_cannot_be_used_is_refused() {
        let short = log(&lines(&[header(0), header(1)])).unwrap();
        assert!(matches!(short.replay(header(2)), Err(Error::Missing { step: 2, .. })));
        assert!(matches!(log("").unwrap().replay(header(0)), Err(Error::Missing { step: 0, .. })));

        let check = |text: &str, expected: usize| match log(text) {
            Err(Error::Malformed { line, .. }) => assert_eq!(line, expected),
            other => panic!("{text}: {other:?}"),
        };
        let good = lines(&[header(0)]);
        check(&format!("{good}{}", &good[..good.len() / 2]), 2);
        check(&good.replacen("\"seed\"", "\"sead\"", 1), 1);
        check(&format!("{good}\n{good}"), 2);

        // As they were written when every layer was causal, when kinds were masks, when there was one order of phases, and when
        // all layers had the same heads.
        for older in [
            include_str!("../../testing/header-2.json"),
            include_str!("../../testing/header-3.json"),
            include_str!("../../testing/header-4.json"),
            include_str!("../../testing/header-8.json"),
        ] {
            match log(&format!("{good}{older}")) {
                Err(Error::Older { line: 2, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}
