//! The conductor's headers: when the next one is due, and what is in it.
//!
//! In: lengths of every trainer, the newest view, who fills the slots now. Out: a header that is
//! published once, or the end of the job when none follows.
//!
//! Layouts and slots are put together by [`crate::conduct`].

use std::collections::BTreeMap;
use std::sync::Arc;

use cadre_control::proto::notice;
use cadre_protocol::conductor::{Event, HEADER};
use cadre_protocol::{Fillers, Peer, alive};

use super::{Conducting, Published};
use crate::io::envelope::{Ending, Envelope};
use crate::io::shared::Shared;
use crate::planned::{PlannedStep, filler};

impl Conducting {
    /// Offers the next header, or ends the job, as soon as nothing is missing for it.
    pub(super) fn proceed(&mut self, shared: &mut Shared) {
        if !self.clear || self.offered || self.ending.is_some() || !self.firing.is_empty() {
            return;
        }
        if self.stop.is_some() || self.next >= self.steps {
            // Only when every trainer has told the end of its last step.
            if self.published.is_empty() {
                self.ending = Some(self.stop.clone().unwrap_or(Ending::Completed));
            }
            return;
        }
        let trainers = usize::from(self.draft.trainers);
        let complete = self.lengths.get(&self.next).is_some_and(|it| it.len() == trainers);
        if !complete || !self.roster.is_complete() {
            return;
        }
        let Some(view) = &self.view else { return };
        if self.published.is_empty() && view.has_vacancy() && shared.now() < self.patience {
            return;
        }
        let lengths = self.lengths.remove(&self.next).expect("it was complete a moment ago");
        match self.draft.prepare(self.next, &lengths, view) {
            Ok(phases) => {
                let fillers = self.draft.fillers(view);
                self.offered = true;
                self.clear = false;
                let step = self.next;
                self.handle(
                    shared,
                    Event::View(fillers.iter().map(|it| it.as_ref().map(filler)).collect()),
                );
                self.handle(shared, Event::HeaderReady { step, phases });
            }
            Err(error) => {
                self.ending = Some(Ending::Failed { reason: error.to_string(), bad_input: true });
            }
        }
    }

    /// Makes the header with these fillers; comes back with an event if some bundle has no place then.
    pub(super) fn publish(
        &mut self,
        shared: &mut Shared,
        step: u64,
        fillers: &Fillers,
    ) -> Option<Event> {
        let view = self.view.as_ref()?;
        let members = view.members(fillers);
        let header = Arc::new(self.draft.finish(view.number, members));
        let planned = match PlannedStep::new(header) {
            Ok(planned) => Arc::new(planned),
            Err(error) => {
                self.ending = Some(Ending::Failed { reason: error.to_string(), bad_input: true });
                return None;
            }
        };
        if let Err(error) = planned.assign(None, &alive(fillers)) {
            self.notice(notice::Level::Warning, error.to_string(), None);
            // Without a header here, the commands that follow send none.
            self.published.remove(&step);
            return Some(Event::Unplaceable { step, proposal: HEADER });
        }
        tracing::debug!("step {step} is published at {} ms", shared.now().millis());
        let (done, servers) = (BTreeMap::new(), Vec::new());
        self.published.insert(step, Published { planned, done, servers });
        self.next = step + 1;
        self.offered = false;
        None
    }

    pub(super) fn header(&mut self, shared: &mut Shared, step: u64, to: Peer) {
        let Some(published) = self.published.get(&step) else { return };
        if to == shared.me {
            self.begin.push(Arc::clone(&published.planned));
            return;
        }
        let header = Box::new(published.planned.header.as_ref().clone());
        let trainers = self.roster.list();
        shared.ring(to, &Envelope::Header { header, trainers });
    }

    /// Fillers of a published step's slots by the newest view.
    pub(super) fn fillers_of(&self, step: u64) -> Option<Fillers> {
        let (view, published) = (self.view.as_ref()?, self.published.get(&step)?);
        let header = &published.planned.header;
        let members = view.fill(&header.slots, &header.fillers);
        Some(members.iter().map(|it| it.as_ref().map(filler)).collect())
    }
}
