//! Starts the test again in namespaces of its own.
//!
//! ```text
//! outer   makes the run's folder, waits, then removes the folder and the run's cgroups
//!   └─ unshare: network, mounts, processes          (without root: users, too)
//!        └─ inner   the test itself; its end is the end of every process of the cluster
//! ```
//!
//! In: what the inner process does. Out: its exit code. So addresses and ports are the test's alone, two
//! runs at a time do not meet, and nothing stays when a test panics or is killed. The one thing
//! outside are cgroups, named after the outer process; those of outer processes that are gone are
//! removed by the next run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::network;
use crate::process::output;
use crate::programs::system;

/// The run's folder, told to the inner process.
const FOLDER: &str = "CADRE_E2E_FOLDER";
/// The run's cgroup, told to the inner process.
const CGROUP: &str = "CADRE_E2E_CGROUP";
/// Start of the name of a run's cgroup.
const CGROUPS: &str = "cadre-e2e-";
/// How long the kernel may take to empty the cgroups of processes that were killed.
const EMPTYING: Duration = Duration::from_secs(10);

/// Runs `inner` in namespaces of its own, with a folder that is its own and empty.
pub fn run(inner: impl FnOnce(&Path) -> Result<ExitCode>) -> Result<ExitCode> {
    match std::env::var_os(FOLDER) {
        Some(folder) => {
            prepare()?;
            inner(Path::new(&folder))
        }
        None => outer(),
    }
}

/// Name of the cgroup below which the run's nodes have theirs.
pub(crate) fn cgroup() -> String {
    std::env::var(CGROUP).unwrap_or_else(|_| format!("{CGROUPS}0"))
}

/// The start of a command that runs another in namespaces of its own.
fn apart() -> Result<Command> {
    let mut command = Command::new(system("setpriv")?);
    // Whoever kills us kills the run.
    command.args(["--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"]);
    command.args(["--kill-child", "--mount-proc"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg("--");
    Ok(command)
}

fn outer() -> Result<ExitCode> {
    // Some containers may not; then nothing below says it as clearly.
    output(apart()?.arg(system("true")?)).context("namespaces")?;
    let folder = tempfile::Builder::new().prefix("cadre-e2e-").tempdir().context("a folder")?;
    let cgroup = format!("{CGROUPS}{}", std::process::id());
    remove_cgroups(|name| {
        let owner = name.strip_prefix(CGROUPS)?;
        (!Path::new("/proc").join(owner).exists()).then_some(())
    });
    let mut command = apart()?;
    command.arg(std::env::current_exe().context("the test's own path")?);
    command.args(std::env::args_os().skip(1));
    let status = command.env(FOLDER, folder.path()).env(CGROUP, &cgroup).status();
    let status = status.with_context(|| format!("{command:?} cannot be started"))?;
    remove_cgroups(|name| (name == cgroup).then_some(()));
    if std::env::var_os("CADRE_E2E_KEEP").is_some() {
        println!("the run's folder stays: {}", folder.keep().display());
    }
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn prepare() -> Result<()> {
    let mount = system("mount")?;
    // Sockets, locks and the like of the machine's own services are not ours.
    output(Command::new(mount).args(["-t", "tmpfs", "tmpfs", "/run"]))
        .context("a /run of our own")?;
    network::up()
}

/// Folders in which a cgroup may be: the hierarchies of version 1, or the one of version 2.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if is_version_2() {
        return vec![root];
    }
    let folders = fs::read_dir(&root).into_iter().flatten().flatten().map(|it| it.path());
    // Names of several controllers are links to one hierarchy.
    folders.filter(|it| it.is_dir() && !it.is_symlink()).collect()
}

/// Whether the machine has cgroup version 2 alone.
pub fn is_version_2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

fn remove_cgroups(which: impl Fn(&str) -> Option<()>) {
    for hierarchy in hierarchies() {
        let found = fs::read_dir(hierarchy).into_iter().flatten().flatten();
        for folder in found.filter(|it| which(&it.file_name().to_string_lossy()).is_some()) {
            let began = Instant::now();
            // Killed processes leave their groups a little later.
            while !remove(&folder.path()) && began.elapsed() < EMPTYING {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Removes a cgroup and those below; false while one of them still has processes.
fn remove(folder: &Path) -> bool {
    let below = fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path());
    for folder in below.filter(|it| it.is_dir()) {
        if !remove(&folder) {
            return false;
        }
    }
    fs::remove_dir(folder).is_ok() || !folder.exists()
}
