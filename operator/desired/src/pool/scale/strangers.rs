//! Jobs that servers of a pool cannot work for: their trainers are of another build, or do not come.
//!
//! In: what the control service says of jobs without servers, and what the servers that are there are made from. Out: whether a
//! job is to be counted. A job of another build would else ask for servers for ever, and get some that it cannot use.
//!
//! A job of another build asks again when the next server would be made from something else: a new template; in a pool without
//! one, another image of the chart, once the servers of the former one have gone. So it asks anew under a new leader, once.
//!
//! Bounded by the jobs that are told of.

use std::collections::BTreeMap;

use cadre_views::{JobKey, Unserved};

use super::super::manifest::image;
use super::super::revision::digest;
use super::super::server::servers;
use super::Observed;
use crate::settings::Settings;

/// What servers are made from: the digest of a revision, and in a pool without a template their image.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Make {
    digest: String,
    image: Option<String>,
}

/// Jobs of another build than the servers that are made from this. See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Strangers(BTreeMap<JobKey, Make>);

impl Strangers {
    /// Learns from the servers that are there, if all are made from the same.
    pub(super) fn look(&mut self, observed: &Observed, settings: &Settings) {
        let digest = digest(&observed.pool.spec);
        let has_template = observed.pool.spec.template.is_some();
        let all = servers(observed);
        let mut there = all.iter().filter(|it| it.stays()).peekable();
        let first = there.peek().and_then(|it| it.image()).map(str::to_owned);
        let is_empty = there.peek().is_none();
        let next = (!has_template).then(|| image(observed, &digest, settings));
        self.0.retain(|job, make| {
            let is_same = make.digest == digest && (!is_empty || make.image == next);
            is_same && observed.unserved.contains_key(job)
        });
        let mut has_come = false;
        let is_alike = there.all(|it| {
            has_come |= it.report.is_some();
            it.revision() == Some(&digest) && (has_template || it.image() == first.as_deref())
        });
        if !has_come || !is_alike {
            return;
        }
        let of_other_build = |it: &(&JobKey, &Unserved)| match it.1 {
            Unserved::OtherBuild { .. } => true,
            Unserved::NotCome | Unserved::NotWhole { .. } => false,
        };
        let make = Make { digest, image: first.filter(|_| !has_template) };
        for (job, _) in observed.unserved.iter().filter(of_other_build) {
            self.0.insert(job.clone(), make.clone());
        }
    }

    /// Whether servers are of no use to this attempt.
    pub(super) fn has(&self, observed: &Observed, attempt: &JobKey) -> bool {
        match observed.unserved.get(attempt) {
            Some(Unserved::NotCome | Unserved::NotWhole { .. }) => true,
            Some(Unserved::OtherBuild { .. }) => self.0.contains_key(attempt),
            None => false,
        }
    }
}
