//! Which job holds which servers, and since when.
//!
//! In: what the control service knows of servers, and the status as it was. Out: the jobs with their servers. The time of a
//! server is when it was first told that it works for that job, and stays as long as it does, whoever leads. What
//! a job lends stands once, with the servers that it has had longest.

use std::collections::BTreeMap;

use cadre_crds::Holder;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::Observed;
use super::server::Server;
use crate::names::name;

/// Servers by the job that they work for and the time since when; in the order of namespace, name,
/// time.
pub(super) fn holders(observed: &Observed, all: &[Server<'_>], now: Timestamp) -> Vec<Holder> {
    let mut told = BTreeMap::new();
    for holder in observed.pool.status.iter().flat_map(|it| &it.holders) {
        told.extend(holder.servers.iter().map(|it| (it.as_str(), holder)));
    }
    let mut held: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for server in all.iter().filter(|it| it.is_present()) {
        let own = name(&server.pod.metadata);
        let before = told.get(own).map(|it| ((&it.namespace, &it.name), it.since.0));
        // A server that has not come back to a new leader yet still works for its job.
        let awaited = before.filter(|_| server.is_awaited(observed.reports_complete));
        let now_for = observed.holders.get(own).map(|it| (&it.namespace, &it.name));
        let Some(job) = now_for.or(awaited.map(|it| it.0)) else { continue };
        let since = before.filter(|it| it.0 == job).map_or(now, |it| it.1);
        held.entry((job, since.as_second())).or_default().push(own.to_owned());
    }
    let holder = |(((namespace, name), second), servers): (((&String, &String), i64), _)| {
        let since = Time(Timestamp::from_second(second).unwrap_or(now));
        Holder { namespace: namespace.clone(), name: name.clone(), since, servers, lent: None }
    };
    let mut holders: Vec<Holder> = held.into_iter().map(holder).collect();
    for (attempt, &lent) in &observed.lent {
        let of_job =
            |it: &&mut Holder| (&it.namespace, &it.name) == (&attempt.namespace, &attempt.name);
        if let Some(holder) = holders.iter_mut().find(of_job) {
            holder.lent = Some(lent);
        }
    }
    holders
}
