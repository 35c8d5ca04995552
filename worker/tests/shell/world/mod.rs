//! The simulated cluster: whose turn it is, what goes wrong, and whether everything is as it should be.
//!
//! In: a job and its faults. Out: an [`Outcome`], or what is wrong. Time goes from one happening to the next.

mod checks;
mod damage;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use cadre_control::proto::worker_message;
use cadre_exchange::{PeerId, Role};
use cadre_step::envelope::Ending;
use cadre_worker::io::After;

use crate::controller::Controller;
use crate::faults::Faults;
use crate::hostile::Hostile;
use crate::job::Job;
use crate::net::{Chore, Happening, Life, Net, Thread};
use crate::plans::Plans;
use crate::process::Process;
use crate::random::{Random, hash};
use crate::trainer::Want;
use crate::truth::Truth;

const SECOND: u64 = 1_000_000_000;
/// Longest time without progress once all faults are over: longer than any deadline of the protocol.
const PROGRESS_WITHIN: u64 = 150 * SECOND;
/// Turns of one IO thread within a millisecond for which nothing came over the exchange, and that are no spinning: 18 were the most
/// that were seen.
const MAX_IDLE_TURNS: u32 = 100;

/// How a scenario ended.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) steps: u64,
    pub(crate) failed: bool,
    pub(crate) lost: usize,
    pub(crate) happenings: u64,
    pub(crate) seconds: u64,
    /// Messages that found a full queue, and how often a sender heard of room after that.
    pub(crate) full: [u64; 2],
    /// Parcels whose rows were copied out of a landing to which others were still to come.
    pub(crate) copied: u64,
    /// Parts of dK or dV that were taken while others of their phase were pulled.
    pub(crate) parts: u64,
    /// Words that were pulled.
    pub(crate) words: u64,
    /// Pulls that went on where they had stopped, and those of them that found another publication.
    pub(crate) resumed: [u64; 2],
    /// Two steps were out in some process, and so many servers were lost while two were at the conductor.
    pub(crate) both: (bool, u64),
    /// Most turns of an IO thread within a millisecond for which nothing came over the exchange.
    pub(crate) turns: u32,
}

/// What a handler returns: `Err` is what is wrong.
pub(crate) type Checked = Result<(), String>;

/// See the module.
#[allow(clippy::struct_excessive_bools, reason = "what has happened so far, each on its own")]
pub(crate) struct World {
    pub(crate) job: Job,
    pub(crate) net: Rc<RefCell<Net>>,
    pub(crate) processes: BTreeMap<Life, Process>,
    /// By rank.
    pub(crate) trainers: Vec<Life>,
    pub(crate) controller: Controller,
    pub(crate) lost: BTreeSet<PeerId>,
    /// Steps that the conductor has reported.
    pub(crate) reports: u64,
    /// It has said that a step has no server.
    pub(crate) pool_lost: bool,
    /// What a member says that means harm, and whether its process was ended for it.
    pub(crate) hostile: Option<Hostile>,
    pub(crate) hostile_is_over: bool,
    truth: Truth,
    plans: Plans,
    pub(crate) faults: Faults,
    /// Trainers in the all-reduce, by step.
    reducing: BTreeMap<u64, Vec<Life>>,
    /// And when they were told.
    endings: BTreeMap<Life, (u64, Ending)>,
    killed: BTreeSet<Life>,
    conductor_killed: Option<u64>,
    conductor_left: Option<u64>,
    /// Steps that trainers have done when they end.
    steps_done: BTreeSet<u64>,
    pub(crate) both: (bool, u64),
    /// As in [`Outcome`].
    turns: u32,
    pub(crate) progress: u64,
    /// All trainers have done everything, since when.
    idle: Option<u64>,
    /// The job ends as soon as nothing is held, which is looked at now and then; else some time later.
    brief: bool,
    looked: u64,
    stopping: bool,
    dismissed: Option<u64>,
    happenings: u64,
    /// Who loses its power when the conductor plans next, and whose IO thread is late then.
    silent_at_plan: Option<u16>,
    late_plan: Option<Life>,
}

