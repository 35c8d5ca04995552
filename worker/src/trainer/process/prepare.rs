//! How a trainer starts: reads its input, joins the job, makes or loads its state, starts its threads.
//!
//! In: [`TrainArgs`] and the environment contract. Out: a [`Process`] that has not run a step, or why not.
//! It does not wait for the other trainers.
//!
//! Invariant: bad input is refused before the IO thread starts, and the conductor is in trainer 0 only.

use std::net::TcpListener;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};
use cadre_kernels::{Engine, Linear};
use cadre_protocol::server::Host;
use cadre_protocol::{Nanos, TrainerId};

use super::record::Record;
use super::{Process, STOPPED, TrainArgs};
use crate::attach::{Attached, Contract, attach, protocol_settings};
use crate::compute::Compute;
use crate::conduct::{Draft, Standby};
use crate::header::{Log, Placement};
use crate::io::conducting::Conducting;
use crate::io::rows::Rows;
use crate::io::shared::{Shared, peer_of};
use crate::io::tasks::Tasks;
use crate::io::{After, Io, Outlets, Request};
use crate::launch::Resident;
use crate::process::Termination;
use crate::supervisor::{AttentionPlace, Settings};
use crate::trainer::checkpoint::{self, CheckpointError, State, Values};
use crate::trainer::corpus::Corpus;
use crate::trainer::loader::{self, Lengths, Loader};
use crate::trainer::model::{Config, Model};
use crate::trainer::optimizer::{AdamW, Hyper, Schedule};
use crate::trainer::session::Session;
use crate::trainer::step::Trainer;

/// Memory of a trainer for rows of others, in place and standing by.
const MEMORY: u64 = 4 << 30;

/// Why a trainer does not start.
pub(super) enum Failure {
    BadInput(String),
    Other(anyhow::Error),
}

