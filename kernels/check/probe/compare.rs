//! Results beside f64, and of what is wrong the first element: where it lies in the kernel's tiles, and what went into it.
//!
//! In: a case, a table of results and what it should be. Out: a row of the report. The error is the root mean square of the
//! differences over that of the reference; NaN never passes. An element is wrong if it is off by 16 times what the table may be.
//! A table passes if the error of all of it does, and also of each row of a head, and of each tile of keys of a head: a few that
//! are grossly wrong are few numbers of many.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use half::bf16;
use serde_json::{Value, json};

use crate::case::{Case, Held, Table};

/// How many times the table's bound one element may be off.
const ONE: f64 = 16.0;
/// And a tile of keys of a head.
const TILE: f64 = 4.0;
const TILE_KEYS: usize = 64;
/// Rows that are smaller than this share of the table's root mean square are taken for as large.
const FLOOR: f64 = 1e-2;

pub(crate) fn tolerance(what: &str, softcap: bool) -> f64 {
    // P and dS are rounded to bf16, O too; under a softcap a score is right to 2^-11 (docs/kernel-sources.md).
    match (what, softcap) {
        ("LSE", false) => 1e-5,
        ("LSE", true) => 5e-4,
        ("dQ" | "dK", true) => 6e-3,
        _ => 5e-3,
    }
}

pub(crate) fn row(
    check: &str,
    kernel: &str,
    case: &Case,
    ours: &Table<f32>,
    right: &Table<f64>,
) -> Value {
    let bound = tolerance(ours.what, case.softcap.is_some());
    let (mut differences, mut size) = (0.0, 0.0);
    for (&x, &y) in ours.values.iter().zip(&right.values) {
        let x = f64::from(x);
        if !is_same(x, y) {
            differences += (x - y).powi(2);
        }
        size += if y.is_finite() { y * y } else { 0.0 };
    }
    let count = right.values.len().max(1) as f64;
    let error = (differences / f64::max(size, 1e-30)).sqrt();
    let worst = worst(case, ours, right, bound, size / count);
    let passed = (differences == 0.0 || error <= bound) && worst.is_none();
    let told = if error.is_nan() { 1e30 } else { error };
    let mut row = json!({"check": check, "what": ours.what, "error": told, "passed": passed, "kernel": kernel});
    if let Some(words) = worst {
        row["worst"] = json!(words);
    }
    if !passed {
        row["wrong"] = wrong(case, ours, right, ONE * bound * (size / count).sqrt());
    }
    row
}

/// A row of bits: `ours` should be what `wide` is when it is rounded to bf16.
pub(crate) fn rounded(
    check: &str,
    kernel: &str,
    case: &Case,
    ours: &Table<f32>,
    wide: &Table<f32>,
) -> Value {
    let right: Vec<f32> = wide.values.iter().map(|it| bf16::from_f32(*it).to_f32()).collect();
    let differ = |(x, y): &(&f32, &f32)| x.to_bits() != y.to_bits();
    let count = ours.values.iter().zip(&right).filter(differ).count();
    let (what, passed) = (format!("bits of {}", ours.what), count == 0);
    let mut row =
        json!({"check": check, "what": what, "error": count, "passed": passed, "kernel": kernel});
    if !passed {
        let values = right.iter().map(|it| f64::from(*it)).collect();
        let right = Table { what: ours.what, heads: ours.heads, numbers: ours.numbers, values };
        row["wrong"] = wrong(case, ours, &right, 0.0);
    }
    row
}

