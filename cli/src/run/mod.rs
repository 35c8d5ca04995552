//! `cadre run`: a job with its pool, on this machine.
//!
//! In: [`RunOptions`]. Out: files, a display, and how it ended.
//!
//! ```text
//! manifests ─▶ merged and checked ─▶ directory ─▶ supervisor ──events──▶ files, display ─▶ summary
//!              nothing is started before this is done ┘
//! ```
//!
//! Processes are the supervisor's; what happens to them arrives here as events. When results can no
//! longer be kept, the run is ended as if the user had asked for it.

pub(crate) mod exchange;
pub(crate) mod merge;
mod signals;

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use cadre_crds::manifest::{self, Manifests};
use cadre_crds::validate::{self, Refusal};
use cadre_crds::{AttentionPool, OnPoolLoss, TrainingJob};
use cadre_supervisor::{
    self, Attempt, Interrupt, Level, Limits, Outcome, RunConfig, RunError, RunEvent,
};
use cadre_trainer::corpus::Corpus;
use cadre_trainer::model::Design;
use cadre_worker::profile;

use crate::arguments::{RunOptions, TrainOptions};
use crate::choices::Place;
use crate::face::Face;
use crate::out::directory::Directory;
use crate::out::summary::{End, Ending, Summary};
use crate::out::{self, Output, trace};

/// Events that may wait for the display and the files.
const MAX_EVENTS: usize = 4096;

/// What a program of the user's has until it joins, and after its last step until it ends: it may load a framework, a model and a
/// checkpoint first, and save and evaluate a model last.
const PROGRAM_JOINS_WITHIN: Duration = Duration::from_mins(30);

/// Runs a job to its end.
pub(crate) fn run(options: &RunOptions) -> Result<(), Failure> {
    let Prepared { mut config, job, unigram_entropy, passed_over } = prepare(options)?;
    let directory = Directory::choose(options.out.as_deref(), &job, options.resume)?;
    if let Err(error) = check_files(options, directory.path()) {
        directory.withdraw();
        return Err(error.into());
    }
    config.out = std::path::absolute(directory.path())
        .map_err(|error| refused(format!("{}: {error}", directory.path().display())))?;
    if options.trace.is_some() {
        trace::clear(directory.path())?;
    }
    let mut output = Output::open(directory)?;
    let mut face = Face::new(options.json, config.steps);
    let is_script = config.steps.is_none();
    let mut opening = vec![format!("results go to {}", output.path().display())];
    if !passed_over.is_empty() {
        opening.push(format!("only for a cluster, passed over here: {}", passed_over.join("; ")));
    }
    let Supervised { result, lost, attempts, steps } =
        supervise(config, &opening, &mut output, &mut face);
    let ended_early = lost.is_some() || matches!(result, Err(RunError::BadInput { .. }));
    // What a script has said and written before it failed is all that tells where.
    let is_told = is_script && lost.is_none() && output.has_logs_of_trainers();
    if ended_early && steps == 0 && !is_told {
        face.clear();
        output.withdraw();
        return Err(lost.map_or_else(|| result.expect_err("ended early").into(), Failure::Lost));
    }
    let sample = result.as_ref().ok().and_then(|outcome| outcome.sample.clone());
    let (outcome, message) = match (&result, &lost) {
        (_, Some(error)) => (Ending::Failed, Some(error.to_string())),
        (Ok(_), None) => (Ending::Completed, None),
        (Err(RunError::Interrupted { .. }), None) => (Ending::Interrupted, None),
        (Err(error), None) => (Ending::Failed, Some(error.to_string())),
    };
    let end = End { job, outcome, message, attempts, unigram_entropy, sample };
    let summary = Summary::of(end, output.steps(), output.servers());
    let kept = match lost {
        Some(error) => Err(error),
        None => keep(&mut output, &summary, options.trace.as_deref()),
    };
    face.finish(&summary, output.path());
    kept.map_err(Failure::Lost)?;
    result.map(|_| ()).map_err(Failure::from)
}

/// Refuses files of the user's that the run would write to itself.
fn check_files(options: &RunOptions, out: &Path) -> Result<(), out::Error> {
    if let Some(headers) = &options.headers {
        out::check_headers(headers, out)?;
    }
    match &options.trace {
        Some(trace) => trace::check_name(trace, out),
        None => Ok(()),
    }
}

fn keep(output: &mut Output, summary: &Summary, file: Option<&Path>) -> Result<(), out::Error> {
    if let Some(file) = file {
        trace::merge(output.path(), output.started(), file)?;
    }
    output.finish(summary)
}