fn bad_input(error: impl std::fmt::Display) -> Failure {
    Failure::BadInput(error.to_string())
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl Process {
    /// Reads the input, joins the job and starts the threads.
    pub(super) fn prepare(args: TrainArgs) -> Result<Self, Failure> {
        let config = Config::preset(&args.model).map_err(bad_input)?;
        let corpus = Arc::new(Corpus::read(&args.data).map_err(bad_input)?);
        let lengths = match &args.lengths {
            Some(path) => Lengths::read(path).map_err(bad_input)?,
            None => Lengths::shipped(),
        };
        let contract = match Contract::from_env() {
            Err(error) if error.is_bad_input() => return Err(bad_input(error)),
            contract => contract.context("the environment of this trainer")?,
        };
        let termination = Termination::default();
        if contract.is_pod() {
            termination.listen(STOPPED.into()).context("cannot be ended in peace")?;
        }
        // Before the controller hears of this trainer: bits depend on the engine.
        let engine = Engine::choose(args.engine, args.threads).map_err(bad_input)?;
        tracing::info!("core attention in place: {}", engine.description());
        let numerics = engine.numerics_id();
        let listener = TcpListener::bind((contract.host, 0)).map_err(|source| {
            bad_input(format!("no port for the all-reduce: {source}; end programs that hold ports"))
        })?;
        let ring = listener.local_addr().context("cannot listen for the all-reduce")?.to_string();
        let attached = match attach(&contract, (&engine, args.exchange), MEMORY, &ring) {
            Err(error) if error.is_bad_input() => return Err(bad_input(error)),
            attached => attached.context("cannot join the job")?,
        };
        let settings = attached.settings.clone();
        let trainers = NonZeroU32::new(settings.trainers.into())
            .ok_or_else(|| anyhow!("the controller says that the job has no trainers"))?;
        let shape = loader::Settings {
            trainers,
            tokens: args.tokens,
            nano_batches: args.nano_batches,
            cap: args.cap,
            seed: args.seed,
        };
        let fresh = state_of(&args, config, trainers, &corpus, numerics);
        let loader = Loader::new(corpus, lengths, shape).map_err(bad_input)?;
        let model = Model::new(config, args.cap.get(), args.threads);
        let weights = model.parameters().weights();
        let linear = Linear::choose(args.engine, &engine, args.threads, &weights);
        let linear = linear.map_err(|why| bad_input(format!("--engine gpu: {why}")))?;
        tracing::info!("linear layers: {}", linear.description());
        let (trainer, state) =
            begin(&args, model.with_linear(linear), fresh, &settings).map_err(bad_input)?;
        let conducting = |now| -> Result<Conducting, Failure> {
            let draft = draft(&args, &config, &settings, &state.numerics).map_err(bad_input)?;
            let steps = (state.step, args.steps.get());
            Ok(Conducting::new(draft, protocol_settings(&settings), steps, &settings, now))
        };
        let keeps = contract.is_pod() && contract.me.index == 0;
        let record = keeps.then(|| Record::open(&settings.checkpoints, state.step));
        let record = record.transpose().map_err(bad_input)?;
        let (control, tracer) = (attached.control.sender.clone(), attached.tracer.clone());
        let rank = contract.me.index;
        let (session, io) = start_threads(attached, &contract, engine, conducting)?;
        Ok(Self {
            args,
            rank,
            loader,
            trainer,
            state,
            settings,
            session,
            listener,
            io,
            control,
            tracer,
            termination,
            record,
            pod: contract.is_pod(),
        })
    }
}

/// The state before the first step.
fn state_of(
    args: &TrainArgs,
    config: Config,
    trainers: NonZeroU32,
    corpus: &Corpus,
    numerics: String,
) -> State {
    State {
        step: 0,
        model: config,
        trainers: trainers.get(),
        nano_batches: args.nano_batches.get(),
        tokens: args.tokens.get(),
        cap: args.cap.get(),
        seed: args.seed,
        corpus: format!("{:016x}", corpus.digest()),
        numerics,
        slots: String::new(),
        loss_bits: String::new(),
        header: String::new(),
    }
}

/// The trainer at the start of the job, or where the checkpoint to resume from left it.
fn begin(
    args: &TrainArgs,
    model: Model,
    fresh: State,
    settings: &Settings,
) -> Result<(Trainer, State), CheckpointError> {
    let schedule = Schedule { peak: args.lr, warmup: args.warmup, steps: args.steps.get() };
    let layout = model.parameters();
    let (parameters, optimizer, state) = match &settings.resume {
        Some(folder) => {
            let (found, values) = checkpoint::load(folder, &fresh, layout)?;
            let Values { parameters, first, second } = values;
            let optimizer = AdamW::resume(Hyper::new(schedule), first, second);
            (parameters, optimizer, State { numerics: fresh.numerics, ..found })
        }
        None => (layout.initial(args.seed), AdamW::new(Hyper::new(schedule), layout), fresh),
    };
    Ok((Trainer::new(model, parameters, optimizer), state))
}

/// Starts the IO thread, with the conductor in trainer 0, and the rescue thread.
fn start_threads(
    attached: Attached,
    contract: &Contract,
    engine: Engine,
    conducting: impl FnOnce(Nanos) -> Result<Conducting, Failure>,
) -> Result<(Session, JoinHandle<After>), Failure> {
    let Attached { provider, control, settings, tracer, conductor } = attached;
    let engine = engine.reproducible(settings.reproducible).context("the GPU of this trainer")?;
    let beside = engine.another().context("the GPU of this trainer")?;
    let place = provider.place().another().context("the GPU of this trainer")?;
    let launches = |engine: Engine| -> anyhow::Result<(Engine, Option<Resident>)> {
        let resident = Resident::new(&engine, &place).context("the GPU of this trainer")?;
        Ok((engine, resident))
    };
    let (launches, beside) = (launches(engine)?, launches(beside)?);
    let mut shared = Shared::new(peer_of(contract.me), provider, tracer.clone());
    if let Some((id, address)) = conductor {
        shared.know(id, &address);
    }
    let (me, protocol) = (TrainerId(contract.me.index), protocol_settings(&settings));
    let rows = Rows::new(me, protocol, shared.now());
    let tasks = Tasks::new(Host::InPlace(me), MEMORY, protocol, shared.now());
    let conducting = (me.0 == 0).then(|| conducting(shared.now())).transpose()?;
    let (main, notices) = channel();
    let (rescue, rescued) = channel();
    let outlets = Outlets { main, rescue: Some(rescue) };
    let machines = (Some(rows), Some(tasks), conducting);
    let (io, handle) =
        Io::new(shared, machines, control, outlets).context("cannot start the planning thread")?;
    let io = std::thread::Builder::new()
        .name("io".into())
        .spawn(move || io.run())
        .context("cannot start the io thread")?;
    let rescuer = Compute::new(beside, "rescue", handle.clone(), tracer.clone());
    let ender = handle.clone();
    std::thread::Builder::new()
        .name("rescue".into())
        .spawn(move || {
            if let Err(why) = rescuer.serve(&rescued) {
                ender.send(Request::Fail(why));
            }
        })
        .context("cannot start the rescue thread")?;
    let compute = Compute::new(launches, "main", handle.clone(), tracer.clone());
    Ok((Session::new(me, handle, notices, (compute, place), tracer), io))
}

/// What the conductor knows of the job.
fn draft(
    args: &TrainArgs,
    config: &Config,
    settings: &Settings,
    numerics: &str,
) -> Result<Draft, crate::header::Error> {
    let placement = match settings.attention {
        AttentionPlace::Pool => Placement::Pool,
        AttentionPlace::Local => Placement::Local,
    };
    let standby = match settings.on_pool_loss {
        cadre_crds::OnPoolLoss::Local => Standby::Yes,
        cadre_crds::OnPoolLoss::Wait | cadre_crds::OnPoolLoss::Fail => Standby::No,
    };
    Ok(Draft {
        trainers: settings.trainers,
        layers: config.layers as u16,
        heads: cadre_planner::Heads {
            query: config.query_heads as u16,
            kv: config.kv_heads as u16,
            dim: config.head_dim as u16,
        },
        wire: settings.wire,
        seed: args.seed,
        numerics: numerics.to_owned(),
        reproducible: settings.reproducible,
        placement,
        costs: cadre_planner::Costs::default(),
        standby,
        trainer_memory: MEMORY,
        replay: settings.headers.as_deref().map(Log::read).transpose()?,
        header: None,
        memories: std::collections::BTreeMap::new(),
    })
}
