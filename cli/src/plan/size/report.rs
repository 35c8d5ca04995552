//! What a job needs and gets, as one line of JSON or as a table.

use cadre_planner::{Profile, servers_for};
use cadre_worker::session::Kind;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;

use super::draw::{Drawn, Layer, Machine};
use super::{Job, STEPS, SizeError};

/// Share of a step that may wait for links before the pool is said not to fit.
const EXPOSED: f64 = 0.10;

/// Under the names of the JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    job: String,
    profile: String,
    profile_digest: String,
    trainers: u32,
    tokens_per_step: u64,
    /// Dedicated servers: those of the pool, or the least that keep up if it asks for none.
    servers: u32,
    /// The least that keep up with the trainers, for the dearest step drawn.
    servers_needed: u64,
    in_place: bool,
    /// The worst of the nano-batches drawn, finishing times with head starts.
    max_over_mean: f64,
    max_over_mean_before: f64,
    /// Of the busiest link, one lane, while a step runs.
    link_bytes_per_second: f64,
    /// Part of a step that waits for links alone.
    exposed_communication: f64,
    /// The slowest and the fastest step drawn.
    steps_per_second: [f64; 2],
    tokens_per_second: f64,
    /// Most that a slot needs, all its lanes together.
    memory_bytes: u64,
    nodes: u32,
    nodes_needed: u32,
    fits: bool,
    /// Why it does not fit.
    because: Vec<String>,
}

/// Kinds of a job's layers, each with how many layers have it.
fn kinds(job: &Job) -> impl Iterator<Item = (Kind, f64)> {
    let having = |(number, kind): (usize, &Kind)| (*kind, f64::from(job.layers.having(number)));
    job.layers.kinds().iter().enumerate().map(having)
}

impl Report {
    pub(super) fn new(
        job: &Job,
        machine: &Machine,
        nodes: u32,
        profile: &Profile,
    ) -> Result<Self, SizeError> {
        let nanos = job.settings.nano_batches.get();
        let linear = machine.linear(job);
        // One plan of each nano-batch and kind of layers tells all work; where it goes comes after the pool's size is known.
        let probe = job.replicas.max(u32::from(!job.in_place));
        let roomy = Job { memory: u64::MAX >> 4, ..job.clone() };
        let mut dearest: f64 = 0.0;
        for step in 0..STEPS {
            for nano in 0..nanos {
                let mut work = 0.0;
                for (kind, layers) in kinds(job) {
                    let drawn = Drawn::new(&roomy, machine, probe, (step, nano), kind)?;
                    work += drawn.work() as f64 * layers;
                }
                dearest = dearest.max(machine.attention(work / f64::from(job.layers.count())));
            }
        }
        // Backward attention over backward linear layers is the larger share where it takes more than twice as long.
        let back = (f64::from(machine.costs.backward_percent) / 200.0).max(1.0);
        let needed = servers_for((dearest * back) as u64, linear as u64, 100, job.in_place);
        let most = u64::from(u16::MAX >> 2);
        let servers = if job.replicas > 0 { job.replicas } else { needed.min(most) as u32 };
        let mut because = Vec::new();
        let trainers = job.settings.trainers.get();
        let on_nodes = servers.div_ceil(job.processes_per_node.max(1));
        let nodes_needed = job.nodes + on_nodes;
        if nodes_needed > nodes {
            because.push(format!(
                "it needs {nodes_needed} nodes, {} for trainers and {on_nodes} for servers, and there are {nodes}; add nodes or lower replicas",
                job.nodes
            ));
        }
        if !job.in_place && u64::from(servers) < needed {
            because.push(format!(
                "{servers} servers do not keep up with the trainers; give the pool {needed}, or inPlace: true"
            ));
        }
        let mut report = Self {
            job: job.name.clone(),
            profile: format!("{} ({})", profile.processor, profile.source),
            profile_digest: format!("{:016x}", profile.digest()),
            trainers,
            tokens_per_step: u64::from(trainers)
                * u64::from(job.settings.tokens.get())
                * u64::from(nanos),
            servers,
            servers_needed: needed,
            in_place: job.in_place,
            max_over_mean: 0.0,
            max_over_mean_before: 0.0,
            link_bytes_per_second: 0.0,
            exposed_communication: 0.0,
            steps_per_second: [0.0; 2],
            tokens_per_second: 0.0,
            memory_bytes: 0,
            nodes,
            nodes_needed,
            fits: false,
            because,
        };
        report.steps(job, machine)?;
        if report.exposed_communication > EXPOSED {
            report.because.push(format!(
                "links are the bottleneck: {:.0} % of a step waits for them; use more nano-batches, faster links or more trainers in place",
                100.0 * report.exposed_communication
            ));
        }
        report.fits = report.because.is_empty();
        Ok(report)
    }

