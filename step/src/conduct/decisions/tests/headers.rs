//! When a header goes out, and who is told it again.

use cadre_protocol::ServerId;

use super::super::*;
use super::job::Job;
use super::{Commanded, done, lengths};

#[test]
fn the_next_header_goes_out_while_the_step_before_it_runs() {
    let mut job = Job::assembled();
    assert!(job.announce(0) && job.announce(1));
    assert_eq!((job.begun(), job.decisions.published.len()), (2, 2));
    // A third one only when the first is whole.
    assert!(!job.announce(2));
    job.whole(0);
    assert!(job.plan() && job.decisions.published.contains_key(&2));
}

#[test]
fn a_header_with_other_slots_waits_until_the_step_before_it_is_whole() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    job.view(2, &[Some(0), Some(1), None]);
    assert!(!job.announce(1));
    job.whole(0);
    assert!(job.plan());
    let slots = |job: &Job, step| job.decisions.published[&step].planned.header.slots.len();
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
    let at = FaultAt { step: 0, direction: crate::phases::Direction::Backward };
    job.decisions.faults.insert(at);
    assert!(job.announce(0) && !job.announce(1));
    job.whole(0);
    assert!(!job.plan(), "it is told, and not fired");
    job.hear(Event::Fired(at));
    assert!(job.plan());
}

#[test]
fn a_header_that_is_made_when_the_job_is_stopped_goes_nowhere() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.stop();
    assert!(!job.plan() && job.decisions.published.keys().eq([&0]));
    job.whole(0);
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert_eq!(job.decisions.ending, Some(Ending::Stopped { checkpoint: true }));
}

#[test]
fn what_is_proposed_before_a_step_began_is_placed_when_it_has() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    job.make();
    let fillers = [0, 1].map(|it| Some(cadre_protocol::Filler::InPlace(TrainerId(it)))).to_vec();
    let propose = Commanded::Propose { step: 0, proposal: 1, tables: vec![fillers] };
    for _ in 0..2 {
        job.obey(propose.clone());
        assert_eq!(job.proposals, []);
        job.plan();
    }
    assert_eq!(job.begin, [0]);
    job.hear(Event::Begun(0));
    assert_eq!(job.proposals, [(0, 1)]);
}

/// Servers 0 and 1 of three are silent from the beginning. The header of step 0 is planned at `planned_at` ms; what is to be dealt out
/// before this process begins the step, and what after.
fn silent_while_planned(planned_at: u64) -> [Vec<(u64, u64)>; 2] {
    let mut job = Job::new();
    job.introduce();
    let id = |index| Some(ServerId { index, incarnation: 0 });
    job.serve(1, &[id(0), id(1), id(2)]);
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    job.make();
    let beats = |job: &mut Job, index| {
        let message = cadre_protocol::Message::Heartbeat(Box::default());
        let from = Peer::Server(ServerId { index, incarnation: 0 });
        job.hear(Event::Protocol(conductor::Event::Message { from, message }));
    };
    let mut now = 0;
    while now < planned_at {
        let span = 200.min(planned_at - now);
        now += span;
        job.now = job.now.after(Nanos::from_millis(span));
        // Server 1 stops later.
        if now <= 1_500 {
            beats(&mut job, 1);
        }
        if now < planned_at {
            beats(&mut job, 2);
        }
    }
    assert!(job.plan());
    assert_eq!(job.begin, [0]);
    let before = std::mem::take(&mut job.proposals);
    job.hear(Event::Begun(0));
    [before, job.proposals]
}

#[test]
fn a_server_found_silent_as_a_header_is_published_is_replaced_when_its_step_has_begun() {
    // The first is silent for a second after its start.
    assert_eq!(silent_while_planned(1_900), [vec![], vec![]]);
    assert_eq!(silent_while_planned(2_000), [vec![], vec![(0, 1)]], "as it is published");
    assert_eq!(silent_while_planned(2_300), [vec![], vec![(0, 1)]], "while it is planned");
    // The second is lost as well: nobody deals out what was proposed before.
    assert_eq!(silent_while_planned(2_400), [vec![], vec![(0, 2)]]);
}

#[test]
fn a_server_that_comes_back_is_told_the_header_again_and_one_that_left_is_owed_nothing() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0));
    let told = |job: &Job| job.decisions.published[&0].told.contains(&peer);
    assert!(told(&job));
    // Another job had it meanwhile; it listens where it did.
    job.server(2, None);
    job.server(3, Some("127.0.0.1:1"));
    assert!(!told(&job));
    job.header(0, peer);
    assert!(told(&job));
    // The step may still use it, then nobody does.
    job.server(4, None);
    assert!(job.decisions.hears(peer));
    job.whole(0);
    assert!(!job.decisions.hears(peer) && job.forgets);
}

#[test]
fn a_server_that_leaves_when_no_step_is_out_is_owed_nothing() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0));
    job.whole(0);
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert!(job.decisions.published.is_empty() && job.decisions.hears(Peer::Server(server)));
    job.server(2, None);
    assert!(!job.decisions.hears(Peer::Server(server)));
    assert!(job.said.is_empty(), "it has left, and is not lost");
}

#[test]
fn a_server_that_came_back_between_two_views_is_told_the_header_again() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0) && job.announce(1));
    let told = |job: &Job| {
        job.decisions.published.values().map(|it| it.told.contains(&peer)).collect::<Vec<_>>()
    };
    // A controller that merges views shows the same server at the same place.
    job.server(2, Some("127.0.0.1:1"));
    assert_eq!(told(&job), [true, true]);
    job.hear(Event::CameBack(peer));
    assert_eq!(told(&job), [false, false]);
    for step in 0..2 {
        job.header(step, peer);
    }
    assert_eq!(told(&job), [true, true]);
}

#[test]
fn who_is_lost_or_has_left_is_told_no_header() {
    let id = |index, incarnation| ServerId { index, incarnation };
    let peer = |index, incarnation| Peer::Server(id(index, incarnation));
    let mut job = Job::assembled();
    job.serve(2, &[Some(id(0, 0)), Some(id(1, 0))]);
    assert!(job.announce(0));
    // Another one comes in the place of the first while the next header is planned, which was to go to both.
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.make();
    job.serve(3, &[Some(id(0, 1)), Some(id(1, 0))]);
    assert_eq!(job.said, [About::ServerLost(id(0, 0))]);
    assert!(job.plan());
    let told = |job: &Job, step: u64, it| job.decisions.published[&step].told.contains(&it);
    assert!(!told(&job, 0, peer(0, 0)) && !told(&job, 1, peer(0, 0)));
    assert!(told(&job, 0, peer(1, 0)) && told(&job, 1, peer(1, 0)));
    // The other one leaves: it hears as long as a step that is out names it.
    job.serve(4, &[Some(id(0, 1)), None]);
    assert!(job.decisions.hears(peer(1, 0)));
    (0..2).for_each(|it| job.whole(it));
    assert!(!job.decisions.hears(peer(1, 0)));
}
