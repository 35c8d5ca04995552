//! Cuts the corpus into documents of drawn lengths and packs them into the streams of a step.
//!
//! In: a [`Corpus`], a list of lengths, [`Settings`]. Out: for any (step, nano-batch) one stream of
//! exactly trainers × tokens rows, of which each trainer makes its own [`Share`] alone. The whole [`Stream`] is for
//! who wants all of it.
//!
//! Has no state: a stream is made from seed, step and nano-batch alone, so all trainers' shares are of the same
//! one, and a resumed run goes on with the same data.
//!
//! Invariant: a stream's documents cover its rows without gap; document `d` of a stream is a run of
//! consecutive tokens of one file, and a row's target is the next token of that file, also across the
//! document's cut.

mod lengths;

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

pub use lengths::Lengths;
pub(super) use lengths::random;
use lengths::{below, stream_random};

use super::corpus::{Corpus, Tokens};

/// What decides the streams, beside the corpus and the lengths.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// Trainers over which a stream is laid.
    pub trainers: NonZeroU32,
    /// Rows of each trainer in each nano-batch.
    pub tokens: NonZeroU32,
    /// Nano-batches of a step.
    pub nano_batches: NonZeroU32,
    /// Longest document, in rows.
    pub cap: NonZeroU32,
    /// Of the job.
    pub seed: u64,
}

/// Makes the streams of a run.
#[derive(Clone, Debug)]
pub struct Loader {
    corpus: Arc<Corpus>,
    lengths: Lengths,
    settings: Settings,
    /// First token of each file in the corpus laid end to end.
    starts: Vec<u64>,
}

impl Loader {
    /// # Errors
    ///
    /// [`LoaderError::NoTarget`] when no file has a token that follows another, and
    /// [`LoaderError::TooLarge`] when a stream has more rows than positions count.
    pub fn new(
        corpus: Arc<Corpus>,
        lengths: Lengths,
        settings: Settings,
    ) -> Result<Self, LoaderError> {
        if corpus.documents().iter().all(|it| it.tokens.count() < 2) {
            return Err(LoaderError::NoTarget);
        }
        let rows = u64::from(settings.trainers.get()) * u64::from(settings.tokens.get());
        if rows > MAX_ROWS {
            return Err(LoaderError::TooLarge { rows });
        }
        let starts = corpus
            .documents()
            .iter()
            .scan(0, |end, document| {
                let start = *end;
                *end += document.tokens.count() as u64;
                Some(start)
            })
            .collect();
        Ok(Self { corpus, lengths, settings, starts })
    }

    /// What the streams are made by.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// The corpus that is cut.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The packed stream of one nano-batch, all trainers.
    ///
    /// # Panics
    ///
    /// When `nano` is not below the number of nano-batches.
    pub fn stream(&self, step: u64, nano: u32) -> Stream {
        let Settings { trainers, tokens, nano_batches, cap: _, seed: _ } = self.settings;
        assert!(nano < nano_batches.get(), "nano-batch {nano} of {nano_batches}");
        let total = (trainers.get() * tokens.get()) as usize;
        let mut stream = Stream {
            tokens: tokens.get(),
            trainers: trainers.get(),
            documents: Vec::new(),
            ids: Vec::with_capacity(total),
            positions: Vec::with_capacity(total),
            targets: Vec::with_capacity(total),
        };
        for cut in self.cuts(step, nano) {
            stream.documents.push(cut.rows());
            cut.append(
                0..cut.rows(),
                (&mut stream.ids, &mut stream.positions, &mut stream.targets),
            );
        }
        stream
    }

    /// What one trainer holds of a stream. Of the others' rows it looks at the lengths alone.
    ///
    /// # Panics
    ///
    /// When there is no such nano-batch or trainer.
    pub fn share(&self, step: u64, nano: u32, trainer: u32) -> Share {
        let Settings { trainers, tokens, nano_batches, cap: _, seed: _ } = self.settings;
        assert!(nano < nano_batches.get(), "nano-batch {nano} of {nano_batches}");
        assert!(trainer < trainers.get(), "trainer {trainer} of {trainers}");
        let (first, last) = (trainer * tokens.get(), (trainer + 1) * tokens.get());
        let size = tokens.get() as usize;
        let mut share = Share {
            documents: Vec::new(),
            stretches: Vec::new(),
            rows: Rows {
                ids: Vec::with_capacity(size),
                positions: Vec::with_capacity(size),
                targets: Vec::with_capacity(size),
            },
            targets: 0,
        };
        let mut at = 0;
        for (document, cut) in (0..).zip(self.cuts(step, nano)) {
            let rows = cut.rows();
            share.targets += u64::from(cut.targets());
            // The document's rows that lie in this trainer's part of the stream.
            let start = first.saturating_sub(at).min(rows);
            let end = last.saturating_sub(at).min(rows);
            if start < end {
                share.documents.push((document, rows));
                share.stretches.push(Stretch { document, start, end });
                let Rows { ids, positions, targets } = &mut share.rows;
                cut.append(start..end, (ids, positions, targets));
            }
            at += rows;
        }
        share
    }

