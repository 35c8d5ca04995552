//! Rounds of live steps: who fills the slots, from the first loss to the lost pool.

use super::{Command, Conductor, HEADER, Locality};
use crate::step::MAX_ROUNDS;
use crate::{At, End, Filler, Fillers, Message, Nanos, OnPoolLoss, Round, ServerId, alive};

/// A published step that is not done.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) published: Nanos,
    phases: u32,
    header: Fillers,
    /// Rounds `1..`, as sent.
    tables: Vec<Fillers>,
    state: State,
    /// Since when servers that have come did not suffice, if that is so.
    short_since: Option<Nanos>,
}

#[derive(Debug)]
enum State {
    Settled,
    /// The shell is asked whether these fillers will do.
    Proposed {
        proposal: u64,
        fillers: Fillers,
    },
    /// No slot can take some bundle, and a step before it still runs: servers may come until that step is whole.
    Short {
        fillers: Fillers,
    },
    /// No slot can take some bundle of the first live step, which waits for a server.
    Lost {
        since: Nanos,
        fillers: Fillers,
    },
}

impl Live {
    pub(super) fn new(now: Nanos, phases: u32, header: Fillers) -> Self {
        let (tables, state) = (Vec::new(), State::Settled);
        Self { published: now, phases, header, tables, state, short_since: None }
    }

    pub(super) fn last(&self, step: u64) -> At {
        At::new(step, self.phases - 1)
    }

    pub(super) fn phases(&self) -> u32 {
        self.phases
    }

    pub(super) fn round(&self) -> Round {
        Round(self.tables.len() as u32)
    }

    /// As everybody knows them.
    pub(super) fn fillers(&self) -> &Fillers {
        self.tables.last().unwrap_or(&self.header)
    }

    /// As the conductor knows them.
    pub(super) fn newest(&self) -> &Fillers {
        match &self.state {
            State::Settled => self.fillers(),
            State::Proposed { fillers, .. }
            | State::Short { fillers }
            | State::Lost { fillers, .. } => fillers,
        }
    }

    pub(super) fn message(&self, step: u64) -> Message {
        Message::Round { step, round: self.round(), tables: self.tables.clone() }
    }
}

impl Conductor {
    /// Takes a lost server out of a live step.
    pub(super) fn vacate(
        &mut self,
        now: Nanos,
        step: u64,
        server: ServerId,
        out: &mut Vec<Command>,
    ) {
        let live = &self.live[&step];
        let mut fillers = live.newest().clone();
        for filler in fillers.iter_mut().filter(|it| **it == Some(Filler::Server(server))) {
            *filler = None;
        }
        match live.state {
            State::Lost { since, .. } => self.set(step, State::Lost { since, fillers }),
            State::Short { .. } => self.set(step, State::Short { fillers }),
            State::Settled | State::Proposed { .. } if alive(&fillers).contains(&true) => {
                self.propose(step, fillers, out);
            }
            State::Settled | State::Proposed { .. } => self.fall_short(now, step, fillers, out),
        }
    }

    fn set(&mut self, step: u64, state: State) {
        self.live.get_mut(&step).expect("only live steps change state").state = state;
    }

    fn propose(&mut self, step: u64, fillers: Fillers, out: &mut Vec<Command>) {
        let mut tables = self.live[&step].tables.clone();
        let rounds = tables.len();
        if rounds >= MAX_ROUNDS {
            return out.push(Command::End(End::Rounds { step, rounds }));
        }
        tables.push(fillers.clone());
        let proposal = self.next_proposal();
        self.set(step, State::Proposed { proposal, fillers });
        out.push(Command::Propose { step, proposal, tables });
    }

    /// No slot can take some bundle of a step. Its pool is lost when no step runs before it; until then servers may come.
    fn fall_short(&mut self, now: Nanos, step: u64, fillers: Fillers, out: &mut Vec<Command>) {
        if self.first_live() == Some(step) {
            return self.pool_lost(now, step, fillers, out);
        }
        self.set(step, State::Short { fillers });
        self.fill(out);
    }

    /// The first live step may be another one than before: if it fell short, nobody has come in time.
    pub(super) fn come_first(&mut self, now: Nanos, out: &mut Vec<Command>) {
        if let Some((&step, live)) = self.live.first_key_value()
            && let State::Short { fillers } = &live.state
        {
            self.pool_lost(now, step, fillers.clone(), out);
        }
    }

    fn first_live(&self) -> Option<u64> {
        self.live.first_key_value().map(|it| *it.0)
    }

