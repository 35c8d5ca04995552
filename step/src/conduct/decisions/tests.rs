//! What the conductor decides of what workers tell it, without any worker.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one word out of many")]

mod headers;
mod job;
mod reports;

use cadre_planner::{DocumentId, Stretch};
use conductor::Command as Commanded;

use self::job::Job;
use super::agree::LENGTHS_AHEAD;
use super::*;
use crate::envelope::NanoLengths;

fn lengths(step: u64, rank: u16) -> Said {
    let half = u32::from(rank) * 50;
    let stretch = Stretch { document: DocumentId(0), start: half, end: half + 50 };
    let nano = NanoLengths { documents: vec![(0, 100)], stretches: vec![stretch] };
    Said::Lengths(Lengths { step, turns: None, nanos: vec![nano] })
}

#[test]
fn the_wait_for_servers_ends_once_and_wakes_nobody_afterwards() {
    let mut job = Job::new();
    let deadline = job.decisions.next_deadline().unwrap();
    assert!(deadline <= SERVERS_START_WITHIN);
    let later = SERVERS_START_WITHIN.after(Nanos::from_millis(5_000));
    job.now = later;
    job.tick();
    // A deadline that has passed and stays would have the IO thread spin until the last step.
    assert!(job.decisions.next_deadline().unwrap() > later);
}

#[test]
fn a_header_is_made_of_what_members_tell_and_planned_beside() {
    let mut job = Job::assembled();
    job.tell(0, lengths(0, 0));
    // A trainer that the job does not have, the same once more.
    job.tell(7, lengths(0, 1));
    job.tell(0, lengths(0, 0));
    assert!(!job.plan() && job.decisions.lengths.keys().eq([&0]));
    job.tell(1, lengths(0, 1));
    // Heartbeats ask for the header before it is planned: nothing begins, and all of them are told later.
    let to = Peer::Trainer(TrainerId(1));
    job.header(0, to);
    assert!(job.begun() == 0 && job.decisions.published.is_empty());
    assert!(job.plan() && !job.plan());
    assert_eq!(job.begun(), 1);
    assert!(job.decisions.published[&0].told.contains(&to));
    // However often it is asked for.
    for _ in 0..3 {
        job.header(0, to);
        job.header(0, Peer::CONDUCTOR);
    }
    assert_eq!(job.begun(), 1);
    // Of a step that is out, lengths are known.
    job.tell(1, lengths(0, 1));
    assert!(job.decisions.lengths.is_empty());
}

#[test]
fn a_trainer_that_counts_the_steps_otherwise_ends_the_job_by_its_name() {
    for step in [LENGTHS_AHEAD, 10, u64::MAX] {
        let expected = format!("trainer 1 announced step {step}, and the job is at step 0;");
        refused(&[(0, lengths(0, 0)), (1, lengths(step, 1))], &expected);
    }
    let one = [(0, lengths(0, 0)), (1, lengths(0, 1))];
    let more = [(0, lengths(1, 0)), (1, Said::Steps(1))];
    refused(&[&one[..], &more].concat(), "trainer 1 has 1 steps, trainer 0 announced step 1; give");
    let more = [(1, Said::Steps(1)), (0, lengths(1, 0))];
    refused(&[&one[..], &more].concat(), "trainer 0 announced step 1, trainer 1 has 1 steps; give");
    let uneven = [(0, Said::Steps(9)), (1, Said::Steps(3))];
    refused(&uneven, "trainer 1 has 3 steps, trainer 0 has 9; give all ranks the same data");
}

#[test]
fn a_fault_at_a_direction_that_the_turns_of_its_step_lack_ends_the_job_by_name() {
    use crate::phases::Direction;
    use crate::turns::Turns;

    let forward = |step, rank| {
        let Said::Lengths(lengths) = lengths(step, rank) else { unreachable!() };
        let turns = Some(Turns::forward(std::num::NonZeroU16::MIN));
        Said::Lengths(Lengths { turns, ..lengths })
    };
    let expected = "a fault is to come at 0:bwd, but the turns of step 0 are F0: nothing goes that way; give the fault 0:fwd, or another step";
    for (step, direction, refused) in [
        (0, Direction::Backward, Some(expected)),
        (0, Direction::Forward, None),
        (1, Direction::Backward, None),
    ] {
        let mut job = Job::assembled();
        job.decisions.faults.insert(FaultAt { step, direction });
        (0..2).for_each(|it| job.tell(it, forward(0, it)));
        job.make();
        let reason = match &job.decisions.ending {
            Some(Ending::Failed { reason, bad_input: true }) => Some(reason.as_str()),
            _ => None,
        };
        assert_eq!(reason, refused);
    }
}

/// What trainers tell ends the job as bad input.
fn refused(told: &[(u16, Said)], expected: &str) {
    let mut job = Job::assembled();
    for (from, said) in told {
        assert_eq!(job.decisions.ending, None);
        job.tell(*from, said.clone());
    }
    let Some(Ending::Failed { reason, bad_input: true }) = &job.decisions.ending else {
        panic!("the job waits for ever")
    };
    assert!(reason.starts_with(expected), "{reason}");
}

