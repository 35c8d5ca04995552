//! `cadre train` in a pod of several trainers: one process for each, as torchrun would start them.
//!
//! In: what the operator sets in such a pod, `LOCAL_WORLD_SIZE` and `GROUP_RANK`, and no rank. Out: this program again, once
//! for each rank, with `RANK` and `LOCAL_RANK`; the exit code of the rank whose end ended the others. A signal that asks for
//! the end goes to all ranks. When one has failed, the others have a while to end by themselves, with a checkpoint: who has not
//! joined yet would wait for the failed one for ever. Ranks end with this process, also by `kill -9`, since each is tied to its
//! parent, as this process is to its own.

use std::env::VarError;
use std::ffi::OsStr;
use std::io::{Error as IoError, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use cadre_crds::contract::{
    CADRE_INDEX, CADRE_PARENT_PID, GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, RANK,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::BAD_INPUT;

/// Exit code of a rank that is not the cause.
const NO_CAUSE: u8 = 3;
/// For how long the others may go on when a rank has failed; then they are asked to end.
const OTHERS_GO_ON_FOR: Duration = Duration::from_mins(5);
/// After what they are killed.
const KILLED_AFTER: Duration = Duration::from_secs(30);

/// Ranks of this pod.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Ranks {
    first: u32,
    count: u32,
    /// See [`OTHERS_GO_ON_FOR`] and [`KILLED_AFTER`].
    limits: [Duration; 2],
}

impl Ranks {
    /// The ranks that this process has to start: none where it is a rank itself.
    pub(crate) fn of_this_pod() -> Result<Option<Self>, Error> {
        Self::of(|name| std::env::var(name))
    }

    fn of(variable: impl Fn(&str) -> Result<String, VarError>) -> Result<Option<Self>, Error> {
        let is_set = |name| variable(name) != Err(VarError::NotPresent);
        let number = |name: &'static str| {
            let value = variable(name).unwrap_or_default();
            value.parse::<u32>().map_err(|_| Error::Malformed { name, value })
        };
        if is_set(RANK) || is_set(CADRE_INDEX) || !is_set(LOCAL_WORLD_SIZE) {
            return Ok(None);
        }
        let count = number(LOCAL_WORLD_SIZE)?;
        if count < 2 {
            return Ok(None);
        }
        let pod = number(GROUP_RANK)?;
        let first = pod.checked_mul(count).filter(|it| it.checked_add(count).is_some());
        let first = first.ok_or(Error::Malformed { name: GROUP_RANK, value: pod.to_string() })?;
        Ok(Some(Self { first, count, limits: [OTHERS_GO_ON_FOR, KILLED_AFTER] }))
    }

    /// Runs `program` with these arguments once for each rank, and waits for all of them.
    pub(crate) fn run(self, program: &OsStr, arguments: &[impl AsRef<OsStr>]) -> Result<u8, Error> {
        // All on this thread: ranks end with the thread that started them.
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
        runtime.block_on(async {
            // Before the first rank is there: as the first process of a pod this one would not hear them otherwise.
            let mut asked = Asked::listen().map_err(Error::Runtime)?;
            let mut alive = Vec::new();
            let mut ends = JoinSet::new();
            for local in 0..self.count {
                let rank = self.first.saturating_add(local);
                let mut command = Command::new(program);
                command
                    .args(arguments)
                    .env(RANK, rank.to_string())
                    .env(LOCAL_RANK, local.to_string())
                    .env(CADRE_PARENT_PID, std::process::id().to_string())
                    .kill_on_drop(true);
                let mut child = command.spawn().map_err(|source| Error::Start {
                    program: program.display().to_string(),
                    source,
                })?;
                alive.extend(child.id().map(|id| (rank, id)));
                ends.spawn(async move { (rank, child.wait().await) });
            }
            // When the next of the signals that hurry the others is due.
            let mut late: Option<Instant> = None;
            let [patience, grace] = self.limits;
            let mut hurry = [(Signal::KILL, grace), (Signal::TERM, grace)].to_vec();
            let mut code = 0;
            loop {
                let until = late.unwrap_or_else(|| Instant::now() + patience);
                tokio::select! {
                    end = ends.join_next() => match end {
                        Some(Ok((rank, end))) => {
                            alive.retain(|it| it.0 != rank);
                            let own = ended(rank, end.map_err(Error::Runtime)?);
                            // Who was hurried is no cause.
                            if hurry.len() == 2 {
                                code = worse(code, own);
                            }
                            if own != 0 {
                                late.get_or_insert_with(|| Instant::now() + patience);
                            }
                        }
                        Some(Err(error)) => return Err(Error::Runtime(IoError::other(error))),
                        None => return Ok(code),
                    },
                    which = asked.next() => send(which, &alive),
                    () = sleep_until(until), if late.is_some() => if let Some((which, rest)) = hurry.pop() {
                        send(which, &alive);
                        late = Some(Instant::now() + rest);
                    },
                }
            }
        })
    }
}

