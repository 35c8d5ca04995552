//! The processes of a pass of `cadre check`.
//!
//! In: a command, which pass it is, how many ranks. Out: how each process ended, once all have. A rank that fails ends the
//! others, which would wait for it. What they write is kept in files, and shown where one fails.

use std::fs::File;
use std::io::Error as IoError;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use cadre_crds::contract;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Variables that tell a rank that `cadre check` tries it, and in which pass.
const CADRE_CHECK: &str = "CADRE_CHECK";
const CADRE_CHECK_PASS: &str = "CADRE_CHECK_PASS";
/// Lines of a log that are shown.
const TAIL_LINES: usize = 12;

/// Which of the three runs of the script this is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Pass {
    Base,
    Again,
    One,
}

impl Pass {
    /// Name of the pass: that of its folder, and the one that ranks read from their environment.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Again => "again",
            Self::One => "one",
        }
    }
}

/// Why the processes of a pass could not be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RanksError {
    #[error("{program} does not start: {source}; correct the command")]
    Start { program: String, source: IoError },
    #[error("the file of what a rank says, {}: {source}", path.display())]
    Log { path: PathBuf, source: IoError },
    #[error("a port for the ranks to meet at: {0}")]
    Port(IoError),
    #[error("a process could not be waited for: {0}")]
    Wait(IoError),
}

/// A process, and the file that it writes to.
struct Running {
    child: Child,
    /// Names the process; readable once it has ended.
    end: OwnedFd,
    log: PathBuf,
    status: Option<ExitStatus>,
}

/// All processes of a pass have ended.
pub(super) struct Ended {
    /// Each process with its log: one for each rank, or one for all ranks if torchrun starts them.
    all: Vec<(Option<ExitStatus>, PathBuf)>,
}

impl Ended {
    pub(super) fn is_success(&self) -> bool {
        self.all.iter().all(|it| it.0.is_some_and(|it| it.success()))
    }

    fn of(&self, rank: u16) -> &(Option<ExitStatus>, PathBuf) {
        // Prefers a process that failed by itself over one that was killed because another failed.
        let failed = |it: &&(Option<ExitStatus>, PathBuf)| {
            it.0.is_some_and(|it| it.code().is_some_and(|it| it != 0))
        };
        let of_rank = self.all.get(usize::from(rank)).or_else(|| self.all.first());
        self.all.iter().find(failed).or(of_rank).expect("a pass has a process")
    }

    /// How a rank ended.
    pub(super) fn how(&self, rank: u16) -> String {
        self.of(rank).0.map_or_else(|| "an unknown status".into(), |it| it.to_string())
    }

    /// The last lines of what it wrote.
    pub(super) fn said(&self, rank: u16) -> Vec<String> {
        let text = std::fs::read(&self.of(rank).1).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        tail.iter().map(|it| (*it).to_owned()).collect()
    }
}

/// Runs a pass to its end.
pub(super) fn run(
    words: &[String],
    pass: Pass,
    (folder, launches): (&Path, bool),
    ranks: u16,
) -> Result<Ended, RanksError> {
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|it| it.local_addr())
        .map_err(RanksError::Port)?
        .port()
        .to_string();
    let processes = if launches { 1 } else { ranks };
    let mut all = Processes(Vec::new());
    for rank in 0..processes {
        let log = folder.join(pass.name()).join(format!("rank-{rank}.log"));
        let mut command = command(words)?;
        let output = |log: &PathBuf| {
            let file = File::create(log).and_then(|it| Ok((it.try_clone()?, it)));
            file.map_err(|source| RanksError::Log { path: log.clone(), source })
        };
        let (out, errors) = output(&log)?;
        command.stdout(out).stderr(errors).stdin(std::process::Stdio::null());
        command.env(CADRE_CHECK, folder).env(CADRE_CHECK_PASS, pass.name());
        command.env(contract::CADRE_PARENT_PID, std::process::id().to_string());
        let number = |it: u16| it.to_string();
        if launches {
            command
                .env(contract::PET_NNODES, "1")
                .env(contract::PET_NODE_RANK, "0")
                .env(contract::PET_NPROC_PER_NODE, number(ranks))
                .env(contract::PET_MASTER_ADDR, "127.0.0.1")
                .env(contract::PET_MASTER_PORT, &port);
        } else {
            command
                .env(contract::RANK, number(rank))
                .env(contract::WORLD_SIZE, number(ranks))
                .env(contract::LOCAL_RANK, number(rank))
                .env(contract::LOCAL_WORLD_SIZE, number(ranks))
                .env(contract::MASTER_ADDR, "127.0.0.1")
                .env(contract::MASTER_PORT, &port);
        }
        let program = words.first().cloned().unwrap_or_default();
        let mut child = command.spawn().map_err(|source| RanksError::Start { program, source })?;
        let pid = Pid::from_raw(child.id().cast_signed()).expect("a child has an id above 0");
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(end) => all.0.push(Running { child, end, log, status: None }),
            Err(source) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(RanksError::Wait(source.into()));
            }
        }
    }
    all.wait()
}

/// The command, tied to this process.
fn command(words: &[String]) -> Result<Command, RanksError> {
    let program = std::env::current_exe()
        .map_err(|source| RanksError::Start { program: "cadre".into(), source })?;
    let mut command = Command::new(program);
    command.arg("launch").args(words);
    Ok(command)
}

/// Ranks; those that still run are killed when the list is dropped.
struct Processes(Vec<Running>);

impl Processes {
    /// Waits for all of them; one that fails ends the others.
    fn wait(mut self) -> Result<Ended, RanksError> {
        while self.0.iter().any(|it| it.status.is_none()) {
            self.wait_for_one()?;
            let mut failed = false;
            for it in self.0.iter_mut().filter(|it| it.status.is_none()) {
                it.status = it.child.try_wait().map_err(RanksError::Wait)?;
                failed |= it.status.is_some_and(|it| !it.success());
            }
            if failed {
                self.kill();
            }
        }
        Ok(Ended { all: self.0.iter().map(|it| (it.status, it.log.clone())).collect() })
    }

    /// Sleeps until one that runs has ended.
    fn wait_for_one(&self) -> Result<(), RanksError> {
        let running = self.0.iter().filter(|it| it.status.is_none());
        let mut ends: Vec<_> = running.map(|it| PollFd::new(&it.end, PollFlags::IN)).collect();
        match poll(&mut ends, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(source) => Err(RanksError::Wait(source.into())),
        }
    }

    fn kill(&mut self) {
        for it in self.0.iter_mut().filter(|it| it.status.is_none()) {
            let _ = it.child.kill();
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.kill();
        for it in &mut self.0 {
            let _ = it.child.wait();
        }
    }
}
