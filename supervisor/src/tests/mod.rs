//! Tables over the supervisor's decisions: what happens, and what is done about it.
//!
//! In: short words for inputs. Out: short words for actions, compared as a whole. No process and no
//! clock here; real ones are in `tests/supervisor/`.

mod members;
mod script;
mod survivors;

use std::time::Duration;

use cadre_control::proto::{
    Finished, Kind, Notice, Progress, Saved, ServerName, ServerReport, finished::Outcome, notice,
    worker_message::Message,
};

use self::script::{Run, account, config, link, name};
use super::action::Input;
use super::config::RunConfig;

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
fn trainers_that_all_fall_silent_end_the_attempt_by_name() {
    let mut run = Run::registered(config(1, false, &[]));
    for worker in ["t0", "t1"] {
        assert_eq!(run.input(Input::Detached { link: link(worker) }), "");
    }
    assert!(run.after(30_000).contains("kill t0"));
    let first = run.exit("t0", None, &[]);
    assert!(first.contains("trainer 0") && first.contains("the other trainers stop"), "{first}");
    let last = run.exit("t1", None, &[]);
    assert!(last.contains("kill s0"), "{last}");
    let end = run.exit("s0", None, &[]);
    assert!(end.contains("done") && end.contains("nothing was heard from it for 30s"), "{end}");
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
        "spawn s2; notice add-server@4:fwd: server 2 starts; view 1.4 [- - -]; fired 4"
    );
    assert_eq!(run.attach("s2"), "welcome s2; view 1.5 [- - 2.0]");
}

#[test]
fn a_finished_job_lets_its_servers_leave() {
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(run.finish("t1", Outcome::Completed), "");
    assert_eq!(run.finish("t0", Outcome::Completed), "drain s0");
    assert_eq!(run.exit("s0", Some(0), &[]), "done ok");
}

/// What is told of trainer 1 when it is killed after its job was done.
const LATE: &str = "notice trainer 1 had said that it is done, and then ended otherwise: killed by SIGKILL; see its log";

#[test]
fn a_job_whose_trainers_have_said_that_they_are_done_is_done_whatever_they_do_then() {
    // One is killed while it leaves, one is stopped and never ends.
    let mut run = Run::registered(config(1, false, &[]));
    let done = || Message::Finished(account(Outcome::Completed));
    assert_eq!(run.say("t1", done()), "");
    assert_eq!(run.say("t0", done()), "drain s0");
    assert_eq!(run.exit("t1", None, &[]), LATE);
    assert_eq!(run.exit("s0", Some(0), &[]), "");
    assert_eq!(run.after(3000), "kill t0");
    assert_eq!(run.exit("t0", None, &[]), "done ok");
    // One that has not said it before it is killed is a failure.
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(run.say("t0", done()), "");
    assert!(run.exit("t1", None, &[]).contains("the other trainers stop"));
}

#[test]
fn what_a_trainer_said_counts_also_when_its_end_is_heard_first() {
    let mut run = Run::registered(config(1, false, &[]));
    run.finish("t0", Outcome::Completed);
    assert_eq!(run.ended("t1", None, &[]), "");
    let done = Message::Finished(account(Outcome::Completed));
    assert_eq!(run.say("t1", done), "drain s0");
    assert_eq!(run.input(Input::Detached { link: link("t1") }), LATE);
    assert_eq!(run.exit("s0", Some(0), &[]), "done ok");
    // Of one that has said nothing, the end counts when its stream ends, or after a while.
    let failed = "notice trainer 1: killed by SIGKILL; the other trainers stop";
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(run.ended("t1", None, &[]), "");
    assert_eq!(run.input(Input::Detached { link: link("t1") }), failed);
    let mut run = Run::registered(config(1, false, &[]));
    assert_eq!(run.ended("t1", None, &[]), "");
    assert_eq!(run.state.next_deadline(), Some(Duration::from_secs(3)));
    assert_eq!(run.after(3000), failed);
}

#[test]
fn servers_that_do_not_leave_are_killed() {
    let mut run = Run::registered(config(1, false, &[]));
    run.finish("t1", Outcome::Completed);
    run.finish("t0", Outcome::Completed);
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
    run.say("t0", Message::Saved(Saved { steps: 3 }));
    assert_eq!(run.finish("t0", Outcome::Failed), "kill s0");
    assert_eq!(
        run.exit("s0", None, &[]),
        "done 3: the job failed: trainer 1: killed by SIGKILL; 0 of 0 restarts used \
         without a newer checkpoint (spec.failurePolicy.maxRestarts), go on with --resume"
    );
}

