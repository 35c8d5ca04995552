//! `cadre plan -f`: what a job needs and gets, before a processor is spent.
//!
//! In: manifests, a list of document lengths, a calibration, a number of nodes. Out: pool size, balance, bytes a second of
//! each link, exposed communication, steps a second, memory, and whether it fits. Nothing is started.
//!
//! Documents are drawn as the reference trainer draws them, and headers are made and planned as a job's conductor does: the
//! plans are those of the job, as long as all its slots are there and their weights nominal. The model of a step is simple and stated: with two
//! nano-batches or more the servers, the links and the trainers' linear layers of one layer work at the same time, and the
//! slowest of them sets the pace; with one they follow each other. Optimizer, loss and collectives are left out.

mod draw;
pub(crate) mod observed;
pub(super) mod picture;
mod report;
pub(crate) mod simulated;

use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;

use cadre_crds::{AttentionPoolSpec, OnPoolLoss, Wire};
use cadre_planner::{Costs, Heads, LinkMap, Tolerance};
use cadre_step::header::KvHeads;
use cadre_step::turns::Turns;
use cadre_trainer::loader::{Lengths, Settings};
use cadre_trainer::model::{Config, Design, DesignError, PatternError, Scores, Stack};
use cadre_trainer::turns;
use cadre_worker::profile;

use crate::arguments::{JobOptions, PlanOptions};
use crate::manifests::{Declared, DeclaredError, declared};
use draw::Machine;
pub(crate) use draw::fillers;
use report::Report;

/// The calibration that times are estimated with where a job has none.
pub(crate) const NOMINAL_PROFILE: &str = "h200-hopper";
/// Steps that are drawn.
const DRAWN_STEPS: u64 = 8;