#[test]
fn the_job_is_over_when_every_trainer_has_said_that_no_step_follows() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    assert!(job.plan());
    job.obey(Commanded::StepDone(0));
    job.tell(0, Said::Steps(1));
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert_eq!(job.decisions.ending, None, "trainer 1 may have more");
    job.tell(1, Said::Steps(1));
    assert_eq!(job.decisions.ending, Some(Ending::Completed));
}

#[test]
fn a_step_that_some_trainer_has_done_is_reported_when_the_job_fails() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    assert!(job.plan());
    let reported = |job: &mut Job| {
        job.hear(Event::Failed);
        let steps = job.over.drain(..).map(|it| (it.planned.header.step, it.done.len()));
        steps.collect::<Vec<_>>()
    };
    assert_eq!(reported(&mut job), [], "nobody has done it");
    job.tell(1, done(0));
    assert_eq!(reported(&mut job), [(0, 1)]);
    assert_eq!(reported(&mut job), [], "it was told");
}

#[test]
fn trainers_that_stand_still_end_the_job_and_all_of_them_are_named() {
    let mut job = Job::assembled();
    let after = |job: &mut Job, milliseconds| {
        job.later(milliseconds);
    };
    let still = |what: &str| Said::Standing(Stands::Still(what.into()));
    // One that moves again in time, and those who wait for the pool, end nothing.
    job.tell(1, still("rank 1 is slow"));
    job.tell(1, Said::Standing(Stands::No));
    after(&mut job, 5_000);
    job.decisions.pool_lost.insert(0);
    job.tell(1, still("rank 1 has not submitted a phase"));
    after(&mut job, 5_000);
    assert_eq!(job.decisions.ending, None);
    job.decisions.pool_lost.clear();
    after(&mut job, 4_000);
    job.tell(0, still("rank 0 has not come"));
    after(&mut job, 999);
    assert_eq!(job.decisions.ending, None);
    after(&mut job, 1);
    let Some(Ending::Failed { reason, bad_input: false }) = &job.decisions.ending else {
        panic!("the job waits for ever")
    };
    let named = "rank 0 has not come; rank 1 has not submitted a phase; look where";
    assert!(reason.starts_with(named), "{reason}");
}

#[test]
fn trainers_that_leave_a_step_that_others_run_are_named_together_and_nobody_is_if_all_leave() {
    let left = |rank: u16| {
        let what = format!("rank {rank} has left");
        Said::Standing(Stands::Left { what, in_mid_step: false, as_done: true })
    };
    let after = |job: &mut Job, milliseconds| {
        job.later(milliseconds);
    };
    let mut job = Job::assembled();
    assert!(!job.decisions.names_leavers());
    // Whether they wait for the pool does not matter: who has left does not come back.
    job.decisions.pool_lost.insert(0);
    job.tell(1, left(1));
    assert!(job.decisions.names_leavers(), "a conductor that leaves now stays until it is said");
    after(&mut job, 4_999);
    assert_eq!(job.decisions.ending, None, "the other one may leave as well");
    after(&mut job, 1);
    let Some(Ending::Failed { reason, bad_input: true }) = &job.decisions.ending else {
        panic!("rank 0 waits for ever")
    };
    assert_eq!(
        reason,
        "rank 1 has left; have every rank run each step that is out to its end, or none"
    );

    // That it refuses links from then on is noticed long before that, and is no other reason.
    let mut job = Job::assembled();
    let refuse = |job: &mut Job, milliseconds: u64| {
        for _ in 0..milliseconds / 20 {
            job.later(20);
            let closed = conductor::Event::Closed(Peer::Trainer(TrainerId(1)));
            job.hear(Event::Protocol(closed));
        }
    };
    refuse(&mut job, 200);
    job.tell(1, left(1));
    refuse(&mut job, 4_980);
    assert_eq!((&job.decisions.ending, job.ended), (&None, 0), "the other one may leave as well");
    refuse(&mut job, 20);
    assert!(
        matches!(&job.decisions.ending, Some(Ending::Failed { reason, .. }) if reason.starts_with("rank 1 has left"))
    );

    // Ranks may leave seconds apart.
    let mut job = Job::assembled();
    job.tell(1, left(1));
    refuse(&mut job, 3_000);
    job.tell(0, left(0));
    refuse(&mut job, 60_000);
    assert_eq!((&job.decisions.ending, job.ended), (&None, 0), "all ranks have left");

    let mut job = Job::assembled();
    job.tell(0, left(0));
    job.tell(1, left(1));
    assert!(!job.decisions.names_leavers());
    after(&mut job, 60_000);
    assert_eq!(job.decisions.ending, None);
}

#[test]
fn trainers_that_all_leave_a_step_that_one_has_begun_to_submit_are_named() {
    for begun in [0, 1] {
        let mut job = Job::assembled();
        for rank in [1, 0] {
            let (what, in_mid_step) = (format!("rank {rank} has left"), rank == begun);
            // Of the first to say so.
            let as_done = rank == 1;
            job.tell(rank, Said::Standing(Stands::Left { what, in_mid_step, as_done }));
        }
        let Some(Ending::Failed { reason, bad_input: true }) = &job.decisions.ending else {
            panic!("rank {begun} has submitted rows, and the job is over as if it were done")
        };
        assert!(
            reason.starts_with("rank 0 has left; rank 1 has left; have every rank"),
            "{reason}"
        );
    }
}

