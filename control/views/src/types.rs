//! What goes into the decisions about a pool and what comes out.
//!
//! Plain data; the controller's shell translates it from and to the messages of the control service. No
//! behaviour here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::load::{Figure, Health, Report, Trouble};
use crate::slots::Slot;

/// How long a new controller waits for jobs, and for the servers of a view that another one sent.
pub(crate) const SERVERS_BACK_WITHIN: Duration = Duration::from_secs(15);

/// One attempt of a job.
#[derive(Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct JobKey {
    /// Namespace of the job.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Number of the attempt, from 1.
    pub attempt: u32,
}

impl fmt::Display for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.name, self.attempt)
    }
}

impl JobKey {
    /// The key in the text that [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let (namespace, name) = (parts.next()?.to_owned(), parts.next()?.to_owned());
        let attempt = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Self { namespace, name, attempt })
    }
}

/// One start of a dedicated server.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ServerId {
    /// Slot of the server in the pool.
    pub index: u32,
    /// Which start of it.
    pub incarnation: u32,
}

/// A worker.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Who {
    /// A dedicated server.
    Server(ServerId),
    /// A trainer of an attempt, by its rank.
    Trainer(JobKey, u32),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(id) => write!(f, "server {} (incarnation {})", id.index, id.incarnation),
            Self::Trainer(job, rank) => write!(f, "trainer {rank} of {job}"),
        }
    }
}

/// State of a pool in the cluster.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Facts {
    /// Slots that are wanted, filled or not.
    pub slots: BTreeSet<u32>,
    /// Servers whose pods are there.
    pub servers: BTreeMap<ServerId, Fate>,
    /// Attempts that have a pod that runs or will run.
    pub jobs: BTreeSet<JobKey>,
    /// Trainers serve too.
    pub in_place: bool,
    /// Most slots that a job may be given.
    pub cap: Option<u32>,
    /// When a server is stale, slow or silent.
    pub health: Health,
}

/// Whether a server's pod is to stay.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fate {
    /// The pod stays.
    Stays,
    /// The pod is marked for deletion: the server hands over its work first.
    Drains,
}

/// Facts of a job that its trainers or its object state.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct JobFacts {
    /// Trainers of the job.
    pub trainers: u32,
    /// Whether slots keep nominal weights.
    pub reproducible: bool,
    /// Weight of the job among the jobs of the pool.
    pub share: u32,
    /// Slots that it keeps, though it does not use them; none: all of them.
    pub keeps: Option<u32>,
}

/// First message of a worker.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Hello {
    /// Number of this start of the worker.
    pub incarnation: u32,
    /// Version of its data formats and bits; equal among the workers of a job.
    pub data_version: u32,
    /// Address at which it listens; empty while it does not.
    pub address: String,
    /// Trainers: where the rank before connects.
    pub ring: String,
    /// Memory for tensors of others, in bytes.
    pub memory: u64,
    /// Numerics id.
    pub numerics: String,
    /// A conductor's: the job's secret.
    pub secret: Vec<u8>,
    /// Session from its last welcome; empty before the first.
    pub session: String,
    /// A conductor's: the last view it was given.
    pub view: Option<View>,
    /// A conductor's: the checkpoint that the job goes on from.
    pub resume: String,
}

/// Orders views: by term, then counter.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Number {
    /// Lease transitions of the controller.
    pub term: u64,
    /// Views of this term.
    pub counter: u64,
}

/// Which servers a job may use.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct View {
    /// Its number.
    pub number: Number,
    /// All slots.
    pub slots: Vec<Slot>,
}

/// Where the conductor is.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Conductor {
    /// Number of this start of trainer 0.
    pub incarnation: u32,
    /// Address at which it listens.
    pub address: String,
    /// Address at which it listens for the all-reduce.
    pub ring: String,
}

/// Where a trainer is.
pub type Trainer = Conductor;

/// What happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// The cluster has changed, or is seen for the first time.
    Facts(Facts),
    /// A worker has connected; with the facts of its job if it is a trainer.
    Attached(Who, Hello, Option<JobFacts>),
    /// A worker has disconnected, with or without a farewell.
    Detached(Who),
    /// A worker listens at these addresses: exchange, then gradient ring.
    Listening(Who, String, String),
    /// A load report, of a trainer its in-place server's.
    Reported(Who, Report),
    /// The conductor has finished a step that used this view.
    Stepped(JobKey, Number),
    /// The conductor has given a server up.
    Lost(JobKey, ServerId),
    /// The conductor has too few servers for a step.
    Lacking(JobKey),
    /// A server was asked to end.
    Leaving(Who),
    /// A server has handed over all its work.
    Drained(Who),
    /// The conductor reports that no step follows.
    Finished(JobKey),
    /// The share of a job was edited.
    Share(JobKey, u32),
    /// Time has passed.
    Tick,
}

/// A message to a worker or conductor.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command {
    /// The worker is accepted.
    Welcome {
        /// Whom.
        to: Who,
        /// The job that it works for.
        job: JobKey,
        /// The job's secret.
        secret: Vec<u8>,
        /// Where its conductor is, if that is known.
        conductor: Option<Conductor>,
        /// The checkpoint that the job goes on from; empty: none.
        resume: String,
    },
    /// A worker cannot be welcomed yet; it tries again.
    Postpone(Who, &'static str),
    /// The worker is refused for good.
    Refuse(Who, String),
    /// Where the conductor is.
    Conductor(Who, Conductor),
    /// Where all trainers are, by rank.
    Trainers(Who, Vec<Trainer>),
    /// Servers of the job, to its conductor.
    View(Who, View),
    /// Leave the job.
    Drain {
        /// Whom.
        to: Who,
        /// The process joins another job then.
        stays: bool,
        /// The job is over.
        over: bool,
    },
    /// Something that a person may want to read: the reason as a condition's is written, and a sentence.
    Notice(&'static str, String),
}

/// Why a job has none of the pool's servers, although its pods are there.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Unserved {
    /// No server has the data version of its workers.
    OtherBuild {
        /// Theirs.
        data_version: u32,
    },
    /// Its conductor has not come for long.
    NotCome,
    /// Some of its trainers have not come for so long that others have its servers.
    NotWhole {
        /// Trainers that have come.
        come: u32,
        /// Trainers of the job.
        trainers: u32,
    },
}

impl Unserved {
    /// The reason, as a condition's is written.
    pub fn reason(self) -> &'static str {
        match self {
            Self::OtherBuild { .. } => "OtherBuild",
            Self::NotCome => "NotCome",
            Self::NotWhole { .. } => "NotWhole",
        }
    }

    /// A sentence about a job, which it calls `job`.
    pub fn words(self, job: &str) -> String {
        match self {
            Self::OtherBuild { data_version } => format!(
                "no server of the pool has data version {data_version}, that of {job}, which waits; give spec.template the build \
                 of the job's image, or the job that of the servers"
            ),
            Self::NotCome => format!("the first trainer of {job} has not come for minutes"),
            Self::NotWhole { come, trainers } => format!(
                "{come} of {trainers} trainers of {job} have come, and no more for minutes; others may have its servers until all \
                 have come"
            ),
        }
    }
}

/// Report about a server, for statuses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ServerReport {
    /// Its load.
    pub figure: Figure,
    /// Why it is kept out.
    pub trouble: Option<Trouble>,
    /// Whether it has handed over everything, or has nothing to hand over.
    pub drained: bool,
    /// Version of its data formats and bits; equal among the workers of a job.
    pub data_version: u32,
    /// Whether it works for a job.
    pub serves: bool,
}
