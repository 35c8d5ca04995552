//! The conductor's headers: when the next one is due, and what is in it.
//!
//! In: lengths of every trainer, the newest view, who fills the slots now. Out: a header that is published once, as a rule while the
//! step before it runs; or the end of the job when none follows.
//!
//! Layouts and slots are put together by [`cadre_step::conduct`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_control::proto::notice;
use cadre_protocol::conductor::{Event, HEADER};
use cadre_protocol::{Fillers, Peer};
use cadre_step::conduct::{self, Made};
use cadre_step::envelope::Ending;
use cadre_step::planned::filler;

use super::{Conducting, Published, Publishing};
use crate::io::exchange::Exchange;
use crate::io::output::Output;
use crate::io::planning::{self, Asker, Own, Ready, Wanted};
use crate::io::shared::Shared;

impl Conducting {
    /// Has the next header made, or ends the job, as soon as nothing is missing for it.
    pub(super) fn proceed(&mut self, shared: &mut Shared<impl Exchange>) {
        if self.offered || self.ending.is_some() || !self.firing.is_empty() {
            return;
        }
        let all = self.is_last_step_out();
        if self.stop.is_some() || all {
            // Only when every trainer has told the end of its last step. Who all are may come behind a stop: whoever is not
            // known yet could not be told.
            let knows_all = self.roster.is_complete();
            if self.published.is_empty() && !self.runs_on() && knows_all {
                // A stop that comes when all steps are done stops nothing.
                let stopped = self.stop.clone().filter(|_| !all);
                self.close(shared, stopped.unwrap_or(Ending::Completed));
            }
            return;
        }
        if self.making {
            return;
        }
        let trainers = usize::from(self.draft.trainers);
        let complete = self.lengths.get(&self.next).is_some_and(|it| it.len() == trainers);
        if !complete || !self.roster.is_complete() {
            return;
        }
        let Some(view) = &self.view else { return };
        if self.published.is_empty() && view.has_vacancy() && self.patience.is_some() {
            return;
        }
        // What a fault does to the slots would come a step later else.
        if self.faults.first().is_some_and(|it| it.step < self.next) {
            return;
        }
        if self.runs_on() && !self.draft.keeps_slots(self.next, view) {
            return;
        }
        let lengths = self.lengths.remove(&self.next).expect("it was complete a moment ago");
        self.making = true;
        let order = self.draft.order(self.next, lengths, view);
        shared.outputs.put(Output::Plan(Wanted::Making(order)));
    }

    /// The next header was made: it is offered, unless the job was to stop meanwhile.
    pub fn made(&mut self, shared: &mut Shared<impl Exchange>, made: Result<Made, conduct::Error>) {
        self.making = false;
        if self.ending.is_some() {
            return;
        }
        if self.stop.is_some() {
            return self.proceed(shared);
        }
        let made = made.map_err(|it| it.to_string()).and_then(|it| {
            if let Some(before) = self.draft.header.take() {
                shared.finish(before);
            }
            self.draft.made(it.header);
            self.misses_a_fault().map_or(Ok(it.phases), Err)
        });
        match made {
            Ok(phases) => {
                self.offered = true;
                let step = self.next;
                self.handle(shared, Event::View(self.next_fillers()));
                self.handle(shared, Event::HeaderReady { step, phases });
            }
            Err(reason) => self.close(shared, Ending::Failed { reason, bad_input: true }),
        }
    }

    /// Whether the step before the next one is not whole yet.
    fn runs_on(&self) -> bool {
        self.whole < self.next
    }

    /// Who fills the slots of the header in the making.
    pub(super) fn next_fillers(&self) -> Fillers {
        let members = self.view.as_ref().map_or_else(Vec::new, |it| self.draft.fillers(it));
        members.iter().map(|it| it.as_ref().map(filler)).collect()
    }

    /// Has the header with these fillers planned; whom it goes to is told when that is done.
    pub(super) fn publish(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        step: u64,
        fillers: &Fillers,
    ) {
        // The machine has found servers for it. If they are lost while it is planned, the machine says so anew.
        self.pool_is_back(shared, step);
        let Some(view) = &self.view else { return };
        let header = Box::new(self.draft.finish(view.number, view.members(fillers)));
        shared.outputs.put(Output::Plan(Wanted::Own(header, self.roster.list())));
        self.publishing = Some(Publishing { step, to: BTreeSet::new(), proposal: None });
    }

