//! The trainer's machine: rings servers, pulls results, says when rows may be reused.
//!
//! In: [`Event`]s of the shell. Out: [`Command`]s. It computes nothing and holds no rows.
//!
//! ```text
//! a phase:   Submitted ──rings──▶ open ──last result accepted──▶ Complete ──watermark──▶ Release
//! a result:  wanted ──Finished──▶ pulling ──Pulled──▶ accepted        (failed: wanted again)
//! ```
//!
//! Invariant: `Accept` comes exactly once for every result that the trainer wants, `Complete` after
//! the last of a phase, `Release` after the watermark has passed it, all in the order of phases but
//! `Complete`, which comes in any order.

mod link;
mod links;
mod reach;
mod results;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use self::link::Links;
use self::reach::Reach;
use self::results::{Pulls, Want};
use crate::step::Live;
use crate::{
    At, End, Filler, Fillers, Message, Nanos, Peer, PullId, PullResult, Round, RoundTable,
    ServerId, Settings, Step, TrainerId, Work,
};

/// What happens to a trainer.
#[derive(Clone, Debug)]
pub enum Event {
    /// The header of a step is here and planned.
    Begin(Arc<Step>),
    /// The rows of a phase are readable and the landing space of its results is reserved.
    /// Phases come in order, and only while [`Trainer::may_submit`].
    Submitted(At),
    /// A message for this machine.
    Message {
        /// Who sent it.
        from: Peer,
        /// What.
        message: Message,
    },
    /// A pull ended. Every pull ends exactly once.
    Pulled {
        /// Which.
        pull: PullId,
        /// How.
        result: PullResult,
    },
    /// The link to or from a peer broke, or a try to open it failed.
    Closed(Peer),
    /// Messages to a peer were dropped because too many waited for it. Its link stands, and has room again.
    Unsaid(Peer),
    /// The answer to [`Command::Reassign`].
    Round(Arc<RoundTable>),
    /// The deadline has come.
    Tick,
}

/// What a trainer's shell has to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command {
    /// Send, opening a link if there is none. To the own process: hand to the machine it is for.
    Send {
        /// To whom.
        to: Peer,
        /// What.
        message: Message,
    },
    /// Pull this trainer's results of one work.
    Pull {
        /// The name of the pull.
        pull: PullId,
        /// From whom.
        peer: Peer,
        /// The phase.
        at: At,
        /// The work.
        work: Work,
        /// When it ends with [`PullFailure::Deadline`](crate::PullFailure::Deadline) if nothing has come from the peer;
        /// every byte that comes, for this pull or another one of the link, moves it on by as much as it is away now.
        deadline: Nanos,
    },
    /// What this pull brought counts: merge it.
    Accept {
        /// Which pull.
        pull: PullId,
        /// The phase.
        at: At,
        /// The work.
        work: Work,
        /// Who made it.
        from: Peer,
    },
    /// What this pull brought, if anything, does not count.
    Discard {
        /// Which pull.
        pull: PullId,
    },
    /// Every result of the phase was accepted.
    Complete(At),
    /// The rows of the phase may be reused.
    Release(At),
    /// Every phase of the step is released; nothing of it is left here.
    StepOver(u64),
    /// Compute the assignments that follow from these tables, one after the other, and come back with
    /// [`Event::Round`].
    Reassign {
        /// The step.
        step: u64,
        /// The newest round.
        round: Round,
        /// Fillers of rounds `1..=round`.
        tables: Vec<Fillers>,
    },
    /// Close the links with a peer by force: every pull from it ends at once.
    Close(Peer),
    /// Nothing more comes from this machine.
    End(End),
}

/// The machine.
#[derive(Debug)]
pub struct Trainer {
    me: TrainerId,
    settings: Settings,
    steps: BTreeMap<u64, Live>,
    /// Phases that were submitted and not released.
    phases: BTreeMap<At, Open>,
    links: Links,
    pulls: Pulls,
    next_pull: u64,
    reach: Reach,
    /// Servers for which the conductor asks, how they are rung, and whether they have not answered since.
    asked: BTreeMap<ServerId, (Message, bool)>,
    /// Servers of those that have answered since the last heartbeat.
    reached: BTreeSet<ServerId>,
    watermark: Option<At>,
    done: Option<At>,
    submitted: Option<At>,
    beat_at: Nanos,
    heard: Nanos,
    last: Nanos,
    ended: bool,
}

