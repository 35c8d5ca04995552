//! Writes a little text with the trained model, for the end of a run.
//!
//! In: parameters and a prompt. Out: the bytes that follow it.
//!
//! Attention is computed here, a row at a time over kept keys and values: no pool is needed for a few
//! hundred rows. Not a server of text; it is as slow as it is simple.
//!
//! Invariant: the same parameters, prompt, temperature and seed give the same text.

use cadre_kernels::{Heads, device, math};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use super::loader::{Rows, random};
use super::model::{Activations, Model};

/// `length` bytes that follow `prompt` (a line break when it is empty); a `temperature` of 0 takes the
/// likeliest byte each time.
///
/// # Errors
///
/// Those of a model whose linear layers are on a GPU.
pub fn sample(
    model: &mut Model,
    parameters: &[f32],
    prompt: &[u8],
    length: usize,
    temperature: f32,
    seed: u64,
) -> Result<Vec<u8>, device::Error> {
    let mut random = random(seed, *b"sample");
    let mut cache = vec![(Vec::new(), Vec::new()); model.config().layers];
    let mut kept = Activations::default();
    let prompt = if prompt.is_empty() { b"\n" } else { prompt };
    let mut text = prompt.to_vec();
    for position in 0..prompt.len() + length - length.min(1) {
        let rows = Rows {
            ids: vec![text[position]],
            positions: vec![position as u32],
            targets: vec![None],
        };
        model.embed(parameters, rows, &mut kept);
        for (layer, (keys, values)) in cache.iter_mut().enumerate() {
            let [q, k, v] = model.before_attention(parameters, &mut kept, layer)?;
            keys.extend(k);
            values.extend(v);
            let width = model.heads().kv * model.heads().dim;
            let (row, mask) = (position as u32, model.layers().kind_of(layer).mask);
            let first = mask.keys(row + 1, row..row + 1).start as usize * width;
            let out = attend(model.heads(), &q, &keys[first..], &values[first..]);
            model.after_attention(parameters, &mut kept, layer, out)?;
        }
        if position + 1 == text.len() && text.len() < prompt.len() + length {
            let logits = model.last_logits(parameters, &kept)?;
            text.push(draw(&logits, temperature, &mut random));
        }
    }
    Ok(text.split_off(prompt.len()))
}

/// One row of attention over all keys.
fn attend(heads: Heads, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let Heads { query, kv, dim } = heads;
    let scale = 1.0 / (dim as f32).sqrt();
    let mut out = vec![0.0; q.len()];
    for (head, (q, out)) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
        let first = head / (query / kv) * dim;
        let rows =
            |rows| <[f32]>::chunks_exact(rows, kv * dim).map(move |it| &it[first..first + dim]);
        let score = |k: &[f32]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * scale;
        let scores: Vec<f32> = rows(keys).map(score).collect();
        let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
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

fn draw(logits: &[f32], temperature: f32, random: &mut ChaCha8Rng) -> u8 {
    let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    let likeliest = likeliest.expect("a vocabulary");
    if temperature <= 0.0 {
        return likeliest as u8;
    }
    let weight = |it: &f32| math::exp((it - logits[likeliest]) / temperature);
    let weights: Vec<f32> = logits.iter().map(weight).collect();
    let mut left = (random.next_u32() >> 8) as f32 / (1 << 24) as f32 * weights.iter().sum::<f32>();
    for (byte, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return byte as u8;
        }
    }
    likeliest as u8
}
