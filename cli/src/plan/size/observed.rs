//! Steps that were observed, in place of drawn ones: what attention takes where the rows are, and on a pool.
//!
//! In: layers of a job, the lengths of its documents by step, micro-batch and rank. Out: seconds of attention of
//! each step ([`Times`]). Headers are made of the observed lengths as a job's conductor makes them; plans and the model of a
//! layer are those of `cadre plan -f`, with one nano-batch at a time, as ranks of PyTorch have it.
//!
//! What is not attention was observed, and takes on a pool as long as without one. So it has no part here.

use std::collections::BTreeMap;
use std::num::{NonZeroU16, NonZeroU32};

use cadre_crds::{OnPoolLoss, Wire};
use cadre_planner::{
    DocumentId, Problem, Profile, RankId, Slot, SlotId, Stretch, Tolerance, plan_at_home,
};
use cadre_step::conduct::NOMINAL_WEIGHT;
use cadre_step::envelope::{Lengths, NanoLengths};
use cadre_step::header::KvHeads;
use cadre_step::layers::Kind;
use cadre_step::turns::Turns;
use cadre_trainer::loader::{self, Settings};
use cadre_trainer::model::{PatternError, Stack};
use cadre_worker::profile;

use super::draw::{Drawn, Machine};
use super::{Job, Model, SizeError};

/// No limit.
const UNLIMITED_BYTES: u64 = u64::MAX >> 4;

/// Lengths of the documents of a step, by micro-batch and rank. Ranks may have other numbers of micro-batches.
pub(crate) type Documents = Vec<Vec<Vec<u32>>>;

/// A job that was observed.
pub(crate) struct Watched {
    pub(crate) ranks: u16,
    /// Kind of each layer; none for a layer without core attention.
    pub(crate) layers: Vec<Option<Kind>>,
    /// Dedicated servers of the pool; 0: a slot in place at every rank.
    pub(crate) servers: u32,
    /// Processors of a rank and of a server.
    pub(crate) lanes: u16,
    pub(crate) wire: Wire,
}

/// Seconds of attention in a step, forward and backward.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// Seconds of each rank for its own rows.
    pub(crate) at_home: Vec<f64>,
    /// Seconds until the last slot of a pool has computed all rows.
    pub(crate) pooled: f64,
    /// Seconds in which the pool's attention only waits for links.
    pub(crate) links: f64,
    /// The last slot's finish over the mean of all, of the worst plan.
    pub(crate) balance: f64,
}

impl Times {
    /// The busiest rank's.
    pub(crate) fn most(&self) -> f64 {
        self.at_home.iter().copied().fold(0.0, f64::max)
    }

    /// The mean rank's.
    pub(crate) fn mean(&self) -> f64 {
        self.at_home.iter().sum::<f64>() / self.at_home.len().max(1) as f64
    }
}

