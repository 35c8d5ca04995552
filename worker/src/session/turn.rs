//! Whose turn it is: which call of a rank comes next.
//!
//! In: calls. Out: what may go on, or why not ([`OutOfTurn`]). It sends nothing and waits for nothing.
//!
//! ```text
//! announce(0) ─▶ begin(0) ─▶ announce(1) ─▶ submit, wait for each phase in the step's order ─▶ done(0) ─▶ begin(1) …
//! ```
//!
//! Each step is announced before it is asked for, but the one behind the last: of that one it is said that it does not come.
//! Phases of nano-batches of which the rank has no rows are nobody's to call: they are skipped.
//!
//! Invariant: a call that is refused changes nothing here.

use std::sync::Arc;

use cadre_protocol::{At, Phase};
use cadre_step::envelope::Stands;
use cadre_step::phases::PhaseAt;
use cadre_step::planned::PlannedStep;

/// See the module.
#[derive(Debug)]
pub(super) struct Turn {
    /// The step to announce next, and the step to begin next.
    announce: u64,
    begin: u64,
    /// Steps of the job, once this rank has said so.
    steps: Option<u64>,
    /// The step that runs.
    planned: Option<Arc<PlannedStep>>,
    /// Its phase to submit next, and how many were waited for.
    next: u32,
    waited: u32,
    /// Whether one of them was submitted by a call.
    has_submitted: bool,
    /// Whether the last phases of the step were skipped.
    ends_skipped: bool,
    /// Calls that were in turn: lengths, the number of steps, phases, ends of steps.
    calls: u64,
    /// The rank.
    rank: u16,
}

/// Another call is next.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct OutOfTurn {
    pub(super) called: String,
    pub(super) expected: String,
}

fn refuse<T>(called: String, expected: String) -> Result<T, OutOfTurn> {
    Err(OutOfTurn { called, expected })
}

impl Turn {
    /// Of `rank`, whose job begins with step `first`, and has so many if that is known.
    pub(super) fn new(rank: u16, first: u64, steps: Option<u64>) -> Self {
        Self {
            announce: first,
            begin: first,
            steps,
            planned: None,
            next: 0,
            waited: 0,
            has_submitted: false,
            ends_skipped: false,
            // To say how many steps there are is one.
            calls: steps.is_some().into(),
            rank,
        }
    }

    /// How many of the calls that end a lease were made ([`super::Rank::busy`]).
    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    /// Lengths of a step: each once, in order, and at most one step ahead of the one that runs.
    pub(super) fn announce(&mut self, step: u64) -> Result<(), OutOfTurn> {
        let called = || format!("lengths of step {step} were announced");
        if step != self.announce {
            return refuse(called(), format!("those of step {} are next", self.announce));
        }
        if let Some(steps) = self.steps.filter(|it| step >= *it) {
            return refuse(called(), format!("the rank has said that it has {steps} steps"));
        }
        if step > self.begin {
            return refuse(
                called(),
                format!("step {} has not begun: call begin first", self.begin),
            );
        }
        self.announce += 1;
        self.calls += 1;
        Ok(())
    }

    /// No step follows those that were announced; said once.
    pub(super) fn end(&mut self, steps: u64) -> Result<(), OutOfTurn> {
        let called = || format!("{steps} steps were said to be all");
        if let Some(before) = self.steps {
            return refuse(called(), format!("{before} were said before"));
        }
        if steps != self.announce {
            return refuse(called(), format!("{} were announced", self.announce));
        }
        self.steps = Some(steps);
        self.calls += 1;
        Ok(())
    }

    /// A step is asked for: the one before is done, and it was announced or does not come.
    pub(super) fn check_begin(&self, step: u64) -> Result<(), OutOfTurn> {
        let called = format!("step {step} was asked for");
        match &self.planned {
            Some(planned) => {
                refuse(called, format!("step {} is not done: call done first", planned.header.step))
            }
            None if step != self.begin => refuse(called, format!("step {} is next", self.begin)),
            None if step >= self.announce && self.steps.is_none_or(|it| step < it) => {
                let expected =
                    "it was not announced: call announce, or announce_end if it does not come";
                refuse(called, expected.into())
            }
            None => Ok(()),
        }
    }

    /// Why a thread that has asked for a step does not get it.
    pub(super) fn taken(step: u64) -> OutOfTurn {
        let called = format!("step {step} was asked for by two threads");
        OutOfTurn { called, expected: "one of them has begun it".into() }
    }

    /// The step is there.
    pub(super) fn begun(&mut self, planned: &Arc<PlannedStep>) {
        self.begin = planned.header.step + 1;
        self.planned = Some(Arc::clone(planned));
        (self.next, self.waited, self.has_submitted) = (0, 0, false);
    }

