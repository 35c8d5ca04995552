//! Servers that no view names, a conductor that stands still now and then, and steps that fit no slot.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one command out of many")]

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    Acks, At, End, Filler, Message, Nanos, OnPoolLoss, Peer, PullFailure, Round, ServerId,
    Settings, TrainerId, Why,
};

use super::results::{AT, step};
use super::{SERVERS, handle, heard, ms, running};

fn done(conductor: &mut Conductor, now: Nanos, step: u64) -> Vec<Command> {
    let message = Message::PhaseDone { at: At::new(step, 3) };
    let trainers = [0, 1].map(|it| Peer::Trainer(TrainerId(it)));
    let each = |from| Event::Message { from, message: message.clone() };
    trainers.into_iter().flat_map(|it| handle(conductor, now, each(it))).collect()
}

#[test]
fn a_server_that_no_view_names_any_more_hears_the_conductor_until_it_is_let_go() {
    let mut conductor = running();
    let left = Peer::Server(SERVERS[0]);
    handle(&mut conductor, ms(2), Event::View(vec![None, Some(Filler::Server(SERVERS[1]))]));
    assert!(done(&mut conductor, ms(3), 0).contains(&Command::StepDone(0)));
    // Its controller drains it once a step has ended without it, which may take longer than its patience.
    for millis in (200..60_000).step_by(200) {
        heard(&mut conductor, ms(millis), Peer::Server(SERVERS[1]));
        heard(&mut conductor, ms(millis), Peer::Trainer(TrainerId(1)));
        let commands = heard(&mut conductor, ms(millis), left);
        let answers = |it: &Command| matches!(it, Command::Send { to, message: Message::Pulse { watermark: Some(_), .. } } if *to == left);
        assert!(commands.iter().any(answers), "at {millis} ms: {commands:?}");
    }
    // One that was replaced hears otherwise.
    let next = ServerId { incarnation: 1, ..SERVERS[0] };
    handle(&mut conductor, ms(60_000), Event::View(vec![Some(Filler::Server(next)), None]));
    let commands = heard(&mut conductor, ms(60_001), left);
    let leave = |it: &Command| matches!(it, Command::Send { to, message: Message::Leave { .. } } if *to == left);
    assert!(commands.iter().any(leave), "{commands:?}");
}

#[test]
fn a_conductor_that_refuses_every_link_is_called_no_more_often_than_it_is_told() {
    let settings = Settings::default();
    let server = Server::new(Host::Dedicated(SERVERS[0]), 1 << 20, settings, ms(0));
    let (mut server, mut trainer) = (server, Trainer::new(TrainerId(1), settings, ms(0)));
    let (mut calls, mut soon) = ([0; 2], [0; 2]);
    // Each call is refused at once.
    for millis in 1..29_000 {
        let mut out = Vec::new();
        let event = |was: usize| {
            if was > 0 { server::Event::Closed(Peer::CONDUCTOR) } else { server::Event::Tick }
        };
        server.handle(ms(millis), event(soon[0]), &mut out);
        soon[0] = out.len();
        let mut out = Vec::new();
        let event = if soon[1] > 0 {
            trainer::Event::Closed(Peer::CONDUCTOR)
        } else {
            trainer::Event::Tick
        };
        trainer.handle(ms(millis), event, &mut out);
        soon[1] = out.len();
        for (calls, soon) in calls.iter_mut().zip(soon) {
            *calls += soon;
        }
    }
    // A second of tries, then its heartbeats.
    for calls in calls {
        assert!((150..200).contains(&calls), "{calls} calls");
    }
}

#[test]
fn a_conductor_that_stands_still_now_and_then_misses_the_dead_in_its_own_time() {
    let mut conductor = running();
    let (mut now, mut ran) = (1, 0);
    // Two beats, then a pause, again and again.
    let lost = [200, 200, 500].into_iter().cycle().find_map(|span| {
        now += span;
        ran += if span == 200 { span } else { 0 };
        let mut commands = handle(&mut conductor, ms(now), Event::Tick);
        for peer in [Peer::Server(SERVERS[1]), Peer::Trainer(TrainerId(1))] {
            commands.extend(heard(&mut conductor, ms(now), peer));
        }
        assert!(!commands.contains(&Command::DeclareLost(SERVERS[1])), "it is heard");
        let lost = commands.contains(&Command::DeclareLost(SERVERS[0]));
        (lost || ran > 10_000).then_some(ran)
    });
    assert!(matches!(lost, Some(1_000..1_600)), "after {lost:?} ms of its own time");
}