#[test]
fn a_newer_checkpoint_sets_the_restarts_back_and_an_old_one_does_not() {
    let mut settings = config(0, true, &[]);
    settings.job.spec.failure_policy.max_restarts = Some(1);
    let mut run = Run::registered(settings);
    for (attempt, (steps, goes_on)) in [(20, true), (40, true), (40, false)].into_iter().enumerate()
    {
        let [first, second] = ["t0", "t1"].map(|it| format!("{it}.{attempt}"));
        if attempt > 0 {
            run.attach(&first);
            run.attach(&second);
        }
        run.say(&second, Message::Saved(Saved { steps }));
        run.exit(&first, None, &[]);
        let end = run.exit(&second, Some(3), &[]);
        assert_eq!(end.contains("restarting"), goes_on, "attempt {attempt}: {end}");
        assert_eq!(end.contains("1 of 1 restarts used"), !goes_on, "attempt {attempt}: {end}");
    }
}

#[test]
fn a_trainer_that_fails_and_stays_is_ended_with_its_own_words() {
    let mut run = Run::registered(config(0, true, &[]));
    let words = Finished { message: "rank 1 has not come".into(), ..account(Outcome::Failed) };
    assert_eq!(run.say("t1", Message::Finished(words)), "");
    assert_eq!(run.state.next_deadline(), Some(Duration::from_secs(10)));
    let kill = "notice trainer 1 has said its last words and stays; ending it; kill t1";
    assert_eq!(run.after(10_000), kill);
    run.exit("t1", None, &[]);
    let end = run.exit("t0", Some(3), &["error: rank 1 has not come"]);
    assert!(
        end.starts_with("done 3: the job failed: trainer 1: killed by SIGKILL: rank 1"),
        "{end}"
    );
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
fn a_launcher_that_ends_with_another_code_than_its_rank_said_does_not_hide_bad_input() {
    for (said, expected) in [(2, "done 2: give f32"), (3, "done 3: the job failed: trainer 1")] {
        let mut run = Run::registered(config(0, true, &[]));
        let account = account(Outcome::Failed);
        let words = Finished { message: "give f32".into(), exit_code: said, ..account };
        run.say("t1", Message::Finished(words));
        run.exit("t1", Some(1), &[]);
        let end = run.exit("t0", Some(1), &[]);
        assert!(end.starts_with(expected), "{end}");
    }
}

#[test]
fn an_interrupt_waits_for_the_checkpoint_and_a_second_one_does_not() {
    let mut run = Run::registered(config(1, false, &[]));
    assert!(run.input(Input::Interrupt).starts_with("stop t0; notice interrupted"));
    run.finish("t0", Outcome::Stopped);
    assert_eq!(run.finish("t1", Outcome::Stopped), "kill s0");
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
fn an_interrupt_waits_for_both_steps_that_are_out_however_long_they_take() {
    let step = |step, seconds| Message::Progress(Progress { step, seconds, ..Progress::default() });
    let mut run = Run::registered(config(1, false, &[]));
    run.say("t0", step(0, 50.0));
    run.input(Input::Interrupt);
    for number in [1, 2] {
        assert_eq!(run.after(55_000), "");
        assert_eq!(run.say("t0", step(number, 55.0)), format!("step {number}"));
    }
    assert_eq!(run.after(29_999), "");
    assert_eq!(run.after(60_000), "kill t0; kill t1; kill s0", "nothing more comes");
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

#[test]
fn a_step_that_is_told_again_is_told_of_once() {
    let mut run = Run::registered(config(1, false, &[]));
    let step = |step| Message::Progress(Progress { step, ..Progress::default() });
    assert_eq!(run.say("t0", step(0)), "step 0");
    assert_eq!(run.say("t0", step(1)), "step 1");
    run.input(Input::Detached { link: link("t0") });
    run.attach("t0");
    assert_eq!(run.say("t0", step(1)), "");
    assert_eq!(run.say("t0", step(2)), "step 2");
}

#[test]
fn a_server_is_held_against_the_others_from_its_first_report_and_those_in_place_count() {
    let mut run = Run::registered(config(2, true, &[]));
    let report = |busy_nanoseconds| {
        Message::ServerReport(ServerReport {
            cost: 1000,
            busy_nanoseconds,
            ..ServerReport::default()
        })
    };
    // Nobody to be held against.
    assert_eq!(run.say("s0", report(300)), "load s0 0.00");
    assert_eq!(run.say("t0", report(100)), "load t0 1.00");
    // Slow from the start.
    assert_eq!(run.say("s1", report(100)), "load s1 1.00");
    assert_eq!(run.say("s0", report(300)), "load s0 3.00");
    assert_eq!(run.say("t1", report(200)), "load t1 2.00");
    // A second without work says nothing of its speed.
    assert_eq!(run.say("s0", report(0)), "load s0 0.00");
    assert_eq!(run.say("s0", report(300)), "load s0 3.00");
}
