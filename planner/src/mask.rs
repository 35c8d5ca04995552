//! Which keys a query row keeps.
//!
//! In: a [`Mask`], the rows of the document. Out: keys and pairs, in closed form. Cost, bytes and
//! cuts of the planner come from here alone, so that none of them assumes a causal mask.
//!
//! Positions are counted from the document's start; queries and keys have the same number of rows.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Which keys a query row keeps.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Mask {
    /// Row `i` keeps keys `0..=i`.
    Causal,
    /// Every row keeps every key of its document.
    Full,
    /// Row `i` keeps keys `i - left..=i`, as far as they exist.
    Window {
        /// Keys before the row's own.
        left: u32,
    },
}

impl Mask {
    /// Pairs kept by rows `rows` of a document of `document_rows` rows.
    pub fn pairs(self, document_rows: u32, rows: Range<u32>) -> u64 {
        if rows.is_empty() {
            return 0;
        }
        self.pairs_before(document_rows, rows.end) - self.pairs_before(document_rows, rows.start)
    }

    /// Smallest contiguous range of keys that holds all keys kept by `rows`; empty for no rows.
    pub fn keys(self, document_rows: u32, rows: Range<u32>) -> Range<u32> {
        if rows.is_empty() {
            return 0..0;
        }
        match self {
            Self::Causal => 0..rows.end,
            Self::Full => 0..document_rows,
            Self::Window { left } => rows.start.saturating_sub(left)..rows.end,
        }
    }

    /// The keys of ascending runs of rows, none of them empty: as ascending ranges that do not touch, each with the number of rows
    /// that it is for.
    pub(crate) fn unions(
        self,
        document_rows: u32,
        runs: &[Range<u32>],
    ) -> impl Iterator<Item = (u64, Range<u32>)> {
        let keys =
            runs.iter().map(move |it| (it.len() as u64, self.keys(document_rows, it.clone())));
        let mut keys = keys.peekable();
        std::iter::from_fn(move || {
            let (mut rows, mut all) = keys.next()?;
            while let Some((more, next)) = keys.next_if(|it| it.1.start <= all.end) {
                rows += more;
                all.end = all.end.max(next.end);
            }
            Some((rows, all))
        })
    }

    /// Keys of some rows that the runs around them do not keep: the last run `before` the rows and the first one `behind` them.
    ///
    /// Both ends of the keys move only upwards with the rows. So what `before` keeps holds all keys of the rows up to its end that
    /// any earlier run keeps, and what `behind` keeps all from its start that any later run keeps.
    pub(crate) fn fresh(
        self,
        document_rows: u32,
        rows: Range<u32>,
        before: Option<Range<u32>>,
        behind: Option<Range<u32>>,
    ) -> Range<u32> {
        let own = self.keys(document_rows, rows);
        let first = before.map_or(0, |it| self.keys(document_rows, it).end);
        let end = behind.map_or(u32::MAX, |it| self.keys(document_rows, it).start);
        let first = own.start.max(first);
        first..own.end.min(end).max(first)
    }

    /// Pairs kept by the rows before `row`. Below 2^48, since a document has at most 2^24 rows.
    fn pairs_before(self, document_rows: u32, row: u32) -> u64 {
        let triangle = |n: u64| n * (n + 1) / 2;
        let row = u64::from(row);
        match self {
            Self::Causal => triangle(row),
            Self::Full => row * u64::from(document_rows),
            Self::Window { left } => {
                let full = u64::from(left) + 1;
                triangle(row.min(full)) + row.saturating_sub(full) * full
            }
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Causal => f.write_str("causal"),
            Self::Full => f.write_str("full"),
            Self::Window { left } => write!(f, "window:{}", u64::from(*left) + 1),
        }
    }
}

impl FromStr for Mask {
    type Err = Error;

    /// Reads `causal`, `full` or `window:ROWS`; every other mask is refused by its name. A window of `ROWS` keeps a row's own
    /// key and the `ROWS - 1` before it, as "sliding window" is counted in the configuration of models; one of 0 rows would
    /// keep nothing.
    fn from_str(name: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownMask { name: name.to_owned() };
        match name {
            "causal" => Ok(Self::Causal),
            "full" => Ok(Self::Full),
            _ => {
                let rows = name.strip_prefix("window:").and_then(|it| it.parse::<u64>().ok());
                let left = rows.and_then(|it| it.checked_sub(1)).map(u32::try_from);
                match left {
                    Some(Ok(left)) => Ok(Self::Window { left }),
                    Some(Err(_)) | None => Err(unknown()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeps(mask: Mask, query: u32, key: u32) -> bool {
        match mask {
            Mask::Causal => key <= query,
            Mask::Full => true,
            Mask::Window { left } => key <= query && query - key <= left,
        }
    }

    #[test]
    fn pairs_and_keys_are_those_of_counting_one_by_one() {
        let rows = 9;
        let windows = (0..11).map(|left| Mask::Window { left });
        for mask in [Mask::Causal, Mask::Full].into_iter().chain(windows) {
            for start in 0..rows {
                for end in start..=rows {
                    let kept: Vec<(u32, u32)> = (start..end)
                        .flat_map(|query| (0..rows).map(move |key| (query, key)))
                        .filter(|&(query, key)| keeps(mask, query, key))
                        .collect();
                    assert_eq!(
                        mask.pairs(rows, start..end),
                        kept.len() as u64,
                        "{mask} {start}..{end}"
                    );
                    let first = kept.iter().map(|&(_, key)| key).min().unwrap_or(0);
                    let last = kept.iter().map(|&(_, key)| key + 1).max().unwrap_or(0);
                    assert_eq!(mask.keys(rows, start..end), first..last, "{mask} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn names_are_read_back_and_others_refused_by_name() {
        for mask in [Mask::Causal, Mask::Full, Mask::Window { left: u32::MAX }] {
            assert_eq!(mask.to_string().parse(), Ok(mask));
        }
        assert_eq!("window:4096".parse(), Ok(Mask::Window { left: 4095 }));
        for name in
            ["chunked:64", "window:", "window:-1", "window:0", "window:4294967297", "Causal"]
        {
            assert_eq!(name.parse::<Mask>(), Err(Error::UnknownMask { name: name.to_owned() }));
        }
    }
}
