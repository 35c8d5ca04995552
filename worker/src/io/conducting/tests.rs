//! What the conductor's side carries out, without any worker: whom it owes words, and what it drops.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one out of many")]

mod job;

use cadre_planner::{DocumentId, Stretch};
use cadre_protocol::ServerId;
use cadre_step::envelope::{Lengths, NanoLengths, StepDone};
use cadre_step::words::{Life, Stream};

use self::job::Job;
use super::*;

fn lengths(step: u64, rank: u16) -> Said {
    let half = u32::from(rank) * 50;
    let stretch = Stretch { document: DocumentId(0), start: half, end: half + 50 };
    let nano = NanoLengths { documents: vec![(0, 100)], stretches: vec![stretch] };
    Said::Lengths(Lengths { step, turns: None, nanos: vec![nano] })
}

#[test]
fn servers_that_are_lost_or_have_left_are_told_nothing_more() {
    let id = |index, incarnation| ServerId { index, incarnation };
    let mut job = Job::assembled();
    job.serve(2, &[Some(id(0, 0)), Some(id(1, 0))]);
    assert!(job.announce(0));
    assert_eq!(job.owed(), [id(0, 0), id(1, 0)]);
    // Another one comes in the place of the first while the next header is planned, which was to go to both.
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.make();
    job.take();
    job.serve(3, &[Some(id(0, 1)), Some(id(1, 0))]);
    assert!(job.plan());
    assert_eq!(job.owed(), [id(1, 0)], "a server that is lost never hears a word");
    // The other one leaves: it is owed its words as long as a step that is out names it.
    job.serve(4, &[Some(id(0, 1)), None]);
    assert_eq!(job.owed(), [id(1, 0)]);
    (0..2).for_each(|it| job.whole(it));
    assert_eq!(job.owed(), []);
}

#[test]
fn a_server_that_starts_a_thousand_times_leaves_no_trace_of_most_of_them() {
    let id = |index, incarnation| ServerId { index, incarnation };
    let mut job = Job::assembled();
    job.serve(2, &[Some(id(0, 0)), Some(id(1, 0))]);
    assert!(job.announce(0));
    job.take();
    let ready = job.begin.pop().unwrap();
    job.shared.begin(ready.planned, ready.first);
    for incarnation in 1..1_000 {
        let (server, peer) = (id(0, incarnation), Peer::Server(id(0, incarnation)));
        job.serve(2 + u64::from(incarnation), &[Some(server), Some(id(1, 0))]);
        let body = job.shared.compose(&Said::Leaving);
        job.shared.tell(peer, &body);
        let stream = Stream { life: Life(u64::from(incarnation)), era: 0 };
        job.shared.word(peer, (stream, 0), Body::clone(&body)).unwrap();
        job.take();
    }
    let last = Peer::Server(id(0, 999));
    assert!(
        job.conducting.decisions().has_lost(Peer::Server(id(0, 998)))
            && !job.conducting.decisions().has_lost(last)
    );
    // Two trainers, the other server, and of this one the last two and the one that the step names.
    assert!(job.shared.remembered().iter().all(|it| *it <= 6), "{:?}", job.shared.remembered());
    for (incarnation, known) in [(0, true), (1, false), (997, false), (998, true), (999, true)] {
        let peer = Peer::Server(id(0, incarnation));
        assert_eq!(job.shared.address_of(peer).is_some(), known, "{incarnation}");
    }
}

#[test]
fn a_server_that_comes_back_is_told_the_header_again_and_one_that_left_is_owed_nothing() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.serve(1, &[Some(server)]);
    assert!(job.announce(0) && job.announce(1));
    let heard = |job: &mut Job, life| {
        let stream = Stream { life: job.shared.telling.life(), era: 0 };
        job.shared.covered((peer, life), stream, 2)
    };
    assert!(!heard(&mut job, Life(1)) && job.owed().is_empty());
    assert!(!job.shared.lives(peer, Life(1)));
    // It has heard all of it, and heartbeats of the same life change nothing.
    job.beat(peer);
    assert!(job.owed().is_empty());
    assert!(job.shared.lives(peer, Life(2)), "its first heartbeat");
    job.conducting.handle(&mut job.shared, Event::CameBack(peer));
    job.beat(peer);
    assert_eq!(job.owed(), [server]);
    // Steps that are out may still use it, then nobody does.
    job.serve(2, &[None]);
    assert_eq!(job.owed(), [server]);
    (0..2).for_each(|it| job.whole(it));
    assert_eq!(job.owed(), []);
}

#[test]
fn a_step_that_is_over_is_reported_and_its_plan_is_not_freed_here() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    job.take();
    let ready = job.begin.pop().unwrap();
    let plan = Arc::downgrade(&ready.planned);
    drop(ready);
    let done = Said::StepDone(StepDone::default());
    job.tell(1, done);
    job.conducting.handle(&mut job.shared, Event::Failed);
    let report = job.shared.outputs.take();
    let Some(Output::Report(report)) = report else { panic!("{report:?}") };
    let Some(cadre_control::proto::worker_message::Message::Progress(it)) = report.message else {
        panic!("no progress")
    };
    assert_eq!(it.step, 0);
    // That takes as long as the step has documents.
    let rest = job.shared.outputs.take();
    assert!(matches!(rest, Some(Output::Finished(_))) && plan.strong_count() > 0, "{rest:?}");
    drop(rest);
    assert_eq!(plan.strong_count(), 0);
}