#[test]
fn a_trainer_that_was_stopped_or_moves_before_it_leaves_is_named_and_its_input_is_not_bad() {
    let mut job = Job::assembled();
    job.decisions.pool_lost.insert(0);
    job.tell(1, Said::Standing(Stands::Still("rank 1 stands".into())));
    job.later(5_000);
    let what = "rank 1 has left".into();
    job.tell(1, Said::Standing(Stands::Left { what, in_mid_step: true, as_done: false }));
    // Something that it did before comes late.
    job.tell(1, Said::Standing(Stands::No));
    job.later(5_000);
    let Some(Ending::Failed { reason, bad_input: false }) = &job.decisions.ending else {
        panic!("the others wait for ever")
    };
    assert!(reason.starts_with("rank 1 has left; have every rank"), "{reason}");
}

fn done(step: u64) -> Said {
    Said::StepDone(StepDone {
        step,
        loss: 1.0,
        gradient_norm: 1.0,
        validation_loss: None,
        learning_rate: 1.0,
        tokens: 100,
        seconds: 1.0,
        exposed_wait_seconds: 0.0,
        header_wait_seconds: 0.0,
    })
}

/// A stop and the loss of the pool, in both orders.
const STOP_AND_LOSS: [fn(&mut Job, Commanded); 2] = [
    |job, lost| {
        job.stop();
        job.obey(lost);
    },
    |job, lost| {
        job.obey(lost);
        job.stop();
    },
];

#[test]
fn a_stop_that_came_before_the_pool_was_lost_does_not_wait_for_servers() {
    for order in STOP_AND_LOSS {
        let mut job = Job::assembled();
        (0..2).for_each(|it| job.tell(it, lengths(0, it)));
        while job.plan() {}
        assert_eq!(job.begun(), 1);
        order(&mut job, Commanded::PoolLost { step: 0 });
        assert_eq!(job.decisions.ending, Some(Ending::Stopped { checkpoint: true }));
    }
}

#[test]
fn a_stop_that_meets_a_lost_pool_waits_until_the_step_before_is_over_at_all_trainers() {
    for order in STOP_AND_LOSS {
        let mut job = Job::assembled();
        for step in 0..2 {
            (0..2).for_each(|it| job.tell(it, lengths(step, it)));
            while job.plan() {}
        }
        assert_eq!(job.begun(), 2);
        // All rows of step 0 are there, and the trainers are in its all-reduce.
        job.obey(Commanded::StepDone(0));
        order(&mut job, Commanded::PoolLost { step: 1 });
        assert_eq!(job.decisions.ending, None, "trainer 1 may be in the all-reduce still");
        job.tell(0, done(0));
        assert_eq!(job.decisions.ending, None);
        job.tell(1, done(0));
        assert_eq!(job.decisions.ending, Some(Ending::Stopped { checkpoint: true }));
    }
}

/// Both trainers run a step; the conductor is asked to stop before the second one has told its end.
fn stopped_in(step: u64) -> Option<Ending> {
    let mut job = Job::assembled();
    (job.decisions.next, job.decisions.whole) = (step, step);
    (0..2).for_each(|it| job.tell(it, lengths(step, it)));
    assert!(job.plan());
    (0..2).for_each(|it| job.tell(it, Said::Steps(10)));
    job.obey(Commanded::StepDone(step));
    job.tell(0, done(step));
    job.stop();
    assert_eq!(job.decisions.ending, None);
    job.tell(1, done(step));
    job.decisions.ending
}

#[test]
fn a_job_that_is_stopped_in_its_last_step_is_completed() {
    assert_eq!(stopped_in(8), Some(Ending::Stopped { checkpoint: true }));
    assert_eq!(stopped_in(9), Some(Ending::Completed));
}

#[test]
fn a_stop_counts_after_the_last_step_that_is_out() {
    let mut job = Job::assembled();
    assert!(job.announce(0) && job.announce(1));
    job.stop();
    for step in 0..2 {
        job.whole(step);
        assert_eq!(job.decisions.ending, None);
        (0..2).for_each(|it| job.tell(it, done(step)));
    }
    assert_eq!(job.decisions.ending, Some(Ending::Stopped { checkpoint: true }));
}

#[test]
fn a_pool_that_is_lost_before_a_header_is_out_is_said_to_be_back() {
    let on_pool_loss = cadre_protocol::OnPoolLoss::Wait(Nanos(u64::MAX / 2));
    let mut job = Job::with(cadre_protocol::Settings { on_pool_loss, ..Default::default() });
    job.introduce();
    job.server(1, None);
    job.decisions.patience = None;
    for address in [None, Some("127.0.0.1:1")] {
        (0..2).for_each(|it| job.tell(it, lengths(0, it)));
        job.make();
        if address.is_some() {
            job.server(2, address);
        }
    }
    assert_eq!(job.said, [About::PoolLost, About::PoolBack]);
}
