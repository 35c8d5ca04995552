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
const AWAY: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The job it works for, from its welcome on.
    pub(crate) job: Option<JobKey>,
    /// As a view offers it, once it listens.
    pub(crate) serves: Option<Server>,
    pub(crate) leave: Option<Leave>,
    pub(crate) load: Load,
    pub(crate) trouble: Option<Trouble>,
    pub(crate) drained: bool,
    /// Its pod was in the facts.
    pub(crate) seen: bool,
    /// Since when it has no connection.
    pub(crate) away: Option<Duration>,
    hello: Hello,
}

/// On its way out of a job.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Leave {
    /// It joins another job then.
    pub(crate) stays: bool,
    /// First view without it.
    pub(crate) after: Option<Number>,
    /// It was told to go.
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

    /// It has come, or come again: with a session it goes on where it was, without one it is free.
    pub(crate) fn attach(&mut self, id: ServerId, hello: Hello, now: Duration) {
        self.away = None;
        self.load.begin(now);
        self.hello = hello;
        self.job = JobKey::parse(&self.hello.session);
        if self.job.is_none() {
            self.serves = None;
            // Who was asked to end stays asked.
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

    /// It may be given a job.
    pub(crate) fn is_free(&self) -> bool {
        self.job.is_none() && self.away.is_none() && self.leave.is_none() && self.trouble.is_none()
    }

    /// It has a job, or may be given one.
    pub(crate) fn may_work(&self) -> bool {
        self.leave.is_none_or(|it| it.stays) && self.trouble.is_none()
    }

    /// What a view of this job may offer.
    pub(crate) fn offer(&self, job: &JobKey, now: Duration) -> Option<&Server> {
        let well = self.leave.is_none() && self.trouble.is_none();
        let near = self.away.is_none_or(|since| now < since + AWAY);
        self.serves.as_ref().filter(|_| well && near && self.job.as_ref() == Some(job))
    }

    /// It is to leave its job; who leaves for good does not stay.
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