    /// Plans all steps drawn and fills in what they take.
    fn steps(&mut self, job: &Job, machine: &Machine) -> Result<(), SizeError> {
        let mut times = Vec::new();
        let mut all = Layer::default();
        for step in 0..STEPS {
            let mut time = 0.0;
            let nanos = 0..job.settings.nano_batches.get();
            for (nano, (kind, layers)) in nanos.flat_map(|it| kinds(job).map(move |of| (it, of))) {
                let drawn = match Drawn::new(job, machine, self.servers, (step, nano), kind) {
                    Ok(drawn) => drawn,
                    // What memory cannot hold is an answer, not an error.
                    Err(SizeError::Planner { source, .. }) if self.memory_bytes < u64::MAX => {
                        self.memory_bytes = u64::MAX;
                        self.because.push(format!("step {step} as drawn: {source}"));
                        continue;
                    }
                    Err(SizeError::Planner { .. }) => continue,
                    Err(error) => return Err(error),
                };
                let layer = drawn.layer(job, machine);
                time += layer.time * layers;
                all.time += layer.time * layers;
                all.exposed += layer.exposed * layers;
                all.busiest += layer.busiest * layers;
                self.max_over_mean = self.max_over_mean.max(drawn.balance());
                if let Ok((most, mean)) = cadre_planner::imbalance_at_home(&drawn.problem) {
                    let before = most as f64 / (mean as f64).max(1.0);
                    self.max_over_mean_before = self.max_over_mean_before.max(before);
                }
                self.memory_bytes = self.memory_bytes.max(drawn.memory());
            }
            times.push(time / 1e9);
        }
        times.retain(|it| *it > 0.0);
        times.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (times.first(), times.last()) {
            self.steps_per_second = [1.0 / most, 1.0 / least];
            let mean = times.iter().sum::<f64>() / times.len() as f64;
            self.tokens_per_second = self.tokens_per_step as f64 / mean;
            self.link_bytes_per_second = all.busiest / all.time * 1e9;
            self.exposed_communication = all.exposed / all.time;
        }
        Ok(())
    }

    /// Dedicated servers that were planned for.
    pub(super) fn servers(&self) -> u32 {
        self.servers
    }

    /// One line.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("numbers and names are JSON") + "\n"
    }

    /// A table for people.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        row(
            "job",
            format!(
                "{}, {} trainers, {} tokens a step",
                self.job, self.trainers, self.tokens_per_step
            ),
        );
        row("calibration", self.profile.clone());
        let in_place = if self.in_place { " and the trainers in place" } else { "" };
        row(
            "pool",
            format!(
                "{} dedicated servers{in_place}; {} keep up",
                self.servers, self.servers_needed
            ),
        );
        row("nodes", format!("{} of {}", self.nodes_needed, self.nodes));
        if self.memory_bytes < u64::MAX {
            self.speeds(&mut row);
        }
        let verdict = if self.fits {
            "fits".to_owned()
        } else {
            format!("does not fit, because {}", self.because.join("; and because "))
        };
        format!("{table}\n{verdict}\n")
    }

    /// What only plans of all steps tell.
    fn speeds(&self, row: &mut impl FnMut(&str, String)) {
        let (after, before) = (self.max_over_mean, self.max_over_mean_before);
        row("max/mean", format!("{after:.3}, unplanned {before:.3}"));
        let [slow, fast] = self.steps_per_second;
        row(
            "steps a second",
            format!("{slow:.3} to {fast:.3}, {:.0} tokens", self.tokens_per_second),
        );
        row("busiest link", format!("{:.2} GB/s a lane", self.link_bytes_per_second / 1e9));
        row("waiting for links", format!("{:.1} % of a step", 100.0 * self.exposed_communication));
        row("memory of a slot", format!("{:.2} GB", self.memory_bytes as f64 / 1e9));
    }
}
