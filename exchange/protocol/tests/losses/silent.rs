//! All servers silent to the conductor, which trainers may reach.

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::{
    End, Filler, Heartbeat, Message, Nanos, OnPoolLoss, Peer, ServerId, Settings, TrainerId,
};

use super::{SERVERS, handle, heard, ms, quiet};

/// Both servers are silent to the conductor from 100 ms on; trainer 1 says every 200 ms that it reaches
/// `reached`. When the job ends, and how.
fn both_silent(settings: Settings, reached: &[ServerId]) -> Option<(u64, End)> {
    both_silent_beside(&[], settings, reached)
}

/// As [`both_silent`]; these servers, which no view has named, call the conductor every 200 ms.
fn both_silent_beside(
    unnamed: &[ServerId],
    settings: Settings,
    reached: &[ServerId],
) -> Option<(u64, End)> {
    let mut conductor = Conductor::new(2, settings, Nanos(0));
    let view = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    handle(&mut conductor, Nanos(0), Event::View(view));
    handle(&mut conductor, Nanos(0), Event::HeaderReady { step: 0, phases: 4 });
    let servers = SERVERS.map(Peer::Server);
    for peer in servers {
        heard(&mut conductor, ms(100), peer);
    }
    for millis in (100..20_000).step_by(100) {
        let mut said = quiet(&mut conductor, millis, millis + 1, &servers);
        for it in unnamed.iter().filter(|_| millis % 200 == 0) {
            said.extend(handle(&mut conductor, ms(millis), Event::Unnamed(*it)));
        }
        let asked = |it: &Command| matches!(it, Command::Send { message: Message::Pulse { ask, .. }, .. } if !ask.is_empty());
        if said.iter().any(asked) {
            let reached = reached.to_vec();
            let message =
                Message::Heartbeat(Box::new(Heartbeat { reached, ..Heartbeat::default() }));
            let from = Peer::Trainer(TrainerId(1));
            said.extend(handle(&mut conductor, ms(millis), Event::Message { from, message }));
        }
        for proposal in said.clone() {
            if let Command::Propose { step, proposal, .. } = proposal {
                said.extend(handle(&mut conductor, ms(millis), Event::Placed { step, proposal }));
            }
        }
        if let Some(Command::End(end)) = said.into_iter().find(|it| matches!(it, Command::End(_))) {
            return Some((millis, end));
        }
    }
    None
}

#[test]
fn a_conductor_that_alone_reaches_no_server_ends_the_job_by_its_trainers_name() {
    let end = End::TrainerCutOff { trainer: TrainerId(0), servers: SERVERS };
    let ended = both_silent(Settings::default(), &SERVERS);
    assert!(matches!(&ended, Some((1_100..3_100, it)) if *it == end), "{ended:?}");
    let on_pool_loss = OnPoolLoss::Wait(ms(600_000));
    let ended = both_silent(Settings { on_pool_loss, ..Settings::default() }, &SERVERS);
    assert!(matches!(&ended, Some((6_000..8_000, it)) if *it == end), "{ended:?}");
}

#[test]
fn servers_whose_successors_call_before_a_view_names_them_cut_nobody_off() {
    let on_pool_loss = OnPoolLoss::Wait(ms(15_000));
    let settings = || Settings { on_pool_loss, ..Settings::default() };
    let lives = |incarnation| SERVERS.map(|it| ServerId { incarnation, ..it });
    let ended = both_silent_beside(&lives(1), settings(), &SERVERS);
    assert!(matches!(ended, Some((16_000..17_000, End::PoolLost { step: 0 }))), "{ended:?}");
    // Those of before say nothing new, nor does a stranger.
    for unnamed in [vec![], vec![ServerId { index: 9, incarnation: 1 }]] {
        let ended = both_silent_beside(&unnamed, settings(), &SERVERS);
        assert!(matches!(ended, Some((_, End::TrainerCutOff { .. }))), "{ended:?}");
    }
}

#[test]
fn a_pool_of_which_trainers_reach_one_server_at_most_is_lost() {
    for reached in [&SERVERS[..1], &[]] {
        let ended = both_silent(Settings::default(), reached);
        assert!(matches!(ended, Some((1_100..3_300, End::PoolLost { step: 0 }))), "{ended:?}");
    }
    let on_pool_loss = OnPoolLoss::Wait(ms(15_000));
    let ended = both_silent(Settings { on_pool_loss, ..Settings::default() }, &[]);
    assert!(matches!(ended, Some((16_000..17_000, End::PoolLost { step: 0 }))), "{ended:?}");
}
