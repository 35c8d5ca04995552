//! The process of a trainer: joins the job, runs steps, writes checkpoints, leaves.
//!
//! In: the environment contract and [`TrainArgs`]. Out: an exit code: 0, 2 for bad input, 3 when the job
//! cannot go on. Trainer 0 also hosts the conductor, in its IO thread.
//!
//! Invariant: parameters change only at the end of a step that every trainer finished, so after any
//! failure each survivor can write the checkpoint of the last completed step, with the same bytes.

use std::net::{SocketAddr, TcpListener};
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use cadre_control::{client, proto};
use cadre_kernels::{Threads, numerics_id};
use cadre_protocol::TrainerId;
use cadre_protocol::server::Host;

use super::checkpoint::{self, State, Values};
use super::corpus::Corpus;
use super::loader::{self, Lengths, Loader};
use super::model::{Config, Model};
use super::optimizer::{AdamW, Hyper, Schedule};
use super::ring::{Place, Ring};
use super::session::{Next, Session};
use super::step::{StepError, Track, Trainer};
use crate::attach::{Attached, Contract, attach, protocol_settings};
use crate::compute::Compute;
use crate::conduct::{Draft, Standby};
use crate::header::{Log, Placement};
use crate::io::conducting::Conducting;
use crate::io::envelope::{Ending, Lengths as Told, NanoLengths, StepDone};
use crate::io::rows::Rows;
use crate::io::shared::{Shared, peer_of};
use crate::io::tasks::Tasks;
use crate::io::{Io, Outlets, Request};
use crate::planned::PlannedStep;
use crate::supervisor::{AttentionPlace, Settings};
use crate::trace::{Activity, Tracer};

/// What `cadre train` is given.
#[derive(Clone, Debug)]
pub struct TrainArgs {
    /// Folder of documents, one a file.
    pub data: PathBuf,
    /// Name of the model's sizes.
    pub model: String,
    /// Steps of the job.
    pub steps: NonZeroU64,
    /// Rows of this trainer in each nano-batch.
    pub tokens: NonZeroU32,
    /// Longest document, in rows.
    pub cap: NonZeroU32,
    /// Lengths that documents are cut at; the shipped list if absent.
    pub lengths: Option<PathBuf>,
    /// Nano-batches of a step.
    pub nano_batches: NonZeroU32,
    /// Highest learning rate.
    pub lr: f32,
    /// Steps until it is reached.
    pub warmup: u64,
    /// Seed of weights and data.
    pub seed: u64,
    /// Threads that compute.
    pub threads: Threads,
    /// Steps between checkpoints; 0: at the end only.
    pub checkpoint_every: u64,
    /// Start of the sample text.
    pub prompt: String,
}

/// Memory of a trainer for rows of others, in place and standing by.
const MEMORY: u64 = 4 << 30;
/// Longest wait for all trainers to listen.
const ASSEMBLE: Duration = Duration::from_mins(1);
/// Longest wait for the reason of a failure that showed in the all-reduce first.
const REASON: Duration = Duration::from_secs(3);
/// Longest wait for the controller to read the last words.
const FAREWELL: Duration = Duration::from_secs(2);
/// Length of the sample text, in bytes.
const SAMPLE: usize = 160;

/// Trains until the job ends.
///
/// # Errors
///
/// The job failed, or this process cannot join it: exit code 3. Bad input is printed here: 2.
pub fn trainer_main(args: TrainArgs) -> anyhow::Result<ExitCode> {
    crate::process::arm_parent_death()?;
    match Process::prepare(args) {
        Ok(process) => process.run(),
        Err(Failure::BadInput(message)) => {
            eprintln!("error: {message}");
            Ok(ExitCode::from(2))
        }
        Err(Failure::Other(error)) => Err(error),
    }
}

