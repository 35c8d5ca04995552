//! What a job loses to imbalance and what a pool would gain, as one line of JSON or as a table.
//!
//! In: a [`Log`], and the times that plans of its documents have. Out: text. All times are seconds of a step, the mean over
//! the steps that were planned.

use cadre_planner::{Mask, Profile};
use cadre_step::layers::Kind;
use serde::Serialize;

use super::log::{Log, Step};
use super::{MAX_PLANNED_STEPS, ObserveError};
use crate::plan::size::observed::{Times, Watched};
use crate::printed;

/// Share of a step below which a gain is not worth changing a job.
const LEAST_GAIN: f64 = 0.02;
/// How much more than the mean rank the busiest one does where ranks are called even.
const EVEN_WITHIN: f64 = 0.05;

/// The report, with the names of the JSON.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    ranks: u16,
    /// Steps that every rank has logged, without the first one.
    steps: usize,
    steps_planned: usize,
    profile: String,
    layers: String,
    rows_per_step: f64,
    longest_document: u32,
    median_document: u32,
    step_seconds: f64,
    /// Seconds between steps: loader, evaluation, checkpoints.
    seconds_between: f64,
    /// Seconds of attention of the busiest rank, by the calibration.
    attention_seconds: f64,
    attention_seconds_mean: f64,
    max_over_mean: f64,
    /// Seconds that ranks wait for the attention of the busiest one, if they wait for each other once a step.
    lost_seconds: f64,
    /// Measured time by which the forwards of the slowest rank exceed those of the mean rank.
    forward_spread_seconds: Option<f64>,
    /// The rank with the longest forwards, and their time over the mean rank's.
    slowest_rank: Option<(usize, f64)>,
    pool: String,
    pooled_max_over_mean: f64,
    pooled_attention_seconds: f64,
    link_seconds: f64,
    pooled_step_seconds: f64,
    speedup: f64,
    gains: bool,
    /// Why there is no gain.
    because: Option<String>,
}

/// Sums over steps.
struct Sums {
    seconds: f64,
    most: f64,
    mean: f64,
    pooled: f64,
    links: f64,
}

impl Sums {
    fn of(seconds: f64, times: &[Times]) -> Self {
        let sum = |of: fn(&Times) -> f64| times.iter().map(of).sum();
        Self {
            seconds,
            most: sum(Times::most),
            mean: sum(Times::mean),
            pooled: sum(|it| it.pooled),
            links: sum(|it| it.links),
        }
    }

    /// Share of a step that a pool saves, if links cost nothing and as they are.
    fn saved(&self) -> (f64, f64) {
        let saved = self.most - self.pooled;
        (saved / self.seconds, (saved - self.links) / self.seconds)
    }
}

impl Report {
    pub(super) fn new(
        log: &Log,
        watched: &Watched,
        calibration: (&str, &Profile),
    ) -> Result<Self, ObserveError> {
        let every = log.steps.len().div_ceil(MAX_PLANNED_STEPS);
        let steps: Vec<&Step> = log.steps.iter().step_by(every).collect();
        let count = steps.len() as f64;
        let seconds: f64 = steps.iter().map(|it| it.seconds).sum();
        let has_attention = watched.layers.iter().any(Option::is_some);
        let times = |watched: &Watched| {
            let documents = steps.iter().map(|it| &it.documents);
            watched.times(calibration, documents)
        };
        let told = if has_attention { times(watched)? } else { Vec::new() };
        let sums = Sums::of(seconds, &told);
        if sums.most > seconds {
            let (attention, step) = (sums.most / count, seconds / count);
            return Err(ObserveError::Slow { name: calibration.0.into(), attention, step });
        }
        let (_, saved) = sums.saved();
        let because = if saved >= LEAST_GAIN {
            None
        } else if has_attention {
            let some = watched.layers.iter().flatten().next().map(|it| it.heads);
            let full = |it: &Option<Kind>| it.map(|it| it.heads).or(some).map(Kind::causal);
            let layers = watched.layers.iter().map(full).collect();
            let all_full = Watched { layers, ..*watched };
            let all_full = times(&all_full)?;
            let more = all_full.iter().map(Times::most).sum::<f64>() - sums.most;
            let all_full = Sums::of(seconds + more, &all_full);
            Some(why_not(log, watched, &sums, &all_full))
        } else {
            Some("no layer has core attention".into())
        };
        let mut rows: Vec<u32> = documents(&steps).collect();
        rows.sort_unstable();
        let forward: Option<Vec<&Vec<f64>>> = steps.iter().map(|it| it.forward.as_ref()).collect();
        let forward = forward.as_deref();
        Ok(Self {
            ranks: watched.ranks,
            steps: log.steps.len(),
            steps_planned: steps.len(),
            profile: format!("{} ({})", calibration.1.processor, calibration.1.source),
            layers: layers(watched),
            rows_per_step: rows.iter().map(|it| f64::from(*it)).sum::<f64>() / count,
            longest_document: rows.last().copied().unwrap_or(0),
            median_document: rows.get(rows.len() / 2).copied().unwrap_or(0),
            step_seconds: seconds / count,
            seconds_between: steps.iter().map(|it| it.seconds_before).sum::<f64>() / count,
            attention_seconds: sums.most / count,
            attention_seconds_mean: sums.mean / count,
            max_over_mean: if sums.mean > 0.0 { sums.most / sums.mean } else { 1.0 },
            lost_seconds: (sums.most - sums.mean) / count,
            forward_spread_seconds: forward.map(|it| spread(it) / count),
            slowest_rank: forward.and_then(slowest),
            pool: match watched.servers {
                0 => format!("{} slots in place", watched.ranks),
                servers => format!("{servers} dedicated servers"),
            },
            pooled_max_over_mean: told.iter().map(|it| it.balance).fold(1.0, f64::max),
            pooled_attention_seconds: sums.pooled / count,
            link_seconds: sums.links / count,
            pooled_step_seconds: (1.0 - saved) * seconds / count,
            speedup: 1.0 / (1.0 - saved),
            gains: because.is_none(),
            because,
        })
    }

