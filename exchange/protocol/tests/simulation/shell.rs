//! The shells: inputs become events of the machines, and their commands happen.

use std::collections::VecDeque;
use std::sync::Arc;

use cadre_protocol::{Audience, Message, Nanos, Peer, TrainerId, conductor, server, trainer};

use crate::net::{Flight, Input, Machine, What};
use crate::process::Process;
use crate::world::{Checked, World};

impl World {
    /// Prints what happens, if `CADRE_TRACE` asks for it.
    fn trace(&self, peer: Peer, what: &dyn std::fmt::Debug) {
        if self.trace {
            println!("{:>10} {peer}: {what:?}", self.now.0 / 1000);
        }
    }

    pub(crate) fn input(
        &mut self,
        process: &mut Process,
        input: Input,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        match input {
            Input::Message { from, message } => self.message(process, from, message, local),
            Input::Header(step) => self.begin(process, step, local),
            Input::Pulled { machine: Machine::Trainer, pull, result } => {
                let found = result.map(|it| it.0);
                let event = trainer::Event::Pulled { pull, result: found };
                process.value = result.ok().map(|it| it.1);
                self.trainer_event(process, event, local)
            }
            Input::Pulled { machine: Machine::Server, pull, result } => {
                let found = result.map(|it| it.0);
                let event = server::Event::Pulled { pull, result: found };
                process.value = result.ok().map(|it| it.1);
                self.server_event(process, event, local)
            }
            Input::Closed(peer) => {
                self.trainer_event(process, trainer::Event::Closed(peer), local)?;
                self.server_event(process, server::Event::Closed(peer), local)?;
                self.conductor_event(process, conductor::Event::Closed(peer), local)
            }
            Input::Ran { at, works } => {
                let shell = process.server.as_mut().expect("only servers launch");
                shell.ran(&self.job, at, &works);
                self.server_event(process, server::Event::Ran { at, works }, local)
            }
            Input::Go => self.go(process, local),
            Input::View => {
                let view = self.view.clone();
                self.conductor_event(process, conductor::Event::View(view), local)
            }
            Input::Lengths(step) => {
                let phases = self.job.phases(step);
                self.conductor_event(process, conductor::Event::HeaderReady { step, phases }, local)
            }
        }
    }

    pub(crate) fn message(
        &mut self,
        process: &mut Process,
        from: Peer,
        message: Message,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        if let Message::Watermark { at } | Message::Pulse { watermark: Some(at), .. } = &message {
            process.told = process.told.max(Some(*at));
        }
        let audience = message.audience();
        if matches!(audience, Audience::Trainer | Audience::Members) {
            let message = message.clone();
            self.trainer_event(process, trainer::Event::Message { from, message }, local)?;
        }
        if matches!(audience, Audience::Server | Audience::Members) {
            let message = message.clone();
            self.server_event(process, server::Event::Message { from, message }, local)?;
        }
        if audience == Audience::Conductor {
            self.conductor_event(process, conductor::Event::Message { from, message }, local)?;
        }
        Ok(())
    }

    fn begin(
        &mut self,
        process: &mut Process,
        step: u64,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let running = process.steps.entry(step).or_insert_with(|| self.headers[&step].clone());
        let made = Arc::clone(&running.step);
        if let Some(shell) = &mut process.trainer {
            shell.begun.insert(step);
            let pause = Nanos(self.random.within(10_000, 1_000_000));
            self.net.local(self.now.after(pause), process.peer, Input::Go);
        }
        self.trainer_event(process, trainer::Event::Begin(made.clone()), local)?;
        self.server_event(process, server::Event::Begin(made), local)
    }

    fn go(&mut self, process: &mut Process, local: &mut VecDeque<Message>) -> Checked {
        let Some(shell) = &mut process.trainer else { return Ok(()) };
        let finished = &self.finished;
        let (all, barrier) = (self.job.trainers, self.job.all_reduce);
        let barrier = |step| !barrier || finished.get(&step) == Some(&all);
        if let Some(at) = shell.may_go(&self.job, barrier) {
            shell.submit(&self.job, at)?;
            let pause = Nanos(self.random.within(10_000, 1_000_000));
            self.net.local(self.now.after(pause), process.peer, Input::Go);
            self.trainer_event(process, trainer::Event::Submitted(at), local)?;
        }
        Ok(())
    }

