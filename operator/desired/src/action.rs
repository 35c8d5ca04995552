//! What the operator does to a cluster, as data.
//!
//! Out of every decision comes a list of [`Action`]s, to be carried out in order. Each is safe to
//! repeat and safe beside a second operator that does the same: creating what is there already,
//! or deleting what is gone, changes nothing. Deletes name the uid, so a successor of the same name
//! stays.

use std::ops::Deref;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

/// One change of the cluster, in the namespace of the object that needs it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create an object that is not there; one of this name that is there stays as it is.
    Create(Object),
    /// Bring an object of ours to this content, by server-side apply.
    Apply(Object),
    /// Say on a server's pod that it leaves: nothing new goes to it from now on.
    Drain {
        /// The pod.
        pod: Reference,
        /// Why, as a condition's reason is written.
        reason: &'static str,
        /// Since when.
        since: Timestamp,
    },
    /// Write an annotation on an object: what would be forgotten with the pods that show it.
    Note {
        /// The object.
        object: Reference,
        /// The annotation.
        annotation: &'static str,
        /// Value of the annotation.
        text: String,
    },
    /// Write the number of servers of the object itself, by server-side apply as [`SCALER`](crate::SCALER), unless the object has
    /// changed since it was looked at.
    Scale {
        /// What `spec.replicas` is to be.
        replicas: u32,
    },
    /// Delete an object.
    Delete(Reference),
    /// Delete the object itself that this is about.
    DeleteSelf,
    /// Put our finalizer on the object itself: its servers must drain before it is gone.
    Guard,
    /// Take our finalizer off the object itself.
    Release,
}

/// An object that the operator makes.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// Names of pods.
    Service(Box<Service>),
    /// An attempt.
    Job(Box<Job>),
    /// A server.
    Pod(Box<Pod>),
    /// How many servers may be evicted at once.
    Budget(Box<PodDisruptionBudget>),
    /// What servers are made from.
    Revision(Box<ControllerRevision>),
}

/// Kind of an object that the operator makes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// `v1` Service.
    Service,
    /// `batch/v1` Job.
    Job,
    /// `v1` Pod.
    Pod,
    /// `policy/v1` `PodDisruptionBudget`.
    Budget,
    /// `apps/v1` `ControllerRevision`.
    Revision,
}

/// One object of the cluster.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Reference {
    /// Kind of the object.
    pub kind: Kind,
    /// Name of the object.
    pub name: String,
    /// Uid of the object; an object of the same name with another uid is another object.
    pub uid: String,
}

impl Reference {
    pub(crate) fn new(kind: Kind, meta: &ObjectMeta) -> Self {
        Self {
            kind,
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
        }
    }
}

impl Object {
    /// Kind of the object.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Service(_) => Kind::Service,
            Self::Job(_) => Kind::Job,
            Self::Pod(_) => Kind::Pod,
            Self::Budget(_) => Kind::Budget,
            Self::Revision(_) => Kind::Revision,
        }
    }

    /// Name, labels and what else every object has.
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Service(it) => &it.metadata,
            Self::Job(it) => &it.metadata,
            Self::Pod(it) => &it.metadata,
            Self::Budget(it) => &it.metadata,
            Self::Revision(it) => &it.metadata,
        }
    }
}

/// Why an action was not carried out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Failure {
    /// Reason, as a condition writes it.
    pub reason: &'static str,
    /// The operation, and the answer of whoever refused it.
    pub message: String,
}

/// An observation made after the actions were carried out: the only thing that a status is made from.
#[derive(Clone, Debug)]
pub struct Applied<T> {
    observed: T,
    failure: Option<Failure>,
}

impl<T> Applied<T> {
    /// Says that every action of a decision was tried, and that `observed` has what they made.
    /// `failure` is the first that was refused; the status tells it.
    pub fn new(observed: T, failure: Option<Failure>) -> Self {
        Self { observed, failure }
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }
}

impl<T> Deref for Applied<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.observed
    }
}
