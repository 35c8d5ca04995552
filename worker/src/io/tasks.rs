//! The server's side of the IO thread, dedicated or in place: rows come in, works go to the threads that
//! compute, results are published.
//!
//! In: events of the exchange, finished works. Out: works that can run ([`Output::Ready`]). It runs no
//! kernel; the only bytes it copies itself are the own trainer's, into the landing of a bundle that also
//! has rows from elsewhere, and those of works that run ahead of their bundle.
//!
//! ```text
//! pulls of a bundle:  asked for ──all under way──▶ works go out early, with a promise ──all ended well──▶ kept
//!                         │                                                        └──one did not──▶ broken
//!                         ├──all ended well (rows of the host)──▶ works go out
//!                         └──some did, and there is nothing else to do──▶ their works go out ahead, on a copy
//! ```
//!
//! Invariant: every landing and result here was granted by the machine, which counts their bytes; and what
//! was computed on rows that may not count reaches nobody before the machine has said that they do.

mod handing;
mod pulling;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_exchange::LandingId;
use cadre_planner::BundleId;
use cadre_protocol::server::{Command, Event, Host, Server};
use cadre_protocol::{At, Nanos, PullId, PullResult, Settings, Work as WorkId};
use cadre_step::envelope::{Said, ServerStep};
use cadre_step::lowering::Tensor;

use super::early::Early;
use super::exchange::Exchange;
use super::gather;
use super::output::{Output, Side};
use super::planning::Asker;
use super::shared::{Shared, result_key};
use crate::launch::{BundleRows, Done, Results, Work};
use crate::memory::Memory;

/// Rows of one bundle in one phase.
#[derive(Debug)]
struct Held<M> {
    /// Where rows of others land, until they are all here.
    landing: Option<LandingId>,
    /// All rows, once some work of the bundle was handed out.
    rows: Option<BundleRows<M>>,
    /// Parcels on their way or here.
    parcels: usize,
    /// Works that went out ahead, on a copy of their rows, and did not run.
    ahead: BTreeSet<WorkId>,
    early: Early,
}

impl<M> Default for Held<M> {
    fn default() -> Self {
        let (landing, rows, ahead, early) = (None, None, BTreeSet::new(), Early::default());
        Self { landing, rows, parcels: 0, ahead, early }
    }
}

/// What this server did in a step so far.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    tasks: u32,
    busy_seconds: f64,
    bytes_pulled: u64,
}

/// What a pull brings.
#[derive(Clone, Copy, Debug)]
struct Brings {
    at: At,
    bundle: BundleId,
    /// From another process.
    bytes: u64,
}

/// See the module.
pub struct Tasks<M> {
    host: Host,
    machine: Server,
    held: BTreeMap<(At, BundleId), Held<M>>,
    pulls: BTreeMap<PullId, Brings>,
    tallies: BTreeMap<u64, Tally>,
}

