//! The two forms in which commands print what they found: a line of JSON, and tables for people.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;

/// One line of JSON, with its end.
pub(crate) fn json<T: Serialize + ?Sized>(it: &T) -> String {
    serde_json::to_string(it).expect("numbers, names and lists are JSON") + "\n"
}

/// Adds a row of two cells.
pub(crate) fn row(table: &mut Table, name: &str, value: String) {
    table.add_row([name.to_owned(), value]);
}

/// Bytes, and the least that they could be where that is known.
pub(crate) fn at_least(bytes: u64, least: u64) -> String {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let bound =
        if least > 0 { format!(", at least {:.2} GB", gigabytes(least)) } else { String::new() };
    format!("{:.2} GB{bound}", gigabytes(bytes))
}

/// An empty table, in the style of all of Cadre's.
pub(crate) fn table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table
}
