//! Servers that are heard and do not do their work: they cannot pull rows, or never begin the step.

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{End, Heartbeat, Message, Peer, Phase, Round, ServerId, TrainerId, Why};

use super::{SERVERS, ends, handle, heard, ms, quiet, running};

/// Servers say every 100 ms from `from` to `to` that they cannot pull rows of trainer 1, of whom is heard
/// in its turn unless it is `silent`; who is lost or what ends, and when.
fn cannot_pull(
    conductor: &mut Conductor,
    (from, to): (u64, u64),
    servers: &[ServerId],
    silent: &[Peer],
) -> Option<(u64, Command)> {
    for millis in (from..to).step_by(100) {
        let mut commands = quiet(conductor, millis, millis + 1, silent);
        for &server in servers {
            let unreached = vec![(TrainerId(1), ms(millis - from))];
            let message =
                Message::Heartbeat(Box::new(Heartbeat { unreached, ..Heartbeat::default() }));
            let from = Peer::Server(server);
            commands.extend(handle(conductor, ms(millis), Event::Message { from, message }));
        }
        if let Some(it) = commands.into_iter().find(|it| ends(std::slice::from_ref(it))) {
            return Some((millis, it));
        }
    }
    None
}

#[test]
fn a_server_that_cannot_pull_from_a_trainer_is_lost_like_one_that_it_cannot_reach() {
    let lost = cannot_pull(&mut running(), (100, 20_000), &SERVERS[..1], &[]);
    assert_eq!(lost, Some((5_100, Command::DeclareLost(SERVERS[0]))));
}

#[test]
fn a_trainer_from_which_two_servers_cannot_pull_ends_the_job_by_name() {
    let ended = cannot_pull(&mut running(), (100, 20_000), &SERVERS, &[]);
    let end = End::TrainerCutOff { trainer: TrainerId(1), servers: SERVERS };
    assert_eq!(ended, Some((5_100, Command::End(end))));
}

#[test]
fn servers_that_cannot_pull_from_a_stopped_trainer_lose_nothing() {
    let trainer = Peer::Trainer(TrainerId(1));
    let mut conductor = running();
    heard(&mut conductor, ms(100), trainer);
    assert_eq!(cannot_pull(&mut conductor, (600, 29_000), &SERVERS, &[trainer]), None);
    heard(&mut conductor, ms(29_000), trainer);
    assert!(!ends(&quiet(&mut conductor, 29_000, 31_000, &[])));
}

/// Trainer 1 says every second that server 0, which beats, is late with the first phase. Server 0 begins the step at `begins`, and the
/// conductor stands still in `pause`; when the server is lost.
fn never_begun(begins: u64, pause: std::ops::Range<u64>) -> Option<u64> {
    let (mut conductor, server) = (running(), SERVERS[0]);
    let from = Peer::Trainer(TrainerId(1));
    for millis in (100..120_000).step_by(100).filter(|it| !pause.contains(it)) {
        let now = ms(millis);
        let mut said = quiet(&mut conductor, millis, millis + 1, &[Peer::Server(server)]);
        let rounds = if millis < begins { Vec::new() } else { vec![(0, Round(0))] };
        let message = Message::Heartbeat(Box::new(Heartbeat { rounds, ..Heartbeat::default() }));
        said.extend(handle(
            &mut conductor,
            now,
            Event::Message { from: Peer::Server(server), message },
        ));
        if millis % 1_000 == 0 {
            let why = Why::Late { step: 0, phase: Phase(0) };
            let message = Message::Suspect { server, why, lasting: ms(millis) };
            said.extend(handle(&mut conductor, now, Event::Message { from, message }));
        }
        if ends(&said) {
            assert!(said.contains(&Command::DeclareLost(server)), "{said:?}");
            return Some(millis);
        }
    }
    None
}

#[test]
fn a_server_that_beats_and_never_begins_a_step_is_lost_when_a_trainer_complains() {
    // It is told the header for as long as a phase may take, from its first heartbeat that lacks it.
    assert_eq!(never_begun(u64::MAX, 0..0), Some(31_000));
    assert_eq!(never_begun(30_000, 0..0), None);
    // While the conductor stands still it tells nobody.
    assert_eq!(never_begun(u64::MAX, 10_000..20_000), Some(41_000));
}
