//! Faults happen here.
//!
//! In: what was drawn. Out: processes that are gone or do nothing, links that are broken.

use cadre_exchange::Role;

use super::{SECOND, World};
use crate::faults::{Fault, Who};
use crate::net::{Chore, Cut, Happening, Life, Thread};
use crate::process::Process;

impl World {
    pub(crate) fn kill(&mut self, life: Life, silently: bool) {
        if self.processes.contains_key(&life) {
            self.killed.insert(life);
            self.end(life, silently);
            // Whoever has started it sees it, unless the whole machine is gone.
            let most = if silently { 2 * SECOND } else { 50_000_000 };
            self.net.borrow_mut().soon(most, Happening::Control(Chore::Gone(life)));
        }
    }

    /// The newest life of a process.
    pub(super) fn newest(&self, (role, index): Who) -> Option<Life> {
        let is = |it: &&Process| (it.id.role, it.id.index) == (role, index);
        self.processes.values().rev().find(is).map(|it| it.life)
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { who, silently } => {
                for life in who.into_iter().filter_map(|it| self.newest(it)).collect::<Vec<_>>() {
                    self.kill(life, silently);
                }
            }
            Fault::Pause(who, span) => {
                for life in who.into_iter().filter_map(|it| self.newest(it)).collect::<Vec<_>>() {
                    let mut net = self.net.borrow_mut();
                    net.pause(life);
                    let when = net.now + span;
                    net.at(when, Happening::Resume(life));
                }
            }
            Fault::Blip(a, b, heard) => {
                if let (Some(a), Some(b)) = (self.newest(a), self.newest(b)) {
                    self.net.borrow_mut().break_links(a, b, heard);
                }
            }
            Fault::Cut(a, b, span, silent) => {
                if let (Some(a), Some(b)) = (self.newest(a), self.newest(b)) {
                    let mut net = self.net.borrow_mut();
                    let until = net.now + span;
                    net.cuts.push(Cut { ends: (a, b), until, silent });
                    if !silent {
                        net.break_links(a, b, [true; 2]);
                    }
                }
            }
            Fault::Replace(indices) => self.replace(&indices),
            Fault::Add => self.add(),
            Fault::Crawl(byte) => self.net.borrow_mut().byte = byte,
            Fault::Drain(index) => {
                if let Some(life) = self.newest((Role::Server, index)) {
                    self.processes[&life].terminate();
                    self.net.borrow_mut().wake(life);
                }
            }
            Fault::Lend(index) => self.lend(index),
            Fault::Away(span) => self.controller.away_until = self.now() + span,
        }
    }

    /// A process that is paused goes on; of two pauses that overlap the first end counts.
    pub(super) fn resume(&mut self, life: Life) {
        if !self.net.borrow().endpoints[life].paused {
            return;
        }
        self.net.borrow_mut().resume(life);
        let Some(process) = self.processes.get_mut(&life) else { return };
        process.timer = None;
        for thread in [Thread::Main, Thread::Rescue] {
            let Some(process) = self.processes.get_mut(&life) else { return };
            if std::mem::take(&mut process.missed[thread as usize]) {
                self.schedule(life, thread, 20_000);
            }
        }
    }
}
