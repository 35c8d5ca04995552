//! Whatever bytes a peer sends, they are read as what they say or refused: no panic, no byte in foreign memory, no more memory
//! than a peer may take.
//!
//! In: the corpus in `exchange/tests/corpus`, well formed and not, and changes of it that a seed makes. `CADRE_SEED` and
//! `CADRE_FUZZ_CASES` choose other ones; the seed is printed.

// The simulations take the rest of it.
#[allow(dead_code)]
#[path = "../protocol/tests/simulation/random.rs"]
mod random;

use std::path::Path;

pub(crate) use self::random::Random;

/// Changed inputs of every decoder.
const CASES: u64 = 4_000;
const NUMBERS: [u64; 8] = [0, 1, 255, 1 << 20, (1 << 20) + 25, u32::MAX as u64, 1 << 63, u64::MAX];

impl Random {
    /// A number below `bound`; 0 where that is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Calls `check` with every input of a folder of the corpus, and with changed ones.
pub(crate) fn all(folder: &str, mut check: impl FnMut(&[u8], &mut Random)) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&path)
        .expect("the corpus is checked in")
        .map(|it| it.expect("a readable folder").path())
        .collect();
    files.sort();
    let corpus: Vec<_> =
        files.iter().map(|it| std::fs::read(it).expect("a readable file")).collect();
    assert!(!corpus.is_empty());
    let seed = setting("CADRE_SEED").unwrap_or(1);
    println!("{folder}: CADRE_SEED={seed}");
    let mut random = Random::new(seed);
    for input in &corpus {
        check(input, &mut random);
    }
    for _ in 0..setting("CADRE_FUZZ_CASES").unwrap_or(CASES) {
        let input = changed(&corpus, &mut random);
        check(&input, &mut random);
    }
}

/// An input with some changes: bytes, numbers, cuts, and pieces of others.
fn changed(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        let number = NUMBERS[random.below(NUMBERS.len())];
        match random.below(6) {
            0 => input.truncate(at),
            1 => {
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            2 => put(&mut input, at & !7, &number.to_le_bytes()),
            3 => put(&mut input, at & !3, &(number as u32).to_le_bytes()),
            4 => {
                let random = random.next().to_le_bytes();
                put(&mut input, at, &random);
            }
            _ => {
                let bit = 1 << random.below(8);
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= bit;
                }
            }
        }
    }
    input
}

/// Writes over what is there.
fn put(input: &mut [u8], at: usize, bytes: &[u8]) {
    let end = input.len().min(at + bytes.len());
    if at < end {
        input[at..end].copy_from_slice(&bytes[..end - at]);
    }
}
