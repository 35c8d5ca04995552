//! Where the pieces end that several slots get of one document.
//!
//! In: amounts of work, rows of a causal document that may go, prices of a query row and of a key row. Out: rows.
//!
//! Rows `[a, b)` cost `(b² − a²) / 2` pairs a head, so all amounts here are **squares**: `b² − a²`. A piece brings its query
//! rows and the keys up to its end. Alone it is cheapest where `b = a · (1 + key / query)`; pieces of one document must not
//! overlap, so those that would are pushed together into one run, and the run goes where all of it is cheapest: where
//! `query · (1/a − 1/b) = key · Σ 1/end`. Smaller pieces lie lower.

use std::ops::Range;

use crate::TILE_ROWS;

/// Prices of a query row and of a key row; only their ratio matters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) query: u64,
    pub(super) key: u64,
}

impl Rates {
    /// Rates in the ratio of two prices; small, so that no sum overflows.
    pub(super) fn of(query: i128, key: i128) -> Self {
        let query = (query * 1_024 / key.max(1)).clamp(1, 1 << 26);
        Self { query: u64::try_from(query).unwrap_or(1), key: 1_024 }
    }

    /// The row where work is cheapest that goes in pieces of one amount: its query rows cost `query / row` of it, its keys
    /// `2 · key · row / amount`.
    pub(super) fn best_row(self, amount: u64) -> u64 {
        let square = u128::from(amount) * u128::from(self.query) / u128::from(2 * self.key);
        root(u64::try_from(square).unwrap_or(u64::MAX))
    }
}

/// The square root, rounded down.
pub(super) fn root(square: u64) -> u64 {
    // Up to here the nearest float of a root that is not whole lies below the next whole number: as exact as, and much faster
    // than, the root of an integer.
    if square <= 1 << 52 { (square as f64).sqrt() as u64 } else { square.isqrt() }
}

/// Pieces that touch, by their index in the amounts, and where the highest ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Run {
    pub(super) pieces: Range<usize>,
    pub(super) end: u32,
    start: u32,
}

/// Runs of pieces within `rows`, from the lowest, and what they cost; `None` if they do not fit. Amounts ascend.
pub(super) fn runs(amounts: &[u64], rows: &Range<u32>, rates: Rates) -> Option<(Vec<Run>, u64)> {
    let mut runs: Vec<Run> = Vec::with_capacity(amounts.len());
    for index in 0..amounts.len() {
        let mut run = best_run(amounts, index..index + 1, rows, rates)?;
        while let Some(below) = runs.pop_if(|below| below.end > run.start) {
            run = best_run(amounts, below.pieces.start..run.pieces.end, rows, rates)?;
        }
        runs.push(run);
    }
    let cost = |run: &Run| {
        let mut keys = 0;
        let start = walk(&amounts[run.pieces.clone()], run.end, |end| keys += end);
        (u64::from(run.end) - start) * rates.query + keys * rates.key
    };
    let cost = runs.iter().map(cost).sum();
    Some((runs, cost))
}

/// What one piece costs where it is cheapest, whatever the document.
pub(super) fn least_cost(amount: u64, rates: Rates) -> u64 {
    let end = cheapest_end(amount, rates);
    (end - root((end * end).saturating_sub(amount))) * rates.query + end * rates.key
}

fn cheapest_end(amount: u64, Rates { query, key }: Rates) -> u64 {
    let whole = u128::from(query + key).pow(2);
    let end = u128::from(amount) * whole / (whole - u128::from(query).pow(2)).max(1);
    root(u64::try_from(end).unwrap_or(u64::MAX))
}

/// Calls back with the end of each piece from the highest; returns where the lowest starts.
fn walk(amounts: &[u64], end: u32, mut each: impl FnMut(u64)) -> u64 {
    let mut square = u64::from(end).pow(2);
    let mut row = u64::from(end);
    for amount in amounts.iter().rev() {
        each(row);
        square = square.saturating_sub(*amount);
        row = root(square);
    }
    row
}

fn best_run(amounts: &[u64], pieces: Range<usize>, rows: &Range<u32>, rates: Rates) -> Option<Run> {
    let amounts = &amounts[pieces.clone()];
    let all: u64 = amounts.iter().sum();
    let tile = u64::from(TILE_ROWS);
    let least = root(u64::from(rows.start).pow(2) + all) / tile + 1;
    let most = u64::from(rows.end) / tile;
    if u64::from(rows.end).pow(2) < u64::from(rows.start).pow(2) + all {
        return None;
    }
    let end = if least >= most {
        u64::from(rows.end)
    } else if let [amount] = *amounts {
        let end = (cheapest_end(amount, rates) / tile).max(least);
        if end > most { rows.end.into() } else { end * tile }
    } else {
        let (mut low, mut high) = (least, most + 1);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if is_too_low(amounts, middle * tile, rates) { low = middle } else { high = middle }
        }
        if high > most { rows.end.into() } else { low * tile }
    };
    let end = end as u32;
    let start = walk(amounts, end, |_| ()) as u32;
    Some(Run { pieces, end, start })
}

