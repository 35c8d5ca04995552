//! How a rank joins its job: the environment contract, the controller, the exchange, the threads.
//!
//! In: a [`Contract`] and what the rank's model and machine are ([`Join`]). Out: a [`Session`] that has begun no step. It does
//! not wait for the other ranks.
//!
//! Invariant: bad input is refused before any thread starts, and the conductor is in rank 0 only.

use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};

use cadre_control::{AttentionPlace, Planning, Settings};
use cadre_crds::{OnPoolLoss, Wire};
use cadre_exchange::Waker;
use cadre_kernels::{Choice, Engine, Threads};
use cadre_planner::Tolerance;
use cadre_protocol::server::Host;
use cadre_protocol::{Nanos, TrainerId};
use cadre_step::conduct::{Draft, Standby};
use cadre_step::header::{KvHeads, Placement};
use cadre_step::layers::{Kind, Layers};

use super::join_error::{JoinError, check_gpu_heads, check_heads};
use super::leave::BusyTold;
use super::{Model, Rank, Session};
use crate::attach::{
    self, Attached, Contract, Joined, Joining, attach, control, protocol_settings,
};
use crate::compute::Compute;
use crate::headers;
use crate::io::clock::Clock;
use crate::io::conducting::Conducting;
use crate::io::exchange::{self, Exchange, How, Open};
use crate::io::plan_thread::Guard;
use crate::io::queues::{Handle, Line, notices};
use crate::io::rows::Rows;
use crate::io::shared::{Shared, peer_of};
use crate::io::standing::Standing;
use crate::io::tasks::Tasks;
use crate::io::telling;
use crate::io::{Outlets, Request, start};
use crate::launch::{Launcher as _, heads};
use crate::memory::{Memory, Place as _};
use crate::profile;

/// What a rank brings to its job.
pub struct Join<'a> {
    /// Layers with core attention, by kind; the same for every rank.
    pub layers: Layers,
    /// Whether the KV heads of a document may go to different servers; what rank 0 says counts.
    pub kv_heads: KvHeads,
    /// Steps of the job, if they are known: [`Rank::announce_end`] tells them later else.
    pub steps: Option<u64>,
    /// The type of its rows, the same for every rank: the job's rows have it on the wire where no manifest says their type. None:
    /// they are f32 then.
    pub wire: Option<Wire>,
    /// Of weights and data; the same for every rank, recorded in the headers.
    pub seed: u64,
    /// What computes core attention in place.
    pub engine: Choice,
    /// The number of the GPU that does, of those that the process may see; none: see [`Contract::gpu`].
    pub gpu: Option<usize>,
    /// Threads that do.
    pub threads: Threads,
    /// Bytes for rows of others, in place and standing by.
    pub memory: u64,
    /// What moves rows.
    pub exchange: exchange::Choice,
    /// Where this rank listens for what the ranks do among themselves; [`Rank::addresses`] tells all. May be empty.
    pub address: String,
    /// The checkpoint that a rank for which [`Contract::finds_checkpoint`] holds has found, if any; others leave it empty.
    pub resume: Option<PathBuf>,
    /// Says which step comes first, from what the job says: 0, or that of the checkpoint in [`Settings::resume`]. A refusal is
    /// bad input of the user.
    pub first: First<'a>,
}

/// See [`Join::first`].
pub type First<'a> = Box<dyn FnOnce(&Settings, &Engine) -> Result<u64, String> + 'a>;

/// The session of this process.
static HERE: Mutex<Here> = Mutex::new(Here::Nobody);

enum Here {
    Nobody,
    /// Why its job ends as soon as it has joined, if something was wrong meanwhile.
    Joining(Option<String>),
    /// It has joined: what ends its job.
    Joined(Line),
}

/// The one session of this process, as long as it is held.
#[derive(Debug)]
pub(super) struct Once(());

impl Once {
    /// A second one is refused, and ends the job of the first one: its caller counts on both.
    fn take(rank: u16) -> Result<Self, JoinError> {
        let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
        let twice = JoinError::Twice { rank };
        match &mut *here {
            Here::Nobody => {
                *here = Here::Joining(None);
                return Ok(Self(()));
            }
            Here::Joining(refused) => *refused = Some(twice.to_string()),
            Here::Joined(line) => line.send(Request::Refuse(twice.to_string())),
        }
        Err(twice)
    }

