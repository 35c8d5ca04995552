//! `cadre plan -f`: what a job needs and gets, before a processor is spent.
//!
//! In: manifests, a list of document lengths, a calibration, a number of nodes. Out: pool size, balance, bytes a second of
//! each link, exposed communication, steps a second, memory, and whether it fits. Nothing is started.
//!
//! Documents are drawn as the reference trainer draws them. The model of a step is simple and stated: with two
//! nano-batches or more the servers, the links and the trainers' linear layers of one layer work at the same time, and the
//! slowest of them sets the pace; with one they follow each other. Optimizer, loss and collectives are left out.

mod draw;
mod picture;
mod report;

use std::num::NonZeroU32;
use std::path::PathBuf;

use cadre_crds::manifest::{self, Manifests};
use cadre_crds::validate::{self, Refusal};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_planner::{Heads, Profile};
use cadre_trainer::loader::{Lengths, Settings};
use cadre_trainer::model::{Config, Pattern, PatternError};
use cadre_worker::session::Layers;

use crate::arguments::{PlanOptions, ServeOptions, TrainOptions};
use crate::run::merge;
use draw::Machine;
use report::Report;

/// Steps that are drawn.
const STEPS: u64 = 8;

/// Why a job cannot be sized.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SizeError {
    #[error(transparent)]
    Manifests(#[from] manifest::Error),
    #[error("{kind} {name}: {refusal}")]
    Refused { kind: &'static str, name: String, refusal: Refusal },
    #[error(
        "--{option} is needed: the job's container does not run cadre train, so its arguments are not known"
    )]
    Unknown { option: &'static str },
    #[error("--model {name} is not known; use 8b, 34b, tiny, small or medium")]
    Model { name: String },
    #[error("--layers: {0}")]
    Layers(#[from] PatternError),
    #[error("--nodes is needed with -f: how many nodes may trainers and servers have together?")]
    Nodes,
    #[error("{0}")]
    Lengths(String),
    #[error("--profile {name}: {why}; give a file of cadre calibrate or one of {}", Profile::BUILTIN.join(", "))]
    Profile { name: String, why: String },
    #[error("step {step} as drawn: {source}")]
    Planner { step: u64, source: cadre_planner::Error },
    #[error("cannot write {}: {source}", path.display())]
    Unwritable { path: PathBuf, source: std::io::Error },
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
struct Model {
    layers: usize,
    hidden: u64,
    heads: Heads,
    feed_forward: u64,
}

/// Everything that is known of a job.
#[derive(Clone)]
struct Job {
    name: String,
    model: Model,
    /// Kinds of its layers.
    layers: Layers,
    settings: Settings,
    lengths: Lengths,
    nodes: u32,
    processes_per_node: u32,
    in_place: bool,
    /// Dedicated servers that the pool asks for.
    replicas: u32,
    /// Bytes of a server.
    memory: u64,
}

/// Sizes a job; returns what to print.
pub(crate) fn size(options: &PlanOptions) -> Result<String, SizeError> {
    let nodes = options.nodes.ok_or(SizeError::Nodes)?.get();
    let profile = profile(&options.profile)?;
    let job = job(options)?;
    let machine = Machine::new(&profile, job.model.heads.dim, options.lanes.get())
        .map_err(|source| refused(&options.profile, source.to_string()))?;
    let report = Report::new(&job, &machine, nodes, &profile)?;
    if let Some(path) = &options.picture {
        std::fs::write(path, picture::draw(&job, &machine, report.servers())?)
            .map_err(|source| SizeError::Unwritable { path: path.clone(), source })?;
    }
    Ok(if options.json { report.json() } else { report.table() })
}

fn refused(name: &str, why: String) -> SizeError {
    SizeError::Profile { name: name.into(), why }
}

fn profile(name: &str) -> Result<Profile, SizeError> {
    if let Some(profile) = Profile::builtin(name) {
        return Ok(profile);
    }
    let text = std::fs::read(name).map_err(|error| refused(name, error.to_string()))?;
    let profile: Profile =
        serde_json::from_slice(&text).map_err(|error| refused(name, error.to_string()))?;
    profile.check().map_err(|error| refused(name, error.to_string()))?;
    Ok(profile)
}

fn job(options: &PlanOptions) -> Result<Job, SizeError> {
    let Manifests { pool, job, .. } = manifest::load(&options.files)?;
    let named = |kind, name: Option<&String>| {
        let name = name.cloned().unwrap_or_default();
        move |refusal| SizeError::Refused { kind, name, refusal }
    };
    let of_pool = || named(AttentionPool::KIND, pool.metadata.name.as_ref());
    let of_job = || named(TrainingJob::KIND, job.metadata.name.as_ref());
    validate::pool(&pool).map_err(of_pool())?;
    validate::job(&job).map_err(of_job())?;
    let trainer: Option<TrainOptions> =
        merge::read(&job.spec.template, "train").map_err(of_job())?;
    let server: Option<ServeOptions> = match &pool.spec.template {
        Some(template) => merge::read(template, "serve").map_err(of_pool())?,
        None => None,
    };
    let either = |given: Option<NonZeroU32>, own: Option<NonZeroU32>, option| {
        given.or(own).ok_or(SizeError::Unknown { option })
    };
    let own = trainer.as_ref();
    let model = options.model.clone().or_else(|| own.map(|it| it.model.clone()));
    let model = model_of(&model.ok_or(SizeError::Unknown { option: "model" })?)?;
    let pattern = own.map_or_else(Pattern::default, |it| it.layers.clone());
    let lengths = match options.lengths.as_deref() {
        None | Some("sampler") => Lengths::shipped(),
        Some(file) => {
            Lengths::read(file.as_ref()).map_err(|it| SizeError::Lengths(it.to_string()))?
        }
    };
    let trainers = job.spec.trainers().try_into().expect("a job without trainers is refused");
    let nano_batches = own.map(|it| it.nano_batches);
    Ok(Job {
        name: job.metadata.name.clone().unwrap_or_default(),
        model,
        layers: pattern.over(model.layers)?,
        settings: Settings {
            trainers,
            tokens: either(options.tokens, own.map(|it| it.tokens), "tokens")?,
            cap: either(options.cap, own.map(|it| it.cap), "cap")?,
            nano_batches: options.nano_batches.or(nano_batches).unwrap_or(TWO),
            seed: own.map_or(1, |it| it.seed),
        },
        lengths,
        nodes: job.spec.nodes,
        processes_per_node: job.spec.procs_per_node,
        in_place: pool.spec.in_place,
        replicas: pool.spec.replicas,
        memory: match (options.memory_gib, server) {
            (Some(gib), _) => gib.get() << 30,
            (None, Some(server)) if pool.spec.replicas > 0 => server.memory_mib.get() << 20,
            _ => 64 << 30,
        },
    })
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
            Ok(Model {
                layers: it.layers,
                hidden: it.width as u64,
                heads: heads(it.query_heads as u16, it.kv_heads as u16, it.head_dim as u16),
                feed_forward: it.feed_forward as u64,
            })
        }
    }
}