impl<M: Memory> Tasks<M> {
    /// A server with `memory` bytes for rows and results; `provider` brings the rows.
    pub fn new(
        host: Host,
        memory: u64,
        settings: Settings,
        (provider, now): (&impl Exchange<Memory = M>, Nanos),
    ) -> Self {
        let settings = Settings { runs_ahead: provider.copies_landed(), ..settings };
        Self {
            host,
            machine: Server::new(host, memory, settings, now),
            held: BTreeMap::new(),
            pulls: BTreeMap::new(),
            tallies: BTreeMap::new(),
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.machine.next_deadline()
    }

    /// Whether a server that is to leave may: nothing is held here, and the conductor has said that nothing will be.
    pub fn may_leave(&self) -> bool {
        let holds = self.held.values().any(|it| it.parcels > 0) || !self.pulls.is_empty();
        self.machine.is_spare() && !holds
    }

    /// Whether no step that is out counts on this server.
    pub fn is_spare(&self) -> bool {
        !self.machine.has_steps()
    }

    /// Whether every trainer has all results up to a phase.
    pub fn passed(&self, at: At) -> bool {
        self.machine.passed(at)
    }

    /// Whether anything of a step is held here.
    pub fn holds(&self, step: u64) -> bool {
        self.tallies.contains_key(&step)
    }

    /// A pull of this side ended.
    pub fn pulled(
        &mut self,
        shared: &mut Shared<impl Exchange<Memory = M>>,
        pull: PullId,
        result: PullResult,
    ) {
        self.handle(shared, Event::Pulled { pull, result });
    }

    /// Works ran: their results are for their readers now. Those of one phase are told together.
    pub fn ran(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, done: Vec<Done<M>>) {
        let mut done = done.into_iter().peekable();
        while let Some(first) = done.next() {
            let at = first.work.at();
            let mut works = vec![self.keep(shared, first)];
            while let Some(next) = done.next_if(|it| it.work.at() == at) {
                works.push(self.keep(shared, next));
            }
            self.handle(shared, Event::Ran { at, works: works.clone() });
            if self.machine.watermark() >= Some(at) {
                for work in works {
                    free_result(shared, at, work);
                }
            }
        }
    }

    /// Keeps the results of a work for its readers.
    fn keep(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, done: Done<M>) -> WorkId {
        let Done { work, results, busy } = done;
        let (at, id) = (work.at(), WorkId(work.work));
        self.over(&work.planned, at, id);
        // Before its room is given to others.
        drop(work);
        let tally = self.tallies.entry(at.step).or_default();
        tally.tasks += 1;
        tally.busy_seconds += busy.as_secs_f64();
        for (tensor, memory) in named(&results) {
            shared.provider.publish(result_key(at, tensor, id), memory);
        }
        shared.results.insert((at, id), Arc::new(results));
        tracing::trace!("ran {at:?} {id:?}");
        id
    }

    /// A work was dropped because nobody wants it any more.
    pub fn dropped(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, work: Work<M>) {
        let at = work.at();
        let works = vec![WorkId(work.work)];
        self.over(&work.planned, at, works[0]);
        drop(work);
        self.handle(shared, Event::Ran { at, works });
    }

    /// Runs the machine on an event and does what it commands.
    pub fn handle(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, event: Event) {
        let mut commands = Vec::new();
        let before = self.machine.watermark();
        self.machine.handle(shared.now(), event, &mut commands);
        if self.machine.watermark() > before {
            self.sweep(shared);
        }
        for command in commands {
            self.obey(shared, command);
        }
    }

    /// Lets landings go that were kept for pulls which are not tried again.
    fn sweep(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>) {
        let Some(passed) = self.machine.watermark() else { return };
        for key in left(&self.held, passed) {
            if let Some(landing) = self.held.remove(&key).and_then(|it| it.landing) {
                shared.provider.discard(landing);
            }
        }
    }

    fn obey(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, command: Command) {
        tracing::trace!("server side: {command:?}");
        match command {
            Command::Send { to, message } => shared.send(to, message),
            Command::Pull { pull, peer, at, parcel, deadline } => {
                self.pull(shared, pull, (peer, deadline), at, parcel);
            }
            Command::Accept { pull, .. } => {
                if let Some(Brings { at, bytes, .. }) = self.pulls.remove(&pull)
                    && let Some(tally) = self.tallies.get_mut(&at.step)
                {
                    tally.bytes_pulled += bytes;
                }
            }
            Command::Discard { pull } => {
                if let Some(Brings { at, bundle, .. }) = self.pulls.remove(&pull) {
                    self.spoil((at, bundle), pull);
                    self.brought_nothing(shared, at, bundle);
                }
            }
            Command::Ready { at, work } => self.make_ready(shared, at, work),
            Command::Ahead { at, works } => self.run_ahead(shared, at, &works),
            Command::Cancel(at) => shared.outputs.put(Output::Cancelled(at)),
            Command::FreeInput { at, parcel } => {
                let planned = &shared.steps[&at.step].planned;
                let (nano, direction) = planned.nano_of(at.phase);
                let (bundle, _) = nano.lists.parcel(parcel, direction);
                self.let_go(shared, at, bundle);
            }
            Command::FreeResult { at, work } => free_result(shared, at, work),
            Command::StepOver(step) => self.step_over(shared, step),
            Command::Reassign { step, round: _, tables } => {
                shared.reassign(step, tables, Asker::Members);
            }
            Command::Close(peer) => shared.close(peer),
            Command::End(end) => shared.outputs.put(Output::End(Side::Server, end)),
        }
    }

    fn make_ready(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, at: At, work: WorkId) {
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let bundle = planned.bundle_of(at.phase, work.0);
        let held = self.held.get_mut(&(at, bundle)).expect("a ready work has its parcels");
        match (&held.rows, held.landing.take()) {
            // Went out early: the rows stay, nobody lands there any more.
            (Some(_), Some(landing)) => {
                drop(shared.provider.take(landing).expect("all parcels of a ready work ended"));
            }
            (Some(_), None) => {}
            (None, landing) => match gather::gather(shared, &planned, at, bundle, landing) {
                Ok(rows) => held.rows = Some(rows),
                Err(why) => return shared.broke(&why),
            },
        }
        if held.early.keep(work) {
            shared.outputs.put(Output::Kept);
        } else {
            let rows = held.rows.clone().expect("they were just gathered");
            self.hand_out(shared, (&planned, at), (work, rows), None);
        }
    }

    /// Bytes of rows and results that this server holds.
    pub fn memory(&self, shared: &Shared<impl Exchange<Memory = M>>) -> u64 {
        let rows = self.held.iter().filter_map(|(&(at, bundle), held)| {
            let (nano, direction) = shared.steps.get(&at.step)?.planned.nano_of(at.phase);
            let here = u64::from(held.landing.is_some() || held.rows.is_some());
            let copies = here + u64::from(!held.ahead.is_empty());
            Some(copies * nano.lists.inputs(bundle, direction).bytes as u64)
        });
        let results = shared.results.values().flat_map(|it| named(it));
        rows.sum::<u64>() + results.map(|it| it.1.len_bytes()).sum::<u64>()
    }

    /// Opens the account of a step.
    pub fn begin(&mut self, step: u64) {
        self.tallies.entry(step).or_default();
    }

    fn step_over(&mut self, shared: &mut Shared<impl Exchange<Memory = M>>, step: u64) {
        shared.tracer.flush();
        let tally = self.tallies.remove(&step);
        shared.outputs.put(Output::Over(step));
        let Some(Tally { tasks, busy_seconds, bytes_pulled }) = tally else { return };
        let done = ServerStep { step, tasks, busy_seconds, bytes_pulled };
        shared.tell_conductor(Said::ServerStep(done));
    }
}

/// What is held for phases up to one that the watermark has passed, and for which nothing is under way. Looks at nothing of later
/// phases: works may run far ahead of it.
fn left<M>(held: &BTreeMap<(At, BundleId), Held<M>>, passed: At) -> Vec<(At, BundleId)> {
    let passed = held.range(..=(passed, BundleId(u32::MAX)));
    passed.filter(|it| it.1.parcels == 0).map(|it| *it.0).collect()
}

/// The tensors of a work's results, by name.
pub fn named<M>(results: &Results<M>) -> Vec<(Tensor, &M)> {
    match results {
        Results::Forward([o, lse]) => vec![(Tensor::O, o), (Tensor::OLse, lse)],
        Results::Backward([dq, dk, dv]) => {
            vec![(Tensor::DQ, dq), (Tensor::DK, dk), (Tensor::DV, dv)]
        }
    }
}

fn free_result(shared: &mut Shared<impl Exchange>, at: At, work: WorkId) {
    if let Some(results) = shared.results.remove(&(at, work)) {
        for (tensor, _) in named(&results) {
            shared.provider.withdraw(result_key(at, tensor, work));
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_protocol::Phase;

    use super::*;

    #[test]
    fn what_is_left_of_phases_that_the_watermark_has_passed_is_let_go_and_nothing_else() {
        let at = |step, phase| At { step, phase: Phase(phase) };
        let held = |parcels| Held::<()> { parcels, ..Held::default() };
        let all = [
            ((at(1, 7), BundleId(u32::MAX)), held(0)),
            ((at(2, 3), BundleId(0)), held(0)),
            // Rows of it are on their way.
            ((at(2, 3), BundleId(5)), held(2)),
            ((at(2, 3), BundleId(u32::MAX)), held(0)),
            ((at(2, 4), BundleId(0)), held(0)),
            ((at(3, 0), BundleId(1)), held(0)),
        ];
        let all = BTreeMap::from(all);
        let expected = [(1, 7, u32::MAX), (2, 3, 0), (2, 3, u32::MAX)]
            .map(|it| (at(it.0, it.1), BundleId(it.2)));
        assert_eq!(left(&all, at(2, 3)), expected);
        assert!(left(&all, at(1, 6)).is_empty());
    }
}
