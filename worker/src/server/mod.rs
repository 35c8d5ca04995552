//! The process of a dedicated attention server.
//!
//! In: the environment contract and [`ServerArgs`]. Out: an exit code: 0, 2 for bad input, 3 when the
//! conductor has declared it lost, its GPU is lost, or it cannot go on. The main thread computes, *io*
//! pulls, serves and beats, *plan* plans steps, *control* talks to the controller.
//!
//! ```text
//! attach ──▶ serve a job ──drained──▶ leave
//!    ▲            │ drained, stays
//!    └────────────┘ next job: new links, a new secret
//! ```
//!
//! SIGTERM is a drain: the controller takes the server out of the view, and the server goes when nothing
//! is left here; one that has not joined yet ends at once. While the controller is away it serves until
//! it is killed, as after any failure.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use cadre_control::proto;
use cadre_crds::contract::ASKED_TO_END;
use cadre_exchange::PeerId;
use cadre_kernels::{Choice, Engine, Threads};
use cadre_protocol::ServerId;
use cadre_protocol::server::Host;

use crate::attach::{Attached, Contract, Joined, Joining, attach, control, protocol_settings};
use crate::compute::Compute;
use crate::io::clock::Clock;
use crate::io::exchange::{self, Exchange, How};
use crate::io::queues::notices;
use crate::io::shared::{Shared, peer_of};
use crate::io::tasks::Tasks;
use crate::io::telling;
use crate::io::{After, Outlets, Request, start};
use crate::launch::Launcher as _;
use crate::memory::Memory;
use crate::process::{Termination, last_words};

/// What `cadre serve` is given.
#[derive(Clone, Copy, Debug)]
pub struct ServerArgs {
    /// Threads that compute.
    pub threads: Threads,
    /// What computes.
    pub engine: Choice,
    /// The number of the GPU that does, of those that the process may see; none: see [`Contract::gpu`].
    pub gpu: Option<usize>,
    /// What moves rows.
    pub exchange: exchange::Choice,
    /// Memory for rows and results, in MiB.
    pub memory_mib: u64,
}

/// Longest wait until the controller has read the last messages.
const LAST_MESSAGES_WITHIN: Duration = Duration::from_secs(1);

/// Serves until the controller lets it go.
///
/// # Errors
///
/// The process cannot join its job, or was given up. What the user has to correct is printed here: exit
/// code 2.
pub fn server_main(args: ServerArgs) -> anyhow::Result<ExitCode> {
    crate::process::arm_parent_death()?;
    let contract = match Contract::from_env() {
        Err(error) if error.is_bad_input() => return Ok(bad_input(&error)),
        contract => contract?,
    };
    let termination = Termination::default();
    // In a pod nothing went wrong; `cadre run` has to tell it from a command that ends by itself.
    termination.listen(if contract.is_pod() { 0 } else { ASKED_TO_END.into() })?;
    loop {
        // Before the controller hears of this server: bits depend on the engine.
        let which = contract.gpu(args.gpu, args.exchange);
        let engine = match Engine::choose_on(which, args.engine, args.threads) {
            Ok(engine) => engine,
            Err(error) => {
                last_words(&error.to_string());
                return Ok(ExitCode::from(2));
            }
        };
        let memory = args.memory_mib << 20;
        let joining = Joining { memory, ..Joining::default() };
        let served = match contract.how(&engine, args.exchange) {
            Ok(How::Paths(it)) => attach(&contract, (&engine, it), &joining)
                .map(|it| serve((engine, memory), &contract, it, &termination)),
            Ok(How::Node(it)) => attach(&contract, (&engine, it), &joining)
                .map(|it| serve((engine, memory), &contract, it, &termination)),
            Err(error) => Err(error),
        };
        let served = match served {
            Err(error) if error.is_bad_input() => return Ok(bad_input(&error)),
            served => served?,
        };
        match served? {
            After::Leave => return Ok(ExitCode::SUCCESS),
            After::Again => {}
            After::Failed { reason, .. } => anyhow::bail!(reason),
        }
    }
}

fn bad_input(error: &crate::attach::Error) -> ExitCode {
    last_words(&error.to_string());
    ExitCode::from(2)
}

/// Serves one job.
fn serve<P: Exchange + Send + 'static>(
    (engine, memory): (Engine, u64),
    contract: &Contract,
    Attached { provider, joined }: Attached<P>,
    termination: &Termination,
) -> anyhow::Result<After> {
    let Joined { greeter: _, sender, receiver, settings, tracer, conductor } = joined;
    let me = contract.me;
    // Of rows of any type: which one it is, headers say.
    let numerics = settings.reproducible.then(|| engine.numerics_id());
    let engine = engine.reproducible(settings.reproducible).context("the GPU of this server")?;
    tracing::info!("{me} computes core attention: {}", engine.description());
    let launcher = <<P::Memory as Memory>::Launcher>::new(engine, provider.place());
    let launcher = launcher.context("the GPU of this server")?;
    let mut shared = Shared::new(peer_of(me), (provider, Clock::system()), tracer.clone());
    shared.numerics = numerics;
    shared.trainer_count = settings.trainers;
    if let Some((id, address)) = conductor {
        shared.know(id, &address);
    }
    let id = ServerId { index: me.index, incarnation: me.incarnation };
    let protocol = protocol_settings(&settings);
    shared.telling.patience = telling::patience(&protocol);
    let tasks = Tasks::new(Host::Dedicated(id), memory, protocol, (&shared.provider, shared.now()));
    let (main, told) = notices(shared.provider.waker());
    let outlets = Outlets { main, rescue: None, interrupt: None };
    let control = control(&sender, receiver);
    let (io, handle) = start(shared, (None, Some(tasks), None), control, outlets)
        .context("cannot start the threads that plan and serve")?;
    let asked = handle.clone();
    termination.set(move || asked.send(Request::Terminate));
    let served = Compute::new(launcher, "compute", handle.clone(), tracer).serve(&told);
    termination.clear();
    handle.send(Request::Leave(None));
    let Ok(after) = io.join() else { anyhow::bail!("the io thread of {me} panicked") };
    // The controller that is away sees the exit.
    if let Err(why) = &served {
        sender.send(farewell(me, why)).ok();
    }
    sender.send(proto::Drained {}).ok();
    sender.leave(LAST_MESSAGES_WITHIN).ok();
    Ok(served.map_or_else(|reason| After::Failed { reason, bad_input: false }, |()| after))
}

/// Why a server goes before the job is over: its bundles move to others, a new server takes its slot.
fn farewell(me: PeerId, why: &str) -> proto::Notice {
    proto::Notice {
        level: proto::notice::Level::Warning.into(),
        text: format!("{me} leaves: {why}"),
        event: proto::notice::Event::Unspecified.into(),
        server: Some(proto::ServerName {
            kind: proto::Kind::Dedicated.into(),
            index: me.index.into(),
            incarnation: me.incarnation,
        }),
    }
}
