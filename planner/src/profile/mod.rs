//! What attention costs on a kind of processor, as measured.
//!
//! In: a calibration file (JSON), or the name of a table that ships with Cadre. Out: the time of a task by
//! interpolation, and the [`Costs`] and [`LinkMap`] that the job plans with. Times are integers, and tables are refused unless they grow
//! with rows and keys, so that interpolated times do too.
//!
//! Plans depend on [`Costs`] and links alone: quantised, digested with the problem, the same on every machine.

mod builtin;
mod measured;
mod places;
mod table;

use serde::{Deserialize, Serialize};

use crate::Costs;
use crate::digest::Digest;

pub use places::{LinkMap, Site};
pub use table::{Direction, Kept, Table, TableError};

/// Version of the file.
const VERSION: u32 = 1;
/// Costs of tiles and tasks are multiples of these, so that scatter of a measurement seldom changes them.
const TILE_STEP: u64 = 64;
const TASK_STEP: u64 = 1_024;
/// Percent of backward over forward is a multiple of this.
const BACKWARD_STEP: u64 = 5;

/// A calibration: how fast a kind of processor computes attention, and what its links carry.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of the file, 1.
    pub version: u32,
    /// What a calibration that was interrupted holds; absent from a whole one. A partial
    /// calibration is refused by whatever plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<String>,
    /// Kind of processor and kernels, such as `h200-fa2`.
    pub processor: String,
    /// Where the numbers are from: measured, published or planned.
    pub source: String,
    /// Fixed time of a task on the whole processor: decode, launch, reply; in nanoseconds.
    pub task_nanoseconds: u64,
    /// Multiplications and additions of linear layers a nanosecond.
    pub linear_operations: u64,
    /// By head dim, direction and mask.
    pub kernels: Vec<Table>,
    /// By distance.
    pub links: Vec<LinkTimes>,
    /// Where the workers of a job are; none: all are equally far from each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<Site>,
    /// Pairs of workers that cannot reach each other, named as in [`Site::of`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable: Vec<[String; 2]>,
}

/// What one link carries.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LinkTimes {
    /// `node`, `rail`, `leaf` or `far`.
    pub distance: String,
    /// Bytes a microsecond, one way.
    pub rate: u32,
    /// Time until the first byte arrives, in nanoseconds.
    pub latency: u64,
}

/// Why a calibration is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProfileError {
    #[error("version is {found}, this build reads {VERSION}; calibrate again")]
    Version { found: u32 },
    #[error("it is partial: {measured}; run cadre calibrate to its end")]
    Partial { measured: String },
    #[error("{field} is 0; give at least 1")]
    Zero { field: &'static str },
    #[error("kernels[{index}]: {source}")]
    Table { index: usize, source: TableError },
    #[error("kernels has head dim {head_dim}, {direction:?}, {kept:?} twice; keep one")]
    Twice { head_dim: u16, direction: Direction, kept: Kept },
    #[error(
        "links[{index}].distance is {distance:?}; use node, rail, leaf or far, each at most once"
    )]
    Distance { index: usize, distance: String },
    #[error("{field} is {rate}; give 1 to {most} bytes a microsecond")]
    Rate { field: String, rate: u32, most: u32 },
    #[error("places[{index}].of is empty; name workers, as trainer-N or server-N")]
    NoWorker { index: usize },
    #[error(
        "{field} is {found:?}; write trainer-N or server-N, with a number from 0 to 65534 as it is counted"
    )]
    Worker { field: String, found: String },
    #[error(
        "{field} is trainer-{rank}, and the job has {trainers} trainers, counted from 0; leave it out"
    )]
    UnknownTrainer { field: String, rank: u16, trainers: u16 },
    #[error("{field} is {worker}, which places has already; name each worker once")]
    PlacedTwice { field: String, worker: String },
    #[error("{field} is {found}; give a number below {below}")]
    Number { field: String, found: u32, below: u32 },
    #[error("unreachable[{index}] is {worker} twice; name two workers")]
    Itself { index: usize, worker: String },
    #[error("there is no table for head dim {head_dim}, {direction:?}, {kept:?}; calibrate it")]
    Missing { head_dim: u16, direction: Direction, kept: Kept },
    #[error("it is of {processor}, and attention is computed by {here}; calibrate {here}")]
    Processor { processor: String, here: String },
}

impl Profile {
    /// A table that ships with Cadre: one of [`Profile::BUILTIN`].
    pub fn builtin(name: &str) -> Option<Self> {
        builtin::profile(name)
    }