    fn joined(line: Line) {
        let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Here::Joining(Some(refused)) = &mut *here {
            line.send(Request::Refuse(std::mem::take(refused)));
        }
        *here = Here::Joined(line);
    }
}

impl Drop for Once {
    fn drop(&mut self) {
        *HERE.lock().unwrap_or_else(PoisonError::into_inner) = Here::Nobody;
    }
}

impl Session {
    /// Refuses a second session of this process, as [`Self::join`] does before all else: for callers that may have to refuse
    /// something of theirs first.
    ///
    /// # Errors
    ///
    /// [`JoinError::Twice`]. The job of the first session ends.
    pub fn check_alone(contract: &Contract) -> Result<(), JoinError> {
        Once::take(contract.me.index).map(drop)
    }

    /// Joins the job that the environment names.
    ///
    /// # Errors
    ///
    /// [`JoinError`]. Nothing is left running then.
    pub fn join(contract: &Contract, join: Join<'_>) -> Result<Self, JoinError> {
        let rank = contract.me.index;
        // Before all else: a second one ends the job, whatever it asks for.
        let joined = Once::take(rank)?;
        check_heads(rank, &join.layers)?;
        if join.memory == 0 {
            return Err(JoinError::NoMemory { rank });
        }
        if join.exchange == exchange::Choice::Node {
            check_gpu_heads(rank, &join.layers)?;
        }
        // Before the controller hears of this rank: bits depend on the engine.
        let engine =
            Engine::choose_on(contract.gpu(join.gpu, join.exchange), join.engine, join.threads)
                .map_err(JoinError::Engine)?;
        tracing::info!("core attention in place: {}", engine.description());
        match contract.how(&engine, join.exchange)? {
            How::Paths(it) => {
                let attached = Self::attach(contract, (&engine, it), &join)?;
                Self::over(contract, engine, attached, (join, joined))
            }
            How::Node(it) => {
                let attached = Self::attach(contract, (&engine, it), &join)?;
                Self::over(contract, engine, attached, (join, joined))
            }
        }
    }

    fn attach<O: Open>(
        contract: &Contract,
        how: (&Engine, O),
        join: &Join<'_>,
    ) -> Result<Attached<O::Exchange>, attach::Error> {
        let resume = join.resume.as_deref();
        let mine = Joining { memory: join.memory, ring_address: &join.address, resume };
        attach(contract, how, &mine)
    }