/// Why a trainer does not start.
enum Failure {
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

struct Process {
    args: TrainArgs,
    rank: u16,
    loader: Loader,
    trainer: Trainer,
    state: State,
    settings: Settings,
    session: Session,
    listener: TcpListener,
    io: std::thread::JoinHandle<()>,
    control: client::Sender,
    tracer: Tracer,
}

impl Process {
    fn prepare(args: TrainArgs) -> Result<Self, Failure> {
        let config = Config::preset(&args.model).map_err(bad_input)?;
        let corpus = Arc::new(Corpus::read(&args.data).map_err(bad_input)?);
        let lengths = match &args.lengths {
            Some(path) => Lengths::read(path).map_err(bad_input)?,
            None => Lengths::shipped(),
        };
        let contract = Contract::from_env().context("the environment of this trainer")?;
        let listener =
            TcpListener::bind("127.0.0.1:0").context("cannot listen for the all-reduce")?;
        let ring = listener.local_addr().context("cannot listen for the all-reduce")?.to_string();
        let numerics = numerics_id();
        let attached =
            attach(&contract, &numerics, MEMORY, &ring).context("cannot join the job")?;
        let Attached { provider, control, settings, tracer, conductor } = attached;
        let trainers = NonZeroU32::new(settings.trainers.into())
            .ok_or_else(|| anyhow!("the controller says that the job has no trainers"))?;
        let shape = loader::Settings {
            trainers,
            tokens: args.tokens,
            nano_batches: args.nano_batches,
            cap: args.cap,
            seed: args.seed,
        };
        let corpus_digest = format!("{:016x}", corpus.digest());
        let loader = Loader::new(corpus, lengths, shape).map_err(bad_input)?;
        let model = Model::new(config, args.cap.get(), args.threads);
        let schedule = Schedule { peak: args.lr, warmup: args.warmup, steps: args.steps.get() };
        let mut state = State {
            step: 0,
            model: config,
            trainers: trainers.get(),
            nano_batches: args.nano_batches.get(),
            tokens: args.tokens.get(),
            cap: args.cap.get(),
            seed: args.seed,
            corpus: corpus_digest,
            numerics: numerics.clone(),
            slots: String::new(),
            loss_bits: String::new(),
            header: String::new(),
        };
        let layout = model.parameters();
        let (parameters, optimizer) = match &settings.resume {
            Some(folder) => {
                let (found, values) =
                    checkpoint::load(folder, &state, layout).map_err(bad_input)?;
                state = State { numerics: numerics.clone(), ..found };
                let Values { parameters, first, second } = values;
                (parameters, AdamW::resume(Hyper::new(schedule), first, second))
            }
            None => (layout.initial(args.seed), AdamW::new(Hyper::new(schedule), layout)),
        };
        let trainer = Trainer::new(model, parameters, optimizer);

        let mut shared = Shared::new(peer_of(contract.me), provider, tracer.clone());
        if let Some((id, address)) = conductor {
            shared.know(id, &address);
        }
        let rank = contract.me.index;
        let (me, protocol) = (TrainerId(rank), protocol_settings(&settings));
        let rows = Rows::new(me, protocol, shared.now());
        let tasks = Tasks::new(Host::InPlace(me), MEMORY, protocol, shared.now());
        let conducting = if rank == 0 {
            let draft = draft(&args, &config, &settings, &numerics).map_err(bad_input)?;
            let steps = (state.step, args.steps.get());
            Some(Conducting::new(draft, protocol, steps, &settings.faults, shared.now()))
        } else {
            None
        };
        let (main, notices) = channel();
        let (rescue, rescued) = channel();
        let outlets = Outlets { main, rescue: Some(rescue) };
        let sender = control.sender.clone();
        let machines = (Some(rows), Some(tasks), conducting);
        let (io, handle) = Io::new(shared, machines, control, outlets)
            .context("cannot start the planning thread")?;
        let io = std::thread::Builder::new()
            .name("io".into())
            .spawn(move || io.run())
            .context("cannot start the io thread")?;
        let rescuer = Compute::new(args.threads, "rescue", handle.clone(), tracer.clone());
        std::thread::Builder::new()
            .name("rescue".into())
            .spawn(move || rescuer.serve(&rescued))
            .context("cannot start the rescue thread")?;
        let compute = Compute::new(args.threads, "main", handle.clone(), tracer.clone());
        let session = Session::new(me, handle, notices, compute, tracer.clone());
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
            control: sender,
            tracer,
        })
    }

    fn run(mut self) -> anyhow::Result<ExitCode> {
        let ending = match self.connect_ring() {
            Ok(mut ring) => self.train(&mut ring),
            Err(ending) => ending,
        };
        let outcome = self.close(ending);
        self.session.handle().send(Request::Leave);
        let finished = outcome.report();
        if self.control.send(finished).is_ok() {
            // The exit code says it too, if the controller is away.
            self.control.leave(FAREWELL).ok();
        }
        if self.io.join().is_err() {
            anyhow::bail!("the io thread of trainer {} panicked", self.rank);
        }
        match outcome.error {
            Some(message) if outcome.code == 3 => Err(anyhow!(message)),
            Some(message) => {
                eprintln!("error: {message}");
                Ok(ExitCode::from(outcome.code))
            }
            None => Ok(ExitCode::SUCCESS),
        }
    }

    fn connect_ring(&mut self) -> Result<Ring, Ending> {
        let failed = |reason: String| Ending::Failed { reason, bad_input: false };
        let rings = self.session.rings(ASSEMBLE).map_err(|ended| {
            let late =
                || failed(format!("not all trainers were there after {} s", ASSEMBLE.as_secs()));
            ended.unwrap_or_else(late)
        })?;
        let world = usize::from(self.settings.trainers);
        let next = &rings[(usize::from(self.rank) + 1) % world];
        let next: SocketAddr = next
            .parse()
            .map_err(|_| failed(format!("{next:?} is no address for the all-reduce")))?;
        let token = xxhash_rust::xxh3::xxh3_64(self.settings.job.as_bytes())
            .wrapping_add(self.settings.attempt.into());
        let place = Place { rank: self.rank.into(), world, token };
        // A step may wait for the pool, and for a trainer that computes bundles of lost servers.
        let patience = Duration::from_secs(u64::from(self.settings.pool_wait_seconds) + 300);
        Ring::connect(place, &self.listener, next, ASSEMBLE, patience)
            .map_err(|error| failed(error.to_string()))
    }

    /// Runs steps until the conductor says that none follows, or something fails.
    fn train(&mut self, ring: &mut Ring) -> Ending {
        let steps = self.args.steps.get();
        let mut since = Instant::now();
        if self.state.step < steps {
            self.announce(self.state.step);
        }
        loop {
            let step = self.state.step;
            let planned = match self.session.next(step) {
                Next::Step(planned) => planned,
                Next::End(ending) => return ending,
            };
            if step + 1 < steps {
                self.announce(step + 1);
            }
            if step == 0 || self.settings.resume.is_some() && self.state.header.is_empty() {
                since = Instant::now();
            }
            if let Err(ending) = self.step(&planned, ring, &mut since) {
                return ending;
            }
        }
    }

    fn announce(&self, step: u64) {
        let nanos = (0..self.args.nano_batches.get()).map(|nano| {
            let stream = self.loader.stream(step, nano);
            let own = &stream.layout()[usize::from(self.rank)];
            let stretches: Vec<_> = own
                .iter()
                .map(|it| cadre_planner::Stretch {
                    document: cadre_planner::DocumentId(it.document),
                    start: it.start,
                    end: it.end,
                })
                .collect();
            let documents = own.iter().map(|it| it.document);
            let documents = documents.map(|it| (it, stream.documents()[it as usize])).collect();
            NanoLengths { documents, stretches }
        });
        self.session.announce(Told { step, nanos: nanos.collect() });
    }

    fn step(
        &mut self,
        planned: &PlannedStep,
        ring: &mut Ring,
        since: &mut Instant,
    ) -> Result<(), Ending> {
        let step = self.state.step;
        let batch = (0..self.args.nano_batches.get())
            .map(|nano| self.loader.stream(step, nano).rows(self.rank.into()))
            .collect();
        let targets = self.loader.targets(step);
        let mut track = Spans(self.tracer.clone());
        let result = self.trainer.step(step, batch, targets, &mut self.session, ring, &mut track);
        let result = match result {
            Ok(result) => result,
            Err(error) => return Err(self.failed(&error)),
        };
        self.state.step = step + 1;
        self.state.loss_bits = format!("{:08x}", result.loss.to_bits());
        self.state.header = format!("{:016x}", planned.header.digest());
        self.state.slots = slots_in_words(planned);
        let every = self.args.checkpoint_every;
        if every > 0
            && self.state.step.is_multiple_of(every)
            && self.state.step < self.args.steps.get()
            && self.rank == 0
        {
            self.save().map_err(|error| {
                let reason = error.to_string();
                self.session.handle().send(Request::Fail(reason.clone()));
                Ending::Failed { reason, bad_input: true }
            })?;
        }
        let tokens = u64::from(self.args.tokens.get())
            * u64::from(self.args.nano_batches.get())
            * u64::from(self.settings.trainers);
        let exposed_wait_seconds = self.session.exposed_wait().as_secs_f64();
        let seconds = since.elapsed().as_secs_f64();
        *since = Instant::now();
        let loss = result.loss;
        self.session.step_done(StepDone { step, loss, tokens, seconds, exposed_wait_seconds });
        Ok(())
    }

    /// A step failed here: the job's own reason if there is one, else this one, told to all.
    fn failed(&mut self, error: &StepError) -> Ending {
        let own = Ending::Failed { reason: error.to_string(), bad_input: false };
        match error {
            // Whoever broke the ring is dead, or has a better reason.
            StepError::Ring(_) => self.session.ending(REASON).unwrap_or_else(|| {
                self.session.handle().send(Request::Fail(error.to_string()));
                own
            }),
            StepError::Attention(_) | StepError::NotFinite { .. } => {
                self.session.ending(Duration::ZERO).unwrap_or_else(|| {
                    self.session.handle().send(Request::Fail(error.to_string()));
                    self.session.ending(REASON).unwrap_or(own)
                })
            }
        }
    }

    fn save(&self) -> Result<PathBuf, checkpoint::CheckpointError> {
        let (first, second) = self.trainer.optimizer().moments();
        let values = Values { parameters: self.trainer.parameters(), first, second };
        let layout = self.trainer.model().parameters();
        let root = &self.settings.checkpoints;
        let path = checkpoint::save(root, &self.state, layout, &values, self.rank.into())?;
        let notice = proto::Notice {
            level: proto::notice::Level::Information.into(),
            text: format!("checkpoint of {} steps is at {}", self.state.step, path.display()),
            event: proto::notice::Event::CheckpointWritten.into(),
            server: None,
        };
        self.control.send(notice).ok();
        Ok(path)
    }

    /// What is left to do when no step follows.
    fn close(&mut self, ending: Ending) -> Outcome {
        use proto::finished::Outcome as Told;
        let (told, reason, code) = match ending {
            Ending::Completed => (Told::Completed, None, 0),
            Ending::Stopped { .. } => (Told::Stopped, None, 0),
            Ending::Failed { reason, bad_input: true } => (Told::Failed, Some(reason), 2),
            Ending::Failed { reason, bad_input: false } => (Told::Failed, Some(reason), 3),
        };
        // Trainer 0 writes; of a failed job every survivor, since trainer 0 may be the dead one.
        let writes = match ending_kind(told) {
            Kind::Good => self.rank == 0 && self.state.step > 0,
            Kind::Failed => code == 3 && self.state.step > 0,
        };
        let mut outcome = Outcome { told, error: reason, code, sample: String::new() };
        if writes && let Err(error) = self.save() {
            let error = error.to_string();
            outcome.code = outcome.code.max(3);
            outcome.error = Some(match outcome.error.take() {
                Some(reason) => format!("{reason}; and {error}"),
                None => error,
            });
            outcome.told = Told::Failed;
        }
        if told == Told::Completed && self.rank == 0 {
            outcome.sample = self.sample();
        }
        outcome
    }

    fn sample(&self) -> String {
        let config = *self.trainer.model().config();
        let positions = (self.args.prompt.len() + SAMPLE) as u32 + 1;
        let mut model = Model::new(config, positions, self.args.threads);
        let parameters = self.trainer.parameters();
        let prompt = self.args.prompt.as_bytes();
        let text =
            super::sample::sample(&mut model, parameters, prompt, SAMPLE, 0.7, self.args.seed);
        String::from_utf8_lossy(&text).into_owned()
    }
}

