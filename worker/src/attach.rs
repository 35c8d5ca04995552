//! How a worker process finds its job: the environment contract, the controller, the exchange.
//!
//! In: variables that the controller sets on every trainer and server. Out: an [`Attached`] process that
//! its controller knows and that listens for peers. Addresses and the job's secret come over the control
//! connection alone.
//!
//! The supervisor of `cadre run` makes the secret and finds the checkpoint. The operator keeps nothing, so
//! in a pod the conductor does both and says so in its hello, again whenever it comes back.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cadre_control::client::{self, Options};
use cadre_control::{CONTROL_VERSION, Credentials, DATA_VERSION, Endpoint, Settings, proto};
use cadre_crds::contract;
use cadre_exchange::{
    Encryption, Greeter, PeerId, Purpose, Role, Sharing, TcpConfig, Transports, Waker,
};
use cadre_kernels::Engine;
use cadre_kernels::device::Gpu;

use crate::io::Control;
use crate::io::exchange::{ByNode, ByPaths, Choice, Exchange as _, How, Open, OpenError};
use crate::trace::Tracer;

/// A worker's settings from its environment.
#[derive(Clone, Debug)]
pub struct Contract {
    /// Where the controller listens.
    pub control: Endpoint,
    /// Which process this is.
    pub me: PeerId,
    /// Where spans go, if anywhere.
    pub trace: Option<PathBuf>,
    /// Address of this machine that peers reach it by.
    pub host: IpAddr,
    /// Number of the job's attempt, from 1.
    pub attempt: u32,
    /// Number of the job's trainers, from the launcher; 0 if it gives none.
    pub trainers: u32,
    /// Memory of a trainer for rows of others, in MiB.
    pub memory_mib: u32,
    /// Calibration that plans are made with, if any.
    pub profile: Option<String>,
    /// Folder of checkpoints; empty if the controller names it.
    pub checkpoints: PathBuf,
    /// Checkpoint of another job that this one begins with, or a folder of them, if any.
    pub resume: Option<PathBuf>,
}

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
    #[error("/dev/urandom: {source}; run on Linux with /dev mounted")]
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

impl Contract {
    /// Reads the environment.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], [`Error::Malformed`].
    pub fn from_env() -> Result<Self, Error> {
        let file = |name| std::env::var_os(name).map(PathBuf::from);
        let credentials = file(contract::CADRE_CONTROL_CA)
            .zip(file(contract::CADRE_CONTROL_TOKEN))
            .map(|(issuers, token)| Credentials { issuers, token });
        let control = Endpoint::parse(&variable(contract::CADRE_CONTROL)?, credentials)?;
        let in_pod = matches!(control, Endpoint::Tls { .. });
        let role = variable(contract::CADRE_ROLE)?;
        let role = match role.as_str() {
            contract::ROLE_TRAINER => Role::Trainer,
            contract::ROLE_SERVER => Role::Server,
            _ => {
                let (variable, expected) = (contract::CADRE_ROLE, "role of a worker");
                return Err(Error::Malformed { variable, value: role, expected });
            }
        };
        // Where a launcher starts several trainers in a pod, it alone numbers them.
        let index = match std::env::var_os(contract::CADRE_INDEX) {
            None if role == Role::Trainer => number(contract::RANK)?,
            _ => number(contract::CADRE_INDEX)?,
        };
        let incarnation = optional(contract::CADRE_INCARNATION)?.unwrap_or(0);
        Ok(Self {
            control,
            me: PeerId { role, index, incarnation },
            trace: file(contract::CADRE_TRACE),
            host: optional(contract::CADRE_HOST)?.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            attempt: optional(contract::CADRE_ATTEMPT)?.unwrap_or(1),
            trainers: optional(contract::WORLD_SIZE)?.unwrap_or(0),
            memory_mib: optional(contract::CADRE_MEMORY_MIB)?
                .unwrap_or(contract::TRAINER_MEMORY_MIB),
            profile: std::env::var(contract::CADRE_PROFILE).ok(),
            // Under `cadre run` the settings name it.
            checkpoints: match file(contract::CADRE_CHECKPOINTS) {
                None if in_pod && role == Role::Trainer => {
                    variable(contract::CADRE_CHECKPOINTS)?.into()
                }
                folder => folder.unwrap_or_default(),
            },
            resume: file(contract::CADRE_RESUME),
        })
    }

    /// Whether the controller is the operator, which keeps nothing of the job itself.
    pub fn is_pod(&self) -> bool {
        matches!(self.control, Endpoint::Tls { .. })
    }

    /// How rows of this process move, which `engine` computes on.
    ///
    /// # Errors
    ///
    /// A choice that this process cannot have.
    pub fn how<'a>(&'a self, engine: &'a Engine, exchange: Choice) -> Result<How<'a>, Error> {
        if let Some((gpu, sockets)) = self.on_gpu(engine, exchange)? {
            return Ok(How::Node(ByNode { gpu, sockets }));
        }
        Ok(How::Paths(ByPaths(match exchange {
            Choice::Auto => Sharing::Auto,
            Choice::Tcp | Choice::Node => Sharing::Off,
            Choice::Shared => Sharing::Required,
            Choice::Ucx => Sharing::Ucx(Transports::asked()),
        })))
    }

