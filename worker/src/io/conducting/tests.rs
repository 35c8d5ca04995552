//! What the conductor's side does with what workers tell it, without any worker.

#![allow(clippy::wildcard_enum_match_arm, reason = "tests pick one word out of many")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cadre_crds::Wire;
use cadre_exchange::{Encryption, Limits, Tcp, TcpConfig};
use cadre_planner::{Costs, DocumentId, Heads, Stretch};
use cadre_protocol::{At, ServerId, TrainerId};
use cadre_step::conduct::{Offer, Standby};
use cadre_step::envelope::NanoLengths;
use cadre_step::header::{KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};
use cadre_step::words::{Life, Stream};

use super::agree::LENGTHS_AHEAD;
use super::*;
use crate::io::Request;
use crate::io::clock::Clock;
use crate::io::planning::{self, Ready, Wanted};
use crate::trace::Tracer;

/// A conductor of two trainers with in-place servers, at a time that the test counts.
struct Job {
    conducting: Conducting,
    shared: Shared<Tcp>,
    nanos: Arc<AtomicU64>,
    /// What was put for others: a header to plan, steps to begin.
    plan: Option<Wanted>,
    begin: Vec<Ready>,
}

fn draft() -> Draft {
    Draft {
        trainers: 2,
        layers: Layers::alike(Kind::causal(Heads { query: 2, kv: 1, dim: 8 }), 1).unwrap(),
        kv_heads: KvHeads::Together,
        wire: Wire::F32,
        seed: 1,
        numerics: "test".into(),
        reproducible: true,
        placement: Placement::Pool,
        costs: vec![Costs::default()],
        standby: Standby::No,
        trainer_memory: 1 << 30,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    }
}

impl Job {
    fn new() -> Self {
        Self::with(cadre_protocol::Settings::default())
    }

    fn with(settings: cadre_protocol::Settings) -> Self {
        let (bind, me) = (std::net::Ipv4Addr::LOCALHOST.into(), PeerId::trainer(0, 0));
        let (secret, limits) = ([0; 32], Limits::default());
        let encryption = Encryption::Off;
        let links =
            Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap();
        let nanos = Arc::<AtomicU64>::default();
        let clock = Clock::counted(Instant::now(), Arc::clone(&nanos));
        let shared = Shared::new(peer_of(me), (links, clock), Tracer::off());
        let job: Settings =
            serde_json::from_str(include_str!("../../../../testing/settings.json")).unwrap();
        let conducting = Conducting::new(draft(), settings, 0, &job, Nanos(0));
        Self { conducting, shared, nanos, plan: None, begin: Vec::new() }
    }

    /// Both trainers know each other.
    fn introduce(&mut self) {
        let trainers = (0..2).map(|it| (PeerId::trainer(it, 0), "127.0.0.1:1".to_owned()));
        self.conducting.trainers(&mut self.shared, trainers.collect());
    }

    /// Both trainers are there, each with a server in place.
    fn assembled() -> Self {
        let mut job = Self::new();
        job.introduce();
        job.view(1, &[Some(0), Some(1)]);
        job
    }

    /// The controller offers servers in place, and slots that nobody fills.
    fn view(&mut self, counter: u64, ranks: &[Option<u16>]) {
        let offer = |home: &Option<u16>| Offer {
            weight: 100,
            home: *home,
            memory: home.map(|_| 1 << 30),
            member: home.map(Member::InPlace),
            numerics: None,
        };
        let number = ViewNumber { term: 1, counter };
        let view = View { number, slots: ranks.iter().map(offer).collect() };
        self.conducting.view(&mut self.shared, view);
    }

    /// The controller offers dedicated servers, by slot.
    fn serve(&mut self, counter: u64, servers: &[Option<ServerId>]) {
        let member = |id: ServerId| Member::Server {
            index: id.index,
            incarnation: id.incarnation,
            address: "127.0.0.1:1".into(),
        };
        let offer = |it: &Option<ServerId>| Offer {
            weight: 100,
            home: None,
            memory: Some(1 << 30),
            member: it.map(member),
            numerics: None,
        };
        let number = ViewNumber { term: 1, counter };
        let view = View { number, slots: servers.iter().map(offer).collect() };
        self.conducting.view(&mut self.shared, view);
    }

