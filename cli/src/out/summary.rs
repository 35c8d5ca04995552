//! What a run has come to.
//!
//! In: the rows of its steps and servers. Out: a [`Summary`], the content of `summary.json` and of the
//! table at the end. Times are those of the steps themselves, without start and end of processes.

use std::collections::BTreeMap;

use cadre_supervisor::{ServerKind, ServerRecord, StepRecord};
use serde::{Deserialize, Serialize};

/// A run in numbers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Summary {
    /// Name of the job.
    pub(crate) job: String,
    /// How it ended.
    pub(crate) outcome: Ending,
    /// Why, when it did not complete.
    pub(crate) message: Option<String>,
    /// Steps done, those before a resume included.
    pub(crate) steps: u64,
    /// Loss of the first step, in nats a token.
    pub(crate) first_loss: Option<f32>,
    /// Loss of the last step.
    pub(crate) last_loss: Option<f32>,
    /// Bits of the last loss, 8 hex digits.
    pub(crate) last_loss_bits: Option<String>,
    /// Loss of the documents that are held out, when it was last computed.
    pub(crate) last_validation_loss: Option<f32>,
    /// Entropy of single bytes, in nats a byte: the loss of a model that knows only how frequent
    /// each byte is. For `cadre train` only.
    pub(crate) unigram_entropy: Option<f64>,
    /// Whether the last loss is below `unigram_entropy`, so that the model has learnt from context.
    pub(crate) below_unigram_entropy: Option<bool>,
    /// Rows trained on.
    pub(crate) tokens: u64,
    /// Time of all steps.
    pub(crate) seconds: f64,
    /// Rows a second.
    pub(crate) tokens_per_second: f64,
    /// Part of the time in which the worst trainer waited for attention, 0 to 1.
    pub(crate) exposed_wait_share: f64,
    /// Part of the time in which the worst trainer waited between two steps for header and plan, 0 to 1.
    #[serde(default)]
    pub(crate) header_wait_share: f64,
    /// Slots lost in steps.
    pub(crate) failovers: u64,
    /// Starts of the trainers by this run.
    pub(crate) attempts: u32,
    /// Mean over the steps of the busiest server over the mean one.
    pub(crate) imbalance: f64,
    /// The same mean if every trainer had computed its own rows.
    pub(crate) imbalance_unplanned: f64,
    /// Servers by name.
    pub(crate) servers: Vec<ServerSummary>,
    /// Text that the trained model wrote.
    pub(crate) sample: Option<String>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ending {
    /// All steps are done.
    Completed,
    /// The job failed.
    Failed,
    /// The user ended it.
    Interrupted,
}

/// A server in numbers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct ServerSummary {
    /// `server-1`, or `trainer-0` for an in-place server.
    pub(crate) server: String,
    /// Whether it is a process of its own or in a trainer.
    pub(crate) kind: ServerKind,
    /// Steps it took part in.
    pub(crate) steps: u64,
    /// Tasks it ran.
    pub(crate) tasks: u64,
    /// Time it computed.
    pub(crate) busy_seconds: f64,
    /// `busy_seconds` as a part of the time of the steps that it took part in, 0 to 1.
    pub(crate) busy_share: f64,
    /// Bytes of rows it pulled.
    pub(crate) bytes_pulled: u64,
}

/// What a summary needs beside the rows.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) job: String,
    pub(crate) outcome: Ending,
    pub(crate) message: Option<String>,
    pub(crate) attempts: u32,
    pub(crate) unigram_entropy: Option<f64>,
    pub(crate) sample: Option<String>,
}

impl Summary {
    /// Sums up.
    pub(crate) fn of(end: End, steps: &[StepRecord], servers: &[ServerRecord]) -> Self {
        let End { job, outcome, message, attempts, unigram_entropy, sample } = end;
        let sum = |of: fn(&StepRecord) -> f64| steps.iter().map(of).fold(0.0, |sum, it| sum + it);
        let (seconds, waited) = (sum(|it| it.seconds), sum(|it| it.exposed_wait_seconds));
        let tokens = steps.iter().map(|it| it.tokens).sum::<u64>();
        let count = steps.len() as f64;
        let (first, last) = (steps.first(), steps.last());
        Self {
            job,
            outcome,
            message,
            steps: steps.len() as u64,
            first_loss: first.map(|it| it.loss),
            last_loss: last.map(|it| it.loss),
            last_loss_bits: last.map(|it| it.loss_bits.clone()),
            last_validation_loss: steps.iter().rev().find_map(|it| it.validation_loss),
            unigram_entropy,
            below_unigram_entropy: unigram_entropy
                .map(|entropy| last.is_some_and(|it| f64::from(it.loss) < entropy)),
            tokens,
            seconds,
            tokens_per_second: share(tokens as f64, seconds),
            exposed_wait_share: share(waited, seconds),
            header_wait_share: share(sum(|it| it.header_wait_seconds), seconds),
            failovers: steps.iter().map(|it| u64::from(it.failovers)).sum(),
            attempts,
            imbalance: share(sum(|it| it.imbalance), count),
            imbalance_unplanned: share(sum(|it| it.imbalance_unplanned), count),
            servers: by_server(steps, servers),
            sample,
        }
    }
}

