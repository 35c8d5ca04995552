//! A program of the cluster that runs as long as its handle lives.
//!
//! In: a command. Out: its process, with all it says in a file of the run's folder. Dropping the handle
//! kills the process and waits for its end, also while a test panics. Ended by its id, never by name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::wait::took;

/// Lines of a log that an error shows.
const TAIL: usize = 12;

/// A running program.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program that logs to `NAME.log` in `folder`, after what is there already.
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("{}: cannot be written", log.display()))?;
        let errors = file.try_clone().context("a log file")?;
        let child = command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn();
        let child = child.with_context(|| format!("{name} cannot be started: {command:?}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Id of the process in our namespace.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails, with the end of its log, if it does not run any more.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => bail!("{} ended with {status}:\n{}", self.name, self.tail()),
            Err(error) => Err(error).context("wait for a child"),
        }
    }

    /// Log of the process so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].join("\n")
    }

    /// Ends it at once, as a crash does.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill a child")?;
        self.child.wait().context("wait for a child").map(drop)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(id.context("a process has an id")?, signal).context("signal a child")
    }

    /// Asks it to end and waits until it has.
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.child.wait().context("wait for a child")
    }

    /// Waits until it ends by itself.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        crate::until(&format!("the end of {}", self.name), async || {
            self.child.try_wait().context("wait for a child")
        })
        .await
    }

    /// Most memory that it had resident so far, bytes, and processor time that it has used, seconds.
    pub fn usage(&self) -> Result<(u64, f64)> {
        let folder = PathBuf::from(format!("/proc/{}", self.id()));
        let status = std::fs::read_to_string(folder.join("status")).context("status of a child")?;
        let peak = status.lines().find_map(|it| it.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|it| it.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let stat = std::fs::read_to_string(folder.join("stat")).context("times of a child")?;
        // After the program's name in brackets: state is field 3, user and system ticks 14 and 15.
        let fields: Vec<_> =
            stat.rsplit(") ").next().unwrap_or_default().split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|it| it.parse::<f64>().ok());
        let ticks = ticks(11).zip(ticks(12)).map(|(user, system)| user + system);
        let per_second = rustix::param::clock_ticks_per_second() as f64;
        Ok((
            peak.context("no VmHWM in the status")? * 1024,
            ticks.context("no times in the stat")? / per_second,
        ))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // The process may have ended meanwhile; then there is nothing to kill.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Kills the processes named `program` of the pod with this uid, as the kernel does when memory is short. Its other ones are
/// left alone.
pub fn kill_pod(uid: &str, program: &str) -> Result<()> {
    let mut killed = 0;
    for entry in std::fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|it| it.parse().ok()) else { continue };
        let read =
            |file: &str| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if read("cgroup").contains(uid) && read("comm").trim_end() == program {
            let id = Pid::from_raw(id).context("a process has an id")?;
            kill_process(id, Signal::KILL).context("kill a pod's process")?;
            killed += 1;
        }
    }
    anyhow::ensure!(killed > 0, "no process {program} runs in the pod with uid {uid}");
    Ok(())
}

/// Runs a command to its end. Out: what it wrote; its complaint is the error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let began = Instant::now();
    let done = command.stdin(Stdio::null()).output();
    let words: Vec<_> = command.get_args().map(|it| it.to_string_lossy()).collect();
    took(&words.join(" "), began);
    let done = done.with_context(|| format!("{command:?} cannot be started"))?;
    if !done.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
