//! What the controller is told: places of faults, steps that are over.
//!
//! In: the watermark, what workers tell of a step. Out: reports, in the order in which things happened.

use cadre_protocol::{At, Filler, Fillers, Nanos, Peer, TrainerId};

use super::{Acts, Command, Decisions, FaultAt, Out, Over, Served};
use crate::envelope::{ServerStep, StepDone};
use crate::phases::Direction;
use crate::planned::{PlannedStep, filler};

/// Longest wait for what servers did in a step that is over.
const REPORTS_WITHIN: Nanos = Nanos::from_millis(500);
/// Most steps that wait so.
const MAX_TELLING: usize = 8;

/// A step that is over and is to be told.
#[derive(Debug)]
pub(super) struct Telling {
    /// Until when it may wait.
    pub(super) until: Nanos,
    out: Out,
    /// Servers that were lost by its end: since the step before, and in all.
    failovers: (u32, u32),
}

impl Decisions {
    /// Tells the controller that a step has got to where a fault is to be fired.
    pub(super) fn fire(&mut self, acts: &mut Acts<'_>) {
        let Some(watermark) = self.machine.watermark() else { return };
        while let Some(&fault) = self.faults.first() {
            let FaultAt { step, direction } = fault;
            let is_reached = match self.published.get(&step) {
                Some(it) => {
                    // Refused before the header was made, where there is none.
                    let phase = it.planned.order.first(direction);
                    phase.is_some_and(|phase| watermark >= At { step, phase })
                }
                // All have told its end before the watermark was there.
                None => step < self.whole,
            };
            if !is_reached {
                return;
            }
            self.faults.pop_first();
            self.firing.insert(fault);
            acts.put(Command::Reached(fault));
        }
    }

    /// Why a fault of the step whose header was made would never come: none of its phases goes that way.
    pub(super) fn misses_a_fault(&self) -> Option<String> {
        let header = self.draft.header.as_ref()?;
        let (step, turns) = (header.step, &header.turns);
        let goes = |way| turns.list().iter().any(|it| it.direction == way);
        let missed = self.faults.iter().find(|it| it.step == step && !goes(it.direction))?;
        let (word, other) = match missed.direction {
            Direction::Forward => ("fwd", "bwd"),
            Direction::Backward => ("bwd", "fwd"),
        };
        Some(format!(
            "a fault is to come at {step}:{word}, but the turns of step {step} are {turns}: nothing goes that way; give the fault {step}:{other}, or another step"
        ))
    }

    pub(super) fn step_done(&mut self, acts: &mut Acts<'_>, from: TrainerId, done: StepDone) {
        let step = done.step;
        let Some(out) = self.published.get_mut(&step) else {
            // One that waits to be told, though not all have done it.
            if let Some(it) = self.telling.get_mut(&step) {
                it.out.done.entry(from.0).or_insert(done);
            }
            return;
        };
        out.done.entry(from.0).or_insert(done);
        if out.done.len() == usize::from(self.draft.trainers) {
            self.over(acts, step);
            self.stop_lost(acts);
            self.proceed(acts);
        }
    }

    /// The job has failed: nothing more is awaited.
    pub(super) fn report_rest(&mut self, acts: &mut Acts<'_>) {
        self.over_where_done(acts);
        self.tell_all_over(acts);
    }

    /// The job ends before a step is over everywhere. Where some trainer has done it, it is in the checkpoint that this one writes:
    /// the controller is told of it, though others will not say that they have done it.
    pub(super) fn over_where_done(&mut self, acts: &mut Acts<'_>) {
        let some = |it: &(&u64, &Out)| !it.1.done.is_empty();
        let steps = self.published.iter().filter(some).map(|it| *it.0);
        for step in steps.collect::<Vec<_>>() {
            self.over(acts, step);
        }
    }

    /// A step is over: it is told once all who fill its slots have said what they did, since that comes over other links than what
    /// trainers say.
    fn over(&mut self, acts: &mut Acts<'_>, step: u64) {
        if let Some(out) = self.published.remove(&step) {
            let failovers = (std::mem::take(&mut self.failovers), self.failovers_so_far);
            self.telling
                .insert(step, Telling { until: acts.now.after(REPORTS_WITHIN), out, failovers });
            self.tell_over(acts);
        }
    }

    /// Tells steps that are over, in order, as far as nothing is awaited of them; and the end of the job behind all.
    pub(super) fn tell_over(&mut self, acts: &mut Acts<'_>) {
        while let Some((_, Telling { until, out, .. })) = self.telling.first_key_value()
            && (acts.now >= *until || self.telling.len() > MAX_TELLING || !self.awaits(out))
        {
            self.tell_first_over(acts);
        }
        if self.telling.is_empty()
            && let Some(ending) = self.closing.take()
        {
            acts.put(Command::Ending(ending));
        }
    }

