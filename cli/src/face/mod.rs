//! Shows a run while it goes on.
//!
//! In: events and a [`Summary`]. Out: a live display on a terminal, a plain line a step elsewhere, or
//! one JSON object a line for programs. Nothing is decided or kept here.
//!
//! Steps and the summary go to stdout, notices to stderr; with `--json` everything goes to stdout.

mod json;
mod live;
mod table;

use std::io::{ErrorKind, IsTerminal, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use cadre_supervisor::{Level, RunEvent, StepRecord};

use crate::out::summary::Summary;
use live::Live;

/// How a run is shown.
#[derive(Debug)]
pub(crate) enum Face {
    /// On a terminal.
    Live(Box<Live>),
    /// Lines for people.
    Plain {
        /// Steps of the job, where they are known.
        steps: Option<u64>,
    },
    /// Lines for programs.
    Json,
}

impl Face {
    /// The face for where stdout goes.
    pub(crate) fn new(json: bool, steps: Option<u64>) -> Self {
        match (json, std::io::stdout().is_terminal() && std::io::stderr().is_terminal()) {
            (true, _) => Self::Json,
            (false, true) => Self::Live(Box::new(Live::new(steps))),
            (false, false) => Self::Plain { steps },
        }
    }

    /// Shows what happened.
    pub(crate) fn event(&mut self, event: &RunEvent) {
        match self {
            Self::Live(live) => live.event(event),
            Self::Plain { steps } => match event {
                RunEvent::Step(step) => say(&line(step, *steps)),
                RunEvent::Notice { level, text } => note(*level, text),
                RunEvent::Attempt(attempt) if attempt.number > 1 || attempt.first_step > 0 => {
                    note(Level::Information, &restart(attempt.number, attempt.first_step));
                }
                RunEvent::Attempt(_)
                | RunEvent::Process(_)
                | RunEvent::ProcessEnded { .. }
                | RunEvent::Server(_)
                | RunEvent::Header { .. }
                | RunEvent::Load(_)
                | RunEvent::Finished(_) => {}
            },
            Self::Json => {
                if let Some(line) = json::event(event) {
                    say(&line);
                }
            }
        }
    }

    /// Shows something a person should read.
    pub(crate) fn notice(&mut self, level: Level, text: &str) {
        match self {
            Self::Live(live) => live.notice(level, text),
            Self::Plain { .. } => note(level, text),
            Self::Json => say(&json::notice(level, text)),
        }
    }

    /// Takes the live display away.
    pub(crate) fn clear(&mut self) {
        if let Self::Live(live) = self {
            live.clear();
        }
    }

    /// Shows what the run has come to.
    pub(crate) fn finish(&mut self, summary: &Summary, out: &Path) {
        self.clear();
        match self {
            Self::Json => say(&json::summary(summary, out)),
            Self::Live(_) | Self::Plain { .. } => say(&table::draw(summary, out)),
        }
    }
}

/// `step 3/60  loss 4.1234  12345 tokens/s  exposed wait 3.1 %  imbalance 1.02 (unplanned 1.74)`.
fn line(step: &StepRecord, steps: Option<u64>) -> String {
    let lost = match step.failovers {
        0 => String::new(),
        lost => format!("  slots lost {lost}"),
    };
    let of = steps.map_or_else(String::new, |steps| format!("/{steps}"));
    format!(
        "step {}{of}  {}  {:.0} tokens/s  exposed wait {:.1} %  imbalance {:.2} \
         (unplanned {:.2}){lost}",
        step.step + 1,
        losses(step),
        step.tokens as f64 / step.seconds.max(1e-9),
        100.0 * step.exposed_wait_seconds / step.seconds.max(1e-9),
        step.imbalance,
        step.imbalance_unplanned,
    )
}

/// `loss 4.1234`, and `  validation loss 4.2345` in a step that computed it.
fn losses(step: &StepRecord) -> String {
    let validation = step.validation_loss.map(|it| format!("  validation loss {it:.4}"));
    format!("loss {:.4}{}", step.loss, validation.unwrap_or_default())
}

fn restart(number: u32, first_step: u64) -> String {
    format!("attempt {number} of the trainers goes on from step {first_step}")
}

/// Prints a line; that nobody reads it must not end the training. That it cannot be kept is said once.
fn say(line: &str) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush())
        && error.kind() != ErrorKind::BrokenPipe
        && !IS_TOLD.swap(true, Ordering::Relaxed)
    {
        note(Level::Warning, &format!("what this run says on stdout is lost: {error}"));
    }
}

fn note(level: Level, text: &str) {
    let _ = writeln!(std::io::stderr(), "{}: {text}", word(level));
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Information => "note",
        Level::Warning => "warning",
        Level::Error => "failure",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::out::summary::tests::step;

    #[test]
    fn a_step_is_a_line() {
        assert_eq!(
            line(&step(0, 5.5), Some(60)),
            "step 1/60  loss 5.5000  50 tokens/s  exposed wait 25.0 %  imbalance 1.50 (unplanned \
             2.50)"
        );
        assert!(line(&step(1, 5.5), Some(60)).ends_with("  slots lost 1"));
        let evaluated = StepRecord { validation_loss: Some(5.75), ..step(0, 5.5) };
        let expected = "step 1  loss 5.5000  validation loss 5.7500  50 tokens/s";
        assert!(line(&evaluated, None).starts_with(expected), "{}", line(&evaluated, None));
        assert!(line(&step(0, 5.5), None).starts_with("step 1  loss 5.5000"));
    }
}
