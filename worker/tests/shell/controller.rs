//! The controller of a simulated job: starts servers, says who is there, replaces who is lost.
//!
//! In: what workers report, and processes that end. Out: what a controller of production says, in the order in which it was said.
//!
//! It is away sometimes; then everything waits.

use std::collections::{BTreeMap, BTreeSet};

use cadre_control::Moment;
use cadre_control::proto::{self, controller_message::Message, worker_message};
use cadre_exchange::{PeerId, Role};
use cadre_step::phases::Direction;

use crate::job::{MEMORY, NUMERICS};
use crate::net::{Chore, Happening, Life, Net};
use crate::random::{Random, hash};
use crate::world::{Checked, World};

/// A place for a server.
#[derive(Debug, Default)]
struct Slot {
    incarnation: u32,
    /// Who fills it, in the view.
    life: Option<Life>,
    /// Who filled it, and goes to another job.
    lent: Option<Life>,
    /// It was asked to end, and is not replaced.
    drained: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Controller {
    slots: BTreeMap<u16, Slot>,
    view: u64,
    pub(crate) away_until: u64,
    /// When each process hears the last thing that was said to it.
    heard: BTreeMap<Life, u64>,
    pub(crate) over: bool,
    /// Moments that the conductor has told.
    pub(crate) reached: BTreeSet<Moment>,
}

impl Controller {
    /// Whether a server fills a slot.
    pub(crate) fn offers(&self, life: Life) -> bool {
        self.slots.values().any(|it| it.life == Some(life))
    }
}

fn message(message: Message) -> proto::ControllerMessage {
    proto::ControllerMessage { message: Some(message) }
}

impl World {
    /// Says something to a process, behind what was said before.
    fn tell(&mut self, life: Life, what: Message) {
        let mut net = self.net.borrow_mut();
        let delay = net.random.within(50_000, 3_000_000);
        let heard = self.controller.heard.entry(life).or_insert(0);
        let when = (net.now.max(self.controller.away_until) + delay).max(*heard + 1);
        *heard = when;
        net.at(when, Happening::Told(life, Box::new(message(what))));
    }

    /// A job begins: its trainers are there, its servers come.
    pub(crate) fn assemble(&mut self) {
        for rank in 0..self.job.trainers {
            let life = self.start(PeerId::trainer(rank, 0));
            self.trainers.push(life);
        }
        for index in 0..self.job.servers {
            self.controller.slots.insert(index, Slot::default());
            self.net.borrow_mut().soon(300_000_000, Happening::Control(Chore::Spawn(index)));
        }
        for life in self.trainers.clone() {
            self.introduce(life);
        }
        self.net.borrow_mut().soon(10_000_000, Happening::Control(Chore::View));
    }

    /// Tells a process who is there.
    fn introduce(&mut self, life: Life) {
        let conductor = proto::Conductor {
            exchange_address: self.net.borrow().address(self.trainers[0]),
            ring_address: String::new(),
            incarnation: 0,
        };
        self.tell(life, Message::Conductor(conductor));
        let trainer = |life: &Life| proto::Trainer {
            incarnation: 0,
            exchange_address: self.net.borrow().address(*life),
            ring_address: String::new(),
        };
        let trainers = self.trainers.iter().map(trainer).collect();
        self.tell(life, Message::Trainers(proto::Trainers { trainers }));
    }

    pub(crate) fn chore(&mut self, chore: Chore) {
        let (now, away) = (self.net.borrow().now, self.controller.away_until);
        if now < away {
            return self.net.borrow_mut().at(away, Happening::Control(chore));
        }
        if self.controller.over {
            return;
        }
        match chore {
            Chore::View => self.show(),
            Chore::Spawn(index) => self.spawn(index),
            Chore::Gone(life) => self.gone(life),
            Chore::Return(id) => self.comes_back(id),
            Chore::Fire(moment) => self.fire(moment),
        }
    }

