//! Faults happen here.
//!
//! In: what was drawn. Out: processes that are gone or do nothing, links that are broken.

use std::time::Duration;

use cadre_exchange::Role;
use cadre_step::envelope::Ending;

use super::{Checked, SECOND, World};
use crate::faults::{Fault, Who};
use crate::net::{Chore, Cut, Happening, Life, Thread};
use crate::process::Process;

impl World {
    pub(crate) fn kill(&mut self, life: Life, silently: bool) {
        if self.processes.contains_key(&life) {
            self.killed.insert(life);
            if self.trainers.first() == Some(&life) {
                self.conductor_killed = Some(self.now());
            }
            self.end(life, silently);
            // Whoever has started it sees it, unless the whole machine is gone.
            let most = if silently { 2 * SECOND } else { 50_000_000 };
            self.net.borrow_mut().soon(most, Happening::Control(Chore::Gone(life)));
        }
    }

    /// A process is gone.
    pub(super) fn end(&mut self, life: Life, silently: bool) {
        if self.trainers.first() == Some(&life) {
            self.conductor_left = Some(self.now());
        }
        self.processes.remove(&life);
        self.net.borrow_mut().die(life, silently);
    }

    /// The newest life of a process.
    pub(crate) fn newest(&self, (role, index): Who) -> Option<Life> {
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
                    let since = net.now;
                    net.cuts.push(Cut { ends: (a, b), since, until, silent });
                    if !silent {
                        net.break_links(a, b, [true; 2]);
                    }
                }
            }
            Fault::Dry(a, b, pulled) => {
                if let (Some(a), Some(b)) = (self.newest(a), self.newest(b)) {
                    self.net.borrow_mut().dry.push((a, b, pulled));
                }
            }
            Fault::Silent(index) => self.silent_at_plan = Some(index),
            Fault::Spoil(who, byte) => {
                if let Some(life) = self.newest(who) {
                    self.net.borrow_mut().spoilt = Some((life, byte));
                }
            }
            Fault::Replace(indices) => self.replace(&indices),
            Fault::Add => self.add(),
            Fault::Speak(who, count) => self.speak(who, count),
            Fault::Crawl(byte) => self.net.borrow_mut().byte = byte,
            Fault::Drain(index) => self.terminate((Role::Server, index)),
            Fault::Terminate(rank) => self.terminate((Role::Trainer, rank)),
            Fault::Lend(index) => self.lend(index),
            Fault::Stop => self.stop(),
            Fault::Away(span) => self.controller.away_until = self.now() + span,
            Fault::Stand(rank, span) => {
                let newest = self.newest((Role::Trainer, rank));
                let longest = self.job.stalled().0 / 3;
                let Some(process) = newest.and_then(|it| self.processes.get_mut(&it)) else {
                    return;
                };
                process.stands = true;
                let main = process.main().filter(|it| it.is_awaited());
                let span = match (span, main) {
                    (Some(span), Some(main)) if span > longest => {
                        main.session.busy(Duration::from_nanos(span));
                        Some(span)
                    }
                    (span, _) => span.map(|it| it.min(longest)),
                };
                if let Some(span) = span {
                    let when = self.now() + span;
                    self.net.borrow_mut().at(when, Happening::Moves(newest.expect("just seen")));
                }
            }
        }
    }

    /// A process is asked to end.
    fn terminate(&mut self, who: Who) {
        if let Some(life) = self.newest(who) {
            self.processes[&life].terminate();
            self.net.borrow_mut().wake(life);
        }
    }

    /// The thread that plans has a plan.
    pub(super) fn planned(&mut self, life: Life) {
        if self.is_paused(life) {
            return self.net.borrow_mut().soon(SECOND, Happening::Planned(life));
        }
        let Some(process) = self.processes.get_mut(&life) else { return };
        if process.plans_own()
            && let Some(index) = self.silent_at_plan.take()
            && let Some(server) = self.newest((Role::Server, index))
        {
            self.kill(server, true);
            self.late_plan = Some(life);
            // It said its last word up to a heartbeat ago.
            let mut net = self.net.borrow_mut();
            let early = net.random.within(0, SECOND / 4);
            let when = net.now + self.job.settings.suspect_after.0 - early;
            return net.at(when, Happening::Planned(life));
        }
        let process = self.processes.get_mut(&life).expect("just seen");
        process.plan(&mut self.plans);
        let mut net = self.net.borrow_mut();
        if self.late_plan.take_if(|it| *it == life).is_none() {
            return net.wake(life);
        }
        // The IO thread comes to it a bit later: for less long than would be a pause.
        process.late_until = net.now + net.random.within(0, SECOND / 4);
        net.at(process.late_until, Happening::Turn(life));
    }

    /// A trainer leaves between two steps; others do so seconds before or after it.
    pub(super) fn quits(&mut self, life: Life) -> Checked {
        let Some(process) = self.processes.get_mut(&life) else { return Ok(()) };
        let ending = process.main().and_then(|it| it.session.ending(Duration::ZERO));
        self.progress = self.now();
        self.left(life, ending.unwrap_or(Ending::Completed))?;
        self.net.borrow_mut().soon(SECOND / 5, Happening::Leave(life));
        Ok(())
    }

    /// A main thread that stood still goes on.
    pub(super) fn moves(&mut self, life: Life) {
        if let Some(process) = self.processes.get_mut(&life) {
            process.stands = false;
            self.net.borrow_mut().wake(life);
            self.schedule(life, Thread::Main, 20_000);
        }
    }

    /// The job has failed: whoever has started the processes ends those that stand still.
    pub(crate) fn end_standing(&mut self) {
        let standing = self.processes.values().filter(|it| it.stands).map(|it| it.life);
        for life in standing.collect::<Vec<_>>() {
            self.kill(life, false);
        }
    }

    /// Processes end that nobody else ends; whether there are any.
    pub(super) fn end_stuck(&mut self) -> bool {
        let stuck = self.processes.values().filter(|it| it.is_stuck()).map(|it| it.life);
        let stuck: Vec<_> = stuck.collect();
        for &life in &stuck {
            self.kill(life, false);
            self.progress = self.now();
        }
        !stuck.is_empty()
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
