//! Plans of a job, made once: the same header gives every process the same plan.
//!
//! In: what the planning thread of a process is to do. Out: what it answers. In some jobs every process makes its own plans, as in
//! production; bits and digests are compared in all of them.

use cadre_worker::io::Request;
use cadre_worker::io::plan_thread;
use cadre_worker::io::planning::{Ready, Wanted};

use crate::random::{Random, hash};

/// See the module.
#[derive(Debug)]
pub(crate) struct Plans {
    shared: bool,
    made: Vec<Ready>,
}

impl Plans {
    pub(crate) fn new(seed: u64) -> Self {
        Self { shared: !Random::new(hash(&[seed, 41])).chance(10), made: Vec::new() }
    }

    /// What the planning thread answers.
    pub(crate) fn done(&mut self, wanted: Wanted) -> Request {
        if let Wanted::Plan(header) = &wanted
            && let Some(it) = self.made.iter().rev().find(|it| *it.planned.header == **header)
        {
            return Request::Planned(Box::new(Ok(it.clone())));
        }
        let done = plan_thread::done(wanted);
        if let Request::Planned(it) = &done
            && let Ok(ready) = it.as_ref()
            && self.shared
        {
            self.made.push(Ready { own: None, ..ready.clone() });
        }
        done
    }
}
