//! Copies of rows inside device memory, a whole list in one launch.
//!
//! In: two memories and [`RowCopy`]s between them: rows of one length at even distances. Out: launches of `copy_rows_16` or
//! `copy_rows_4` (`cuda/rows.cuh`) in the order of a stream, by whichever word addresses, lengths and distances are multiples of.
//! Long copies are cut, so that blocks have about as much to do each.
//!
//! It does not choose between a launch and the driver's copies: [`super::pieces`] does. Invariant: what reaches the kernel was
//! checked, lies inside both memories, and no two rows of the target share a byte as far as that can be seen.

// Launches: what kernels read and write is the checks' promise.
#![allow(unsafe_code)]

use std::ffi::c_void;

use super::check::Refusal;
use super::error::Error;
use super::memory::{Buffer, Stream};
use super::slice::{Slice, SliceMut};
use super::tables::{Copy16Parameters, CopyUnit};
use super::upload::Staging;

/// Rows to copy, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RowCopy {
    /// First byte of the first row in the source.
    pub from: u64,
    /// First byte of the first row in the target.
    pub to: u64,
    /// How many rows, at least 1.
    pub rows: u32,
    /// Bytes of a row, at least 4 and a multiple of 4.
    pub bytes: u64,
    /// From a row to the next in the source; anything for one row.
    pub from_stride: u64,
    /// From a row to the next in the target, at least `bytes`; anything for one row.
    pub to_stride: u64,
}

/// Puts lists of copies on one stream.
#[derive(Debug)]
pub struct RowCopier {
    stream: Stream,
    /// The list of the current launch. The next list overwrites it, in stream order behind that
    /// launch.
    list: Buffer<CopyUnit>,
    staging: Staging,
}

/// Units of a list: 64 KiB.
const LIST: usize = 2048;
/// Minimum and maximum words of a unit: below the first a block has too little to do, above the second the last blocks end late.
const UNIT_WORDS: [u64; 2] = [1 << 10, 1 << 14];
/// Units per block, if there are enough rows: then the last unit of each is short.
const UNITS_A_BLOCK: u64 = 4;
/// Blocks of 256 threads per processor: a few keep memory busy.
const BLOCKS: u32 = 4;
/// Maximum length of a row and distance between rows: words are counted in 31 bits.
const MOST_BYTES: u64 = 1 << 32;
/// Maximum number of copies with gaps between rows for which every pair is compared.
const COMPARED: usize = 64;

impl RowCopier {
    /// On `stream`.
    ///
    /// # Errors
    ///
    /// Memory for a list, or the driver's.
    pub fn new(stream: Stream) -> Result<Self, Error> {
        let list = Buffer::new(stream.gpu(), LIST, "a list of copies")?;
        let staging = Staging::new(stream.gpu());
        Ok(Self { stream, list, staging })
    }

    /// The stream on which it copies.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Puts `copies` from one memory to the other on the stream.
    ///
    /// # Errors
    ///
    /// [`Refusal::RowCopy`] for a copy that is empty, not aligned to 4 bytes or with rows that share bytes;
    /// [`Refusal::Length`] outside of either memory; before anything is copied. Or the driver's.
    pub fn put(
        &mut self,
        (from, to): (Slice<'_, u8>, SliceMut<'_, u8>),
        copies: &[RowCopy],
    ) -> Result<(), Error> {
        let (source, target) = (from.place(), to.place());
        check(source, target, copies)?;
        let place =
            |it: &RowCopy| RowCopy { from: source.0 + it.from, to: target.0 + it.to, ..*it };
        let (wide, narrow): (Vec<_>, Vec<_>) =
            copies.iter().map(place).partition(|it| it.is_multiple_of(16));
        self.launch("cadre_copy_rows_16", 16, &wide)?;
        self.launch("cadre_copy_rows_4", 4, &narrow)
    }