    fn show(&mut self) {
        self.controller.view += 1;
        let net = self.net.borrow();
        let server = |index: u16, incarnation: u32, life: Life| proto::Server {
            index: index.into(),
            incarnation,
            exchange_address: net.address(life),
            memory_bytes: self.job.memory,
            numerics_id: NUMERICS.into(),
        };
        let mut slots = Vec::new();
        let (seed, view) = (self.job.seed, self.controller.view);
        // Weights are learnt anew every few views; the slot of who was drained leaves, at once or never. Where memory just suffices
        // for the slots that there are, they stay as they are.
        let is_roomy = self.job.memory == MEMORY;
        let learns = is_roomy && Random::new(hash(&[seed, 131])).chance(20);
        let weight =
            |index: u16| Random::new(hash(&[seed, 137, index.into(), view / 4])).within(60, 140);
        let stays =
            |index: u16| !is_roomy || Random::new(hash(&[seed, 139, index.into()])).chance(40);
        let leaves = |it: (&u16, &Slot)| it.1.drained && it.1.life.is_none() && !stays(*it.0);
        // The last one stays.
        let all = !self.job.in_place && self.controller.slots.iter().all(leaves);
        for (&index, it) in &self.controller.slots {
            if !all && leaves((&index, it)) {
                continue;
            }
            slots.push(proto::Slot {
                slot: slots.len() as u32,
                weight: if learns { weight(index) as u32 } else { 100 },
                kind: proto::Kind::Dedicated.into(),
                server: it.life.map(|life| server(index, net.endpoints[life].me.incarnation, life)),
            });
        }
        for (rank, life) in (0_u16..).zip(&self.trainers).filter(|_| self.job.in_place) {
            slots.push(proto::Slot {
                slot: slots.len() as u32,
                weight: 100,
                kind: proto::Kind::InPlace.into(),
                server: Some(server(rank, 0, *life)),
            });
        }
        drop(net);
        let number = Some(proto::ViewNumber { term: 1, counter: self.controller.view });
        self.tell(self.trainers[0], Message::View(proto::View { number, slots }));
    }

    fn spawn(&mut self, index: u16) {
        let slot = self.controller.slots.entry(index).or_default();
        if slot.drained || slot.life.is_some() {
            return;
        }
        let incarnation = slot.incarnation;
        slot.incarnation += 1;
        let life = self.start(PeerId::server(index, incarnation));
        self.controller.slots.get_mut(&index).expect("just seen").life = Some(life);
        self.introduce(life);
        // Those that come together are shown together.
        self.net.borrow_mut().soon(20_000_000, Happening::Control(Chore::View));
    }

    /// A process has ended, or is given up.
    fn gone(&mut self, life: Life) {
        let mut net = self.net.borrow_mut();
        for (&index, slot) in &mut self.controller.slots {
            let lent = slot.lent.take_if(|it| *it == life).is_some();
            if slot.life.take_if(|it| *it == life).is_some() || lent {
                net.soon(self.job.respawn, Happening::Control(Chore::Spawn(index)));
                net.soon(20_000_000, Happening::Control(Chore::View));
            }
        }
    }

    pub(crate) fn reported(&mut self, life: Life, report: proto::WorkerMessage) -> Checked {
        match report.message {
            Some(worker_message::Message::Notice(it)) => {
                self.pool_lost |= it.event() == proto::notice::Event::PoolLost;
                let lost = it.event() == proto::notice::Event::ServerLost;
                if let Some(server) = it.server.filter(|_| lost) {
                    let id = PeerId::server(server.index as u16, server.incarnation);
                    self.declared(id);
                }
            }
            Some(worker_message::Message::Probed(it)) => {
                // What is found out in time is not said otherwise before; a trainer that cannot be reached has no path.
                let is_late = Net::finds_for(life) > 5_000_000_000;
                let is_wrong = |it: &&proto::Probe| it.path != "simulated" && it.mbps > 0;
                if let Some(probe) = it.probes.iter().find(is_wrong).filter(|_| !is_late) {
                    let wrong = format!("life {life} measures before it knows the path: {probe:?}");
                    self.net.borrow_mut().wrong = Some(wrong);
                }
            }
            Some(worker_message::Message::Leaving(_)) => self.drain(life),
            Some(worker_message::Message::Progress(_)) => self.reports += 1,
            Some(worker_message::Message::PhaseReached(it)) => {
                let moment = Moment::of(it.step, it.direction()).map_err(|it| it.to_string())?;
                if !self.job.moments.contains(&moment) || !self.controller.reached.insert(moment) {
                    return Err(format!("the job is at {moment:?}, which nobody asked for"));
                }
                self.net.borrow_mut().soon(50_000_000, Happening::Control(Chore::Fire(moment)));
            }
            // Of a trainer whose main thread stands still.
            Some(worker_message::Message::Finished(_)) => self.end_standing(),
            _ => {}
        }
        Ok(())
    }