    /// One line.
    pub(super) fn json(&self) -> String {
        printed::json(self)
    }

    /// A table for people.
    pub(super) fn table(&self) -> String {
        let mut table = printed::table();
        let mut row = |name: &str, value: String| printed::row(&mut table, name, value);
        let part = |seconds: f64| 100.0 * seconds / self.step_seconds;
        let planned = match self.steps_planned {
            all if all == self.steps => String::new(),
            some => format!(", of which {some} were planned"),
        };
        row("job", format!("{} ranks, {} steps{planned}", self.ranks, self.steps));
        let (rows, median, longest) =
            (self.rows_per_step, self.median_document, self.longest_document);
        row("documents", format!("{rows:.0} rows a step; median {median}, longest {longest}"));
        row("layers", self.layers.clone());
        row("calibration", self.profile.clone());
        let (step, between) = (self.step_seconds, self.seconds_between);
        row("a step", format!("{step:.3} s, and {between:.3} s between steps"));
        let attention = self.attention_seconds;
        row(
            "attention of the busiest rank",
            format!(
                "{attention:.3} s, {:.1} % of a step, {:.2} of the mean rank's",
                part(attention),
                self.max_over_mean
            ),
        );
        row(
            "lost to imbalance",
            format!("{:.3} s, {:.1} % of a step", self.lost_seconds, part(self.lost_seconds)),
        );
        if let (Some(spread), Some((rank, over))) = (self.forward_spread_seconds, self.slowest_rank)
        {
            row(
                "measured in forwards",
                format!(
                    "the slowest rank's take {spread:.3} s more than the mean's; all in all rank {rank} is slowest, {over:.2} of the mean"
                ),
            );
        }
        row(
            "on a pool",
            format!(
                "{}, finishes {:.3} of the mean: attention {:.3} s, and {:.3} s wait for links",
                self.pool,
                self.pooled_max_over_mean,
                self.pooled_attention_seconds,
                self.link_seconds
            ),
        );
        let verdict = match &self.because {
            None => format!(
                "a pool gains: a step takes {:.3} s in place of {step:.3} s, {:.2} times as fast",
                self.pooled_step_seconds, self.speedup
            ),
            Some(why) => format!("no gain here: {why}"),
        };
        format!("{table}\n{verdict}\n")
    }
}

/// Why a pool gains nothing worth the change.
fn why_not(log: &Log, watched: &Watched, sums: &Sums, all_full: &Sums) -> String {
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let part = |seconds: f64| percent(seconds / sums.seconds);
    let (apart, _) = sums.saved();
    if watched.ranks == 1 && watched.servers == 0 {
        return "one rank has no other to share its attention with".into();
    }
    if apart >= LEAST_GAIN {
        return format!(
            "slow links: even attention saves {} of a step, and waiting for links takes {}",
            percent(apart),
            part(sums.links)
        );
    }
    let is_full = |it: &Kind| it.mask == Mask::Causal && it.chunk.is_none();
    let full = watched.layers.iter().flatten().filter(|it| is_full(it)).count();
    if full < watched.layers.len() && all_full.saved().0 >= LEAST_GAIN {
        return format!(
            "few layers of full attention, {full} of {}: attention of the busiest rank takes {} of a step",
            watched.layers.len(),
            part(sums.most)
        );
    }
    if sums.most < (1.0 + EVEN_WITHIN) * sums.mean {
        let over = sums.most / sums.mean.max(f64::MIN_POSITIVE) - 1.0;
        return format!(
            "ranks are even: the busiest one's attention is {} above the mean",
            percent(over)
        );
    }
    format!(
        "short documents: attention of the busiest rank takes {} of a step, the longest document has {} rows",
        part(sums.most),
        documents(&log.steps.iter().collect::<Vec<_>>()).max().unwrap_or(0)
    )
}

fn documents<'a>(steps: &'a [&Step]) -> impl Iterator<Item = u32> + 'a {
    steps.iter().flat_map(|it| it.documents.iter().flatten().flatten()).copied()
}

/// How much longer the slowest rank's forwards are than the mean's, over all steps.
fn spread(steps: &[&Vec<f64>]) -> f64 {
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len().max(1) as f64;
    steps.iter().map(|it| it.iter().copied().fold(0.0, f64::max) - mean(it)).sum()
}

/// The rank with the longest forwards in all steps, over the mean rank's.
fn slowest(steps: &[&Vec<f64>]) -> Option<(usize, f64)> {
    let ranks = steps.first()?.len();
    let sum = |rank: usize| steps.iter().map(|it| it[rank]).sum::<f64>();
    let sums: Vec<f64> = (0..ranks).map(sum).collect();
    let mean = sums.iter().sum::<f64>() / ranks.max(1) as f64;
    let (rank, most) = sums.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
    (mean > 0.0).then(|| (rank, most / mean))
}

/// Layers of each kind.
fn layers(watched: &Watched) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for layer in &watched.layers {
        let name = layer.map_or_else(|| "without core attention".into(), |it| it.to_string());
        match kinds.iter_mut().find(|it| it.0 == name) {
            Some((_, count)) => *count += 1,
            None => kinds.push((name, 1)),
        }
    }
    let told = kinds.iter().map(|(name, count)| format!("{count} × {name}"));
    told.collect::<Vec<_>>().join(", ")
}
