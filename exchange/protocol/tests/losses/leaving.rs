//! Servers that are to leave: nothing new is planned for them, and they go when what was planned is over.

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::{
    At, End, Filler, Fillers, Heartbeat, Message, Nanos, Peer, ServerId, Settings, TrainerId, Why,
};

use super::{SERVERS, handle, heard, ms, running};

const LEAVES: ServerId = SERVERS[0];

/// A heartbeat of the server.
fn beats(conductor: &mut Conductor, now: Nanos, leaves: bool) -> Vec<Command> {
    let message = Message::Heartbeat(Box::new(Heartbeat { leaves, ..Heartbeat::default() }));
    handle(conductor, now, Event::Message { from: Peer::Server(LEAVES), message })
}

fn is_spare(commands: &[Command]) -> bool {
    let spare = |it: &Command| matches!(it, Command::Send { to, message: Message::Spare { .. } } if *to == Peer::Server(LEAVES));
    commands.iter().any(spare)
}

fn publish(conductor: &mut Conductor, now: Nanos, step: u64) -> Fillers {
    let commands = handle(conductor, now, Event::HeaderReady { step, phases: 4 });
    let fillers = |it: Command| {
        if let Command::Publish { fillers, .. } = it { Some(fillers) } else { None }
    };
    commands.into_iter().find_map(fillers).expect("there is room for a step")
}

fn done(conductor: &mut Conductor, now: Nanos, step: u64) {
    for trainer in [0, 1] {
        let message = Message::PhaseDone { at: At::new(step, 3) };
        handle(conductor, now, Event::Message { from: Peer::Trainer(TrainerId(trainer)), message });
    }
}

#[test]
fn a_server_that_is_to_leave_gets_no_new_step_and_goes_when_its_last_one_is_over() {
    let mut conductor = running();
    let both = SERVERS.map(|it| Some(Filler::Server(it))).to_vec();
    let other = vec![None, Some(Filler::Server(SERVERS[1]))];
    assert!(!is_spare(&beats(&mut conductor, ms(10), false)));
    assert!(!is_spare(&beats(&mut conductor, ms(20), true)), "step 0 has works for it");
    // Of a controller that has not heard of it yet.
    handle(&mut conductor, ms(30), Event::View(both.clone()));
    assert_eq!(publish(&mut conductor, ms(40), 1), other);
    assert!(!is_spare(&beats(&mut conductor, ms(50), true)), "step 0 has works for it");
    done(&mut conductor, ms(60), 0);
    assert!(is_spare(&beats(&mut conductor, ms(70), true)));
    // It goes, and nobody misses it.
    for millis in (80..5_000).step_by(10) {
        let mut commands = heard(&mut conductor, ms(millis), Peer::Server(SERVERS[1]));
        commands.extend(heard(&mut conductor, ms(millis), Peer::Trainer(TrainerId(1))));
        let closed = Event::Closed(Peer::Server(LEAVES));
        commands.extend(handle(&mut conductor, ms(millis), closed));
        assert!(!commands.contains(&Command::DeclareLost(LEAVES)), "at {millis} ms");
        if millis == 100 {
            // What it said before, once more.
            beats(&mut conductor, ms(millis), false);
            assert_eq!(publish(&mut conductor, ms(millis), 2), other);
            done(&mut conductor, ms(millis), 2);
        }
    }
    // Another job had it, and gives it back under its name.
    beats(&mut conductor, ms(5_000), false);
    assert_eq!(publish(&mut conductor, ms(5_001), 3), both);
}

