//! Faults happen here, and the supervisor answers them: it replaces what is lost.

use cadre_protocol::{End, Filler, Nanos, Peer, PullFailure, ServerId, TrainerId};

use crate::faults::{BadPath, Fault, PathFault};
use crate::net::{Happening, Input};
use crate::process::Process;
use crate::world::World;

impl World {
    pub(crate) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(index) => {
                if self.kill_server(index) {
                    self.replace(&[index]);
                }
            }
            Fault::KillTogether { first, count } => {
                let killed = self.several(first, count).into_iter();
                let killed: Vec<_> = killed.filter(|&it| self.kill_server(it)).collect();
                self.replace(&killed);
            }
            Fault::StopTogether { first, count, servers, conductor } => {
                for index in self.several(first, count) {
                    if let Some(peer) = self.newest(index) {
                        self.pause(peer, servers);
                    }
                }
                self.pause(Peer::CONDUCTOR, conductor);
            }
            Fault::KillTrainer(index) => {
                self.trainer_died = true;
                self.kill(Peer::Trainer(TrainerId(index)));
                if !self.processes.keys().any(|it| matches!(it, Peer::Trainer(_))) {
                    // Nobody of the job is left to say so.
                    self.end = Some(End::TrainersDead(vec![TrainerId(index)]));
                }
            }
            Fault::PauseServer(index, span) => {
                if let Some(peer) = self.newest(index) {
                    self.pause(peer, span);
                }
            }
            Fault::PauseTrainer(index, span) => self.pause(Peer::Trainer(TrainerId(index)), span),
            Fault::Cut(trainer, index, span) => {
                if let Some(peer) = self.newest(index) {
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

    /// Breaks the links of the path that is bad from now on, if it refuses them.
    pub(crate) fn path_breaks(&mut self) {
        let refuses = |it: &BadPath| it.fault == PathFault::Refuses;
        let Some(path) = self.faults.path.filter(refuses) else { return };
        let trainer = Peer::Trainer(TrainerId(path.trainer));
        let bad = |it: &&Peer| match it {
            Peer::Server(id) => path.server.is_none_or(|index| id.index == index),
            Peer::Trainer(_) => false,
        };
        for server in self.processes.keys().filter(bad).copied().collect::<Vec<_>>() {
            self.net.cut(self.now, &mut self.random, trainer, server, self.now);
        }
    }

    /// The process that is server `index` now.
    fn newest(&self, index: u16) -> Option<Peer> {
        let newest = |it: &&Peer| matches!(it, Peer::Server(id) if id.index == index);
        self.processes.keys().rev().find(newest).copied()
    }

    /// Indices of `count` servers, from `first` on, around.
    fn several(&self, first: u16, count: u16) -> Vec<u16> {
        let all = self.job.dedicated;
        (first..first + count.min(all)).map(|it| it % all).collect()
    }

    /// Kills a server. Whether it has to be replaced: one that was declared lost has its replacement.
    fn kill_server(&mut self, index: u16) -> bool {
        let Some(peer) = self.newest(index) else { return false };
        self.kill(peer);
        !matches!(peer, Peer::Server(id) if self.lost.contains(&id))
    }

    fn kill(&mut self, peer: Peer) {
        if self.processes.remove(&peer).is_some() {
            self.net.died(self.now, &mut self.random, peer);
            if !self.job.shared_memory {
                self.net.fail(self.now, |it| it.from == peer, PullFailure::PeerFailed);
            }
        }
    }

    /// Starts replacements that come in one view, or leaves the slots vacant.
    fn replace(&mut self, servers: &[u16]) {
        if self.faults.replace && !servers.is_empty() {
            let when = self.now.after(Nanos(self.random.within(100_000, 200_000_000)));
            self.net.at(when, Happening::Spawn(servers.to_vec()));
        } else {
            for &index in servers {
                self.view[usize::from(index)] = None;
            }
        }
    }

    pub(crate) fn spawn(&mut self, servers: &[u16]) {
        for &index in servers {
            let incarnation = self.incarnations.entry(index).or_insert(0);
            *incarnation += 1;
            let id = ServerId { index, incarnation: *incarnation };
            self.view[usize::from(index)] = Some(Filler::Server(id));
            let process = Process::server(id, &self.job, self.now);
            self.start(process);
        }
        let when = self.now.after(self.net.delay(&mut self.random));
        self.net.local(when, Peer::CONDUCTOR, Input::View);
    }

    pub(crate) fn declared(&mut self, id: ServerId) {
        self.lost.insert(id);
        let newest = self.incarnations.get(&id.index).copied().unwrap_or(0);
        // A supervisor kills what was given up, or leaves it alone to come back one day.
        let absent = id.incarnation == 0 && self.faults.absent.contains(&id.index);
        let there = absent || self.processes.contains_key(&Peer::Server(id));
        if self.random.chance(50) {
            self.kill(Peer::Server(id));
        }
        if there && newest == id.incarnation {
            self.replace(&[id.index]);
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
