//! Short words for inputs and actions, and a run that takes and gives them.
//!
//! In: names such as `s0.2` and what happens to them. Out: a line of what is done about it. Actions that no
//! table looks at (records of the run, addresses) have no words. Time is what the test adds to it.

use std::time::Duration;

use cadre_control::proto::{
    self, Finished, Hello, Kind, Listening, PhaseReached, controller_message, finished,
    worker_message::Message,
};
use cadre_control::server::LinkId;

use super::super::action::{Action, Input};
use super::super::config::RunConfig;
use super::super::event::{Role, RunEvent, WorkerName};
use super::super::exit::Exit;
use super::super::state::State;

/// A run under test, with its clock in milliseconds.
pub(super) struct Run {
    pub(super) state: State,
    pub(super) now: u64,
}

impl Run {
    pub(super) fn begin(config: RunConfig) -> (Self, String) {
        let mut run = Self { state: State::new(config), now: 0 };
        let mut out = Vec::new();
        run.state.begin(Duration::ZERO, &mut out);
        (run, lines(&out))
    }

    /// All workers of `config` registered.
    pub(super) fn registered(config: RunConfig) -> Self {
        let servers = config.servers();
        let (mut run, _) = Self::begin(config);
        for worker in ["t0".to_owned(), "t1".to_owned()]
            .into_iter()
            .chain((0..servers).map(|index| format!("s{index}")))
        {
            run.attach(&worker);
        }
        run
    }

    pub(super) fn input(&mut self, input: Input) -> String {
        let mut out = Vec::new();
        self.state.handle(Duration::from_millis(self.now), input, &mut out);
        lines(&out)
    }

    pub(super) fn attach(&mut self, worker: &str) -> String {
        let WorkerName { role, index, incarnation } = name(worker);
        let role = if role == Role::Trainer { proto::Role::Trainer } else { proto::Role::Server };
        let index = u32::from(index);
        let hello = Hello { role: role.into(), index, incarnation, ..Hello::default() };
        let attached = self.input(Input::Attached { link: link(worker), hello });
        let exchange_address = format!("127.0.0.1:{index}");
        let listening = Listening { exchange_address, ring_address: String::new() };
        let listens = self.say(worker, Message::Listening(listening));
        joined([attached, listens])
    }

    pub(super) fn say(&mut self, worker: &str, message: Message) -> String {
        self.input(Input::Said { link: link(worker), message })
    }

    pub(super) fn reach(&mut self, step: u64) -> String {
        let direction = proto::Direction::Forward.into();
        self.say("t0", Message::PhaseReached(PhaseReached { step, direction }))
    }

    pub(super) fn finish(&mut self, worker: &str, outcome: finished::Outcome) -> String {
        let said = self.say(worker, Message::Finished(account(outcome)));
        let code = i32::from(outcome == finished::Outcome::Failed) * 3;
        joined([said, self.exit(worker, Some(code), &[])])
    }

    /// Its process ends, after all that it said was taken.
    pub(super) fn exit(&mut self, worker: &str, code: Option<i32>, log: &[&str]) -> String {
        let detached = self.input(Input::Detached { link: link(worker) });
        joined([detached, self.ended(worker, code, log)])
    }

    /// Its process ends; its stream may still hold what it said.
    pub(super) fn ended(&mut self, worker: &str, code: Option<i32>, log: &[&str]) -> String {
        let signal = if code.is_none() { Some(9) } else { None };
        let log = log.iter().map(|&line| line.to_owned()).collect();
        self.input(Input::Exited { worker: name(worker), exit: Exit { code, signal, log } })
    }

    pub(super) fn after(&mut self, milliseconds: u64) -> String {
        self.now += milliseconds;
        self.input(Input::Tick)
    }
}

