//! Tables over the supervisor's decisions: what happens, and what is done about it.
//!
//! In: short words for inputs. Out: short words for actions, compared as a whole. No process and no
//! clock here; real ones are in `tests/supervisor.rs`.

use std::time::Duration;

use cadre_control::proto::{
    self, Finished, Hello, Kind, Listening, Notice, PhaseReached, ServerName, controller_message,
    finished, notice, worker_message::Message,
};
use cadre_control::server::LinkId;

use super::action::{Action, Input};
use super::config::{Limits, RunConfig};
use super::ending::Exit;
use super::event::{Role, RunEvent, WorkerName};
use super::settings::AttentionPlace;
use super::state::State;

/// A run under test, with its clock in milliseconds.
struct Run {
    state: State,
    now: u64,
}

fn config(servers: u32, in_place: bool, faults: &[&str]) -> RunConfig {
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
    RunConfig {
        pool: serde_json::from_value(pool).expect("a pool"),
        job: serde_json::from_value(job).expect("a job"),
        steps: 10,
        out: "/nowhere".into(),
        trace: false,
        resume: false,
        attention: AttentionPlace::Pool,
        headers: None,
        faults: faults.iter().map(|text| text.parse().expect("a fault")).collect(),
        replace: true,
        program: "/nowhere".into(),
        limits: Limits::default(),
    }
}

/// `t1` or `s0.2`: role, index, incarnation.
fn name(text: &str) -> WorkerName {
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

fn short(name: WorkerName) -> String {
    let role = if name.role == Role::Trainer { "t" } else { "s" };
    let incarnation =
        if name.incarnation == 0 { String::new() } else { format!(".{}", name.incarnation) };
    format!("{role}{}{incarnation}", name.index)
}

/// The link of a worker is made from its name.
fn link(text: &str) -> LinkId {
    let WorkerName { role, index, incarnation } = name(text);
    LinkId(u64::from(role == Role::Server) * 1000 + u64::from(index) * 100 + u64::from(incarnation))
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
        Action::Emit(_) | Action::Address { .. } => return None,
        Action::Done(Ok(_)) => "done ok".into(),
        Action::Done(Err(error)) => format!("done {}: {error}", error.exit_code()),
    })
}

impl Run {
    fn begin(config: RunConfig) -> (Self, String) {
        let mut run = Self { state: State::new(config), now: 0 };
        let mut out = Vec::new();
        run.state.begin(Duration::ZERO, &mut out);
        (run, lines(&out))
    }

