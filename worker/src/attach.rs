//! How a worker process finds its job: the environment contract, the controller, the exchange.
//!
//! In: variables that the controller sets on every trainer and server. Out: an [`Attached`] process that
//! its controller knows and that listens for peers. Addresses and the job's secret come over the control
//! connection alone.
//!
//! The supervisor of `cadre run` makes the secret and finds the checkpoint. The operator keeps nothing, so
//! in a pod the conductor does both and says so in its hello, again whenever it comes back.

mod contract;

use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cadre_control::client::{self, Options};
use cadre_control::{DATA_VERSION, Settings, proto};
use cadre_exchange::{Encryption, Greeter, PeerId, Purpose, TcpConfig, Waker};
use cadre_kernels::Engine;

pub use self::contract::Contract;
use crate::io::Control;
use crate::io::exchange::{Exchange as _, Open, OpenError};
use crate::trace::Tracer;

/// A process that its controller knows.
pub struct Attached<P> {
    /// Moves bytes.
    pub provider: P,
    /// The job and its members, from the controller.
    pub joined: Joined,
}

/// What a process knows when it has joined its job.
pub struct Joined {
    /// Greets neighbours of the gradient ring.
    pub greeter: Greeter,
    /// To the controller.
    pub sender: client::Sender,
    /// From the controller.
    pub receiver: Receiver<proto::ControllerMessage>,
    /// Settings of the job.
    pub settings: Settings,
    /// Time spans.
    pub tracer: Tracer,
    /// Where the conductor listens, if it was known at once.
    pub conductor: Option<(PeerId, String)>,
}

/// Why a worker cannot join.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process was not started by a controller.
    #[error(
        "{variable} is not set; start workers with `cadre run`, or as pods of a TrainingJob or an AttentionPool"
    )]
    Missing {
        /// The variable.
        variable: &'static str,
    },
    /// The controller set nonsense.
    #[error("{variable} is {value:?}, which is no {expected}")]
    Malformed {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The expected value.
        expected: &'static str,
    },
    /// The controller cannot be reached or refuses.
    #[error(transparent)]
    Control(#[from] client::Error),
    /// The controller's settings cannot be read.
    #[error(transparent)]
    Settings(#[from] cadre_control::settings::Error),
    /// The exchange cannot listen.
    #[error(transparent)]
    Exchange(#[from] cadre_exchange::Error),
    /// The exchange cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Rows cannot lie on a GPU.
    #[error("--exchange node moves rows that lie on a GPU; say --engine gpu, or --exchange tcp")]
    NodeWithoutGpu,
    /// Processes may be on several machines.
    #[error(
        "--exchange node is for processes of one machine, and this one is a pod; say --exchange tcp"
    )]
    NodeInPod,
    /// The same, of memory.
    #[error(
        "--exchange shm is for processes of one machine, and this one is a pod; say --exchange auto"
    )]
    SharedInPod,
    /// The secret is not what it should be.
    #[error(
        "the controller sent a job secret of {bytes} bytes, expected 32; run one version everywhere"
    )]
    Secret {
        /// Its length.
        bytes: usize,
    },
    /// The address of the control service, or its files.
    #[error(transparent)]
    Endpoint(#[from] cadre_control::endpoint::Error),
    /// The machine has no source of randomness.
    #[error(
        "the system gives no random bytes: {source}; allow the call getrandom (a seccomp profile may forbid it)"
    )]
    Random {
        /// What the system says.
        source: std::io::Error,
    },
    /// The trace cannot be written.
    #[error("the trace folder {} cannot be written: {source}", path.display())]
    Trace {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the user has to act before another try can succeed: another build, ports taken, a folder
    /// that cannot be written.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Control(error) => matches!(error, client::Error::Refused { .. }),
            Self::Exchange(_)
            | Self::Open(_)
            | Self::NodeWithoutGpu
            | Self::NodeInPod
            | Self::SharedInPod
            | Self::Trace { .. }
            | Self::Endpoint(_) => true,
            Self::Missing { .. }
            | Self::Malformed { .. }
            | Self::Settings(_)
            | Self::Random { .. }
            | Self::Secret { .. } => false,
        }
    }
}

/// What a process brings to its job.
#[derive(Clone, Copy, Debug, Default)]
pub struct Joining<'a> {
    /// Bytes for rows of others.
    pub memory: u64,
    /// Where a trainer listens for what the trainers do among themselves; empty if they do nothing.
    pub ring_address: &'a str,
    /// The checkpoint it has found, where [`Contract::finds_checkpoint`] holds.
    pub resume: Option<&'a Path>,
}