    /// The documents of a stream, one after the other.
    fn cuts(&self, step: u64, nano: u32) -> impl Iterator<Item = Cut<'_>> {
        let Settings { trainers, tokens, nano_batches: _, cap, seed: _ } = self.settings;
        let mut random = stream_random(&self.settings, step, nano);
        let mut left = trainers.get() * tokens.get();
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let drawn = self.lengths.draw(&mut random);
            let at = below(&mut random, self.corpus.tokens());
            let cut = self.cut(at, drawn.get().min(cap.get()).min(left));
            left -= cut.rows();
            Some(cut)
        })
    }

    /// Up to `length` tokens that begin at token `at` of the corpus laid end to end.
    fn cut(&self, at: u64, length: u32) -> Cut<'_> {
        let file = self.starts.partition_point(|&start| start <= at) - 1;
        let tokens = &self.corpus.documents()[file].tokens;
        let start = (at - self.starts[file]) as usize;
        Cut { file: tokens, start, end: tokens.count().min(start + length as usize) }
    }
}

/// A document: consecutive tokens of a file.
struct Cut<'a> {
    file: &'a Tokens,
    start: usize,
    end: usize,
}

impl Cut<'_> {
    fn rows(&self) -> u32 {
        (self.end - self.start) as u32
    }

    /// Rows that a token of the file follows: all, but for the file's last.
    fn targets(&self) -> u32 {
        self.rows() - u32::from(self.end == self.file.count())
    }

    /// Appends some of the rows.
    fn append(
        &self,
        rows: Range<u32>,
        (ids, positions, targets): (&mut Vec<u32>, &mut Vec<u32>, &mut Vec<Option<u32>>),
    ) {
        let tokens = self.start + rows.start as usize..self.start + rows.end as usize;
        self.file.append(tokens.clone(), ids);
        positions.extend(rows);
        targets.extend(tokens.map(|at| self.file.get(at + 1)));
    }
}

/// What one trainer holds of a stream.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Share {
    /// Documents that it holds rows of, in their order: number in the stream and whole length in rows.
    pub documents: Vec<(u32, u32)>,
    /// Rows that the trainer holds of each of them.
    pub stretches: Vec<Stretch>,
    /// Its rows.
    pub rows: Rows,
    /// Rows that have a target, those of all trainers.
    pub targets: u64,
}

/// One nano-batch over all trainers: its documents one after the other.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stream {
    tokens: u32,
    trainers: u32,
    documents: Vec<u32>,
    ids: Vec<u32>,
    positions: Vec<u32>,
    targets: Vec<Option<u32>>,
}

impl Stream {
    /// Rows of each document, none of them zero, in the order of the stream.
    pub fn documents(&self) -> &[u32] {
        &self.documents
    }

    /// What each trainer holds, in the order of its rows.
    pub fn layout(&self) -> Vec<Vec<Stretch>> {
        let mut layout = vec![Vec::new(); self.trainers as usize];
        let mut at = 0;
        for (document, &rows) in self.documents.iter().enumerate() {
            let mut start = 0;
            while start < rows {
                let end = rows.min(start + self.tokens - at % self.tokens);
                let stretch = Stretch { document: document as u32, start, end };
                layout[(at / self.tokens) as usize].push(stretch);
                at += end - start;
                start = end;
            }
        }
        layout
    }

    /// Rows of one trainer.
    ///
    /// # Panics
    ///
    /// When there is no such trainer.
    pub fn rows(&self, trainer: u32) -> Rows {
        let tokens = self.tokens as usize;
        let range = trainer as usize * tokens..(trainer as usize + 1) * tokens;
        Rows {
            ids: self.ids[range.clone()].to_vec(),
            positions: self.positions[range.clone()].to_vec(),
            targets: self.targets[range].to_vec(),
        }
    }

    /// Rows that have a target.
    pub fn count(&self) -> u64 {
        self.targets.iter().flatten().count() as u64
    }
}

/// Rows `start..end` of a document.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stretch {
    /// Index in [`Stream::documents`].
    pub document: u32,
    /// First row, counted from the document's start.
    pub start: u32,
    /// Row after the last.
    pub end: u32,
}

/// What one trainer holds of a stream; the three have the same length.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rows {
    /// Tokens read.
    pub ids: Vec<u32>,
    /// Positions in their documents.
    pub positions: Vec<u32>,
    /// Tokens to predict; none at the end of a file.
    pub targets: Vec<Option<u32>>,
}

/// Rows of a stream that its positions and plans can count.
const MAX_ROWS: u64 = 1 << 31;

/// Why there is no loader.
#[derive(Debug, thiserror::Error)]
pub enum LoaderError {
    /// Every file is one token long.
    #[error(
        "no file of the corpus has two tokens, so there is nothing to predict; use longer files"
    )]
    NoTarget,
    /// Trainers × tokens is too much.
    #[error("a stream of {rows} rows is too long; lower the tokens per trainer")]
    TooLarge {
        /// Rows asked for.
        rows: u64,
    },
    /// The list of lengths is malformed.
    #[error("{} is no list of lengths: {why}; see examples/lengths.json", path.display())]
    Lengths {
        /// The list.
        path: std::path::PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

#[cfg(test)]
mod tests;
