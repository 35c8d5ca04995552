//! What a simulated job takes, as one line of JSON or as tables for people.

use cadre_planner::Profile;
use serde::Serialize;

use super::super::draw::Machine;
use super::super::{DRAWN_STEPS, Job};
use super::layer::{Bottleneck, Cluster, Resource, Run};
use super::losses::Lost;
use super::{Asked, Where, run};
use crate::printed;

/// A pool is worth it if a processor does more than this share more.
const LEAST_GAIN: f64 = 0.02;
/// Up to this imbalance at home a pool has nothing to even out.
const EVEN_IMBALANCE: f64 = 1.05;
/// Up to this share of the work attention is too little for a pool to matter.
const LITTLE_ATTENTION: f64 = 0.05;

/// Attention at one place, under the names of the JSON.
#[derive(Serialize)]
pub(super) struct Row {
    attention: &'static str,
    servers: u32,
    processors: u32,
    #[serde(flatten)]
    speeds: Option<Speeds>,
    /// Why there are no speeds.
    because: Option<String>,
    #[serde(skip)]
    run: Option<Run>,
}

#[derive(Clone, Serialize)]
struct Speeds {
    step_seconds: f64,
    tokens_per_second: f64,
    tokens_per_second_and_processor: f64,
    max_over_mean: f64,
    waits_for_links: f64,
    attention_of_work: f64,
    bottleneck: String,
}

impl Row {
    pub(super) fn new(
        job: &Job,
        machine: &Machine,
        place: Where,
        servers: u32,
        run: Result<Run, String>,
    ) -> Self {
        let trainers = job.settings.trainers.get();
        let processors = (trainers + servers) * u32::from(machine.lanes());
        let mut row = Self {
            attention: place.name(),
            servers,
            processors,
            speeds: None,
            because: None,
            run: None,
        };
        match run {
            Ok(run) => {
                let tokens = tokens(job) as f64;
                let seconds = run.seconds(job, machine);
                row.speeds = Some(Speeds {
                    step_seconds: seconds,
                    tokens_per_second: tokens / seconds,
                    tokens_per_second_and_processor: tokens / seconds / f64::from(processors),
                    max_over_mean: run.max_over_mean,
                    waits_for_links: run.waits(),
                    attention_of_work: run.attention_share(),
                    bottleneck: run.bottleneck().map_or_else(String::new, |it| it.text(trainers)),
                });
                row.run = Some(run);
            }
            Err(why) => row.because = Some(why),
        }
        row
    }

    fn each(&self) -> f64 {
        self.speeds.as_ref().map_or(0.0, |it| it.tokens_per_second_and_processor)
    }
}

impl Bottleneck {
    fn text(&self, trainers: u32) -> String {
        let who = match u32::try_from(self.place).unwrap_or(u32::MAX) {
            rank if rank < trainers => format!("trainer {rank}"),
            place => format!("server {}", place - trainers),
        };
        let (what, why) = match self.resource {
            Resource::Linear => ("linear layers", String::new()),
            Resource::Attention => ("attention", format!(", longest document {} rows", self.rows)),
            Resource::LinkOut => {
                ("link out", format!(", sends rows of a document of {}", self.rows))
            }
            Resource::LinkIn => ("link in", format!(", pulls rows of a document of {}", self.rows)),
        };
        format!("{what} of {who}{why}: {:.0} % of the time", 100.0 * self.share)
    }
}

/// A slow link, under the names of the JSON.
#[derive(Serialize)]
struct Slow {
    place: String,
    times: u16,
    step_seconds: f64,
}

/// Under the names of the JSON.
#[derive(Serialize)]
pub(super) struct Report {
    job: String,
    profile: String,
    trainers: u32,
    tokens_per_step: u64,
    layers: String,
    /// Where the pool of the manifests has attention computed.
    pool: &'static str,
    fsdp: bool,
    rows: Vec<Row>,
    lost: Vec<Lost>,
    slow_nic: Option<Slow>,
    /// Tokens a second and processor at the best place, over those at home.
    gain: Option<f64>,
    verdict: String,
}

fn tokens(job: &Job) -> u64 {
    let settings = &job.settings;
    let all = u64::from(settings.trainers.get()) * u64::from(settings.tokens.get());
    all * u64::from(settings.nano_batches.get())
}

impl Report {
    pub(super) fn new(
        job: &Job,
        profile: &Profile,
        cluster: &Cluster<'_>,
        (own, rows, lost): (Where, Vec<Row>, Vec<Lost>),
        asked: &Asked,
    ) -> Self {
        let (gain, verdict) = verdict(&rows);
        let trainers = job.settings.trainers.get();
        let slow = rows.iter().find(|it| it.attention == own.name());
        let slow = slow.and_then(|row| {
            let place = row.run.as_ref()?.busiest_link()?;
            let slower = cluster.with_slow(place, asked.slow_nic);
            let run = run(job, &slower, own, row.servers).ok()?.ok()?;
            let name = match u32::try_from(place).ok()? {
                rank if rank < trainers => format!("trainer {rank}"),
                place => format!("server {}", place - trainers),
            };
            let step_seconds = run.seconds(job, cluster.machine);
            Some(Slow { place: name, times: asked.slow_nic, step_seconds })
        });
        Self {
            job: job.name.clone(),
            profile: format!("{} ({})", profile.processor, profile.source),
            trainers,
            tokens_per_step: tokens(job),
            layers: job.stack.to_string(),
            pool: own.name(),
            fsdp: asked.fsdp,
            rows,
            lost,
            slow_nic: slow,
            gain,
            verdict,
        }
    }

