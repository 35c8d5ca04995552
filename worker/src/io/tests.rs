//! What an IO thread without machines makes of what it is told, and what its end means to the threads of its process.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Weak};

use cadre_control::proto::{ControllerMessage, controller_message};
use cadre_exchange::{Encryption, Limits, PeerId, Tcp, TcpConfig, Waker};
use cadre_protocol::{At, Filler, Fillers, Message, Round, Settings, TrainerId};
use cadre_step::envelope::StepDone;
use cadre_step::header::Header;
use cadre_step::layers::Layers;
use cadre_step::planned::PlannedStep;

use super::clock::Clock;
use super::queues::{Notices, notices};
use super::shared::peer_of;
use super::standing::Standing;
use super::*;
use crate::launch::PhaseRows;
use crate::memory::HostRows;
use crate::trace::Tracer;

/// Of a job that wants `numerics`, if any; with the queue of its main thread, and what it has planned.
fn io(
    me: PeerId,
    numerics: Option<&str>,
) -> (Io<Tcp>, Notices<HostRows>, Receiver<planning::Wanted>) {
    let bind = std::net::Ipv4Addr::LOCALHOST.into();
    let (secret, limits, encryption) = ([0; 32], Limits::default(), Encryption::Off);
    let links =
        Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap();
    let mut shared = Shared::new(peer_of(me), (links, Clock::system()), Tracer::off());
    shared.numerics = numerics.map(str::to_owned);
    let (_, requests) = Handle::channel(shared.provider.waker());
    let (main, told) = notices(shared.provider.waker());
    let outlets = Outlets { main, rescue: None, interrupt: None };
    let (plans, planned) = sync_channel(4);
    let (_, receiver) = std::sync::mpsc::sync_channel(1);
    let control = Control { sender: Box::new(|_| Ok(())), receiver };
    let lines = Lines { requests, plans, control, outlets };
    (Io::new(shared, (None, None, None), lines), told, planned)
}

#[test]
fn a_worker_that_would_compute_other_bits_than_the_header_promises_refuses_it() {
    let header: Header =
        serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    assert_eq!(header.numerics, "test");
    for (me, numerics, refused) in [
        (
            PeerId::trainer(1, 0),
            Some("other"),
            Some("trainer 1 computes with \"other\", the job with \"test\""),
        ),
        (
            PeerId::server(1, 0),
            Some("other"),
            Some("server 1 (incarnation 0) computes with \"other\""),
        ),
        (PeerId::trainer(1, 0), Some("test"), None),
        (PeerId::server(1, 0), None, None),
    ] {
        let (mut io, told, planned) = io(me, numerics);
        let header = Box::new(header.clone());
        io.told_all(Peer::CONDUCTOR, vec![Said::Header { header, trainers: Vec::new() }]);
        assert_eq!(planned.try_recv().is_ok(), refused.is_none());
        let said = match told.try_recv() {
            Ok(Notice::End(Ending::Failed { reason, bad_input: true })) if me.index == 1 => {
                Some(reason)
            }
            Ok(Notice::Lost(reason)) => Some(reason),
            Ok(other) => panic!("{other:?}"),
            Err(_) => None,
        };
        let Some(start) = refused else {
            assert_eq!(said, None);
            continue;
        };
        assert!(
            said.is_some_and(|it| it.starts_with(start) && it.contains("leave reproducible out"))
        );
        // The work of a server goes to others; a rank's job ends.
        assert_eq!(io.ended.is_some(), me.role == cadre_exchange::Role::Trainer);
    }
}

/// What the planning thread is given, one after the other, until nothing is left.
fn given(io: &mut Io<Tcp>, planned: &Receiver<planning::Wanted>) -> Vec<planning::Wanted> {
    let mut all = Vec::new();
    loop {
        while io.settle() == Settled::Some {}
        let Ok(wanted) = planned.try_recv() else { return all };
        all.push(wanted);
        io.asked(Request::Freed.into());
    }
}

/// A trainer without peers, in a step.
fn in_a_step() -> (Io<Tcp>, Notices<HostRows>, Receiver<planning::Wanted>, Weak<PlannedStep>) {
    let (mut io, told, planned) = io(PeerId::trainer(0, 0), None);
    let (me, settings, now) = (TrainerId(0), Settings::default(), io.shared.now());
    let standing = Standing::new((me, 0), [Nanos(u64::MAX); 2], now);
    io.trainer = Some(Rows::new(me, settings, standing, now));
    let header: Header =
        serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    let layers = Layers::alike(header.layers.kind_of(0), 600).unwrap();
    let header = Header { layers, ..header };
    let done = plan_thread::done(planning::Wanted::Plan(Box::new(header)));
    let Request::Planned(ready) = done else { panic!("{done:?}") };
    let ready = ready.unwrap();
    let plan = Arc::downgrade(&ready.planned);
    io.begin(ready);
    (io, told, planned, plan)
}

#[test]
fn the_plan_of_a_step_that_is_over_is_not_freed_by_the_io_thread() {
    let (mut io, told, planned, plan) = in_a_step();
    assert!(matches!(told.try_recv(), Ok(Notice::Step(_))));
    io.asked(Request::StepDone(StepDone::default()).into());
    io.trainer = None;
    io.shared.outputs.put(output::Output::Over(0));
    let given = given(&mut io, &planned);
    assert!(io.shared.steps.is_empty());
    assert!(given.iter().all(|it| matches!(it, planning::Wanted::Finished(_))));
    // That of the step, and of who watches whether the main thread stands still.
    assert_eq!(plan.strong_count(), 2, "the planning thread has to drop it");
    for it in given {
        plan_thread::done(it);
    }
    assert_eq!(plan.strong_count(), 0);
}