impl Watched {
    /// Times of each step by a calibration.
    ///
    /// # Errors
    ///
    /// No layer has core attention, the calibration has no table of the head dim, or a step cannot be planned.
    pub(crate) fn times<'a>(
        &self,
        calibration: (&str, &Profile),
        steps: impl Iterator<Item = &'a Documents>,
    ) -> Result<Vec<Times>, SizeError> {
        let (name, profile) = calibration;
        let refused = |error| profile::Error::refused(name, error);
        let stack = Stack::new(self.layers.clone()).map_err(PatternError::from)?;
        let machine = Machine::new(profile, stack.core(), self.lanes).map_err(refused)?;
        let costs = stack.core().kinds().iter().map(|it| profile.costs(it.heads.dim));
        let costs = costs.collect::<Result<_, _>>().map_err(refused)?;
        let links = profile.link_map(self.ranks).map_err(refused)?;
        let one = NonZeroU32::MIN;
        let job = Job {
            name: String::new(),
            // Widths matter only for the work beside attention, which was observed.
            model: Model {
                layers: 0,
                hidden: 0,
                heads: stack.core().kind_of(0).heads,
                feed_forward: 0,
            },
            stack,
            layers_assumed: false,
            settings: Settings {
                trainers: NonZeroU32::new(self.ranks.into()).unwrap_or(one),
                tokens: one,
                nano_batches: one,
                cap: one,
                seed: 0,
            },
            turns: Turns::together(NonZeroU16::MIN),
            together: 1,
            lengths: loader::Lengths::shipped(),
            nodes: self.ranks.into(),
            processes_per_node: 1,
            in_place: self.servers == 0,
            replicas: self.servers,
            memory: UNLIMITED_BYTES,
            trainer_memory: UNLIMITED_BYTES,
            wire: self.wire,
            kv_heads: KvHeads::Apart,
            on_pool_loss: OnPoolLoss::Fail,
            suspected_ms: 0,
            weights: <[Vec<u32>; 2]>::default(),
            costs,
            tolerance: Tolerance::USUAL,
            links,
        };
        (0..).zip(steps).map(|(step, it)| self.step(&job, &machine, step, it)).collect()
    }

    fn step(
        &self,
        job: &Job,
        machine: &Machine,
        step: u64,
        documents: &Documents,
    ) -> Result<Times, SizeError> {
        let plans = Drawn::of(job, self.servers, step, &self.announced(step, documents))?;
        let layers = job.stack.core();
        let having = (0..layers.kinds().len()).map(|it| f64::from(layers.having(it)));
        let mut times =
            Times { at_home: vec![0.0; self.ranks.into()], pooled: 0.0, links: 0.0, balance: 1.0 };
        for (drawn, layers) in plans.iter().zip(having.cycle()) {
            let seconds = layers / 1e9;
            let home = at_home(&drawn.problem);
            let own = plan_at_home(&home).map_err(|source| SizeError::Planner { step, source })?;
            for (slot, sum) in (0..).map(SlotId).zip(&mut times.at_home) {
                let load = own.load(&home, slot) as f64;
                *sum += machine.attention(&home, load) * (1.0 + machine.back(&home)) * seconds;
            }
            let layer = drawn.layer(job, machine);
            times.pooled += (layer.time - layer.exposed) * seconds;
            times.links += layer.exposed * seconds;
            times.balance = times.balance.max(drawn.balance());
        }
        Ok(times)
    }

    /// What each rank would announce of a step, numbered as ranks of PyTorch number their documents.
    fn announced(&self, step: u64, documents: &Documents) -> BTreeMap<u16, Lengths> {
        let count = NonZeroU16::new(documents.len() as u16).unwrap_or(NonZeroU16::MIN);
        let turns = Turns::accumulated(count, NonZeroU16::MIN).ok();
        let nano = |rank: u16, of: &Vec<Vec<u32>>| {
            let own = of.get(usize::from(rank)).into_iter().flatten();
            let number = |at: usize| u32::from(rank) + at as u32 * u32::from(self.ranks);
            let numbered = own.enumerate().map(|(at, rows)| (number(at), *rows));
            let documents: Vec<_> = numbered.collect();
            let whole = |&(number, rows): &(u32, u32)| Stretch {
                document: DocumentId(number),
                start: 0,
                end: rows,
            };
            NanoLengths { stretches: documents.iter().map(whole).collect(), documents }
        };
        let of_rank = |rank| Lengths {
            step,
            turns: turns.clone(),
            nanos: documents.iter().map(|of| nano(rank, of)).collect(),
        };
        (0..self.ranks).map(|rank| (rank, of_rank(rank))).collect()
    }
}

/// The problem of the same rows with a slot in place at every rank.
pub(super) fn at_home(problem: &Problem) -> Problem {
    let ranks = (0..problem.layout.ranks().len() as u32).map(RankId);
    let speed = |rank| problem.slots.iter().find(|it| it.home == Some(rank)).map(|it| it.weight);
    let weight = |rank| speed(rank).unwrap_or(NOMINAL_WEIGHT);
    let slot = |rank| Slot {
        weight: weight(rank),
        head_start: 0,
        home: Some(rank),
        memory: UNLIMITED_BYTES,
    };
    let count = problem.layout.ranks().len();
    let mut links = problem.links.clone();
    links.places.truncate(count);
    links.unreachable.retain(|(one, other)| (*one.max(other) as usize) < count);
    Problem { slots: ranks.map(slot).collect(), links, ..problem.clone() }
}
