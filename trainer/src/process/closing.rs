//! How a trainer ends: the last checkpoint, the sample, and what the controller is told.
//!
//! In: the ending. Out: an [`Outcome`] with the exit code, for the session to say.
//!
//! Invariant: once a step is done, trainer 0 alone writes at a good ending, and every survivor at a failure; at bad input only those
//! that have done a step themselves, so that a run that is refused changes nothing. A checkpoint that cannot be written makes any
//! ending a failure.

use cadre_worker::session::{Ending, Outcome, finished};

use super::{ENDED_BY_SIGTERM, Process};
use crate::corpus::BYTE_TOKENS;
use crate::model::Model;
use crate::sample;

/// Length of the sample, in tokens.
const SAMPLE_TOKENS: usize = 160;

/// Tokens of the corpus that the sample follows where tokens are no bytes.
const PROMPT_TOKENS: usize = 8;

impl Process {
    /// Ends the process's part in the job when no step follows: writes the last checkpoint and
    /// makes the report.
    pub(super) fn close(&mut self, ending: Ending) -> Outcome {
        use finished::Outcome as Told;
        let (told, reason, code) = match ending {
            Ending::Completed => (Told::Completed, None, 0),
            // Kubernetes takes exit code 0 of a pod for a job that is complete, so a stopped
            // trainer exits otherwise.
            Ending::Stopped { .. } if self.session.is_pod() => {
                (Told::Stopped, None, ENDED_BY_SIGTERM)
            }
            Ending::Stopped { .. } => (Told::Stopped, None, 0),
            Ending::Failed { reason, bad_input: true } => (Told::Failed, Some(reason), 2),
            Ending::Failed { reason, bad_input: false } => (Told::Failed, Some(reason), 3),
        };
        // Trainer 0 writes; of a failed job every survivor, since trainer 0 may be the dead one.
        let writes = match ending_kind(told) {
            Kind::Good => self.session.rank() == 0 && self.state.step > 0,
            Kind::Failed => self.state.step > 0 && (code == 3 || self.last.is_some()),
        };
        let message = reason.unwrap_or_default();
        let mut outcome = Outcome { kind: told, message, exit_code: code, sample: String::new() };
        if writes && let Err(error) = self.save() {
            let error = error.to_string();
            // A checkpoint that cannot be written is bad input (exit code 2) here too: the user has
            // to make room.
            outcome.exit_code = 2;
            outcome.message = match outcome.message.as_str() {
                "" => error,
                reason if reason.contains(&error) => reason.to_owned(),
                reason => format!("{reason}; and {error}"),
            };
            outcome.kind = Told::Failed;
        }
        if told == Told::Completed && self.session.rank() == 0 {
            outcome.sample = self.sample();
        }
        outcome
    }

    fn sample(&self) -> String {
        let (config, stack) =
            (*self.trainer.model().config(), self.trainer.model().stack().clone());
        let prompt = self.prompt(config.vocabulary);
        let positions = (prompt.len() + SAMPLE_TOKENS) as u32 + 1;
        let mut model = Model::new(config, stack, positions, self.args.threads);
        let parameters = self.trainer.parameters();
        // The sample computes one row at a time, which does not pay on a GPU.
        let tokens =
            sample::sample(&mut model, parameters, &prompt, SAMPLE_TOKENS, 0.7, self.args.seed)
                .expect("on the CPU a stage does not fail");
        if config.vocabulary == BYTE_TOKENS {
            let text: Vec<u8> = tokens.iter().map(|&it| it as u8).collect();
            return String::from_utf8_lossy(&text).into_owned();
        }
        let ids: Vec<_> = tokens.iter().map(u32::to_string).collect();
        ids.join(" ")
    }

    /// What the sample follows: a text where tokens are bytes, else the first tokens of the corpus.
    fn prompt(&self, vocabulary: usize) -> Vec<u32> {
        if vocabulary != BYTE_TOKENS {
            let tokens = &self.loader.corpus().documents()[0].tokens;
            return tokens.iter().take(PROMPT_TOKENS).collect();
        }
        let prompt = self.args.prompt.as_str();
        let prompt = if prompt.is_empty() { "\n" } else { prompt };
        prompt.bytes().map(u32::from).collect()
    }
}

enum Kind {
    Good,
    Failed,
}

fn ending_kind(told: finished::Outcome) -> Kind {
    use finished::Outcome as Told;
    match told {
        Told::Completed | Told::Stopped => Kind::Good,
        Told::Failed | Told::Unspecified => Kind::Failed,
    }
}
