//! What the conductor tells the controller: places of faults, steps that are over, notices.
//!
//! In: the watermark, what workers tell of a step. Out: reports, in the order in which things happened.

use cadre_control::proto::{self, notice};
use cadre_protocol::{At, Peer, ServerId, TrainerId};
use cadre_step::envelope::{ServerStep, StepDone};
use cadre_step::phases::Direction;

use super::reports;
use super::{Conducting, Published};
use crate::io::exchange::Exchange;
use crate::io::shared::Shared;

impl Conducting {
    /// Tells the controller that a step has got to where a fault is to be fired.
    pub(super) fn fire(&mut self, shared: &mut Shared<impl Exchange>) {
        let Some(watermark) = self.machine.watermark() else { return };
        while let Some(&moment) = self.faults.first() {
            let cadre_control::Moment { step, direction } = moment;
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
            self.firing.insert(moment);
            let direction = match direction {
                Direction::Forward => proto::Direction::Forward,
                Direction::Backward => proto::Direction::Backward,
            };
            let direction = direction.into();
            shared.outputs.report(proto::PhaseReached { step, direction });
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

    pub(super) fn step_done(
        &mut self,
        shared: &mut Shared<impl Exchange>,
        from: TrainerId,
        done: StepDone,
    ) {
        let step = done.step;
        let Some(published) = self.published.get_mut(&step) else { return };
        published.done.entry(from.0).or_insert(done);
        if published.done.len() == usize::from(self.draft.trainers) {
            self.over(shared, step);
            self.proceed(shared);
        }
    }

    /// The job has failed. A step that some trainer has done is in the checkpoint that it writes: the controller is told of it,
    /// though others will not say that they have done it.
    pub fn report_rest(&mut self, shared: &mut Shared<impl Exchange>) {
        let some = |it: &(&u64, &Published)| !it.1.done.is_empty();
        let steps = self.published.iter().filter(some).map(|it| *it.0);
        for step in steps.collect::<Vec<_>>() {
            self.over(shared, step);
        }
    }

    /// Reports a step that is over.
    fn over(&mut self, shared: &mut Shared<impl Exchange>, step: u64) {
        if let Some(published) = self.published.remove(&step) {
            let failovers = (std::mem::take(&mut self.failovers), self.failovers_so_far);
            let Published {
                planned,
                figures,
                ready,
                encoded: _,
                word: _,
                done,
                servers,
                tables: _,
            } = published;
            let done: Vec<_> = done.into_values().collect();
            let servers = servers.into_values().collect();
            let steps = self.counts.steps.map_or(0, |it| it.1);
            let report =
                reports::progress(&planned.header, figures, &done, servers, failovers, steps);
            // Nobody may have said yet how many there are.
            let of = if steps > 0 { format!(" of {steps}") } else { String::new() };
            tracing::info!(
                "step {}{of}: loss {:.4}, bits {:08x}, {:.2} s",
                step + 1,
                f32::from_bits(report.loss_bits),
                report.loss_bits,
                report.seconds
            );
            shared.outputs.report(report);
            shared.finish((planned, ready));
        }
    }

    pub(super) fn server_step(&mut self, from: Peer, done: &ServerStep) {
        let Some(published) = self.published.get_mut(&done.step) else { return };
        // Every trainer has an in-place server; here are those that the step's slots name, and those
        // that took work of lost ones.
        let Published { planned, tables, .. } = published;
        let tables = if done.tasks == 0 { &[][..] } else { tables.as_slice() };
        match reports::server_step(planned, tables, from, done) {
            Some(step) => {
                published.servers.entry(from).or_insert(step);
            }
            None if done.tasks == 0 => {}
            None => tracing::warn!(
                "{from} says what it did in step {}, and fills no slot of it",
                done.step
            ),
        }
    }

    pub(super) fn notice(
        shared: &mut Shared<impl Exchange>,
        level: notice::Level,
        text: String,
        event: Option<(notice::Event, ServerId)>,
    ) {
        let (event, server) =
            event.map_or((notice::Event::Unspecified, None), |(event, id)| (event, Some(id)));
        Self::report_notice(shared, level, text, event, server);
    }

    pub(super) fn report_notice(
        shared: &mut Shared<impl Exchange>,
        level: notice::Level,
        text: String,
        event: notice::Event,
        server: Option<ServerId>,
    ) {
        let server = server.map(|it| proto::ServerName {
            kind: proto::Kind::Dedicated.into(),
            index: it.index.into(),
            incarnation: it.incarnation,
        });
        let notice = proto::Notice { level: level.into(), text, event: event.into(), server };
        shared.outputs.report(notice);
    }
}
