//! How a worker process finds its job: the environment contract, the controller, the exchange.
//!
//! In: variables that the controller sets on every trainer and server. Out: an [`Attached`] process that
//! its controller knows and that listens for peers. Addresses and the job's secret come over the control
//! connection alone.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use cadre_control::client::{self, Options};
use cadre_control::{CONTROL_VERSION, DATA_VERSION, Endpoint, proto};
use cadre_crds::contract;
use cadre_exchange::{PeerId, Provider as _, Role, Tcp, TcpConfig, Waker};

use crate::io::Control;
use crate::supervisor::Settings;
use crate::trace::Tracer;

/// What the environment says.
#[derive(Clone, Debug)]
pub struct Contract {
    /// Where the controller listens.
    pub control: Endpoint,
    /// Which process this is.
    pub me: PeerId,
    /// Where spans go, if anywhere.
    pub trace: Option<PathBuf>,
}

/// A process that its controller knows.
pub struct Attached {
    /// Moves bytes.
    pub provider: Tcp,
    /// Both ends of the controller's stream.
    pub control: Control,
    /// What the job says.
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
    #[error("{variable} is not set; start workers with `cadre run`")]
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
        /// What it should be.
        expected: &'static str,
    },
    /// The controller cannot be reached or refuses.
    #[error(transparent)]
    Control(#[from] client::Error),
    /// The controller's settings cannot be read.
    #[error(transparent)]
    Settings(#[from] crate::supervisor::settings::Error),
    /// The exchange cannot listen.
    #[error(transparent)]
    Exchange(#[from] cadre_exchange::Error),
    /// The secret is not what it should be.
    #[error(
        "the controller sent a job secret of {bytes} bytes, expected 32; run one version everywhere"
    )]
    Secret {
        /// Its length.
        bytes: usize,
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
            Self::Exchange(_) | Self::Trace { .. } => true,
            Self::Missing { .. }
            | Self::Malformed { .. }
            | Self::Settings(_)
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
        let control = variable(contract::CADRE_CONTROL)?;
        let control = Endpoint::parse(&control).map_err(|_| Error::Malformed {
            variable: contract::CADRE_CONTROL,
            value: control,
            expected: "address of a control service",
        })?;
        let role = variable(contract::CADRE_ROLE)?;
        let role = match role.as_str() {
            contract::ROLE_TRAINER => Role::Trainer,
            contract::ROLE_SERVER => Role::Server,
            _ => {
                let (variable, expected) = (contract::CADRE_ROLE, "role of a worker");
                return Err(Error::Malformed { variable, value: role, expected });
            }
        };
        let index = number(contract::CADRE_INDEX)?;
        let incarnation = number(contract::CADRE_INCARNATION)?;
        let trace = std::env::var_os(contract::CADRE_TRACE).map(PathBuf::from);
        Ok(Self { control, me: PeerId { role, index, incarnation }, trace })
    }
}

/// Joins the job: says hello, opens the exchange, says where it listens.
///
/// # Errors
///
/// [`Error`].
pub fn attach(
    contract: &Contract,
    numerics: &str,
    memory_bytes: u64,
    ring_address: &str,
) -> Result<Attached, Error> {
    let me = contract.me;
    let waker: Arc<OnceLock<Waker>> = Arc::default();
    let wake = Arc::clone(&waker);
    let options = Options {
        wake: Box::new(move || {
            if let Some(waker) = wake.get() {
                waker.wake();
            }
        }),
        ..Options::default()
    };
    let role = match me.role {
        Role::Trainer => proto::Role::Trainer,
        Role::Server => proto::Role::Server,
    };
    let hello = proto::Hello {
        role: role.into(),
        index: me.index.into(),
        incarnation: me.incarnation,
        pid: std::process::id(),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        numerics_id: numerics.to_owned(),
        exchange_address: String::new(),
        ring_address: String::new(),
        memory_bytes,
    };
    let attached = client::attach(contract.control.clone(), hello, options)?;
    let client::Attachment { welcome, sender, receiver } = attached;
    let bytes = welcome.job_secret.len();
    let secret = welcome.job_secret.try_into().map_err(|_| Error::Secret { bytes })?;
    let provider = Tcp::open(TcpConfig {
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        me,
        secret,
        data_version: DATA_VERSION,
        limits: cadre_exchange::Limits::default(),
    })?;
    // The thread that polls sets the pace; before it, a wake is not missed but early.
    waker.get_or_init(|| provider.waker());
    let exchange_address = provider.address();
    sender.send(proto::Listening { exchange_address, ring_address: ring_address.to_owned() })?;
    let tracer = match &contract.trace {
        Some(path) => {
            let name = format!("{}-{}-{}", me.role, me.index, me.incarnation);
            Tracer::to(path, &name).map_err(|source| Error::Trace { path: path.clone(), source })?
        }
        None => Tracer::off(),
    };
    let conductor = welcome.conductor.filter(|it| !it.exchange_address.is_empty());
    Ok(Attached {
        provider,
        control: Control { sender, receiver },
        settings: Settings::parse(&welcome.settings)?,
        tracer,
        conductor: conductor.map(|it| (PeerId::trainer(0, it.incarnation), it.exchange_address)),
    })
}

/// Deadlines and bounds of the protocol, as the job says.
pub fn protocol_settings(settings: &Settings) -> cadre_protocol::Settings {
    use cadre_crds::OnPoolLoss;
    let pool_wait =
        cadre_protocol::Nanos::from_millis(u64::from(settings.pool_wait_seconds) * 1000);
    let suspect_after =
        cadre_protocol::Nanos::from_millis(settings.suspect_after_milliseconds.into());
    cadre_protocol::Settings {
        suspect_after,
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
    let value = variable(name)?;
    let expected = "small whole number";
    value.parse().map_err(|_| Error::Malformed { variable: name, value, expected })
}
