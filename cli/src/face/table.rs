//! The table at the end of a run.
//!
//! In: a [`Summary`]. Out: text. What is not known is left out.

use std::path::Path;

use cadre_supervisor::ServerKind;
use comfy_table::{CellAlignment, Table};

use crate::out::summary::{Ending, ServerSummary, Summary};
use crate::printed;

/// Longest sample of text that is shown, in characters.
const MAX_SAMPLE_CHARACTERS: usize = 400;

/// Draws the tables.
pub(super) fn draw(summary: &Summary, out: &Path) -> String {
    let mut text = vec![run(summary, out).to_string()];
    if !summary.servers.is_empty() {
        text.push(servers(summary).to_string());
    }
    if let Some(sample) = &summary.sample {
        let shown: String = sample.chars().take(MAX_SAMPLE_CHARACTERS).map(printable).collect();
        text.push(format!("The model writes:\n{shown}"));
    }
    format!("\n{}", text.join("\n"))
}

fn run(summary: &Summary, out: &Path) -> Table {
    let mut table = printed::table();
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    let outcome = match summary.outcome {
        Ending::Completed => "completed",
        Ending::Failed => "failed",
        Ending::Interrupted => "interrupted",
    };
    row("job", format!("{}, {outcome}", summary.job));
    row("steps", format!("{} in {:.1} s", summary.steps, summary.seconds));
    if let (Some(first), Some(last)) = (summary.first_loss, summary.last_loss) {
        row("loss", format!("{first:.4} at first, {last:.4} at last"));
        if let Some(loss) = summary.last_validation_loss {
            row("validation loss", format!("{loss:.4} at last"));
        }
        if let (Some(entropy), Some(below)) =
            (summary.unigram_entropy, summary.below_unigram_entropy)
        {
            let below = if below { "yes" } else { "no" };
            row("unigram entropy", format!("{entropy:.4}, loss below it: {below}"));
        }
        row("tokens/s", format!("{:.0}", summary.tokens_per_second));
        row("exposed wait", format!("{:.1} % of the time", 100.0 * summary.exposed_wait_share));
        row(
            "imbalance",
            format!("{:.3}, unplanned {:.3}", summary.imbalance, summary.imbalance_unplanned),
        );
    }
    row("failovers", summary.failovers.to_string());
    if summary.attempts > 1 {
        row("starts of trainers", summary.attempts.to_string());
    }
    row("results", out.display().to_string());
    table
}

fn servers(summary: &Summary) -> Table {
    let mut table = printed::table();
    table.set_header(["server", "kind", "steps", "busy", "tasks", "pulled"]);
    // A trainer that stood by and took no task is left out.
    let worked = |it: &&ServerSummary| it.kind == ServerKind::Dedicated || it.tasks > 0;
    for server in summary.servers.iter().filter(worked) {
        let kind = match server.kind {
            ServerKind::Dedicated => "dedicated",
            ServerKind::InPlace => "in place",
        };
        table.add_row([
            server.server.clone(),
            kind.to_owned(),
            server.steps.to_string(),
            format!("{:.1} s, {:.0} %", server.busy_seconds, 100.0 * server.busy_share),
            server.tasks.to_string(),
            bytes(server.bytes_pulled),
        ]);
    }
    for column in 2..=5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A model of bytes may write anything; terminals should not obey it.
fn printable(letter: char) -> char {
    if letter.is_control() && letter != '\n' { '\u{fffd}' } else { letter }
}

fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use cadre_supervisor::StepRecord;

    use super::*;
    use crate::out::summary::tests::{end, server, step};

    #[test]
    fn the_table_says_what_matters() {
        let validated = StepRecord { validation_loss: Some(2.75), ..step(0, 5.5) };
        let steps = [validated, step(1, 2.5)];
        let servers = [server(0, "server-0", 0), server(1, "server-0", 0)];
        let summary = Summary::of(end(), &steps, &servers);
        let text = draw(&summary, Path::new("runs/bible"));
        for expected in [
            "bible, completed",
            "2 in 4.0 s",
            "5.5000 at first, 2.5000 at last",
            "2.7500 at last",
            "3.0000, loss below it: yes",
            "25.0 % of the time",
            "1.0 s, 25 %",
            "runs/bible",
            "The model writes:\nIn the beginning",
        ] {
            assert!(text.contains(expected), "`{expected}` is missing:\n{text}");
        }
    }

    #[test]
    fn samples_cannot_command_the_terminal() {
        let sample = Some("a\u{1b}[2Jb\nc".into());
        let summary = Summary::of(crate::out::summary::End { sample, ..end() }, &[], &[]);
        let text = draw(&summary, Path::new("o"));
        assert!(!text.contains('\u{1b}') && text.contains("[2Jb\nc"));
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!([bytes(0), bytes(1023), bytes(1536)], ["0 B", "1023 B", "1.5 KiB"]);
    }
}