    /// The faults of a moment come, then the conductor is told.
    fn fire(&mut self, moment: Moment) {
        if self.faults.kills() {
            let mut random = Random::new(hash(&[self.job.seed, 107, moment.step]));
            let index = random.within(0, u64::from(self.job.servers.max(1)) - 1) as u16;
            if let Some(life) = self.newest((Role::Server, index)) {
                self.kill(life, random.chance(20));
            }
        }
        let direction = match moment.direction {
            Direction::Forward => proto::Direction::Forward,
            Direction::Backward => proto::Direction::Backward,
        };
        let (step, direction) = (moment.step, direction.into());
        self.tell(self.trainers[0], Message::FaultsFired(proto::FaultsFired { step, direction }));
    }

    /// The conductor has declared a server lost: it is ended, or left to come back one day.
    fn declared(&mut self, id: PeerId) {
        self.lost.insert(id);
        let conductor = self.processes.get(&self.trainers[0]);
        self.both.1 += u64::from(conductor.is_some_and(|it| it.holdings()[2] > 1));
        let found = self.processes.values().find(|it| it.id == id).map(|it| it.life);
        let Some(life) = found else { return };
        self.net.borrow_mut().soon(2_000_000, Happening::Control(Chore::Gone(life)));
        let ends = self.net.borrow_mut().random.chance(50);
        if ends {
            self.kill(life, false);
        }
    }

    fn drain(&mut self, life: Life) {
        for slot in self.controller.slots.values_mut().filter(|it| it.life == Some(life)) {
            slot.life = None;
            slot.drained = true;
        }
        self.net.borrow_mut().soon(20_000_000, Happening::Control(Chore::View));
        self.tell(life, Message::Drain(proto::Drain { stays: false, over: false }));
    }

    /// Another job gets a server, unless this one is over: then all of them go.
    pub(crate) fn lend(&mut self, index: u16) {
        if self.controller.over {
            return;
        }
        let slot = self.controller.slots.get_mut(&index).filter(|it| !it.drained);
        let Some(slot) = slot else { return };
        let Some(life) = slot.life.take() else { return };
        slot.lent = Some(life);
        // A controller that is slow shows no view without it.
        if !Random::new(hash(&[self.job.seed, 73, life as u64])).chance(30) {
            self.net.borrow_mut().at(0, Happening::Control(Chore::View));
        }
        self.tell(life, Message::Drain(proto::Drain { stays: true, over: false }));
    }

    /// It comes back: the same incarnation, with nothing of what it knew. Where it was given up meanwhile, another one comes.
    fn comes_back(&mut self, id: PeerId) {
        let Some(slot) = self.controller.slots.get_mut(&id.index) else { return };
        let before = slot.lent.take();
        if slot.life.is_some() || slot.drained {
            return;
        }
        if slot.incarnation != id.incarnation + 1 || self.lost.contains(&id) {
            return self.spawn(id.index);
        }
        let life = self.start(id);
        self.controller.slots.get_mut(&id.index).expect("just seen").life = Some(life);
        // Its pod keeps its address, or its process gets another port.
        let same = Random::new(hash(&[self.job.seed, 79, life as u64])).chance(70);
        if let Some(before) = before.filter(|_| same) {
            self.net.borrow_mut().takes_place(life, before);
        }
        self.introduce(life);
        self.net.borrow_mut().soon(20_000_000, Happening::Control(Chore::View));
    }

    /// Servers that are well are given up, all in one view.
    pub(crate) fn replace(&mut self, indices: &[u16]) {
        let mut net = self.net.borrow_mut();
        for index in indices {
            if let Some(slot) = self.controller.slots.get_mut(index).filter(|it| !it.drained) {
                slot.life = None;
                net.at(0, Happening::Control(Chore::Spawn(*index)));
            }
        }
    }

    pub(crate) fn add(&mut self) {
        if self.job.is_local() {
            return;
        }
        let index = self.controller.slots.keys().next_back().map_or(0, |it| it + 1);
        self.net.borrow_mut().at(0, Happening::Control(Chore::Spawn(index)));
    }

    /// The job ends after the last step whose header is out.
    pub(crate) fn stop(&mut self) {
        self.tell(self.trainers[0], Message::Stop(proto::Stop { checkpoint: false }));
    }

    /// The job is over: servers go.
    pub(crate) fn dismiss(&mut self) {
        self.controller.over = true;
        self.controller.away_until = 0;
        let servers = self.processes.values().filter(|it| it.id.role == Role::Server);
        for life in servers.map(|it| it.life).collect::<Vec<_>>() {
            self.tell(life, Message::Drain(proto::Drain { stays: false, over: true }));
        }
    }
}
