//! The server's side of the IO thread, dedicated or in place: rows come in, works go to the threads that
//! compute, results are published.
//!
//! In: events of the exchange, finished works. Out: works that can run ([`Tasks::ready`]). It runs no
//! kernel; the only bytes it copies itself are the own trainer's, into the landing of a bundle that also
//! has rows from elsewhere.
//!
//! Invariant: every landing and result here was granted by the machine, which counts their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_exchange::LandingId;
use cadre_kernels::device;
use cadre_planner::{BundleId, RankId};
use cadre_protocol::server::{Command, Event, Host, Server};
use cadre_protocol::{
    At, End, Filler, Nanos, Parcel, Peer, PullFailure, PullId, PullResult, Settings, TrainerId,
    Work as WorkId,
};

use super::envelope::{Envelope, ServerStep};
use super::rows::tensors;
use super::shared::{Shared, Side, result_key, rows_key};
use crate::launch::{BundleRows, Done, Results, Work};
use crate::lowering::Tensor;
use crate::memory::Memory;
use crate::planned::{PlannedStep, filler};

/// Rows of one bundle in one phase.
#[derive(Debug, Default)]
struct Held {
    /// Where rows of others land, until they are all here.
    landing: Option<LandingId>,
    /// All rows, once some work of the bundle was ready.
    rows: Option<BundleRows>,
    /// Parcels on their way or here.
    parcels: usize,
}

/// What this server did in a step so far.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    tasks: u32,
    busy_seconds: f64,
    bytes_before: u64,
}

/// See the module.
pub struct Tasks {
    host: Host,
    machine: Server,
    held: BTreeMap<(At, BundleId), Held>,
    pulls: BTreeMap<PullId, (At, BundleId)>,
    tallies: BTreeMap<u64, Tally>,
    /// Works for the threads that compute: those planned for this server, and those moved to it.
    pub ready: Vec<(Work, Planned)>,
    /// Up to here nothing is wanted any more.
    pub cancelled: Option<At>,
    /// Why nothing more comes from this side.
    pub end: Option<End>,
    /// A step's assignments could not be made.
    pub failed: Option<cadre_planner::Error>,
    /// Steps that are over here.
    pub over: Vec<u64>,
}

/// Whether a work was planned for the server that runs it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Planned {
    /// It was.
    Here,
    /// Its own server was lost.
    Elsewhere,
}

