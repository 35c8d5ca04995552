//! What the environment says to a worker.
//!
//! In: variables that the controller sets on every trainer and server. Out: a [`Contract`], whose values are those of its types; how
//! rows of this process may move; the hello that it says.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use cadre_control::{CONTROL_VERSION, Credentials, DATA_VERSION, Endpoint, proto};
use cadre_crds::contract;
use cadre_exchange::{PeerId, Role, Sharing, Transports};
use cadre_kernels::device::Gpu;
use cadre_kernels::{Engine, WhichGpu};
use cadre_planner::Tolerance;

use super::{Error, Joining};
use crate::io::exchange::{ByNode, ByPaths, Choice, How};

/// Memory of a trainer that no job describes.
const USUAL_MEMORY_MIB: NonZeroU32 =
    NonZeroU32::new(contract::TRAINER_MEMORY_MIB).expect("it is some");

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
    /// Number of this trainer in its pod, from 0; 0 for servers.
    pub local_rank: u16,
    /// Memory of a trainer for rows of others, in MiB.
    pub memory_mib: u32,
    /// How rows of a rank move, where its program does not say it.
    pub exchange: Choice,
    /// Calibration that plans are made with, where the settings leave it to the environment.
    pub profile: Option<String>,
    /// How uneven plans may be, where the settings leave it to the environment.
    pub tolerance: Tolerance,
    /// Folder of checkpoints; empty if the controller names it.
    pub checkpoints: PathBuf,
    /// Checkpoint of another job that this one begins with, or a folder of them, if any.
    pub resume: Option<PathBuf>,
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
        let attempt = optional(contract::CADRE_ATTEMPT)?;
        // What a trainer needs before its settings come. A pod that no job describes may leave it out, and says what it takes.
        let described = attempt.is_some() && role == Role::Trainer;
        let needed = |name, is_needed: bool| match std::env::var_os(name) {
            None if is_needed => Err(Error::Missing { variable: name }),
            value => Ok(value),
        };
        let is_plain = attempt.is_none() && role == Role::Trainer;
        needed(contract::CADRE_INCARNATION, !is_plain)?;
        needed(contract::CADRE_MEMORY_MIB, described)?;
        let resume = needed(contract::CADRE_RESUME, described)?;
        needed(contract::WORLD_SIZE, described)?;
        needed(contract::LOCAL_RANK, described)?;
        // Processes of one machine reach each other by its loopback.
        needed(contract::CADRE_HOST, in_pod)?;
        let incarnation = assumed(contract::CADRE_INCARNATION, 0, is_plain)?;
        let (memory_mib, tolerance) = (USUAL_MEMORY_MIB, Tolerance::USUAL);
        Ok(Self {
            control,
            me: PeerId { role, index, incarnation },
            trace: file(contract::CADRE_TRACE),
            host: optional(contract::CADRE_HOST)?.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            attempt: attempt.unwrap_or(1),
            trainers: optional(contract::WORLD_SIZE)?.unwrap_or(0),
            local_rank: assumed(contract::LOCAL_RANK, 0, is_plain)?,
            memory_mib: assumed(contract::CADRE_MEMORY_MIB, memory_mib, is_plain)?.get(),
            exchange: exchange()?,
            profile: std::env::var(contract::CADRE_PROFILE).ok(),
            tolerance: assumed(contract::CADRE_TOLERANCE, tolerance, is_plain)?,
            // Under `cadre run` the settings name it.
            checkpoints: match file(contract::CADRE_CHECKPOINTS) {
                None if in_pod && role == Role::Trainer => {
                    variable(contract::CADRE_CHECKPOINTS)?.into()
                }
                folder => folder.unwrap_or_default(),
            },
            resume: resume.filter(|it| it != contract::RESUME_NONE).map(PathBuf::from),
        })
    }

    /// Whether the controller is the operator, which keeps nothing of the job itself.
    pub fn is_pod(&self) -> bool {
        matches!(self.control, Endpoint::Tls { .. })
    }

    /// The GPU on which this process computes if on one: `named`, or the one on which it falls when the processes of its machine
    /// take turns. Under `cadre run` these are the trainers and then the servers, in a pod its trainers. With
    /// [`Choice::Node`] all have the first one: they read one GPU's memory.
    pub fn gpu(&self, named: Option<usize>, exchange: Choice) -> WhichGpu {
        let turn = match self.me.role {
            _ if exchange == Choice::Node => 0,
            _ if self.is_pod() => self.local_rank.into(),
            Role::Trainer => self.me.index.into(),
            Role::Server => self.trainers as usize + usize::from(self.me.index),
        };
        named.map_or(WhichGpu::Turn(turn), WhichGpu::Number)
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
            Choice::Ucx => Sharing::Ucx(Transports::asked().map_err(cadre_exchange::Error::from)?),
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
    pub(super) fn hello(
        &self,
        numerics: &str,
        joining: &Joining<'_>,
    ) -> Result<proto::Hello, Error> {
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

fn variable(name: &'static str) -> Result<String, Error> {
    std::env::var(name).map_err(|_| Error::Missing { variable: name })
}

fn number<T: FromStr>(name: &'static str) -> Result<T, Error> {
    optional(name)?.ok_or(Error::Missing { variable: name })
}

/// A variable of which a value is assumed where it is left out, which is logged where nothing else says the same.
fn assumed<T: FromStr + Display>(
    name: &'static str,
    value: T,
    is_logged: bool,
) -> Result<T, Error> {
    let said = optional(name)?;
    if said.is_none() && is_logged {
        tracing::info!("{name} is not set: it is taken as {value}");
    }
    Ok(said.unwrap_or(value))
}

/// How rows move that lie on the host.
fn exchange() -> Result<Choice, Error> {
    let variable = contract::CADRE_EXCHANGE;
    let Ok(value) = std::env::var(variable) else { return Ok(Choice::Auto) };
    match value.as_str() {
        "auto" => Ok(Choice::Auto),
        "tcp" => Ok(Choice::Tcp),
        "shm" => Ok(Choice::Shared),
        "ucx" => Ok(Choice::Ucx),
        _ => {
            let expected = "way of rows on the host; write auto, tcp, shm or ucx";
            Err(Error::Malformed { variable, value, expected })
        }
    }
}

/// A variable that may be left out.
fn optional<T: FromStr>(name: &'static str) -> Result<Option<T>, Error> {
    let Ok(value) = std::env::var(name) else { return Ok(None) };
    let expected = match name {
        contract::CADRE_HOST => "IP address",
        contract::CADRE_TOLERANCE => "ratio from 1 to 2",
        contract::CADRE_MEMORY_MIB => "number of MiB, 1 or more",
        _ => "small whole number",
    };
    value.parse().map(Some).map_err(|_| Error::Malformed { variable: name, value, expected })
}

#[cfg(test)]
mod tests {
    use cadre_kernels::Threads;

    use super::*;

    fn contract(control: Endpoint) -> Contract {
        Contract {
            control,
            me: PeerId::server(0, 0),
            trace: None,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            attempt: 1,
            trainers: 0,
            local_rank: 0,
            memory_mib: 1,
            exchange: Choice::Auto,
            profile: None,
            tolerance: Tolerance::USUAL,
            checkpoints: PathBuf::new(),
            resume: None,
        }
    }

    fn in_pod() -> Contract {
        let credentials = Credentials { issuers: "ca".into(), token: "token".into() };
        contract(Endpoint::Tls { url: "https://a:1".into(), credentials })
    }

    fn here() -> Contract {
        contract(Endpoint::Unix("/tmp/control".into()))
    }

    #[test]
    fn processes_of_a_machine_have_turns_of_their_own_at_its_gpus() {
        let turn = |it: Contract| it.gpu(None, Choice::Auto);
        // Two trainers, then servers.
        let of = |me| Contract { me, trainers: 2, ..here() };
        let all = [PeerId::trainer(0, 0), PeerId::trainer(1, 0), PeerId::server(0, 3)];
        for (number, me) in all.into_iter().chain([PeerId::server(1, 0)]).enumerate() {
            assert_eq!(turn(of(me)), WhichGpu::Turn(number));
            assert_eq!(of(me).gpu(None, Choice::Node), WhichGpu::Turn(0), "one GPU for all");
            assert_eq!(of(me).gpu(Some(7), Choice::Node), WhichGpu::Number(7));
        }
        // In a pod those of the pod count alone.
        let rank = Contract { me: PeerId::trainer(9, 0), local_rank: 1, ..in_pod() };
        assert_eq!(turn(rank), WhichGpu::Turn(1));
        let server = Contract { me: PeerId::server(5, 0), trainers: 4, ..in_pod() };
        assert_eq!(turn(server), WhichGpu::Turn(0));
    }

    #[test]
    fn what_needs_one_machine_or_a_gpu_is_refused_in_pods_and_without() {
        let engine = Engine::cpu(Threads::ONE);
        let (pod, here) = (in_pod(), here());
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
