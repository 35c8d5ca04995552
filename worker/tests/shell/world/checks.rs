//! What has to hold, and what follows from where everybody is.
//!
//! In: the world after every happening, and the ends of trainers. Out: what is wrong; the end of a job that has nothing left to do.

use cadre_exchange::{PeerId, Role};
use cadre_protocol::OnPoolLoss;
use cadre_step::envelope::Ending;
use cadre_worker::io::After;

use super::{Checked, SECOND, World};
use crate::faults::{Fault, Pulled};
use crate::net::Life;
use crate::process::Process;

/// So long a trainer may take to end whose conductor has died.
const ALONE: u64 = 3 * SECOND;
/// A server whose controller has let it go says its last words within 8 s.
const STAYS: u64 = 11 * SECOND;

/// So long the conductor says how the job ends to who does not answer.
const LAST_WORDS: u64 = 2 * SECOND;
/// A server that nobody listens to any more ends after `conductor_after`, and says its last words.
const GIVEN_UP: u64 = 35 * SECOND;

/// After the last step nobody holds anything any more.
const EMPTY_WITHIN: u64 = 15 * SECOND;

/// The conductor's process leaves so soon after the first trainer was told the end: 2 to 8 s of last words, and some turns.
const LEAVES: u64 = 9 * SECOND;
/// Whoever is cut off for less than that hears the last words.
const MISSED_WORDS: u64 = SECOND / 2;

impl World {
    /// A trainer was told how the job ends.
    pub(super) fn left(&mut self, life: Life, ending: Ending) -> Checked {
        let id = self.processes[&life].id;
        if let Ending::Failed { reason, .. } = &ending {
            let here = |it: &Life| self.killed.contains(it);
            let trainer_died = self.trainers.iter().any(here);
            let policy = self.job.settings.on_pool_loss;
            // A trainer that refuses links is as good as dead, for whoever cannot look into its machine.
            let cut_off = self.trainers_apart();
            let for_good = |it: &Fault| matches!(it, Fault::Stand(_, None));
            let fine = if self.job.quits_after > 0 && reason.contains("has left") {
                true
            } else if reason.contains("rank") && reason.contains("has not") {
                self.faults.list.iter().any(|it| for_good(&it.1))
            } else if reason.contains("do not get rows of each other") {
                cut_off || self.lacks_results()
            } else if reason.contains(" dead;") || reason.contains("conductor") {
                trainer_died || cut_off || reason.contains("nothing heard") && self.has_slept(life)
            } else if reason.contains("cannot reach") {
                let is_cut = |it: &(u64, Fault)| matches!(it.1, Fault::Cut(..));
                self.faults.list.iter().any(is_cut) || self.lacks_results()
            } else if reason.contains("does not come, not a byte in") {
                let words = |it: &Fault| matches!(it, Fault::Dry(_, _, Pulled::Words));
                self.faults.list.iter().any(|it| words(&it.1))
            } else if reason.contains("came with another digest") {
                self.faults.list.iter().any(|it| matches!(it.1, Fault::Spoil(..)))
            } else if reason.contains("no attention server is left") {
                !self.faults.list.is_empty() && policy != OnPoolLoss::Local && !self.job.in_place
            } else {
                false
            };
            let lied = self.hostile.as_ref().is_some_and(|it| it.explains(reason));
            if !fine && !lied {
                return Err(format!("{id} ended the job: {reason}"));
            }
        }
        // Whoever is asked to end does not wait for a conductor that is not there.
        let asked = |it: &&(u64, Fault)| matches!(it.1, Fault::Terminate(rank) if rank == id.index);
        let asked = self.faults.list.iter().find(asked).map(|it| it.0);
        if let Some(asked) = asked.filter(|_| self.killed.contains(&self.trainers[0]))
            && self.now() > asked + ALONE
        {
            let late = (self.now() - asked) / 1_000_000;
            return Err(format!("{id} ends {late} ms after it was asked to"));
        }
        let failed = matches!(ending, Ending::Failed { .. });
        let stopped = matches!(ending, Ending::Stopped { .. });
        if let Some(main) = self.processes.get_mut(&life).and_then(Process::main) {
            self.steps_done.insert(main.step);
            // A stop counts after the last step that is out, but for one that lacks servers.
            if stopped && main.is_in_a_step() && !self.pool_lost && self.hostile.is_none() {
                return Err(format!("{id} is stopped in {}", main.state()));
            }
        }
        self.endings.insert(life, (self.now(), ending));
        if failed {
            self.end_standing();
        }
        Ok(())
    }