#[test]
fn a_server_that_is_to_leave_asks_until_the_conductor_lets_it_go_or_is_silent() {
    let settings = Settings { assemble_within: ms(900_000), ..Settings::default() };
    let mut server = Server::new(Host::Dedicated(LEAVES), 1 << 20, settings, ms(0));
    let mut run = |now: Nanos, event: server::Event| {
        let mut out = Vec::new();
        server.handle(now, event, &mut out);
        let asks = |it: &server::Command| matches!(it, server::Command::Send { message: Message::Heartbeat(it), .. } if it.leaves);
        let ends =
            |it: &server::Command| matches!(it, server::Command::End(End::ConductorSilent(_)));
        (out.iter().any(asks), out.iter().any(ends), server.is_spare())
    };
    let from = Peer::CONDUCTOR;
    let spare = || server::Event::Message { from, message: Message::Spare { watermark: None } };
    assert_eq!(run(ms(1), spare()), (false, false, false), "nobody wants it to leave");
    assert_eq!(run(ms(10), server::Event::Leave), (true, false, false), "at once");
    assert_eq!(run(ms(20), server::Event::Leave), (false, false, false), "it has said so");
    assert_eq!(run(ms(210), server::Event::Tick), (true, false, false), "and says so again");
    let message = Message::Pulse { watermark: None, ask: Vec::new() };
    assert_eq!(run(ms(220), server::Event::Message { from, message }), (false, false, false));
    let stranger = server::Event::Message {
        from: Peer::Trainer(TrainerId(1)),
        message: Message::Spare { watermark: None },
    };
    assert_eq!(run(ms(230), stranger), (false, false, false));
    let last = (400..60_000).step_by(10).find(|it| run(ms(*it), server::Event::Tick).1);
    assert_eq!(last, Some(30_220), "nobody answers");
    let mut server = Server::new(Host::Dedicated(LEAVES), 1 << 20, settings, ms(0));
    let mut out = Vec::new();
    server.handle(ms(10), server::Event::Leave, &mut out);
    server.handle(ms(20), spare(), &mut out);
    assert!(server.is_spare());
}

#[test]
fn servers_that_have_left_leave_no_trace_in_the_conductor() {
    let mut conductor = running();
    let size = |it: &Conductor| format!("{it:?}").len();
    let mut sizes = Vec::new();
    for incarnation in 0..200 {
        let id = ServerId { index: 0, incarnation };
        let now = ms(10 + 1_000 * u64::from(incarnation));
        let view = [id, SERVERS[1]].map(|it| Some(Filler::Server(it))).to_vec();
        handle(&mut conductor, now, Event::View(view));
        for from in [Peer::Server(SERVERS[1]), Peer::Trainer(TrainerId(1))] {
            heard(&mut conductor, now, from);
        }
        // A trainer could not reach it for a moment.
        let message = Message::Suspect { server: id, why: Why::Broken, lasting: ms(0) };
        let from = Peer::Trainer(TrainerId(1));
        handle(&mut conductor, now, Event::Message { from, message });
        let message =
            Message::Heartbeat(Box::new(Heartbeat { leaves: true, ..Heartbeat::default() }));
        handle(&mut conductor, now, Event::Message { from: Peer::Server(id), message });
        done(&mut conductor, now, u64::from(incarnation));
        let step = u64::from(incarnation) + 1;
        handle(&mut conductor, now, Event::HeaderReady { step, phases: 4 });
        sizes.push(size(&conductor));
    }
    let most = sizes[60..90].iter().max();
    assert!(sizes.last() <= most.map(|it| it + 100).as_ref(), "{sizes:?}");
}

/// Trainer 1 refuses links from 100 ms on and trainer 2 from 700 ms on, and they say that they have left where that is given; how the job ends, and when.
fn refused(left: [Option<u64>; 2]) -> Option<(u64, End)> {
    let mut conductor = Conductor::new(4, Settings::default(), ms(0));
    for millis in (0..60_000).step_by(20) {
        let now = ms(millis);
        let mut said = heard(&mut conductor, now, Peer::Trainer(TrainerId(3)));
        for (index, left) in [1, 2].into_iter().zip(left) {
            let (trainer, refuses) = (TrainerId(index), if index == 1 { 100 } else { 700 });
            let peer = Peer::Trainer(trainer);
            said.extend(match left {
                Some(at) if millis == at => handle(&mut conductor, now, Event::Left(trainer)),
                _ if millis < refuses => heard(&mut conductor, now, peer),
                _ => handle(&mut conductor, now, Event::Closed(peer)),
            });
        }
        if let Some(Command::End(end)) = said.last() {
            return Some((millis, end.clone()));
        }
    }
    None
}

#[test]
fn trainers_that_have_left_are_not_missed_and_others_are() {
    let both = End::TrainersDead(vec![TrainerId(1), TrainerId(2)]);
    assert!(matches!(refused([None, None]), Some((1_700..1_900, end)) if end == both));
    assert_eq!(refused([Some(80), Some(80)]), None);
    // The word comes after links were refused for a while: of one that is taken for dead, while the other one may be dead, too.
    assert_eq!(refused([Some(1_000), Some(1_200)]), None);
    assert_eq!(refused([Some(1_200), Some(1_200)]), None);
    for left in [80, 1_000, 1_200] {
        let end = refused([Some(left), None]);
        let other = End::TrainersDead(vec![TrainerId(2)]);
        assert!(matches!(&end, Some((1_700..1_900, end)) if *end == other), "{end:?}");
    }
}