impl Tasks {
    /// A server with `memory` bytes for rows and results.
    pub fn new(host: Host, memory: u64, settings: Settings, now: Nanos) -> Self {
        Self {
            host,
            machine: Server::new(host, memory, settings, now),
            held: BTreeMap::new(),
            pulls: BTreeMap::new(),
            tallies: BTreeMap::new(),
            ready: Vec::new(),
            cancelled: None,
            end: None,
            failed: None,
            over: Vec::new(),
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.machine.next_deadline()
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.held.is_empty() && self.pulls.is_empty()
    }

    /// Whether anything of a step is held here.
    pub fn holds(&self, step: u64) -> bool {
        self.tallies.contains_key(&step)
    }

    /// A pull of this side ended.
    pub fn pulled(&mut self, shared: &mut Shared, pull: PullId, result: PullResult) {
        self.handle(shared, Event::Pulled { pull, result });
    }

    /// A work ran: its results are for its readers now.
    pub fn ran(&mut self, shared: &mut Shared, done: Done) {
        let Done { work, results, busy } = done;
        let (at, id) =
            (At { step: work.planned.header.step, phase: work.phase }, WorkId(work.work));
        let tally = self.tally(shared, at.step);
        tally.tasks += 1;
        tally.busy_seconds += busy.as_secs_f64();
        for (tensor, memory) in named(&results) {
            shared.provider.publish(result_key(at, tensor, id), memory);
        }
        shared.results.insert((at, id), Arc::new(results));
        tracing::trace!("ran {at:?} {id:?}");
        self.handle(shared, Event::Ran { at, works: vec![id] });
        if self.machine.watermark() >= Some(at) {
            free_result(shared, at, id);
        }
    }

    /// A work was dropped because nobody wants it any more.
    pub fn dropped(&mut self, shared: &mut Shared, work: &Work) {
        let at = At { step: work.planned.header.step, phase: work.phase };
        self.handle(shared, Event::Ran { at, works: vec![WorkId(work.work)] });
    }

    /// Runs the machine on an event and does what it commands.
    pub fn handle(&mut self, shared: &mut Shared, event: Event) {
        let mut commands = Vec::new();
        self.machine.handle(shared.now(), event, &mut commands);
        for command in commands {
            self.obey(shared, command);
        }
    }

    fn obey(&mut self, shared: &mut Shared, command: Command) {
        tracing::trace!("server side: {command:?}");
        match command {
            Command::Send { to, message } => shared.send(to, message),
            Command::Pull { pull, peer, at, parcel, deadline } => {
                self.pull(shared, pull, (peer, deadline), at, parcel);
            }
            Command::Accept { pull, .. } => {
                self.pulls.remove(&pull);
            }
            Command::Discard { pull } => {
                if let Some((at, bundle)) = self.pulls.remove(&pull) {
                    self.let_go(shared, at, bundle);
                }
            }
            Command::Ready { at, work } => self.make_ready(shared, at, work),
            Command::Cancel(at) => self.cancelled = self.cancelled.max(Some(at)),
            Command::FreeInput { at, parcel } => {
                let planned = &shared.steps[&at.step].planned;
                let (nano, direction) = planned.nano_of(at.phase);
                let (bundle, _) = nano.lists.parcel(parcel, direction);
                self.let_go(shared, at, bundle);
            }
            Command::FreeResult { at, work } => free_result(shared, at, work),
            Command::StepOver(step) => self.step_over(shared, step),
            Command::Reassign { step, round: _, tables } => match shared.table(step, &tables) {
                Ok(Some(table)) => self.handle(shared, Event::Round(Arc::new(table))),
                Ok(None) => {}
                Err(error) => self.failed = Some(error),
            },
            Command::Close(peer) => shared.close(peer),
            Command::End(end) => self.end = Some(end),
        }
    }

    fn pull(
        &mut self,
        shared: &mut Shared,
        pull: PullId,
        (from, deadline): (TrainerId, Nanos),
        at: At,
        parcel: Parcel,
    ) {
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let (nano, direction) = planned.nano_of(at.phase);
        let (bundle, source) = nano.lists.parcel(parcel, direction);
        let held = self.held.entry((at, bundle)).or_default();
        held.parcels += 1;
        self.pulls.insert(pull, (at, bundle));
        if Peer::Trainer(from) == shared.me {
            let here = shared.rows.contains_key(&at);
            let result = if here { Ok(shared.me.incarnation()) } else { Err(PullFailure::Gone) };
            return shared.ended.push_back((Side::Server, pull, result));
        }
        let landed = held
            .landing
            .map_or_else(|| shared.provider.land(nano.lists.inputs(bundle, direction).bytes), Ok);
        let landing = match landed {
            Ok(landing) => landing,
            Err(why) => {
                shared.broken = Some(why.to_string());
                return shared.ended.push_back((Side::Server, pull, Err(PullFailure::Gone)));
            }
        };
        held.landing = Some(landing);
        let parts = source
            .pieces
            .iter()
            .map(|(tensor, pieces)| (rows_key(at, *tensor), pieces.clone(), landing));
        shared.pull((Side::Server, pull), Peer::Trainer(from), parts.collect(), deadline);
    }

    /// One parcel of a bundle is needed no more.
    fn let_go(&mut self, shared: &mut Shared, at: At, bundle: BundleId) {
        let Some(held) = self.held.get_mut(&(at, bundle)) else { return };
        held.parcels -= 1;
        if held.parcels == 0 {
            let held = self.held.remove(&(at, bundle)).expect("it was there a moment ago");
            if let Some(landing) = held.landing {
                shared.provider.discard(landing);
            }
        }
    }

    fn make_ready(&mut self, shared: &mut Shared, at: At, work: WorkId) {
        let planned = Arc::clone(&shared.steps[&at.step].planned);
        let bundle = planned.bundle_of(at.phase, work.0);
        let held = self.held.get_mut(&(at, bundle)).expect("a ready work has its parcels");
        let rows = match held.rows.clone() {
            Some(rows) => rows,
            None => match gather(shared, &planned, at, bundle, held.landing.take()) {
                Ok(rows) => held.rows.insert(rows).clone(),
                Err(why) => return shared.broken = Some(why.to_string()),
            },
        };
        let slot = planned.slot_of(at.phase, cadre_protocol::Bundle(bundle.0));
        let member = planned.header.fillers[usize::from(slot.0)].as_ref().map(filler);
        let mine = match self.host {
            Host::Dedicated(me) => Filler::Server(me),
            Host::InPlace(me) => Filler::InPlace(me),
        };
        let home = if member == Some(mine) { Planned::Here } else { Planned::Elsewhere };
        self.ready.push((Work { planned, phase: at.phase, work: work.0, rows }, home));
    }

    fn tally(&mut self, shared: &Shared, step: u64) -> &mut Tally {
        let bytes_before = shared.bytes_pulled;
        self.tallies.entry(step).or_insert(Tally { bytes_before, ..Tally::default() })
    }

    /// Opens the account of a step.
    pub fn begin(&mut self, shared: &Shared, step: u64) {
        self.tally(shared, step);
    }

    fn step_over(&mut self, shared: &mut Shared, step: u64) {
        self.over.push(step);
        shared.tracer.flush();
        let Some(Tally { tasks, busy_seconds, bytes_before }) = self.tallies.remove(&step) else {
            return;
        };
        let bytes_pulled = shared.bytes_pulled - bytes_before;
        let done = ServerStep { step, tasks, busy_seconds, bytes_pulled };
        shared.tell_conductor(Envelope::ServerStep(done));
    }
}

/// All rows of a bundle in one place.
fn gather(
    shared: &mut Shared,
    planned: &PlannedStep,
    at: At,
    bundle: BundleId,
    landing: Option<LandingId>,
) -> Result<BundleRows, device::Error> {
    let (nano, direction) = planned.nano_of(at.phase);
    let inputs = nano.lists.inputs(bundle, direction);
    if let (None, [source], Some(rows)) = (landing, &inputs.sources[..], shared.rows.get(&at)) {
        // One piece a tensor: the rows lie side by side already. Queries of several tasks need not.
        if source.pieces.iter().all(|it| it.1.len() == 1) && side_by_side(planned, at, bundle) {
            return Ok(BundleRows::Home(rows.clone()));
        }
    }
    let mut room = match landing {
        Some(landing) => shared.provider.take(landing).expect("all parcels of a ready work ended"),
        None => shared.provider.place().room(inputs.bytes)?,
    };
    let me = match shared.me {
        Peer::Trainer(TrainerId(me)) => RankId(me),
        Peer::Server(_) => return Ok(BundleRows::Landed(room.share())),
    };
    let own = inputs.sources.iter().filter(|it| it.rank == me);
    for (tensor, pieces) in own.flat_map(|it| &it.pieces) {
        let rows = shared.rows.get(&at).expect("own rows stay until the phase is passed");
        let source =
            tensors(rows).find(|it| it.0 == *tensor).expect("a source names its tensors").1;
        shared.provider.place().copy(source, pieces, &mut room)?;
    }
    Ok(BundleRows::Landed(room.share()))
}

/// Whether every task's rows and the keys of a bundle are one piece each, of whole rows.
fn side_by_side(planned: &PlannedStep, at: At, bundle: BundleId) -> bool {
    let (nano, _) = planned.nano_of(at.phase);
    let whole = &nano.plan.bundles()[bundle.0 as usize];
    let heads = nano.problem.heads;
    let one_piece = |rows| nano.problem.layout.locate(whole.document, rows).count() == 1;
    whole.kv_heads == (0..heads.kv)
        && one_piece(whole.keys.clone())
        && nano.plan.tasks_of(bundle).iter().all(|it| one_piece(it.rows.clone()))
}

/// The tensors of a work's results, by name.
pub fn named(results: &Results) -> Vec<(Tensor, &Memory)> {
    match results {
        Results::Forward([o, lse]) => vec![(Tensor::O, o), (Tensor::OLse, lse)],
        Results::Backward([dq, dk, dv]) => {
            vec![(Tensor::DQ, dq), (Tensor::DK, dk), (Tensor::DV, dv)]
        }
    }
}

fn free_result(shared: &mut Shared, at: At, work: WorkId) {
    if let Some(results) = shared.results.remove(&(at, work)) {
        for (tensor, _) in named(&results) {
            shared.provider.withdraw(result_key(at, tensor, work));
        }
    }
}