    /// Trainer 0 may have left as one whose job is complete, and learns that it is not.
    pub(super) fn learns(&mut self, life: Life, after: &After) {
        if let After::Failed { reason, bad_input } = after
            && self.processes[&life].id == PeerId::trainer(0, 0)
        {
            let failed = Ending::Failed { reason: reason.clone(), bad_input: *bad_input };
            self.endings.insert(life, (self.now(), failed));
        }
    }

    /// Whether results of somebody do not come to somebody.
    fn lacks_results(&self) -> bool {
        let lacks = |it: &Fault| matches!(it, Fault::Dry(_, _, Pulled::Results));
        self.faults.list.iter().any(|it| lacks(&it.1))
    }

    /// Whether two trainers are cut off from each other for a while.
    fn trainers_apart(&self) -> bool {
        self.faults
            .list
            .iter()
            .any(|it| matches!(it.1, Fault::Cut((Role::Trainer, _), (Role::Trainer, _), _, _)))
    }

    /// Where everybody is, for whoever looks for the reason.
    pub(super) fn state(&mut self) -> String {
        let mut words = Vec::new();
        for process in self.processes.values_mut() {
            let [rows, results, steps, pulls] = process.holdings();
            let paused = self.net.borrow().endpoints[process.life].paused;
            let main = process.main().map(|it| it.state());
            words.push(format!(
                "{}{}{}: {rows} rows, {results} results, {steps} steps, {pulls} pulls",
                process.id,
                if paused { " (paused)" } else { "" },
                main.map_or(String::new(), |it| format!(" in {it}")),
            ));
        }
        words.join("; ")
    }

    /// What follows from where everybody is.
    pub(super) fn advance(&mut self) -> Checked {
        let now = self.now();
        if let Some(since) = self.dismissed {
            let paused = |it: &&Process| self.net.borrow().endpoints[it.life].paused;
            if now > since.max(self.faults.over) + STAYS
                && let Some(process) = self.processes.values().find(|it| !paused(it))
            {
                return Err(format!("{} stays after the job", process.id));
            }
            return Ok(());
        }
        let gone = |it: &Life| self.endings.contains_key(it) || !self.processes.contains_key(it);
        let some_ended = !self.endings.is_empty() || !self.killed.is_empty();
        if some_ended && self.trainers.iter().all(gone) {
            self.dismissed = Some(now);
            self.dismiss();
            return self.check_endings();
        }
        if !self.job.stopped || self.stopping {
            return Ok(());
        }
        let is_idle = |life: &Life| {
            self.processes.get_mut(life).and_then(Process::main).is_some_and(|it| it.is_idle())
        };
        if !self.trainers.iter().all(is_idle) {
            return Ok(());
        }
        let since = *self.idle.get_or_insert(now);
        self.progress = self.progress.max(since);
        // A server measures 4 MiB of one trainer after the other, each for 10 s at most.
        let one = (self.net.borrow().byte << 23).min(10 * SECOND);
        let measured = u64::from(self.job.trainers) * one;
        let over = since.max(self.faults.over);
        // Time enough to say the last words, and to hear those of others.
        let given_up = |it: &Process| self.is_given_up(it);
        let patience = if self.processes.values().any(given_up) { GIVEN_UP } else { EMPTY_WITHIN };
        let last = now > over.max(measured) + patience;
        let looks = self.brief && now > over.max(self.looked) + SECOND;
        if looks {
            self.looked = now;
        }
        if last || looks {
            match self.check_holdings(last) {
                Err(_) if !last => return Ok(()),
                // What it pulls comes in order, and of a link that began to crawl in the middle it comes for minutes.
                Err(_) if self.net.borrow().is_measuring() => {}
                held => held?,
            }
            self.stopping = true;
            self.stop();
        }
        Ok(())
    }

    /// Whether a server is in no view any more. Where others took its name, nobody listens to it: it learns so by the silence.
    fn is_given_up(&self, process: &Process) -> bool {
        process.id.role == Role::Server && !self.controller.offers(process.life)
    }

    /// Whether anybody holds anything: `last` also whoever was given up.
    fn check_holdings(&self, last: bool) -> Checked {
        for process in self.processes.values() {
            let net = self.net.borrow();
            // Who is said to have every phase, or hears of none from the conductor, keeps what it has.
            let conductor = PeerId::trainer(0, 0);
            let excused = self
                .hostile
                .as_ref()
                .is_some_and(|it| it.speaks_for(process.id) || it.speaks_for(conductor));
            if excused || !last && self.is_given_up(process) || net.endpoints[process.life].paused {
                continue;
            }
            let (held, mut wires) = (process.holdings(), net.holdings(process.life));
            if let Some(hostile) = &self.hostile {
                // Words stay published for whoever never says that it has heard them; one that is said to be published and is not
                // is asked for again and again, one of each name.
                let names = hostile.voices();
                wires = (0, wires.1.saturating_sub(names), wires.2.saturating_sub(names));
            }
            if held != [0; 4] || wires != (0, 0, 0) {
                return Err(format!(
                    "{} holds rows, results, steps, pulls {held:?} and regions, landings, pulls {wires:?} \
                     after the last step, and owes words to {:?}",
                    process.id,
                    process.owes()
                ));
            }
        }
        Ok(())
    }

