//! A job whose conductor is alone: the test says what workers tell it, and takes what it puts for others.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use cadre_crds::Wire;
use cadre_exchange::{Encryption, Limits, PeerId, Tcp, TcpConfig};
use cadre_planner::{Costs, Heads, LinkMap, Tolerance};
use cadre_protocol::{At, Message, ServerId, TrainerId, conductor};
use cadre_step::conduct::{Offer, Standby};
use cadre_step::header::{KvHeads, Member, Placement, ViewNumber};
use cadre_step::layers::{Kind, Layers};

use super::super::*;
use super::lengths;
use crate::io::Request;
use crate::io::clock::Clock;
use crate::io::plan_thread;
use crate::io::planning::{Ready, Wanted};
use crate::io::shared::peer_of;
use crate::trace::Tracer;

/// A conductor of two trainers with in-place servers, at a time that the test counts.
pub(super) struct Job {
    pub(super) conducting: Conducting,
    pub(super) shared: Shared<Tcp>,
    pub(super) nanos: Arc<AtomicU64>,
    /// What was put for others: a header to plan, steps to begin.
    pub(super) plan: Option<Wanted>,
    pub(super) begin: Vec<Ready>,
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
        tolerance: Tolerance::USUAL,
        links: LinkMap::default(),
        standby: Standby::No,
        trainer_memory: 1 << 30,
        replay: None,
        header: None,
        filled: Vec::new(),
        memories: BTreeMap::new(),
    }
}

impl Job {
    pub(super) fn new() -> Self {
        Self::with(cadre_protocol::Settings::default())
    }

    pub(super) fn with(settings: cadre_protocol::Settings) -> Self {
        let (bind, me) = (std::net::Ipv4Addr::LOCALHOST.into(), PeerId::trainer(0, 0));
        let (secret, limits) = ([0; 32], Limits::default());
        let encryption = Encryption::Off;
        let links =
            Tcp::open(TcpConfig { bind, me, secret, data_version: 1, encryption, limits }).unwrap();
        let nanos = Arc::<AtomicU64>::default();
        let clock = Clock::counted(Instant::now(), Arc::clone(&nanos));
        let shared = Shared::new(peer_of(me), (links, clock), Tracer::off());
        let job: Settings =
            serde_json::from_str(include_str!("../../../../../testing/settings.json")).unwrap();
        let conducting = Conducting::new(draft(), settings, 0, &job, Nanos(0));
        Self { conducting, shared, nanos, plan: None, begin: Vec::new() }
    }

    /// Both trainers know each other.
    pub(super) fn introduce(&mut self) {
        let trainers = (0..2).map(|it| (PeerId::trainer(it, 0), "127.0.0.1:1".to_owned()));
        let event = Event::Trainers(trainers.collect());
        self.conducting.handle(&mut self.shared, event);
    }

    /// Both trainers are there, each with a server in place.
    pub(super) fn assembled() -> Self {
        let mut job = Self::new();
        job.introduce();
        job.view(1, &[Some(0), Some(1)]);
        job
    }

    /// The controller offers servers in place, and slots that nobody fills.
    pub(super) fn view(&mut self, counter: u64, ranks: &[Option<u16>]) {
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
    pub(super) fn serve(&mut self, counter: u64, servers: &[Option<ServerId>]) {
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
    pub(super) fn owed(&self) -> Vec<ServerId> {
        let server = |it| match it {
            Peer::Server(id) => Some(id),
            Peer::Trainer(_) => None,
        };
        self.shared.telling.owed_to().into_iter().filter_map(server).collect()
    }

    /// A heartbeat of a peer that has begun no step, when the machine has forgotten the last one.
    pub(super) fn beat(&mut self, from: Peer) {
        self.nanos.fetch_add(Nanos::from_millis(300).0, std::sync::atomic::Ordering::Relaxed);
        let message = Message::Heartbeat(Box::default());
        let event = conductor::Event::Message { from, message };
        self.conducting.handle(&mut self.shared, Event::Protocol(event));
    }

    /// Both trainers tell what they hold of a step; whether its header is planned then.
    pub(super) fn announce(&mut self, step: u64) -> bool {
        (0..2).for_each(|it| self.tell(it, lengths(step, it)));
        self.plan()
    }

    /// Both trainers have every result of a step.
    pub(super) fn whole(&mut self, step: u64) {
        for from in [0, 1].map(TrainerId).map(Peer::Trainer) {
            let message = Message::PhaseDone { at: At::new(step, 1) };
            let event = conductor::Event::Message { from, message };
            self.conducting.handle(&mut self.shared, Event::Protocol(event));
        }
    }

    pub(super) fn tell(&mut self, from: u16, said: Said) {
        let from = Peer::Trainer(TrainerId(from));
        self.conducting.handle(&mut self.shared, Event::Told(from, said));
    }

    /// Takes what the conductor has put for others.
    pub(super) fn take(&mut self) {
        while let Some(output) = self.shared.outputs.take() {
            match output {
                Output::Plan(wanted) => self.plan = Some(wanted),
                Output::Begin(ready) => self.begin.push(*ready),
                Output::Message(_)
                | Output::Conductor(_)
                | Output::Report(_)
                | Output::Finished(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// What the planning thread does, if a header is to be made.
    pub(super) fn make(&mut self) {
        self.take();
        if let Some(wanted @ Wanted::Making(_)) = self.plan.take() {
            let Request::Made(made) = plan_thread::done(wanted) else { unreachable!() };
            self.conducting.handle(&mut self.shared, Event::Made(*made));
        }
    }

    /// What the planning thread does, if it is asked.
    pub(super) fn plan(&mut self) -> bool {
        loop {
            self.take();
            let Some(wanted) = self.plan.take() else { return false };
            match plan_thread::done(wanted) {
                Request::Made(made) => self.conducting.handle(&mut self.shared, Event::Made(*made)),
                Request::Planned(planned) => {
                    self.conducting.planned(&mut self.shared, *planned);
                    return true;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
