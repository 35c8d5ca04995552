//! Short ways to make and name messages.
//!
//! In: the parts of a message. Out: the message with its envelope, so that callers write
//! `Drained {}.into()` and not three nested types. Nothing is sent here.

use std::fmt;

use crate::proto::{
    self, ControllerMessage, Direction, Hello, Role, ViewNumber, WorkerMessage, controller_message,
    worker_message,
};

/// Wraps a message's body into its envelope.
macro_rules! envelope {
    ($envelope:ident, $module:ident: $($body:ident),+ $(,)?) => {$(
        impl From<proto::$body> for $envelope {
            fn from(body: proto::$body) -> Self {
                Self { message: Some($module::Message::$body(body)) }
            }
        }
    )+};
}

envelope!(
    WorkerMessage, worker_message:
    Hello, ServerReport, Progress, PhaseReached, Notice, Drained, Finished, Bye, Listening,
    Leaving, Probed, Saved, Busy,
);
envelope!(
    ControllerMessage, controller_message:
    Welcome, Conductor, View, FaultsFired, Drain, Stop, Trainers,
);

impl Hello {
    /// Role, index and incarnation in words: `server 1 (incarnation 0)`.
    pub fn name(&self) -> String {
        let role = match self.role() {
            Role::Trainer => "trainer",
            Role::Server => "server",
            Role::Unspecified => "worker without a role",
        };
        format!("{role} {} (incarnation {})", self.index, self.incarnation)
    }
}

impl fmt::Display for ViewNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.counter)
    }
}

impl ViewNumber {
    /// Term and counter, in the order that views are compared.
    pub fn order(&self) -> (u64, u64) {
        (self.term, self.counter)
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Unspecified => "no direction",
        })
    }
}