    /// Whether a step's header is being planned here.
    pub fn is_publishing(&self, step: Option<u64>) -> bool {
        self.publishing.as_ref().map(|it| it.step) == step && step.is_some()
    }

    /// The header in the making was planned: it goes out, unless some bundle has no place with its fillers.
    pub fn planned(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        planned: Result<Ready, planning::Error>,
    ) {
        let Some(Publishing { step, to, proposal }) = self.publishing.take() else { return };
        let mut ready = match planned {
            Ok(ready) => ready,
            Err(error @ planning::Error::Unplaceable(_)) => {
                Self::notice(shared, notice::Level::Warning, error.to_string(), None);
                return self.handle(shared, Event::Unplaceable { step, proposal: HEADER });
            }
            Err(error) => {
                let reason = match &error {
                    planning::Error::Plan(error) => error.with_remedy(),
                    planning::Error::Unplaceable(_) | planning::Error::Lists(_) => {
                        error.to_string()
                    }
                };
                return self.close(shared, Ending::Failed { reason, bad_input: true });
            }
        };
        tracing::debug!("step {step} is published at {} ms", shared.now().millis());
        let Some(Own { word: encoded, figures }) = ready.own.take() else { return };
        let published = Published {
            planned: Arc::clone(&ready.planned),
            figures,
            ready: Some(ready),
            encoded: Some(encoded),
            word: None,
            done: BTreeMap::new(),
            servers: BTreeMap::new(),
            tables: proposal.as_ref().map_or_else(Vec::new, |it| it.1.clone()),
        };
        self.published.insert(step, published);
        self.next = step + 1;
        self.offered = false;
        self.proposal = proposal.map(|(proposal, tables)| (step, proposal, tables));
        for to in to {
            self.header(shared, step, to);
        }
    }

    /// A step has begun here: what was proposed meanwhile can be placed.
    pub fn begun(&mut self, shared: &mut Shared<impl Exchange>) {
        self.begins = None;
        if let Some((step, proposal, tables)) = self.proposal.take() {
            shared.reassign(step, tables, Asker::Conductor(proposal));
        }
    }

    /// Tells a peer the header of a step, or will when it is planned.
    pub(super) fn header(&mut self, shared: &mut Shared<impl Exchange>, step: u64, to: Peer) {
        // Lost or gone while the header was planned: nobody would ever hear it there.
        if !self.hears(to) {
            return;
        }
        if let Some(it) = self.publishing.as_mut().filter(|it| it.step == step) {
            it.to.insert(to);
            return;
        }
        let Some(published) = self.published.get_mut(&step) else { return };
        if to == shared.me {
            if let Some(ready) = published.ready.take() {
                self.begins = Some(step);
                shared.outputs.put(Output::Begin(Box::new(ready)));
            }
            return;
        }
        // Encoded once; who has it, or is told until it has, is not told twice.
        if let Some(encoded) = published.encoded.take() {
            published.word = Some((shared.compose_encoded(encoded), BTreeSet::new()));
        }
        let Some((word, told)) = &mut published.word else { return };
        if told.insert(to) {
            shared.tell(to, word);
        }
    }

    /// The bundles of a step were dealt out as was proposed, or some bundle has no slot then.
    pub fn reassigned(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        step: u64,
        proposal: u64,
        placed: Result<(), cadre_planner::Error>,
    ) {
        let answer = match placed {
            Ok(()) => Event::Placed { step, proposal },
            Err(error) => {
                Self::notice(shared, notice::Level::Warning, error.to_string(), None);
                Event::Unplaceable { step, proposal }
            }
        };
        self.handle(shared, answer);
    }

    /// Fillers of a published step's slots by the newest view.
    pub(super) fn fillers_of(&self, step: u64) -> Option<Fillers> {
        let (view, published) = (self.view.as_ref()?, self.published.get(&step)?);
        let header = &published.planned.header;
        let members = view.fill(&header.slots, &header.fillers);
        Some(members.iter().map(|it| it.as_ref().map(filler)).collect())
    }
}
