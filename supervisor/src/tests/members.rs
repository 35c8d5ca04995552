//! Tables over who is a member of the run: messages that say too little.

use cadre_control::proto::{self, worker_message::Message};

use super::script::{Run, config};

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