/// Why a job cannot be sized.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SizeError {
    #[error(transparent)]
    Manifests(#[from] DeclaredError),
    #[error(
        "--{option} is needed: the job's container does not run cadre train, so its arguments are not known"
    )]
    Unknown { option: &'static str },
    #[error("--model {name} is not known; use 8b, 34b, tiny, small or medium")]
    Model { name: String },
    #[error("--layers: {0}")]
    Layers(#[from] PatternError),
    #[error(transparent)]
    Design(#[from] DesignError),
    #[error("--nodes is needed with -f: how many nodes may trainers and servers have together?")]
    Nodes,
    #[error("{0}")]
    Lengths(String),
    #[error(
        "--lengths of the job's trainer: {0}; say --lengths FILE with the list as it is here, or --lengths sampler"
    )]
    OwnLengths(String),
    #[error(transparent)]
    Profile(#[from] profile::Error),
    #[error("spec.attention: {0}")]
    Tolerance(cadre_planner::Error),
    #[error(transparent)]
    Turns(#[from] turns::Error),
    #[error(transparent)]
    Header(#[from] cadre_step::conduct::Error),
    #[error("step {step} as drawn: {source}")]
    Planner { step: u64, source: cadre_planner::Error },
    #[error(
        "--lose {lost}: the pool has {servers} dedicated servers; give at most as many, or say --servers"
    )]
    Lost { lost: u16, servers: u32 },
    #[error("--weights has {found} numbers for {slots} slots; give at most one a slot")]
    Weights { found: usize, slots: u32 },
    #[error("--weights: the weight of slot {slot} is 0; give at least 1")]
    NoWeight { slot: usize },
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
struct Model {
    layers: usize,
    hidden: u64,
    /// Heads of layers that name none of their own.
    heads: Heads,
    feed_forward: u64,
}

impl Model {
    fn of(it: &Config) -> Self {
        Self {
            layers: it.layers,
            hidden: it.width as u64,
            heads: it.heads(),
            feed_forward: it.feed_forward as u64,
        }
    }
}

/// Everything that is known of a job.
#[derive(Clone)]
struct Job {
    name: String,
    model: Model,
    /// Layers of the model.
    stack: Stack,
    /// Whether the user named no layers, so that all are taken as full.
    layers_assumed: bool,
    settings: Settings,
    /// Turns of every step.
    turns: Turns,
    /// Nano-batches that go through the model together.
    together: u32,
    lengths: Lengths,
    nodes: u32,
    processes_per_node: u32,
    in_place: bool,
    /// Dedicated servers that the pool asks for.
    replicas: u32,
    /// Bytes of a server.
    memory: u64,
    /// Bytes of a trainer, for rows of others.
    trainer_memory: u64,
    wire: Wire,
    kv_heads: KvHeads,
    on_pool_loss: OnPoolLoss,
    /// From a server's death until it is declared lost.
    suspected_ms: u32,
    /// Speeds of dedicated servers and of trainers in place by number; those left out are nominal.
    weights: [Vec<u32>; 2],
    /// What plans are made with, by kind of layers.
    costs: Vec<Costs>,
    /// How uneven plans may be.
    tolerance: Tolerance,
    /// What is known of the links of its workers.
    links: LinkMap,
}

/// Sizes a job; returns what to print.
pub(crate) fn size(options: &PlanOptions) -> Result<String, SizeError> {
    let nodes = options.nodes.ok_or(SizeError::Nodes)?.get();
    let (job, name) = job(&options.job, options.lengths.as_deref(), None)?;
    let name = name.as_deref().unwrap_or(NOMINAL_PROFILE);
    let profile = profile::read(name)?;
    let machine = Machine::new(&profile, job.stack.core(), options.lanes.get())
        .map_err(|error| profile::Error::refused(name, error))?;
    let report = Report::new(&job, &machine, nodes, &profile)?;
    if let Some(path) = &options.picture {
        std::fs::write(path, picture::draw(&job, report.servers())?)
            .map_err(|source| SizeError::Unwritable { path: path.clone(), source })?;
    }
    Ok(if options.json { report.json() } else { report.table() })
}

/// The job, and its calibration if it has one; `servers` are asked for instead of those of its pool.
fn job(
    options: &JobOptions,
    lengths: Option<&str>,
    servers: Option<u32>,
) -> Result<(Job, Option<String>), SizeError> {
    let Declared { pool, job, trainer, server } = declared(&options.files)?;
    let either = |given: Option<NonZeroU32>, own: Option<NonZeroU32>, option| {
        given.or(own).ok_or(SizeError::Unknown { option })
    };
    let own = trainer.as_ref();
    let design = own.map(|it| Design::from(it.model.clone()));
    let model = match (&options.model, &design) {
        (Some(name), _) => model_of(name)?,
        (None, Some(design)) => Model::of(&design.build()?.0),
        (None, None) => return Err(SizeError::Unknown { option: "model" }),
    };
    let said = options.layers.clone().or_else(|| design.as_ref().map(|it| it.layers.clone()));
    let layers_assumed = said.is_none();
    let pattern = said.unwrap_or_default();
    let scores = design.map_or_else(Scores::default, |it| it.scores);
    let lengths = match (lengths, own.and_then(|it| it.lengths.as_deref())) {
        (None, Some(file)) => {
            Lengths::read(file).map_err(|it| SizeError::OwnLengths(it.to_string()))?
        }
        (None, None) | (Some("sampler"), _) => Lengths::shipped(),
        (Some(file), _) => {
            Lengths::read(file.as_ref()).map_err(|it| SizeError::Lengths(it.to_string()))?
        }
    };
    let trainers = job.spec.trainers().try_into().expect("a job without trainers is refused");
    let together = options.nano_batches.or(own.map(|it| it.nano_batches)).unwrap_or(TWO);
    let stack = pattern.over(model.layers, model.heads, scores)?;
    let accumulate = own.map_or(NonZeroU16::MIN, |it| it.accumulate);
    let turns = turns::accumulated(together, accumulate, stack.core())?;
    let nano_batches = NonZeroU32::new(turns.nanos().into()).unwrap_or(NonZeroU32::MIN);
    let attention = &job.spec.attention;
    let profile = options.profile.clone().or_else(|| attention.profile.clone());
    let trainer_mib = own.and_then(|it| it.memory_mib).map(NonZeroU32::get);
    let trainer_mib = trainer_mib.unwrap_or(attention.in_place_memory_mebibytes);
    let gib = options.memory_gib.map(|it| it << 30);
    let kinds = stack.core().kinds().iter().map(|it| (it.heads.dim, None));
    let count = job.spec.trainers().try_into().unwrap_or(u16::MAX);
    let planned = profile::planned(profile.as_deref(), kinds, count)?;
    let own_tolerance =
        attention.tolerance.as_deref().map(str::parse).transpose().map_err(SizeError::Tolerance)?;
    let tolerance = options.tolerance.or(own_tolerance).unwrap_or_default();
    let job = Job {
        name: job.metadata.name.clone().unwrap_or_default(),
        model,
        stack,
        layers_assumed,
        settings: Settings {
            trainers,
            tokens: either(options.tokens, own.map(|it| it.tokens), "tokens")?,
            cap: either(options.cap, own.map(|it| it.cap), "cap")?,
            nano_batches,
            seed: own.map_or(1, |it| it.seed),
        },
        turns,
        together: together.get(),
        lengths,
        nodes: job.spec.nodes,
        processes_per_node: job.spec.procs_per_node,
        in_place: pool.spec.in_place,
        replicas: pool.spec.replicas,
        memory: match (gib, server) {
            (Some(gib), _) => gib,
            (None, Some(server)) if pool.spec.replicas > 0 => server.memory_mib.get() << 20,
            _ => 64 << 30,
        },
        trainer_memory: gib.unwrap_or(u64::from(trainer_mib) << 20),
        wire: attention.wire.unwrap_or(Wire::F32),
        kv_heads: own.map_or(KvHeads::Apart, |it| it.heads.into()),
        on_pool_loss: attention.on_pool_loss,
        suspected_ms: pool.spec.health.suspect_after_milliseconds,
        weights: weights(&options.weights, &pool.spec, servers, job.spec.trainers())?,
        costs: planned.costs,
        tolerance,
        links: planned.links,
    };
    Ok((job, profile))
}

/// Speeds of the servers that the user or else the pool asks for, and of trainers in place.
fn weights(
    all: &[u32],
    pool: &AttentionPoolSpec,
    servers: Option<u32>,
    trainers: u32,
) -> Result<[Vec<u32>; 2], SizeError> {
    if let Some(slot) = all.iter().position(|it| *it == 0) {
        return Err(SizeError::NoWeight { slot });
    }
    let in_place = if pool.in_place { trainers } else { 0 };
    let servers = servers.unwrap_or(pool.replicas);
    let slots = servers + in_place;
    if slots > 0 && all.len() > slots as usize {
        return Err(SizeError::Weights { found: all.len(), slots });
    }
    let servers = if pool.in_place { servers as usize } else { all.len() };
    let (servers, in_place) = all.split_at(servers.min(all.len()));
    Ok([servers.to_vec(), in_place.to_vec()])
}

/// What hides the wire.
const TWO: NonZeroU32 = NonZeroU32::new(2).expect("two is not zero");

fn model_of(name: &str) -> Result<Model, SizeError> {
    let heads = |query, kv, dim| Heads { query, kv, dim };
    match name {
        // Llama-3-8B.
        "8b" => {
            Ok(Model { layers: 32, hidden: 4_096, heads: heads(32, 8, 128), feed_forward: 14_336 })
        }
        "34b" => {
            Ok(Model { layers: 48, hidden: 8_192, heads: heads(64, 16, 128), feed_forward: 22_016 })
        }
        other => {
            let it = Config::preset(other).map_err(|_| SizeError::Model { name: other.into() })?;
            Ok(Model::of(&it))
        }
    }
}
