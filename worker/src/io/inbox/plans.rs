//! What the planning thread has done: headers that were made or planned, long words that were read, rounds that were dealt out.
//!
//! In: its results. Out: what it does next, and steps that begin in every machine.

use std::sync::Arc;

use cadre_exchange::PeerId;
use cadre_protocol::{server, trainer};
use cadre_step::conduct::decisions::Event;
use cadre_step::conduct::{self, Made};

use crate::io::encoded::Read;
use crate::io::exchange::Exchange;
use crate::io::planning::{self, Asker, Ready, Reassign, Reassigned};
use crate::io::{Io, Notice};

impl<P: Exchange> Io<P> {
    /// Has the planning thread do what comes next, unless it does something.
    pub(in crate::io) fn plan(&mut self) {
        let shared = &mut self.shared;
        let Some(wanted) = self.backlog.take(|asked| shared.lend(asked)) else { return };
        if self.plans.try_send(wanted).is_err() {
            self.fail("the planning thread ended".into(), false);
        }
    }

    /// A long word was read.
    pub(super) fn read(&mut self, read: Read) {
        self.backlog.done();
        let from = read.from();
        match self.shared.read(read) {
            Ok(told) => self.told_all(from, told),
            Err(error) => self.fail(error.to_string(), false),
        }
        self.plan();
    }

    /// The bundles of a step were dealt out for a round. A step that is over by now needs it no more.
    pub(super) fn reassigned(&mut self, reassigned: Reassigned) {
        self.backlog.done();
        let Reassigned { asked, planned, rounds, table } = reassigned;
        let Reassign { step, tables: _, asker } = asked;
        self.shared.returned(planned, rounds);
        let shared = &mut self.shared;
        match (asker, table) {
            (Asker::Conductor(proposal), table) => {
                if let Some(it) = &mut self.conductor {
                    let placed = table.map(|_| ());
                    it.handle(shared, Event::Proposed { step, proposal, placed });
                }
            }
            (Asker::Members, Ok(table)) => {
                if let Some(it) = &mut self.trainer {
                    it.handle(shared, trainer::Event::Round(Arc::clone(&table)));
                }
                if let Some(it) = &mut self.server {
                    it.handle(shared, server::Event::Round(table));
                }
            }
            (Asker::Members, Err(error)) => self.fail(error.to_string(), false),
        }
        self.plan();
    }

    /// What was finished is dropped.
    pub(super) fn freed(&mut self) {
        self.backlog.done();
        self.plan();
    }

    /// The conductor's next header was made.
    pub(super) fn made(&mut self, made: Result<Made, conduct::Error>) {
        self.backlog.done();
        if let Some(it) = &mut self.conductor {
            it.handle(&mut self.shared, Event::Made(made));
        }
        self.plan();
    }

    /// A header was planned.
    pub(super) fn planned(&mut self, planned: Result<Ready, planning::Error>) {
        let step = self.backlog.done();
        match (&mut self.conductor, planned) {
            (Some(it), planned) if it.decisions().is_publishing(step) => {
                it.planned(&mut self.shared, planned);
            }
            (_, Ok(ready)) => self.begin(ready),
            (_, Err(error)) => self.fail(error.to_string(), true),
        }
        self.plan();
    }

    /// Begins a step in every machine that works for it.
    pub(in crate::io) fn begin(&mut self, ready: Ready) {
        if self.is_over() {
            return;
        }
        let Ready { planned, first, step, own: _ } = ready;
        let number = planned.header.step;
        for member in planned.header.fillers.iter().flatten() {
            if let cadre_step::header::Member::Server { index, incarnation, address } = member {
                self.shared.know(PeerId::server(*index, *incarnation), address);
            }
        }
        // A server that comes late, or has no part in a step, may plan longer than the others need for all of it.
        if let (None, Some(it)) = (&self.trainer, &self.server)
            && it.passed(step.last())
        {
            return self.shared.finish((planned, first, step));
        }
        self.shared.begin(Arc::clone(&planned), first);
        if let Some(it) = &mut self.server {
            it.begin(number);
            it.handle(&mut self.shared, server::Event::Begin(Arc::clone(&step)));
        }
        if let Some(it) = &mut self.trainer {
            it.handle(&mut self.shared, trainer::Event::Begin(step));
            it.standing.begins(&planned);
            self.tell(Notice::Step(planned));
        }
    }
}
