//! A job whose conductor is alone: the test says what workers tell it, and takes what it commands.

use cadre_crds::Wire;
use cadre_planner::{Costs, Heads, LinkMap, Tolerance};
use cadre_protocol::At;

use super::super::*;
use super::{Commanded, lengths};
use crate::conduct::{Filled, Making, Offer, Standby};
use crate::header::{KvHeads, Member, Placement, ViewNumber};
use crate::layers::{Kind, Layers};

/// A conductor of two trainers, at a time that the test counts.
pub(super) struct Job {
    pub(super) decisions: Decisions,
    pub(super) now: Nanos,
    /// What it wants made or planned.
    wanted: Option<Wanted>,
    /// Steps that this process was to begin so far.
    pub(super) begin: Vec<u64>,
    /// Proposals that are to be dealt out: step and number.
    pub(super) proposals: Vec<(u64, u64)>,
    /// What people were told about.
    pub(super) said: Vec<About>,
    /// Steps that are over.
    pub(super) over: Vec<Over>,
    /// Whether those who have gone were to be forgotten.
    pub(super) forgets: bool,
    /// How often the machine of the protocol has ended the job.
    pub(super) ended: usize,
    /// How often all were told that no step follows.
    pub(super) told_the_end: usize,
}

enum Wanted {
    Making(Box<Making>),
    Plan(Box<Filled>),
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
        Self::with(Settings::default())
    }

    pub(super) fn with(settings: Settings) -> Self {
        Self {
            decisions: Decisions::new(draft(), settings, Start::default(), Nanos(0)),
            now: Nanos(0),
            wanted: None,
            begin: Vec::new(),
            proposals: Vec::new(),
            said: Vec::new(),
            over: Vec::new(),
            forgets: false,
            ended: 0,
            told_the_end: 0,
        }
    }

    /// Something happens.
    pub(super) fn hear(&mut self, event: Event) {
        let mut commands = Vec::new();
        self.decisions.handle(self.now, event, &mut commands);
        self.take(commands);
    }

    /// Calls the machine, as an event would.
    fn act(&mut self, act: impl FnOnce(&mut Decisions, &mut Acts<'_>)) {
        let mut commands = Vec::new();
        act(&mut self.decisions, &mut Acts { now: self.now, commands: &mut commands });
        self.take(commands);
    }

    /// The machine of the protocol commands something.
    pub(super) fn obey(&mut self, command: Commanded) {
        self.act(|it, acts| it.obey(acts, command));
    }

    /// The machine of the protocol wants a header told, again and again.
    pub(super) fn header(&mut self, step: u64, to: Peer) {
        self.obey(Commanded::Header { step, to });
    }

    pub(super) fn tick(&mut self) {
        self.hear(Event::Protocol(conductor::Event::Tick));
    }

    pub(super) fn later(&mut self, milliseconds: u64) {
        self.now = self.now.after(Nanos::from_millis(milliseconds));
        self.tick();
    }

    pub(super) fn stop(&mut self) {
        self.hear(Event::Stop { checkpoint: true });
    }

    fn take(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Make(it) => self.wanted = Some(Wanted::Making(it)),
                Command::Plan(it, trainers) => {
                    assert_eq!(trainers.len(), 2, "others have to know where trainers listen");
                    self.wanted = Some(Wanted::Plan(it));
                }
                Command::Begin(step) => self.begin.push(step),
                Command::Propose { step, proposal, .. } => self.proposals.push((step, proposal)),
                Command::Say(about, _) => self.said.push(about),
                Command::Over(over) => self.over.push(*over),
                Command::ForgetGone => self.forgets = true,
                Command::End(_) => self.ended += 1,
                Command::Ending(_) => self.told_the_end += 1,
                _ => {}
            }
        }
    }

    /// Both trainers know each other.
    pub(super) fn introduce(&mut self) {
        let trainers = (0..2).map(|it| (PeerId::trainer(it, 0), "127.0.0.1:1".to_owned()));
        self.hear(Event::Trainers(trainers.collect()));
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
        self.hear(Event::View(view));
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
        self.hear(Event::View(view));
    }

    /// The controller offers a dedicated server for one slot, or nobody.
    pub(super) fn server(&mut self, counter: u64, address: Option<&str>) {
        let (index, incarnation) = (0, 0);
        let member = address.map(|it| Member::Server { index, incarnation, address: it.into() });
        let offer =
            Offer { weight: 100, home: None, memory: Some(1 << 30), member, numerics: None };
        let view = View { number: ViewNumber { term: 1, counter }, slots: vec![offer] };
        self.hear(Event::View(view));
    }

    /// Both trainers tell what they hold of a step; whether its header is planned then.
    pub(super) fn announce(&mut self, step: u64) -> bool {
        (0..2).for_each(|it| self.tell(it, lengths(step, it)));
        self.plan()
    }

    /// Both trainers have every result of a step.
    pub(super) fn whole(&mut self, step: u64) {
        for from in [0, 1].map(TrainerId).map(Peer::Trainer) {
            let message = cadre_protocol::Message::PhaseDone { at: At::new(step, 1) };
            self.hear(Event::Protocol(conductor::Event::Message { from, message }));
        }
    }

    pub(super) fn tell(&mut self, from: u16, said: Said) {
        self.hear(Event::Told(Peer::Trainer(TrainerId(from)), said));
    }

    /// How many steps this process was to begin so far.
    pub(super) fn begun(&self) -> usize {
        self.begin.len()
    }

    /// What the planning thread does, if a header is to be made.
    pub(super) fn make(&mut self) {
        if let Some(Wanted::Making(it)) = self.wanted.take_if(|it| matches!(it, Wanted::Making(_)))
        {
            self.hear(Event::Made(it.make()));
        }
    }

    /// What the planning thread does, if it is asked; whether a header was planned.
    pub(super) fn plan(&mut self) -> bool {
        self.make();
        let Some(Wanted::Plan(filled)) = self.wanted.take() else { return false };
        let planned = PlannedStep::new(Arc::new(filled.header())).unwrap();
        self.hear(Event::Planned(Ok(Arc::new(planned))));
        true
    }
}
