//! Pools whose servers come and go, and trainers that start late.

use cadre_protocol::conductor::{Command, Conductor, Event, HEADER};
use cadre_protocol::{
    At, End, Filler, Heartbeat, Message, Nanos, OnPoolLoss, Peer, ServerId, Settings, TrainerId,
};

use super::{SERVERS, handle, heard, ms, quiet, running};

#[test]
fn servers_whose_replacements_are_heard_cut_nobody_off() {
    let new = SERVERS.map(|it| ServerId { incarnation: 1, ..it });
    let mut conductor = Conductor::new(2, Settings::default(), Nanos(0));
    let view = |ids: [ServerId; 2]| {
        let mut view = ids.map(|it| Some(Filler::Server(it))).to_vec();
        view.push(Some(Filler::InPlace(TrainerId(1))));
        Event::View(view)
    };
    handle(&mut conductor, Nanos(0), view(SERVERS));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    let silent = SERVERS.map(Peer::Server);
    for peer in silent {
        heard(&mut conductor, ms(100), peer);
    }
    let mut lost = 0;
    for millis in (100..20_000).step_by(100) {
        let mut said = quiet(&mut conductor, millis, millis + 1, &silent);
        if millis == 2_000 {
            said.extend(handle(&mut conductor, ms(millis), view(new)));
        }
        // Both were stopped, and wake beside those that came in their place: whoever has heard the new hears the old no more.
        if millis > 2_000 {
            for peer in new.map(Peer::Server) {
                said.extend(heard(&mut conductor, ms(millis), peer));
            }
            let message = Message::Heartbeat(Box::new(Heartbeat {
                reached: SERVERS.to_vec(),
                ..Heartbeat::default()
            }));
            let from = Peer::Trainer(TrainerId(1));
            said.extend(handle(&mut conductor, ms(millis), Event::Message { from, message }));
        }
        lost += said.iter().filter(|it| matches!(it, Command::DeclareLost(_))).count();
        let ends = |it: &&Command| matches!(it, Command::End(_));
        assert_eq!(said.iter().find(ends), None, "at {millis} ms");
    }
    assert_eq!(lost, 2);
}

#[test]
fn a_server_of_a_proposed_round_is_watched_though_no_view_names_it_any_more() {
    let on_pool_loss = OnPoolLoss::Wait(ms(600_000));
    let settings = Settings { on_pool_loss, ..Settings::default() };
    let mut conductor = Conductor::new(1, settings, Nanos(0));
    let view = |incarnation| vec![Some(Filler::Server(ServerId { index: 0, incarnation }))];
    handle(&mut conductor, Nanos(0), Event::View(view(0)));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    // The first header is still being planned, so that the answer takes its time.
    let commands = handle(&mut conductor, ms(10), Event::View(view(1)));
    assert!(commands.iter().any(|it| matches!(it, Command::Propose { proposal: 1, .. })));
    handle(&mut conductor, ms(20), Event::View(vec![None]));
    handle(&mut conductor, ms(30), Event::Placed { step: 0, proposal: 1 });
    let lost = Command::DeclareLost(ServerId { index: 0, incarnation: 1 });
    let mut ticks = (100..5_000).step_by(100);
    assert!(ticks.any(|it| handle(&mut conductor, ms(it), Event::Tick).contains(&lost)));
}

#[test]
fn a_header_that_finds_no_place_beside_a_step_that_runs_waits_for_that_one() {
    let published = |it: &Command| matches!(it, Command::Publish { step: 1, .. });
    let next = || {
        let mut conductor = running();
        let commands = handle(&mut conductor, ms(2), Event::HeaderReady { step: 1, phases: 4 });
        assert!(commands.iter().any(published), "two steps may be out: {commands:?}");
        let refused = Event::Unplaceable { step: 1, proposal: HEADER };
        assert_eq!(handle(&mut conductor, ms(3), refused), [], "step 0 has its servers");
        conductor
    };
    // Somebody comes while step 0 runs.
    let mut view = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    view[1] = Some(Filler::Server(ServerId { index: 2, incarnation: 0 }));
    let commands = handle(&mut next(), ms(4), Event::View(view));
    assert!(commands.iter().any(published), "{commands:?}");
    // Nobody does.
    let mut conductor = next();
    let mut done = Vec::new();
    for from in [0, 1].map(TrainerId).map(Peer::Trainer) {
        let message = Message::PhaseDone { at: At::new(0, 3) };
        done = handle(&mut conductor, ms(5), Event::Message { from, message });
    }
    assert!(done.contains(&Command::PoolLost { step: 1 }), "{done:?}");
    assert_eq!(done.last(), Some(&Command::End(End::PoolLost { step: 1 })));
}