/// Whether a run that ends at a row would be cheaper further up.
fn is_too_low(amounts: &[u64], end: u64, Rates { query, key }: Rates) -> bool {
    const ONE: u64 = 1 << 40;
    let mut keys = 0;
    let start = walk(amounts, end as u32, |end| keys += ONE / end.max(1));
    let queries = ONE / start.max(1) - ONE / end.max(1);
    u128::from(queries) * u128::from(query) > u128::from(keys) * u128::from(key)
}

/// The parts of ascending `rows` between `best · t` and `best / t`, with `t` chosen so that their
/// work is `amount`; all rows if their work is less. A row costs as much at one end as at the
/// other.
pub(super) fn around(rows: &[Range<u32>], best: u64, amount: u64) -> Vec<Range<u32>> {
    let tile = u64::from(TILE_ROWS);
    let square = |row: u32| u64::from(row).pow(2);
    let worth = |rows: &Range<u32>| square(rows.end) - square(rows.start);
    let between = |low: u64| {
        let low = low * tile;
        let high = (best * best / low.max(1)).next_multiple_of(tile);
        let row = |row: u64| u32::try_from(row).unwrap_or(u32::MAX);
        let kept = rows.iter().map(move |it| it.start.max(row(low))..it.end.min(row(high)));
        kept.filter(|it| it.start < it.end)
    };
    let (mut low, mut high) = (0, best.div_ceil(tile));
    while high - low > 1 {
        let middle = low.midpoint(high);
        let all: u64 = between(middle).map(|it| worth(&it)).sum();
        if all >= amount { low = middle } else { high = middle }
    }
    let mut kept: Vec<Range<u32>> = between(low).collect();
    let mut over = kept.iter().map(worth).sum::<u64>().saturating_sub(amount);
    // Both ends move in whole tiles, which may take too much: rows at the top stay.
    while let Some(last) = kept.last_mut() {
        if worth(last) > over {
            let end = root(square(last.end) - over).next_multiple_of(tile);
            last.end = last.end.min(u32::try_from(end).unwrap_or(u32::MAX));
            break;
        }
        over -= worth(last);
        kept.pop();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates { query: 2_048, key: 1_024 };

    fn square(rows: &Range<u32>) -> u64 {
        u64::from(rows.end).pow(2) - u64::from(rows.start).pow(2)
    }

    #[test]
    fn roots_are_those_of_integers() {
        let near = |root: u64| [-1_i64, 0, 1].map(|it| root.pow(2).saturating_add_signed(it));
        let roots = (0..1 << 26).step_by(997).chain((1 << 26) - 9..(1 << 26) + 9).chain([1 << 31]);
        for square in roots.flat_map(near).chain([u64::MAX]) {
            assert_eq!(root(square), square.isqrt(), "{square}");
        }
    }

    #[test]
    fn a_piece_alone_lies_where_it_is_cheapest() {
        let amount = 30_000_u64.pow(2) - 20_000_u64.pow(2);
        let (runs, cost) = runs(&[amount], &(0..50_000), RATES).unwrap();
        assert_eq!(runs, [Run { pieces: 0..1, end: 29_952, start: 19_927 }]);
        let least = least_cost(amount, RATES);
        assert!(cost >= least - least / 1_000 && cost <= least + least / 1_000);
    }

    #[test]
    fn pieces_do_not_overlap_and_no_other_end_is_cheaper() {
        let amounts = [1_000_u64.pow(2), 9_000_u64.pow(2), 20_000_u64.pow(2), 22_000_u64.pow(2)];
        for rows in [0..33_000, 0..60_000, 5_000..40_000, 0..31_153] {
            let (runs, cost) = runs(&amounts, &rows, RATES).unwrap();
            assert!(runs.windows(2).all(|two| two[0].end <= two[1].start));
            assert_eq!(
                runs.iter().flat_map(|it| it.pieces.clone()).collect::<Vec<_>>(),
                [0, 1, 2, 3]
            );
            // All pieces in one run, wherever it ends.
            for end in
                rows.clone().step_by(1_000).filter(|end| square(&(rows.start..*end)) > 966_000_000)
            {
                let mut keys = 0;
                let start = walk(&amounts, end, |row| keys += row);
                let other = (u64::from(end) - start) * RATES.query + keys * RATES.key;
                assert!(cost <= other + other / 100, "{rows:?}: {cost} but {other} at {end}");
            }
        }
        assert!(runs(&amounts, &(0..31_000), RATES).is_none());
    }

    #[test]
    fn rows_around_the_best_are_worth_what_was_asked() {
        let rows = [0..12_800, 25_600..38_400, 51_200..64_000];
        for asked in [1_000_000, 300_000_000, 1_000_000_000, 3_000_000_000_u64] {
            let kept = around(&rows, 20_000, asked);
            let all: u64 = kept.iter().map(square).sum();
            let most: u64 = rows.iter().map(square).sum();
            assert!(all >= asked.min(most) && all <= asked + 2 * 128 * 64_000, "{all} for {asked}");
        }
    }
}