    /// Servers that have not heard all that they were told.
    fn owed(&self) -> Vec<ServerId> {
        let server = |it| match it {
            Peer::Server(id) => Some(id),
            Peer::Trainer(_) => None,
        };
        self.shared.telling.owed_to().into_iter().filter_map(server).collect()
    }

    /// The controller offers a dedicated server for one slot, or nobody.
    fn server(&mut self, counter: u64, address: Option<&str>) {
        let (index, incarnation) = (0, 0);
        let member = address.map(|it| Member::Server { index, incarnation, address: it.into() });
        let offer =
            Offer { weight: 100, home: None, memory: Some(1 << 30), member, numerics: None };
        let view = View { number: ViewNumber { term: 1, counter }, slots: vec![offer] };
        self.conducting.view(&mut self.shared, view);
    }

    /// Both trainers tell what they hold of a step; whether its header is planned then.
    fn announce(&mut self, step: u64) -> bool {
        (0..2).for_each(|it| self.tell(it, lengths(step, it)));
        self.plan()
    }

    /// Both trainers have every result of a step.
    fn whole(&mut self, step: u64) {
        for from in [0, 1].map(TrainerId).map(Peer::Trainer) {
            let message = cadre_protocol::Message::PhaseDone { at: At::new(step, 1) };
            self.conducting.handle(&mut self.shared, Event::Message { from, message });
        }
    }

    fn tell(&mut self, from: u16, said: Said) {
        self.conducting.told(&mut self.shared, Peer::Trainer(TrainerId(from)), said);
    }

