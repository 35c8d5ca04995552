//! Starts, signals and reaps the processes of a run.
//!
//! In: a worker's name and the container of its pod template. Out: a process in a process group of
//! its own, its log under `OUT/logs`, and a call when it has ended. Decides nothing.
//!
//! A launcher is started once per node, under the name of its first rank, and stands for all its ranks. Its end is theirs, and a
//! signal for one of them goes to it. Its exit code is that of the rank that caused the end, which the ranks have written to a
//! folder beside the log.
//!
//! A process id belongs to its process until [`Processes::bury`], so a signal never reaches another process.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use cadre_crds::contract;
use cadre_crds::k8s_openapi::api::core::v1::{Container, PodTemplateSpec};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::config::RunConfig;
use super::event::{Role, WorkerName};
use super::exit::Exit;
use super::launcher::{self, left};

/// Bytes at the end of a log that are read when its process has ended.
const TAIL_BYTES: u64 = 16 << 10;
/// Maximum lines of it that are reported.
const TAIL_LINES: usize = 20;

/// Processes of a run; dropping it kills and buries all.
#[derive(Debug)]
pub(crate) struct Processes {
    program: PathBuf,
    out: PathBuf,
    trainer: Container,
    server: Container,
    shared: Vec<(&'static str, String)>,
    procs_per_node: u16,
    /// Whether the trainers' program is a launcher.
    launches: bool,
    /// Processes, by the first worker of each.
    children: BTreeMap<WorkerName, Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    log: PathBuf,
    log_start: u64,
    /// Folder in which a launcher's ranks leave their exit codes.
    codes: Option<PathBuf>,
    /// Workers of the process that are not buried yet.
    workers: u16,
    /// How the process ended, once it was reaped.
    exit: Option<Exit>,
    ended: Arc<Mutex<Ended>>,
}

/// Callbacks for the end of a process.
#[derive(Default)]
struct Ended {
    /// Whether the process has ended.
    yes: bool,
    calls: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ended").field("yes", &self.yes).finish_non_exhaustive()
    }
}

