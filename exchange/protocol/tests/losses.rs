//! How fast a server is declared lost, with the settings of production.

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{End, Filler, Heartbeat, Message, Nanos, Peer, ServerId, Settings, TrainerId};

const SERVERS: [ServerId; 2] =
    [ServerId { index: 0, incarnation: 0 }, ServerId { index: 1, incarnation: 0 }];

fn ms(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

fn handle(conductor: &mut Conductor, now: Nanos, event: Event) -> Vec<Command> {
    let mut commands = Vec::new();
    conductor.handle(now, event, &mut commands);
    commands
}

fn heard(conductor: &mut Conductor, now: Nanos, from: Peer) -> Vec<Command> {
    let message = Message::Heartbeat(Heartbeat::default());
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
fn a_killed_server_is_lost_when_a_fresh_link_is_refused() {
    let mut conductor = running();
    let dead = Peer::Server(SERVERS[0]);
    // Both directions of the link report the break.
    handle(&mut conductor, ms(100), Event::Closed(dead));
    handle(&mut conductor, ms(101), Event::Closed(dead));
    let ping_at = conductor.next_deadline().expect("a ping is due");
    let commands = handle(&mut conductor, ping_at, Event::Tick);
    assert!(matches!(&commands[..], [Command::Send { to, .. }] if *to == dead));
    let commands = handle(&mut conductor, ping_at, Event::Closed(dead));
    assert_eq!(commands[0], Command::DeclareLost(SERVERS[0]));
    assert_eq!(ping_at, ms(120));
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
    assert_eq!(last, [Command::End(End::TrainerDead(trainer))]);
    assert!(now < ms(1_500), "it is tried for a second, not longer");
}
