//! Servers and trainers whose results do not come, though all that they say does: large segments are lost on the path.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one command out of many")]

use std::collections::VecDeque;
use std::sync::Arc;

use cadre_protocol::conductor::{Command, Conductor, Event};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    At, Bundle, BundleShape, End, Filler, Heartbeat, Message, Nanos, Parcel, ParcelShape, Peer,
    PullFailure, PullId, PullResult, Round, RoundTable, Settings, Shape, Slot, Step, TrainerId,
    Work, WorkShape,
};

use super::{SERVERS, handle, ms};

const ME: TrainerId = TrainerId(1);
const OTHER: TrainerId = TrainerId(2);
pub(super) const AT: At = At::new(0, 0);

/// Two bundles in slot 0, with a work each that reads rows of trainer 1 and has its result for it.
pub(super) fn step(fillers: [Option<Filler>; 2]) -> Arc<Step> {
    let bundles = vec![BundleShape { slot: Slot(0) }; 2];
    let parcel = |it| ParcelShape { bundle: Bundle(it), from: ME, bytes: 10 };
    let work =
        |it| WorkShape { bundle: Bundle(it), needs: vec![Parcel(it)], results: vec![(ME, 10)] };
    let (works, parcels) = ([0, 1].map(work).to_vec(), [0, 1].map(parcel).to_vec());
    let shape = Arc::new(Shape::new(bundles, works, parcels).expect("it is well made"));
    let assignments = vec![vec![Some(Slot(0)); 2]];
    let table = RoundTable { step: 0, round: Round(0), fillers: fillers.to_vec(), assignments };
    Arc::new(Step::new(3, 7, vec![shape], vec![0], table).expect("it is well made"))
}

/// A trainer, the conductor, and somebody who answers the trainer and whose results `end` decides; everybody else is well.
struct Path {
    conductor: Conductor,
    trainer: Trainer,
    executor: Peer,
    /// Pulls under way, and when they are late.
    pulls: VecDeque<(PullId, Work, Nanos)>,
    queue: VecDeque<trainer::Event>,
    complaints: Vec<u64>,
}

impl Path {
    fn new(fillers: [Option<Filler>; 2]) -> Self {
        let settings = Settings::default();
        let mut conductor = Conductor::new(3, settings, ms(0));
        handle(&mut conductor, ms(0), Event::View(fillers.to_vec()));
        handle(&mut conductor, ms(0), Event::HeaderReady { step: 0, phases: 1 });
        let trainer = Trainer::new(ME, settings, ms(0));
        let queue = [trainer::Event::Begin(step(fillers)), trainer::Event::Submitted(AT)].into();
        let executor = fillers[0].and_then(Filler::executor).expect("somebody fills the slot");
        let (pulls, complaints) = (VecDeque::new(), Vec::new());
        Self { conductor, trainer, executor, pulls, queue, complaints }
    }

    /// A hundred milliseconds pass; how the job ends or who is lost.
    fn pass(
        &mut self,
        millis: u64,
        end: &mut impl FnMut(u64, Work, Nanos) -> Option<PullResult>,
    ) -> Option<Command> {
        let now = ms(millis);
        let pulse = Message::Pulse { watermark: None, ask: Vec::new() };
        self.queue.push_back(trainer::Event::Message { from: Peer::CONDUCTOR, message: pulse });
        for (pull, work, late) in std::mem::take(&mut self.pulls) {
            match end(millis, work, late) {
                Some(result) => self.queue.push_back(trainer::Event::Pulled { pull, result }),
                None => self.pulls.push_back((pull, work, late)),
            }
        }
        let mut said = Vec::new();
        for peer in
            [Peer::Trainer(ME), Peer::Trainer(OTHER)].into_iter().chain(SERVERS.map(Peer::Server))
        {
            let rounds = vec![(0, Round(0))];
            let message =
                Message::Heartbeat(Box::new(Heartbeat { rounds, ..Heartbeat::default() }));
            said.extend(handle(&mut self.conductor, now, Event::Message { from: peer, message }));
        }
        while let Some(event) = self.queue.pop_front() {
            let mut out = Vec::new();
            self.trainer.handle(now, event, &mut out);
            for command in out {
                said.extend(self.obey(now, command));
            }
        }
        said.into_iter().find(|it| matches!(it, Command::End(_) | Command::DeclareLost(_)))
    }