    /// Names of the tables that ship with Cadre.
    pub const BUILTIN: &'static [&'static str] = &["h200-hopper", "h200-fa2", "h100-hopper"];

    /// Checks a calibration that was read.
    ///
    /// # Errors
    ///
    /// The first field that cannot be.
    pub fn check(&self) -> Result<(), ProfileError> {
        let Self { version, partial, processor, linear_operations, kernels, links, .. } = self;
        if *version != VERSION {
            return Err(ProfileError::Version { found: *version });
        }
        if let Some(measured) = partial {
            return Err(ProfileError::Partial { measured: measured.clone() });
        }
        if processor.is_empty() {
            return Err(ProfileError::Zero { field: "the length of processor" });
        }
        if *linear_operations == 0 {
            return Err(ProfileError::Zero { field: "linear_operations" });
        }
        for (index, it) in kernels.iter().enumerate() {
            it.check().map_err(|source| ProfileError::Table { index, source })?;
            let Table { head_dim, direction, kept, .. } = *it;
            let same = |other: &&Table| other.is_for(head_dim, direction, kept);
            if kernels[..index].iter().any(|other| same(&other)) {
                return Err(ProfileError::Twice { head_dim, direction, kept });
            }
        }
        for (index, it) in links.iter().enumerate() {
            let known = ["node", "rail", "leaf", "far"].contains(&it.distance.as_str());
            if !known || links[..index].iter().any(|other| other.distance == it.distance) {
                return Err(ProfileError::Distance { index, distance: it.distance.clone() });
            }
        }
        // Of which trainers there are, the job's trainers know more.
        self.link_map(u16::MAX).map(drop)
    }

    /// Checks that it is of the processor `here`, named as [`Self::processor`] is. A CPU may have other threads, and a table
    /// that ships with Cadre is of every GPU of its kind, unless that runs the portable kernels.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Processor`].
    pub fn check_processor(&self, here: &str) -> Result<(), ProfileError> {
        let kind = |it: &str| match it.rsplit_once('-') {
            Some((cpu, _)) if it.starts_with("cpu-") => cpu.to_owned(),
            _ => it.to_owned(),
        };
        let shipped = Self::BUILTIN.contains(&self.processor.as_str());
        let runs_those = shipped && !here.ends_with("-portable");
        let gpu = self.processor.split('-').next().filter(|_| runs_those);
        let is_that_gpu = gpu.is_some_and(|gpu| here.split('-').skip(1).any(|it| it == gpu));
        if is_that_gpu || kind(&self.processor) == kind(here) {
            return Ok(());
        }
        let processor = self.processor.clone();
        Err(ProfileError::Processor { processor, here: here.into() })
    }

    /// The table of a head dim, direction and mask.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Missing`].
    pub fn table(
        &self,
        head_dim: u16,
        direction: Direction,
        kept: Kept,
    ) -> Result<&Table, ProfileError> {
        let found = self.kernels.iter().find(|it| it.is_for(head_dim, direction, kept));
        found.ok_or(ProfileError::Missing { head_dim, direction, kept })
    }

    /// The cost table of a head dim, in pairs of one query head.
    ///
    /// A pair is what it costs in the largest task of the grid. What tasks of few rows cost beyond their pairs is
    /// the tile's, and the fixed time of a task is the task's.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Missing`] if the causal tables of both directions are not there.
    pub fn costs(&self, head_dim: u16) -> Result<Costs, ProfileError> {
        let forward = self.table(head_dim, Direction::Forward, Kept::Causal)?;
        let backward = self.table(head_dim, Direction::Backward, Kept::Causal)?;
        let pair = u128::from(forward.pair_femtoseconds()).max(1);
        let in_pairs = |femtoseconds: u128| u64::try_from(femtoseconds / pair).unwrap_or(u64::MAX);
        let task = in_pairs(u128::from(self.task_nanoseconds) * 1_000_000);
        let percent = u128::from(backward.pair_femtoseconds()) * 100 / pair;
        let step = |value: u64, step: u64| (value.saturating_add(step / 2)) / step * step;
        let fit = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Costs {
            tile: fit(step(forward.tile_pairs(), TILE_STEP)),
            task: fit(step(task, TASK_STEP)),
            backward_percent: fit(
                step(u64::try_from(percent).unwrap_or(u64::MAX), BACKWARD_STEP).max(BACKWARD_STEP)
            ),
            ..Costs::default()
        })
    }

    /// Same on every machine for the same calibration, for ever.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::new("profile");
        let mut text = |text: &str| {
            digest.u64(text.len() as u64);
            text.bytes().for_each(|it| digest.u64(it.into()));
        };
        text(&self.processor);
        text(&self.source);
        self.links.iter().for_each(|it| text(&it.distance));
        digest.u64(self.version.into());
        digest.u64(self.task_nanoseconds);
        digest.u64(self.linear_operations);
        digest.u64(self.kernels.len() as u64);
        for it in &self.kernels {
            it.encode(&mut digest);
        }
        digest.u64(self.links.len() as u64);
        for it in &self.links {
            digest.u64(it.rate.into());
            digest.u64(it.latency);
        }
        // Last, so that calibrations without any keep their digest.
        if !self.places.is_empty() || !self.unreachable.is_empty() {
            self.encode_places(&mut digest);
        }
        digest.value()
    }
}
