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
        (self.next, self.waited) = (0, 0);
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
}

#[cfg(test)]
mod tests {
    use cadre_step::header::Header;
    use cadre_step::phases::Direction;

    use super::*;

    fn planned(step: u64) -> Arc<PlannedStep> {
        let any: Header =
            serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
        Arc::new(PlannedStep::new(Arc::new(Header { step, ..any })).unwrap())
    }

    fn phase(layer: usize, direction: Direction) -> PhaseAt {
        PhaseAt { layer, nano: 0, direction }
    }

    /// Every call but those that are in turn is refused, whatever came before, and changes nothing.
    #[test]
    fn at_every_point_of_two_steps_the_calls_in_turn_alone_go_on() {
        let (first, second) = (planned(7), planned(8));
        let stranger = planned(7);
        let mut turn = Turn::new(0, 7, None);
        let order = [
            phase(0, Direction::Forward),
            phase(1, Direction::Forward),
            phase(1, Direction::Backward),
            phase(0, Direction::Backward),
        ];
        let check = |turn: &mut Turn,
                     announce: &[u64],
                     begin: &[u64],
                     submit: usize,
                     done: &[u64]| {
            for step in 5..11 {
                if !announce.contains(&step) {
                    turn.announce(step).unwrap_err();
                }
                assert_eq!(turn.check_begin(step).is_ok(), begin.contains(&step), "begin {step}");
                if !done.contains(&step) {
                    turn.done(step).unwrap_err();
                }
            }
            for (index, at) in order.iter().enumerate() {
                assert_eq!(turn.check_submit(*at, true).is_ok(), index == submit, "{at:?}");
                turn.check_submit(*at, false).unwrap_err();
            }
        };
        for (step, now) in [(7, &first), (8, &second)] {
            if step == 7 {
                check(&mut turn, &[7], &[], 4, &[]);
                turn.announce(7).unwrap();
            }
            check(&mut turn, &[], &[step], 4, &[]);
            turn.check_wait(now, order[0]).unwrap_err();
            turn.check_begin(step).unwrap();
            turn.begun(now);
            turn.check_wait(&stranger, order[0]).unwrap_err();
            for (index, at) in order.iter().enumerate() {
                check(&mut turn, &[step + 1], &[], index, &[]);
                let (planned, number) = turn.check_submit(*at, true).unwrap();
                assert!(Arc::ptr_eq(&planned, now) && number.0 as usize == index);
                turn.submitted();
                turn.check_wait(now, *at).unwrap();
                if index == 1 {
                    turn.waited();
                }
            }
            check(&mut turn, &[step + 1], &[], 4, &[]);
            (0..3).for_each(|_| turn.waited());
            check(&mut turn, &[step + 1], &[], 4, &[step]);
            turn.announce(step + 1).unwrap();
            turn.announce(step + 2).unwrap_err();
            turn.done(step).unwrap();
            turn.check_wait(now, order[0]).unwrap_err();
        }
        // Step 9 is announced and has not begun: it is the last.
        for steps in [8, 9, 11] {
            turn.end(steps).unwrap_err();
        }
        turn.end(10).unwrap();
        turn.end(10).unwrap_err();
        check(&mut turn, &[], &[9], 4, &[]);
        turn.begun(&planned(9));
        turn.announce(10).unwrap_err();
        (0..4).for_each(|_| turn.waited());
        turn.done(9).unwrap();
        check(&mut turn, &[], &[10], 4, &[]);
    }

    #[test]
    fn a_rank_that_knows_its_steps_announces_no_further_one_and_asks_for_the_end() {
        let mut turn = Turn::new(0, 0, Some(1));
        turn.end(0).unwrap_err();
        turn.check_begin(0).unwrap_err();
        turn.announce(0).unwrap();
        turn.begun(&planned(0));
        let refused = turn.announce(1).unwrap_err();
        assert_eq!(refused.expected, "the rank has said that it has 1 steps");
        (0..4).for_each(|_| turn.waited());
        turn.done(0).unwrap();
        turn.check_begin(1).unwrap();
        // It resumes where all steps are done.
        Turn::new(0, 5, Some(5)).check_begin(5).unwrap();
        Turn::new(0, 7, Some(5)).check_begin(7).unwrap();
    }

    /// Those behind lent rows are asked for in one go, since each would take a place in a bounded queue.
    #[test]
    fn phases_without_rows_are_skipped_as_one() {
        // Rank 1 has all rows.
        let text = include_str!("../../../testing/header.json");
        let text = text.replace("\"ranks\":[[", "\"ranks\":[[],[");
        let header: Header = serde_json::from_str(&text).unwrap();
        let planned = Arc::new(PlannedStep::new(Arc::new(header)).unwrap());
        for (rank, skipped) in [(0, Some((At::new(0, 0), 4))), (1, None)] {
            let mut turn = Turn::new(rank, 0, None);
            turn.announce(0).unwrap();
            turn.begun(&planned);
            assert_eq!(turn.skip(), skipped, "rank {rank}");
            assert_eq!(turn.skip(), None);
            assert_eq!(turn.done(0).is_ok(), skipped.is_some(), "nobody calls for the phases");
        }
    }

    #[test]
    fn a_refusal_says_what_was_called_and_what_is_next() {
        let mut turn = Turn::new(0, 0, None);
        let text = |it: OutOfTurn| format!("{}, but {}", it.called, it.expected);
        let early = turn.check_submit(phase(0, Direction::Forward), true).unwrap_err();
        assert_eq!(text(early), "a phase was submitted, but no step has begun: call begin first");
        let lengths = text(turn.announce(1).unwrap_err());
        assert_eq!(lengths, "lengths of step 1 were announced, but those of step 0 are next");
        turn.announce(0).unwrap();
        let ahead = text(turn.announce(1).unwrap_err());
        assert_eq!(
            ahead,
            "lengths of step 1 were announced, but step 0 has not begun: call begin first"
        );
        turn.begun(&planned(0));
        let again = text(turn.check_begin(1).unwrap_err());
        assert_eq!(again, "step 1 was asked for, but step 0 is not done: call done first");
        let done = text(turn.done(0).unwrap_err());
        assert_eq!(done, "step 0 was said to be done, but 0 of its 4 phases were waited for");
    }
}