    /// Tells all steps that are over, whatever is missing.
    pub(super) fn tell_all_over(&mut self, acts: &mut Acts<'_>) {
        while !self.telling.is_empty() {
            self.tell_first_over(acts);
        }
    }

    fn tell_first_over(&mut self, acts: &mut Acts<'_>) {
        let Some((_, Telling { out, failovers, .. })) = self.telling.pop_first() else { return };
        let Out { planned, done, served, .. } = out;
        acts.put(Command::Over(Box::new(Over {
            planned,
            done: done.into_values().collect(),
            served: served.into_values().collect(),
            failovers: failovers.0,
            failovers_so_far: failovers.1,
            steps: self.counts.steps.map(|it| it.1),
        })));
    }

    /// Whether somebody who fills a slot of a step, and is there, has not said yet what it did.
    fn awaits(&self, out: &Out) -> bool {
        let fillers = out.planned.header.fillers.iter().flatten();
        let mut executors = fillers.filter_map(|it| filler(it).executor());
        executors.any(|it| !out.served.contains_key(&it) && !self.is_gone(it))
    }

    fn is_gone(&self, peer: Peer) -> bool {
        match peer {
            Peer::Trainer(id) => self.left.has(id.0),
            Peer::Server(_) => self.has_lost(peer) || !self.hears(peer),
        }
    }

    /// What a server did. Every trainer has an in-place server; counted are those that the step's slots name, and those that took
    /// work of lost ones.
    pub(super) fn server_step(&mut self, acts: &mut Acts<'_>, by: Peer, did: ServerStep) {
        let late = self.telling.get_mut(&did.step).map(|it| &mut it.out);
        let Some(out) = self.published.get_mut(&did.step).or(late) else { return };
        let tables = if did.tasks == 0 { &[][..] } else { out.tables.as_slice() };
        match slot_of(&out.planned, tables, by) {
            Some(slot) => {
                out.served.entry(by).or_insert(Served { by, slot, did });
            }
            None if did.tasks == 0 => {}
            None => acts.warn(format!(
                "{by} says what it did in step {}, and fills no slot of it",
                did.step
            )),
        }
        self.tell_over(acts);
    }
}

/// The slot that a member fills: by the header, else by the newest round that has it.
fn slot_of(planned: &PlannedStep, tables: &[Fillers], from: Peer) -> Option<usize> {
    let fills = |it: &Option<Filler>| it.and_then(Filler::executor) == Some(from);
    let mut first = planned.header.fillers.iter().map(|it| it.as_ref().map(filler));
    let newest = || tables.iter().rev().find_map(|it| it.iter().position(fills));
    first.position(|it| fills(&it)).or_else(newest)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cadre_protocol::ServerId;

    use super::*;
    use crate::header::{Header, Member};

    #[test]
    fn a_server_counts_in_the_slot_that_it_fills_also_beside_vacant_ones_and_by_rounds() {
        let any: Header =
            serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
        let slot = any.slots[0];
        let server = |index, incarnation| Member::Server {
            index,
            incarnation,
            address: "127.0.0.1:1".into(),
        };
        let header = Header {
            slots: vec![slot; 3],
            fillers: vec![None, Some(server(1, 0)), Some(Member::Standby(0))],
            ..any
        };
        let planned = PlannedStep::new(Arc::new(header)).unwrap();
        let id = |index, incarnation| ServerId { index, incarnation };
        let first = vec![Some(Filler::Server(id(2, 4))), None, None];
        let last = vec![None, Some(Filler::Server(id(1, 1))), Some(Filler::InPlace(TrainerId(0)))];
        let tables = [first, last];
        let slot = |tables: &[Fillers], from| slot_of(&planned, tables, from);
        let rank = Peer::Trainer(TrainerId(0));
        assert_eq!(slot(&[], Peer::Server(id(1, 0))), Some(1), "slot 0 is vacant");
        assert_eq!(slot(&tables, Peer::Server(id(1, 0))), Some(1), "lost since");
        assert_eq!(slot(&tables, Peer::Server(id(1, 1))), Some(1), "a replacement");
        assert_eq!(slot(&tables, Peer::Server(id(2, 4))), Some(0), "lost again");
        assert_eq!((slot(&[], rank), slot(&tables, rank)), (None, Some(2)), "it took works over");
        assert_eq!(slot(&tables, Peer::Server(id(9, 0))), None);
    }
}
