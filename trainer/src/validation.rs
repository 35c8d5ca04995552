//! The loss of documents that are held out.
//!
//! In: a corpus that is not trained on, a trainer's model. Out: the mean loss over all its targets, in nats, the same on every
//! trainer.
//!
//! Attention is computed here, whatever the job's place for it is. Trainers
//! share the pieces; the pool is not asked, and no header tells of it.
//!
//! Invariant: pieces are computed one by one and summed in their order, so the same parameters give the same bits for any number
//! of trainers and threads, with a pool and without.

use std::num::NonZeroU32;

use super::InProcess;
use super::corpus::{Corpus, Piece};
use super::loader::Rows;
use super::model::Activations;
use super::ring::Ring;
use super::step::{StepError, Trainer};

/// See the module.
#[derive(Debug)]
pub(crate) struct Validation {
    corpus: Corpus,
    pieces: Vec<Piece>,
    /// Targets in all pieces.
    targets: u64,
}

impl Validation {
    /// Cuts documents after `cap` rows and takes about `most` rows of them.
    pub(crate) fn new(corpus: Corpus, cap: NonZeroU32, most: NonZeroU32) -> Self {
        let pieces = corpus.pieces(cap, most);
        let mut validation = Self { corpus, pieces, targets: 0 };
        let count = |it: &Piece| validation.rows(it).targets.iter().flatten().count() as u64;
        validation.targets = validation.pieces.iter().map(count).sum();
        validation
    }

    /// The loss of a trainer's parameters in `step`; it is `rank` of `ring`. `busy` is called while it goes on, and last before
    /// the others are waited for.
    ///
    /// # Errors
    ///
    /// [`StepError`].
    pub(crate) fn loss(
        &self,
        (step, rank): (u64, usize),
        trainer: &mut Trainer,
        ring: &mut Ring,
        busy: &dyn Fn(),
    ) -> Result<f32, StepError> {
        let model = trainer.model();
        let layers = model.stack().core().clone();
        let mut attention = InProcess::new(layers, model.threads());
        let mut kept = Activations::default();
        let mut nats = vec![0.0; self.pieces.len()];
        trainer.begin()?;
        busy();
        let own = self.pieces.iter().zip(&mut nats).skip(rank).step_by(ring.world());
        for (piece, nats) in own {
            attention.begin(vec![vec![(piece.end - piece.start) as u32]]);
            *nats = trainer.forward(self.rows(piece), &mut attention, &mut kept)? as f32;
            busy();
        }
        // One trainer has the loss of a piece; the others add 0.
        ring.all_reduce(&mut nats)?;
        let sum: f64 = nats.into_iter().map(f64::from).sum();
        let value = (sum / self.targets as f64) as f32;
        if value.is_finite() {
            Ok(value)
        } else {
            Err(StepError::NotFinite { step, what: "validation loss", value })
        }
    }

    fn rows(&self, piece: &Piece) -> Rows {
        let Piece { document, start, end } = *piece;
        let tokens = &self.corpus.documents()[document].tokens;
        let mut ids = Vec::with_capacity(end - start);
        tokens.append(start..end, &mut ids);
        Rows {
            ids,
            positions: (0..(end - start) as u32).collect(),
            targets: (start..end).map(|at| tokens.get(at + 1)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use cadre_kernels::Threads;

    use super::*;
    use crate::corpus::Document;
    use crate::model::{Config, Model, Pattern, Scores};
    use crate::optimizer::{AdamW, Hyper, Schedule};
    use crate::tests::{accumulated, in_pairs};

    fn corpus(sizes: &[usize]) -> Corpus {
        let text = include_bytes!("../../examples/bible/01-Genesis.txt");
        let document = |size: &usize| Document::text(format!("{size}"), &text[..*size]);
        Corpus::from_documents(sizes.iter().map(document).collect())
    }

    fn some(number: u32) -> NonZeroU32 {
        NonZeroU32::new(number).unwrap()
    }

    fn trainer(threads: usize) -> Trainer {
        let layers = "window:40,full".parse::<Pattern>().unwrap();
        let config = Config::preset("tiny").unwrap();
        let layers = layers.over(2, config.heads(), Scores::default()).unwrap();
        let model = Model::new(config, layers, 256, Threads::new(threads));
        let hyper = Hyper::new(Schedule { peak: 5e-3, warmup: 4, steps: 9 });
        let optimizer = AdamW::new(hyper, model.parameters());
        let parameters = model.parameters().initial(3);
        Trainer::new(model, parameters, optimizer)
    }

    #[test]
    fn the_loss_has_the_same_bits_for_any_number_of_trainers_and_threads() {
        let validation = Validation::new(corpus(&[700, 2, 300, 101]), some(256), some(4096));
        assert_eq!((validation.pieces.len(), validation.targets), (7, 700 + 2 + 300 + 101 - 4));
        let mut lone = trainer(2);
        let alone = validation.loss((0, 0), &mut lone, &mut Ring::alone(), &|| ()).unwrap();
        assert!((alone - 5.7).abs() < 0.8, "{alone}");

        let results = in_pairs(|rank, mut ring| {
            let calls = std::cell::Cell::new(0);
            let busy = || calls.set(calls.get() + 1);
            let loss = validation.loss((0, rank), &mut trainer(1), &mut ring, &busy).unwrap();
            (loss.to_bits(), calls.get())
        });
        assert_eq!(results, [(alone.to_bits(), 5), (alone.to_bits(), 4)], "each has its pieces");
    }

    #[test]
    fn the_loss_is_that_of_a_step_which_it_does_not_change() {
        let validation = Validation::new(corpus(&[200]), some(256), some(4096));
        let rows = validation.rows(&validation.pieces[0]);
        let (mut plain, mut evaluated) = (trainer(1), trainer(1));
        let ring = &mut Ring::alone();
        let loss = validation.loss((0, 0), &mut evaluated, ring, &|| ()).unwrap();
        let results = [&mut plain, &mut evaluated].map(|trainer| {
            let model = trainer.model();
            let layers = model.stack().core().clone();
            let mut attention = InProcess::new(layers, Threads::ONE);
            attention.begin(vec![vec![200]]);
            let batch = vec![rows.clone()];
            let order = accumulated(trainer, 1, 1);
            let result =
                trainer.step((0, &order), batch, 199, &mut attention, ring, &mut ()).unwrap();
            (result.loss.to_bits(), trainer.parameters().to_vec())
        });
        assert_eq!(results[0], results[1]);
        let trained = f32::from_bits(results[0].0);
        assert!((loss - trained).abs() < 1e-6, "{loss} {trained}");
    }
}
