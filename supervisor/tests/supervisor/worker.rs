//! A worker that speaks the control protocol and trains nothing.
//!
//! In: the environment that the supervisor sets, and `AT_STEP_3`, which says what trainer 0 does when it
//! comes to step 3: refuse, wait to be stopped, or (anything else) go on. Out: an exit code.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use cadre_control::client::{Attachment, Options, attach};
use cadre_control::proto::{
    self, Drained, Finished, Hello, Listening, PhaseReached, Progress, View,
    controller_message::Message, finished,
};
use cadre_control::{CONTROL_VERSION, DATA_VERSION, Endpoint, Settings};
use cadre_worker::process::arm_parent_death;

use super::{PATIENCE, STEPS};

pub(crate) fn trainer() -> i32 {
    let index = number("CADRE_INDEX");
    let Attachment { welcome, sender, receiver } = join();
    let settings = Settings::parse(&welcome.settings, welcome.control_version).expect("settings");
    let roster = wait(&receiver, |message| match message {
        Message::Trainers(roster) => Some(roster),
        _ => None,
    });
    assert_eq!(roster.trainers.len(), usize::from(settings.trainers));
    let finish = |outcome: finished::Outcome, message: &str, exit_code| {
        let (message, sample) = (message.to_owned(), "In the beginning".to_owned());
        let outcome = outcome.into();
        sender.send(Finished { outcome, message, exit_code, sample }).expect("room");
        sender.leave(PATIENCE).expect("the supervisor reads");
        exit_code
    };
    if index > 0 {
        // Ends when the supervisor's stream says so, or with the conductor's files.
        let out = PathBuf::from(std::env::var("CADRE_OUT").expect("set by the supervisor"));
        let done = out.join(format!("done-{}", settings.attempt));
        while !done.exists() {
            let message = receiver.recv_timeout(Duration::from_millis(20));
            if let Err(RecvTimeoutError::Disconnected) = message {
                return 1;
            }
        }
        return finish(finished::Outcome::Completed, "", 0);
    }
    let out = PathBuf::from(std::env::var("CADRE_OUT").expect("set by the supervisor"));
    let full = |view: &View| view.slots.iter().all(|slot| slot.server.is_some());
    let mut view = wait(&receiver, |message| match message {
        Message::View(view) if full(&view) => Some(view),
        _ => None,
    });
    for step in 0..STEPS {
        if step == 3 {
            match std::env::var("AT_STEP_3").as_deref() {
                Ok("refuse") => {
                    eprintln!("error: no such data; give --data");
                    return 2;
                }
                Ok("wait") => {
                    std::fs::write(out.join("waits"), "").expect("room on the disk");
                    wait(&receiver, |message| match message {
                        Message::Stop(stop) => Some(stop),
                        _ => None,
                    });
                    std::fs::write(out.join("done-1"), "").expect("room on the disk");
                    return finish(finished::Outcome::Stopped, "", 0);
                }
                _ => {}
            }
        }
        if settings.faults.iter().any(|moment| moment.step == step) {
            let direction = proto::Direction::Forward.into();
            sender.send(PhaseReached { step, direction }).expect("room");
            wait(&receiver, |message| match message {
                Message::FaultsFired(fired) => Some(fired),
                _ => None,
            });
            view = wait(&receiver, |message| match message {
                Message::View(next) if full(&next) => Some(next),
                _ => None,
            });
        }
        let progress = Progress { step, view: view.number, ..Progress::default() };
        sender.send(Progress { header: format!("{{\"step\":{step}}}"), ..progress }).expect("room");
    }
    std::fs::write(out.join(format!("done-{}", settings.attempt)), "").expect("room on the disk");
    finish(finished::Outcome::Completed, "", 0)
}

pub(crate) fn server() -> i32 {
    let Attachment { sender, receiver, .. } = join();
    while let Ok(message) = receiver.recv() {
        if let Some(Message::Drain(_)) = message.message {
            sender.send(Drained {}).expect("room");
            return i32::from(sender.leave(PATIENCE).is_err());
        }
    }
    1
}

fn join() -> Attachment {
    arm_parent_death().expect("the supervisor lives");
    let trainer = std::env::var("CADRE_ROLE").expect("set by the supervisor") == "trainer";
    let role = if trainer { proto::Role::Trainer } else { proto::Role::Server };
    let hello = Hello {
        role: role.into(),
        index: number("CADRE_INDEX"),
        incarnation: number("CADRE_INCARNATION"),
        pid: std::process::id(),
        control_version: CONTROL_VERSION,
        data_version: DATA_VERSION,
        ..Hello::default()
    };
    let control = std::env::var("CADRE_CONTROL").expect("set by the supervisor");
    let endpoint = Endpoint::parse(&control, None).expect("an address");
    let joined = attach(endpoint, hello, Options::default()).expect("a welcome");
    assert_eq!(joined.welcome.job_secret.len(), 32);
    let exchange_address = format!("127.0.0.1:{}", std::process::id());
    joined.sender.send(Listening { exchange_address, ring_address: "r:1".into() }).expect("room");
    joined
}

/// Waits for a message that `wanted` takes.
fn wait<T>(
    receiver: &Receiver<proto::ControllerMessage>,
    mut wanted: impl FnMut(Message) -> Option<T>,
) -> T {
    loop {
        let message = receiver.recv_timeout(PATIENCE).expect("the supervisor answers");
        if let Some(found) = message.message.and_then(&mut wanted) {
            return found;
        }
    }
}

fn number(variable: &str) -> u32 {
    std::env::var(variable).expect("set by the supervisor").parse().expect("a number")
}