    fn launch(&mut self, name: &str, word: u64, copies: &[RowCopy]) -> Result<(), Error> {
        let gpu = self.stream.gpu().clone();
        let (kernel, blocks) = (gpu.kernel(name), gpu.processors() * BLOCKS);
        let bytes: u64 = copies.iter().map(|it| u64::from(it.rows) * it.bytes).sum();
        let [least, most] = UNIT_WORDS;
        let words = (bytes / word / (u64::from(blocks) * UNITS_A_BLOCK)).clamp(least, most);
        let mut units = Vec::new();
        for copy in copies {
            cut(copy, word, words, &mut units);
        }
        gpu.bind()?;
        for units in units.chunks(LIST) {
            self.staging.write(&self.stream, &mut self.list, units)?;
            let mut parameters = Copy16Parameters {
                copies: self.list.slice().place().0,
                copy_count: units.len() as i32,
            };
            let mut arguments = [(&raw mut parameters).cast::<c_void>()];
            let what = || format!("{name} of {} copies, {bytes} bytes", copies.len());
            self.stream.runs(what());
            let after = || format!(", {}", what());
            let grid = blocks.min(units.len() as u32);
            // SAFETY: the list is on the GPU before the launch and stays until a launch behind it; its addresses were
            // checked, and who reads or writes the target meanwhile waits for the stream.
            unsafe { kernel.launch(grid, self.stream.handle(), &mut arguments, after) }?;
            self.staging.sent(&self.stream)?;
        }
        Ok(())
    }
}

impl RowCopy {
    /// Whether its addresses, lengths and distances are multiples of `word` bytes.
    pub(super) fn is_multiple_of(&self, word: u64) -> bool {
        let one = self.from | self.to | self.bytes;
        let strides = if self.rows > 1 { self.from_stride | self.to_stride } else { 0 };
        (one | strides).is_multiple_of(word)
    }

    /// The ends of its last row in the source and in the target; none where a `u64` cannot hold one.
    fn ends(&self) -> [Option<u64>; 2] {
        let gaps = u64::from(self.rows.max(1) - 1);
        [(self.from, self.from_stride), (self.to, self.to_stride)].map(|(first, stride)| {
            stride.checked_mul(gaps)?.checked_add(self.bytes)?.checked_add(first)
        })
    }

    /// Whether the rows have no gaps in the target.
    fn is_dense(&self) -> bool {
        self.rows == 1 || self.to_stride == self.bytes
    }
}

/// Cuts a copy between addresses into units of at most `most` words.
fn cut(copy: &RowCopy, word: u64, most: u64, units: &mut Vec<CopyUnit>) {
    let RowCopy { from, to, rows, bytes, from_stride, to_stride } = *copy;
    let words = bytes / word;
    let mut unit = |row: u64, rows: u64, column: u64, words: u64| {
        units.push(CopyUnit {
            from: from + row * from_stride + column * word,
            to: to + row * to_stride + column * word,
            rows: rows as i32,
            words: words as i32,
            // The kernel does not read the strides of a single row, which the caller may leave
            // arbitrary.
            from_stride: if rows > 1 { (from_stride / word) as i32 } else { 0 },
            to_stride: if rows > 1 { (to_stride / word) as i32 } else { 0 },
        });
    };
    let rows = u64::from(rows);
    let together = (most / words).max(1).min(rows);
    if words <= most {
        for row in (0..rows).step_by(together as usize) {
            unit(row, together.min(rows - row), 0, words);
        }
        return;
    }
    for row in 0..rows {
        for column in (0..words).step_by(most as usize) {
            unit(row, 1, column, most.min(words - column));
        }
    }
}