/// Sends a signal to ranks, by their process ids.
fn send(which: Signal, ranks: &[(u32, u32)]) {
    for (_, id) in ranks {
        // It may have ended meanwhile.
        if let Some(pid) = i32::try_from(*id).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, which);
        }
    }
}

/// Signals that ask for the end.
struct Asked {
    terminate: Signals,
    interrupt: Signals,
}

impl Asked {
    fn listen() -> Result<Self, IoError> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
        }
    }
}

/// Exit code of a rank, as a shell would tell it. Says who ended otherwise than well.
fn ended(rank: u32, status: ExitStatus) -> u8 {
    let (code, how) = match (status.code(), status.signal()) {
        (Some(0), _) => return 0,
        (Some(code), _) => (code, format!("ended with exit code {code}")),
        (None, Some(number)) => (128 + number, format!("was killed by signal {number}")),
        (None, None) => (1, "ended".to_owned()),
    };
    // The reason is what the rank said itself.
    let _ = writeln!(std::io::stderr(), "rank {rank} {how}");
    u8::try_from(code).unwrap_or(1)
}

/// The code that tells more of why all ranks end: bad input, then that of the first rank that is a cause.
fn worse(before: u8, now: u8) -> u8 {
    let weight = |code| match code {
        0 => 0,
        NO_CAUSE => 1,
        BAD_INPUT => 3,
        _ => 2,
    };
    if weight(now) > weight(before) { now } else { before }
}

