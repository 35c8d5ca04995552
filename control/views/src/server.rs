//! A dedicated server as its controller sees it.
//!
//! ```text
//! waiting ──welcome──▶ joining ──listens──▶ serving ──leave──▶ leaving ──drained──▶ drained
//!    ▲                                                             │ stays
//!    └─────────────────────────────────────────────────────────────┘
//! ```
//!
//! No decisions about others here; those are the pool's.

use std::time::Duration;

use crate::load::{Load, Trouble};
use crate::slots::Server;
use crate::types::{Hello, JobKey, Number, ServerId};

/// How long the slot of a server that has lost its control connection stays filled: it may be well, and
/// the conductor hears of it if not.
const SLOT_KEPT_FOR: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The job it works for, from its welcome on.
    pub(crate) job: Option<JobKey>,
    /// The entry that a view has for it, once it listens.
    pub(crate) serves: Option<Server>,
    pub(crate) leave: Option<Leave>,
    pub(crate) load: Load,
    pub(crate) trouble: Option<Trouble>,
    pub(crate) drained: bool,
    /// Whether the cluster's facts have named its pod.
    pub(crate) seen: bool,
    /// Since when it has no connection.
    pub(crate) away: Option<Duration>,
    hello: Hello,
}

/// A server on its way out of a job.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Leave {
    /// Whether it joins another job afterwards.
    pub(crate) stays: bool,
    /// Whether its job is over, whatever is known under the job's key by now.
    pub(crate) over: bool,
    /// First view without it.
    pub(crate) after: Option<Number>,
    /// Whether the drain was sent to it.
    pub(crate) told: bool,
}

impl Member {
    pub(crate) fn new(id: ServerId, hello: Hello, now: Duration) -> Self {
        let mut member = Self {
            job: None,
            serves: None,
            leave: None,
            load: Load::new(now),
            trouble: None,
            drained: false,
            seen: false,
            away: None,
            hello: Hello::default(),
        };
        member.attach(id, hello, now);
        member
    }

    /// The server has connected, for the first time or again. If its hello names a session, it
    /// continues with that job; otherwise it is free.
    pub(crate) fn attach(&mut self, id: ServerId, hello: Hello, now: Duration) {
        self.away = None;
        self.load.begin(now);
        self.hello = hello;
        self.job = JobKey::parse(&self.hello.session);
        // What it was told on its last connection it may not have heard.
        if let Some(leave) = &mut self.leave {
            leave.told = false;
        }
        if self.job.is_none() {
            self.serves = None;
            // A server that was asked to end still has to.
            self.leave = self.leave.filter(|it| !it.stays);
        }
        if !self.hello.address.is_empty() && self.job.is_some() {
            let address = self.hello.address.clone();
            self.listens(id, address);
        }
    }

    pub(crate) fn listens(&mut self, id: ServerId, address: String) {
        self.serves = Some(Server {
            index: id.index,
            incarnation: id.incarnation,
            address,
            memory: self.hello.memory,
            numerics: self.hello.numerics.clone(),
        });
    }

    pub(crate) fn data_version(&self) -> u32 {
        self.hello.data_version
    }

    /// Whether it may be given a job.
    pub(crate) fn is_free(&self) -> bool {
        self.job.is_none() && self.away.is_none() && self.leave.is_none() && self.trouble.is_none()
    }

    /// Whether it has a job or may be given one.
    pub(crate) fn may_work(&self) -> bool {
        self.leave.is_none_or(|it| it.stays) && self.trouble.is_none()
    }

    /// What a view of this job may offer.
    pub(crate) fn offer(&self, job: &JobKey, now: Duration) -> Option<&Server> {
        let well = self.leave.is_none() && self.trouble.is_none();
        let near = self.away.is_none_or(|since| now < since + SLOT_KEPT_FOR);
        self.serves.as_ref().filter(|_| well && near && self.job.as_ref() == Some(job))
    }

    /// Asks the server to leave its job. One that was asked to leave for good does not stay for
    /// another job.
    pub(crate) fn dismiss(&mut self, stays: bool) {
        match &mut self.leave {
            Some(leave) => leave.stays &= stays,
            None => self.leave = Some(Leave { stays, ..Leave::default() }),
        }
        if self.job.is_none() {
            self.drained |= !stays;
        }
    }
}
