//! The three machines with shells that drive them by random events, as honest processes would.

use std::sync::Arc;

use cadre_protocol::conductor::{self, Conductor};
use cadre_protocol::server::{self, Host, Server};
use cadre_protocol::trainer::{self, Trainer};
use cadre_protocol::{
    Acks, At, Message, Nanos, Peer, Phase, PullId, Round, Settings, TrainerId, Work,
};

use crate::job::{ME, PHASES, SERVER, TRAINERS, fillers, step, table};
use crate::random::Random;
use crate::words::{number, peer, result, works};

/// A machine, and what its shell owes it.
pub(crate) trait Machine: std::fmt::Debug {
    /// An event of its shell, or of honest peers.
    fn live(&mut self, now: Nanos, random: &mut Random);
    /// A message; what it answers, in words.
    fn hear(&mut self, now: Nanos, from: Peer, message: Message) -> String;
    /// Nothing.
    fn tick(&mut self, now: Nanos) -> String;
}

#[derive(Debug)]
pub(crate) struct TrainerShell {
    machine: Trainer,
    pulls: Vec<PullId>,
    begun: u64,
    next: At,
}

impl TrainerShell {
    fn handle(&mut self, now: Nanos, event: trainer::Event) -> String {
        let mut commands = Vec::new();
        self.machine.handle(now, event, &mut commands);
        let said = format!("{commands:?}");
        for command in &commands {
            if let trainer::Command::Pull { pull, .. } = command {
                self.pulls.push(*pull);
            }
            if let trainer::Command::Reassign { step, tables, .. } = command {
                self.handle(now, trainer::Event::Round(Arc::new(table(*step, tables))));
            }
        }
        said
    }
}

impl Machine for TrainerShell {
    fn live(&mut self, now: Nanos, random: &mut Random) {
        let event = match random.within(0, 5) {
            0 => {
                self.begun += 1;
                trainer::Event::Begin(step(self.begun - 1))
            }
            1 if self.machine.may_submit()
                && self.next.step < self.begun
                && self.machine.watermark() < Some(At::new(self.next.step, PHASES - 1)) =>
            {
                let at = self.next;
                self.next = if at.phase.0 + 1 < PHASES {
                    At { phase: Phase(at.phase.0 + 1), ..at }
                } else {
                    At::new(at.step + 1, 0)
                };
                trainer::Event::Submitted(at)
            }
            2 if !self.pulls.is_empty() => {
                let index = random.within(0, self.pulls.len() as u64 - 1) as usize;
                let pull = self.pulls.swap_remove(index);
                trainer::Event::Pulled { pull, result: result(random) }
            }
            3 => trainer::Event::Closed(peer(random)),
            4 => {
                let at = At::new(number(random, 4, 0), random.within(0, 2) as u32);
                let message = Message::Finished { at, works: works(random) };
                trainer::Event::Message { from: Peer::Server(SERVER), message }
            }
            _ => trainer::Event::Tick,
        };
        self.handle(now, event);
    }

    fn hear(&mut self, now: Nanos, from: Peer, message: Message) -> String {
        self.handle(now, trainer::Event::Message { from, message })
    }

    fn tick(&mut self, now: Nanos) -> String {
        self.handle(now, trainer::Event::Tick)
    }
}

#[derive(Debug)]
pub(crate) struct ServerShell {
    machine: Server,
    pulls: Vec<PullId>,
    ready: Vec<(At, Work)>,
    begun: u64,
}

impl ServerShell {
    fn handle(&mut self, now: Nanos, event: server::Event) -> String {
        let mut commands = Vec::new();
        self.machine.handle(now, event, &mut commands);
        let said = format!("{commands:?}");
        for command in &commands {
            if let server::Command::Pull { pull, .. } = command {
                self.pulls.push(*pull);
            }
            if let server::Command::Ready { at, work } = command {
                self.ready.push((*at, *work));
            }
            if let server::Command::Reassign { step, tables, .. } = command {
                self.handle(now, server::Event::Round(Arc::new(table(*step, tables))));
            }
        }
        said
    }
}