    fn over<P: Exchange + Send + 'static>(
        contract: &Contract,
        engine: Engine,
        Attached { provider, joined: attached }: Attached<P>,
        (mut join, once): (Join<'_>, Once),
    ) -> Result<Self, JoinError> {
        let Joined { greeter, sender, receiver, mut settings, tracer, conductor } = attached;
        settings.wire = settings.wire_of(join.wire);
        let rank = contract.me.index;
        let first = std::mem::replace(&mut join.first, Box::new(|_, _| Ok(0)));
        let first = first(&settings, &engine);
        let first = first.map_err(|why| JoinError::First(contract.me.index, why))?;
        let numerics = engine.numerics_id_of(settings.wire == Wire::Bf16);
        let promised = settings.reproducible.then(|| numerics.clone());
        let processors = |it: &Kind| engine.processor(heads(it.heads), settings.wire == Wire::Bf16);
        let processors: Vec<String> = join.layers.kinds().iter().map(processors).collect();
        let gpu = |source| JoinError::Gpu { rank, source };
        let threads = |source| JoinError::Threads { rank, source };
        let engine = engine.reproducible(settings.reproducible).map_err(gpu)?;
        let beside = engine.another().map_err(gpu)?;
        let place = provider.place().another().map_err(gpu)?;
        let upload = provider.place().another().map_err(gpu)?;
        let launcher = |engine| <<P::Memory as Memory>::Launcher>::new(engine, &place).map_err(gpu);
        let (launcher, beside) = (launcher(engine)?, launcher(beside)?);
        let clock = Clock::system();
        let mut shared = Shared::new(peer_of(contract.me), (provider, clock), tracer.clone());
        shared.numerics = promised;
        shared.trainer_count = settings.trainers;
        if let Some((id, address)) = conductor {
            shared.know(id, &address);
        }
        let (me, protocol) = (TrainerId(rank), protocol_settings(&settings));
        shared.telling.patience = telling::patience(&protocol);
        let stalled = Nanos::from_millis(u64::from(settings.stalled_after_seconds) * 1000);
        let patience = [stalled.after(protocol.assemble_within), stalled];
        let standing = Standing::new((me, first), patience, shared.now());
        let standing = standing.slow_after(protocol.trainer_after);
        let rows = Rows::new(me, protocol, standing, shared.now());
        let tasks =
            Tasks::new(Host::InPlace(me), join.memory, protocol, (&shared.provider, shared.now()));
        let conducting = if rank == 0 {
            // A log of headers has its costs and links.
            let (profile, tolerance) = match settings.planning() {
                Planning::Said { profile, tolerance } => (profile, tolerance),
                Planning::Environment => (contract.profile.as_deref(), contract.tolerance),
            };
            let profile = profile.filter(|_| settings.headers.is_none());
            let kinds = join.layers.kinds().iter().zip(&processors);
            let kinds = kinds.map(|(it, here)| (it.heads.dim, Some(here.as_str())));
            let planned = profile::planned(profile, kinds, settings.trainers)?;
            let told = (numerics, planned, tolerance);
            Some(conducting(&join, &settings, told, first, shared.now())?)
        } else {
            None
        };
        let (main, told) = notices(shared.provider.waker());
        let (rescue, rescued) = notices(shared.provider.waker());
        let interrupt = Waker::new().map_err(threads)?;
        let outlets = Outlets { main, rescue: Some(rescue), interrupt: Some(interrupt.clone()) };
        let machines = (Some(rows), Some(tasks), conducting);
        let lines = control(&sender, receiver);
        // Before the IO thread, so that nothing runs if the system has no thread to give; it ends if that one does not start.
        let (begin, begun) = sync_channel::<Handle<P::Memory>>(1);
        let traced = tracer.clone();
        std::thread::Builder::new()
            .name("rescue".into())
            .spawn(move || {
                let Ok(handle) = begun.recv() else { return };
                let guard = Guard::new("rescue", &handle.line());
                let rescuer = Compute::new(beside, "rescue", handle.clone(), traced);
                if let Err(why) = rescuer.serve(&rescued) {
                    handle.send(Request::Fail(why));
                }
                guard.over();
            })
            .map_err(threads)?;
        let (io, handle) = start(shared, machines, lines, outlets).map_err(threads)?;
        begin.send(handle.clone()).ok();
        Once::joined(handle.line());
        let compute = Compute::new(launcher, "main", handle.clone(), tracer.clone());
        let using = (compute, join.threads);
        let model = Model { layers: join.layers, seed: join.seed, wire: settings.wire };
        let begins = (model, first, join.steps);
        let rank = Rank::new(me, (handle, told), using, [place, upload], begins, tracer);
        let (pod, io, busy) = (contract.is_pod(), Some(io), BusyTold::default());
        Ok(Self { rank, pod, greeter, interrupt, settings, control: sender, busy, io, _once: once })
    }
}

/// The conductor of the job, in rank 0.
fn conducting(
    join: &Join<'_>,
    settings: &Settings,
    (numerics, planned, tolerance): (String, profile::Planned, Tolerance),
    first: u64,
    now: Nanos,
) -> Result<Conducting, JoinError> {
    let draft = Draft {
        trainers: settings.trainers,
        layers: join.layers.clone(),
        kv_heads: join.kv_heads,
        wire: settings.wire,
        seed: join.seed,
        numerics,
        reproducible: settings.reproducible,
        placement: match settings.attention {
            AttentionPlace::Pool => Placement::Pool,
            AttentionPlace::Local => Placement::Local,
        },
        costs: planned.costs,
        tolerance,
        links: planned.links,
        standby: match settings.on_pool_loss {
            OnPoolLoss::Local => Standby::Yes,
            OnPoolLoss::Wait | OnPoolLoss::Fail => Standby::No,
        },
        trainer_memory: join.memory,
        replay: settings.headers.as_deref().map(headers::read).transpose()?.map(Arc::new),
        header: None,
        filled: Vec::new(),
        memories: std::collections::BTreeMap::new(),
    };
    Ok(Conducting::new(draft, protocol_settings(settings), first, settings, now))
}