/// The row, or tile of keys, of a head that is off most beyond what it may be; `square` is the table's mean square.
fn worst(
    case: &Case,
    ours: &Table<f32>,
    right: &Table<f64>,
    bound: f64,
    square: f64,
) -> Option<String> {
    // The error of a logarithm does not shrink with its value, so small LSE get no smaller bound.
    let floor = square * if ours.what == "LSE" { 1.0 } else { FLOOR * FLOOR };
    let of_keys = matches!(ours.what, "dK" | "dV");
    let mut parts = BTreeMap::<(bool, usize, usize), Part>::new();
    for (at, (&x, &y)) in ours.values.iter().zip(&right.values).enumerate() {
        let (row, head) = (at / ours.numbers / ours.heads, at / ours.numbers % ours.heads);
        let x = f64::from(x);
        let off = if is_same(x, y) { 0.0 } else { (x - y).powi(2) };
        let size = if y.is_finite() { y * y } else { 0.0 };
        let mut add = |of_keys: bool, row: usize| {
            let it = parts.entry((of_keys, row, head)).or_default();
            *it = Part { off: it.off + off, size: it.size + size, count: it.count + 1.0 };
        };
        add(false, row);
        let held = case.documents.iter().find(|it| of_keys && it.holds(ours.what, row));
        if let Some(it) = held {
            let begin = it.keys.start as usize;
            let tile = (begin + row - it.kv_row) / TILE_KEYS * TILE_KEYS;
            add(true, it.kv_row + tile.max(begin) - begin);
        }
    }
    let beyond = |&(of_keys, row, head): &(bool, usize, usize), it: &Part| {
        let most = bound * if of_keys { TILE } else { ONE };
        let name = if of_keys { "tile of keys from row" } else { "row" };
        let size = f64::max(it.size / it.count, floor).max(1e-30);
        ((it.off / it.count / size).sqrt() / most, format!("{name} {row} of head {head}"))
    };
    // NaN is above all.
    let (times, name) =
        parts.iter().map(|(at, it)| beyond(at, it)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    let is_within = matches!(times.partial_cmp(&1.0), Some(Ordering::Less | Ordering::Equal));
    (!is_within).then(|| format!("{name} is off by {times:.1} times what it may be"))
}

/// Sums over a row or a tile of a head: squared differences, squares of the right values, and the
/// number of elements.
#[derive(Default)]
struct Part {
    off: f64,
    size: f64,
    count: f64,
}

/// Infinities are too; NaN is the same as nothing.
fn is_same(x: f64, y: f64) -> bool {
    x.partial_cmp(&y) == Some(Ordering::Equal)
}

/// The first wrong element, and which are.
fn wrong(case: &Case, ours: &Table<f32>, right: &Table<f64>, most: f64) -> Value {
    let off = |at: usize| (f64::from(ours.values[at]) - right.values[at]).abs();
    // NaN is wrong: it is not at most anything.
    let is_wrong = |at: &usize| {
        let less = matches!(off(*at).partial_cmp(&most), Some(Ordering::Less));
        !is_same(f64::from(ours.values[*at]), right.values[*at]) && !less
    };
    let mut all: Vec<usize> = (0..right.values.len()).filter(is_wrong).collect();
    if all.is_empty() {
        // No single element is beyond the bound, only their sum: name the element that is off most.
        all.extend((0..right.values.len()).max_by(|a, b| off(*a).total_cmp(&off(*b))));
    }
    let Some(&first) = all.first() else { return Value::Null };
    let place = |at: usize| {
        let (numbers, heads) = (ours.numbers, ours.heads);
        (at / numbers / heads, at / numbers % heads, at % numbers)
    };
    let (row, head, column) = place(first);
    let held = case.documents.iter().find(|it| it.holds(ours.what, row));
    let ranges_of =
        |part: &dyn Fn(usize) -> usize| ranges(&all.iter().map(|it| part(*it)).collect());
    json!({
        "first": format!("{}:{row}:{head}:{column}", ours.what),
        "ours": f64::from(ours.values[first]).to_string(),
        "right": right.values[first].to_string(),
        "count": format!("{} of {}", all.len(), right.values.len()),
        "rows": ranges_of(&|it| place(it).0),
        "heads": ranges_of(&|it| place(it).1),
        "columns": ranges_of(&|it| place(it).2),
        "tile": held.map(|it| tile(case, it, ours.what, row, column)),
        "operands": held.map(|it| operands(case, it, ours.what, (row, head, column))),
    })
}

impl Held {
    fn holds(&self, what: &str, row: usize) -> bool {
        let (first, count) = match what {
            "dK" | "dV" => (self.kv_row, self.keys.len()),
            _ => (self.q_row, self.rows.len()),
        };
        (first..first + count).contains(&row)
    }
}

/// `0-31 40 64-127`; at most 8 parts.
fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &it in numbers {
        match parts.last_mut() {
            Some(last) if last.1 + 1 == it => last.1 = it,
            _ => parts.push((it, it)),
        }
    }
    let text = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let mut words: Vec<String> = parts.iter().take(8).map(text).collect();
    if parts.len() > 8 {
        words.push(format!("… {} parts", parts.len()));
    }
    words.join(" ")
}

/// The warpgroup, warp, lane and register of an element, by the layouts of `forward.cuh`,
/// `backward.cuh` and of fragments in `ptx/wgmma.cuh`.
fn tile(case: &Case, it: &Held, what: &str, row: usize, column: usize) -> String {
    let dim = case.heads.dim;
    let fragment = |row: usize, column: usize| {
        let (warp, lane) = (row % 64 / 16, row % 8 * 4 + column % 8 / 2);
        let register = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
        format!("warp {warp}, lane {lane}, register {register}")
    };
    if matches!(what, "dK" | "dV") {
        let keys = if dim == 256 { 64 } else { 128 };
        let position = it.keys.start as usize + row - it.kv_row;
        let (group, column) =
            if dim == 256 { (column / 128, column % 128) } else { (position % 128 / 64, column) };
        let words = fragment(position, column);
        return format!("key {position}, key tile {}, warpgroup {group}, {words}", position / keys);
    }
    let position = it.rows.start as usize + row - it.q_row;
    if what == "dQ" {
        let (half, of_half) = (column / (dim / 2), column % (dim / 2));
        let words = fragment(position, of_half);
        return format!(
            "row {position}, tile of rows {}, warpgroup {half}, {words}",
            position / 64
        );
    }
    let group = position % 128 / 64;
    format!(
        "row {position}, tile of rows {}, warpgroup {group}, {}",
        position / 128,
        fragment(position, column)
    )
}

