//! `cadre simulate -f`: a job as it would run on ranks alone, with slots in place, on dedicated servers, and on both.
//!
//! In: manifests, lengths, a calibration, what is asked ([`Asked`]). Out: a table or one line of JSON: time of a step by place
//! of attention, what decides it, what lost servers and a slow link cost, and whether a pool gains anything. Nothing is started.
//!
//! Plans are those of the job, as `cadre plan -f` makes them. The model of a layer is the same too: with two nano-batches or
//! more all processors and links work at the same time, and the busiest sets the pace; with one, linear layers, attention
//! and links follow each other. [`layer`] has it by place.

mod layer;
mod losses;
mod report;

use std::num::NonZeroU16;
use std::path::PathBuf;

use cadre_planner::plan_at_home;
use cadre_worker::profile;

use super::draw::{Drawn, Machine};
use super::observed::at_home;
use super::report::{having, servers, servers_needed};
use super::{DRAWN_STEPS, Job, NOMINAL_PROFILE, SizeError, picture};
use crate::arguments::JobOptions;
use layer::{Cluster, Run};
use losses::Lost;
use report::{Report, Row};

/// No limit of memory.
const UNLIMITED_BYTES: u64 = u64::MAX >> 4;

/// Options of the simulation, beside the manifests of the job.
pub(crate) struct Asked {
    /// Processors of a rank and of a server.
    pub(crate) lanes: u16,
    pub(crate) servers: Option<NonZeroU16>,
    pub(crate) lose: Vec<NonZeroU16>,
    /// How many times slower one place's links are.
    pub(crate) slow_nic: u16,
    /// Whether weights and gradients travel beside attention.
    pub(crate) fsdp: bool,
    pub(crate) json: bool,
    /// Where pictures of the plans go.
    pub(crate) figures: Option<PathBuf>,
}

/// Where attention is computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Where {
    /// Every rank computes its own rows.
    AtHome,
    InPlace,
    Dedicated,
    Mixed,
}

impl Where {
    const ALL: [Self; 4] = [Self::AtHome, Self::InPlace, Self::Dedicated, Self::Mixed];

    fn of(in_place: bool, servers: u32) -> Self {
        match (in_place, servers) {
            (true, 0) => Self::InPlace,
            (true, _) => Self::Mixed,
            (false, _) => Self::Dedicated,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::AtHome => "at home",
            Self::InPlace => "in place",
            Self::Dedicated => "dedicated",
            Self::Mixed => "mixed",
        }
    }

    fn has_servers(self) -> bool {
        matches!(self, Self::Dedicated | Self::Mixed)
    }
}

/// Simulates a job; returns what to print.
pub(crate) fn simulate(
    options: &JobOptions,
    lengths: Option<&str>,
    asked: &Asked,
) -> Result<String, SizeError> {
    let (job, name) = super::job(options, lengths, asked.servers.map(|it| it.get().into()))?;
    let name = name.as_deref().unwrap_or(NOMINAL_PROFILE);
    let profile = profile::read(name)?;
    let machine = Machine::new(&profile, job.stack.core(), asked.lanes)
        .map_err(|error| profile::Error::refused(name, error))?;
    // Dedicated servers are counted as if the trainers served no attention in place.
    let needed = servers_needed(&Job { in_place: false, ..job.clone() }, &machine)?;
    let wanted = servers(&job, needed).max(1);
    let count = asked.servers.map_or(wanted, |it| it.get().into());
    let beside = asked.servers.map_or(job.replicas, |it| it.get().into());
    let own = Where::of(job.in_place, if job.in_place { beside } else { count });
    for lost in &asked.lose {
        if u32::from(lost.get()) > count || !own.has_servers() {
            let servers = if own.has_servers() { count } else { 0 };
            return Err(SizeError::Lost { lost: lost.get(), servers });
        }
    }
    let cluster = Cluster::new(&job, &machine, asked.fsdp);
    let mut rows = Vec::new();
    for place in Where::ALL {
        let servers = if place.has_servers() { count } else { 0 };
        let run = run(&job, &cluster, place, servers)?;
        rows.push(Row::new(&job, &machine, place, servers, run));
    }
    let servers = if own.has_servers() { count } else { 0 };
    let mut lost = Vec::new();
    let one = [NonZeroU16::MIN];
    let says_nothing = own.has_servers() && asked.lose.is_empty();
    let asked_to_lose = if says_nothing { &one[..] } else { asked.lose.as_slice() };
    for it in asked_to_lose {
        lost.push(Lost::new(&job, &cluster, own, servers, it.get())?);
    }
    if let Some(folder) = &asked.figures {
        draw(&job, count, folder)?;
    }
    let report = Report::new(&job, &profile, &cluster, (own, rows, lost), asked);
    Ok(if asked.json { report.json() } else { report.table() })
}

/// The job with its attention at `place`. At home, trainers hold no rows of others, so memory does
/// not limit it.
fn placed(job: &Job, place: Where) -> Job {
    let in_place = matches!(place, Where::InPlace | Where::Mixed | Where::AtHome);
    let is_home = place == Where::AtHome;
    let memory = |it: u64| if is_home { UNLIMITED_BYTES } else { it };
    let (memory, trainer_memory) = (memory(job.memory), memory(job.trainer_memory));
    Job { in_place, memory, trainer_memory, ..job.clone() }
}

/// Plans of a step by nano-batch, and then by kind of layers.
fn plans(job: &Job, place: Where, servers: u32, step: u64) -> Result<Vec<Drawn>, SizeError> {
    let plans = Drawn::all(&placed(job, place), servers, step)?;
    if place != Where::AtHome {
        return Ok(plans);
    }
    let own = |it: Drawn| {
        let problem = at_home(&it.problem);
        let plan = plan_at_home(&problem).map_err(|source| SizeError::Planner { step, source })?;
        Ok(Drawn { problem, plan })
    };
    plans.into_iter().map(own).collect()
}

/// All steps drawn; why there is no plan, where memory does not hold them.
fn run(
    job: &Job,
    cluster: &Cluster<'_>,
    place: Where,
    servers: u32,
) -> Result<Result<Run, String>, SizeError> {
    let mut run = Run::new(job);
    for step in 0..DRAWN_STEPS {
        let plans = match plans(job, place, servers, step) {
            Ok(plans) => plans,
            Err(why @ SizeError::Planner { .. }) => return Ok(Err(why.to_string())),
            Err(error) => return Err(error),
        };
        for (drawn, layers) in plans.iter().zip(having(job).cycle()) {
            run.add(job, cluster, drawn, None, layers);
        }
    }
    Ok(Ok(run))
}

/// A picture of the plans of each place.
fn draw(job: &Job, servers: u32, folder: &std::path::Path) -> Result<(), SizeError> {
    let write = |path: PathBuf, text: String| {
        std::fs::write(&path, text).map_err(|source| SizeError::Unwritable { path, source })
    };
    std::fs::create_dir_all(folder)
        .map_err(|source| SizeError::Unwritable { path: folder.to_owned(), source })?;
    for place in [Where::InPlace, Where::Dedicated, Where::Mixed] {
        let servers = if place.has_servers() { servers } else { 0 };
        let text = match picture::draw(&placed(job, place), servers) {
            Ok(text) => text,
            // The table says why there is no plan.
            Err(SizeError::Planner { .. }) => continue,
            Err(error) => return Err(error),
        };
        write(folder.join(format!("{}.svg", place.name().replace(' ', "-"))), text)?;
    }
    Ok(())
}
