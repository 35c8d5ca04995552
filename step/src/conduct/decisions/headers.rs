//! The conductor's headers: when the next one is due, what is in it, who is told.
//!
//! In: lengths of every trainer, the newest view, who fills the slots now. Out: a header that is published once, as a rule while the
//! step before it runs; or the end of the job when none follows.
//!
//! Layouts and slots are put together by [`crate::conduct`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cadre_protocol::conductor::{self, HEADER};
use cadre_protocol::{Fillers, Peer};

use super::{About, Acts, Begins, Command, Decisions, Level, Out, Publishing, Refused};
use crate::conduct::{self, Made};
use crate::envelope::Ending;
use crate::planned::{PlannedStep, filler};

impl Decisions {
    /// Has the next header made, or ends the job, as soon as nothing is missing for it.
    pub(super) fn proceed(&mut self, acts: &mut Acts<'_>) {
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
                self.close(acts, stopped.unwrap_or(Ending::Completed));
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
        acts.put(Command::Make(self.draft.order(self.next, lengths, view)));
    }

    /// The next header was made: it is offered, unless the job was to stop meanwhile.
    pub(super) fn made(&mut self, acts: &mut Acts<'_>, made: Result<Made, conduct::Error>) {
        self.making = false;
        if self.ending.is_some() {
            return;
        }
        if self.stop.is_some() {
            return self.proceed(acts);
        }
        let made = made.map_err(|it| it.to_string()).and_then(|it| {
            if let Some(before) = self.draft.header.take() {
                acts.put(Command::Drop(before));
            }
            self.draft.made(it.header);
            self.misses_a_fault().map_or(Ok(it.phases), Err)
        });
        match made {
            Ok(phases) => {
                self.offered = true;
                let step = self.next;
                self.run(acts, conductor::Event::View(self.next_fillers()));
                self.run(acts, conductor::Event::HeaderReady { step, phases });
            }
            Err(reason) => self.close(acts, Ending::Failed { reason, bad_input: true }),
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
    pub(super) fn publish(&mut self, acts: &mut Acts<'_>, step: u64, fillers: &Fillers) {
        // The machine has found servers for it. If they are lost while it is planned, the machine says so anew.
        self.pool_is_back(acts, step);
        let Some(view) = &self.view else { return };
        let header = Box::new(self.draft.finish(view.number, view.members(fillers)));
        acts.put(Command::Plan(header, self.roster.list()));
        self.publishing = Some(Publishing { step, to: BTreeSet::new(), proposal: None });
    }

    /// Whether a step's header is being planned here.
    pub fn is_publishing(&self, step: Option<u64>) -> bool {
        self.publishing.as_ref().map(|it| it.step) == step && step.is_some()
    }

    /// The header in the making was planned: it goes out, unless some bundle has no place with its fillers.
    pub(super) fn planned(
        &mut self,
        acts: &mut Acts<'_>,
        planned: Result<Arc<PlannedStep>, Refused>,
    ) {
        let Some(Publishing { step, to, proposal }) = self.publishing.take() else { return };
        let planned = match planned {
            Ok(planned) => planned,
            Err(Refused::Unplaceable(why)) => {
                acts.say(About::Warning, why);
                return self.run(acts, conductor::Event::Unplaceable { step, proposal: HEADER });
            }
            Err(Refused::Impossible(reason)) => {
                return self.close(acts, Ending::Failed { reason, bad_input: true });
            }
        };
        let text = format!("step {step} is published at {} ms", acts.now.millis());
        acts.put(Command::Log(Level::Detail, text));
        let out = Out {
            planned,
            begins: Begins::No,
            told: BTreeSet::new(),
            done: BTreeMap::new(),
            served: BTreeMap::new(),
            tables: proposal.as_ref().map_or_else(Vec::new, |it| it.1.clone()),
            proposal,
        };
        self.published.insert(step, out);
        self.next = step + 1;
        self.offered = false;
        // A server may be found silent just now, so that other fillers are proposed before the step begins here.
        self.run(acts, conductor::Event::Published { step });
        for to in to {
            self.header(acts, step, to);
        }
    }

    /// Other fillers are proposed for a step's slots. A server may be lost before the step has begun here; until then there is nothing
    /// to deal out.
    pub(super) fn propose(
        &mut self,
        acts: &mut Acts<'_>,
        step: u64,
        proposal: u64,
        tables: Vec<Fillers>,
    ) {
        if let Some(it) = self.publishing.as_mut().filter(|it| it.step == step) {
            it.proposal = Some((proposal, tables));
            return;
        }
        let Some(out) = self.published.get_mut(&step) else { return };
        out.tables.clone_from(&tables);
        if out.begins == Begins::Begun {
            acts.put(Command::Propose { step, proposal, tables });
        } else {
            out.proposal = Some((proposal, tables));
        }
    }

    /// A step has begun here: what was proposed meanwhile can be placed.
    pub(super) fn begun(&mut self, acts: &mut Acts<'_>, step: u64) {
        let Some(out) = self.published.get_mut(&step) else { return };
        out.begins = Begins::Begun;
        if let Some((proposal, tables)) = out.proposal.take() {
            acts.put(Command::Propose { step, proposal, tables });
        }
    }

    /// Tells a peer the header of a step, or will when it is planned. Who has it, or is told until it has, is not told twice.
    pub(super) fn header(&mut self, acts: &mut Acts<'_>, step: u64, to: Peer) {
        // Lost or gone while the header was planned: nobody would ever hear it there.
        if !self.hears(to) {
            return;
        }
        if let Some(it) = self.publishing.as_mut().filter(|it| it.step == step) {
            it.to.insert(to);
            return;
        }
        let Some(out) = self.published.get_mut(&step) else { return };
        if to == Peer::CONDUCTOR {
            if out.begins == Begins::No {
                out.begins = Begins::Asked;
                acts.put(Command::Begin(step));
            }
        } else if out.told.insert(to) {
            acts.put(Command::Header { step, to });
        }
    }

    /// The bundles of a step were dealt out as was proposed, or some bundle has no slot then.
    pub(super) fn proposed(
        &mut self,
        acts: &mut Acts<'_>,
        (step, proposal): (u64, u64),
        placed: Result<(), cadre_planner::Error>,
    ) {
        let answer = match placed {
            Ok(()) => conductor::Event::Placed { step, proposal },
            Err(error) => {
                acts.say(About::Warning, error.to_string());
                conductor::Event::Unplaceable { step, proposal }
            }
        };
        self.run(acts, answer);
    }

    /// Fillers of a published step's slots by the newest view.
    pub(super) fn fillers_of(&self, step: u64) -> Option<Fillers> {
        let (view, out) = (self.view.as_ref()?, self.published.get(&step)?);
        let header = &out.planned.header;
        let members = view.fill(&header.slots, &header.fillers);
        Some(members.iter().map(|it| it.as_ref().map(filler)).collect())
    }
}
