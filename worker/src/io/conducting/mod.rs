//! The conductor's side of the IO thread, in trainer 0: carries out what [`cadre_step::conduct::decisions`] decides.
//!
//! In: what the conductor is told, and what was made and planned for it. Out: headers and rounds to all, and to the controller
//! progress, notices and the places where faults are to be fired.
//!
//! Nothing is decided here: each command is carried out at one place, in the order in which they come. What costs as much as a step
//! has documents is done by the planning thread.

pub(crate) mod reports;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_control::{Moment, Settings};
use cadre_crds::Wire;
use cadre_protocol::{Nanos, Peer};
use cadre_step::conduct::decisions::{
    Command, Decisions, Event, FaultAt, Level, Over, Refused, Start,
};
use cadre_step::conduct::{Draft, View};
use cadre_step::envelope::Said;
use cadre_step::words::Body;

use super::encoded::Encoded;
use super::exchange::Exchange;
use super::output::Output;
use super::planning::{self, Asker, Figures, Own, Ready, Wanted};
use super::shared::Shared;

/// A step that is out, as it is told and begun.
#[derive(Debug)]
struct Published {
    /// Until it begins here.
    ready: Option<Ready>,
    /// What the controller is told of its plans.
    figures: Figures,
    /// The header as it is told, until it is; then as a word.
    encoded: Option<Encoded>,
    word: Option<Arc<Body>>,
}

/// See the module.
pub struct Conducting {
    decisions: Decisions,
    /// Type of rows on the wire.
    wire: Wire,
    published: BTreeMap<u64, Published>,
    /// Room for what is decided, and when something is due after that: it is asked for twice a turn.
    commands: Vec<Command>,
    deadline: Option<Nanos>,
}

impl Conducting {
    /// The conductor of the job of `draft`, from step `first` on. Of what the controller says of the `job` it takes the faults, and
    /// how many failovers there were.
    pub fn new(
        draft: Draft,
        settings: cadre_protocol::Settings,
        first: u64,
        job: &Settings,
        now: Nanos,
    ) -> Self {
        let faults: BTreeSet<_> = job.faults.iter().copied().map(fault).collect();
        let start = Start { first, faults, failovers: job.failovers };
        let wire = draft.wire;
        let decisions = Decisions::new(draft, settings, start, now);
        let deadline = decisions.next_deadline();
        let (published, commands) = (BTreeMap::new(), Vec::new());
        Self { decisions, wire, published, commands, deadline }
    }

    /// What is decided so far.
    pub fn decisions(&self) -> &Decisions {
        &self.decisions
    }

    /// Whether the job is about to end by the names of those who left it.
    pub fn names_leavers(&self) -> bool {
        self.decisions.names_leavers()
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.deadline
    }

    /// The controller offers servers.
    pub fn view(&mut self, shared: &mut Shared<impl Exchange>, mut view: View) {
        if self.wire == Wire::F32 {
            // Their GPUs have no part in such rows.
            for id in view.slots.iter_mut().filter_map(|it| it.numerics.as_mut()) {
                *id = cadre_kernels::numerics_of_cpu(id).to_owned();
            }
        }
        self.handle(shared, Event::View(view));
    }

    /// The controller has fired the faults of a moment.
    pub fn fired(&mut self, shared: &mut Shared<impl Exchange>, moment: Moment) {
        self.handle(shared, Event::Fired(fault(moment)));
    }

    /// A header was planned for this process.
    pub fn planned(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        planned: Result<Ready, planning::Error>,
    ) {
        let planned = match planned {
            Ok(mut ready) => {
                let Some(Own { word, figures }) = ready.own.take() else { return };
                let planned = Arc::clone(&ready.planned);
                let (ready, encoded) = (Some(ready), Some(word));
                let published = Published { ready, figures, encoded, word: None };
                self.published.insert(planned.header.step, published);
                Ok(planned)
            }
            Err(error) => Err(refused(&error)),
        };
        self.handle(shared, Event::Planned(planned));
    }

