//! How a trainer starts: reads its input, joins the job, makes or loads its state.
//!
//! In: [`TrainArgs`] and the environment contract. Out: a [`Process`] that has not run a step, or why not.
//! It does not wait for the other trainers.
//!
//! Invariant: bad input is refused before the session's threads start.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use cadre_kernels::{Engine, Linear};
use cadre_worker::session::process::Termination;
use cadre_worker::session::{
    Contract, Join, JoinError, Session, Settings, Turns, links::Greeter, notice,
};

use super::record::Record;
use super::stuck::Noticed;
use super::{ENDED_BY_SIGTERM, Process, TrainArgs, begins};
use crate::checkpoint::{self, CheckpointError, State, Values};
use crate::corpus::Corpus;
use crate::loader::{self, Lengths, Loader};
use crate::model::{Config, Model, Stack};
use crate::optimizer::{AdamW, Hyper, Schedule};
use crate::step::Trainer;
use crate::turns::accumulated;
use crate::validation::Validation;

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

impl From<JoinError> for Failure {
    fn from(error: JoinError) -> Self {
        if error.is_bad_input() {
            bad_input(error)
        } else {
            Self::Other(anyhow::Error::new(error).context("cannot join the job"))
        }
    }
}

impl Process {
    /// Reads the input and joins the job.
    pub(super) fn prepare(args: TrainArgs) -> Result<Self, Failure> {
        let (config, stack) = args.design.build().map_err(bad_input)?;
        let turns = accumulated(args.nano_batches, args.accumulate, stack.core());
        let turns = turns.map_err(bad_input)?;
        let corpus = Corpus::read(&args.data).map_err(bad_input)?;
        corpus.fits(config.vocabulary).map_err(bad_input)?;
        let (corpus, held) = match &args.validate {
            Some(it) => it.split(corpus).map(|(train, held)| (train, Some(held))),
            None => Ok((corpus, None)),
        }
        .map_err(bad_input)?;
        if let Some(held) = &held {
            held.fits(config.vocabulary).map_err(bad_input)?;
        }
        let corpus = Arc::new(corpus);
        let validation = held.map(|it| Validation::new(it, args.cap, args.validate_tokens));
        let lengths = match &args.lengths {
            Some(path) => Lengths::read(path).map_err(bad_input)?,
            None => Lengths::shipped(),
        };
        let contract = match Contract::from_env() {
            Err(error) if error.is_bad_input() => return Err(bad_input(error)),
            contract => contract.context("the environment of this trainer")?,
        };
        let termination = Termination::default();
        termination.listen(ENDED_BY_SIGTERM.into()).context("cannot be ended in peace")?;
        let listener = Greeter::listen(contract.host).map_err(|source| {
            bad_input(format!("no port for the all-reduce: {source}; end programs that hold ports"))
        })?;
        let address = listener.local_addr().context("cannot listen for the all-reduce")?;
        let finds = contract.finds_checkpoint();
        let resume = if finds { begins::with(&contract).map_err(bad_input)? } else { None };
        let memory = args.memory_mib.map_or(contract.memory_mib, NonZeroU32::get);
        let mut begun = None;
        let first = |settings: &Settings, engine: &Engine| {
            let input = (&args, &turns, (config, stack.clone()), Arc::clone(&corpus));
            let it = Begun::new(input, &contract, settings, engine, lengths)?;
            let step = it.state.step;
            begun = Some(it);
            Ok(step)
        };
        let join = Join {
            layers: stack.core().clone(),
            kv_heads: args.kv_heads,
            steps: Some(args.steps.get()),
            wire: None,
            seed: args.seed,
            engine: args.engine,
            gpu: args.gpu,
            threads: args.threads,
            memory: u64::from(memory) << 20,
            exchange: args.exchange,
            address: address.to_string(),
            resume,
            first: Box::new(first),
        };
        let session = Session::join(&contract, join)?;
        let Some(Begun { loader, trainer, state, record, earlier }) = begun else {
            return Err(anyhow!("the session did not ask for the first step").into());
        };
        let earlier = earlier.map(|it| {
            let path = it.display();
            format!("{path} is of an earlier run of this job, which starts from the beginning; remove it, or choose another folder for checkpoints")
        });
        let told = earlier.or_else(|| compare(session.settings(), &args));
        if let Some(text) = told.filter(|_| session.rank() == 0) {
            tracing::warn!("{text}");
            session.tell(notice::Level::Warning, text, notice::Event::Unspecified);
        }
        let (shares, listener) = (BTreeMap::new(), Some(listener));
        let noticed = Noticed::default();
        Ok(Self {
            args,
            loader,
            turns,
            shares,
            trainer,
            validation,
            state,
            last: None,
            session,
            noticed,
            listener,
            termination,
            record,
        })
    }
}

/// What a trainer has before its first step.
struct Begun {
    loader: Loader,
    trainer: Trainer,
    state: State,
    record: Option<Record>,
    /// The newest checkpoint of an earlier run, where this one starts from the beginning in its folder.
    earlier: Option<PathBuf>,
}

