//! Writes a little text with the trained model, for the end of a run.
//!
//! In: parameters and a prompt. Out: the tokens that follow it.
//!
//! Attention is computed here, a row at a time over kept keys and values: no pool is needed for a few
//! hundred rows. Not a server of text; it is as slow as it is simple.
//!
//! Invariant: the same parameters, prompt, temperature and seed give the same text.

use cadre_kernels::{Heads, device, math};
use cadre_worker::session::{self, Factor, Kind};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::loader::{Rows, random};
use super::model::{Activations, Model};

/// `length` tokens that follow `prompt`; a `temperature` of 0 takes the likeliest token each time.
///
/// # Errors
///
/// Those of a model whose linear layers are on a GPU.
///
/// # Panics
///
/// When the prompt is empty.
pub fn sample(
    model: &mut Model,
    parameters: &[f32],
    prompt: &[u32],
    length: usize,
    temperature: f32,
    seed: u64,
) -> Result<Vec<u32>, device::Error> {
    let mut random = random(seed, *b"sample");
    let mut cache = vec![(Vec::new(), Vec::new()); model.stack().layers()];
    let mut kept = Activations::default();
    assert!(!prompt.is_empty(), "a sample begins with a token");
    let mut text = prompt.to_vec();
    for position in 0..prompt.len() + length - length.min(1) {
        let rows = Rows {
            ids: vec![text[position]],
            positions: vec![position as u32],
            targets: vec![None],
        };
        model.embed(parameters, rows, &mut kept);
        for (layer, (keys, values)) in cache.iter_mut().enumerate() {
            let Some(kind) = model.stack().kind_of(layer) else {
                model.pass_by(parameters, &mut kept, layer)?;
                continue;
            };
            let [q, k, v] = model.before_attention(parameters, &mut kept, layer)?;
            let k_width = k.len();
            keys.extend(k);
            values.extend(v);
            let first = first_key(kind, position as u32) as usize * k_width;
            let sinks = model.sinks(parameters, layer);
            let out = attend((kind, sinks), &q, &keys[first..], &values[first..]);
            model.after_attention(parameters, &mut kept, layer, out)?;
        }
        if position + 1 == text.len() && text.len() < prompt.len() + length {
            let logits = model.last_logits(parameters, &kept)?;
            text.push(draw(&logits, temperature, &mut random));
        }
    }
    Ok(text.split_off(prompt.len()))
}

/// The oldest key that a row keeps.
fn first_key(kind: Kind, row: u32) -> u32 {
    let chunk = kind.chunk.map_or(0, |rows| row - row % rows);
    let row = row - chunk;
    chunk + kind.mask.keys(row + 1, row..row + 1).start
}

/// Attention of one row over all keys, with the sinks of the layer if it has any.
fn attend((kind, sinks): (Kind, &[f32]), q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let Heads { query, kv, dim } = session::kernel_heads(kind.heads);
    let scale = kind.scale_of();
    let capped = |score: f32| match kind.softcap.map(Factor::get) {
        Some(softcap) => softcap * (2.0 * math::sigmoid(2.0 * score / softcap) - 1.0),
        None => score,
    };
    let mut out = vec![0.0; q.len()];
    for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
        let first = head / (query / kv) * dim;
        let rows =
            |rows| <[f32]>::chunks_exact(rows, kv * dim).map(move |it| &it[first..first + dim]);
        let score = |k: &[f32]| capped(q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * scale);
        let scores: Vec<f32> = rows(keys).map(score).collect();
        let sink = sinks.get(head).copied().unwrap_or(f32::NEG_INFINITY);
        let greatest = scores.iter().copied().fold(sink, f32::max);
        let mut sum = if sink > f32::NEG_INFINITY { math::exp(sink - greatest) } else { 0.0 };
        for (score, value) in scores.iter().zip(rows(values)) {
            let weight = math::exp(score - greatest);
            sum += weight;
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
        }
        for it in out {
            *it /= sum;
        }
    }
    out
}

fn draw(logits: &[f32], temperature: f32, random: &mut ChaCha8Rng) -> u32 {
    let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    let likeliest = likeliest.expect("a vocabulary");
    if temperature <= 0.0 {
        return likeliest as u32;
    }
    let weight = |it: &f32| math::exp((it - logits[likeliest]) / temperature);
    let weights: Vec<f32> = logits.iter().map(weight).collect();
    let mut left = (random.next_u32() >> 8) as f32 / (1 << 24) as f32 * weights.iter().sum::<f32>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token as u32;
        }
    }
    likeliest as u32
}