/// The conductor never hears place 0, whoever comes there; trainer 1 says that it reaches them all. Place 1 is empty for a
/// second from 40 s on; behind the places there are slots of `others`.
fn deaf_to_place_0(places: u16, others: &[Filler]) -> Option<End> {
    let on_pool_loss = OnPoolLoss::Wait(ms(600_000));
    let settings = Settings { on_pool_loss, ..Settings::default() };
    let mut conductor = Conductor::new(2, settings, Nanos(0));
    let view = |incarnation, millis| {
        let id = |index| ServerId { index, incarnation: if index == 0 { incarnation } else { 0 } };
        let is_there = |index: &u16| *index == 0 || !(40_000..41_000).contains(&millis);
        let places = (0..places).map(|it| is_there(&it).then(|| Filler::Server(id(it))));
        Event::View(places.chain(others.iter().map(|it| Some(*it))).collect())
    };
    handle(&mut conductor, Nanos(0), view(0, 0));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    let mut lives = vec![ServerId { index: 0, incarnation: 0 }];
    for millis in (100..60_000).step_by(100) {
        let now = ms(millis);
        let silent = [Peer::Server(SERVERS[0])];
        let mut said = quiet(&mut conductor, millis, millis + 1, &silent);
        let reached = lives.clone();
        let message = Message::Heartbeat(Box::new(Heartbeat { reached, ..Heartbeat::default() }));
        let from = Peer::Trainer(TrainerId(1));
        said.extend(handle(&mut conductor, now, Event::Message { from, message }));
        if said.iter().any(|it| matches!(it, Command::DeclareLost(it) if it.index == 0)) {
            let incarnation = lives.len() as u32;
            lives.push(ServerId { index: 0, incarnation });
            said.extend(handle(&mut conductor, now, view(incarnation, millis)));
        }
        if [40_000, 41_000].contains(&millis) {
            let incarnation = lives.len() as u32 - 1;
            said.extend(handle(&mut conductor, now, view(incarnation, millis)));
        }
        for proposal in said.clone() {
            if let Command::Propose { step, proposal, .. } = proposal {
                said.extend(handle(&mut conductor, now, Event::Placed { step, proposal }));
            }
        }
        let end =
            said.into_iter().find_map(|it| if let Command::End(it) = it { Some(it) } else { None });
        if end.is_some() {
            return end;
        }
    }
    None
}

#[test]
fn lives_of_the_only_place_count_as_servers_and_those_of_one_of_two_do_not() {
    let ended = deaf_to_place_0(1, &[Filler::Standby(TrainerId(1))]);
    let cut_off = |it: &End| matches!(it, End::TrainerCutOff { trainer: TrainerId(0), .. });
    assert!(ended.as_ref().is_some_and(cut_off), "{ended:?}");
    assert_eq!(deaf_to_place_0(2, &[]), None, "the other one does the work");
    let in_place = [Filler::InPlace(TrainerId(1))];
    assert_eq!(deaf_to_place_0(1, &in_place), None, "the trainers do the work");
}

/// When trainer 1 is given up, heard at this time alone, by a conductor that ticks all the time.
fn dead_at(assemble_within: Nanos, heard_at: Option<u64>) -> u64 {
    let settings = Settings { assemble_within, ..Settings::default() };
    let mut conductor = Conductor::new(2, settings, Nanos(0));
    for millis in (0..).step_by(100) {
        let now = ms(millis);
        let mut commands = handle(&mut conductor, now, Event::Tick);
        if heard_at == Some(millis) {
            commands.extend(heard(&mut conductor, now, Peer::Trainer(TrainerId(1))));
        }
        if commands.contains(&Command::End(End::TrainersDead(vec![TrainerId(1)]))) {
            return millis;
        }
    }
    unreachable!("it is given up one day")
}