impl Machine for ServerShell {
    fn live(&mut self, now: Nanos, random: &mut Random) {
        let event = match random.within(0, 5) {
            0 => {
                self.begun += 1;
                server::Event::Begin(step(self.begun - 1))
            }
            1 if !self.ready.is_empty() => {
                let index = random.within(0, self.ready.len() as u64 - 1) as usize;
                let (at, work) = self.ready.swap_remove(index);
                server::Event::Ran { at, works: vec![work] }
            }
            2 if !self.pulls.is_empty() => {
                let index = random.within(0, self.pulls.len() as u64 - 1) as usize;
                let pull = self.pulls.swap_remove(index);
                server::Event::Pulled { pull, result: result(random) }
            }
            3 => server::Event::Closed(peer(random)),
            4 => {
                let at = At::new(random.within(0, 3), random.within(0, 2) as u32);
                let from = Peer::Trainer(TrainerId(random.within(0, 2) as u16));
                let (round, acks) = (Round(0), Acks::default());
                let message = Message::Doorbell { at, round, acks, digest: at.step };
                server::Event::Message { from, message }
            }
            _ => server::Event::Tick,
        };
        self.handle(now, event);
    }

    fn hear(&mut self, now: Nanos, from: Peer, message: Message) -> String {
        self.handle(now, server::Event::Message { from, message })
    }

    fn tick(&mut self, now: Nanos) -> String {
        self.handle(now, server::Event::Tick)
    }
}

#[derive(Debug)]
pub(crate) struct ConductorShell {
    machine: Conductor,
    proposals: Vec<(u64, u64)>,
    ready: u64,
}

impl ConductorShell {
    fn handle(&mut self, now: Nanos, event: conductor::Event) -> String {
        let mut commands = Vec::new();
        self.machine.handle(now, event, &mut commands);
        for command in &commands {
            if let conductor::Command::Propose { step, proposal, .. } = command {
                self.proposals.push((*step, *proposal));
            }
        }
        format!("{commands:?}")
    }
}

impl Machine for ConductorShell {
    fn live(&mut self, now: Nanos, random: &mut Random) {
        let event = match random.within(0, 4) {
            0 => conductor::Event::View(fillers()),
            1 => {
                self.ready += 1;
                conductor::Event::HeaderReady { step: self.ready - 1, phases: PHASES }
            }
            2 => match self.proposals.pop() {
                Some((step, proposal)) => conductor::Event::Placed { step, proposal },
                None => conductor::Event::Tick,
            },
            3 => conductor::Event::Closed(peer(random)),
            _ => {
                let from = *random.pick(&[
                    Peer::Trainer(TrainerId(0)),
                    Peer::Trainer(TrainerId(1)),
                    Peer::Trainer(TrainerId(2)),
                    Peer::Server(SERVER),
                ]);
                let message = Message::Heartbeat(Box::default());
                conductor::Event::Message { from, message }
            }
        };
        self.handle(now, event);
    }

    fn hear(&mut self, now: Nanos, from: Peer, message: Message) -> String {
        self.handle(now, conductor::Event::Message { from, message })
    }

    fn tick(&mut self, now: Nanos) -> String {
        self.handle(now, conductor::Event::Tick)
    }
}

pub(crate) fn trainer() -> TrainerShell {
    let machine = Trainer::new(ME, Settings::default(), Nanos(0));
    TrainerShell { machine, pulls: Vec::new(), begun: 0, next: At::new(0, 0) }
}

pub(crate) fn server(host: Host) -> ServerShell {
    let machine = Server::new(host, u64::MAX, Settings::default(), Nanos(0));
    ServerShell { machine, pulls: Vec::new(), ready: Vec::new(), begun: 0 }
}

pub(crate) fn conductor() -> ConductorShell {
    let machine = Conductor::new(TRAINERS, Settings::default(), Nanos(0));
    ConductorShell { machine, proposals: Vec::new(), ready: 0 }
}

pub(crate) fn machine(kind: u64) -> Box<dyn Machine> {
    match kind {
        0 => Box::new(trainer()),
        1 => Box::new(server(Host::Dedicated(SERVER))),
        2 => Box::new(server(Host::InPlace(ME))),
        _ => Box::new(conductor()),
    }
}
