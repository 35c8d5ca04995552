//! Copies of rows: every byte, and nothing beside.
//!
//! In: bytes of a word. Out: a row of the report.

use std::time::Duration;

use cadre_kernels::device::{Buffer, Gpu, RowCopier, RowCopy, Stream};
use serde_json::{Value, json};

use crate::Trouble;
use crate::case::{Random, wait};

const POISON: u8 = 0xAB;

pub(crate) fn check(
    gpu: &Gpu,
    (name, kernel, word): (&str, &str, u64),
    seed: u64,
    patience: Duration,
) -> Result<Value, Trouble> {
    let mut random = Random::new(seed);
    let size = 1_u64 << 18;
    let source: Vec<u8> = (0..size).map(|_| random.below(256) as u8).collect();
    let mut right = vec![POISON; source.len()];
    let (mut copies, mut to) = (Vec::new(), 0);
    loop {
        let bytes = word * (1 + random.below(200));
        let rows = 1 + random.below(30) as u32;
        let [from_stride, to_stride] = [0; 2].map(|_| bytes + word * random.below(20));
        if to + to_stride * u64::from(rows) > size || from_stride * u64::from(rows) > size {
            break;
        }
        let from = random.below((size - from_stride * u64::from(rows)) / word + 1) * word;
        copies.push(RowCopy { from, to, rows, bytes, from_stride, to_stride });
        for row in 0..u64::from(rows) {
            let (from, to) = ((from + row * from_stride) as usize, (to + row * to_stride) as usize);
            right[to..][..bytes as usize].copy_from_slice(&source[from..][..bytes as usize]);
        }
        to += to_stride * u64::from(rows) + word * random.below(4);
    }
    let stream = Stream::new(gpu)?;
    let from = Buffer::of(&stream, &source, "bytes to copy")?;
    let mut target = Buffer::of(&stream, &vec![POISON; right.len()], "copied bytes")?;
    let mut copier = RowCopier::new(Stream::new(gpu)?)?;
    wait(&stream, patience)?;
    copier.put((from.slice(), target.slice_mut()), &copies)?;
    if let Err(trouble) = wait(copier.stream(), patience) {
        std::mem::forget((from, target, copier, stream));
        return Err(trouble);
    }
    let mut ours = vec![0; right.len()];
    target.read(&stream, 0, &mut ours)?;
    let wrong = ours.iter().zip(&right).filter(|(a, b)| a != b).count();
    let mut row = json!({
        "check": name, "what": "bytes of copied rows", "error": wrong, "passed": wrong == 0, "kernel": kernel
    });
    if let Some(at) = ours.iter().zip(&right).position(|(a, b)| a != b) {
        let copy = copies.iter().position(|it| {
            (it.to..it.to + it.to_stride * u64::from(it.rows)).contains(&(at as u64))
        });
        row["wrong"] = json!({
            "first": format!("byte {at}"), "ours": ours[at].to_string(), "right": right[at].to_string(),
            "count": format!("{wrong} of {}", right.len()), "tile": copy.map(|it| format!("copy {it}: {:?}", copies[it])),
        });
    }
    Ok(row)
}