/// A run whose manifests and options have been checked.
struct Prepared {
    /// Settings of the run; `out` is chosen later.
    config: RunConfig,
    job: String,
    /// Entropy of the corpus of `cadre train`.
    unigram_entropy: Option<f64>,
    passed_over: Vec<String>,
}

/// Reads and checks everything that can be checked before a process starts or a file is made.
fn prepare(options: &RunOptions) -> Result<Prepared, Failure> {
    let Manifests { mut pool, mut job, cluster_only } =
        manifest::load(&options.files).map_err(|error| refused(error.to_string()))?;
    let files: Vec<_> = options.files.iter().map(|it| it.display().to_string()).collect();
    let named = |kind: &str, name: Option<&String>| {
        let name = name.cloned().unwrap_or_default();
        let start = format!("{}: {kind} {name}", files.join(", "));
        move |refusal: Refusal| refused(format!("{start}: {refusal}"))
    };
    let of_pool = named(AttentionPool::KIND, pool.metadata.name.as_ref());
    let of_job = named(TrainingJob::KIND, job.metadata.name.as_ref());
    validate::pool_on_one_machine(&pool).map_err(&of_pool)?;
    validate::job_on_one_machine(&job).map_err(&of_job)?;
    let trainer = merge::trainer(&mut job, options).map_err(&of_job)?;
    let server = merge::server(&mut pool, options).map_err(&of_pool)?;
    let pooled = options.attention == Place::Pool && pool.spec.replicas > 0;
    exchange::check_exchange(&job, trainer.as_ref(), pooled.then_some(&server)).map_err(&of_job)?;

    // The first rank of another program names its heads when it joins. A replayed log of headers
    // has its own costs and links.
    if let Some(trainer) = trainer.as_ref().filter(|_| options.headers.is_none()) {
        let built = Design::from(trainer.model.clone()).build();
        let (_, stack) = built.map_err(|error| refused(error.to_string()))?;
        let kinds = stack.core().kinds().iter().map(|it| (it.heads.dim, None));
        let trainers = job.spec.trainers().try_into().unwrap_or(u16::MAX);
        profile::planned(job.spec.attention.profile.as_deref(), kinds, trainers)
            .map_err(|error| refused(error.to_string()))?;
    }
    let began = Instant::now();
    let corpus = trainer.as_ref().map(corpus).transpose()?;
    // Each trainer reads the documents before it registers, all of them at a time.
    let reading = 2 * began.elapsed() * job.spec.trainers();
    let steps = trainer.as_ref().map(|it| it.steps.get());
    if let Some(headers) = &options.headers {
        is_text("--headers", headers, "name a file that is")?;
        let log = cadre_worker::headers::read(headers);
        let log = log.map_err(|error| refused(error.to_string()))?;
        if let Some(steps) = steps {
            // A run that goes on needs those from its checkpoint on, wherever that is.
            let covered = log.covers(if options.resume { steps - 1 } else { 0 }..steps);
            covered.map_err(|error| refused(error.to_string()))?;
        }
        // Where trainers may take their work over, they do.
        let waits = job.spec.attention.on_pool_loss != OnPoolLoss::Local;
        if let Some(step) = log.needs_servers().filter(|_| !pooled && waits) {
            return Err(refused(format!(
                "--headers {}: step {step} was planned for dedicated servers, and this run has none; leave out --attention local, or give spec.replicas of the pool",
                headers.display()
            )));
        }
    }
    let name = job.metadata.name.clone().expect("manifests without a name are refused");
    let out = options.out.clone().unwrap_or_default();
    let absolute = std::path::absolute(options.out.as_deref().unwrap_or(Path::new(".")))
        .map_err(|error| refused(format!("--out {}: {error}; name a directory", out.display())))?;
    is_text("--out", &absolute, "name a directory by a whole path that is")?;
    if let Some(file) = &options.trace {
        trace::check(file, &out)?;
    }
    let program = std::env::current_exe()
        .map_err(|error| refused(format!("cannot find the cadre program: {error}")))?;
    let config = RunConfig {
        pool,
        job,
        steps,
        out,
        trace: options.trace.is_some(),
        resume: options.resume,
        attention: options.attention.into(),
        headers: options.headers.clone(),
        faults: options.faults.clone(),
        replace: !options.no_replace,
        program,
        limits: match trainer {
            Some(_) => {
                let limits = Limits::default();
                Limits { register: limits.register.saturating_add(reading), ..limits }
            }
            None => Limits {
                register: PROGRAM_JOINS_WITHIN,
                interrupt: PROGRAM_JOINS_WITHIN,
                last_words: PROGRAM_JOINS_WITHIN,
                farewell: PROGRAM_JOINS_WITHIN,
                ..Limits::default()
            },
        },
    };
    config.check(0).map_err(|error| refused(error.to_string()))?;
    let unigram_entropy = corpus.map(|it| it.unigram_entropy());
    Ok(Prepared { config, job: name, unigram_entropy, passed_over: cluster_only })
}

