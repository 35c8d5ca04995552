//! Faults happen here, and the supervisor answers them: it replaces what is lost.

use cadre_protocol::{End, Filler, Nanos, Peer, PullFailure, ServerId, TrainerId};

use crate::faults::Fault;
use crate::net::{Happening, Input};
use crate::process::Process;
use crate::world::World;

impl World {
    pub(crate) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(index) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    self.kill(peer);
                    // One that was declared lost has its replacement already.
                    if !matches!(peer, Peer::Server(id) if self.lost.contains(&id)) {
                        self.replace(index);
                    }
                }
            }
            Fault::KillTrainer(index) => {
                self.trainer_died = true;
                self.kill(Peer::Trainer(TrainerId(index)));
                if !self.processes.keys().any(|it| matches!(it, Peer::Trainer(_))) {
                    // Nobody of the job is left to say so.
                    self.end = Some(End::TrainerDead(TrainerId(index)));
                }
            }
            Fault::PauseServer(index, span) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    self.pause(peer, span);
                }
            }
            Fault::PauseTrainer(index, span) => self.pause(Peer::Trainer(TrainerId(index)), span),
            Fault::Cut(trainer, index, span) => {
                let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
                if let Some(&peer) = self.processes.keys().rev().find(newest) {
                    let until = self.now.after(span);
                    let trainer = Peer::Trainer(TrainerId(trainer));
                    self.net.cut(self.now, &mut self.random, trainer, peer, until);
                }
            }
            Fault::Blip(a, b) => {
                let (a, b) = (Peer::Trainer(TrainerId(a)), Peer::Trainer(TrainerId(b)));
                self.net.cut(self.now, &mut self.random, a, b, self.now);
            }
        }
    }

    fn kill(&mut self, peer: Peer) {
        if self.processes.remove(&peer).is_some() {
            self.net.died(self.now, &mut self.random, peer);
            if !self.job.shared_memory {
                self.net.fail(self.now, |it| it.from == peer, PullFailure::PeerFailed);
            }
        }
    }

    fn replace(&mut self, index: u16) {
        if self.faults.replace {
            let when = self.now.after(Nanos(self.random.within(100_000, 200_000_000)));
            self.net.at(when, Happening::Spawn(index));
        } else {
            self.view[usize::from(index)] = None;
        }
    }

    pub(crate) fn spawn(&mut self, index: u16) {
        let incarnation = self.incarnations.entry(index).or_insert(0);
        *incarnation += 1;
        let id = ServerId { index, incarnation: *incarnation };
        self.view[usize::from(index)] = Some(Filler::Server(id));
        let process = Process::server(id, self.job.settings, self.now);
        self.start(process);
        let when = self.now.after(self.net.delay(&mut self.random));
        self.net.local(when, Peer::CONDUCTOR, Input::View);
    }

    pub(crate) fn declared(&mut self, id: ServerId) {
        self.lost.insert(id);
        let newest = self.incarnations.get(&id.index).copied().unwrap_or(0);
        // A supervisor kills what was given up, or leaves it alone to come back one day.
        let there = self.processes.contains_key(&Peer::Server(id));
        if self.random.chance(50) {
            self.kill(Peer::Server(id));
        }
        if there && newest == id.incarnation {
            self.replace(id.index);
        }
    }

    fn pause(&mut self, peer: Peer, span: Nanos) {
        if let Some(process) = self.processes.get_mut(&peer).filter(|it| !it.paused) {
            process.paused = true;
            self.net.at(self.now.after(span), Happening::Resume(peer));
        }
    }

    pub(crate) fn resume(&mut self, peer: Peer) {
        let Some(process) = self.processes.get_mut(&peer) else { return };
        process.paused = false;
        let mut inbox = std::mem::take(&mut process.inbox);
        if self.random.chance(50) {
            // Data is looked at before messages: old beliefs meet new rows.
            inbox.sort_by_key(|it| !matches!(it, Input::Pulled { .. }));
        }
        let mut when = self.now;
        for input in inbox {
            when = when.after(Nanos(1));
            self.net.local(when, peer, input);
        }
        for id in self.reads.remove(&peer).unwrap_or_default() {
            self.net.at(when, Happening::Read(id));
        }
        self.plan_wake(peer);
    }
}