    pub(super) fn check_endings(&self) -> Checked {
        let told = |it: &Life| Some((*it, self.endings.get(it)?));
        let here: Vec<_> = self.trainers.iter().filter_map(told).collect();
        if here.len() < self.trainers.len() && self.killed.is_empty() {
            return Err("a trainer is gone, and nobody has killed it".into());
        }
        if self.hostile.is_some() {
            // Some may have heard a lie just before the end, or may hear none for it.
            return Ok(());
        }
        let is_good = |it: &Ending| !matches!(it, Ending::Failed { .. });
        let good = here.iter().filter(|it| is_good(&it.1.1)).count();
        // The others heard no less, but for those that nobody could tell.
        let first = here.iter().filter(|it| is_good(&it.1.1)).map(|it| it.1.0).min();
        let fine = |(life, (_, ending)): &(Life, &(u64, Ending))| {
            is_good(ending) || first.is_some_and(|it| self.is_untold(*life, ending, it))
        };
        if good > 0 && !here.iter().all(fine) {
            return Err(format!("trainers end differently: {here:?}"));
        }
        if good == 0 {
            return Ok(());
        }
        // Where a stop finds the pool lost, it does not wait for the end of a step that lacks servers; of others it does.
        let is_cut = self.faults.list.iter().any(|it| matches!(it.1, Fault::Stop));
        let missed = self.job.moments.iter().find(|it| !self.controller.reached.contains(it));
        // Nor for the watermark of a step that some trainer has done.
        let cut_short = 2 * u64::from(is_cut && self.pool_lost);
        if let Some(missed) = missed.filter(|it| !is_cut || it.step + cut_short < self.reports) {
            return Err(format!("the controller was never told of {missed:?}"));
        }
        let steps = self.job.quits.unwrap_or(self.job.steps);
        let (reports, done) = (self.reports, &self.steps_done);
        // Trainers that sum nothing do not wait for each other: some may have done the step that lacks servers, others not.
        let apart = 2 * u64::from(is_cut && self.pool_lost && !self.job.reduces);
        let fits = reports.saturating_sub(apart)..=reports + apart;
        let alike = done.iter().all(|it| fits.contains(it));
        // What no trainer has done is not reported.
        let too_many = done.last().is_some_and(|it| *it < reports);
        if reports < steps && !is_cut || done.is_empty() || !alike || too_many {
            return Err(format!(
                "{reports} of {steps} steps were reported, trainers have done {done:?}"
            ));
        }
        Ok(())
    }

    /// Whether a trainer was stopped for longer than the conductor says how the job ends, and others have heard it.
    fn has_slept(&self, life: Life) -> bool {
        let Some(index) = self.trainers.iter().position(|it| *it == life) else { return false };
        let me = (Role::Trainer, index as u16);
        let sleeps = |it: &Fault| matches!(it, Fault::Pause(who, span) if *span > LAST_WORDS && who.contains(&me));
        !self.endings.is_empty() && self.faults.list.iter().any(|it| sleeps(&it.1))
    }

    /// Whether a trainer could not be told the end, which others heard at `first`: the conductor was killed just then, or the two
    /// were cut off from each other for a good part of the time in which it says its last words.
    fn is_untold(&self, life: Life, ending: &Ending, first: u64) -> bool {
        let heard_nothing =
            matches!(ending, Ending::Failed { reason, .. } if reason.contains("nothing heard"));
        let conductor = self.trainers[0];
        // It stays as long as somebody hears one word after the other.
        let left = self.conductor_left.map_or(first + LEAVES, |it| it.min(first + LEAVES));
        let killed = self.conductor_killed.is_some_and(|it| it <= left);
        let net = self.net.borrow();
        let cut = net.cuts.iter().any(|it| {
            let between = it.ends == (conductor, life) || it.ends == (life, conductor);
            between && it.since <= left && it.until >= it.since.max(first) + MISSED_WORDS
        });
        heard_nothing && (killed || cut || self.has_slept(life))
    }
}