impl World {
    pub(crate) fn new(job: Job, faults: Faults, mut random: Random) -> Self {
        let hostile = job.is_hostile;
        let slowest = *random.pick(&[500_000, 5_000_000, 50_000_000]);
        let byte = *random.pick(&[1, 1, 10, 1_000]);
        let rdma = random.chance(50);
        let queue = *random.pick(&[8 << 20, 8 << 20, 64 << 10, 16 << 10]);
        let queue = job.queue.unwrap_or(queue);
        let mut net = Net::new(random);
        net.lasting = Random::new(hash(&[job.seed, 19])).chance(30);
        net.part = *Random::new(hash(&[job.seed, 67])).pick(&[1 << 20, 1 << 20, 2_000, 300]);
        net.repeats = *Random::new(hash(&[job.seed, 71])).pick(&[0, 0, 0, 5]);
        net.spies = hostile;
        (net.slowest, net.byte, net.rdma, net.queue) = (slowest, byte, rdma, queue);
        let mut world = Self {
            truth: Truth::new(job.clone()),
            plans: Plans::new(job.seed),
            net: Rc::new(RefCell::new(net)),
            processes: BTreeMap::new(),
            trainers: Vec::new(),
            controller: Controller::default(),
            lost: BTreeSet::new(),
            reports: 0,
            pool_lost: false,
            hostile: None,
            hostile_is_over: false,
            reducing: BTreeMap::new(),
            endings: BTreeMap::new(),
            killed: BTreeSet::new(),
            conductor_killed: None,
            conductor_left: None,
            steps_done: BTreeSet::new(),
            both: (false, 0),
            turns: 0,
            progress: 0,
            idle: None,
            brief: Random::new(hash(&[job.seed, 43])).chance(80),
            looked: 0,
            stopping: false,
            dismissed: None,
            happenings: 0,
            silent_at_plan: None,
            late_plan: None,
            faults,
            job,
        };
        world.assemble();
        for (index, fault) in world.faults.list.iter().enumerate() {
            world.net.borrow_mut().at(fault.0, Happening::Fault(index));
        }
        world
    }

    pub(crate) fn start(&mut self, id: PeerId) -> Life {
        let process = Process::new(&self.net, id, &self.job);
        let life = process.life;
        self.processes.insert(life, process);
        self.net.borrow_mut().wake(life);
        life
    }

    fn now(&self) -> u64 {
        self.net.borrow().now
    }

    /// Runs to the end.
    pub(crate) fn run(mut self) -> Result<Outcome, String> {
        while !self.processes.is_empty() {
            let Some(happening) = self.net.borrow_mut().pop() else {
                return Err("nothing happens".into());
            };
            self.happenings += 1;
            let now = self.now();
            if now > self.progress.max(self.faults.over) + PROGRESS_WITHIN
                && !self.end_stuck()
                && !self.end_hostile()
            {
                return Err(format!("no progress at {} ms: {}", now / 1_000_000, self.state()));
            }
            self.happen(happening)?;
            if let Some(wrong) = self.net.borrow_mut().wrong.take() {
                return Err(wrong);
            }
            self.advance()?;
        }
        let failed = self.endings.values().any(|it| matches!(it.1, Ending::Failed { .. }));
        Ok(Outcome {
            steps: self.reports,
            failed,
            lost: self.lost.len(),
            happenings: self.happenings,
            seconds: self.now() / SECOND,
            full: self.net.borrow().full,
            copied: self.net.borrow().copied,
            parts: self.net.borrow().parts,
            words: self.net.borrow().words,
            resumed: self.net.borrow().resumed,
            both: self.both,
            turns: self.turns,
        })
    }

    fn happen(&mut self, happening: Happening) -> Checked {
        match happening {
            Happening::Turn(life) => return self.turn(life),
            Happening::Timer(life) => {
                let now = self.now();
                let Some(process) = self.processes.get_mut(&life) else { return Ok(()) };
                if process.timer == Some(now) {
                    process.timer = None;
                    return self.turn(life);
                }
            }
            Happening::Thread(life, thread) => return self.thread(life, thread),
            Happening::Planned(life) => self.planned(life),
            Happening::Quits(life) => return self.quits(life),
            Happening::Told(life, message) => {
                if let Some(process) = self.processes.get(&life) {
                    process.told(*message);
                    self.net.borrow_mut().wake(life);
                }
            }
            Happening::Leave(life) => {
                if let Some(process) = self.processes.get(&life) {
                    process.leave();
                    self.net.borrow_mut().wake(life);
                }
            }
            Happening::Control(chore) => self.chore(chore),
            Happening::Fault(index) => self.fault(self.faults.list[index].1.clone()),
            Happening::Resume(life) => self.resume(life),
            Happening::Moves(life) => self.moves(life),
            Happening::Signal(signal) => self.net.borrow_mut().signal(signal),
        }
        Ok(())
    }

    fn is_paused(&self, life: Life) -> bool {
        self.net.borrow().endpoints[life].paused
    }

