//! Whose turn it is, call by call, and for how long.

use cadre_step::header::{Header, Member};

use super::*;

const PATIENCE: u64 = 7_000;

fn planned(step: u64) -> Arc<PlannedStep> {
    let any: Header =
        serde_json::from_str(include_str!("../../../../testing/header.json")).unwrap();
    Arc::new(PlannedStep::new(Arc::new(Header { step, ..any })).unwrap())
}

/// Rank 3 from step 5 on, at a time that is counted in fifths of seconds.
struct Watched(Standing, u64);

impl Watched {
    fn new() -> Self {
        let patience = [2 * PATIENCE, PATIENCE].map(Nanos::from_millis);
        Self(Standing::new((TrainerId(3), 5), patience, Nanos(0)), 0)
    }

    /// What is said within so many milliseconds.
    fn look(&mut self, milliseconds: u64, untaken: bool) -> Option<Stands> {
        self.owing(milliseconds, if untaken { Owed::Notices } else { Owed::Nothing })
    }

    fn owing(&mut self, milliseconds: u64, owed: Owed) -> Option<Stands> {
        let mut said = None;
        for _ in 0..milliseconds / 200 {
            self.1 += 200;
            said = said.or(self.0.look(Nanos::from_millis(self.1), owed));
        }
        said
    }

    /// It is its turn: it may take nearly as long as it is allowed, and is named when it takes longer, once until it moves.
    fn due(&mut self, patience: u64, expected: &str) {
        assert_eq!(self.look(patience - 200, false), None, "{expected}");
        let mut other = Self(self.0.clone(), self.1);
        let text = format!("rank 3 has not {expected} for {} s", patience / 1000);
        assert_eq!(other.look(200, false), Some(Stands::Still(text)));
        assert_eq!(other.look(10 * patience, true), None, "it was said");
        other.0.moved();
        assert_eq!(other.look(200, false), Some(Stands::No));
    }

    fn whole(&mut self, step: u64, phases: std::ops::Range<u32>) {
        phases.for_each(|it| self.0.whole(At::new(step, it)));
    }

    fn waits(&mut self) {
        assert_eq!(self.look(10 * PATIENCE, false), None);
    }
}

#[test]
fn whose_turn_it_is_is_named_by_the_call_that_is_due_and_who_waits_is_not() {
    let mut rank = Watched::new();
    rank.due(2 * PATIENCE, "announced step 5");
    rank.0.announced(5);
    rank.waits();
    rank.0.begins(&planned(5));
    rank.due(PATIENCE, "submitted step 5, layer 0, nano-batch 0, forward");
    rank.0.announced(6);
    rank.due(PATIENCE, "submitted step 5, layer 0, nano-batch 0, forward");
    rank.0.submitted();
    rank.waits();
    rank.whole(5, 0..1);
    rank.due(PATIENCE, "submitted step 5, layer 1, nano-batch 0, forward");
    for phase in 1..4 {
        rank.0.submitted();
        rank.waits();
        rank.whole(5, phase..phase + 1);
    }
    // The header of the next step may come before this one is done.
    rank.0.begins(&planned(6));
    rank.waits();
    rank.0.passed(5);
    rank.due(PATIENCE, "said that step 5 is done");
    rank.0.done();
    rank.due(PATIENCE, "submitted step 6, layer 0, nano-batch 0, forward");
    (0..4).for_each(|_| rank.0.submitted());
    rank.waits();
    rank.whole(6, 0..4);
    rank.0.done();
    rank.due(PATIENCE, "announced step 7");
    rank.0.ends(7);
    rank.waits();
}

#[test]
fn who_leaves_what_it_is_told_stands_still_though_it_could_wait() {
    let mut rank = Watched::new();
    rank.0.announced(5);
    assert_eq!(rank.look(PATIENCE - 200, true), None);
    assert_eq!(rank.look(200, false), None);
    rank.0.begins(&planned(5));
    rank.0.submitted();
    rank.waits();
    assert_eq!(rank.owing(10 * PATIENCE, Owed::Computing), None, "a launch may take longer");
    let expected = "rank 3 has not submitted step 5, layer 1, nano-batch 0, forward for 7 s";
    assert_eq!(rank.look(PATIENCE, true), Some(Stands::Still(expected.into())));
    // All its results are here, and others wait for works of it.
    (1..4).for_each(|_| rank.0.submitted());
    rank.whole(5, 0..4);
    assert_eq!(rank.look(200, false), Some(Stands::No));
    rank.waits();
    // In an all-reduce it takes nothing, however long others are busy.
    assert_eq!(rank.look(10 * PATIENCE, true), None);
    // A launch may take longer than that: others wait for it, and it is not over sooner.
    assert_eq!(rank.owing(10 * PATIENCE, Owed::Computing), None);
    let expected = "rank 3 has not said that step 5 is done for 7 s";
    assert_eq!(rank.owing(PATIENCE, Owed::Works), Some(Stands::Still(expected.into())));
}

#[test]
fn who_says_that_it_is_busy_has_so_long_until_its_next_call() {
    let mut rank = Watched::new();
    rank.0.busy(Nanos::from_millis(9 * PATIENCE), rank.0.calls);
    rank.due(9 * PATIENCE, "announced step 5");
    rank.0.announced(5);
    rank.0.begins(&planned(5));
    (0..4).for_each(|_| rank.0.submitted());
    rank.whole(5, 0..4);
    rank.0.passed(5);
    // As it saves a checkpoint: no single part takes long.
    for _ in 0..20 {
        assert_eq!(rank.look(PATIENCE - 200, false), None);
        rank.0.busy(Nanos(0), rank.0.calls);
    }
    rank.due(PATIENCE, "said that step 5 is done");
    rank.0.busy(Nanos::from_millis(3 * PATIENCE), rank.0.calls);
    // What it computes for others meanwhile is no call.
    rank.0.moved();
    rank.due(3 * PATIENCE, "said that step 5 is done");
    rank.0.done();
    rank.due(PATIENCE, "announced step 6");
}

