//! Tables over what the others have time for when a trainer has failed: to write down what was done.

use cadre_control::proto::{Busy, Progress, worker_message::Message};

use super::super::action::Input;
use super::script::{Run, config};

fn step(step: u64, seconds: f64) -> Message {
    Message::Progress(Progress { step, seconds, ..Progress::default() })
}

fn busy() -> Message {
    Message::Busy(Busy {})
}

#[test]
fn a_survivor_that_writes_its_checkpoint_has_as_long_as_after_an_interrupt() {
    let mut run = Run::registered(config(1, false, &[]));
    run.say("t0", step(0, 5.0));
    assert_eq!(run.say("t0", busy()), "", "before it matters");
    run.exit("t1", None, &[]);
    assert_eq!(run.after(9_000), "");
    assert_eq!(run.say("t0", busy()), "");
    // Who says nothing of the kind has no more time than before.
    assert_eq!(run.after(3_000), "kill s0");
    run.exit("s0", None, &[]);
    // 30 s, and the time of two steps, from when it said so last.
    assert_eq!(run.after(36_999), "");
    assert_eq!(run.say("t0", busy()), "");
    assert_eq!(run.after(39_999), "");
    assert_eq!(run.state.next_deadline().map(|it| it.as_millis()), Some(88_999));
    assert_eq!(run.after(1), "kill t0");
    let end = run.exit("t0", None, &[]);
    assert!(end.starts_with("done 3: the job failed: trainer 1: killed by SIGKILL"), "{end}");
}

#[test]
fn the_time_of_survivors_begins_when_they_know_of_the_dead() {
    let mut settings = config(0, true, &[]);
    settings.pool.spec.health.suspect_after_milliseconds = 10_000;
    let mut run = Run::registered(settings);
    run.exit("t1", None, &[]);
    // A suspicion until the conductor believes it, and one to see who else is dead.
    assert_eq!(run.after(29_999), "");
    assert_eq!(run.after(1), "kill t0");
}

#[test]
fn a_trainer_that_says_that_it_is_busy_and_then_stands_still_holds_nobody_up() {
    let mut run = Run::registered(config(1, false, &[]));
    // It was at work when all was well, and is stopped since.
    run.say("t1", busy());
    run.exit("t0", Some(3), &["error: trainer 1 stands still"]);
    assert_eq!(run.after(12_000), "kill t1; kill s0");
}

#[test]
fn an_interrupt_waits_for_a_checkpoint_that_is_being_written() {
    let mut run = Run::registered(config(1, false, &[]));
    run.input(Input::Interrupt);
    assert_eq!(run.after(29_000), "");
    assert_eq!(run.say("t0", busy()), "");
    assert_eq!(run.after(1_000), "kill t1; kill s0");
    assert_eq!(run.after(28_999), "");
    assert_eq!(run.after(1), "kill t0");
}

#[test]
fn an_interrupt_leaves_survivors_their_checkpoint_and_the_job_does_not_start_again() {
    let settings = || {
        let mut settings = config(1, false, &[]);
        settings.job.spec.failure_policy.max_restarts = Some(1);
        settings
    };
    let mut run = Run::registered(settings());
    run.exit("t1", None, &[]);
    assert!(run.input(Input::Interrupt).starts_with("notice interrupted"));
    assert_eq!(run.exit("t0", Some(3), &["error: trainer 1 is gone"]), "kill s0");
    assert!(run.exit("s0", None, &[]).starts_with("done 130"));

    let mut run = Run::registered(settings());
    run.exit("t1", None, &[]);
    run.input(Input::Interrupt);
    assert_eq!(run.input(Input::Interrupt), "kill t0; kill s0", "once more ends it");
    run.exit("t0", None, &[]);
    let none = "done 130: interrupted; there is no checkpoint to resume from";
    assert_eq!(run.exit("s0", None, &[]), none);

    // A program of one's own has checkpoints that nobody here knows of.
    let mut run = Run::registered(crate::config::RunConfig { steps: None, ..settings() });
    run.input(Input::Interrupt);
    run.input(Input::Interrupt);
    run.exit("t0", None, &[]);
    run.exit("t1", None, &[]);
    assert_eq!(run.exit("s0", None, &[]), "done 130: interrupted");
}

#[test]
fn a_trainer_that_refuses_after_steps_were_done_leaves_the_others_their_checkpoint() {
    let full = ["error: cannot write checkpoint c: no space; check the space and permissions"];
    let mut run = Run::registered(config(1, false, &[]));
    run.say("t0", step(0, 1.0));
    let stop = "notice trainer 0: exit code 2; the other trainers stop";
    assert_eq!(run.exit("t0", Some(2), &full), stop);
    assert_eq!(run.exit("t1", Some(3), &["error: another reason"]), "kill s0");
    let end = "done 2: cannot write checkpoint c: no space; check the space and permissions";
    assert_eq!(run.exit("s0", None, &[]), end);
    // Also where its end is heard last.
    let mut run = Run::registered(config(0, true, &[]));
    run.say("t0", step(0, 1.0));
    run.exit("t1", Some(3), &["error: another reason"]);
    assert_eq!(run.exit("t0", Some(2), &full), end);
}

#[test]
fn survivors_have_a_grace_and_the_job_starts_again() {
    let mut settings = config(1, false, &[]);
    settings.job.spec.failure_policy.max_restarts = Some(1);
    let mut run = Run::registered(settings);
    // The failure of the survivor is heard first; the one who was killed is still the cause.
    run.exit("t0", Some(3), &["error: trainer 1 is gone"]);
    assert_eq!(run.after(11_999), "");
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
fn a_trainer_that_exits_by_itself_is_the_cause_though_one_that_gave_up_is_heard_first() {
    for order in [["t0", "t1"], ["t1", "t0"]] {
        let mut run = Run::registered(config(1, false, &[]));
        run.say("t0", step(0, 1.0));
        for trainer in order {
            let code = if trainer == "t0" { 3 } else { 42 };
            run.exit(trainer, Some(code), &["error: a reason"]);
        }
        let end = run.exit("s0", None, &[]);
        assert!(end.starts_with("done 3: the job failed: trainer 1: exit code 42"), "{end}");
    }
}
