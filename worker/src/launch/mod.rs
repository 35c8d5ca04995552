//! Runs works of a plan on the kernels of this machine.
//!
//! In: works whose rows are all here, or will be by what was enqueued on streams ([`Work`]). Out: their results, in memory that trainers
//! pull from ([`Results`]). A launch fuses works of one direction up to a cost that its engine bounds. A [`Launcher`] runs them:
//! [`AtOnce`] on rows of the host, by `host`; [`Flying`] on rows that live on the GPU, by `resident`, which puts launches on streams
//! and gives their [`Flight`]s. `view` says where the rows of a work begin, `plans` keeps lists of launches that come again.
//!
//! It waits for no rows. Invariant: what a work computes does not depend on what it was fused with.

mod flight;
mod flying;
mod host;
mod plans;
mod promise;
mod resident;
mod view;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cadre_crds::Wire;
use cadre_kernels::device::{self, Refusal};
use cadre_kernels::{Engine, EngineError};
use cadre_planner::BundleId;
use cadre_protocol::{At, Phase};

pub use self::flight::Flight;
pub use self::flying::Flying;
pub use self::promise::{Promise, Word};
pub use self::resident::Resident;
pub use self::view::{heads, mask};
use cadre_step::phases::Direction;
use cadre_step::planned::PlannedStep;

use crate::memory::{HostRows, Memory};

/// One trainer's rows of one phase, as peers may read them.
#[derive(Clone, Debug)]
pub struct PhaseRows<M> {
    /// Queries, wire type.
    pub q: M,
    /// Keys, wire type.
    pub k: M,
    /// Values, wire type.
    pub v: M,
    /// Gradient of O (wire type), log-sum-exp and Δ (f32); backward only.
    pub gradients: Option<[M; 3]>,
}

/// All rows of one bundle in one place.
#[derive(Clone, Debug)]
pub enum BundleRows<M> {
    /// In a landing, laid out as [`cadre_step::lowering::Areas`] says.
    Landed(M),
    /// In the trainer's own rows, where the keys and the rows of each task are one piece: nothing was copied.
    Home(PhaseRows<M>),
}

/// A work that can run.
#[derive(Clone, Debug)]
pub struct Work<M> {
    /// Its step.
    pub planned: Arc<PlannedStep>,
    /// Its phase.
    pub phase: Phase,
    /// Task (forward) or bundle (backward).
    pub work: u32,
    /// Rows of its bundle.
    pub rows: BundleRows<M>,
    /// Set while pulls of its rows are not validated: until the promise is kept, its results are discarded or held back.
    pub promise: Option<Promise>,
}

/// Results of a work.
#[derive(Debug)]
pub enum Results<M> {
    /// O (wire type) and LSE of a task.
    Forward([M; 2]),
    /// dQ (wire type), dK and dV part of a bundle.
    Backward([M; 3]),
}

/// A finished work.
#[derive(Debug)]
pub struct Done<M> {
    /// The work.
    pub work: Work<M>,
    /// Results of the work.
    pub results: Results<M>,
    /// Its part of the launch's time.
    pub busy: Duration,
}

impl<M> Work<M> {
    /// Its step and phase.
    pub fn at(&self) -> At {
        At { step: self.planned.header.step, phase: self.phase }
    }

    fn direction(&self) -> Direction {
        self.planned.nano_of(self.phase).1
    }

    /// Its bundle, and when it is due, in words.
    fn name(&self) -> String {
        let (nano, direction) = self.planned.nano_of(self.phase);
        let (bundle, of) = match direction {
            Direction::Forward => (nano.plan.tasks()[self.work as usize].bundle, "forward"),
            Direction::Backward => (BundleId(self.work), "backward"),
        };
        let At { step, phase } = self.at();
        format!("bundle {} ({of}, step {step}, phase {})", bundle.0, phase.0)
    }

    /// Cost at which a launch of such works is long enough.
    fn launch_cost(&self, engine: &Engine) -> u64 {
        let heads = self.planned.kind_of(self.phase).heads;
        engine.launch_cost(self::heads(heads), matches!(self.planned.header.wire, Wire::Bf16))
    }

    /// Cost in the planner's unit, for fusing and reports.
    pub fn cost(&self) -> u64 {
        let (nano, direction) = self.planned.nano_of(self.phase);
        let dim = u64::from(nano.dim());
        match direction {
            Direction::Forward => {
                let task = &nano.plan.tasks()[self.work as usize];
                nano.plan.task_cost(&nano.problem, task) * dim
            }
            Direction::Backward => {
                nano.plan.bundle_cost(&nano.problem, BundleId(self.work)) * dim * 5 / 2
            }
        }
    }
}

/// A launch that is over: when it began, and what ran; or why it gave nothing.
pub type Landed<M> = Result<(Instant, Vec<Done<M>>), device::Error>;