#[test]
fn a_trainer_may_start_late_and_is_as_soon_missed_as_others_from_then_on() {
    let minutes = ms(15 * 60_000);
    assert_eq!(dead_at(Nanos(0), None), 30_000);
    assert_eq!(dead_at(minutes, None), 15 * 60_000 + 30_000);
    for start in [100, 40_000, 10 * 60_000] {
        assert_eq!(dead_at(minutes, Some(start)), start + 30_000);
    }
}

#[test]
fn a_trainer_that_starts_first_waits_for_the_conductor() {
    use cadre_protocol::trainer::{Command, Event, Trainer};
    let minutes = ms(15 * 60_000);
    for (assemble_within, last) in [(Nanos(0), 31_100), (minutes, 15 * 60_000 + 31_100)] {
        let settings = Settings { assemble_within, ..Settings::default() };
        let mut trainer = Trainer::new(TrainerId(1), settings, Nanos(0));
        let mut ends = Vec::new();
        // For 1.1 s this process itself stands still, which takes nothing from the wait and adds nothing.
        for millis in (0..=last).step_by(100).filter(|it| !(5_000..6_000).contains(it)) {
            let mut commands = Vec::new();
            trainer.handle(ms(millis), Event::Tick, &mut commands);
            let end = commands.iter().any(|it| matches!(it, Command::End(_)));
            ends.extend(end.then_some(millis));
        }
        assert_eq!(ends, [last]);
    }
}

/// Step 0 runs on both servers, step 1 was published when a view named the first alone. That one is silent from 100 ms on.
fn short_of_servers(on_pool_loss: OnPoolLoss, others: &[Filler]) -> (Conductor, Vec<Command>) {
    let settings = Settings { on_pool_loss, ..Settings::default() };
    let mut conductor = Conductor::new(2, settings, Nanos(0));
    let view = |second: Option<ServerId>| {
        let servers = [Some(SERVERS[0]), second].map(|it| it.map(Filler::Server));
        Event::View(servers.into_iter().chain(others.iter().copied().map(Some)).collect())
    };
    handle(&mut conductor, Nanos(0), view(Some(SERVERS[1])));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    for peer in SERVERS.map(Peer::Server) {
        heard(&mut conductor, ms(1), peer);
    }
    handle(&mut conductor, ms(2), view(None));
    let commands = handle(&mut conductor, ms(2), Event::HeaderReady { step: 1, phases: 4 });
    assert!(matches!(commands[0], Command::Publish { step: 1, .. }), "{commands:?}");
    let said = quiet(&mut conductor, 100, 1_300, &[Peer::Server(SERVERS[0])]);
    assert!(said.contains(&Command::DeclareLost(SERVERS[0])));
    let moves = |it: &Command| matches!(it, Command::Propose { step: 0, .. });
    assert!(said.iter().any(moves), "step 0 goes on");
    (conductor, said)
}

fn whole(conductor: &mut Conductor, now: Nanos, step: u64) -> Vec<Command> {
    let from = [0, 1].map(TrainerId).map(Peer::Trainer);
    let message = Message::PhaseDone { at: At::new(step, 3) };
    let events = from.map(|from| Event::Message { from, message: message.clone() });
    events.into_iter().flat_map(|it| handle(conductor, now, it)).collect()
}

#[test]
fn a_step_without_servers_ends_no_job_while_one_before_it_has_some() {
    let lost = Command::PoolLost { step: 1 };
    let goes_on = |it: &Command| matches!(it, Command::Propose { step: 1, .. });
    let wait = OnPoolLoss::Wait(ms(5_000));
    let standby = [Filler::Standby(TrainerId(1))];
    for (on_pool_loss, others) in
        [(OnPoolLoss::Fail, &[][..]), (OnPoolLoss::Local, &standby), (wait, &[])]
    {
        let short = || {
            let (conductor, said) = short_of_servers(on_pool_loss, others);
            assert!(!said.contains(&lost) && !said.iter().any(goes_on), "{on_pool_loss:?}");
            assert!(!said.iter().any(|it| matches!(it, Command::End(_))), "{on_pool_loss:?}");
            conductor
        };
        // Somebody comes in time.
        let mut conductor = short();
        let id = ServerId { index: 2, incarnation: 0 };
        let view = [None, Some(id)].map(|it| it.map(Filler::Server));
        let view = view.into_iter().chain(others.iter().copied().map(Some)).collect();
        let said = handle(&mut conductor, ms(1_300), Event::View(view));
        assert!(said.iter().any(goes_on) && !said.contains(&lost), "{said:?}");

        // Nobody does: the pool is lost when the step is the first that is not whole.
        let mut conductor = short();
        let said = quiet(&mut conductor, 1_300, 9_000, &[Peer::Server(SERVERS[0])]);
        assert!(!said.iter().any(|it| matches!(it, Command::End(_))), "{on_pool_loss:?}");
        let said = whole(&mut conductor, ms(9_000), 0);
        assert!(said.contains(&lost), "{said:?}");
        let end = Command::End(End::PoolLost { step: 1 });
        assert_eq!(said.last() == Some(&end), on_pool_loss == OnPoolLoss::Fail, "{said:?}");
        assert_eq!(said.iter().any(goes_on), on_pool_loss == OnPoolLoss::Local, "{said:?}");
        let said = quiet(&mut conductor, 9_100, 15_000, &[Peer::Server(SERVERS[0])]);
        assert_eq!(said.contains(&end), on_pool_loss == wait, "{on_pool_loss:?}");
    }
}