impl Begun {
    /// Makes the trainer, or loads it from the checkpoint that the job names. What it refuses is
    /// bad input of the user.
    fn new(
        (args, turns, (config, stack), corpus): (&TrainArgs, &Turns, (Config, Stack), Arc<Corpus>),
        contract: &Contract,
        settings: &Settings,
        engine: &Engine,
        lengths: Lengths,
    ) -> Result<Self, String> {
        fn text(error: impl std::fmt::Display) -> String {
            error.to_string()
        }
        let trainers = NonZeroU32::new(settings.trainers.into())
            .ok_or("the controller says that the job has no trainers")?;
        let shape = loader::Settings {
            trainers,
            tokens: args.tokens,
            nano_batches: NonZeroU32::new(turns.nanos().into()).unwrap_or(NonZeroU32::MIN),
            cap: args.cap,
            seed: args.seed,
        };
        // Half a checkpoint would otherwise fill the folder for ever.
        match checkpoint::sweep(&settings.checkpoints, contract.me.index.into()) {
            Ok(0) => {}
            Ok(swept) => tracing::info!("removed {swept} folders of half-written checkpoints"),
            Err(error) => tracing::warn!("half-written checkpoints cannot be removed: {error}"),
        }
        let sizes = (config, stack.clone());
        let fresh = state_of(args, sizes, trainers, (&corpus, &lengths), engine.numerics_id());
        // Before anything is written there.
        let earlier = match &settings.resume {
            None => checkpoint::earlier(&settings.checkpoints, &fresh).map_err(text)?,
            Some(_) => None,
        };
        let loader = Loader::new(corpus, lengths, shape).map_err(text)?;
        let model = Model::new(config, stack, args.cap.get(), args.threads);
        let weights = model.parameters().weights();
        let linear = Linear::choose(args.engine, engine, args.threads, &weights)
            .map_err(|why| format!("--engine gpu: {why}"))?;
        tracing::info!("linear layers: {}", linear.description());
        let (trainer, state) = begin(args, model.with_linear(linear), fresh, settings)
            .map_err(|why| begins::refused(contract, settings.resume.as_deref(), &why))?;
        let keeps = contract.is_pod() && contract.me.index == 0;
        let record = keeps
            .then(|| Record::open(&settings.checkpoints, state.step, settings.resume.as_deref()));
        let record = record.transpose().map_err(text)?;
        Ok(Self { loader, trainer, state, record, earlier })
    }
}

/// The state before the first step.
fn state_of(
    args: &TrainArgs,
    (model, layers): (Config, Stack),
    trainers: NonZeroU32,
    (corpus, lengths): (&Corpus, &Lengths),
    numerics: String,
) -> State {
    State {
        step: 0,
        model,
        layers,
        trainers: trainers.get(),
        nano_batches: args.nano_batches.get(),
        accumulate: args.accumulate.get().into(),
        tokens: args.tokens.get(),
        cap: args.cap.get(),
        seed: args.seed,
        corpus: documents(corpus, lengths),
        schedule: schedule(args).to_string(),
        numerics,
        slots: String::new(),
        loss_bits: String::new(),
        header: String::new(),
    }
}

/// Names the corpus, and the list that the lengths of its documents are drawn from where that is not the usual one.
fn documents(corpus: &Corpus, lengths: &Lengths) -> String {
    let corpus = format!("{:016x}", corpus.digest());
    if *lengths == Lengths::shipped() {
        corpus
    } else {
        format!("{corpus} with lengths {:016x}", lengths.digest())
    }
}

fn schedule(args: &TrainArgs) -> Schedule {
    Schedule { peak: args.lr, warmup: args.warmup, steps: args.steps.get() }
}

/// The notice that the learning rate goes another way than in the run that wrote the checkpoint;
/// none where it does not.
fn compare(settings: &Settings, args: &TrainArgs) -> Option<String> {
    let found = checkpoint::load_state(settings.resume.as_ref()?).ok()?;
    let now = schedule(args).to_string();
    (found.schedule != now).then(|| {
        format!(
            "the learning rate goes another way from step {} on than in the run that wrote the checkpoint: {now}; it was {}",
            found.step, found.schedule
        )
    })
}

/// The trainer at the start of the job, or where the checkpoint to resume from left it.
fn begin(
    args: &TrainArgs,
    model: Model,
    fresh: State,
    settings: &Settings,
) -> Result<(Trainer, State), CheckpointError> {
    let (schedule, layout) = (schedule(args), model.parameters());
    let (parameters, optimizer, state) = match &settings.resume {
        Some(folder) => {
            let (found, values) = checkpoint::load(folder, &fresh, layout)?;
            let Values { parameters, first, second } = values;
            let optimizer = AdamW::resume(Hyper::new(schedule), first, second);
            let State { schedule, numerics, .. } = fresh;
            (parameters, optimizer, State { schedule, numerics, ..found })
        }
        None => (layout.initial(args.seed), AdamW::new(Hyper::new(schedule), layout), fresh),
    };
    Ok((Trainer::new(model, parameters, optimizer), state))
}