#[derive(Debug)]
struct Open {
    since: Nanos,
    late_at: Nanos,
    rung: BTreeSet<Peer>,
    wants: BTreeMap<Work, Want>,
    missing: usize,
}

impl Trainer {
    /// A trainer that has begun no step yet.
    pub fn new(me: TrainerId, settings: Settings, now: Nanos) -> Self {
        Self {
            me,
            settings,
            steps: BTreeMap::new(),
            phases: BTreeMap::new(),
            links: Links::default(),
            pulls: Pulls::default(),
            next_pull: 0,
            reach: Reach::default(),
            asked: BTreeMap::new(),
            reached: BTreeSet::new(),
            watermark: None,
            done: None,
            submitted: None,
            beat_at: now,
            heard: now.after(settings.assemble_within),
            last: now,
            ended: false,
        }
    }

    /// The last phase of which every trainer is known to have its whole result.
    pub fn watermark(&self) -> Option<At> {
        self.watermark
    }

    /// Whether the window lets one more phase out.
    pub fn may_submit(&self) -> bool {
        self.phases.len() < self.settings.window
    }

    /// Takes an event, appends what has to be done. `now` never goes back.
    pub fn handle(&mut self, now: Nanos, event: Event, out: &mut Vec<Command>) {
        if self.ended {
            return;
        }
        if let Some(pause) = self.settings.pause(self.last, now) {
            self.heard = self.heard.after(pause);
            self.links.paused(pause);
            self.reach.paused(pause);
        }
        self.last = now;
        match event {
            Event::Begin(step) => self.begin(step),
            Event::Submitted(at) => self.submit(now, at, out),
            Event::Message { from, message } => self.message(now, from, message, out),
            Event::Pulled { pull, result } => self.pulled(now, (pull, result), out),
            Event::Closed(peer) => self.closed(now, peer, out),
            Event::Unsaid(peer) => self.unsaid(now, peer),
            Event::Round(table) => self.round(now, table, out),
            Event::Tick => {}
        }
        self.deadlines(now, out);
    }

