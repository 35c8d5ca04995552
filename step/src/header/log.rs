//! The headers of an earlier run, `headers.jsonl`, to be run again.
//!
//! In: its lines, and the header of a step as it would be now. Out: the header with the decisions of then, or why the log is of
//! another job. It reads no file.
//!
//! Invariant: what a log does not decide is compared, never taken.

use std::path::{Path, PathBuf};

use cadre_planner::Slot;

use super::Header;

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

    /// The first step that was planned for dedicated servers, too.
    pub fn needs_servers(&self) -> Option<u64> {
        let dedicated = |it: &Slot| it.home.is_none() && !it.is_standby();
        self.headers.iter().find(|it| it.slots.iter().any(dedicated)).map(|it| it.step)
    }

    /// The recorded slots of a step, if it is there.
    pub fn slots(&self, step: u64) -> Option<&[Slot]> {
        self.of(step).map(|it| &it.slots[..])
    }

    /// The last line of a step counts, since a resumed run writes a step again.
    fn of(&self, step: u64) -> Option<&Header> {
        self.headers.iter().rfind(|it| it.step == step)
    }

    /// The recorded decisions for the step of `fresh`: its slots, weights, costs, tolerance, links, placement and whether heads
    /// part, with the layout and the rest checked to be the same.
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
        let Header { kv_heads, placement, slots, costs, tolerance, links, .. } = recorded.clone();
        Ok(Header { kv_heads, placement, slots, costs, tolerance, links, ..fresh })
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

    use cadre_crds::Wire;
    use cadre_planner::{Heads, Mask, Tolerance};

    use super::super::tests::{CAUSAL, header, layers, packing, slot, unreachable};
    use super::super::{KvHeads, Placement, ViewNumber};
    use super::*;
    use crate::layers::{Kind, Layers};
    use crate::turns::Turns;

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
        let links = unreachable();
        let again = Header { kv_heads, placement, slots, tolerance, links, ..header(3) };
        let log = log(&lines(&[first, again.clone()])).unwrap();
        let view = ViewNumber { term: 1, counter: 9 };
        let fresh = Header { fillers: vec![None], view, ..header(3) };
        let replayed = log.replay(fresh.clone()).unwrap();
        assert_eq!(replayed, Header { fillers: fresh.fillers, view, ..again.clone() });
        assert_eq!(replayed.digest(), again.digest());
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
            include_str!("../../../testing/header-2.json"),
            include_str!("../../../testing/header-3.json"),
            include_str!("../../../testing/header-4.json"),
            include_str!("../../../testing/header-8.json"),
        ] {
            match log(&format!("{good}{older}")) {
                Err(Error::Older { line: 2, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}