/// A process runs two beats and is then paused for longer than two, again and again; what it says when it has run for so long.
fn in_its_own_time<T>(mut event: impl FnMut(Nanos, u64) -> Option<T>) -> Option<(u64, T)> {
    let (mut now, mut ran) = (1, 0);
    [200, 200, 500].into_iter().cycle().take(300).find_map(|span| {
        now += span;
        ran += if span == 200 { span } else { 0 };
        Some((ran, event(ms(now), ran)?))
    })
}

#[test]
fn what_lasts_over_short_pauses_is_counted_in_the_time_between_them() {
    let mut conductor = running();
    let lost = in_its_own_time(|now, ran| {
        let mut commands = Vec::new();
        for peer in [SERVERS[0], SERVERS[1]].map(Peer::Server) {
            commands.extend(heard(&mut conductor, now, peer));
        }
        let (why, lasting) = (Why::Broken, ms(ran));
        let message = Message::Suspect { server: SERVERS[0], why, lasting };
        let from = Peer::Trainer(TrainerId(1));
        commands.extend(handle(&mut conductor, now, Event::Message { from, message }));
        commands.contains(&Command::DeclareLost(SERVERS[0])).then_some(())
    });
    assert!(matches!(lost, Some((5_000..5_600, ()))), "{lost:?}");

    // A path that is cut for good, as a trainer sees it, and a server whose pulls it breaks.
    let fillers = SERVERS.map(|it| Some(Filler::Server(it)));
    let mut trainer = Trainer::new(TrainerId(1), Settings::default(), ms(0));
    let begins = [trainer::Event::Begin(step(fillers)), trainer::Event::Submitted(AT)];
    for event in begins {
        trainer.handle(ms(1), event, &mut Vec::new());
    }
    let believed = in_its_own_time(|now, ran| {
        let (mut out, from) = (Vec::new(), Peer::CONDUCTOR);
        let pulse = Message::Pulse { watermark: None, ask: Vec::new() };
        trainer.handle(now, trainer::Event::Message { from, message: pulse }, &mut out);
        trainer.handle(now, trainer::Event::Closed(Peer::Server(SERVERS[0])), &mut out);
        let said = out.into_iter().filter_map(|it| match it {
            trainer::Command::Send { message: Message::Suspect { lasting, .. }, .. } => {
                Some(lasting)
            }
            _ => None,
        });
        let longest = said.max().filter(|it| *it >= ms(5_000))?;
        Some(longest <= ms(ran))
    });
    assert!(matches!(believed, Some((5_000..5_800, true))), "{believed:?}");

    let mut server = Server::new(Host::Dedicated(SERVERS[0]), 1 << 20, Settings::default(), ms(0));
    let doorbell = Message::Doorbell { at: AT, round: Round(0), acks: Acks::default(), digest: 7 };
    let from = Peer::Trainer(TrainerId(1));
    let mut events = vec![
        server::Event::Begin(step(fillers)),
        server::Event::Message { from, message: doorbell },
    ];
    let believed = in_its_own_time(|now, ran| {
        let mut out = Vec::new();
        for event in events.drain(..).chain([server::Event::Tick]) {
            server.handle(now, event, &mut out);
        }
        let mut longest = None;
        for command in out {
            match command {
                server::Command::Pull { pull, .. } => {
                    let result = Err(PullFailure::PeerFailed);
                    events.push(server::Event::Pulled { pull, result });
                }
                server::Command::Send { message: Message::Heartbeat(beat), .. } => {
                    longest = beat.unreached.iter().map(|it| it.1).max();
                }
                _ => {}
            }
        }
        let longest = longest.filter(|it| *it >= ms(5_000))?;
        Some(longest <= ms(ran))
    });
    assert!(matches!(believed, Some((5_000..5_800, true))), "{believed:?}");
}