enum Kind {
    Good,
    Failed,
}

fn ending_kind(told: proto::finished::Outcome) -> Kind {
    use proto::finished::Outcome as Told;
    match told {
        Told::Completed | Told::Stopped => Kind::Good,
        Told::Failed | Told::Unspecified => Kind::Failed,
    }
}

struct Outcome {
    told: proto::finished::Outcome,
    error: Option<String>,
    code: u8,
    sample: String,
}

impl Outcome {
    fn report(&self) -> proto::Finished {
        proto::Finished {
            outcome: self.told.into(),
            message: self.error.clone().unwrap_or_default(),
            exit_code: self.code.into(),
            sample: self.sample.clone(),
        }
    }
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

fn slots_in_words(planned: &PlannedStep) -> String {
    let weights: Vec<_> = planned.header.slots.iter().map(|it| it.weight.to_string()).collect();
    format!("{:?} {}", planned.header.placement, weights.join(","))
}

/// Spans of the step, but for waits, which the session times itself.
struct Spans(Tracer);

impl Track for Spans {
    fn span(&mut self, name: &'static str, begin: Instant, end: Instant) {
        if self.0.is_on() && name != "wait" {
            let activity = if name == "reduce" { Activity::Wait } else { Activity::Linear };
            self.0.span_between("main", activity, (begin, end), || name.to_owned());
        }
    }
}