    /// The GPU that rows lie on and the folder of sockets, if they are to. Sockets of peers are beside the controller's, in a
    /// folder that this user alone may enter.
    fn on_gpu<'a>(
        &'a self,
        engine: &'a Engine,
        exchange: Choice,
    ) -> Result<Option<(&'a Gpu, &'a Path)>, Error> {
        match (exchange, &self.control, engine.gpu()) {
            (Choice::Auto | Choice::Tcp | Choice::Ucx, _, _)
            | (Choice::Shared, Endpoint::Unix(_), _) => Ok(None),
            (Choice::Shared, Endpoint::Tls { .. }, _) => Err(Error::SharedInPod),
            (Choice::Node, Endpoint::Tls { .. }, _) => Err(Error::NodeInPod),
            (Choice::Node, Endpoint::Unix(_), None) => Err(Error::NodeWithoutGpu),
            (Choice::Node, Endpoint::Unix(control), Some(gpu)) => {
                Ok(Some((gpu, control.parent().unwrap_or(Path::new(".")))))
            }
        }
    }

    fn conducts(&self) -> bool {
        self.me.role == Role::Trainer && self.me.index == 0
    }

    /// Whether this process has to find the checkpoint that the job resumes from. The operator
    /// keeps none, and the first attempt starts from the beginning or from another job's
    /// checkpoint, whatever is in the job's own folder.
    pub fn finds_checkpoint(&self) -> bool {
        self.is_pod() && self.conducts() && (self.attempt > 1 || self.resume.is_some())
    }

    /// The first message of this process; a conductor in a pod adds secret, view and checkpoint.
    fn hello(&self, numerics: &str, joining: &Joining<'_>) -> Result<proto::Hello, Error> {
        let role = match self.me.role {
            Role::Trainer => proto::Role::Trainer,
            Role::Server => proto::Role::Server,
        };
        let mut hello = proto::Hello {
            role: role.into(),
            index: self.me.index.into(),
            incarnation: self.me.incarnation,
            pid: std::process::id(),
            control_version: CONTROL_VERSION,
            data_version: DATA_VERSION,
            numerics_id: numerics.to_owned(),
            memory_bytes: joining.memory,
            trainers: self.trainers,
            ..proto::Hello::default()
        };
        if self.is_pod() && self.conducts() {
            let secret = cadre_control::job_secret().map_err(|source| Error::Random { source })?;
            hello.job_secret = secret.to_vec();
        }
        if self.finds_checkpoint()
            && let Some(newest) = joining.resume
        {
            hello.resume = newest.display().to_string();
        }
        Ok(hello)
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
    // Assumes at most as many servers as trainers; more can connect while the process has
    // descriptors.
    cadre_exchange::allow_links(2 * u64::from(settings.trainers))?;
    let secret = welcome.job_secret.try_into().map_err(|_| Error::Secret { bytes })?;
    let encryption = match settings.encryption {
        cadre_crds::Encryption::Tls => {
            tracing::info!("links between the job's workers are encrypted");
            Encryption::Tls
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
pub const ASSEMBLE: Duration = Duration::from_mins(15);

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
        assemble_within: cadre_protocol::Nanos::from_millis(ASSEMBLE.as_secs() * 1000),
        on_pool_loss: match settings.on_pool_loss {
            OnPoolLoss::Wait => cadre_protocol::OnPoolLoss::Wait(pool_wait),
            OnPoolLoss::Local => cadre_protocol::OnPoolLoss::Local,
            OnPoolLoss::Fail => cadre_protocol::OnPoolLoss::Fail,
        },
        ..cadre_protocol::Settings::default()
    }
}

fn variable(name: &'static str) -> Result<String, Error> {
    std::env::var(name).map_err(|_| Error::Missing { variable: name })
}

fn number<T: FromStr>(name: &'static str) -> Result<T, Error> {
    optional(name)?.ok_or(Error::Missing { variable: name })
}

/// A variable that may be left out.
fn optional<T: FromStr>(name: &'static str) -> Result<Option<T>, Error> {
    let Ok(value) = std::env::var(name) else { return Ok(None) };
    let expected = if name == contract::CADRE_HOST { "IP address" } else { "small whole number" };
    value.parse().map(Some).map_err(|_| Error::Malformed { variable: name, value, expected })
}

#[cfg(test)]
mod tests {
    use cadre_kernels::Threads;

    use super::*;

    #[test]
    fn what_needs_one_machine_or_a_gpu_is_refused_in_pods_and_without() {
        let contract = |control| Contract {
            control,
            me: PeerId::server(0, 0),
            trace: None,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            attempt: 1,
            trainers: 0,
            memory_mib: 1,
            profile: None,
            checkpoints: PathBuf::new(),
            resume: None,
        };
        let engine = Engine::cpu(Threads::ONE);
        let credentials = Credentials { issuers: "ca".into(), token: "token".into() };
        let pod = contract(Endpoint::Tls { url: "https://a:1".into(), credentials });
        let here = contract(Endpoint::Unix("/tmp/control".into()));
        for (contract, expected) in [(&pod, "this one is a pod"), (&here, "say --engine gpu")] {
            for choice in [Choice::Tcp, Choice::Auto] {
                assert!(contract.on_gpu(&engine, choice).unwrap().is_none());
            }
            let refused = contract.on_gpu(&engine, Choice::Node).unwrap_err();
            assert!(refused.is_bad_input() && refused.to_string().contains(expected), "{refused}");
        }
        assert!(here.on_gpu(&engine, Choice::Shared).unwrap().is_none());
        let refused = pod.on_gpu(&engine, Choice::Shared).unwrap_err();
        assert!(refused.is_bad_input() && refused.to_string().contains("say --exchange auto"));
    }
}
