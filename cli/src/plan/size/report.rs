//! What a job needs and gets, as one line of JSON or as a table.

use cadre_planner::{Plan, Problem, Profile, servers_for};
use cadre_step::conduct::NOMINAL_WEIGHT;
use serde::Serialize;

use super::draw::{Drawn, Layer, Machine};
use super::{DRAWN_STEPS, Job, SizeError};
use crate::printed;

/// Share of a step that may wait for links before the pool is said not to fit.
const MAX_EXPOSED_SHARE: f64 = 0.10;

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
    /// The least that keep up with the trainers, for the dearest layer of the steps drawn: each waits for its own attention.
    servers_needed: u64,
    in_place: bool,
    /// The kinds of the layers, or that they are a guess.
    layers: String,
    layers_assumed: bool,
    /// None if memory does not hold every nano-batch drawn: speeds of the others alone would mislead.
    #[serde(flatten)]
    speeds: Option<Speeds>,
    nodes: u32,
    nodes_needed: u32,
    fits: bool,
    /// Why it does not fit.
    because: Vec<String>,
}

/// Speeds that need the plans of all steps.
#[derive(Clone, Debug, Default, Serialize)]
struct Speeds {
    /// Digest of the plans of each step drawn: those of the job, as long as its slots and their weights are these.
    plans: Vec<String>,
    /// The worst of the nano-batches drawn, finishing times with head starts.
    max_over_mean: f64,
    max_over_mean_before: f64,
    /// Bytes a second of the busiest link, one lane, while a step runs.
    link_bytes_per_second: f64,
    /// Part of a step that waits for links alone.
    exposed_communication: f64,
    /// The slowest and the fastest step drawn.
    steps_per_second: [f64; 2],
    tokens_per_second: f64,
    /// Most that a slot needs, all its lanes together.
    memory_bytes: u64,
    /// What a slot needs at least for the dearest of these plans.
    least_memory_bytes: u64,
    /// How much later the last slot finishes than in the best possible plan, at most; of the worst plan.
    gap_compute: f64,
    /// How many more bytes of Q, K and V move than in the best possible plan with this finish, at most; of the worst plan.
    gap_bytes: Option<f64>,
    /// How much longer the busiest link needs than in the best possible plan with this finish, at most; of the worst plan.
    gap_link: Option<f64>,
    /// Size of the largest header, from which all processes plan a step.
    header_bytes: usize,
}

/// How many layers of a job have each kind.
pub(super) fn having(job: &Job) -> impl Iterator<Item = f64> + Clone {
    let layers = job.stack.core();
    (0..layers.kinds().len()).map(|it| f64::from(layers.having(it)))
}

/// The least servers that keep up with the trainers, for the dearest layer of the steps drawn.
pub(super) fn servers_needed(job: &Job, machine: &Machine) -> Result<u64, SizeError> {
    // One plan of each nano-batch and kind of layers tells all work; where it goes comes after the pool's size is known.
    let probe = job.replicas.max(u32::from(!job.in_place));
    let (memory, trainer_memory) = (u64::MAX >> 4, u64::MAX >> 4);
    let roomy = Job { memory, trainer_memory, ..job.clone() };
    let nominal = f64::from(NOMINAL_WEIGHT);
    let speed = |it: u32| f64::from(*job.weights[0].get(it as usize).unwrap_or(&NOMINAL_WEIGHT));
    let mean = (0..probe).map(speed).sum::<f64>() / f64::from(probe.max(1)) / nominal;
    let mut needed = 0;
    for step in 0..DRAWN_STEPS {
        for drawn in Drawn::all(&roomy, probe, step)? {
            let problem = &drawn.problem;
            let work = drawn.work() as f64;
            // Backward attention over backward linear layers is the larger share where it takes more than twice as long.
            let back = (machine.back(problem) / 2.0).max(1.0);
            let time = machine.attention(problem, work) * back;
            let linear = machine.linear(job, problem.heads);
            let time = time / mean.max(1.0 / nominal);
            needed = needed.max(servers_for(time as u64, linear as u64, 100, job.in_place));
        }
    }
    Ok(needed)
}

/// Dedicated servers: those of the pool, or as many as are needed if it asks for none.
pub(super) fn servers(job: &Job, needed: u64) -> u32 {
    let most = u64::from(u16::MAX >> 2);
    if job.replicas > 0 { job.replicas } else { needed.min(most) as u32 }
}