#[test]
fn bundles_are_dealt_out_by_the_planning_thread_and_two_losses_meanwhile_at_once() {
    let (mut io, _told, planned, _) = in_a_step();
    let say = |io: &mut Io<Tcp>, tables: Vec<Fillers>| {
        let round = Round(tables.len() as u32);
        io.shared.outputs.put(output::Output::Message(Message::Round { step: 0, round, tables }));
        while io.settle() == Settled::Some {}
    };
    let filled = vec![Some(Filler::InPlace(TrainerId(0)))];
    let rounds: Vec<Fillers> = vec![vec![None], filled.clone(), vec![None], filled];
    say(&mut io, rounds[..1].to_vec());
    let first = planned.try_recv().unwrap();
    for count in 1..=4 {
        say(&mut io, rounds[..count].to_vec());
    }
    assert!(planned.try_recv().is_err(), "one is dealt out at a time");
    io.asked(plan_thread::done(first).into());
    let planning::Wanted::Reassign(last) = planned.try_recv().unwrap() else { panic!("a round") };
    assert_eq!(last.asked.tables, rounds);
    io.asked(plan_thread::done(planning::Wanted::Reassign(last)).into());
    // Everybody here knows it now.
    say(&mut io, rounds);
    assert!(planned.try_recv().is_err());
}

#[test]
fn a_round_of_a_step_that_is_over_meanwhile_is_nobodys() {
    let (mut io, _told, planned, plan) = in_a_step();
    io.shared.reassign(0, vec![vec![None]], planning::Asker::Members);
    while io.settle() == Settled::Some {}
    let round = planned.try_recv().unwrap();
    io.trainer = None;
    io.shared.outputs.put(output::Output::Over(0));
    while io.settle() == Settled::Some {}
    io.asked(plan_thread::done(round).into());
    let given = given(&mut io, &planned);
    assert!(plan.strong_count() > 0 && io.ended.is_none());
    drop(given);
}

#[test]
fn a_rank_that_submits_phase_after_phase_and_waits_for_none_ends_the_job_by_name() {
    let (mut io, told, _planned, _) = in_a_step();
    let row = HostRows::new(crate::memory::rows(1));
    let submit = |io: &mut Io<Tcp>, phases: std::ops::Range<u32>| {
        let rows = PhaseRows { q: row.clone(), k: row.clone(), v: row.clone(), gradients: None };
        phases.for_each(|it| io.asked(Asked::Submit(At::new(0, it), rows.clone())));
    };
    // The window, and as many as wait for it.
    let window = Settings::default().window as u32;
    submit(&mut io, 0..window + 1024);
    assert_eq!(io.ended, None);
    submit(&mut io, window + 1024..window + 1025);
    let Some(Ending::Failed { reason, bad_input: true }) = &io.ended else { panic!("it waits") };
    let named =
        "rank 0 has submitted a phase more (step 0, layer 171, nano-batch 0, backward) while 1024";
    assert!(reason.starts_with(named), "{reason}");
    drop(told);
}

#[test]
fn a_controller_lets_servers_go_and_no_trainer() {
    for (me, goes) in [(PeerId::server(0, 0), true), (PeerId::trainer(0, 0), false)] {
        let (mut io, _told, _planned) = io(me, None);
        let drain = proto::Drain { stays: false, over: true };
        io.controller(ControllerMessage {
            message: Some(controller_message::Message::Drain(drain)),
        });
        io.turn();
        assert_eq!(io.ended == Some(Ending::Completed), goes);
    }
}

#[test]
fn what_a_controller_says_that_is_not_known_ends_a_rank_s_job_and_moves_a_server_s_work() {
    for me in [PeerId::server(0, 0), PeerId::trainer(1, 0)] {
        let (mut io, told, _planned) = io(me, None);
        io.controller(ControllerMessage { message: None });
        while io.settle() == Settled::Some {}
        let is_job = match told.try_recv() {
            Ok(Notice::Lost(_)) => false,
            Ok(Notice::End(Ending::Failed { .. })) => true,
            other => panic!("{other:?}"),
        };
        assert_eq!(is_job, me.role == cadre_exchange::Role::Trainer);
        assert_eq!(io.ended.is_some(), is_job);
    }
}

#[test]
fn a_process_that_leaves_hears_first_how_its_job_ends() {
    let (mut io, _told, _planned) = io(PeerId::trainer(1, 0), None);
    io.asked(Request::Leave(None).into());
    // More than a turn hands on.
    for step in 0..2 * MAX_REQUESTS_A_TURN as u64 {
        io.shared.outputs.put(output::Output::Over(step));
    }
    let ending = Ending::Failed { reason: "late".into(), bad_input: true };
    io.shared.outputs.put(output::Output::Ending(ending));
    while io.turn() != Turn::Leave {}
    assert_eq!(io.leave(), After::Failed { reason: "late".into(), bad_input: true });
}

#[test]
fn an_io_thread_that_panics_ends_the_waits_of_its_process() {
    let (mut io, told, _planned) = io(PeerId::trainer(1, 0), None);
    let interrupt = Waker::new().unwrap();
    io.outlets.interrupt = Some(interrupt.clone());
    let end = told.end();
    let thread = std::thread::spawn(move || {
        let _io = io;
        panic!("as a bug does");
    });
    assert!(thread.join().is_err());
    let ended = end.wait(Duration::ZERO);
    assert!(matches!(ended, Some(Ending::Failed { reason, .. }) if reason.contains("io thread")));
    assert!(matches!(told.recv(), Ok(Notice::Lost(_))));
    // Fails if nobody has woken it: its counter is never waited for.
    let mut counter = std::fs::File::from(interrupt.as_fd().try_clone_to_owned().unwrap());
    counter.read_exact(&mut [0; 8]).unwrap();
}