/// The first numbers of what an element is made of.
fn operands(
    case: &Case,
    it: &Held,
    what: &str,
    (row, head, column): (usize, usize, usize),
) -> Value {
    let (query, kv, dim) = (case.heads.query, case.heads.kv, case.heads.dim);
    let group = query / kv;
    let row_of = |rows: &[bf16], heads: usize, row: usize, head: usize| -> Vec<f32> {
        rows[(row * heads + head) * dim..][..4].iter().map(|it| it.to_f32()).collect()
    };
    let down = |rows: &[bf16], heads: usize, first: usize, count: usize, head: usize| -> Vec<f32> {
        let number =
            |row: usize| rows[((first + row) * heads + head) * dim + column.min(dim - 1)].to_f32();
        (0..count.min(4)).map(number).collect()
    };
    if matches!(what, "dK" | "dV") {
        let (rows, first) = (it.rows.len(), head * group);
        return json!({
            "K of the key": row_of(&case.k, kv, row, head),
            "V of the key": row_of(&case.v, kv, row, head),
            "Q down the column": down(&case.q, query, it.q_row, rows, first),
            "dO down the column": down(&case.dout, query, it.q_row, rows, first),
            "query rows": format!("{:?} under heads {first} to {}", it.rows, first + group - 1),
        });
    }
    let kept = it.mask.keys(it.rows.start + (row - it.q_row) as u32, it.document_rows);
    let first = it.kv_row + (kept.start.max(it.keys.start) - it.keys.start) as usize;
    json!({
        "Q of the row": row_of(&case.q, query, row, head),
        "dO of the row": row_of(&case.dout, query, row, head),
        "K of the first key": row_of(&case.k, kv, first, head / group),
        "K down the column": down(&case.k, kv, first, kept.len(), head / group),
        "V down the column": down(&case.v, kv, first, kept.len(), head / group),
        "keys kept": format!("{kept:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::row;
    use crate::case::{Case, Table};
    use cadre_kernels::Heads;

    /// Rows of `heads` heads whose numbers fall with the row, as gradients of late keys do, and what rounding makes of them.
    fn tables(case: &Case, what: &'static str, heads: usize) -> (Table<f32>, Table<f64>) {
        let rows = if what == "dV" { case.v.len() } else { case.q.len() } / heads / 64;
        let number = |at: usize| {
            let sign = if at.wrapping_mul(2_654_435_761) >> 7 & 1 == 0 { 1.0 } else { -1.0 };
            sign / (1.0 + (at / 64 / heads) as f64)
        };
        let right: Vec<f64> = (0..rows * heads * 64).map(number).collect();
        let values = right
            .iter()
            .enumerate()
            .map(|(at, it)| (it * (1.0 + 2e-3 * number(at).signum())) as f32);
        let ours = Table { what, heads, numbers: 64, values: values.collect() };
        (ours, Table { what, heads, numbers: 64, values: right })
    }

    #[test]
    fn a_few_rows_that_are_grossly_wrong_do_not_pass() {
        let case = Case::new(Heads { query: 2, kv: 1, dim: 64 }, None, 7, false);
        for (what, heads) in [("dQ", 2), ("dV", 1)] {
            let (mut ours, right) = tables(&case, what, heads);
            let is_right =
                |ours: &Table<f32>| row("it", "kernel", &case, ours, &right)["passed"] == true;
            assert!(is_right(&ours), "{what}");
            let end = ours.values.len();
            let kept = ours.values[end - 64..].to_vec();
            // The last row of the last head; with the rest it is 4e-3 off at most.
            ours.values[end - 64..].fill(0.0);
            let told = row("it", "kernel", &case, &ours, &right);
            assert!(told["error"].as_f64().is_some_and(|it| it < 5e-3), "{told}");
            assert!(told["passed"] == false, "{told}");
            assert!(told["worst"].as_str().is_some_and(|it| it.starts_with("row ")), "{told}");
            ours.values[end - 64..].copy_from_slice(&kept);
            // A tile of keys that is off a little in every row: less than a row may be.
            for it in &mut ours.values[end - 64 * 64 * heads..] {
                *it *= 1.05;
            }
            assert_eq!(is_right(&ours), what == "dQ", "{what}");
        }
    }
}