    pub(super) fn json(&self) -> String {
        printed::json(self)
    }

    pub(super) fn table(&self) -> String {
        let weights = if self.fsdp { ", weights sharded over them" } else { "" };
        let mut text = format!(
            "{}: {} trainers{weights}, {} tokens a step, layers {}; {DRAWN_STEPS} steps drawn\n{}\n",
            self.job, self.trainers, self.tokens_per_step, self.layers, self.profile
        );
        let head = [
            "attention",
            "processors",
            "step (s)",
            "tokens/s",
            "tokens/s a processor",
            "max/mean",
            "waits for links",
            "bottleneck",
        ];
        text += &table(&head, self.rows.iter().map(|it| it.cells(self.pool)));
        let seconds = |it: Option<f64>| it.map_or("–".to_owned(), |it| format!("{it:.3}"));
        if !self.lost.is_empty() {
            let head = [
                "servers lost",
                "at once (s)",
                "step until replaced (s)",
                "step planned anew (s)",
                "",
            ];
            let line = |it: &Lost| {
                vec![
                    it.servers.to_string(),
                    format!("{:.3}", it.seconds_at_once),
                    seconds(it.seconds_until_replaced),
                    seconds(it.seconds_planned_anew),
                    it.because.clone().unwrap_or_default(),
                ]
            };
            text += &table(&head, self.lost.iter().map(line));
        }
        if let Some(it) = &self.slow_nic {
            let (place, times, seconds) = (&it.place, it.times, it.step_seconds);
            let line = format!("links of {place} {times} times slower: a step of {seconds:.3} s\n");
            text += &line;
        }
        text + &self.verdict + "\n"
    }
}

impl Row {
    fn cells(&self, own: &str) -> Vec<String> {
        let servers =
            if self.servers > 0 { format!(", {} servers", self.servers) } else { String::new() };
        let asked = if self.attention == own { " (the pool)" } else { "" };
        let mut cells =
            vec![format!("{}{servers}{asked}", self.attention), self.processors.to_string()];
        if let Some(it) = &self.speeds {
            cells.extend([
                format!("{:.3}", it.step_seconds),
                format!("{:.0}", it.tokens_per_second),
                format!("{:.0}", it.tokens_per_second_and_processor),
                format!("{:.3}", it.max_over_mean),
                format!("{:.1} %", 100.0 * it.waits_for_links),
                it.bottleneck.clone(),
            ]);
        } else {
            cells.extend(std::iter::repeat_n("–".to_owned(), 5));
            cells.push(self.because.clone().unwrap_or_default());
        }
        cells
    }
}

fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = printed::table();
    table.set_header(head.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    format!("{table}\n")
}

/// The gain of the best place over attention at home, and the text that draws the conclusion.
fn verdict(rows: &[Row]) -> (Option<f64>, String) {
    let (Some(home), Some(best)) = (
        rows.iter().find(|it| it.attention == Where::AtHome.name() && it.speeds.is_some()),
        rows.iter()
            .filter(|it| it.attention != Where::AtHome.name() && it.speeds.is_some())
            .max_by(|a, b| a.each().total_cmp(&b.each())),
    ) else {
        return (None, "no place holds this job: give the slots more memory".to_owned());
    };
    let gain = best.each() / home.each();
    if gain > 1.0 + LEAST_GAIN {
        let name = best.attention;
        return (
            Some(gain),
            format!("best: {name}, {gain:.3} times the tokens of at home, a processor"),
        );
    }
    let (Some(own), Some(of)) = (&home.speeds, &best.speeds) else {
        return (Some(gain), String::new());
    };
    let why = if own.attention_of_work <= LITTLE_ATTENTION {
        format!("attention is {:.1} % of the work", 100.0 * own.attention_of_work)
    } else if own.max_over_mean <= EVEN_IMBALANCE {
        format!(
            "attention at home is even: the busiest rank has {:.3} of the mean",
            own.max_over_mean
        )
    } else if of.waits_for_links > LEAST_GAIN {
        format!(
            "links are the bottleneck: {:.0} % of a step waits for them ({})",
            100.0 * of.waits_for_links,
            of.bottleneck
        )
    } else {
        format!("what decides is not attention: {}", own.bottleneck)
    };
    (
        Some(gain),
        format!(
            "no gain here: {why}; the best, {}, does {gain:.3} of at home a processor",
            best.attention
        ),
    )
}