/// Copies between the memories at an address with a length each.
fn check(source: (u64, usize), target: (u64, usize), copies: &[RowCopy]) -> Result<(), Refusal> {
    let refuse = |copy, field, value, rule| Err(Refusal::RowCopy { copy, field, value, rule });
    for (index, it) in copies.iter().enumerate() {
        if it.rows == 0 || it.bytes == 0 {
            let (field, value) =
                if it.rows == 0 { ("rows", 0) } else { ("bytes of a row", it.bytes) };
            return refuse(index, field, value, "so it copies nothing; leave it out");
        }
        let distance = |stride| if it.rows > 1 { stride } else { 0 };
        for (field, value) in [
            ("the address of the source", source.0.wrapping_add(it.from)),
            ("the address of the target", target.0.wrapping_add(it.to)),
            ("bytes of a row", it.bytes),
            ("the distance of rows in the source", distance(it.from_stride)),
            ("the distance of rows in the target", distance(it.to_stride)),
        ] {
            if !value.is_multiple_of(4) {
                let rule = "which is no multiple of 4; align it, or copy by the driver";
                return refuse(index, field, value, rule);
            }
            if !field.starts_with("the address") && value >= MOST_BYTES {
                return refuse(index, field, value, "which is beyond 4 GiB; cut the copy");
            }
        }
        if it.rows > 1 && it.to_stride < it.bytes {
            let rule = "which is shorter than a row, so rows would overlap; give each its place";
            return refuse(index, "the distance of rows in the target", it.to_stride, rule);
        }
        let memories =
            [("the source of row copies", source.1), ("the target of row copies", target.1)];
        for ((field, actual), end) in memories.into_iter().zip(it.ends()) {
            let expected = end.map_or(usize::MAX, |it| it as usize);
            if expected > actual {
                return Err(Refusal::Length { field, expected, actual });
            }
        }
    }
    let apart = |a: (u64, usize), b: (u64, usize)| a.0 + a.1 as u64 <= b.0;
    if !copies.is_empty() && !apart(source, target) && !apart(target, source) {
        let rule = "where the target begins or goes on; hand in memories that share no byte";
        return refuse(0, "the address of the source", source.0, rule);
    }
    let shared = shared(copies);
    shared.map_or(Ok(()), |(copy, byte)| {
        let rule = "which another copy writes, too; give each its place";
        refuse(copy, "a byte of the target", byte, rule)
    })
}

/// Finds a copy that writes a byte of another one, and returns it with a byte near there. It sees overlaps between copies without
/// gaps, and between a few copies of equal row distance, and misses others.
fn shared(copies: &[RowCopy]) -> Option<(usize, u64)> {
    let of = |dense| {
        let mut of: Vec<_> =
            (0..).zip(copies).filter(|(_, it)| it.is_dense() == dense).collect::<Vec<(usize, _)>>();
        of.sort_unstable_by_key(|(_, it)| it.to);
        of
    };
    let dense = of(true);
    let met = dense.windows(2).find(|it| it[0].1.ends()[1] > Some(it[1].1.to));
    if let Some(pair) = met {
        return Some((pair[1].0, pair[1].1.to));
    }
    let gapped = of(false);
    let few = &gapped[..gapped.len().min(COMPARED)];
    let pairs =
        few.iter().enumerate().flat_map(|(at, a)| few[at + 1..].iter().map(move |b| (a, b)));
    pairs.filter(|(a, b)| meet(a.1, b.1)).map(|(_, b)| (b.0, b.1.to)).next()
}