    /// Takes what the conductor has put for others.
    fn take(&mut self) {
        while let Some(output) = self.shared.outputs.take() {
            match output {
                Output::Plan(wanted) => self.plan = Some(wanted),
                Output::Begin(ready) => self.begin.push(*ready),
                Output::Message(_) | Output::Conductor(_) | Output::Report(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Steps that this process was to begin so far.
    fn begun(&mut self) -> usize {
        self.take();
        self.begin.len()
    }

    /// What the planning thread does, if a header is to be made.
    fn make(&mut self) {
        self.take();
        if let Some(wanted @ Wanted::Making(_)) = self.plan.take() {
            let Request::Made(made) = planning::done(wanted) else { unreachable!() };
            self.conducting.made(&mut self.shared, *made);
        }
    }

    /// What the planning thread does, if it is asked.
    fn plan(&mut self) -> bool {
        loop {
            self.take();
            let Some(wanted) = self.plan.take() else { return false };
            match planning::done(wanted) {
                Request::Made(made) => self.conducting.made(&mut self.shared, *made),
                Request::Planned(planned) => {
                    self.conducting.planned(&mut self.shared, *planned);
                    return true;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn lengths(step: u64, rank: u16) -> Said {
    let half = u32::from(rank) * 50;
    let stretch = Stretch { document: DocumentId(0), start: half, end: half + 50 };
    let nano = NanoLengths { documents: vec![(0, 100)], stretches: vec![stretch] };
    Said::Lengths(Lengths { step, turns: None, nanos: vec![nano] })
}

#[test]
fn the_wait_for_servers_ends_once_and_wakes_nobody_afterwards() {
    let mut job = Job::new();
    let deadline = job.conducting.next_deadline().unwrap();
    assert!(deadline <= PATIENCE);
    let later = PATIENCE.after(Nanos::from_millis(5_000));
    job.nanos.store(later.0, Ordering::Relaxed);
    job.conducting.handle(&mut job.shared, Event::Tick);
    // A deadline that has passed and stays would have the IO thread spin until the last step.
    assert!(job.conducting.next_deadline().unwrap() > later);
}

#[test]
fn a_header_is_made_of_what_members_tell_and_planned_beside() {
    let mut job = Job::assembled();
    job.tell(0, lengths(0, 0));
    // A trainer that the job does not have, the same once more.
    job.tell(7, lengths(0, 1));
    job.tell(0, lengths(0, 0));
    assert!(!job.plan() && job.conducting.lengths.keys().eq([&0]));
    job.tell(1, lengths(0, 1));
    // Heartbeats ask for the header before it is planned: nothing begins, and all of them are told later.
    let to = Peer::Trainer(TrainerId(1));
    job.conducting.header(&mut job.shared, 0, to);
    assert!(job.begun() == 0 && job.conducting.published.is_empty());
    assert!(job.plan() && !job.plan());
    assert_eq!(job.begun(), 1);
    let (_, told) = job.conducting.published[&0].word.as_ref().unwrap();
    assert!(told.contains(&to));
    // However often it is asked for.
    for _ in 0..3 {
        job.conducting.header(&mut job.shared, 0, to);
        job.conducting.header(&mut job.shared, 0, Peer::CONDUCTOR);
    }
    assert_eq!(job.begun(), 1);
    // Of a step that is out, lengths are known.
    job.tell(1, lengths(0, 1));
    assert!(job.conducting.lengths.is_empty());
}

#[test]
fn servers_that_are_lost_or_have_left_are_told_nothing_more() {
    let id = |index, incarnation| ServerId { index, incarnation };
    let mut job = Job::assembled();
    job.serve(2, &[Some(id(0, 0)), Some(id(1, 0))]);
    assert!(job.announce(0));
    assert_eq!(job.owed(), [id(0, 0), id(1, 0)]);
    // Another one comes in the place of the first while the next header is planned, which was to go to both.
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.make();
    job.take();
    job.serve(3, &[Some(id(0, 1)), Some(id(1, 0))]);
    assert!(job.plan());
    assert_eq!(job.owed(), [id(1, 0)], "a server that is lost never hears a word");
    // The other one leaves: it is owed its words as long as a step that is out names it.
    job.serve(4, &[Some(id(0, 1)), None]);
    assert_eq!(job.owed(), [id(1, 0)]);
    (0..2).for_each(|it| job.whole(it));
    assert_eq!(job.owed(), []);
}

#[test]
fn a_trainer_that_counts_the_steps_otherwise_ends_the_job_by_its_name() {
    for step in [LENGTHS_AHEAD, 10, u64::MAX] {
        let expected = format!("trainer 1 announced step {step}, and the job is at step 0;");
        refused(&[(0, lengths(0, 0)), (1, lengths(step, 1))], &expected);
    }
    let one = [(0, lengths(0, 0)), (1, lengths(0, 1))];
    let more = [(0, lengths(1, 0)), (1, Said::Steps(1))];
    refused(&[&one[..], &more].concat(), "trainer 1 has 1 steps, trainer 0 announced step 1; give");
    let more = [(1, Said::Steps(1)), (0, lengths(1, 0))];
    refused(&[&one[..], &more].concat(), "trainer 0 announced step 1, trainer 1 has 1 steps; give");
    let uneven = [(0, Said::Steps(9)), (1, Said::Steps(3))];
    refused(&uneven, "trainer 1 has 3 steps, trainer 0 has 9; give all ranks the same data");
}

#[test]
fn a_fault_at_a_direction_that_the_turns_of_its_step_lack_ends_the_job_by_name() {
    use cadre_step::phases::Direction;
    use cadre_step::turns::Turns;

    let forward = |step, rank| {
        let Said::Lengths(lengths) = lengths(step, rank) else { unreachable!() };
        let turns = Some(Turns::forward(std::num::NonZeroU16::MIN));
        Said::Lengths(Lengths { turns, ..lengths })
    };
    let expected = "a fault is to come at 0:bwd, but the turns of step 0 are F0: nothing goes that way; give the fault 0:fwd, or another step";
    for (step, direction, refused) in [
        (0, Direction::Backward, Some(expected)),
        (0, Direction::Forward, None),
        (1, Direction::Backward, None),
    ] {
        let mut job = Job::assembled();
        job.conducting.faults.insert(Moment { step, direction });
        (0..2).for_each(|it| job.tell(it, forward(0, it)));
        job.make();
        let reason = match &job.conducting.ending {
            Some(Ending::Failed { reason, bad_input: true }) => Some(reason.as_str()),
            _ => None,
        };
        assert_eq!(reason, refused);
    }
}

/// What trainers tell ends the job as bad input.
fn refused(told: &[(u16, Said)], expected: &str) {
    let mut job = Job::assembled();
    for (from, said) in told {
        assert_eq!(job.conducting.ending, None);
        job.tell(*from, said.clone());
    }
    let Some(Ending::Failed { reason, bad_input: true }) = &job.conducting.ending else {
        panic!("the job waits for ever")
    };
    assert!(reason.starts_with(expected), "{reason}");
}

#[test]
fn the_job_is_over_when_every_trainer_has_said_that_no_step_follows() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    assert!(job.plan());
    job.conducting.obey(&mut job.shared, Command::StepDone(0), &mut Vec::new());
    job.tell(0, Said::Steps(1));
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert_eq!(job.conducting.ending, None, "trainer 1 may have more");
    job.tell(1, Said::Steps(1));
    assert_eq!(job.conducting.ending, Some(Ending::Completed));
}

#[test]
fn a_step_that_some_trainer_has_done_is_reported_when_the_job_fails() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    assert!(job.plan());
    job.take();
    let reported = |job: &mut Job| {
        job.conducting.report_rest(&mut job.shared);
        let output = job.shared.outputs.take();
        assert!(job.shared.outputs.take().is_none());
        match output {
            Some(Output::Report(it)) => match it.message {
                Some(proto::worker_message::Message::Progress(it)) => Some(it.step),
                other => panic!("{other:?}"),
            },
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    };
    assert_eq!(reported(&mut job), None, "nobody has done it");
    job.tell(1, done(0));
    assert_eq!(reported(&mut job), Some(0));
    assert_eq!(reported(&mut job), None, "it was told");
}

#[test]
fn trainers_that_stand_still_end_the_job_and_all_of_them_are_named() {
    let mut job = Job::assembled();
    let after = |job: &mut Job, milliseconds| {
        job.nanos.fetch_add(Nanos::from_millis(milliseconds).0, Ordering::Relaxed);
        job.conducting.handle(&mut job.shared, Event::Tick);
    };
    let still = |what: &str| Said::Standing(Stands::Still(what.into()));
    // One that moves again in time, and those who wait for the pool, end nothing.
    job.tell(1, still("rank 1 is slow"));
    job.tell(1, Said::Standing(Stands::No));
    after(&mut job, 5_000);
    job.conducting.pool_lost.insert(0);
    job.tell(1, still("rank 1 has not submitted a phase"));
    after(&mut job, 5_000);
    assert_eq!(job.conducting.ending, None);
    job.conducting.pool_lost.clear();
    after(&mut job, 4_000);
    job.tell(0, still("rank 0 has not come"));
    after(&mut job, 999);
    assert_eq!(job.conducting.ending, None);
    after(&mut job, 1);
    let Some(Ending::Failed { reason, bad_input: false }) = &job.conducting.ending else {
        panic!("the job waits for ever")
    };
    let named = "rank 0 has not come; rank 1 has not submitted a phase; look where";
    assert!(reason.starts_with(named), "{reason}");
}

fn done(step: u64) -> Said {
    Said::StepDone(StepDone {
        step,
        loss: 1.0,
        gradient_norm: 1.0,
        validation_loss: None,
        learning_rate: 1.0,
        tokens: 100,
        seconds: 1.0,
        exposed_wait_seconds: 0.0,
        header_wait_seconds: 0.0,
    })
}

#[test]
fn a_stop_that_came_before_the_pool_was_lost_does_not_wait_for_servers() {
    let lost = Command::PoolLost { step: 0 };
    let orders: [fn(&mut Job, Command); 2] = [
        |job, lost| {
            job.conducting.stop(&mut job.shared, true);
            job.conducting.obey(&mut job.shared, lost, &mut Vec::new());
        },
        |job, lost| {
            job.conducting.obey(&mut job.shared, lost, &mut Vec::new());
            job.conducting.stop(&mut job.shared, true);
        },
    ];
    for order in orders {
        let mut job = Job::assembled();
        (0..2).for_each(|it| job.tell(it, lengths(0, it)));
        while job.plan() {}
        assert_eq!(job.begun(), 1);
        order(&mut job, lost.clone());
        assert_eq!(job.conducting.ending, Some(Ending::Stopped { checkpoint: true }));
    }
}

/// Both trainers run a step; the conductor is asked to stop before the second one has told its end.
fn stopped_in(step: u64) -> Option<Ending> {
    let mut job = Job::assembled();
    (job.conducting.next, job.conducting.whole) = (step, step);
    (0..2).for_each(|it| job.tell(it, lengths(step, it)));
    assert!(job.plan());
    (0..2).for_each(|it| job.tell(it, Said::Steps(10)));
    job.conducting.obey(&mut job.shared, Command::StepDone(step), &mut Vec::new());
    job.tell(0, done(step));
    job.conducting.stop(&mut job.shared, true);
    assert_eq!(job.conducting.ending, None);
    job.tell(1, done(step));
    job.conducting.ending
}

#[test]
fn a_job_that_is_stopped_in_its_last_step_is_completed() {
    assert_eq!(stopped_in(8), Some(Ending::Stopped { checkpoint: true }));
    assert_eq!(stopped_in(9), Some(Ending::Completed));
}

#[test]
fn the_next_header_goes_out_while_the_step_before_it_runs() {
    let mut job = Job::assembled();
    assert!(job.announce(0) && job.announce(1));
    assert_eq!((job.begun(), job.conducting.published.len()), (2, 2));
    // A third one only when the first is whole.
    assert!(!job.announce(2));
    job.whole(0);
    assert!(job.plan() && job.conducting.published.contains_key(&2));
}

#[test]
fn a_header_with_other_slots_waits_until_the_step_before_it_is_whole() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    job.view(2, &[Some(0), Some(1), None]);
    assert!(!job.announce(1));
    job.whole(0);
    assert!(job.plan());
    let slots = |job: &Job, step| job.conducting.published[&step].planned.header.slots.len();
    assert_eq!((slots(&job, 0), slots(&job, 1)), (2, 3));
    // That the slots are what they were again is as good.
    job.view(3, &[Some(0), Some(1)]);
    assert!(!job.announce(2));
    job.view(4, &[Some(0), Some(1), None]);
    assert!(job.plan());
    assert_eq!(slots(&job, 2), 3);
}

#[test]
fn a_header_waits_for_faults_that_are_to_be_fired_in_the_step_before_it() {
    let mut job = Job::assembled();
    let moment = Moment { step: 0, direction: cadre_step::phases::Direction::Backward };
    job.conducting.faults.insert(moment);
    assert!(job.announce(0) && !job.announce(1));
    job.whole(0);
    assert!(!job.plan(), "it is told, and not fired");
    job.conducting.fired(&mut job.shared, moment);
    assert!(job.plan());
}

#[test]
fn a_stop_counts_after_the_last_step_that_is_out() {
    let mut job = Job::assembled();
    assert!(job.announce(0) && job.announce(1));
    job.conducting.stop(&mut job.shared, true);
    for step in 0..2 {
        job.whole(step);
        assert_eq!(job.conducting.ending, None);
        (0..2).for_each(|it| job.tell(it, done(step)));
    }
    assert_eq!(job.conducting.ending, Some(Ending::Stopped { checkpoint: true }));
}

#[test]
fn a_header_that_is_made_when_the_job_is_stopped_goes_nowhere() {
    let mut job = Job::assembled();
    assert!(job.announce(0));
    (0..2).for_each(|it| job.tell(it, lengths(1, it)));
    job.conducting.stop(&mut job.shared, true);
    assert!(!job.plan() && job.conducting.published.keys().eq([&0]));
    job.whole(0);
    (0..2).for_each(|it| job.tell(it, done(0)));
    assert_eq!(job.conducting.ending, Some(Ending::Stopped { checkpoint: true }));
}

#[test]
fn what_is_proposed_before_a_step_began_is_placed_when_it_has() {
    let mut job = Job::assembled();
    (0..2).for_each(|it| job.tell(it, lengths(0, it)));
    job.make();
    let fillers = [0, 1].map(|it| Some(cadre_protocol::Filler::InPlace(TrainerId(it)))).to_vec();
    let propose = Command::Propose { step: 0, proposal: 1, tables: vec![fillers] };
    for _ in 0..2 {
        let mut answers = Vec::new();
        job.conducting.obey(&mut job.shared, propose.clone(), &mut answers);
        assert!(answers.is_empty(), "{answers:?}");
        job.plan();
    }
    assert_eq!(job.begun(), 1);
    let ready = job.begin.pop().unwrap();
    job.shared.begin(ready.planned, ready.first);
    assert!(job.conducting.proposal.is_some());
    job.conducting.begun(&mut job.shared);
    assert!(job.conducting.proposal.is_none());
}

#[test]
fn a_server_that_comes_back_is_told_the_header_again_and_one_that_left_is_owed_nothing() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0));
    let told = |job: &Job| {
        let (_, told) = job.conducting.published[&0].word.as_ref().unwrap();
        told.contains(&peer)
    };
    assert!(told(&job));
    // Another job had it meanwhile; it listens where it did.
    job.server(2, None);
    job.server(3, Some("127.0.0.1:1"));
    assert!(!told(&job));
    job.conducting.header(&mut job.shared, 0, peer);
    assert!(told(&job));
    // The step may still use it, then nobody does.
    job.server(4, None);
    job.shared.forget(Peer::Trainer(TrainerId(1)));
    assert!(!job.shared.telling.is_covered());
    job.whole(0);
    job.shared.forget(Peer::Trainer(TrainerId(1)));
    assert!(job.shared.telling.is_covered());
}

#[test]
fn a_server_that_came_back_between_two_views_is_told_the_header_again() {
    let (mut job, server) = (Job::new(), ServerId { index: 0, incarnation: 0 });
    let peer = Peer::Server(server);
    job.introduce();
    job.server(1, Some("127.0.0.1:1"));
    assert!(job.announce(0) && job.announce(1));
    let told = |job: &Job| {
        let words = job.conducting.published.values().map(|it| it.word.as_ref());
        words.map(|it| it.unwrap().1.contains(&peer)).collect::<Vec<_>>()
    };
    // It has heard all of it.
    let heard = |job: &mut Job, life| {
        let stream = Stream { life: job.shared.telling.life(), era: 0 };
        job.shared.covered((peer, life), stream, 2)
    };
    assert!(!heard(&mut job, Life(1)) && job.owed().is_empty());
    assert!(!job.shared.lives(peer, Life(1)));
    // A controller that merges views shows the same server at the same place.
    job.server(2, Some("127.0.0.1:1"));
    assert_eq!(told(&job), [true, true]);
    assert!(job.shared.lives(peer, Life(2)), "its first heartbeat");
    job.conducting.came_back(peer);
    assert_eq!(told(&job), [false, false]);
    for step in 0..2 {
        job.conducting.header(&mut job.shared, step, peer);
    }
    assert_eq!((told(&job), job.owed()), (vec![true, true], vec![server]));
}

#[test]
fn a_pool_that_is_lost_before_a_header_is_out_is_said_to_be_back() {
    let on_pool_loss = cadre_protocol::OnPoolLoss::Wait(Nanos(u64::MAX / 2));
    let mut job = Job::with(cadre_protocol::Settings { on_pool_loss, ..Default::default() });
    job.introduce();
    job.server(1, None);
    job.conducting.patience = None;
    let mut events = Vec::new();
    for address in [None, Some("127.0.0.1:1")] {
        (0..2).for_each(|it| job.tell(it, lengths(0, it)));
        job.make();
        if address.is_some() {
            job.server(2, address);
        }
        while let Some(output) = job.shared.outputs.take() {
            let Output::Report(report) = output else { continue };
            if let Some(proto::worker_message::Message::Notice(it)) = report.message {
                events.push(it.event());
            }
        }
    }
    assert_eq!(events, [notice::Event::PoolLost, notice::Event::PoolBack]);
}