    /// The step that runs, and which of its phases is next, if it is this one.
    pub(super) fn check_submit(
        &self,
        phase: PhaseAt,
        rows_fit: bool,
    ) -> Result<(Arc<PlannedStep>, Phase), OutOfTurn> {
        let Some(planned) = &self.planned else {
            let called = "a phase was submitted".to_owned();
            return refuse(called, "no step has begun: call begin first".into());
        };
        let step = planned.header.step;
        let called = || format!("{} was submitted", phase.in_words(step));
        if self.next as usize == planned.order.count() {
            return refuse(called(), format!("all phases of step {step} were submitted"));
        }
        let next = planned.order.at(Phase(self.next));
        if phase != next || !rows_fit {
            return refuse(called(), format!("{} with its rows is next", next.in_words(step)));
        }
        Ok((Arc::clone(planned), Phase(self.next)))
    }

    /// The next phases of which the rank has no rows, the first and how many: they count as submitted and waited for.
    pub(super) fn skip(&mut self) -> Option<(At, u32)> {
        let planned = self.planned.as_ref()?;
        let first = At { step: planned.header.step, phase: Phase(self.next) };
        let nobodys =
            |phase: &u32| !planned.has_rows(planned.order.at(Phase(*phase)).nano, self.rank);
        let end = planned.order.count() as u32;
        let count = (self.next..end).take_while(nobodys).count() as u32;
        self.next += count;
        self.waited += count;
        self.ends_skipped = count > 0 && self.next == end;
        (count > 0).then_some((first, count))
    }

    /// The next phase is under way.
    pub(super) fn submitted(&mut self) {
        self.next += 1;
        self.has_submitted = true;
        self.calls += 1;
    }

    /// Results are waited for: of this step, the very one that runs.
    pub(super) fn check_wait(
        &self,
        of: &Arc<PlannedStep>,
        phase: PhaseAt,
    ) -> Result<(), OutOfTurn> {
        if self.planned.as_ref().is_some_and(|it| Arc::ptr_eq(it, of)) {
            return Ok(());
        }
        let called = format!("{} was waited for", phase.in_words(of.header.step));
        let expected = match &self.planned {
            Some(planned) => format!("step {} of this session runs", planned.header.step),
            None => "no step runs".into(),
        };
        refuse(called, expected)
    }

    /// Results of a phase were handed over.
    pub(super) fn waited(&mut self) {
        self.waited += 1;
    }

    /// A step is over: all its phases were submitted and waited for. Out: whether the last of them were skipped, so that requests
    /// for them may still be on their way.
    pub(super) fn done(&mut self, step: u64) -> Result<bool, OutOfTurn> {
        let called = || format!("step {step} was said to be done");
        let Some(planned) = self.planned.as_ref().filter(|it| it.header.step == step) else {
            let expected = match &self.planned {
                Some(planned) => format!("step {} runs", planned.header.step),
                None => "no step runs".into(),
            };
            return refuse(called(), expected);
        };
        let phases = planned.order.count();
        if self.waited as usize != phases {
            let expected = format!("{} of its {phases} phases were waited for", self.waited);
            return refuse(called(), expected);
        }
        self.planned = None;
        self.calls += 1;
        Ok(self.ends_skipped)
    }

    /// What others are told where the rank leaves now, as one whose job is complete or not: the call that is due, which it will not make. Nothing behind its last step.
    pub(super) fn leaves(&self, as_done: bool) -> Option<Stands> {
        let due = match &self.planned {
            Some(it) if (self.next as usize) < it.order.count() => {
                let phase = it.order.at(Phase(self.next));
                format!("submitted {}", phase.in_words(it.header.step))
            }
            Some(it) => format!("said that step {} is done", it.header.step),
            None if self.announce > self.begin => format!("asked for step {}", self.begin),
            None if self.is_behind_the_last() => return None,
            None => format!("announced step {}", self.begin),
        };
        let what = format!("rank {} has left, and has not {due}", self.rank);
        let in_mid_step = self.planned.is_some() && self.has_submitted;
        Some(Stands::Left { what, in_mid_step, as_done })
    }

    /// The step that does not come, if all before it are done here.
    pub(super) fn behind_the_last(&self) -> Option<u64> {
        (self.planned.is_none() && self.is_behind_the_last()).then_some(self.begin)
    }

    fn is_behind_the_last(&self) -> bool {
        self.steps.is_some_and(|it| it <= self.begin)
    }
}

#[cfg(test)]
mod tests;
