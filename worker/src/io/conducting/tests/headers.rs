//! When a header goes out, and who is told it again.

use cadre_protocol::{ServerId, TrainerId};
use cadre_step::words::{Life, Stream};

use super::super::*;
use super::job::Job;
use super::{done, lengths};

#[test]
fn the_next_header_goes_out_while_the_step_before_it_runs() {
    let mut job = Job::assembled();
    assert!(job.announce(0) && job.announce(1));
    assert_eq!((job.begun(), job.conducting.published.len()), (2, 2));
    // A third one only when the first is whole.
    assert!(!job.announce(2));
    job.whole(0);
    assert!(job.plan() && job.conducting.published.contains_key(&2));
}

#[test]
fn a_header_with_other_slots_waits_until_the_step_before_it_is_whole() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    job.view(2, &[Some(0), Some(1), None]);
    assert!(!job.announce(1));
    job.whole(0);
    assert!(job.plan());
    let slots = |job: &Job, step| job.conducting.published[&step].planned.header.slots.len();
    assert_eq!((slots(&job, 0), slots(&job, 1)), (2, 3));
    // That the slots are what they were again is as good.
    job.view(3, &[Some(0), Some(1)]);
    assert!(!job.announce(2));
    job.view(4, &[Some(0), Some(1), None]);
    assert!(job.plan());
    assert_eq!(slots(&job, 2), 3);
}

#[test]
fn a_header_waits_for_faults_that_are_to_be_fired_in_the_step_before_it() {
    let mut job = Job::assembled();
    let moment = Moment { step: 0, direction: cadre_step::phases::Direction::Backward };
    job.conducting.faults.insert(moment);
    assert!(job.announce(0) && !job.announce(1));
    job.whole(0);
    assert!(!job.plan(), "it is told, and not fired");
    job.conducting.fired(&mut job.shared, moment);
    assert!(job.plan());
}

#[test]
fn a_header_that_is_made_when_the_job_is_stopped_goes_nowhere() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.conducting.stop(&mut job.shared, true);
    assert!(!job.plan() && job.conducting.published.keys().eq([&0]));
    job.whole(0);
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert_eq!(job.conducting.ending, Some(Ending::Stopped { checkpoint: true }));
}

#[test]
fn what_is_proposed_before_a_step_began_is_placed_when_it_has() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    job.make();
    let fillers = [0, 1].map(|it| Some(cadre_protocol::Filler::InPlace(TrainerId(it)))).to_vec();
    let propose = Command::Propose { step: 0, proposal: 1, tables: vec![fillers] };
    for _ in 0..2 {
        job.conducting.obey(&mut job.shared, propose.clone());
        job.take();
        assert_eq!(job.rounds, []);
        job.plan();
    }
    assert_eq!(job.begun(), 1);
    let ready = job.begin.pop().unwrap();
    job.shared.begin(ready.planned, ready.first);
    assert!(job.conducting.proposal.is_some());
    job.conducting.begun(&mut job.shared);
    assert!(job.conducting.proposal.is_none());
    job.take();
    assert_eq!(job.rounds.iter().map(|it| it.asker).collect::<Vec<_>>(), [Asker::Conductor(1)]);
}

#[test]
fn a_server_that_comes_back_is_told_the_header_again_and_one_that_left_is_owed_nothing() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0));
    let told = |job: &Job| {
        let (_, told) = job.conducting.published[&0].word.as_ref().unwrap();
        told.contains(&peer)
    };
    assert!(told(&job));
    // Another job had it meanwhile; it listens where it did.
    job.server(2, None);
    job.server(3, Some("127.0.0.1:1"));
    assert!(!told(&job));
    job.conducting.header(&mut job.shared, 0, peer);
    assert!(told(&job));
    // The step may still use it, then nobody does.
    job.server(4, None);
    job.shared.forget(Peer::Trainer(TrainerId(1)));
    assert!(!job.shared.telling.is_covered());
    job.whole(0);
    job.shared.forget(Peer::Trainer(TrainerId(1)));
    assert!(job.shared.telling.is_covered());
}

#[test]
fn a_server_that_came_back_between_two_views_is_told_the_header_again() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0) && job.announce(1));
    let told = |job: &Job| {
        let words = job.conducting.published.values().map(|it| it.word.as_ref());
        words.map(|it| it.unwrap().1.contains(&peer)).collect::<Vec<_>>()
    };
    // It has heard all of it.
    let heard = |job: &mut Job, life| {
        let stream = Stream { life: job.shared.telling.life(), era: 0 };
        job.shared.covered((peer, life), stream, 2)
    };
    assert!(!heard(&mut job, Life(1)) && job.owed().is_empty());
    assert!(!job.shared.lives(peer, Life(1)));
    // A controller that merges views shows the same server at the same place.
    job.server(2, Some("127.0.0.1:1"));
    assert_eq!(told(&job), [true, true]);
    assert!(job.shared.lives(peer, Life(2)), "its first heartbeat");
    job.conducting.came_back(peer);
    assert_eq!(told(&job), [false, false]);
    for step in 0..2 {
        job.conducting.header(&mut job.shared, step, peer);
    }
    assert_eq!((told(&job), job.owed()), (vec![true, true], vec![server]));
}