#[test]
fn a_replacement_in_the_view_that_loses_the_only_server_fills_its_slot_under_every_policy() {
    let new = ServerId { incarnation: 1, ..SERVERS[0] };
    let view = |id| vec![Some(Filler::Server(id)), Some(Filler::Standby(TrainerId(0)))];
    let proposed = |said: &[Command]| {
        said.iter().find_map(|it| match it {
            Command::Propose { proposal, tables, .. } => Some((*proposal, tables.clone())),
            _ => None,
        })
    };
    for on_pool_loss in [OnPoolLoss::Fail, OnPoolLoss::Local, OnPoolLoss::Wait(ms(600_000))] {
        let settings = Settings { on_pool_loss, ..Settings::default() };
        let mut conductor = Conductor::new(2, settings, Nanos(0));
        handle(&mut conductor, ms(0), Event::View(view(SERVERS[0])));
        handle(&mut conductor, ms(0), Event::HeaderReady { step: 0, phases: 4 });
        let said = handle(&mut conductor, ms(10), Event::View(view(new)));
        assert!(said.contains(&Command::DeclareLost(SERVERS[0])), "{on_pool_loss:?}: {said:?}");
        assert!(!said.contains(&Command::PoolLost { step: 0 }), "{on_pool_loss:?}: {said:?}");
        let Some((proposal, tables)) = proposed(&said) else {
            panic!("{on_pool_loss:?}: {said:?}")
        };
        assert_eq!(tables, [view(new)], "{on_pool_loss:?}");
        // It is too small: now the pool is lost.
        let event = Event::Unplaceable { step: 0, proposal };
        let said = handle(&mut conductor, ms(20), event);
        assert!(said.contains(&Command::PoolLost { step: 0 }), "{on_pool_loss:?}: {said:?}");
        let ends = said.contains(&Command::End(End::PoolLost { step: 0 }));
        assert_eq!(ends, on_pool_loss == OnPoolLoss::Fail, "{said:?}");
        assert_eq!(proposed(&said).is_some(), on_pool_loss == OnPoolLoss::Local, "{said:?}");
    }
}

/// A step that fits neither the server that is left nor trainers: what the conductor does of it.
fn nowhere(on_pool_loss: OnPoolLoss) -> (usize, Vec<Command>) {
    let settings = Settings { on_pool_loss, ..Settings::default() };
    let mut conductor = Conductor::new(2, settings, Nanos(0));
    let view = vec![None, Some(Filler::Server(SERVERS[1])), Some(Filler::Standby(TrainerId(0)))];
    handle(&mut conductor, Nanos(0), Event::View(view));
    let mut queue = handle(&mut conductor, ms(1), Event::HeaderReady { step: 0, phases: 4 });
    let (mut tries, mut rest) = (0, Vec::new());
    while let Some(command) = queue.pop() {
        if let Command::Publish { step, .. } = command {
            tries += 1;
            assert!(tries < 10, "the same headers again and again");
            // Of a header, the first proposal.
            let event = Event::Unplaceable { step, proposal: 0 };
            queue.extend(handle(&mut conductor, ms(1), event));
        } else {
            rest.push(command);
        }
    }
    (tries, rest)
}

#[test]
fn a_step_that_fits_neither_servers_nor_trainers_ends_by_name() {
    let (tries, commands) = nowhere(OnPoolLoss::Local);
    assert_eq!(tries, 2, "{commands:?}");
    assert!(commands.contains(&Command::End(End::PoolLost { step: 0 })), "{commands:?}");
    let (tries, commands) = nowhere(OnPoolLoss::Fail);
    assert_eq!(tries, 1, "{commands:?}");
    assert!(commands.contains(&Command::End(End::PoolLost { step: 0 })), "{commands:?}");
}

#[test]
fn fillers_that_fit_no_step_are_tried_again_for_the_next_one() {
    let on_pool_loss = OnPoolLoss::Wait(ms(600_000));
    let mut conductor =
        Conductor::new(2, Settings { on_pool_loss, ..Settings::default() }, Nanos(0));
    let short = vec![None, Some(Filler::Server(SERVERS[1]))];
    let publishes = |commands: &[Command]| {
        commands.iter().filter(|it| matches!(it, Command::Publish { .. })).count()
    };
    handle(&mut conductor, ms(0), Event::View(short.clone()));
    handle(&mut conductor, ms(1), Event::HeaderReady { step: 0, phases: 4 });
    let commands = handle(&mut conductor, ms(1), Event::Unplaceable { step: 0, proposal: 0 });
    assert_eq!(publishes(&commands), 0, "it waits for another server");
    let full = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    assert_eq!(publishes(&handle(&mut conductor, ms(2), Event::View(full))), 1);
    done(&mut conductor, ms(3), 0);
    handle(&mut conductor, ms(4), Event::View(short));
    let commands = handle(&mut conductor, ms(5), Event::HeaderReady { step: 1, phases: 4 });
    assert_eq!(publishes(&commands), 1, "step 1 may fit: {commands:?}");
}