    fn obey(&mut self, now: Nanos, command: trainer::Command) -> Vec<Command> {
        match command {
            trainer::Command::Pull { pull, work, deadline, .. } => {
                self.pulls.push_back((pull, work, deadline));
            }
            trainer::Command::Send { to, message } if to == Peer::CONDUCTOR => {
                if matches!(message, Message::Suspect { .. } | Message::Unreached { .. }) {
                    self.complaints.push(now.millis());
                }
                let event = Event::Message { from: Peer::Trainer(ME), message };
                return handle(&mut self.conductor, now, event);
            }
            trainer::Command::Send { to, message: Message::Doorbell { at, .. } } => {
                assert_eq!(to, self.executor, "nobody else has works");
                let message = Message::Finished { at, works: vec![Work(0), Work(1)] };
                self.queue.push_back(trainer::Event::Message { from: to, message });
            }
            _ => {}
        }
        Vec::new()
    }
}

/// What happens to a path, and when.
fn happens(
    fillers: [Option<Filler>; 2],
    mut end: impl FnMut(u64, Work, Nanos) -> Option<PullResult>,
) -> (Option<(u64, Command)>, Vec<u64>) {
    let mut path = Path::new(fillers);
    let found = (100..200_000).step_by(100).find_map(|millis| {
        let it = path.pass(millis, &mut end)?;
        Some((millis, it))
    });
    (found, path.complaints)
}

fn late(millis: u64, _: Work, late: Nanos) -> Option<PullResult> {
    (ms(millis) >= late).then_some(Err(PullFailure::Deadline))
}

#[test]
fn a_server_whose_results_never_come_is_lost_though_it_answers() {
    let servers = SERVERS.map(|it| Some(Filler::Server(it)));
    let lost = Command::DeclareLost(SERVERS[0]);
    // Ten seconds until the first pull is late, then five suspicions.
    let (found, said) = happens(servers, late);
    assert_eq!(found, Some((15_100, lost.clone())), "{said:?}");
    // Where the link breaks as soon as much is sent over it, the second break in a row shows that.
    let broken = |_, _, _| Some(Err(PullFailure::PeerFailed));
    let (found, said) = happens(servers, broken);
    assert!(matches!(&found, Some((5_000..6_000, it)) if *it == lost), "{found:?}, {said:?}");
    // One of two results is small enough.
    let (found, said) = happens(servers, |millis, work, at| match work {
        Work(0) => Some(Ok(0)),
        _ => late(millis, work, at),
    });
    assert_eq!(found, Some((15_100, lost)), "{said:?}");
}

#[test]
fn trainers_in_place_whose_results_never_come_end_the_job_by_their_names() {
    let trainers = [OTHER, ME].map(|it| Some(Filler::InPlace(it)));
    // Between trainers a pull is late after thirty seconds.
    let (found, said) = happens(trainers, late);
    let end = Command::End(End::TrainersApart([ME, OTHER]));
    assert!(matches!(&found, Some((60_000..62_000, it)) if *it == end), "{found:?}, {said:?}");
}

#[test]
fn a_server_whose_results_come_late_once_or_take_long_after_a_break_is_not_lost() {
    let servers = SERVERS.map(|it| Some(Filler::Server(it)));
    // Nothing came for ten seconds, then all of it does.
    let (found, said) = happens(servers, |millis, work, at| match millis {
        ..11_000 => late(millis, work, at),
        _ => Some(Ok(0)),
    });
    assert_eq!(found, None);
    assert!(said.iter().all(|it| *it <= 11_000), "{said:?}");
    // The link broke once, and what was pulled over it then takes a while.
    let (found, said) = happens(servers, |millis, _, _| match millis {
        1_000 => Some(Err(PullFailure::PeerFailed)),
        20_000.. => Some(Ok(0)),
        _ => None,
    });
    assert_eq!(found, None, "{said:?}");
    // It broke for one result alone, which another server may have by now; works of the others run for long.
    let (found, said) = happens(servers, |millis, work, _| match (work, millis) {
        (Work(0), _) => Some(Err(PullFailure::Gone)),
        (_, 5_000..) => Some(Ok(0)),
        _ => None,
    });
    assert_eq!(found, None);
    assert!(said.iter().all(|it| *it > 30_000), "only that its work is late: {said:?}");
}