/// Why ranks do not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A variable that the operator or a launcher sets is not a number.
    #[error(
        "{name} is {value:?}, which is no number of a pod's trainers; start `cadre train` with RANK, or where the \
         operator sets {name}"
    )]
    Malformed {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
    },
    /// Signals or the ends of processes cannot be heard.
    #[error("ranks cannot be waited for: {0}; raise the limits on processes and open files")]
    Runtime(IoError),
    /// A rank does not start.
    #[error("{program} does not start once more: {source}; raise the limit on processes")]
    Start {
        /// Path of the program.
        program: String,
        /// Error of the system.
        source: IoError,
    },
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Ranks>, Error> {
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        Ranks::of(|name| variables.get(name).map(ToString::to_string).ok_or(VarError::NotPresent))
    }

    #[test]
    fn only_a_pod_of_several_trainers_without_a_rank_starts_some() {
        let pod = [(LOCAL_WORLD_SIZE, "4"), (GROUP_RANK, "3")];
        let expected = Ranks { first: 12, count: 4, limits: [OTHERS_GO_ON_FOR, KILLED_AFTER] };
        assert_eq!(of(&pod).unwrap(), Some(expected));
        for more in [(RANK, "12"), (CADRE_INDEX, "12"), (LOCAL_WORLD_SIZE, "1")] {
            assert_eq!(of(&[&pod[..], &[more]].concat()).unwrap(), None, "{more:?}");
        }
        assert_eq!(of(&[]).unwrap(), None);
        for (name, value) in
            [(GROUP_RANK, "x"), (GROUP_RANK, "4294967295"), (LOCAL_WORLD_SIZE, "-1")]
        {
            let refused = of(&[&pod[..], &[(name, value)]].concat()).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("{name} is {value:?}")), "{refused}");
        }
        let refused = of(&pod[..1]).unwrap_err().to_string();
        assert!(refused.starts_with("GROUP_RANK is \"\""), "{refused}");
    }

    /// Runs a script in two ranks, the third and the fourth, with a folder as its `$0`. One at a time: a signal to this process
    /// is heard by all of them.
    fn run(script: &str, folder: &Path) -> u8 {
        run_for(Duration::from_mins(10), script, folder)
    }

    /// As [`run`]; when a rank has failed, the other one has so long.
    fn run_for(patience: Duration, script: &str, folder: &Path) -> u8 {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let ranks = Ranks { first: 2, count: 2, limits: [patience; 2] };
        let arguments = [OsStr::new("-c"), OsStr::new(script), folder.as_os_str()];
        ranks.run(OsStr::new("/bin/sh"), &arguments).unwrap()
    }

    #[test]
    fn each_rank_has_its_numbers_and_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo $RANK $LOCAL_RANK $CADRE_PARENT_PID > $0/$RANK";
        assert_eq!(run(script, folder.path()), 0);
        let parent = std::process::id();
        for (rank, local) in [(2, 0), (3, 1)] {
            let said = std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap();
            assert_eq!(said, format!("{rank} {local} {parent}\n"));
        }
    }

    #[test]
    fn all_ranks_are_waited_for_and_the_cause_is_the_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        // Rank 3 is the cause; rank 2 ends when it sees that.
        let script = "if [ $RANK = 3 ]; then touch $0/end; exit 7; fi
            until [ -e $0/end ]; do sleep 0.01; done; touch $0/seen; exit 3";
        assert_eq!(run(script, folder.path()), 7);
        assert!(folder.path().join("seen").exists());
        assert_eq!(run("kill -9 $$", folder.path()), 137);
    }

    #[test]
    fn who_waits_for_a_rank_that_has_failed_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        for deaf in ["", "trap '' TERM; "] {
            let script =
                format!("if [ $RANK = 2 ]; then exit 2; fi; {deaf}while :; do sleep 0.01; done");
            let patience = Duration::from_millis(50);
            assert_eq!(run_for(patience, &script, folder.path()), BAD_INPUT, "{deaf:?}");
        }
    }

    #[test]
    fn a_request_to_end_reaches_every_rank() {
        let folder = tempfile::tempdir().unwrap();
        let script = "trap 'touch $0/asked-$RANK; exit 143' TERM; touch $0/$RANK
            while :; do sleep 0.01; done";
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !["2", "3"].iter().all(|it| folder.path().join(it).exists()) {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                kill_process(rustix::process::getpid(), Signal::TERM).unwrap();
            });
            assert_eq!(run(script, folder.path()), 143);
        });
        assert!(["asked-2", "asked-3"].iter().all(|it| folder.path().join(it).exists()));
    }

    #[test]
    fn the_exit_code_is_that_of_the_cause() {
        let code = |codes: &[u8]| codes.iter().fold(0, |all, one| worse(all, *one));
        for (codes, expected) in [
            (&[0, 0][..], 0),
            (&[NO_CAUSE, 137], 137),
            (&[137, NO_CAUSE], 137),
            (&[143, 137], 143),
            (&[1, BAD_INPUT, NO_CAUSE], BAD_INPUT),
            (&[BAD_INPUT, 1], BAD_INPUT),
            (&[0, NO_CAUSE], NO_CAUSE),
        ] {
            assert_eq!(code(codes), expected, "{codes:?}");
        }
    }
}