    pub(crate) fn trainer_event(
        &mut self,
        process: &mut Process,
        event: trainer::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.trace(process.peer, &event);
            let Some(shell) = &mut process.trainer else { return Ok(()) };
            let mut commands = Vec::new();
            shell.machine.handle(self.now, event, &mut commands);
            for command in commands {
                self.trace(process.peer, &command);
                let Some(shell) = &mut process.trainer else { return Ok(()) };
                match command {
                    trainer::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    trainer::Command::Pull { pull, peer, at, work, deadline } => {
                        let what = What::Result(at, work);
                        let (by, machine) = (process.peer, Machine::Trainer);
                        let flight = Flight { by, machine, pull, from: peer, what };
                        self.net.pull(self.now, &mut self.random, flight, deadline);
                    }
                    trainer::Command::Accept { at, work, .. } => {
                        let value = process.value.ok_or("a failed pull was accepted")?;
                        shell.accept(&self.job, at, work, value)?;
                    }
                    trainer::Command::Complete(at) => {
                        let step = shell.whole(&self.job, at)?.then_some(at.step);
                        self.completed(process.peer, step);
                    }
                    trainer::Command::Release(at) => {
                        shell.release(at);
                        self.net.local(self.now, process.peer, Input::Go);
                    }
                    trainer::Command::Discard { .. } | trainer::Command::StepOver(_) => {}
                    trainer::Command::Reassign { step, tables, .. } => {
                        let running = process.steps.get_mut(&step).ok_or("no such step")?;
                        let table = self.job.table(running, &tables);
                        let table = table.map_err(|_| "a round that was sent has no place")?;
                        events.push_back(trainer::Event::Round(table));
                    }
                    trainer::Command::Close(peer) => {
                        self.net.close(self.now, &mut self.random, process.peer, peer);
                    }
                    trainer::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
        }
        Ok(())
    }

    /// A trainer has a whole phase: its next one may go. If its step is the last one to be whole, the
    /// all-reduce lets everybody go.
    fn completed(&mut self, peer: Peer, step: Option<u64>) {
        let pause = Nanos(self.random.within(10_000, 1_000_000));
        let when = self.now.after(pause);
        self.net.local(when, peer, Input::Go);
        if let Some(step) = step {
            let finished = self.finished.entry(step).or_insert(0);
            *finished += 1;
            if *finished == self.job.trainers {
                for id in (0..self.job.trainers).map(TrainerId) {
                    self.net.local(when, Peer::Trainer(id), Input::Go);
                }
            }
        }
    }

    pub(crate) fn server_event(
        &mut self,
        process: &mut Process,
        event: server::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.trace(process.peer, &event);
            let Some(shell) = &mut process.server else { return Ok(()) };
            let mut commands = Vec::new();
            shell.machine.handle(self.now, event, &mut commands);
            for command in commands {
                self.trace(process.peer, &command);
                let Some(shell) = &mut process.server else { return Ok(()) };
                match command {
                    server::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    server::Command::Pull { pull, peer, at, parcel, deadline } => {
                        shell.pull(&self.job, pull, at, parcel)?;
                        let (by, machine) = (process.peer, Machine::Server);
                        let (from, what) = (Peer::Trainer(peer), What::Rows(at, parcel));
                        let flight = Flight { by, machine, pull, from, what };
                        self.net.pull(self.now, &mut self.random, flight, deadline);
                    }
                    server::Command::Accept { pull, at, parcel } => {
                        if process.told >= Some(at) {
                            return Err(format!("{} took rows of passed {at:?}", process.peer));
                        }
                        let value = process.value.ok_or("a failed pull was accepted")?;
                        shell.accept(pull, at, parcel, value)?;
                    }
                    server::Command::Discard { pull } => shell.discard(pull),
                    server::Command::Ready { at, work } => shell.ready(&self.job, at, work)?,
                    server::Command::Ahead { at, works } => {
                        shell.ahead(&self.job, at, &works)?;
                        self.ahead += works.len();
                    }
                    server::Command::Cancel(at) => {
                        let works = shell.cancel(at);
                        if !works.is_empty() {
                            // Not computed: their results are freed as they are.
                            events.push_back(server::Event::Ran { at, works });
                        }
                    }
                    server::Command::FreeInput { at, parcel } => {
                        shell.free_input(&self.job, at, parcel)?;
                    }
                    server::Command::FreeResult { at, work } => {
                        shell.free_result(&self.job, at, work)?;
                    }
                    server::Command::StepOver(_) => {}
                    server::Command::Reassign { step, tables, .. } => {
                        let running = process.steps.get_mut(&step).ok_or("no such step")?;
                        let table = self.job.table(running, &tables);
                        let table = table.map_err(|_| "a round that was sent has no place")?;
                        events.push_back(server::Event::Round(table));
                    }
                    server::Command::Close(peer) => {
                        self.net.close(self.now, &mut self.random, process.peer, peer);
                    }
                    server::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
            let most = self.random.within(1, 3) as usize;
            if let Some((at, works)) = process.server.as_mut().and_then(|it| it.launch(most)) {
                let span = Nanos(self.random.within(10_000, 800_000));
                let when = self.now.after(span);
                self.net.local(when, process.peer, Input::Ran { at, works });
            }
        }
        Ok(())
    }

    pub(crate) fn conductor_event(
        &mut self,
        process: &mut Process,
        event: conductor::Event,
        local: &mut VecDeque<Message>,
    ) -> Checked {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.trace(process.peer, &event);
            let Some(machine) = &mut process.conductor else { return Ok(()) };
            let mut commands = Vec::new();
            machine.handle(self.now, event, &mut commands);
            for command in commands {
                self.trace(process.peer, &command);
                match command {
                    conductor::Command::Publish { step, fillers } => {
                        let Some(running) = self.job.step(step, &fillers) else {
                            self.headers.remove(&step);
                            let proposal = conductor::HEADER;
                            events.push_back(conductor::Event::Unplaceable { step, proposal });
                            continue;
                        };
                        if step + 1 < self.job.steps && !self.headers.contains_key(&step) {
                            let when = self.now.after(Nanos(self.random.within(10_000, 3_000_000)));
                            self.net.local(when, Peer::CONDUCTOR, Input::Lengths(step + 1));
                        }
                        self.headers.insert(step, running);
                    }
                    conductor::Command::Header { step, .. }
                        if !self.headers.contains_key(&step) => {}
                    conductor::Command::Header { step, to } if to == process.peer => {
                        self.net.local(self.now, to, Input::Header(step));
                    }
                    conductor::Command::Header { step, to } => {
                        let input = Input::Header(step);
                        self.net.send(self.now, &mut self.random, process.peer, to, input);
                    }
                    conductor::Command::Send { to, message } => {
                        self.send(process.peer, to, message, local);
                    }
                    conductor::Command::SendAll { to, message } => {
                        for to in to {
                            self.send(process.peer, to, message.clone(), local);
                        }
                    }
                    conductor::Command::Propose { step, proposal, tables } => {
                        let header = &self.headers[&step];
                        let running = process.steps.entry(step).or_insert_with(|| header.clone());
                        let placed = self.job.table(running, &tables).is_ok();
                        events.push_back(answer(placed, step, proposal));
                    }
                    conductor::Command::DeclareLost(id) => self.declared(id),
                    conductor::Command::PoolLost { .. } | conductor::Command::Filled { .. } => {}
                    conductor::Command::StepDone(step) => self.steps_done = step + 1,
                    conductor::Command::End(end) => self.ended(process.peer, end)?,
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, from: Peer, to: Peer, message: Message, local: &mut VecDeque<Message>) {
        if from == to {
            local.push_back(message);
        } else {
            let input = Input::Message { from, message };
            self.net.send(self.now, &mut self.random, from, to, input);
        }
    }
}

fn answer(placed: bool, step: u64, proposal: u64) -> conductor::Event {
    if placed {
        conductor::Event::Placed { step, proposal }
    } else {
        conductor::Event::Unplaceable { step, proposal }
    }
}
