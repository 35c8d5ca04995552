//! Brings a pool to where it follows from what is known, after one input or several.
//!
//! In: the state, the time. Out: [`Command`]s. Settling twice says nothing the second time. What an input
//! means is [`Pool`]'s.
//!
//! ```text
//! bury ──▶ quarantine ──▶ give slots ──▶ welcome ──▶ offer views ──▶ drain
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::job::{Job, Pods};
use crate::lend::Held;
use crate::load::{Load, Trouble};
use crate::pool::Pool;
use crate::server::Member;
use crate::shares::Claim;
use crate::slots::{Kind, NOMINAL_WEIGHT, Server};
use crate::types::{Command, Facts, Fate, JobKey, SERVERS_BACK_WITHIN, ServerId, Unserved, Who};

impl Pool {
    /// Sends all commands that follow from the state; none before the first facts of the cluster.
    pub fn settle(&mut self, now: Duration, out: &mut Vec<Command>) {
        let Some(facts) = self.facts.clone() else { return };
        self.bury(&facts, now);
        self.quarantine(&facts, now, out);
        self.give(&facts, now, out);
        self.welcome(now, out);
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.offer(&key, &facts, now, out);
        }
        self.drain(&facts, now, out);
    }

    /// Drops jobs and servers that the cluster no longer has. Servers of a job that is over are free
    /// again.
    fn bury(&mut self, facts: &Facts, now: Duration) {
        for (key, job) in &mut self.jobs {
            job.pods = job.pods.then(facts.jobs.contains(key));
        }
        for (id, server) in &mut self.servers {
            let fate = facts.servers.get(id);
            server.seen |= fate.is_some();
            if fate == Some(&Fate::Drains) {
                server.dismiss(false);
            }
            let Some(key) = &server.job else { continue };
            // If no trainer of the job is connected, only its pods in the facts show that it goes
            // on.
            if self.jobs.get(key).map_or(!facts.jobs.contains(key), Job::is_over) {
                server.dismiss(true);
            }
        }
        self.servers
            .retain(|id, it| facts.servers.contains_key(id) || !it.seen && it.away.is_none());
        let busy: BTreeSet<JobKey> = self
            .servers
            .values()
            .filter(|it| it.away.is_none())
            .filter_map(|it| it.job.clone())
            .collect();
        self.jobs.retain(|key, job| {
            let here = job.trainers.values().any(|it| it.attached);
            here || busy.contains(key) || !job.is_over() && job.pods != Pods::Awaited
        });
        let (jobs, health) = (&self.jobs, facts.health);
        self.in_place.retain(|(key, _), load| jobs.contains_key(key) && load.is_fresh(now, health));
    }

    /// Keeps servers out that are slow or silent, a quarter of them at most, and never the last one.
    fn quarantine(&mut self, facts: &Facts, now: Duration, out: &mut Vec<Command>) {
        let serving = |it: &&Member| it.serves.is_some() && it.job.is_some();
        let all = self.servers.values().filter(serving).count();
        // Servers that leave or are away do not count as those that continue the work.
        let stays = |it: &&Member| it.leave.is_none() && it.away.is_none() && it.trouble.is_none();
        let mut left = self.servers.values().filter(serving).filter(stays).count();
        let mut out_of_work = self.servers.values().filter(|it| it.trouble.is_some()).count();
        for (&id, server) in &mut self.servers {
            let at_work = server.serves.is_some() && server.job.is_some() && server.away.is_none();
            if !at_work || server.trouble.is_some() || server.leave.is_some() {
                continue;
            }
            let Some(trouble) = server.load.trouble(now, facts.health) else { continue };
            if out_of_work < (all / 4).max(1) && left > 1 {
                out_of_work += 1;
                left -= 1;
                server.trouble = Some(trouble);
                server.dismiss(false);
                let why = match trouble {
                    Trouble::Slow => {
                        "is slower than the others by more than spec.health.slowFactorPercent"
                    }
                    Trouble::Silent => "does not report any more",
                    Trouble::Lost => "was given up",
                };
                out.push(Command::Notice("Quarantined", format!("{} {why}", Who::Server(id))));
            }
        }
    }

    /// Divides the slots among the jobs.
    fn give(&mut self, facts: &Facts, now: Duration, out: &mut Vec<Command>) {
        // A new controller does not give away what a job holds that has not come back yet.
        let back =
            |key: &JobKey| self.jobs.get(key).is_some_and(|it| it.is_over() || it.is_active());
        let young = self.since.is_some_and(|it| now < it + SERVERS_BACK_WITHIN);
        if young && !facts.jobs.iter().all(back) {
            return;
        }
        let mut active: Vec<_> = self.jobs.iter().filter(|it| it.1.claims(now)).collect();
        active.sort_by_key(|it| it.1.arrival);
        let claim = |(key, job): &(&JobKey, &Job)| Claim {
            job: (*key).clone(),
            share: job.facts.share,
            cap: facts.cap,
            version: job.data_version,
        };
        let claims: Vec<Claim<JobKey>> = active.iter().map(claim).collect();
        let mut held = BTreeMap::new();
        for (key, job) in &active {
            let slots = job.slots.iter().flat_map(|it| it.dedicated().collect::<Vec<_>>());
            held.extend(slots.map(|slot| (slot, (*key).clone())));
        }
        let slots = self.versions(facts);
        self.settle_usage(&claims, facts, now);
        let mut given = self.divide_lent(&claims, &Held { slots: &slots, by: &held });
        // A server whose build no job has waits. Its slot stays with its holder, which may get it
        // back.
        let strange = |slot: &u32| {
            let own = slots.get(slot).copied().flatten();
            own.is_some_and(|own| claims.iter().all(|it| it.version != own))
        };
        given.extend(held.into_iter().filter(|(slot, _)| strange(slot)));
        for (key, job) in self.jobs.iter_mut().filter(|it| it.1.is_active()) {
            let own: BTreeSet<u32> =
                given.iter().filter(|it| it.1 == key).map(|it| *it.0).collect();
            let before = job.unserved;
            job.unserved = unserved(job, &slots, now);
            if let Some(why) = job.unserved
                && before.map(Unserved::reason) != Some(why.reason())
            {
                out.push(Command::Notice(why.reason(), why.words(&format!("job {key}"))));
            }
            job.give(&own, facts.in_place, now);
        }
        self.note_returns(facts, now);
        for (id, server) in &mut self.servers {
            if let Some(job) = &server.job
                && self.jobs.get(job).is_some_and(Job::is_active)
                && given.get(&id.index) != Some(job)
            {
                server.dismiss(true);
            }
        }
    }

    /// The pool's slots with the data version of the newest server that may work in each.
    fn versions(&self, facts: &Facts) -> BTreeMap<u32, Option<u32>> {
        let mut slots: BTreeMap<u32, Option<u32>> =
            facts.slots.iter().map(|&slot| (slot, None)).collect();
        // In the order of their incarnations.
        for (id, server) in self.servers.iter().filter(|it| it.1.may_work()) {
            if let Some(version) = slots.get_mut(&id.index) {
                *version = Some(server.data_version());
            }
        }
        slots
    }

    /// Welcomes workers that wait: trainers once the conductor is there, servers once they have a job.
    fn welcome(&mut self, now: Duration, out: &mut Vec<Command>) {
        for (key, job) in self.jobs.iter_mut().filter(|it| it.1.is_active()) {
            let conductor = job.conductor();
            let welcome = |to: Who, resume: String| Command::Welcome {
                to,
                job: key.clone(),
                secret: job.secret.clone(),
                conductor: conductor.clone(),
                resume,
            };
            for (&rank, trainer) in &mut job.trainers {
                if trainer.attached && trainer.hello.session.is_empty() {
                    trainer.hello.session = key.to_string();
                    out.push(welcome(Who::Trainer(key.clone(), rank), job.resume.clone()));
                }
            }
            let slots: BTreeSet<u32> =
                job.slots.iter().flat_map(|it| it.dedicated().collect::<Vec<_>>()).collect();
            // A server of another build waits for a job of that build.
            let free = |id: &ServerId, it: &Member| {
                it.is_free() && it.data_version() == job.data_version && slots.contains(&id.index)
            };
            for (&id, server) in &mut self.servers {
                if free(&id, server) {
                    server.job = Some(key.clone());
                    server.load.begin(now);
                    out.push(welcome(Who::Server(id), job.resume.clone()));
                    if let Some(roster) = job.roster() {
                        out.push(Command::Trainers(Who::Server(id), roster));
                    }
                }
            }
        }
    }

    /// Sends a job's conductor the next view, if there is one.
    fn offer(&mut self, key: &JobKey, facts: &Facts, now: Duration, out: &mut Vec<Command>) {
        let Some(job) = self.jobs.get_mut(key).filter(|it| it.is_active()) else { return };
        let servers = &self.servers;
        // A server that is known to be gone is not waited for.
        let settled = |id: ServerId| {
            let server = servers.get(&id);
            server.is_some_and(|it| it.away.is_none() || it.trouble.is_some())
                || !facts.servers.contains_key(&id)
        };
        if job.awaits(settled, now) {
            return;
        }
        let offers: BTreeMap<u32, Server> = servers
            .values()
            .filter_map(|it| it.offer(key, now))
            .map(|it| (it.index, it.clone()))
            .collect();
        let learnt = |load: &Load| {
            if job.facts.reproducible { NOMINAL_WEIGHT } else { load.weight(now, facts.health) }
        };
        let dedicated = servers
            .iter()
            .filter(|it| it.1.offer(key, now).is_some())
            .map(|(id, it)| ((Kind::Dedicated, id.index), learnt(&it.load)));
        let in_place = self.in_place.iter().filter(|it| it.0.0 == *key);
        let in_place = in_place.map(|((_, rank), it)| ((Kind::InPlace, *rank), learnt(it)));
        let weights = dedicated.chain(in_place).collect();
        job.fill(&offers, &weights, now);
        let Some(view) = job.view(self.term, facts.health.reshape_after, now) else { return };
        let number = view.number;
        out.push(Command::View(Who::Trainer(key.clone(), 0), view));
        for server in self.servers.values_mut().filter(|it| it.job.as_ref() == Some(key)) {
            if let Some(leave) = server.leave.as_mut() {
                leave.after.get_or_insert(number);
            }
        }
    }

    /// Lets servers go whose work is with others by now.
    fn drain(&mut self, facts: &Facts, now: Duration, out: &mut Vec<Command>) {
        let stay = |it: &&Member| it.leave.is_none() && it.away.is_none();
        let stay: BTreeSet<JobKey> =
            self.servers.values().filter(stay).filter_map(|it| it.job.clone()).collect();
        for (&id, server) in &mut self.servers {
            let (Some(key), Some(leave)) = (&server.job, &mut server.leave) else { continue };
            if leave.told || server.away.is_some() {
                continue;
            }
            let job = self.jobs.get(key);
            // A job that is not known here yet goes on while it has pods.
            let over = leave.over || job.map_or(!facts.jobs.contains(key), Job::is_over);
            let used = job.is_some_and(|it| it.offers(id));
            // A job that rests ends no step. A header that goes out just then is waited for by the server. Its last server stays
            // until it has another one.
            let rests = job.is_some_and(|it| it.usage.is_quiet(now))
                && server.load.is_spare(now, facts.health)
                && stay.contains(key);
            let confirmed = match leave.after {
                Some(after) => rests || job.is_some_and(|it| it.confirmed >= Some(after)),
                // No view of this controller has named it; a step may still use an older one of another.
                None => !used && job.is_some_and(|it| it.confirmed >= it.adopted),
            };
            if over || confirmed && !used {
                leave.told = true;
                out.push(Command::Drain { to: Who::Server(id), stays: leave.stays, over });
            }
        }
    }
}

/// Why a job has no servers, in a pool with servers of these data versions in its slots. That all are of another
/// build holds until one of its own has come: of a pool that has become empty nothing else is known.
fn unserved(job: &Job, slots: &BTreeMap<u32, Option<u32>>, now: Duration) -> Option<Unserved> {
    if !job.claims(now) {
        return Some(job.not_whole());
    }
    let data_version = job.data_version;
    let others = slots.values().all(|it| it.is_some_and(|it| it != data_version));
    let was = matches!(job.unserved, Some(Unserved::OtherBuild { .. }));
    let has_own = slots.values().any(|it| *it == Some(data_version));
    let is_alone = others && !slots.is_empty() || was && !has_own;
    is_alone.then_some(Unserved::OtherBuild { data_version })
}