/// Runs works for one thread, on rows of one kind of memory.
pub trait Launcher: Debug + Send + Sized + 'static {
    /// The rows.
    type Memory: Memory<Launcher = Self>;

    /// Whether works come before their rows are known to count.
    const EARLY: bool;

    /// A launcher with the kernels of `engine`, for rows that live in `place`.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn new(engine: Engine, place: &<Self::Memory as Memory>::Place) -> Result<Self, device::Error>;

    /// The engine whose kernels run.
    fn engine(&self) -> &Engine;

    /// Why some launch went to the CPU although there is a GPU; returned once.
    fn unfit(&mut self) -> Option<Refusal>;

    /// Runs works of one phase together, or puts them on a stream; those that ran.
    ///
    /// # Errors
    ///
    /// The kernel refuses a shape; nothing was computed then. Or the GPU failed.
    fn put(
        &mut self,
        works: Vec<Work<Self::Memory>>,
    ) -> Result<Vec<Done<Self::Memory>>, EngineError>;

    /// How many launches are under way.
    fn flights(&self) -> usize;

    /// Launches that are over and were not given before, each with when it began. Waits for none.
    fn land(&mut self) -> Vec<Landed<Self::Memory>>;
}

/// Runs works whose rows the host holds, one launch after the other.
#[derive(Debug)]
pub struct AtOnce(Engine);

impl AtOnce {
    /// A launcher with the kernels of `engine`.
    pub fn new(engine: Engine) -> Self {
        Self(engine)
    }
}

impl Launcher for AtOnce {
    type Memory = HostRows;

    const EARLY: bool = false;

    fn new(engine: Engine, _place: &crate::memory::Host) -> Result<Self, device::Error> {
        Ok(Self(engine))
    }

    fn engine(&self) -> &Engine {
        &self.0
    }

    fn unfit(&mut self) -> Option<Refusal> {
        self.0.unfit()
    }

    fn put(&mut self, works: Vec<Work<HostRows>>) -> Result<Vec<Done<HostRows>>, EngineError> {
        let again = self.0.gpu().is_some().then(|| works.clone());
        launch(works, &mut self.0).map_err(|error| {
            let EngineError::Device(short) = &error else { return error };
            if !short.is_out_of_memory() {
                return error;
            }
            // Which of them is too large by itself.
            let mut alone = again.into_iter().flatten().map(|it| {
                let name = it.name();
                launch(vec![it], &mut self.0).map_err(|error| of_work(&name, error))
            });
            alone.find_map(Result::err).unwrap_or(error)
        })
    }

    fn flights(&self) -> usize {
        0
    }

    fn land(&mut self) -> Vec<Landed<HostRows>> {
        Vec::new()
    }
}

/// Names the work, where memory is short for it alone.
fn of_work(name: &str, error: EngineError) -> EngineError {
    match error {
        EngineError::Device(error) => EngineError::Device(device_error_of(name, error)),
        EngineError::Refused(_) => error,
    }
}

fn device_error_of(name: &str, error: device::Error) -> device::Error {
    if let device::Error::OutOfMemory { what, bytes, free } = error {
        device::Error::OutOfMemory { what: format!("{what} of {name}"), bytes, free }
    } else {
        error
    }
}

/// Takes from the front of `queue` what fits one launch: at least one work, all of one phase.
pub fn fuse<K: Ord, M>(queue: &mut BTreeMap<K, Work<M>>, engine: &Engine) -> Vec<Work<M>> {
    let mut works: Vec<Work<M>> = Vec::new();
    let (mut cost, mut most) = (0, 0);
    while let Some(entry) = queue.first_entry() {
        let work = entry.get();
        cost += work.cost();
        if let Some(first) = works.first() {
            let step = |it: &Work<M>| (it.planned.header.step, it.phase);
            if step(work) != step(first) || cost > most {
                break;
            }
        } else {
            most = work.launch_cost(engine);
        }
        works.push(entry.remove());
    }
    works
}

/// Runs works of one phase together, whose rows the host holds.
///
/// # Errors
///
/// The kernel refuses a shape; nothing was computed then. Or the GPU failed.
pub fn launch(
    works: Vec<Work<HostRows>>,
    engine: &mut Engine,
) -> Result<Vec<Done<HostRows>>, EngineError> {
    let Some(first) = works.first() else { return Ok(Vec::new()) };
    let start = Instant::now();
    let results = match first.direction() {
        Direction::Forward => host::forward(&works, engine)?,
        Direction::Backward => host::backward(&works, engine)?,
    };
    Ok(shared_out(works.into_iter().zip(results).collect(), start.elapsed()))
}

/// Finished works, with their shares of the time that they took together.
fn shared_out<M>(works: Vec<(Work<M>, Results<M>)>, took: Duration) -> Vec<Done<M>> {
    let total: u64 = works.iter().map(|it| it.0.cost()).sum::<u64>().max(1);
    let done = works.into_iter().map(|(work, results)| {
        let busy = took.mul_f64(work.cost() as f64 / total as f64);
        Done { work, results, busy }
    });
    done.collect()
}
