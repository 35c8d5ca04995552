//! Tables over who is a member of the run: second processes, servers that leave, messages that say too little.

use cadre_control::proto::{self, Hello, worker_message::Message};
use cadre_control::server::LinkId;

use super::super::action::Input;
use super::super::ending::Exit;
use super::super::event::WorkerName;
use super::script::{Run, config, link, name};

#[test]
fn a_second_process_of_a_rank_is_refused_and_ends_the_job_by_name() {
    let attach = |run: &mut Run, (link, role, pid): (u64, proto::Role, u32)| {
        let hello = Hello { role: role.into(), index: 0, pid, ..Hello::default() };
        run.input(Input::Attached { link: LinkId(link), hello })
    };
    let mut run = Run::registered(config(1, false, &[]));
    let server = attach(&mut run, (7_700, proto::Role::Server, 77));
    let refused =
        "process 77 was refused: server 0 is here already, as process 0; start each rank once";
    assert_eq!(server, format!("refuse; notice {refused}"), "it is no rank");
    let second = attach(&mut run, (7_701, proto::Role::Trainer, 78));
    assert_eq!(second, "refuse; kill t0; kill t1; kill s0");
    for worker in ["t0", "t1"] {
        run.exit(worker, None, &[]);
    }
    assert_eq!(
        run.exit("s0", None, &[]),
        "done 2: process 78 joins as a rank of the job, but trainer 0 is here already, as process 0; start each rank once"
    );
    // A process that has come in the place of one that is gone.
    let mut run = Run::registered(config(1, false, &[]));
    run.input(Input::Detached { link: link("t0") });
    assert!(attach(&mut run, (0, proto::Role::Trainer, 77)).starts_with("welcome t0"));
}

#[test]
fn a_server_that_was_asked_to_end_leaves_the_view_drains_and_is_replaced_when_it_has_ended() {
    let leaving = || Message::Leaving(proto::Leaving {});
    let mut run = Run::registered(config(2, false, &[]));
    // Ever so often: none of them is a crash.
    for incarnation in 0..5 {
        let short = |number| if number == 0 { "s1".into() } else { format!("s1.{number}") };
        let [worker, next] = [incarnation, incarnation + 1].map(short);
        let view = 2 * incarnation + 2;
        let told =
            if incarnation == 0 { String::new() } else { format!(" (incarnation {incarnation})") };
        assert_eq!(
            run.say(&worker, leaving()),
            format!(
                "notice server 1{told} was asked to end: it leaves when its work is done; drain s1; view 1.{view} [0.0 -]"
            )
        );
        assert_eq!(run.say(&worker, leaving()), "", "it is asked again");
        // Its stream breaks: it is told again, and offered no more.
        run.input(Input::Detached { link: link(&worker) });
        assert_eq!(run.attach(&worker), "welcome s1; drain s1");
        assert_eq!(run.say(&worker, Message::Drained(proto::Drained {})), "");
        let ended = run.exit(&worker, Some(0), &[]);
        assert_eq!(
            ended,
            format!("notice server 1{told} has left; starting a replacement; spawn {next}")
        );
        assert_eq!(
            run.attach(&next),
            format!("welcome s1; view 1.{} [0.0 1.{}]", view + 1, incarnation + 1)
        );
    }
    // One that is killed meanwhile has not left.
    run.say("s1.5", leaving());
    assert_eq!(
        run.exit("s1.5", None, &[]),
        "notice server 1 (incarnation 5): killed by SIGKILL; starting a replacement; spawn s1.6"
    );
    // A trainer does not leave alone.
    assert_eq!(run.say("t1", leaving()), "");
}

#[test]
fn servers_that_end_before_they_joined_are_given_up_when_they_do_so_again_and_again() {
    let ends = |exits: &[(Option<i32>, Option<i32>)], apart: u64| {
        let (mut run, _) = Run::begin(config(1, false, &[]));
        let mut said = Vec::new();
        for (incarnation, (code, signal)) in (0..).zip(exits) {
            let name = WorkerName { incarnation, ..name("s0") };
            let exit = Exit { code: *code, signal: *signal, log: Vec::new() };
            said.push(run.input(Input::Exited { worker: name, exit }));
            run.now += apart;
        }
        said
    };
    // The exit code of a server that was asked to end, and that of a process that does not hear the signal yet.
    let asked = [(Some(143), None), (None, Some(15))];
    let left = ends(&asked.repeat(3), 5_100);
    for (number, said) in (1..).zip(&left) {
        assert!(said.contains("has left; starting a replacement"), "{said}");
        assert!(said.contains(&format!("spawn s0.{number}")), "{said}");
    }
    let given_up = ends(&asked.repeat(2), 0);
    assert_eq!(
        given_up[2],
        "notice server 0 (incarnation 2): exit code 143; it ended 3 times within 10s, now by SIGTERM before it joined, and is \
         not started again"
    );
    for exit in [(Some(0), None), (Some(1), None), (None, Some(9))] {
        let crashed = ends(&[exit; 3], 0);
        assert!(crashed[2].contains("it died 3 times within"), "{crashed:?}");
        let both = ends(&[asked[0], asked[1], exit], 0);
        assert!(both[2].contains("it died 3 times within"), "{both:?}");
    }
}

#[test]
fn a_moment_without_a_direction_ends_the_job_by_name() {
    let mut run = Run::registered(config(1, false, &[]));
    let reached = Message::PhaseReached(proto::PhaseReached { step: 7, direction: 0 });
    assert_eq!(run.say("t0", reached), "kill t0; kill t1; kill s0");
    for worker in ["t0", "t1"] {
        run.exit(worker, None, &[]);
    }
    let ended = run.exit("s0", None, &[]);
    assert!(
        ended.starts_with("done 3: trainer 0: the moment of step 7 says no direction"),
        "{ended}"
    );
}