    fn turn(&mut self, life: Life) -> Checked {
        let now = self.now();
        if self.is_paused(life) {
            return Ok(());
        }
        let Some(process) = self.processes.get_mut(&life) else { return Ok(()) };
        if now < process.late_until {
            return Ok(());
        }
        let turned = process.turn(now);
        let millisecond = now / 1_000_000;
        let turns = if process.turns.0 == millisecond { process.turns.1 } else { 0 };
        let turns = turns + u32::from(turned.news == 0);
        process.turns = (millisecond, turns);
        self.turns = self.turns.max(turns);
        if turns > MAX_IDLE_TURNS {
            return Err(format!("{} spins at {millisecond} ms", process.id));
        }
        self.both.0 |= process.holdings()[2] > 1;
        if let Some(sleep) = turned.sleep {
            let when = now + (sleep.as_nanos() as u64).max(1);
            if process.timer.is_none_or(|it| it > when || it <= now) {
                process.timer = Some(when);
                self.net.borrow_mut().at(when, Happening::Timer(life));
            }
        }
        for (thread, woken) in [Thread::Main, Thread::Rescue].into_iter().zip(turned.woken) {
            if woken {
                self.schedule(life, thread, 20_000);
            }
        }
        for _ in 0..turned.headers {
            let most = self.job.linear;
            self.net.borrow_mut().soon(most, Happening::Planned(life));
        }
        let id = self.processes[&life].id;
        for report in turned.reports {
            // How it fares a server says all the time, and how fast rows come each that comes in place of another.
            use worker_message::Message::{Probed, ServerReport};
            if !matches!(report.message, Some(ServerReport(_) | Probed(_))) {
                self.progress = self.progress.max(now);
            }
            self.reported(life, report)?;
        }
        if let Some(after) = turned.after {
            self.learns(life, &after);
            if id.role == Role::Server && !self.controller.over {
                remark(format_args!("{id} leaves: {after:?}"));
            }
            let (most, chore) = match after {
                // The other job is over some time later.
                After::Again => (SECOND, Chore::Return(id)),
                After::Leave | After::Failed { .. } => (2_000_000, Chore::Gone(life)),
            };
            self.net.borrow_mut().soon(most, Happening::Control(chore));
            self.end(life, false);
        }
        Ok(())
    }

    fn schedule(&mut self, life: Life, thread: Thread, most: u64) {
        let Some(process) = self.processes.get_mut(&life) else { return };
        let scheduled = &mut process.scheduled[thread as usize];
        if !std::mem::replace(scheduled, true) {
            self.net.borrow_mut().soon(most, Happening::Thread(life, thread));
        }
    }

    fn thread(&mut self, life: Life, thread: Thread) -> Checked {
        let paused = self.is_paused(life);
        let Some(process) = self.processes.get_mut(&life) else { return Ok(()) };
        process.scheduled[thread as usize] = false;
        if process.stands && thread == Thread::Main {
            return Ok(());
        }
        if paused {
            process.missed[thread as usize] = true;
            return Ok(());
        }
        let id = process.id;
        // What a server has measured such a link with, and words wait behind, comes for longer than it waits for a word.
        let crawls = self.net.borrow().byte << 22 > 60 * SECOND;
        let want = match process.run(thread, &self.job, &mut self.truth) {
            Err(why) if self.hostile.as_ref().is_some_and(|it| it.may_break(id, &why)) => {
                remark(format_args!("{id} ends: {why}"));
                self.kill(life, false);
                return Ok(());
            }
            Err(why) if crawls && why.contains("does not come, not a byte in") => {
                remark(format_args!("{id} ends: {why}"));
                self.kill(life, false);
                return Ok(());
            }
            want => want?,
        };
        let now = self.now();
        match want {
            Want::News => {}
            Want::Launch => self.schedule(life, thread, self.job.launch),
            Want::Linear => {
                self.progress = self.progress.max(now);
                self.schedule(life, thread, self.job.linear);
            }
            Want::Reduce(step) => {
                self.progress = self.progress.max(now);
                let here = self.reducing.entry(step).or_default();
                here.push(life);
                if here.len() == usize::from(self.job.trainers) || !self.job.reduces {
                    let here = self.reducing.remove(&step).expect("just seen");
                    for life in here {
                        if let Some(main) = self.processes.get_mut(&life).and_then(Process::main) {
                            main.reduced(&self.job);
                        }
                        self.net.borrow_mut().wake(life);
                        self.schedule(life, Thread::Main, self.job.linear);
                    }
                }
            }
            Want::Quit => {
                let process = self.processes.get_mut(&life).expect("it has just run");
                process.scheduled[Thread::Main as usize] = true;
                let mut net = self.net.borrow_mut();
                let when = net.now + net.random.within(0, 7 * SECOND / 2);
                net.at(when, Happening::Quits(life));
            }
            Want::Left(ending) => {
                self.progress = self.progress.max(now);
                self.left(life, ending)?;
                self.net.borrow_mut().soon(200_000_000, Happening::Leave(life));
                // Nothing of it runs again.
                if let Some(process) = self.processes.get_mut(&life) {
                    process.scheduled[Thread::Main as usize] = true;
                }
                return Ok(());
            }
        }
        self.net.borrow_mut().wake(life);
        Ok(())
    }
}

/// Prints what a scenario that is run alone does.
pub(crate) fn remark(words: std::fmt::Arguments<'_>) {
    if std::env::var_os("CADRE_SHOW").is_some() {
        println!("{words}");
    }
}
