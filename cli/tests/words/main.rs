//! Whole jobs as processes over links that lose words, and with a member that lies: what trainers, servers and conductor tell each
//! other arrives, and counts from those alone who may say it.
//!
//! The controller here is the test's own ([`controller`]): it tells every worker the addresses of relays ([`relay`]) in the
//! place of its peers'. A relay reads what passes and cuts the link instead of handing on the first word of each kind between two
//! workers. Nothing timed decides: a job that hangs is ended at a deadline, and the test is red.

mod controller;
mod liar;
mod relay;

use std::collections::BTreeSet;

use cadre_exchange::{PeerId, RegionKey};
use cadre_protocol::{Acks, At, Message, Round, ServerId};
use cadre_step::envelope::{Ending, Envelope, Lengths, Said, Stands, StepDone};
use cadre_step::header::Header;
use cadre_step::words::{Body, Published};

use self::controller::Job;
use self::liar::Liar;
use self::relay::Loss;

#[test]
fn every_kind_of_word_may_be_lost_once() {
    let quiet = Job::start(Loss::Nothing, None).finish();
    assert!(quiet.lost.is_empty());
    let lossy = Job::start(Loss::FirstOfEachKind, None).finish();
    assert_eq!(lossy.losses, quiet.losses, "{:#?}", lossy.logs);
    assert_eq!(lossy.codes, [Some(0); 3], "{:#?}", lossy.logs);
    let kinds: BTreeSet<&str> = lossy.lost.iter().map(|it| it.kind).collect();
    let wanted = [
        "addresses",
        "a header",
        "how many steps it has",
        "lengths",
        "that it heard",
        "the end of a step",
        "the end of the job",
        "what a server did",
    ];
    assert_eq!(kinds, BTreeSet::from(wanted));
}

/// What the conductor alone may say, and its name.
fn commands() -> [(Message, &'static str); 5] {
    let server = ServerId { index: 0, incarnation: 0 };
    [
        (Message::Watermark { at: At::new(u64::MAX, 0) }, "a watermark"),
        (Message::Pulse { watermark: Some(At::new(1, 0)), ask: Vec::new() }, "a pulse"),
        (Message::Round { step: 0, round: Round(1), tables: vec![Vec::new()] }, "a round"),
        (Message::Leave { server }, "that a server is lost"),
        (Message::Spare { watermark: None }, "that a server may go"),
    ]
}

/// What a server may not say, and its name.
fn words(header: &Header) -> [(Said, &'static str); 8] {
    let nowhere = vec![(cadre_exchange::PeerId::server(0, 0), "127.0.0.1:1".to_owned())];
    let (loss, seconds, exposed_wait_seconds) = (f32::NAN, 1.0, 0.0);
    let done = StepDone {
        step: 0,
        loss,
        gradient_norm: 1.0,
        validation_loss: None,
        learning_rate: 1.0,
        tokens: 1,
        seconds,
        exposed_wait_seconds,
        header_wait_seconds: 0.0,
    };
    let header = Box::new(header.clone());
    [
        (Said::Lengths(Lengths { step: 0, turns: None, nanos: Vec::new() }), "lengths"),
        (Said::Header { header, trainers: nowhere.clone() }, "a header"),
        (Said::Addresses(nowhere), "addresses"),
        (Said::Steps(0), "how many steps it has"),
        (Said::Standing(Stands::Still(String::new())), "whether its main thread stands still"),
        (Said::StepDone(done), "the end of a step"),
        (Said::End(Ending::Completed), "the end of the job"),
        (Said::Leaving, "that it leaves"),
    ]
}

#[test]
fn what_only_others_may_say_changes_nothing_and_is_warned_of_once() {
    // A server that hears nothing and does nothing is lost, and no bit is; so its lies are all that differs.
    let silent = Liar::new();
    let quiet = Job::start(Loss::Nothing, Some((liar::ME, silent.address()))).finish();
    let header: Header = serde_json::from_str(&quiet.headers[1]).expect("a header of the run");
    let mut liar = Liar::new();
    for (message, _) in commands() {
        liar.will_ring(Envelope::Protocol(message));
    }
    for _ in 0..3 {
        for (said, _) in words(&header) {
            liar.will_say(&said);
        }
    }
    // Has the secret of the job, and nobody has named it: more doorbells than a trainer may have out would end a server.
    let mut stranger = Liar::named(PeerId::trainer(9, 0));
    for phase in 0..17 {
        let (round, acks) = (Round(0), Acks::default());
        let message = Message::Doorbell { at: At::new(7, phase), round, acks, digest: 0 };
        stranger.will_ring(Envelope::Protocol(message));
    }
    let job = Job::start(Loss::Nothing, Some((liar::ME, liar.address())));
    let lying = [liar, stranger].map(|it| it.lie(job.addresses()));
    let run = job.finish();
    drop(lying);
    assert_eq!(run.losses, quiet.losses);
    assert_eq!(run.codes, [Some(0); 3], "{:#?}", run.logs);
    let unnamed = "trainer 9 says a doorbell without being a member, which it may not;";
    assert_eq!(run.logs["server-0"].matches(unnamed).count(), 1, "{:#?}", run.logs);
    for (worker, log) in &run.logs {
        let warned = |name| {
            let warning = format!("server 1 (incarnation 0) says {name}, which it may not;");
            log.matches(&warning).count()
        };
        for (_, name) in commands() {
            assert_eq!(warned(name), 1, "{worker} on {name}:\n{log}");
        }
        for (_, name) in words(&header) {
            assert_eq!(warned(name), 1, "{worker} on {name}:\n{log}");
        }
    }
}

#[test]
fn a_long_word_with_another_digest_ends_the_job_by_name() {
    let (mut liar, publication, bytes) = (Liar::new(), 3, 8 << 10);
    liar.publish(RegionKey([u32::MAX, u32::MAX - 1, publication as u32, 0]), bytes as usize);
    liar.will_tell(Body::There(Published { publication, bytes, digest: 1 }));
    let job = Job::start(Loss::Nothing, Some((liar::ME, liar.address())));
    let lying = liar.lie(job.addresses());
    let run = job.finish();
    drop(lying);
    assert!(run.codes[..2].contains(&Some(3)), "{:?} {:#?}", run.codes, run.logs);
    let reason = "8192 bytes that server 1 (incarnation 0) has published came with another digest";
    assert!(run.logs.values().any(|it| it.contains(reason)), "{:#?}", run.logs);
}

#[test]
fn a_failure_that_a_server_tells_ends_the_job_with_its_name() {
    let mut liar = Liar::new();
    liar.will_say(&Said::Failed { reason: "the fan stopped".into(), bad_input: false });
    let job = Job::start(Loss::Nothing, Some((liar::ME, liar.address())));
    let lying = liar.lie(job.addresses());
    let run = job.finish();
    drop(lying);
    assert!(run.codes[..2].contains(&Some(3)), "{:?} {:#?}", run.codes, run.logs);
    let reason = "server 1 (incarnation 0): the fan stopped";
    assert!(run.logs.values().any(|it| it.contains(reason)), "{:#?}", run.logs);
}
