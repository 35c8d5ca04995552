//! Faults that a user orders with `--fault`.
//!
//! In: `KIND[:INDEX]@STEP[:fwd|bwd]`. Out: a [`Fault`], and a refusal of those that can never fire.
//! Nothing is fired here; the supervisor does that when the conductor says that the step is there.

use std::fmt;
use std::str::FromStr;

use cadre_control::settings::Moment;
use cadre_planner::Direction;

/// What to do to the job, and when.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// SIGKILL to a dedicated server; without an index to the first that runs.
    KillServer {
        /// Which.
        index: Option<u16>,
        /// When.
        at: Moment,
    },
    /// SIGSTOP to a dedicated server, never continued; without an index to the first that runs.
    StopServer {
        /// Which.
        index: Option<u16>,
        /// When.
        at: Moment,
    },
    /// One more dedicated server.
    AddServer {
        /// When.
        at: Moment,
    },
    /// SIGKILL to a trainer; without an index to the last.
    KillTrainer {
        /// Which.
        index: Option<u16>,
        /// When.
        at: Moment,
    },
}

impl Fault {
    /// When it fires.
    pub fn at(&self) -> Moment {
        match *self {
            Self::KillServer { at, .. }
            | Self::StopServer { at, .. }
            | Self::AddServer { at }
            | Self::KillTrainer { at, .. } => at,
        }
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let syntax = || Error::Syntax { text: text.to_owned() };
        let (what, when) = text.split_once('@').ok_or_else(syntax)?;
        let (kind, index) = match what.split_once(':') {
            Some((kind, index)) => (kind, Some(index.parse::<u16>().map_err(|_| syntax())?)),
            None => (what, None),
        };
        let (step, direction) = match when.split_once(':') {
            Some((step, "fwd")) => (step, Direction::Forward),
            Some((step, "bwd")) => (step, Direction::Backward),
            Some(_) => return Err(syntax()),
            None => (when, Direction::Forward),
        };
        let at = Moment { step: step.parse().map_err(|_| syntax())?, direction };
        match (kind, index) {
            ("kill-server", index) => Ok(Self::KillServer { index, at }),
            ("stop-server", index) => Ok(Self::StopServer { index, at }),
            ("add-server", None) => Ok(Self::AddServer { at }),
            ("kill-trainer", index) => Ok(Self::KillTrainer { index, at }),
            _ => Err(syntax()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, index) = match *self {
            Self::KillServer { index, .. } => ("kill-server", index),
            Self::StopServer { index, .. } => ("stop-server", index),
            Self::AddServer { .. } => ("add-server", None),
            Self::KillTrainer { index, .. } => ("kill-trainer", index),
        };
        f.write_str(kind)?;
        if let Some(index) = index {
            write!(f, ":{index}")?;
        }
        let Moment { step, direction } = self.at();
        let direction = match direction {
            Direction::Forward => "fwd",
            Direction::Backward => "bwd",
        };
        write!(f, "@{step}:{direction}")
    }
}

/// What decides whether a fault can fire.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// First step of the run; above 0 when it resumes.
    pub first_step: u64,
    /// Steps of the job, where they are known.
    pub steps: Option<u64>,
    /// Trainers of the job.
    pub trainers: u16,
    /// Dedicated servers that the run starts with.
    pub servers: u16,
    /// Whether dead servers are replaced.
    pub replace: bool,
}

/// Refuses the first fault that can never fire.
pub fn check(faults: &[Fault], reach: Reach) -> Result<(), Error> {
    let mut ordered: Vec<&Fault> = faults.iter().collect();
    ordered.sort_by_key(|fault| fault.at());
    let mut servers = reach.servers;
    let mut gone = Vec::new();
    for &fault in ordered {
        let Moment { step, .. } = fault.at();
        if let Some(steps) = reach.steps.filter(|&steps| step >= steps) {
            return Err(Error::AfterTheEnd { fault, steps });
        }
        if step < reach.first_step {
            return Err(Error::BeforeTheStart { fault, first: reach.first_step });
        }
        match fault {
            Fault::AddServer { .. } => servers = servers.saturating_add(1),
            Fault::KillServer { index, .. } | Fault::StopServer { index, .. } => {
                let alive = usize::from(servers) > gone.len();
                match index {
                    _ if servers == 0 => return Err(Error::NoServer { fault }),
                    Some(index) if index >= servers => {
                        return Err(Error::UnknownServer { fault, servers });
                    }
                    Some(index) if gone.contains(&index) => return Err(Error::Gone { fault }),
                    None if !alive => return Err(Error::Gone { fault }),
                    Some(_) | None => {}
                }
                if !reach.replace {
                    let first = (0..servers).find(|index| !gone.contains(index));
                    gone.extend(index.or(first));
                }
            }
            Fault::KillTrainer { index, .. } => {
                if index.is_some_and(|index| index >= reach.trainers) {
                    return Err(Error::UnknownTrainer { fault, trainers: reach.trainers });
                }
            }
        }
    }
    Ok(())
}