impl Processes {
    /// Makes the folders of the run. `control` is the socket of the control service.
    pub(crate) fn new(config: &RunConfig, control: &Path) -> Result<Self, Error> {
        let text = |path: &Path| path.display().to_string();
        for folder in ["logs", "checkpoints"].into_iter().chain(config.trace.then_some("trace")) {
            let path = config.out.join(folder);
            std::fs::create_dir_all(&path).map_err(|source| Error::Folder { path, source })?;
        }
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|listener| listener.local_addr())
            .map_err(|source| Error::Port { source })?
            .port()
            .to_string();
        let host = "127.0.0.1".to_owned();
        let name = |meta: Option<&String>| meta.cloned().unwrap_or_default();
        let mut shared = vec![
            (contract::CADRE_CONTROL, text(control)),
            (contract::CADRE_JOB, name(config.job.metadata.name.as_ref())),
            (contract::CADRE_POOL, name(config.pool.metadata.name.as_ref())),
            (contract::CADRE_OUT, text(&config.out)),
            (contract::CADRE_CHECKPOINTS, text(&config.out.join("checkpoints"))),
            (
                contract::CADRE_MEMORY_MIB,
                config.job.spec.attention.in_place_memory_mebibytes.to_string(),
            ),
            (contract::CADRE_RESUME, contract::RESUME_NONE.into()),
            (contract::CADRE_PARENT_PID, std::process::id().to_string()),
            (contract::MASTER_ADDR, host.clone()),
            (contract::MASTER_PORT, port.clone()),
            (contract::PET_MASTER_ADDR, host),
            (contract::PET_MASTER_PORT, port),
            (contract::PET_NNODES, config.job.spec.nodes.to_string()),
            (contract::PET_NPROC_PER_NODE, config.job.spec.procs_per_node.to_string()),
            (contract::WORLD_SIZE, config.trainers().to_string()),
            (contract::LOCAL_WORLD_SIZE, config.job.spec.procs_per_node.to_string()),
        ];
        // Workers of control version 2 need these variables; later ones have both in their settings.
        if let Some(profile) = &config.job.spec.attention.profile {
            shared.push((contract::CADRE_PROFILE, profile.clone()));
        }
        if let Some(tolerance) = &config.job.spec.attention.tolerance {
            shared.push((contract::CADRE_TOLERANCE, tolerance.clone()));
        }
        if config.trace {
            shared.push((contract::CADRE_TRACE, text(&config.out.join("trace"))));
        }
        let trainer = container(Some(&config.job.spec.template), contract::TRAINER_CONTAINER);
        Ok(Self {
            program: config.program.clone(),
            out: config.out.clone(),
            launches: launcher::is_launcher(&trainer),
            trainer,
            server: container(config.pool.spec.template.as_ref(), contract::SERVER_CONTAINER),
            shared,
            procs_per_node: u16::try_from(config.job.spec.procs_per_node.max(1))
                .unwrap_or(u16::MAX),
            children: BTreeMap::new(),
        })
    }

    /// Starts a process; `ended` is called once, from another thread, when it has ended.
    pub(crate) fn spawn(
        &mut self,
        worker: WorkerName,
        attempt: u32,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<u32, Error> {
        let first = self.first(worker);
        if let Some(running) = self.children.get_mut(&first) {
            running.workers += 1;
            let mut node = running.ended.lock().unwrap_or_else(PoisonError::into_inner);
            if node.yes {
                ended();
            } else {
                node.calls.push(Box::new(ended));
            }
            return Ok(running.child.id());
        }
        let (mut command, program) = self.command(worker);
        command.env(contract::CADRE_ATTEMPT, attempt.to_string());
        let WorkerName { role, index, incarnation } = worker;
        let path = self.out.join("logs").join(format!("{role}-{index}-{incarnation}.log"));
        let (log, copy, log_start) =
            open_log(&path).map_err(|source| Error::Log { path: path.clone(), source })?;
        let codes = (self.launches && role == Role::Trainer).then(|| path.with_extension("codes"));
        if let Some(path) = &codes {
            // Codes of an earlier run must not count for this one.
            let _ = std::fs::remove_dir_all(path);
            std::fs::create_dir_all(path)
                .map_err(|source| Error::Folder { path: path.clone(), source })?;
            command.env(contract::CADRE_CODES, path);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(copy)
            .process_group(0)
            .spawn()
            .map_err(|source| Error::Start { worker, program, source })?;
        let id = child.id();
        let pid = Pid::from_raw(id.cast_signed()).expect("a child has a process id above 0");
        let calls = Ended { yes: false, calls: vec![Box::new(ended)] };
        let ended = Arc::new(Mutex::new(calls));
        let (node, log) = (Arc::clone(&ended), path);
        let running = Running { child, log, log_start, codes, workers: 1, exit: None, ended };
        self.children.insert(first, running);
        std::thread::Builder::new()
            .name(format!("wait-{role}-{index}"))
            .spawn(move || {
                // The process is not reaped yet: its id stays taken until the supervisor has buried it.
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
                let mut node = node.lock().unwrap_or_else(PoisonError::into_inner);
                node.yes = true;
                let calls = std::mem::take(&mut node.calls);
                drop(node);
                for call in calls {
                    call();
                }
            })
            .map_err(|source| Error::Thread { source })?;
        Ok(id)
    }

    /// The first worker of the process that a worker is.
    fn first(&self, worker: WorkerName) -> WorkerName {
        if self.launches && worker.role == Role::Trainer {
            let index = worker.index / self.procs_per_node * self.procs_per_node;
            return WorkerName { index, ..worker };
        }
        worker
    }

    fn command(&self, worker: WorkerName) -> (Command, String) {
        let (container, default) = match worker.role {
            Role::Trainer => (&self.trainer, "train"),
            Role::Server => (&self.server, "serve"),
        };
        let default = ["cadre".to_owned(), default.to_owned()];
        let words = container.command.clone().filter(|it| !it.is_empty());
        let words = words.unwrap_or_else(|| default.to_vec());
        let (first, rest) = words.split_first().expect("an empty command was replaced");
        let program = if first == "cadre" { self.program.clone() } else { PathBuf::from(first) };
        let launches = self.launches && worker.role == Role::Trainer;
        let mut command = Command::new(if launches { &self.program } else { &program });
        if launches {
            command.args(["launch", "--", first]);
        }
        command.args(rest).args(container.args.iter().flatten());
        // Only the job sets these variables. Those of the user's shell must not reach the worker.
        for name in contract::OF_WORKERS {
            command.env_remove(name);
        }
        for variable in container.env.iter().flatten() {
            if let Some(value) = &variable.value
                && !contract::is_reserved(&variable.name)
            {
                command.env(&variable.name, value);
            }
        }
        command.envs(self.shared.iter().map(|(name, value)| (name, value)));
        let role = match worker.role {
            Role::Trainer => contract::ROLE_TRAINER,
            Role::Server => contract::ROLE_SERVER,
        };
        command.env(contract::CADRE_ROLE, role);
        // A launcher alone numbers its ranks.
        if launches {
            command.env_remove(contract::CADRE_INDEX);
        } else {
            command.env(contract::CADRE_INDEX, worker.index.to_string());
        }
        command.env(contract::CADRE_INCARNATION, worker.incarnation.to_string());
        if worker.role == Role::Trainer {
            let node = worker.index / self.procs_per_node;
            command.env(contract::RANK, worker.index.to_string());
            command.env(contract::LOCAL_RANK, (worker.index % self.procs_per_node).to_string());
            command.env(contract::GROUP_RANK, node.to_string());
            command.env(contract::PET_NODE_RANK, node.to_string());
        }
        (command, program.display().to_string())
    }

    /// Sends a signal to a process and its children; nothing when it is gone.
    pub(crate) fn signal(&self, worker: WorkerName, signal: Signal) {
        let running = self.children.get(&self.first(worker));
        let Some(running) = running.filter(|it| it.exit.is_none()) else { return };
        let group = Pid::from_raw(running.child.id().cast_signed());
        let group = group.expect("a child has a process id above 0");
        // An error means that the process has just ended, which is what the signal is for.
        let _ = kill_process_group(group, signal);
    }

    /// Reaps a process that has ended, and kills what it has started.
    pub(crate) fn bury(&mut self, worker: WorkerName) -> Exit {
        self.signal(worker, Signal::KILL);
        let first = self.first(worker);
        let ranks = first.index..first.index.saturating_add(self.procs_per_node);
        let Some(running) = self.children.get_mut(&first) else { return Exit::default() };
        let Running { child, log, log_start, codes, workers, exit, ended: _ } = running;
        let exit = exit.get_or_insert_with(|| {
            let status = child.wait().ok();
            let mut code = status.and_then(|it| it.code());
            if let Some(folder) = codes {
                code = code.map(|it| launcher::code_of(it, ranks.map(|at| left(folder, at))));
                // Nobody else reads it.
                let _ = std::fs::remove_dir_all(folder);
            }
            Exit {
                code,
                signal: status.and_then(|it| it.signal()),
                log: tail(log, *log_start).unwrap_or_default(),
            }
        });
        let exit = exit.clone();
        *workers -= 1;
        if *workers == 0 {
            self.children.remove(&first);
        }
        exit
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let names: Vec<WorkerName> = self.children.keys().copied().collect();
        for name in names {
            while self.children.contains_key(&name) {
                self.bury(name);
            }
        }
    }
}

/// The container of a pod template that the worker runs in, or an empty one.
fn container(template: Option<&PodTemplateSpec>, name: &str) -> Container {
    let containers = template.and_then(|it| it.spec.as_ref()).map(|it| it.containers.as_slice());
    let found = containers.unwrap_or_default().iter().find(|it| it.name == name);
    found.cloned().unwrap_or_default()
}

fn open_log(path: &Path) -> std::io::Result<(File, File, u64)> {
    let mut log = OpenOptions::new().create(true).append(true).open(path)?;
    let start = log.seek(SeekFrom::End(0))?;
    let copy = log.try_clone()?;
    Ok((log, copy, start))
}

/// Last lines of a log, from byte `start` on.
fn tail(path: &Path, start: u64) -> std::io::Result<Vec<String>> {
    let mut log = File::open(path)?;
    let end = log.seek(SeekFrom::End(0))?;
    log.seek(SeekFrom::Start(start.max(end.saturating_sub(TAIL_BYTES))))?;
    let mut bytes = Vec::new();
    log.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].to_vec())
}

/// Why a process cannot be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No folder.
    #[error("folder {}: {source}; choose another --out", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    /// No log.
    #[error("log {}: {source}; free space or choose another --out", path.display())]
    Log { path: PathBuf, source: std::io::Error },
    /// No port left.
    #[error("no free port on 127.0.0.1: {source}; end programs that hold ports")]
    Port { source: std::io::Error },
    /// The program does not start.
    #[error("{worker} does not start: {program}: {source}; correct the container's command")]
    Start { worker: WorkerName, program: String, source: std::io::Error },
    /// No thread left.
    #[error("a thread for a worker cannot start: {source}; raise the limit on processes")]
    Thread { source: std::io::Error },
}