    /// The view may have somebody already, as where it brings the replacement that shows that a server is gone. A server that comes and
    /// does not suffice does not begin the wait anew.
    fn pool_lost(&mut self, now: Nanos, step: u64, mut fillers: Fillers, out: &mut Vec<Command>) {
        let since = self.held.unwrap_or(now);
        let live = self.live.get_mut(&step).expect("only live steps lose their pool");
        let since = live.short_since.unwrap_or(since);
        live.state = State::Lost { since, fillers: fillers.clone() };
        self.fill(out);
        let live = self.live.get_mut(&step).expect("a step that is filled stays live");
        if !matches!(live.state, State::Lost { .. }) {
            return;
        }
        if live.short_since.replace(since).is_none() {
            out.push(Command::PoolLost { step });
        }
        match self.settings.on_pool_loss {
            OnPoolLoss::Local if enable_standby(&mut fillers) => {
                self.local = Locality::Local;
                self.propose(step, fillers, out);
            }
            OnPoolLoss::Wait(_) => {}
            OnPoolLoss::Local | OnPoolLoss::Fail if self.in_doubt() => {}
            OnPoolLoss::Local | OnPoolLoss::Fail => {
                out.push(Command::End(End::PoolLost { step }));
            }
        }
    }

    /// Fills slots of steps that wait for a server with those of the view.
    pub(super) fn fill(&mut self, out: &mut Vec<Command>) {
        let waits =
            |it: &(&u64, &Live)| matches!(it.1.state, State::Short { .. } | State::Lost { .. });
        let steps: Vec<_> = self.live.iter().filter(waits).map(|it| *it.0).collect();
        for step in steps {
            let mut fillers = self.live[&step].newest().clone();
            let mut new = Vec::new();
            for (filler, view) in fillers.iter_mut().zip(&self.view) {
                if let (None, Some(Filler::Server(id))) = (*filler, *view) {
                    *filler = Some(Filler::Server(id));
                    new.push(id);
                }
            }
            if new.is_empty() {
                continue;
            }
            for server in new {
                out.push(Command::Header { step, to: crate::Peer::Server(server) });
            }
            self.propose(step, fillers, out);
        }
    }

    pub(super) fn placed(&mut self, step: u64, proposal: u64, out: &mut Vec<Command>) {
        let Some(fillers) = self.answered(step, proposal) else { return };
        let live = self.live.get_mut(&step).expect("the proposal is of a live step");
        live.tables.push(fillers);
        (live.short_since, self.held) = (None, None);
        let (round, message) = (live.round(), live.message(step));
        out.push(Command::Filled { step, round });
        self.broadcast(&message, out);
    }

    pub(super) fn unplaceable(
        &mut self,
        now: Nanos,
        step: u64,
        proposal: u64,
        out: &mut Vec<Command>,
    ) {
        if proposal == HEADER {
            self.withdraw(step);
        } else if let Some(fillers) = self.answered(step, proposal) {
            self.fall_short(now, step, fillers, out);
        }
    }

    /// The fillers of a proposal, unless it is no longer the newest.
    fn answered(&mut self, step: u64, answer: u64) -> Option<Fillers> {
        let live = self.live.get_mut(&step)?;
        let State::Proposed { proposal, fillers } = &live.state else { return None };
        if *proposal != answer {
            return None;
        }
        let fillers = fillers.clone();
        live.state = State::Settled;
        Some(fillers)
    }

    /// Until when which step waits for a server, or for trainers to say whether they reach one.
    pub(super) fn waits(&self) -> impl Iterator<Item = (Nanos, u64)> {
        let limit = match self.settings.on_pool_loss {
            OnPoolLoss::Wait(limit) => limit,
            OnPoolLoss::Local | OnPoolLoss::Fail if self.in_doubt() => self.doubt_within(),
            // A doubt was cleared.
            OnPoolLoss::Local | OnPoolLoss::Fail => Nanos(0),
        };
        let lost = self.live.iter().filter_map(|(&step, live)| match live.state {
            State::Lost { since, .. } => Some((since, step)),
            State::Settled | State::Proposed { .. } | State::Short { .. } => None,
        });
        let held = self.held().zip(self.ready.keys().next().copied());
        lost.chain(held).map(move |(since, step)| (since.after(limit), step))
    }

    /// Since when the next step waits for a server; not while its header is being placed.
    fn held(&self) -> Option<Nanos> {
        self.held.filter(|_| self.live.is_empty())
    }

    /// Whether the step that is to go on has no live slot.
    pub(super) fn waits_for_a_server(&self) -> bool {
        let lost = |it: &Live| matches!(it.state, State::Lost { .. });
        self.held().is_some() || self.live.values().any(lost)
    }
}

/// Makes standby slots take work. Whether there was one.
pub(super) fn enable_standby(fillers: &mut Fillers) -> bool {
    let mut any = false;
    for filler in fillers.iter_mut().flatten() {
        if let Filler::Standby(trainer) = *filler {
            *filler = Filler::InPlace(trainer);
            any = true;
        }
    }
    any
}
