//! The lasting messages of a worker: those that every controller has to know, also one that comes later.
//!
//! In: every message, in the order in which it is sent. Out: the newest lasting message of each kind, in the order in which they
//! were last sent. Such a message states how things are, never what has changed, so reading it twice does no harm.
//!
//! Two things are not here. The worker's addresses are in the hello of a later stream. News of a moment is never repeated, since
//! it is old by then.

use std::mem::discriminant;

use crate::proto::WorkerMessage;
use crate::proto::worker_message::Message;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Said(Vec<WorkerMessage>);

impl Said {
    /// Keeps a lasting message, behind all others. It replaces the last one of its kind.
    pub(super) fn note(&mut self, message: &WorkerMessage) {
        if lasts(message) {
            self.0.retain(|it| kind(it) != kind(message));
            self.0.push(message.clone());
        }
    }

    /// Messages that are sent again on a new stream.
    pub(super) fn again(&self) -> impl Iterator<Item = WorkerMessage> {
        self.0.iter().cloned()
    }
}

fn kind(message: &WorkerMessage) -> Option<std::mem::Discriminant<Message>> {
    message.message.as_ref().map(discriminant)
}

/// Whether a controller that comes later has to know the message too.
pub(super) fn lasts(message: &WorkerMessage) -> bool {
    match message.message {
        Some(
            Message::Progress(_)
            | Message::Saved(_)
            | Message::Probed(_)
            | Message::Leaving(_)
            | Message::Drained(_)
            | Message::Finished(_)
            | Message::Bye(_),
        ) => true,
        Some(
            Message::Hello(_)
            | Message::Listening(_)
            | Message::ServerReport(_)
            | Message::PhaseReached(_)
            | Message::Notice(_)
            | Message::Busy(_),
        )
        | None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Bye, Finished, Notice, Probed, Progress, Saved, ServerReport};

    #[test]
    fn the_newest_of_each_kind_is_said_again_in_order() {
        let step = |step| WorkerMessage::from(Progress { step, ..Progress::default() });
        let mut said = Said::default();
        for message in [
            step(1),
            Saved { steps: 1 }.into(),
            Probed::default().into(),
            Saved { steps: 2 }.into(),
            ServerReport::default().into(),
            step(2),
            Notice::default().into(),
            Finished::default().into(),
            Bye {}.into(),
        ] {
            said.note(&message);
        }
        let again: Vec<_> = said.again().collect();
        let expected = [
            Probed::default().into(),
            Saved { steps: 2 }.into(),
            step(2),
            Finished::default().into(),
            Bye {}.into(),
        ];
        assert_eq!(again, expected);
    }
}