/// Whether rows of two copies share bytes of the target; `a` begins first. It misses overlaps between copies of different row
/// distances.
fn meet(a: &RowCopy, b: &RowCopy) -> bool {
    let stride = a.to_stride;
    if stride != b.to_stride {
        return false;
    }
    let (rows, into) = ((b.to - a.to) / stride, (b.to - a.to) % stride);
    // Row 0 of `b` begins in row `rows` of `a`, or behind it and reaches into the next one.
    (into < a.bytes && rows < u64::from(a.rows))
        || (into + b.bytes > stride && rows + 1 < u64::from(a.rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: RowCopy =
        RowCopy { from: 0, to: 0, rows: 2, bytes: 64, from_stride: 64, to_stride: 128 };
    const FROM: (u64, usize) = (1 << 12, 4096);
    const TO: (u64, usize) = (1 << 20, 4096);

    #[test]
    fn copies_that_cannot_be_done_are_refused_by_name() {
        assert_eq!(check(FROM, TO, &[]), Ok(()));
        for (wrong, name) in [
            (RowCopy { rows: 0, ..GOOD }, "row copy 1: rows is 0"),
            (RowCopy { bytes: 0, ..GOOD }, "row copy 1: bytes of a row is 0"),
            (RowCopy { from: 6, ..GOOD }, "the address of the source"),
            (RowCopy { to: 1030, ..GOOD }, "the address of the target"),
            (RowCopy { bytes: 66, ..GOOD }, "bytes of a row is 66"),
            (RowCopy { from_stride: 65, ..GOOD }, "the distance of rows in the source is 65"),
            (RowCopy { to_stride: 130, ..GOOD }, "the distance of rows in the target is 130"),
            (RowCopy { to_stride: 60, ..GOOD }, "rows would overlap"),
            (RowCopy { from_stride: 1 << 32, ..GOOD }, "beyond 4 GiB"),
            (RowCopy { from: 4096 - 124, ..GOOD }, "the source of row copies has 4096"),
            (RowCopy { to: 4096 - 188, ..GOOD }, "the target of row copies has 4096"),
            (RowCopy { from: u64::MAX - 3, ..GOOD }, "the source of row copies"),
            // The good one writes 0 to 64 and 128 to 192.
            (RowCopy { to: 160, ..GOOD }, "another copy writes"),
            (RowCopy { to: 96, ..GOOD }, "another copy writes"),
            (RowCopy { to: 188, rows: 1, ..GOOD }, ""),
            (RowCopy { to: 64, ..GOOD }, ""),
            (RowCopy { to: 192, ..GOOD }, ""),
        ] {
            match check(FROM, TO, &[GOOD, wrong]) {
                Err(why) => assert!(!name.is_empty() && why.to_string().contains(name), "{why}"),
                Ok(()) => assert_eq!(name, "", "{wrong:?}"),
            }
        }
        let pair = [1024, 1028].map(|to| RowCopy { to, rows: 1, ..GOOD });
        let refused = check(FROM, TO, &pair).unwrap_err().to_string();
        assert!(refused.contains("row copy 1: a byte of the target is 1028"), "{refused}");
        for target in [FROM.0, FROM.0 + 4092, FROM.0 - 4092] {
            let refused = check(FROM, (target, 4096), &[GOOD]).unwrap_err().to_string();
            assert!(refused.contains("share no byte"), "{refused}");
        }
        assert_eq!(check(FROM, (FROM.0 + 4096, 4096), &[GOOD]), Ok(()));
    }

    #[test]
    fn units_are_of_even_size_and_hold_every_word_once() {
        for (rows, bytes, most) in
            [(1, 16, 1024), (5000, 64, 1024), (3, 160_000, 1024), (7, 16_384, 1024), (1000, 48, 64)]
        {
            let copy =
                RowCopy { from: 512, to: 0, rows, bytes, from_stride: bytes * 2, to_stride: bytes };
            let mut units = Vec::new();
            cut(&copy, 16, most, &mut units);
            let mut at = 0;
            for it in &units {
                assert_eq!(it.to, at, "{copy:?}");
                let (row, column) = (it.to / bytes, it.to % bytes);
                assert_eq!(it.from, 512 + row * bytes * 2 + column, "{copy:?}");
                let words = (it.rows * it.words) as u64;
                assert!(it.rows == 1 || (it.to_stride, it.from_stride) == (it.words, 2 * it.words));
                assert!(words <= most, "{copy:?}");
                at += words * 16;
            }
            assert_eq!(at, u64::from(rows) * bytes, "{copy:?}");
            let whole = at / 16;
            assert!(units.len() as u64 <= 2 * whole.div_ceil(most) + u64::from(rows), "{copy:?}");
        }
    }
}
