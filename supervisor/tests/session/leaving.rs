//! Ranks that leave their job early, late, as failed or as done, with real processes.

use super::*;
use crate::lent::{DISK, TOLD_STOP};

#[test]
fn ranks_that_leave_before_a_step_that_is_out_end_the_job_in_order_if_all_do_and_by_name_else() {
    let (result, _) = ended(AttentionPlace::Pool, &[], Some("all leave"));
    result.expect("nobody waits for anybody");
    match ended(AttentionPlace::Pool, &[], Some("all leave in the middle")).0 {
        Err(RunError::BadInput { message, .. }) => {
            let named = "rank 1 has left, and has not submitted step 0, layer 1, nano-batch 0";
            assert!(message.contains(named), "{message}");
        }
        other => panic!("rank 1 has submitted rows, and the job is over: {other:?}"),
    }
    let check = |mistake, rank: u16| match ended(AttentionPlace::Pool, &[], Some(mistake)).0 {
        Err(RunError::BadInput { message, .. }) => {
            let named = format!(
                "rank {rank} has left, and has not submitted step 0, layer 0, nano-batch 0, forward; have every rank run"
            );
            assert!(message.contains(&named), "{message}");
        }
        other => panic!("the other rank waits for rank {rank}: {other:?}"),
    };
    match ended(AttentionPlace::Pool, &[], Some("leaves, failed")).0 {
        Err(RunError::JobFailed { message, .. }) => {
            assert!(message.contains(DISK), "{message}");
        }
        other => panic!("another attempt may find the disk: {other:?}"),
    }
    thread::scope(|scope| {
        scope.spawn(|| check("leaves", 1));
        scope.spawn(|| check("the conductor leaves", 0));
    });
}

/// Others may not have said that it is done, and need its rows or the conductor until then.
#[test]
fn a_rank_that_leaves_as_soon_as_its_last_step_is_done_waits_for_the_end_of_the_job() {
    let check = |slow: u16| {
        let act = format!("{ON_HOST}, slow rank {slow}");
        let (result, lines) = ended(AttentionPlace::Pool, &[], Some(&act));
        result.unwrap_or_else(|error| panic!("rank {slow} is slow: {error:?}"));
        assert_eq!(lines.len(), 3 * 2 * 2 * 3);
    };
    thread::scope(|scope| (0..TRAINERS).for_each(|it| drop(scope.spawn(move || check(it)))));
}

#[test]
fn a_rank_that_fails_when_its_last_step_is_done_ends_the_job_with_its_reason() {
    let check = |slow: u16| {
        let act = format!("{ON_HOST}, fails but rank {slow}");
        // The other one exits with 2 if it learns another reason.
        match ended(AttentionPlace::Pool, &[], Some(&act)).0 {
            Err(RunError::JobFailed { message, .. }) => {
                assert!(message.contains(DISK), "{message}");
            }
            other => panic!("rank {slow} hears another reason: {other:?}"),
        }
    };
    thread::scope(|scope| (0..TRAINERS).for_each(|it| drop(scope.spawn(move || check(it)))));
}

#[test]
fn a_rank_that_takes_a_job_for_complete_is_told_that_it_was_stopped() {
    let act = format!("{ON_HOST}, is stopped");
    let (result, lines) = ended(AttentionPlace::Pool, &[], Some(&act));
    assert!(lines.contains(TOLD_STOP), "{lines:?}");
    // To a supervisor, who has stopped nobody, that is a job that is not complete.
    match result {
        Err(RunError::JobFailed { message, .. }) => {
            assert!(message.contains("exit code 0"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_that_leave_with_lent_rows_under_way_end_the_job_by_name() {
    if cadre_kernels::cubins::CUBINS.is_empty() {
        eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        return;
    }
    let act = format!("{ON_GPU}, leaves midway");
    match ended(AttentionPlace::Pool, &[], Some(&act)).0 {
        Err(RunError::BadInput { message, .. }) => {
            let named = "rank 1 has left, and has not submitted step 0, layer 0, nano-batch 1";
            assert!(message.contains(named), "{message}");
        }
        other => panic!("rows are on their way, and the job is over: {other:?}"),
    }
}
