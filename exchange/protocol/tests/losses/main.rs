//! How fast a server is declared lost, with the settings of production.

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{End, Filler, Message, Nanos, Peer, ServerId, Settings, TrainerId, Why};

const SERVERS: [ServerId; 2] =
    [ServerId { index: 0, incarnation: 0 }, ServerId { index: 1, incarnation: 0 }];

mod idle;
mod leaving;
mod outside;
mod pool;
mod results;
mod silent;

fn ms(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

fn handle(conductor: &mut Conductor, now: Nanos, event: Event) -> Vec<Command> {
    let mut commands = Vec::new();
    conductor.handle(now, event, &mut commands);
    commands
}

fn heard(conductor: &mut Conductor, now: Nanos, from: Peer) -> Vec<Command> {
    let message = Message::Heartbeat(Box::default());
    handle(conductor, now, Event::Message { from, message })
}

/// One trainer, two servers, step 0 live, everybody heard at 1 ms.
fn running() -> Conductor {
    let mut conductor = Conductor::new(2, Settings::default(), Nanos(0));
    let view = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    handle(&mut conductor, Nanos(0), Event::View(view));
    let commands = handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    assert!(matches!(commands[0], Command::Publish { step: 0, .. }));
    for server in SERVERS {
        heard(&mut conductor, ms(1), Peer::Server(server));
    }
    conductor
}

/// Lets time pass until the server is lost; everybody else is heard all the time.
fn lost_at(conductor: &mut Conductor, server: ServerId) -> Nanos {
    for millis in 2..5_000 {
        let now = ms(millis);
        let mut commands = heard(conductor, now, Peer::Trainer(TrainerId(1)));
        commands.extend(heard(conductor, now, Peer::Server(SERVERS[1])));
        if commands.contains(&Command::DeclareLost(server)) {
            assert!(commands.iter().any(|it| matches!(it, Command::Propose { step: 0, .. })));
            return now;
        }
    }
    panic!("a silent server is never lost")
}

#[test]
fn a_killed_server_is_lost_when_three_fresh_links_are_refused() {
    let mut conductor = running();
    let dead = Peer::Server(SERVERS[0]);
    // Both directions of the link report the break.
    handle(&mut conductor, ms(100), Event::Closed(dead));
    handle(&mut conductor, ms(101), Event::Closed(dead));
    for refused in 1..=3 {
        let ping_at = conductor.next_deadline().expect("a ping is due");
        assert_eq!(ping_at, ms(100 + 20 * refused));
        let commands = handle(&mut conductor, ping_at, Event::Tick);
        assert!(matches!(&commands[..], [Command::Send { to, .. }] if *to == dead));
        let commands = handle(&mut conductor, ping_at, Event::Closed(dead));
        let lost = commands.first() == Some(&Command::DeclareLost(SERVERS[0]));
        assert_eq!(lost, refused == 3, "{commands:?}");
    }
}

#[test]
fn a_stopped_server_is_lost_after_a_second_of_silence() {
    let mut conductor = running();
    assert_eq!(lost_at(&mut conductor, SERVERS[0]), ms(1_001));
}

#[test]
fn a_broken_link_that_can_be_opened_again_loses_nobody() {
    let mut conductor = running();
    let peer = Peer::Server(SERVERS[0]);
    for round in 1..20 {
        let now = ms(100 * round);
        handle(&mut conductor, now, Event::Closed(peer));
        handle(&mut conductor, now.after(ms(30)), Event::Tick);
        for peer in SERVERS.map(Peer::Server) {
            heard(&mut conductor, now.after(ms(31)), peer);
        }
        let commands = handle(&mut conductor, now.after(ms(31)), Event::Tick);
        assert!(!commands.iter().any(|it| matches!(it, Command::DeclareLost(_))));
    }
}

#[test]
fn a_trainer_that_cannot_be_reached_ends_the_job() {
    let mut conductor = running();
    let trainer = TrainerId(1);
    let mut now = ms(100);
    let mut last = Vec::new();
    while conductor.next_deadline().is_some() && now < ms(5_000) {
        last = handle(&mut conductor, now, Event::Closed(Peer::Trainer(trainer)));
        for peer in SERVERS.map(Peer::Server) {
            heard(&mut conductor, now, peer);
        }
        now = now.after(ms(25));
    }
    assert_eq!(last, [Command::End(End::TrainersDead(vec![trainer]))]);
    assert!(now < ms(1_500), "it is tried for a second, not longer");
}

#[test]
fn a_trainer_that_is_heard_while_others_are_waited_for_is_not_dead() {
    let mut conductor = Conductor::new(3, Settings::default(), Nanos(0));
    let [one, other] = [1, 2].map(|it| Peer::Trainer(TrainerId(it)));
    for millis in (0..40_000).step_by(50) {
        let now = ms(millis);
        let mut commands = handle(&mut conductor, now, Event::Tick);
        // It refuses links for longer than a suspicion. The other one is silent, so that the job does not end at once.
        commands.extend(match millis {
            100..1_400 => handle(&mut conductor, now, Event::Closed(one)),
            _ => heard(&mut conductor, now, one),
        });
        if !(500..1_900).contains(&millis) {
            commands.extend(heard(&mut conductor, now, other));
        }
        let ends = commands.iter().any(|it| matches!(it, Command::End(_)));
        assert!(!ends, "at {millis} ms: {commands:?}");
    }
}

#[test]
fn trainers_that_go_together_end_the_job_by_all_their_names() {
    let end = |gone: [Option<u64>; 3], refused: bool| {
        let mut conductor = Conductor::new(4, Settings::default(), Nanos(0));
        for millis in (0..40_000).step_by(50) {
            let mut commands = handle(&mut conductor, ms(millis), Event::Tick);
            for (trainer, gone) in (1..).map(TrainerId).map(Peer::Trainer).zip(gone) {
                let event = match gone.is_some_and(|it| it <= millis) {
                    false => {
                        commands.extend(heard(&mut conductor, ms(millis), trainer));
                        continue;
                    }
                    true if refused => Event::Closed(trainer),
                    true => Event::Tick,
                };
                commands.extend(handle(&mut conductor, ms(millis), event));
            }
            if let Some(Command::End(end)) = commands.last() {
                return (millis, end.to_string());
            }
        }
        unreachable!("the dead are missed")
    };
    let one = "trainer 2 is dead; restart the job from its checkpoint";
    let both = "trainers 1, 3 are dead; restart the job from its checkpoint";
    for (refused, after) in [(false, 30_000), (true, 1_000)] {
        let (when, who) = end([None, Some(100), None], refused);
        assert!((after..=after + 250).contains(&when), "nobody is waited for: {when}");
        assert_eq!(who, one);
        let (when, who) = end([Some(100), None, Some(700)], refused);
        assert!((after..=after + 1_300).contains(&when), "{when}");
        assert_eq!(who, both);
    }
}

/// Every peer but these is heard, every 100 ms from `from` to `to`; what the conductor says meanwhile.
fn quiet(conductor: &mut Conductor, from: u64, to: u64, but: &[Peer]) -> Vec<Command> {
    let all = [Peer::Trainer(TrainerId(1)), Peer::Server(SERVERS[0]), Peer::Server(SERVERS[1])];
    let mut commands = Vec::new();
    for millis in (from..to).step_by(100) {
        for peer in all.iter().filter(|it| !but.contains(it)) {
            commands.extend(heard(conductor, ms(millis), *peer));
        }
    }
    commands
}

fn ends(commands: &[Command]) -> bool {
    commands.iter().any(|it| matches!(it, Command::End(_) | Command::DeclareLost(_)))
}

#[test]
fn a_trainer_whose_link_breaks_now_and_then_in_its_pause_is_not_dead() {
    let mut conductor = running();
    let trainer = Peer::Trainer(TrainerId(1));
    // It is stopped, and so answers no ping; every break is another one.
    for millis in [100, 600, 1_100, 1_600] {
        for again in [0, 1] {
            let now = ms(millis + again);
            assert!(!ends(&handle(&mut conductor, now, Event::Closed(trainer))));
        }
        assert!(!ends(&quiet(&mut conductor, millis + 100, millis + 500, &[trainer])));
    }
    heard(&mut conductor, ms(2_100), trainer);
    assert!(!ends(&quiet(&mut conductor, 2_100, 4_000, &[])));
}

#[test]
fn breaks_around_a_pause_of_the_conductor_blame_nobody() {
    let mut conductor = running();
    let peers = [Peer::Trainer(TrainerId(1)), Peer::Server(SERVERS[0])];
    for millis in [100, 120, 121, 141, 142] {
        for peer in peers {
            handle(&mut conductor, ms(millis), Event::Closed(peer));
        }
    }
    // What came meanwhile is handled at once.
    for peer in peers.into_iter().chain(peers) {
        assert!(!ends(&handle(&mut conductor, ms(5_000), Event::Closed(peer))));
    }
    assert!(!ends(&quiet(&mut conductor, 5_000, 7_000, &[])));
}

/// Trainer 1 says every 100 ms from `from` to `to` that it cannot reach `server`; who is lost or what
/// ends, and when.
fn complain(
    conductor: &mut Conductor,
    (from, to): (u64, u64),
    servers: &[ServerId],
) -> Option<(u64, Command)> {
    for millis in (from..to).step_by(100) {
        let mut commands = quiet(conductor, millis, millis + 1, &[]);
        for &server in servers {
            let (why, lasting) = (Why::Broken, ms(millis - from));
            let message = Message::Suspect { server, why, lasting };
            let from = Peer::Trainer(TrainerId(1));
            commands.extend(handle(conductor, ms(millis), Event::Message { from, message }));
        }
        if let Some(it) = commands.into_iter().find(|it| ends(std::slice::from_ref(it))) {
            return Some((millis, it));
        }
    }
    None
}

#[test]
fn one_trainers_word_is_believed_after_five_suspicions() {
    let mut conductor = running();
    let lost = complain(&mut conductor, (100, 20_000), &SERVERS[..1]);
    assert_eq!(lost, Some((5_100, Command::DeclareLost(SERVERS[0]))));
}

#[test]
fn what_a_trainer_says_of_times_before_its_first_word_does_not_count() {
    let mut conductor = running();
    let message = |lasting| Message::Suspect { server: SERVERS[0], why: Why::Broken, lasting };
    for millis in [100, 200, 4_900] {
        let (from, message) = (Peer::Trainer(TrainerId(1)), message(ms(600_000)));
        let event = Event::Message { from, message };
        quiet(&mut conductor, millis, millis + 1, &[]);
        assert!(!ends(&handle(&mut conductor, ms(millis), event)));
    }
}

#[test]
fn the_conductor_tries_its_own_link_when_a_trainer_complains() {
    let mut conductor = running();
    let server = Peer::Server(SERVERS[0]);
    let message = Message::Suspect { server: SERVERS[0], why: Why::Broken, lasting: ms(0) };
    let from = Peer::Trainer(TrainerId(1));
    let commands = handle(&mut conductor, ms(100), Event::Message { from, message });
    assert!(commands.iter().any(|it| matches!(it, Command::Send { to, .. } if *to == server)));
    let mut lost = Vec::new();
    for millis in [101, 121, 122, 142, 143] {
        lost = handle(&mut conductor, ms(millis), Event::Closed(server));
    }
    assert_eq!(lost.first(), Some(&Command::DeclareLost(SERVERS[0])));
}

#[test]
fn a_trainer_that_reaches_no_server_ends_the_job_by_name() {
    let mut conductor = running();
    let end = End::TrainerCutOff { trainer: TrainerId(1), servers: SERVERS };
    let ended = complain(&mut conductor, (100, 20_000), &SERVERS);
    assert_eq!(ended, Some((5_100, Command::End(end.clone()))));
    assert!(end.to_string().contains("trainer 1 cannot reach servers 0 and 1"), "{end}");
}

/// As where they compute in place: no server can be lost for it.
#[test]
fn trainers_that_do_not_reach_each_other_end_the_job_by_their_names() {
    let [one, other] = [1, 2].map(TrainerId);
    let ended = |about: TrainerId, silent: Option<TrainerId>| {
        let mut conductor = Conductor::new(3, Settings::default(), Nanos(0));
        for millis in (100..40_000).step_by(100) {
            let mut said = Vec::new();
            for trainer in [one, other].into_iter().filter(|it| Some(*it) != silent) {
                said.extend(heard(&mut conductor, ms(millis), Peer::Trainer(trainer)));
            }
            if millis % 1_000 == 0 {
                let message = Message::Unreached { trainers: vec![(about, ms(millis))] };
                let from = Peer::Trainer(one);
                said.extend(handle(&mut conductor, ms(millis), Event::Message { from, message }));
            }
            let end = said
                .into_iter()
                .find_map(|it| if let Command::End(end) = it { Some((millis, end)) } else { None });
            if end.is_some() {
                return end;
            }
        }
        None
    };
    let end = End::TrainersApart([one, other]);
    assert_eq!(ended(other, None), Some((31_000, end.clone())));
    assert!(end.to_string().starts_with("trainers 1 and 2 do not get rows of each other"), "{end}");
    // The path to the conductor's own rows may be bad as well, though its messages pass.
    let end = End::TrainersApart([TrainerId(0), one]);
    assert_eq!(ended(TrainerId(0), None), Some((31_000, end)));
    // Who is stopped is dead, not apart; and nobody is apart from itself.
    assert!(matches!(ended(other, Some(other)), Some((_, End::TrainersDead(_)))));
    assert_eq!(ended(one, None), None);
}

#[test]
fn a_trainer_that_loses_a_second_server_ends_the_job_by_name() {
    let mut conductor = running();
    let lost = complain(&mut conductor, (100, 20_000), &SERVERS[..1]);
    assert!(matches!(lost, Some((5_100, Command::DeclareLost(_)))));
    let ended = complain(&mut conductor, (60_000, 80_000), &SERVERS[1..]);
    assert!(matches!(ended, Some((_, Command::End(End::TrainerCutOff { .. })))), "{ended:?}");
}

#[test]
fn a_server_that_several_trainers_cannot_reach_costs_no_trainer() {
    let mut conductor = Conductor::new(3, Settings::default(), Nanos(0));
    let view = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    handle(&mut conductor, Nanos(0), Event::View(view));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    let server = SERVERS[0];
    for millis in (100..20_000).step_by(100) {
        let mut said = quiet(&mut conductor, millis, millis + 1, &[]);
        for from in [1, 2].map(|it| Peer::Trainer(TrainerId(it))) {
            let message = Message::Suspect { server, why: Why::Broken, lasting: ms(millis) };
            said.extend(handle(&mut conductor, ms(millis), Event::Message { from, message }));
        }
        if ends(&said) {
            assert!(said.contains(&Command::DeclareLost(server)), "{said:?}");
            return;
        }
    }
    panic!("it is never lost");
}

#[test]
fn breaks_as_far_apart_as_links_take_to_fail_are_believed() {
    let mut conductor = running();
    let mut lost = None;
    for millis in (100..60_000).step_by(100) {
        let mut said = quiet(&mut conductor, millis, millis + 1, &[]);
        // Every try to open a link takes six seconds, and is made a third of a second after the last.
        if (millis - 100) % 6_300 == 0 {
            let (server, lasting) = (SERVERS[0], ms(millis - 100));
            let message = Message::Suspect { server, why: Why::Broken, lasting };
            let from = Peer::Trainer(TrainerId(1));
            said.extend(handle(&mut conductor, ms(millis), Event::Message { from, message }));
        }
        if ends(&said) {
            lost = Some(millis);
            break;
        }
    }
    assert_eq!(
        lost,
        Some(12_700),
        "two breaks may have nothing to do with each other, three are one"
    );
}
