//! One number of a result again, from inputs that a file gives: what another driver makes of them.
//!
//! In: a file of `bench/gpu/given.py`, a line of JSON and behind it the tensors, little endian: Q, K, V (bf16), or for backward Q,
//! dO, K, V (bf16), LSE, Δ (f32). Out: the number; where several bundles hold copies of a key, the sum of theirs. It judges
//! nothing.

use std::path::Path;

use cadre_kernels::device::{Gpu, Order};
use cadre_kernels::{Heads, Mask};
use half::bf16;
use serde_json::{Value, json};

use crate::case::{Case, Held, Table, Written};
use crate::lines::Lines;
use crate::{Options, Trouble};

/// Inputs of a launch, and which number of its results is wanted.
struct Given {
    case: Case,
    sinks: Vec<f32>,
    /// LSE and Δ, for backward.
    sums: Option<[Vec<f64>; 2]>,
    what: String,
    /// Rows whose numbers are added.
    rows: Vec<usize>,
    head: usize,
    column: usize,
}

pub(crate) fn run(gpu: &Gpu, options: &Options, lines: &mut Lines) -> Result<(), Trouble> {
    let given = match options.case.as_deref().ok_or("--case FILE is missing".to_owned()) {
        Ok(path) => Given::read(path),
        Err(why) => Err(why),
    };
    let given = match given {
        Ok(given) => given,
        Err(why) => {
            println!("{why}");
            lines.tell(&json!({"raised": why}));
            return Ok(());
        }
    };
    let tables: Vec<Table<f32>> = match &given.sums {
        None => given.case.forward(gpu, &given.sinks, options.patience)?.into(),
        Some([lse, delta]) => {
            let how = (Order::Fixed, Written::F32);
            given.case.backward(gpu, how, (lse, delta), options.patience)?.into()
        }
    };
    lines.tell(&json!({"value": given.value(&tables).map(|it| it.to_string())}));
    Ok(())
}

impl Given {
    fn read(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|why| format!("{}: {why}", path.display()))?;
        let end = bytes.iter().position(|it| *it == b'\n').ok_or("the case has no first line")?;
        let head: Value = serde_json::from_slice(&bytes[..end]).map_err(|why| why.to_string())?;
        let heads = &head["heads"];
        let heads =
            Heads { query: count(&heads[0])?, kv: count(&heads[1])?, dim: count(&heads[2])? };
        let (mut documents, mut q_row, mut kv_row) = (Vec::<Held>::new(), 0, 0);
        for it in head["documents"].as_array().ok_or("documents are no list")? {
            let mask = match count(&it["mask"])? as u32 {
                0 => Mask::Full,
                1 => Mask::Causal,
                left => Mask::Window { left: left - 2 },
            };
            let [rows, keys] = ["rows", "keys"].map(|name| &it[name]);
            let rows = count(&rows[0])? as u32..count(&rows[1])? as u32;
            let keys = count(&keys[0])? as u32..count(&keys[1])? as u32;
            let (queries, held) = (rows.len(), keys.len());
            if it["same_bundle"] == json!(true) {
                kv_row -= held;
            }
            let document_rows = count(&it["document_rows"])? as u32;
            documents.push(Held { mask, document_rows, rows, keys, q_row, kv_row });
            (q_row, kv_row) = (q_row + queries, kv_row + held);
        }
        let mut rest = Rest(&bytes[end + 1..]);
        let (queries, keys) = (q_row * heads.query * heads.dim, kv_row * heads.kv * heads.dim);
        let q = rest.rows(queries)?;
        let is_backward = head["pass"] == json!("backward");
        let dout = if is_backward { rest.rows(queries)? } else { Vec::new() };
        let (k, v) = (rest.rows(keys)?, rest.rows(keys)?);
        let numbers = q_row * heads.query;
        let sums = is_backward.then(|| Ok::<_, String>([rest.sums(numbers)?, rest.sums(numbers)?]));
        let softcap = head["softcap"].as_f64().map(|it| it as f32);
        let segment = head["segment"].as_u64().map(|it| it as u32);
        let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
        let at = &head["at"];
        Ok(Self {
            case: Case { heads, softcap, segment, documents, q, dout, k, v },
            sinks: list(&head["sinks"])
                .iter()
                .filter_map(Value::as_f64)
                .map(|it| it as f32)
                .collect(),
            sums: sums.transpose()?,
            what: at["what"].as_str().unwrap_or_default().to_owned(),
            rows: list(&at["rows"]).iter().map(count).collect::<Result<_, _>>()?,
            head: count(&at["head"])?,
            column: count(&at["column"])?,
        })
    }

    /// None where the results have no such number.
    fn value(&self, tables: &[Table<f32>]) -> Option<f64> {
        let table = tables.iter().find(|it| it.what == self.what)?;
        let at = |row: &usize| (row * table.heads + self.head) * table.numbers + self.column;
        let found: Option<Vec<_>> = self.rows.iter().map(|it| table.values.get(at(it))).collect();
        Some(found?.into_iter().map(|it| f64::from(*it)).sum())
    }
}

fn count(value: &Value) -> Result<usize, String> {
    value.as_u64().map(|it| it as usize).ok_or_else(|| format!("{value} is no count"))
}

/// Bytes that are not read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self, numbers: usize) -> Result<Vec<[u8; N]>, String> {
        let (own, rest) = self.0.split_at_checked(numbers * N).ok_or("the case is cut short")?;
        self.0 = rest;
        Ok(own.chunks_exact(N).map(|it| it.try_into().expect("a chunk has its size")).collect())
    }

    fn rows(&mut self, numbers: usize) -> Result<Vec<bf16>, String> {
        Ok(self.take(numbers)?.into_iter().map(bf16::from_le_bytes).collect())
    }

    fn sums(&mut self, numbers: usize) -> Result<Vec<f64>, String> {
        Ok(self.take(numbers)?.into_iter().map(|it| f64::from(f32::from_le_bytes(it))).collect())
    }
}