impl Report {
    pub(super) fn new(
        job: &Job,
        machine: &Machine,
        nodes: u32,
        profile: &Profile,
    ) -> Result<Self, SizeError> {
        let nanos = job.settings.nano_batches.get();
        let needed = servers_needed(job, machine)?;
        let servers = servers(job, needed);
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
            layers: job.stack.to_string(),
            layers_assumed: job.layers_assumed,
            speeds: None,
            nodes,
            nodes_needed,
            fits: false,
            because,
        };
        match Speeds::new(job, machine, (servers, report.tokens_per_step)) {
            Ok(speeds) => {
                if speeds.exposed_communication > MAX_EXPOSED_SHARE {
                    report.because.push(format!(
                        "links are the bottleneck: {:.0} % of a step waits for them; use more nano-batches, faster links or more trainers in place",
                        100.0 * speeds.exposed_communication
                    ));
                }
                report.speeds = Some(speeds);
            }
            // What memory cannot hold is an answer, not an error.
            Err(why @ SizeError::Planner { .. }) => report.because.push(why.to_string()),
            Err(error) => return Err(error),
        }
        report.fits = report.because.is_empty();
        Ok(report)
    }

    /// Dedicated servers that were planned for.
    pub(super) fn servers(&self) -> u32 {
        self.servers
    }

    /// One line.
    pub(super) fn json(&self) -> String {
        printed::json(self)
    }

    /// A table for people.
    pub(super) fn table(&self) -> String {
        let mut table = printed::table();
        let mut row = |name: &str, value: String| printed::row(&mut table, name, value);
        row(
            "job",
            format!(
                "{}, {} trainers, {} tokens a step",
                self.job, self.trainers, self.tokens_per_step
            ),
        );
        row("calibration", self.profile.clone());
        let servers = format!("{} dedicated servers", self.servers);
        let pool = match (self.in_place, self.servers) {
            (true, 0) => "the trainers in place".to_owned(),
            (true, _) => format!("{servers} and the trainers in place"),
            (false, _) => format!("{servers}; {} keep up", self.servers_needed),
        };
        row("pool", pool);
        let assumed = if self.layers_assumed { ", a guess: say --layers" } else { "" };
        row("layers", format!("{}{assumed}", self.layers));
        row("nodes", format!("{} of {}", self.nodes_needed, self.nodes));
        if let Some(speeds) = &self.speeds {
            speeds.rows(&mut row);
        }
        let verdict = if self.fits {
            "fits".to_owned()
        } else {
            format!("does not fit, because {}", self.because.join("; and because "))
        };
        format!("{table}\n{verdict}\n")
    }
}

impl Speeds {
    /// Plans all steps drawn.
    fn new(
        job: &Job,
        machine: &Machine,
        (servers, tokens_per_step): (u32, u64),
    ) -> Result<Self, SizeError> {
        let nanos = job.settings.nano_batches.get();
        // Layers without core attention are work of the trainers alone.
        let others = job.stack.layers() - usize::from(job.stack.core().count());
        let others = 3.0 * machine.feed(job) * others as f64;
        let (mut speeds, mut times, mut all) = (Self::default(), Vec::new(), Layer::default());
        for step in 0..DRAWN_STEPS {
            let mut time = others * f64::from(nanos);
            let plans = Drawn::all(job, servers, step)?;
            for (drawn, layers) in plans.iter().zip(having(job).cycle()) {
                let layer = drawn.layer(job, machine);
                time += layer.time * layers;
                all.exposed += layer.exposed * layers;
                all.busiest += layer.busiest * layers;
                speeds.max_over_mean = speeds.max_over_mean.max(drawn.balance());
                speeds.compare(&drawn.problem, &drawn.plan);
                if let Ok((most, mean)) = cadre_planner::imbalance_at_home(&drawn.problem) {
                    let before = most as f64 / (mean as f64).max(1.0);
                    speeds.max_over_mean_before = speeds.max_over_mean_before.max(before);
                }
            }
            speeds.memory_bytes = speeds.memory_bytes.max(Drawn::memory(&plans));
            let bytes = Drawn::header_bytes(job, servers, step)?;
            speeds.header_bytes = speeds.header_bytes.max(bytes);
            let digest = cadre_step::planned::plans_digest(plans.iter().map(|it| &it.plan));
            speeds.plans.push(format!("{digest:016x}"));
            all.time += time;
            times.push(time / 1e9);
        }
        times.sort_by(f64::total_cmp);
        let (least, most) = (times[0], times[times.len() - 1]);
        speeds.steps_per_second = [1.0 / most, 1.0 / least];
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        speeds.tokens_per_second = tokens_per_step as f64 / mean;
        speeds.link_bytes_per_second = all.busiest / all.time * 1e9;
        speeds.exposed_communication = all.exposed / all.time;
        Ok(speeds)
    }

    /// Takes in how far a plan is from its bounds.
    fn compare(&mut self, problem: &Problem, plan: &Plan) {
        let (it, least) = (plan.bounds(), plan.least(problem));
        let gap =
            |reached: u64, least: u64| (least > 0).then(|| reached as f64 / least as f64 - 1.0);
        let most = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
        self.gap_compute = self.gap_compute.max(it.gap_ppm as f64 / 1e6);
        self.gap_bytes = most(self.gap_bytes, gap(it.pulled, least.pulled));
        self.gap_link = most(self.gap_link, gap(it.link, least.link));
        self.least_memory_bytes = self.least_memory_bytes.max(plan.least_memory(problem));
    }

    fn rows(&self, row: &mut impl FnMut(&str, String)) {
        let (after, before) = (self.max_over_mean, self.max_over_mean_before);
        row("max/mean", format!("{after:.3}, unplanned {before:.3}"));
        let gaps = [
            ("finish", Some(self.gap_compute)),
            ("Q and KV pulled", self.gap_bytes),
            ("busiest link", self.gap_link),
        ];
        let gaps = gaps
            .into_iter()
            .filter_map(|(name, gap)| Some(format!("{name} {:.1} %", 100.0 * gap?)));
        row("above the bounds", gaps.collect::<Vec<_>>().join(", "));
        let [slow, fast] = self.steps_per_second;
        row(
            "steps a second",
            format!("{slow:.3} to {fast:.3}, {:.0} tokens", self.tokens_per_second),
        );
        row("busiest link", format!("{:.2} GB/s a lane", self.link_bytes_per_second / 1e9));
        row("waiting for links", format!("{:.1} % of a step", 100.0 * self.exposed_communication));
        row("memory of a slot", printed::at_least(self.memory_bytes, self.least_memory_bytes));
        row("header of a step", format!("{:.1} KB", self.header_bytes as f64 / 1e3));
    }
}
