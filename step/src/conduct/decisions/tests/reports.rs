//! What servers did in a step that is over: it comes over other links than what trainers say.

use super::*;
use crate::envelope::ServerStep;

const SERVERS: [ServerId; 2] =
    [ServerId { index: 0, incarnation: 0 }, ServerId { index: 1, incarnation: 0 }];

/// A job on two servers, which both trainers have done a step of.
fn with_a_step_done(steps: u64) -> Job {
    let mut job = Job::new();
    job.introduce();
    job.serve(1, &SERVERS.map(Some));
    (0..2).for_each(|it| job.tell(it, Said::Steps(steps)));
    finish(&mut job, 0);
    job
}

fn finish(job: &mut Job, step: u64) {
    assert!(job.announce(step));
    job.obey(Commanded::StepDone(step));
    (0..2).for_each(|it| job.tell(it, done(step)));
}

fn did(job: &mut Job, server: ServerId, step: u64) {
    let did = ServerStep { step, tasks: 1, busy_seconds: 1.0, bytes_pulled: 1 };
    job.hear(Event::Told(Peer::Server(server), Said::ServerStep(did)));
}

/// Steps that were told, each with how many servers are in it.
fn told(job: &mut Job) -> Vec<(u64, usize)> {
    job.over.drain(..).map(|it| (it.planned.header.step, it.served.len())).collect()
}

#[test]
fn a_step_is_told_once_all_its_servers_have_said_what_they_did_and_the_end_behind_it() {
    let mut job = with_a_step_done(1);
    assert_eq!((told(&mut job), job.told_the_end), (vec![], 0));
    did(&mut job, SERVERS[1], 0);
    assert_eq!((told(&mut job), job.told_the_end), (vec![], 0));
    did(&mut job, SERVERS[0], 0);
    assert_eq!((told(&mut job), job.told_the_end), (vec![(0, 2)], 1));
    job.later(10_000);
    assert_eq!((told(&mut job), job.told_the_end), (vec![], 1));
}

#[test]
fn a_server_that_says_nothing_or_is_lost_keeps_no_step_and_no_end_for_long() {
    let mut job = with_a_step_done(2);
    finish(&mut job, 1);
    for it in SERVERS {
        did(&mut job, it, 1);
    }
    did(&mut job, SERVERS[0], 0);
    assert_eq!(told(&mut job), [], "steps are told in order");
    let deadline = job.decisions.next_deadline();
    assert!(deadline.is_some_and(|it| it <= job.now.after(Nanos::from_millis(500))));
    job.later(500);
    assert_eq!((told(&mut job), job.told_the_end), (vec![(0, 1), (1, 2)], 1));

    let mut job = with_a_step_done(1);
    did(&mut job, SERVERS[0], 0);
    job.hear(Event::Protocol(conductor::Event::Tick));
    assert_eq!(told(&mut job), []);
    job.obey(Commanded::DeclareLost(SERVERS[1]));
    job.tick();
    let failovers = job.over.iter().map(|it| (it.failovers, it.failovers_so_far));
    assert_eq!(failovers.collect::<Vec<_>>(), [(0, 0)], "it was lost after the step");
    assert_eq!((told(&mut job), job.told_the_end), (vec![(0, 1)], 1));
}

#[test]
fn a_job_that_fails_waits_for_no_server() {
    let mut job = with_a_step_done(5);
    job.hear(Event::Failed);
    assert_eq!(told(&mut job), [(0, 0)]);
    let mut job = with_a_step_done(5);
    job.tell(1, Said::Steps(6));
    assert_eq!((told(&mut job), job.told_the_end), (vec![(0, 0)], 1));
}

#[test]
fn a_job_that_all_trainers_leave_has_told_its_steps() {
    let mut job = with_a_step_done(5);
    for rank in 0..2 {
        assert_eq!(told(&mut job), []);
        let what = format!("rank {rank} has left");
        job.tell(rank, Said::Standing(Stands::Left { what, in_mid_step: false, as_done: true }));
    }
    assert_eq!(told(&mut job), [(0, 0)], "rank 0 goes now, and the conductor with it");
}

#[test]
fn a_trainer_that_has_done_a_step_while_it_waits_to_be_told_is_in_it() {
    let mut job = Job::new();
    job.introduce();
    job.serve(1, &SERVERS.map(Some));
    assert!(job.announce(0));
    job.tell(0, done(0));
    job.stop();
    job.obey(Commanded::PoolLost { step: 0 });
    assert_eq!((job.over.len(), job.told_the_end), (0, 0), "servers may say what they did");
    job.tell(1, done(0));
    job.later(500);
    let done: Vec<_> = job.over.iter().map(|it| it.done.len()).collect();
    assert_eq!((&done[..], job.told_the_end), (&[2][..], 1));
}

#[test]
fn a_stop_that_is_decided_holds_while_a_step_waits_to_be_told() {
    let mut job = Job::new();
    job.introduce();
    job.serve(1, &SERVERS.map(Some));
    assert!(job.announce(0));
    job.obey(Commanded::StepDone(0));
    job.tell(0, done(0));
    let what = "rank 0 has left".to_owned();
    job.tell(0, Said::Standing(Stands::Left { what, in_mid_step: false, as_done: true }));
    job.later(4_600);
    job.stop();
    job.tell(1, done(0));
    assert_eq!(job.decisions.ending, Some(Ending::Stopped { checkpoint: true }));
    // Rank 0 would be named now.
    job.later(400);
    assert_eq!((told(&mut job), job.told_the_end), (vec![], 0));
    job.later(100);
    assert_eq!((told(&mut job), job.told_the_end), (vec![(0, 0)], 1));
}