#[test]
fn calls_that_come_late_do_not_end_what_was_said_after_them() {
    let mut rank = Watched::new();
    rank.0.announced(5);
    rank.0.begins(&planned(5));
    // It has submitted all four phases and said that the step is done; then it saves.
    rank.0.busy(Nanos::from_millis(9 * PATIENCE), rank.0.calls + 5);
    (0..4).for_each(|_| rank.0.submitted());
    rank.whole(5, 0..4);
    rank.0.passed(5);
    rank.0.done();
    rank.due(9 * PATIENCE, "announced step 6");
    rank.0.announced(6);
    rank.0.begins(&planned(6));
    rank.due(PATIENCE, "submitted step 6, layer 0, nano-batch 0, forward");
}

#[test]
fn a_phase_without_rows_is_whole_at_once_and_leaves_nothing_for_the_next_step() {
    let mut rank = Watched::new();
    rank.0.announced(5);
    rank.0.begins(&planned(5));
    rank.0.announced(6);
    (0..2).for_each(|_| rank.0.submitted());
    (0..2).for_each(|_| rank.0.skipped());
    rank.waits();
    rank.whole(5, 0..2);
    rank.0.passed(5);
    rank.0.done();
    rank.0.begins(&planned(6));
    rank.0.submitted();
    rank.waits();
}

#[test]
fn who_waits_for_rows_of_works_that_were_planned_for_it_is_not_named_though_its_phase_is_whole() {
    let mut rank = Watched::new();
    rank.0.announced(5);
    let header = Arc::clone(&planned(5).header);
    let header = Header { fillers: vec![Some(Member::InPlace(3))], ..(*header).clone() };
    let planned = Arc::new(PlannedStep::new(Arc::new(header)).unwrap());
    rank.0.begins(&planned);
    rank.0.announced(6);
    let works = |phase| planned.works_of(Phase(phase), Filler::InPlace(TrainerId(3)));
    let turn = |phase| format!("submitted step 5, layer {phase}, nano-batch 0, forward");
    let at = |phase| At::new(5, phase);
    assert!((0..4).all(|it| works(it) > 0));
    // Of the phases to come some may run before.
    rank.0.ran(at(1));
    rank.0.submitted();
    (1..works(0)).for_each(|_| rank.0.ran(at(0)));
    rank.waits();
    rank.whole(5, 0..1);
    rank.waits();
    assert_eq!(rank.owing(10 * PATIENCE, Owed::Computing), None);
    let expected = format!("rank 3 has not {} for 7 s", turn(1));
    assert_eq!(rank.owing(PATIENCE, Owed::Works), Some(Stands::Still(expected)));
    rank.0.ran(at(0));
    rank.0.moved();
    assert_eq!(rank.look(200, false), Some(Stands::No));
    rank.0.moved();
    rank.due(PATIENCE, &turn(1));
    rank.0.submitted();
    (1..works(1)).for_each(|_| rank.0.ran(at(1)));
    rank.whole(5, 1..2);
    rank.due(PATIENCE, "submitted step 5, layer 1, nano-batch 0, backward");
    // Nobody wants its works any more.
    rank.0.submitted();
    rank.whole(5, 2..3);
    rank.waits();
    rank.0.cancelled(at(2));
    rank.due(PATIENCE, "submitted step 5, layer 0, nano-batch 0, backward");
}

#[test]
fn a_pause_of_the_process_does_not_count() {
    let mut rank = Watched::new();
    for _ in 0..2 * PATIENCE / 1000 - 1 {
        rank.1 += 1_000_000;
        assert_eq!(rank.0.look(Nanos::from_millis(rank.1), Owed::Nothing), None);
    }
    assert!(rank.look(1_000, false).is_some());
}

#[test]
fn a_slow_rank_is_told_of_once_until_it_moves_and_not_where_all_wait_for_one() {
    let mut rank = Watched::new();
    rank.0 = rank.0.slow_after(Nanos::from_millis(1_000));
    rank.0.announced(5);
    rank.0.begins(&planned(5));
    let slow = |rank: &mut Watched, milliseconds: u64| {
        let mut said = Vec::new();
        for _ in 0..milliseconds / 200 {
            assert_eq!(rank.look(200, false), None);
            said.extend(rank.0.slow());
        }
        said
    };
    assert!(slow(&mut rank, 800).is_empty());
    let said = slow(&mut rank, 5_000);
    let expected = "rank 3 has not submitted step 5, layer 0, nano-batch 0, forward for 1 s, and others wait for it";
    assert_eq!(said, [expected]);
    rank.0.moved();
    assert_eq!(slow(&mut rank, 1_000).len(), 1);
    // It has said for how long it is busy.
    rank.0.busy(Nanos::from_millis(3_000), rank.0.calls);
    assert!(slow(&mut rank, 2_800).is_empty());
    assert_eq!(slow(&mut rank, 200).len(), 1);
    // Its last phase is over, and the step is not.
    let count = planned(5).order.count() as u32;
    (0..count).for_each(|_| rank.0.submitted());
    rank.whole(5, 0..count);
    rank.0.passed(5);
    assert!(slow(&mut rank, 5_000).is_empty());
}