    /// When the shell has to send [`Event::Tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Nanos> {
        if self.ended {
            return None;
        }
        let links = self.links.next_deadline().into_iter();
        let phases = self.phases.values().map(|it| it.late_at);
        let silent = self.heard.after(self.settings.conductor_after);
        links.chain(phases).chain([self.beat_at, silent]).min()
    }

    fn begin(&mut self, step: Arc<Step>) {
        let over = self.watermark.is_some_and(|it| it >= step.last());
        if !over {
            let table = Arc::clone(step.table());
            self.steps.entry(step.number()).or_insert(Live { step, table });
            self.refill();
        }
    }

    /// The slots of the steps that are not over have other fillers, or others than before.
    fn refill(&mut self) {
        let tables = self.steps.values().map(|it| &it.table);
        let fillers = tables.flat_map(|it| it.fillers.iter().flatten());
        self.links.filled(fillers.filter_map(|it| it.executor()).collect());
    }

    fn submit(&mut self, now: Nanos, at: At, out: &mut Vec<Command>) {
        assert!(self.submitted < Some(at), "phases are submitted in order");
        let live = self.steps.get(&at.step).expect("a step begins before its phases are submitted");
        self.submitted = Some(at);
        let shape = live.step.shape(at.phase);
        let wants = shape.wants(self.me).iter().map(|work| (*work, Want::default()));
        let wants: BTreeMap<_, _> = wants.collect();
        let open = Open {
            since: now,
            late_at: now.after(self.settings.phase_within),
            rung: BTreeSet::new(),
            missing: wants.len(),
            wants,
        };
        let whole = open.missing == 0;
        self.phases.insert(at, open);
        self.ring(at, out);
        if whole {
            self.complete(at, out);
        }
    }

    /// Rings every executor of work that needs this trainer's rows and has not been rung.
    fn ring(&mut self, at: At, out: &mut Vec<Command>) {
        let live = &self.steps[&at.step];
        let shape = live.step.shape(at.phase);
        let index = live.step.shape_index(at.phase);
        let executors = shape.feeds(self.me).iter();
        let executors: BTreeSet<Peer> =
            executors.filter_map(|it| live.table.executor(index, *it)).collect();
        let open = self.phases.get_mut(&at).expect("only submitted phases are rung");
        let fresh: Vec<_> = executors.difference(&open.rung).copied().collect();
        open.rung.extend(&fresh);
        for peer in fresh {
            self.doorbell(peer, at, out);
        }
    }

    fn doorbell(&mut self, to: Peer, at: At, out: &mut Vec<Command>) {
        let acks = self.take_acks(to);
        let live = &self.steps[&at.step];
        let (round, digest) = (live.table.round, live.step.digest());
        out.push(Command::Send { to, message: Message::Doorbell { at, round, acks, digest } });
    }

    fn message(&mut self, now: Nanos, from: Peer, message: Message, out: &mut Vec<Command>) {
        if from == Peer::CONDUCTOR {
            self.heard = now;
        }
        match message {
            Message::Finished { at, works } => {
                self.answered(now, from);
                self.finished(now, from, at, &works, out);
            }
            Message::Watermark { at } if from == Peer::CONDUCTOR => self.advance(at, out),
            Message::Pulse { watermark, ask } if from == Peer::CONDUCTOR => {
                if let Some(at) = watermark {
                    self.advance(at, out);
                }
                self.ask(&ask, out);
            }
            Message::Round { step, round, tables } if from == Peer::CONDUCTOR => {
                let news = |it: &Live| it.table.round < round && it.step.takes(round, &tables);
                if self.steps.get(&step).is_some_and(news) {
                    out.push(Command::Reassign { step, round, tables });
                }
            }
            Message::Watermark { .. }
            | Message::Round { .. }
            | Message::Pulse { .. }
            | Message::Doorbell { .. }
            | Message::Ack { .. }
            | Message::PhaseDone { .. }
            | Message::Heartbeat(_)
            | Message::Suspect { .. }
            | Message::Unreached { .. }
            | Message::Leave { .. }
            | Message::Spare { .. } => {}
        }
    }

    fn round(&mut self, now: Nanos, table: Arc<RoundTable>, out: &mut Vec<Command>) {
        let Some(live) = self.steps.get_mut(&table.step) else { return };
        if live.table.round >= table.round {
            return;
        }
        assert!(live.step.check(&table).is_ok(), "the shell assigns all bundles of the step");
        let step = table.step;
        let before = std::mem::replace(&mut live.table, table);
        let lost = before.fillers.iter().flatten().filter_map(|&filler| match filler {
            Filler::Server(id) if !live.table.fillers.contains(&Some(filler)) => {
                Some(Peer::Server(id))
            }
            Filler::Server(_) | Filler::InPlace(_) | Filler::Standby(_) => None,
        });
        for peer in lost.collect::<Vec<_>>() {
            // Frees the landing places of pulls that may never end.
            if self.pulls.any_from(peer) {
                out.push(Command::Close(peer));
            }
            self.links.remove(peer);
            self.reach.remove(peer);
        }
        self.refill();
        if self.settings.rules.round_rings_again {
            let phases = self.phases.range(At::new(step, 0)..=At::new(step, u32::MAX));
            for at in phases.map(|it| *it.0).collect::<Vec<_>>() {
                self.ring(at, out);
            }
        }
        self.beat_at = now;
    }

    /// Whether a step runs here.
    pub fn runs(&self, step: u64) -> bool {
        self.steps.contains_key(&step)
    }

    /// The watermark has reached `at`.
    fn advance(&mut self, at: At, out: &mut Vec<Command>) {
        // Beyond what this trainer has, it cannot be: the message is of another attempt.
        if self.watermark >= Some(at) || self.done < Some(at) {
            return;
        }
        self.watermark = Some(at);
        while let Some(entry) = self.phases.first_entry().filter(|it| *it.key() <= at) {
            let (at, _) = entry.remove_entry();
            if self.settings.rules.release_at_watermark {
                out.push(Command::Release(at));
            }
        }
        let mut over = false;
        while let Some(entry) = self.steps.first_entry().filter(|it| it.get().step.last() <= at) {
            let (step, _) = entry.remove_entry();
            out.push(Command::StepOver(step));
            over = true;
        }
        if over {
            self.refill();
        }
        self.links.let_go();
    }
}