/// Why a fault is refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not a fault.
    #[error(
        "fault {text:?} is not understood; write kill-server[:I]@STEP[:fwd|bwd], \
         stop-server[:I]@…, add-server@… or kill-trainer[:I]@…"
    )]
    Syntax {
        /// The text as it was given.
        text: String,
    },
    /// The job ends before.
    #[error("fault {fault} can never fire: the job has steps 0 to {}; choose one of them", steps.saturating_sub(1))]
    AfterTheEnd {
        /// The fault.
        fault: Fault,
        /// Steps of the job.
        steps: u64,
    },
    /// The run resumes after it.
    #[error("fault {fault} can never fire: the run resumes at step {first}; choose a later step")]
    BeforeTheStart {
        /// The fault.
        fault: Fault,
        /// First step of the run.
        first: u64,
    },
    /// There is no dedicated server at that time.
    #[error(
        "fault {fault} can never fire: the run has no dedicated server then; set spec.replicas of \
         the pool to 1 or more and leave --attention at pool"
    )]
    NoServer {
        /// The fault.
        fault: Fault,
    },
    /// There is no such server at that time.
    #[error("fault {fault} can never fire: servers are 0 to {} then; choose one", servers - 1)]
    UnknownServer {
        /// The fault.
        fault: Fault,
        /// Servers at that time.
        servers: u16,
    },
    /// Nothing replaces what an earlier fault took.
    #[error(
        "fault {fault} can never fire: an earlier fault took the server and --no-replace leaves \
         its slot vacant; drop one of the two"
    )]
    Gone {
        /// The fault.
        fault: Fault,
    },
    /// There is no such trainer.
    #[error("fault {fault} can never fire: trainers are 0 to {}; choose one", trainers.saturating_sub(1))]
    UnknownTrainer {
        /// The fault.
        fault: Fault,
        /// Trainers of the job.
        trainers: u16,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const REACH: Reach =
        Reach { first_step: 2, steps: Some(10), trainers: 2, servers: 2, replace: true };

    fn fault(text: &str) -> Fault {
        text.parse().expect("a fault of this test")
    }

    #[test]
    fn texts_are_read_and_written_back() {
        for (text, canonical) in [
            ("kill-server@3", "kill-server@3:fwd"),
            ("kill-server:1@3:bwd", "kill-server:1@3:bwd"),
            ("stop-server:0@3:fwd", "stop-server:0@3:fwd"),
            ("add-server@7", "add-server@7:fwd"),
            ("kill-trainer:1@0:bwd", "kill-trainer:1@0:bwd"),
        ] {
            assert_eq!(fault(text).to_string(), canonical);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "kill-server",
            "kill-server@",
            "kill-server@-1",
            "kill-server@x",
            "@3",
            "kill-server:@3",
            "kill-server:1:2@3",
            "kill-server@3:up",
            "kill-server@3:fwd:fwd",
            "add-server:1@3",
            "break-server@3",
            "kill-server:70000@3",
        ] {
            let refusal = text.parse::<Fault>().expect_err(text);
            assert_eq!(refusal, Error::Syntax { text: text.to_owned() });
        }
    }

    #[test]
    fn faults_that_can_never_fire_are_refused() {
        let no_server = Reach { servers: 0, ..REACH };
        let vacant = Reach { replace: false, ..REACH };
        let unknown = Reach { steps: None, ..REACH };
        for (faults, reach, expected) in [
            (vec!["kill-server@9"], REACH, ""),
            (vec!["kill-server@10"], REACH, "steps 0 to 9"),
            (vec!["kill-server@10"], unknown, ""),
            (vec!["kill-server@1"], REACH, "resumes at step 2"),
            (vec!["kill-server:2@3"], REACH, "servers are 0 to 1"),
            (vec!["kill-server:2@3", "add-server@2"], REACH, ""),
            (vec!["kill-server:2@3", "add-server@4"], REACH, "servers are 0 to 1"),
            (vec!["stop-server@3"], no_server, "no dedicated server"),
            (vec!["stop-server@3", "add-server@2"], no_server, ""),
            (vec!["kill-trainer:2@3"], REACH, "trainers are 0 to 1"),
            (vec!["kill-server:1@3", "kill-server:1@4"], REACH, ""),
            (vec!["kill-server:1@3", "kill-server:1@4"], vacant, "--no-replace"),
            (vec!["kill-server@3", "stop-server@4", "stop-server@5"], vacant, "--no-replace"),
        ] {
            let parsed: Vec<Fault> = faults.iter().map(|text| fault(text)).collect();
            let refusal = check(&parsed, reach).err().map_or(String::new(), |it| it.to_string());
            assert!(refusal.contains(expected), "{faults:?}: {refusal}");
            assert_eq!(refusal.is_empty(), expected.is_empty(), "{faults:?}: {refusal}");
        }
    }
}
