//! Calls in turn and out of it, at every point of two steps.

use cadre_step::header::Header;
use cadre_step::phases::Direction;

use super::*;

fn planned(step: u64) -> Arc<PlannedStep> {
    let any: Header =
        serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
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
    let check = |turn: &mut Turn, announce: &[u64], begin: &[u64], submit: usize, done: &[u64]| {
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
    let text = include_str!("../../../../testing/header.json");
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

#[test]
fn who_leaves_is_named_with_the_call_that_is_due_but_not_behind_its_last_step() {
    let (first, second) = (planned(7), planned(8));
    let mut turn = Turn::new(3, 7, None);
    let leaves = |turn: &Turn, due: &str, in_mid_step| {
        let what = format!("rank 3 has left, and has not {due}");
        assert_eq!(turn.leaves(true), Some(Stands::Left { what, in_mid_step, as_done: true }));
    };
    leaves(&turn, "announced step 7", false);
    turn.announce(7).unwrap();
    leaves(&turn, "asked for step 7", false);
    turn.begun(&first);
    turn.announce(8).unwrap();
    leaves(&turn, "submitted step 7, layer 0, nano-batch 0, forward", false);
    turn.submitted();
    leaves(&turn, "submitted step 7, layer 1, nano-batch 0, forward", true);
    (1..4).for_each(|_| turn.submitted());
    (0..4).for_each(|_| turn.waited());
    leaves(&turn, "said that step 7 is done", true);
    turn.done(7).unwrap();
    leaves(&turn, "asked for step 8", false);
    turn.begun(&second);
    turn.end(9).unwrap();
    leaves(&turn, "submitted step 8, layer 0, nano-batch 0, forward", false);
    assert_eq!(turn.behind_the_last(), None);
    (0..4).for_each(|_| turn.submitted());
    (0..4).for_each(|_| turn.waited());
    turn.done(8).unwrap();
    assert_eq!(turn.leaves(true), None);
    assert_eq!(turn.behind_the_last(), Some(9));
}

#[test]
fn phases_that_are_skipped_are_not_submitted_by_who_leaves() {
    // All rows are of rank 1.
    let text = include_str!("../../../../testing/header.json").replace("[[{", "[[],[{");
    let header: Header = serde_json::from_str(&text).unwrap();
    let planned = Arc::new(PlannedStep::new(Arc::new(header)).unwrap());
    let mut turn = Turn::new(0, 0, Some(1));
    turn.announce(0).unwrap();
    turn.begun(&planned);
    assert!(turn.skip().is_some());
    let what = "rank 0 has left, and has not said that step 0 is done".into();
    assert_eq!(turn.leaves(false), Some(Stands::Left { what, in_mid_step: false, as_done: false }));
}