/// When the job ends, whose pool may be lost for a minute. A server comes every 40 s that some bundle does not fit, and is gone 5 s
/// later; `runs` if the step had a server that could take all when it began.
fn ends_beside_small_servers(runs: bool) -> u64 {
    let settings = Settings { on_pool_loss: OnPoolLoss::Wait(ms(60_000)), ..Settings::default() };
    let mut conductor = Conductor::new(1, settings, Nanos(0));
    let id = |incarnation| Some(Filler::Server(ServerId { index: 0, incarnation }));
    let mut lost = 0;
    for millis in (0..).step_by(100) {
        let now = ms(millis);
        let mut said = match millis {
            0 => {
                handle(&mut conductor, now, Event::View(vec![if runs { id(0) } else { None }]));
                handle(&mut conductor, now, Event::HeaderReady { step: 0, phases: 4 })
            }
            at if at % 40_000 == 0 => {
                let view = vec![id((at / 40_000) as u32)];
                handle(&mut conductor, now, Event::View(view))
            }
            at if at % 40_000 == 5_000 => handle(&mut conductor, now, Event::View(vec![None])),
            _ => handle(&mut conductor, now, Event::Tick),
        };
        for command in said.clone() {
            let refused = if let Command::Propose { step, proposal, .. } = command {
                Event::Unplaceable { step, proposal }
            } else if let Command::Publish { step, .. } = command
                && !runs
            {
                Event::Unplaceable { step, proposal: HEADER }
            } else {
                continue;
            };
            said.extend(handle(&mut conductor, now, refused));
        }
        lost += said.iter().filter(|it| **it == Command::PoolLost { step: 0 }).count();
        if said.contains(&Command::End(End::PoolLost { step: 0 })) {
            assert!(lost > 0);
            return millis;
        }
        assert!(millis < 600_000, "it waits without end");
    }
    unreachable!("it counts without end")
}

#[test]
fn servers_that_come_and_do_not_suffice_do_not_begin_the_wait_for_a_pool_anew() {
    assert_eq!(ends_beside_small_servers(false), 60_000);
    let ended = ends_beside_small_servers(true);
    assert!((60_000..64_000).contains(&ended), "{ended}");
}

#[test]
fn a_pool_that_is_lost_after_a_header_found_its_slots_is_waited_for_in_full() {
    let settings = Settings { on_pool_loss: OnPoolLoss::Wait(ms(60_000)), ..Settings::default() };
    let mut conductor = Conductor::new(1, settings, Nanos(0));
    handle(&mut conductor, Nanos(0), Event::View(vec![None]));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    let server = Some(Filler::Server(ServerId { index: 0, incarnation: 0 }));
    let said = handle(&mut conductor, ms(50_000), Event::View(vec![server]));
    assert!(said.iter().any(|it| matches!(it, Command::Publish { step: 0, .. })), "{said:?}");
    handle(&mut conductor, ms(50_100), Event::Published { step: 0 });
    // Nobody hears the server.
    let ends = |millis: &u64| {
        let said = handle(&mut conductor, ms(*millis), Event::Tick);
        said.contains(&Command::End(End::PoolLost { step: 0 }))
    };
    let ended = (50_200..200_000).step_by(100).find(ends);
    assert!(ended.is_some_and(|it| it > 110_000), "{ended:?}");
}