    /// All workers of `config` registered.
    fn registered(config: RunConfig) -> Self {
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

    fn input(&mut self, input: Input) -> String {
        let mut out = Vec::new();
        self.state.handle(Duration::from_millis(self.now), input, &mut out);
        lines(&out)
    }

    fn attach(&mut self, worker: &str) -> String {
        let WorkerName { role, index, incarnation } = name(worker);
        let role = if role == Role::Trainer { proto::Role::Trainer } else { proto::Role::Server };
        let index = u32::from(index);
        let hello = Hello { role: role.into(), index, incarnation, ..Hello::default() };
        let attached = self.input(Input::Attached { link: link(worker), hello });
        let exchange_address = format!("127.0.0.1:{index}");
        let listening = Listening { exchange_address, ring_address: String::new() };
        let listens = self.say(worker, Message::Listening(listening));
        let lines = [attached, listens];
        lines.iter().filter(|it| !it.is_empty()).cloned().collect::<Vec<_>>().join("; ")
    }

    fn say(&mut self, worker: &str, message: Message) -> String {
        self.input(Input::Said { link: link(worker), message })
    }

    fn reach(&mut self, step: u64) -> String {
        let direction = proto::Direction::Forward.into();
        self.say("t0", Message::PhaseReached(PhaseReached { step, direction }))
    }

    fn finish(&mut self, worker: &str, outcome: finished::Outcome) -> String {
        let account = Finished { outcome: outcome.into(), ..Finished::default() };
        self.say(worker, Message::Finished(account));
        let code = i32::from(outcome == finished::Outcome::Failed) * 3;
        self.exit(worker, Some(code), &[])
    }

    fn exit(&mut self, worker: &str, code: Option<i32>, log: &[&str]) -> String {
        let signal = if code.is_none() { Some(9) } else { None };
        let log = log.iter().map(|&line| line.to_owned()).collect();
        self.input(Input::Exited { worker: name(worker), exit: Exit { code, signal, log } })
    }

    fn after(&mut self, milliseconds: u64) -> String {
        self.now += milliseconds;
        self.input(Input::Tick)
    }
}

fn lines(actions: &[Action]) -> String {
    actions.iter().filter_map(written).collect::<Vec<_>>().join("; ")
}

#[test]
fn a_run_starts_everybody_and_offers_a_view_once_all_are_there() {
    let (mut run, started) = Run::begin(config(2, true, &[]));
    assert_eq!(started, "attempt 1; spawn t0; spawn t1; spawn s0; spawn s1");
    assert_eq!(run.attach("s0"), "welcome s0");
    assert_eq!(run.attach("t0"), "welcome t0");
    assert_eq!(run.attach("s1"), "welcome s1");
    assert_eq!(run.attach("t1"), "welcome t1; view 1.1 [0.0 1.0 i0 i1]");
    assert_eq!(run.attach("s7"), "refuse");
}

#[test]
fn a_dead_server_is_replaced_in_its_slot() {
    let mut run = Run::registered(config(2, false, &[]));
    assert_eq!(
        run.exit("s1", None, &[]),
        "notice server 1: killed by SIGKILL; starting a replacement; spawn s1.1; view 1.2 [0.0 -]"
    );
    assert_eq!(run.attach("s1.1"), "welcome s1; view 1.3 [0.0 1.1]");
}

#[test]
fn without_replacement_the_slot_stays_vacant_and_leaves_late() {
    let mut run = Run::registered(RunConfig { replace: false, ..config(2, false, &[]) });
    assert_eq!(
        run.exit("s0", None, &[]),
        "notice server 0: killed by SIGKILL; its slot stays vacant; view 1.2 [- 1.0]"
    );
    assert_eq!(run.after(59_999), "");
    assert_eq!(run.state.next_deadline(), Some(Duration::from_mins(1)));
    assert_eq!(
        run.after(1),
        "notice slot 0 has been vacant for 60s and leaves the view; later steps may have other \
         bits; view 1.3 [1.0]"
    );
}

#[test]
fn a_server_that_dies_again_and_again_is_given_up() {
    let mut run = Run::registered(config(2, false, &[]));
    run.exit("s0", Some(1), &[]);
    run.attach("s0.1");
    run.now += 5000;
    assert!(run.exit("s0.1", Some(1), &[]).contains("spawn s0.2"));
    run.now += 4000;
    assert_eq!(
        run.exit("s0.2", Some(1), &[]),
        "notice server 0 (incarnation 2): exit code 1; it died 3 times within 10s and is not \
         started again"
    );
}

#[test]
fn deaths_far_apart_are_forgiven() {
    let mut run = Run::registered(config(1, true, &[]));
    for incarnation in 0..6 {
        let worker = format!("s0.{incarnation}");
        let done = run.exit(&worker, Some(1), &[]);
        assert!(done.contains(&format!("spawn s0.{}", incarnation + 1)), "{done}");
        run.now += 6000;
        run.attach(&format!("s0.{}", incarnation + 1));
    }
}

#[test]
fn a_server_that_does_not_register_is_ended_and_the_run_starts_without_it() {
    let (mut run, _) = Run::begin(config(2, false, &[]));
    for worker in ["t0", "t1", "s0"] {
        run.attach(worker);
    }
    assert_eq!(run.state.next_deadline(), Some(Duration::from_secs(30)));
    assert_eq!(
        run.after(30_000),
        "notice server 1 has not registered within 30s; ending it; kill s1"
    );
    assert_eq!(run.state.next_deadline(), None);
    assert_eq!(
        run.exit("s1", None, &[]),
        "notice server 1: killed by SIGKILL; it never registered and is not started again; \
         view 1.1 [0.0 -]"
    );
}

#[test]
fn faults_fire_in_their_step_and_the_conductor_goes_on() {
    let faults = ["kill-server:1@3", "stop-server@3", "add-server@4", "kill-server@3:bwd"];
    let mut run = Run::registered(config(2, false, &faults));
    assert_eq!(run.reach(2), "fired 2");
    assert_eq!(
        run.reach(3),
        "notice kill-server:1@3:fwd hits server 1; kill s1; \
         notice stop-server@3:fwd hits server 0; pause s0; fired 3"
    );
    assert_eq!(run.reach(3), "fired 3", "each fires once");
    run.exit("s1", None, &[]);
    let name = ServerName { kind: Kind::Dedicated.into(), index: 0, incarnation: 0 };
    let event = notice::Event::ServerLost.into();
    let lost = Notice { event, server: Some(name), text: "lost".into(), ..Notice::default() };
    assert_eq!(run.say("t0", Message::Notice(lost)), "notice lost; kill s0; view 1.3 [- -]");
    assert!(run.exit("s0", None, &[]).contains("spawn s0.1"));
    assert_eq!(
        run.reach(4),
        "spawn s2; notice add-server@4:fwd: server 2 starts; fired 4; view 1.4 [- - -]"
    );
    assert_eq!(run.attach("s2"), "welcome s2; view 1.5 [- - 2.0]");
}

#[test]
fn a_finished_job_lets_its_servers_leave() {
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(run.finish("t1", finished::Outcome::Completed), "");
    assert_eq!(run.finish("t0", finished::Outcome::Completed), "drain s0");
    assert_eq!(run.exit("s0", Some(0), &[]), "done ok");
}

#[test]
fn servers_that_do_not_leave_are_killed() {
    let mut run = Run::registered(config(1, false, &[]));
    run.finish("t1", finished::Outcome::Completed);
    run.finish("t0", finished::Outcome::Completed);
    assert_eq!(run.after(3000), "kill s0");
    assert_eq!(run.state.next_deadline(), None);
    assert_eq!(run.exit("s0", None, &[]), "done ok");
}

#[test]
fn a_dead_trainer_fails_the_job_when_no_restart_is_allowed() {
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(
        run.exit("t1", None, &[]),
        "notice trainer 1: killed by SIGKILL; the other trainers stop"
    );
    assert_eq!(run.finish("t0", finished::Outcome::Failed), "kill s0");
    assert_eq!(
        run.exit("s0", None, &[]),
        "done 3: the job failed: trainer 1: killed by SIGKILL; 0 of 0 restarts used \
         (spec.failurePolicy.maxRestarts), go on with --resume"
    );
}

#[test]
fn survivors_have_a_grace_and_the_job_starts_again() {
    let mut settings = config(1, false, &[]);
    settings.job.spec.failure_policy.max_restarts = 1;
    let mut run = Run::registered(settings);
    // The failure of the survivor is heard first; the one who was killed is still the cause.
    run.exit("t0", Some(3), &["error: trainer 1 is gone"]);
    assert_eq!(run.after(9_999), "");
    assert_eq!(run.after(1), "kill t1; kill s0");
    run.exit("s0", None, &[]);
    assert_eq!(
        run.exit("t1", None, &[]),
        "notice trainer 0: exit code 3; restarting from the newest checkpoint; attempt 2; \
         spawn t0.1; spawn t1.1; spawn s0.1"
    );
    for worker in ["t0.1", "t1.1", "s0.1"] {
        run.attach(worker);
    }
    run.exit("t0.1", None, &[]);
    run.exit("t1.1", Some(3), &[]);
    assert!(run.exit("s0.1", None, &[]).starts_with("done 3: the job failed: trainer 0"));
}

#[test]
fn who_was_killed_is_the_cause() {
    let mut run = Run::registered(config(0, true, &[]));
    run.exit("t0", Some(3), &["error: trainer 1 is gone"]);
    let done = run.exit("t1", None, &["working"]);
    assert!(done.contains("failed: trainer 1: killed by SIGKILL;"), "{done}");
}

#[test]
fn bad_input_ends_everything_with_the_workers_words() {
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(
        run.exit("t0", Some(2), &["x", "error: no data in d; give --data"]),
        "kill t1; kill s0"
    );
    run.exit("s0", None, &[]);
    assert_eq!(run.exit("t1", None, &[]), "done 2: no data in d; give --data");
}

#[test]
fn an_interrupt_waits_for_the_checkpoint_and_a_second_one_does_not() {
    let mut run = Run::registered(config(1, false, &[]));
    assert!(run.input(Input::Interrupt).starts_with("stop t0; notice interrupted"));
    run.finish("t0", finished::Outcome::Stopped);
    assert_eq!(run.finish("t1", finished::Outcome::Stopped), "kill s0");
    assert!(run.exit("s0", None, &[]).starts_with("done 130"));

    let mut run = Run::registered(config(1, false, &[]));
    run.input(Input::Interrupt);
    assert_eq!(run.input(Input::Interrupt), "kill t0; kill t1; kill s0");

    let (mut run, _) = Run::begin(config(1, false, &[]));
    assert_eq!(run.input(Input::Interrupt), "kill t0; kill t1; kill s0", "nobody to ask yet");

    let mut run = Run::registered(config(1, false, &[]));
    run.input(Input::Interrupt);
    assert_eq!(run.after(30_000), "kill t0; kill t1; kill s0", "nobody answered");
}

#[test]
fn a_program_that_does_not_start_is_bad_input() {
    let (mut run, _) = Run::begin(config(1, false, &[]));
    let failed = |worker, message: &str| Input::SpawnFailed { worker, message: message.into() };
    assert_eq!(run.input(failed(name("t0"), "no such file")), "kill t1; kill s0");
    run.input(failed(name("t1"), "no such file"));
    assert_eq!(run.exit("s0", None, &[]), "done 2: no such file");
}

#[test]
fn a_conductor_that_attaches_again_gets_the_view_again() {
    let mut run = Run::registered(config(1, false, &[]));
    run.input(Input::Detached { link: link("t0") });
    assert_eq!(run.attach("t0"), "welcome t0; view 1.1 [0.0]");
}