fn by_server(steps: &[StepRecord], rows: &[ServerRecord]) -> Vec<ServerSummary> {
    let seconds: BTreeMap<u64, f64> = steps.iter().map(|it| (it.step, it.seconds)).collect();
    let mut servers: BTreeMap<(&str, bool), (ServerSummary, f64, u64)> = BTreeMap::new();
    for row in rows {
        let key = (row.server.as_str(), row.kind == ServerKind::InPlace);
        let (server, time, last) = servers.entry(key).or_insert_with(|| {
            let empty = ServerSummary {
                server: row.server.clone(),
                kind: row.kind,
                steps: 0,
                tasks: 0,
                busy_seconds: 0.0,
                busy_share: 0.0,
                bytes_pulled: 0,
            };
            (empty, 0.0, u64::MAX)
        });
        // A replaced server has a row of each incarnation in the step of its death.
        if *last != row.step {
            server.steps += 1;
            *time += seconds.get(&row.step).copied().unwrap_or_default();
            *last = row.step;
        }
        server.tasks += u64::from(row.tasks);
        server.busy_seconds += row.busy_seconds;
        server.bytes_pulled += row.bytes_pulled;
    }
    let finish = |(server, time, _): (ServerSummary, f64, u64)| ServerSummary {
        busy_share: share(server.busy_seconds, time),
        ..server
    };
    servers.into_values().map(finish).collect()
}

/// 0 where there is nothing to divide by.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A step as a test wants it.
    pub(crate) fn step(step: u64, loss: f32) -> StepRecord {
        StepRecord {
            step,
            loss,
            lr: 0.0,
            gradient_norm: 0.0,
            validation_loss: None,
            loss_bits: format!("{:08x}", loss.to_bits()),
            tokens: 100,
            seconds: 2.0,
            exposed_wait_seconds: 0.5,
            header_wait_seconds: 0.25,
            failovers: u32::from(step == 1),
            imbalance: 1.5,
            imbalance_unplanned: 2.5,
            gap_compute: Some(0.0),
            gap_link: None,
            gap_bytes: None,
            plans: String::new(),
            view: "0.1".into(),
        }
    }

    /// What a server did, as a test wants it.
    pub(crate) fn server(step: u64, name: &str, incarnation: u32) -> ServerRecord {
        ServerRecord {
            step,
            server: name.into(),
            kind: ServerKind::Dedicated,
            slot: 0,
            incarnation,
            tasks: 3,
            busy_seconds: 0.5,
            bytes_pulled: 10,
        }
    }

    /// The end of a run, as a test wants it.
    pub(crate) fn end() -> End {
        End {
            job: "bible".into(),
            outcome: Ending::Completed,
            message: None,
            attempts: 1,
            unigram_entropy: Some(3.0),
            sample: Some("In the beginning".into()),
        }
    }

    #[test]
    fn steps_and_servers_are_summed_up() {
        let steps = [step(0, 5.5), step(1, 2.5)];
        let servers =
            [server(0, "server-0", 0), server(1, "server-0", 0), server(1, "server-0", 1)];
        let summary = Summary::of(end(), &steps, &servers);
        assert_eq!((summary.steps, summary.tokens, summary.failovers), (2, 200, 1));
        assert_eq!((summary.first_loss, summary.last_loss), (Some(5.5), Some(2.5)));
        assert_eq!(summary.below_unigram_entropy, Some(true));
        let other = Summary::of(End { unigram_entropy: None, ..end() }, &steps, &servers);
        assert_eq!(other.below_unigram_entropy, None);
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-12, "{value}");
        near(summary.tokens_per_second, 50.0);
        near(summary.exposed_wait_share, 0.25);
        near(summary.header_wait_share, 0.125);
        near(summary.imbalance, 1.5);
        let [server] = &summary.servers[..] else { panic!("{:?}", summary.servers) };
        assert_eq!((server.steps, server.tasks, server.bytes_pulled), (2, 9, 30));
        near(server.busy_share, 1.5 / 4.0);
    }

    #[test]
    fn a_run_without_steps_has_a_summary() {
        let summary = Summary::of(end(), &[], &[]);
        assert_eq!((summary.last_loss, summary.below_unigram_entropy), (None, Some(false)));
        let text = serde_json::to_string(&summary).unwrap();
        assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    }
}