/// Joins the job: sends the hello, opens the exchange as `how` says, and reports its address.
///
/// # Errors
///
/// [`Error`].
pub fn attach<O: Open>(
    contract: &Contract,
    (engine, how): (&Engine, O),
    joining: &Joining<'_>,
) -> Result<Attached<O::Exchange>, Error> {
    let me = contract.me;
    let waker: Arc<OnceLock<Waker>> = Arc::default();
    let wake = Arc::clone(&waker);
    let options = Options {
        wake: Box::new(move || {
            if let Some(waker) = wake.get() {
                waker.wake();
            }
        }),
        // In a pod a server waits for a job, and a trainer for the conductor, as long as it takes.
        welcome: if contract.is_pod() { None } else { Options::default().welcome },
        ..Options::default()
    };
    let hello = contract.hello(&engine.numerics_id(), joining)?;
    let attached = client::attach(contract.control.clone(), hello, options)?;
    let client::Attachment { welcome, sender, receiver } = attached;
    let bytes = welcome.job_secret.len();
    let mut settings = Settings::parse(&welcome.settings, welcome.control_version)?;
    // Servers are counted when their addresses are known.
    cadre_exchange::allow_links(settings.trainers.into())?;
    let secret = welcome.job_secret.try_into().map_err(|_| Error::Secret { bytes })?;
    let encryption = match settings.encryption {
        cadre_crds::Encryption::Tcp => {
            tracing::info!(
                "links between the job's workers are encrypted; rows by RDMA go in the clear"
            );
            Encryption::Tcp
        }
        cadre_crds::Encryption::Required => {
            tracing::info!("all that the job's workers send each other is encrypted");
            Encryption::Required
        }
        cadre_crds::Encryption::Off => Encryption::Off,
    };
    let links = TcpConfig {
        bind: contract.host,
        me,
        secret,
        data_version: DATA_VERSION,
        encryption,
        limits: cadre_exchange::Limits::default(),
    };
    let provider = how.open(links)?;
    // The thread that polls sets the pace; before it, a wake is not missed but early.
    waker.get_or_init(|| provider.waker());
    let exchange_address = provider.address();
    sender.send(proto::Listening {
        exchange_address,
        ring_address: joining.ring_address.to_owned(),
    })?;
    let tracer = match &contract.trace {
        Some(path) => {
            let name = format!("{}-{}-{}", me.role, me.index, me.incarnation);
            Tracer::to(path, &name).map_err(|source| Error::Trace { path: path.clone(), source })?
        }
        None => Tracer::off(),
    };
    if contract.is_pod() {
        settings.checkpoints.clone_from(&contract.checkpoints);
    }
    let conductor = welcome.conductor.filter(|it| !it.exchange_address.is_empty());
    let joined = Joined {
        greeter: Greeter::new(Purpose::Ring, me, secret, DATA_VERSION).with(encryption),
        sender,
        receiver,
        settings,
        tracer,
        conductor: conductor.map(|it| (PeerId::trainer(0, it.incarnation), it.exchange_address)),
    };
    Ok(Attached { provider, joined })
}

/// Both ends of the controller's stream, for the IO thread.
pub fn control(sender: &client::Sender, receiver: Receiver<proto::ControllerMessage>) -> Control {
    let sender = sender.clone();
    Control { sender: Box::new(move |message| sender.send(message)), receiver }
}

/// Longest wait for all trainers to be there: in a cluster their pods may start minutes apart. The supervisor of `cadre run`
/// ends those that are late itself.
pub const ALL_JOIN_WITHIN: Duration = Duration::from_mins(15);

/// Deadlines and bounds of the protocol, from the job's settings.
pub fn protocol_settings(settings: &Settings) -> cadre_protocol::Settings {
    use cadre_crds::OnPoolLoss;
    let pool_wait =
        cadre_protocol::Nanos::from_millis(u64::from(settings.pool_wait_seconds) * 1000);
    let suspect_after =
        cadre_protocol::Nanos::from_millis(settings.suspect_after_milliseconds.into());
    let trainer_after = cadre_protocol::Nanos::from_millis(
        u64::from(settings.trainer_suspect_after_seconds) * 1000,
    );
    cadre_protocol::Settings {
        suspect_after,
        trainer_after,
        conductor_after: trainer_after,
        assemble_within: cadre_protocol::Nanos::from_millis(ALL_JOIN_WITHIN.as_secs() * 1000),
        on_pool_loss: match settings.on_pool_loss {
            OnPoolLoss::Wait => cadre_protocol::OnPoolLoss::Wait(pool_wait),
            OnPoolLoss::Local => cadre_protocol::OnPoolLoss::Local,
            OnPoolLoss::Fail => cadre_protocol::OnPoolLoss::Fail,
        },
        ..cadre_protocol::Settings::default()
    }
}