    /// Decides what follows from an event, and carries it out.
    pub fn handle(&mut self, shared: &mut Shared<impl Exchange>, event: Event) {
        let mut commands = std::mem::take(&mut self.commands);
        self.decisions.handle(shared.now(), event, &mut commands);
        self.deadline = self.decisions.next_deadline();
        for command in commands.drain(..) {
            self.obey(shared, command);
        }
        self.commands = commands;
    }

    fn obey(&mut self, shared: &mut Shared<impl Exchange>, command: Command) {
        match command {
            Command::Make(making) => shared.outputs.put(Output::Plan(Wanted::Making(making))),
            Command::Plan(header, trainers) => {
                shared.outputs.put(Output::Plan(Wanted::Own(header, trainers)));
            }
            Command::Begin(step) => {
                let published = self.published.get_mut(&step);
                if let Some(ready) = published.and_then(|it| it.ready.take()) {
                    shared.outputs.put(Output::Begin(Box::new(ready)));
                }
            }
            Command::Header { step, to } => {
                let Some(published) = self.published.get_mut(&step) else { return };
                // Encoded once.
                if let Some(encoded) = published.encoded.take() {
                    published.word = Some(shared.compose_encoded(encoded));
                }
                if let Some(word) = &published.word {
                    shared.tell(to, word);
                }
            }
            Command::Know(id, address) => shared.know(id, &address),
            Command::Addresses(servers) => {
                let body = shared.compose(&Said::Addresses(servers));
                for trainer in shared.trainers() {
                    shared.tell(trainer, &body);
                }
            }
            Command::Send { to, message } => shared.send(to, message),
            Command::SendAll { to, message } => shared.send_all(&to, message),
            Command::Propose { step, proposal, tables } => {
                shared.reassign(step, tables, Asker::Conductor(proposal));
            }
            Command::Lost(server) => {
                shared.forget(Peer::Server(server));
                shared.close(Peer::Server(server));
            }
            Command::ForgetGone => {
                for peer in shared.telling.owed_to() {
                    if !self.decisions.hears(peer) {
                        shared.forget(peer);
                    }
                }
            }
            Command::Drop(header) => shared.finish(header),
            Command::Reached(at) => shared.outputs.report(reports::reached(at)),
            Command::Over(over) => self.over(shared, &over),
            Command::Say(about, text) => shared.outputs.report(reports::notice(about, text)),
            Command::Log(Level::Warning, text) => tracing::warn!("{text}"),
            Command::Log(Level::Information, text) => tracing::info!("{text}"),
            Command::Log(Level::Detail, text) => tracing::debug!("{text}"),
            Command::Ending(ending) => shared.outputs.put(Output::Ending(ending)),
            Command::End(end) => shared.outputs.put(Output::JobEnd(end)),
        }
    }

    /// Reports a step that is over, and has what is left of it dropped.
    fn over(&mut self, shared: &mut Shared<impl Exchange>, over: &Over) {
        let step = over.planned.header.step;
        let Some(Published { ready, figures, encoded: _, word: _ }) = self.published.remove(&step)
        else {
            return;
        };
        let report = reports::progress(over, figures);
        // Nobody may have said yet how many there are.
        let of = over.steps.map_or_else(String::new, |it| format!(" of {it}"));
        tracing::info!(
            "step {}{of}: loss {:.4}, bits {:08x}, {:.2} s",
            step + 1,
            f32::from_bits(report.loss_bits),
            report.loss_bits,
            report.seconds
        );
        shared.outputs.report(report);
        shared.finish((Arc::clone(&over.planned), ready));
    }
}

/// A moment of the controller's.
fn fault(Moment { step, direction }: Moment) -> FaultAt {
    FaultAt { step, direction }
}

/// Why a header was not planned.
fn refused(error: &planning::Error) -> Refused {
    match error {
        planning::Error::Unplaceable(_) => Refused::Unplaceable(error.to_string()),
        planning::Error::Plan(error) => Refused::Impossible(error.with_remedy()),
        planning::Error::Lists(_) => Refused::Impossible(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