/// Refuses a path that cannot be told to workers, who are told all in UTF-8.
fn is_text(option: &str, path: &Path, remedy: &str) -> Result<(), Failure> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(refused(format!("{option} {} is not UTF-8; {remedy}", path.display()))),
    }
}

/// The documents that a trainer learns from.
fn corpus(trainer: &TrainOptions) -> Result<Corpus, Failure> {
    let corpus = Corpus::read(&trainer.data).map_err(|error| refused(error.to_string()))?;
    // Sizes that do not fit each other are refused where the design is built.
    if let Ok((model, _)) = Design::from(trainer.model.clone()).build() {
        corpus.fits(model.vocabulary).map_err(|error| refused(error.to_string()))?;
    }
    match &trainer.validate {
        Some(held) => {
            let split = held.split(corpus).map_err(|error| refused(error.to_string()));
            split.map(|(train, _)| train)
        }
        None => Ok(corpus),
    }
}

/// What came of the supervisor's run.
struct Supervised {
    result: Result<Outcome, RunError>,
    /// Why results could not be kept.
    lost: Option<out::Error>,
    /// Starts of the trainers.
    attempts: u32,
    /// Steps that were done, those of earlier runs not included.
    steps: u64,
}

/// Drives the supervisor. Prints `opening` once the run has begun.
fn supervise(
    config: RunConfig,
    opening: &[String],
    output: &mut Output,
    face: &mut Face,
) -> Supervised {
    let (sender, events) = sync_channel(MAX_EVENTS);
    let interrupt = Interrupt::default();
    let failed = |message: String| Err(RunError::JobFailed { message, log: Vec::new() });
    let stillborn =
        |message| Supervised { result: failed(message), lost: None, attempts: 0, steps: 0 };
    if let Err(error) = signals::listen(interrupt.clone()) {
        return stillborn(format!("cannot listen to signals: {error}"));
    }
    let raised = interrupt.clone();
    // A thread of its own that lives as long as the workers: they die with it.
    let run = std::thread::Builder::new()
        .name("supervisor".into())
        .spawn(move || cadre_supervisor::run(config, sender, &raised));
    let run = match run {
        Ok(run) => run,
        Err(error) => return stillborn(format!("cannot start a thread: {error}")),
    };
    let (mut lost, mut attempts, mut steps) = (None, 0, 0);
    let mut opening = opening.iter();
    for event in events {
        for text in opening.by_ref() {
            face.notice(Level::Information, text);
        }
        if let RunEvent::Attempt(attempt) = &event {
            attempts = attempt.number;
        }
        steps += u64::from(matches!(event, RunEvent::Step(_)));
        if lost.is_none()
            && let Err(error) = output.record(&event)
        {
            face.notice(Level::Error, &error.to_string());
            lost = Some(error);
            interrupt.raise();
        }
        face.event(&event);
        if let RunEvent::Attempt(Attempt { number: 1, first_step, .. }) = &event {
            for text in output.lost(*first_step) {
                face.notice(Level::Warning, &text);
            }
        }
    }
    let result = run.join().unwrap_or_else(|_| failed("the supervisor panicked".into()));
    Supervised { result, lost, attempts, steps }
}

/// Why `cadre run` does not end well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// What the user gave cannot be run; nothing was started.
    #[error("{0}")]
    Refused(String),
    /// The supervisor's account.
    #[error("{0}")]
    Run(RunError),
    /// Results could not be kept.
    #[error("{0}")]
    Lost(out::Error),
}

impl Failure {
    /// Exit code of the command.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // A full disk, most often: as for a checkpoint that cannot be written, the user has to act.
            Self::Refused(_) | Self::Lost(_) => 2,
            Self::Run(error) => error.exit_code(),
        }
    }

    /// Last lines of the log of the worker that failed.
    pub(crate) fn log(&self) -> &[String] {
        match self {
            Self::Run(RunError::JobFailed { log, .. }) => log,
            Self::Run(RunError::BadInput { .. } | RunError::Interrupted { .. })
            | Self::Refused(_)
            | Self::Lost(_) => &[],
        }
    }
}

/// Before the start, files that cannot be made are bad input.
impl From<out::Error> for Failure {
    fn from(error: out::Error) -> Self {
        Self::Refused(error.to_string())
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self::Run(error)
    }
}

fn refused(message: String) -> Failure {
    Failure::Refused(message)
}
