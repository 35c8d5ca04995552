//! Streams by hand: what each trainer gets, and what is refused.

use proptest::prelude::*;

use super::super::corpus::Document;
use super::*;

fn loader(files: &[Vec<u32>], trainers: u32, tokens: u32, cap: u32, seed: u64) -> Loader {
    let some = |it| NonZeroU32::new(it).unwrap();
    let document = |(index, ids): (usize, &Vec<u32>)| Document {
        path: format!("{index}").into(),
        tokens: ids.clone().into(),
        is_text: false,
    };
    let corpus = Corpus::from_documents(files.iter().enumerate().map(document).collect());
    let settings = Settings {
        trainers: some(trainers),
        tokens: some(tokens),
        nano_batches: some(2),
        cap: some(cap),
        seed,
    };
    Loader::new(Arc::new(corpus), Lengths::shipped(), settings).unwrap()
}

proptest! {
    #[test]
    fn streams_are_runs_of_files_without_gap(
        // Files of bytes alone are kept in another form.
        files in prop::collection::vec(
            (1_u32..=3).prop_flat_map(|it| prop::collection::vec(0..256 * it * it, 2..500)),
            1..5,
        ),
        (trainers, tokens, cap) in (1_u32..5, 1_u32..300, 1_u32..400),
        (seed, step) in any::<(u64, u32)>(),
    ) {
        let loader = loader(&files, trainers, tokens, cap, seed);
        let stream = loader.stream(step.into(), 1);
        prop_assert_eq!(stream.documents().iter().sum::<u32>(), trainers * tokens);
        prop_assert!(stream.documents().iter().all(|&rows| rows > 0 && rows <= cap));
        let mut next = vec![0; stream.documents().len()];
        for (trainer, stretches) in stream.layout().iter().enumerate() {
            let rows = stream.rows(trainer as u32);
            let mut at = 0;
            for &Stretch { document, start, end } in stretches {
                prop_assert_eq!(next[document as usize], start);
                next[document as usize] = end;
                for position in start..end {
                    prop_assert_eq!(rows.positions[at], position);
                    at += 1;
                }
            }
            prop_assert_eq!(at as u32, tokens);
            let share = loader.share(step.into(), 1, trainer as u32);
            let documents: Vec<_> = stretches
                .iter()
                .map(|it| (it.document, stream.documents()[it.document as usize]))
                .collect();
            prop_assert_eq!(share.documents, documents);
            prop_assert_eq!(&share.stretches, stretches);
            prop_assert_eq!(share.rows, rows);
            prop_assert_eq!(share.targets, stream.count());
        }
        prop_assert_eq!(&next, stream.documents());
        let mut at = 0;
        for &rows in stream.documents() {
            let range = at..at + rows as usize;
            let mut read = stream.ids[range.clone()].to_vec();
            let last = stream.targets[range.end - 1];
            read.extend(last);
            let holds = |file: &Vec<u32>| match last {
                Some(_) => file.windows(read.len()).any(|it| it == read),
                None => file.ends_with(&read),
            };
            prop_assert!(files.iter().any(holds));
            for row in range.start..range.end - 1 {
                prop_assert_eq!(stream.targets[row], Some(stream.ids[row + 1]));
            }
            at = range.end;
        }
    }
}

#[test]
fn streams_differ_by_step_nano_batch_and_seed_and_by_nothing_else() {
    let files = [(0..=255).cycle().take(5000).collect::<Vec<u32>>()];
    let one = loader(&files, 2, 300, 400, 7);
    assert_eq!(one.stream(3, 1), loader(&files, 2, 300, 400, 7).stream(3, 1));
    assert_ne!(one.stream(3, 1), one.stream(3, 0));
    assert_ne!(one.stream(3, 1), one.stream(4, 1));
    assert_ne!(one.stream(3, 1), loader(&files, 2, 300, 400, 8).stream(3, 1));
}

#[test]
fn what_cannot_be_loaded_is_refused() {
    let some = |it| NonZeroU32::new(it).unwrap();
    let settings = Settings {
        trainers: some(1),
        tokens: some(8),
        nano_batches: some(1),
        cap: some(8),
        seed: 0,
    };
    let corpus = |bytes: &[u8]| Arc::new(Corpus::from_documents(vec![Document::text("a", bytes)]));
    let error = Loader::new(corpus(b"x"), Lengths::shipped(), settings).unwrap_err();
    assert!(error.to_string().contains("nothing to predict"), "{error}");
    let large = Settings { trainers: some(1 << 16), tokens: some(1 << 16), ..settings };
    let error = Loader::new(corpus(b"xy"), Lengths::shipped(), large).unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
}