pub(super) fn config(servers: u32, in_place: bool, faults: &[&str]) -> RunConfig {
    let pool = serde_json::json!({
        "metadata": {"name": "pool"},
        "spec": {"replicas": servers, "inPlace": in_place, "health": {"reshapeAfterSeconds": 60}},
    });
    let job = serde_json::json!({
        "metadata": {"name": "job"},
        "spec": {
            "template": {}, "nodes": 2, "attention": {"poolRef": {"name": "pool"}},
            "failurePolicy": {"maxRestarts": 0},
        },
    });
    let pool = serde_json::from_value(pool).expect("a pool");
    let job = serde_json::from_value(job).expect("a job");
    RunConfig {
        steps: Some(10),
        faults: faults.iter().map(|text| text.parse().expect("a fault")).collect(),
        ..RunConfig::new(pool, job, "/nowhere".into(), "/nowhere".into())
    }
}

/// What a worker says of its end.
pub(super) fn account(outcome: finished::Outcome) -> Finished {
    Finished { outcome: outcome.into(), ..Finished::default() }
}

fn joined([first, second]: [String; 2]) -> String {
    match (first.is_empty(), second.is_empty()) {
        (false, false) => first + "; " + &second,
        (_, true) => first,
        (true, false) => second,
    }
}

/// `t1` or `s0.2`: role, index, incarnation.
pub(super) fn name(text: &str) -> WorkerName {
    let (role, rest) = text.split_at(1);
    let role = if role == "t" { Role::Trainer } else { Role::Server };
    let (index, incarnation) = rest.split_once('.').unwrap_or((rest, "0"));
    let number = |text: &str| text.parse().expect("a number");
    WorkerName {
        role,
        index: u16::try_from(number(index)).expect("small"),
        incarnation: number(incarnation),
    }
}

/// The link of a worker is made from its name.
pub(super) fn link(text: &str) -> LinkId {
    let WorkerName { role, index, incarnation } = name(text);
    LinkId(u64::from(role == Role::Server) * 1000 + u64::from(index) * 100 + u64::from(incarnation))
}

fn lines(actions: &[Action]) -> String {
    actions.iter().filter_map(written).collect::<Vec<_>>().join("; ")
}

fn written(action: &Action) -> Option<String> {
    let to = |link: &LinkId| {
        let role = if link.0 >= 1000 { "s" } else { "t" };
        format!("{role}{}", link.0 % 1000 / 100)
    };
    Some(match action {
        Action::BeginAttempt { number } => format!("attempt {number}"),
        Action::Spawn(worker) => format!("spawn {}", short(*worker)),
        Action::Kill(worker) => format!("kill {}", short(*worker)),
        Action::Pause(worker) => format!("pause {}", short(*worker)),
        Action::Welcome { link, .. } => format!("welcome {}", to(link)),
        Action::Refuse { .. } => "refuse".into(),
        Action::Send { link, message } => match message.message.as_ref().expect("a body") {
            controller_message::Message::View(view) => {
                let slot = |slot: &proto::Slot| match &slot.server {
                    Some(server) if slot.kind() == Kind::InPlace => format!("i{}", server.index),
                    Some(server) => format!("{}.{}", server.index, server.incarnation),
                    None => "-".into(),
                };
                let slots: Vec<String> = view.slots.iter().map(slot).collect();
                let number = view.number.unwrap_or_default();
                format!("view {number} [{}]", slots.join(" "))
            }
            controller_message::Message::FaultsFired(fired) => format!("fired {}", fired.step),
            controller_message::Message::Stop(_) => format!("stop {}", to(link)),
            controller_message::Message::Drain(_) => format!("drain {}", to(link)),
            controller_message::Message::Trainers(_)
            | controller_message::Message::Welcome(_)
            | controller_message::Message::Conductor(_) => return None,
        },
        Action::Emit(RunEvent::Notice { text, .. }) => format!("notice {text}"),
        Action::Emit(RunEvent::Step(it)) => format!("step {}", it.step),
        Action::Emit(RunEvent::Load(it)) => {
            format!("load {} {:.2}", short(it.worker), it.observed_over_expected)
        }
        Action::Emit(_) | Action::Address { .. } => return None,
        Action::Done(Ok(_)) => "done ok".into(),
        Action::Done(Err(error)) => format!("done {}: {error}", error.exit_code()),
    })
}

fn short(name: WorkerName) -> String {
    let role = if name.role == Role::Trainer { "t" } else { "s" };
    let incarnation =
        if name.incarnation == 0 { String::new() } else { format!(".{}", name.incarnation) };
    format!("{role}{}{incarnation}", name.index)
}
