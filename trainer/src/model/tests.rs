//! The model against a naive f64 model: its loss, and its gradients by numeric differentiation.
//!
//! Everything naive is written from the formulas, tokens and heads one by one.

use cadre_kernels::Threads;
use cadre_worker::session::{Factor, Kind, Mask, Sinks};

use super::{Activations, Config, Model, Parameters, Pattern, Scores, Stack};
use crate::loader::Rows;
use crate::optimizer::{AdamW, Hyper, Schedule};
use crate::ring::Ring;
use crate::step::{Trainer, through};
use crate::{At, Attention, InProcess};

const DOCUMENTS: [u32; 3] = [20, 1, 27];

/// Tokens of a vocabulary, from its first to its last.
fn rows(vocabulary: usize) -> Rows {
    let id = |it: u32, by: u32| it * by % vocabulary as u32;
    let total = DOCUMENTS.iter().sum::<u32>();
    Rows {
        ids: (0..total).map(|it| id(it, 37)).collect(),
        positions: DOCUMENTS.iter().flat_map(|&rows| 0..rows).collect(),
        targets: (0..total).map(|it| (it != 19).then_some(id(it, 91))).collect(),
    }
}

/// Loss and gradients by the stages.
fn stages(config: Config, stack: &Stack, parameters: &[f32], threads: Threads) -> (f64, Vec<f32>) {
    let mut model = Model::new(config, stack.clone(), 4, threads);
    let mut attention = InProcess::new(stack.core().clone(), threads);
    attention.begin(vec![DOCUMENTS.to_vec()]);
    let (mut kept, mut gradients) = (Activations::default(), vec![0.0; parameters.len()]);
    model.begin(parameters).unwrap();
    let rows = rows(config.vocabulary);
    let count = rows.targets.iter().flatten().count();
    model.embed(parameters, rows, &mut kept);
    through(&mut model, parameters, &mut kept, &mut attention).unwrap();
    let mut core = stack.core().count().into();
    let loss = model.head(parameters, &mut gradients, &mut kept, 1.0 / count as f32).unwrap();
    for layer in (0..config.layers).rev() {
        if stack.kind_of(layer).is_none() {
            model.pass_by_gradient(parameters, &mut gradients, &mut kept, layer).unwrap();
            continue;
        }
        core -= 1;
        let (dout, out) =
            model.after_attention_gradient(parameters, &mut gradients, &mut kept, layer).unwrap();
        let at = At { layer: core, nano: 0 };
        attention.submit_backward(at, [dout, out]).unwrap();
        let back = attention.wait_backward(at).unwrap();
        model
            .before_attention_gradient(parameters, &mut gradients, &mut kept, layer, back)
            .unwrap();
    }
    model.embed_gradient(&mut gradients, &mut kept);
    model.end(&mut gradients).unwrap();
    (loss.nats / count as f64, gradients)
}

/// A vector times a matrix of `x.len()` columns.
fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn normed(x: &[f64], gain: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|it| it * it).sum::<f64>() / x.len() as f64;
    x.iter().zip(gain).map(|(x, gain)| x / (mean + 1e-5).sqrt() * gain).collect()
}

fn turned(row: &[f64], dim: usize, position: u32) -> Vec<f64> {
    let mut turned = row.to_vec();
    for head in turned.chunks_exact_mut(dim) {
        for index in 0..dim / 2 {
            let frequency = 10_000_f64.powf(-2.0 * index as f64 / dim as f64);
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            let (x, y) = (head[index], head[index + dim / 2]);
            (head[index], head[index + dim / 2]) = (x * cos - y * sin, y * cos + x * sin);
        }
    }
    turned
}

/// Attention of the last of `k` and `v`'s rows, and of a key without a value for each of `sinks`.
fn attended((kind, sinks): (&Kind, &[f64]), q: &[f64], k: &[Vec<f64>], v: &[Vec<f64>]) -> Vec<f64> {
    let dim = usize::from(kind.heads.dim);
    let scale = kind.scale.map_or(1.0 / (dim as f64).sqrt(), |it| it.get().into());
    let softcap = kind.softcap.map(|it| f64::from(it.get()));
    let capped = |it: f64| softcap.map_or(it, |softcap| softcap * (it / softcap).tanh());
    let mut out = Vec::new();
    for (head, q) in q.chunks_exact(dim).enumerate() {
        let of = head / usize::from(kind.heads.query / kind.heads.kv) * dim;
        let score = |k: &Vec<f64>| {
            let products = q.iter().zip(&k[of..of + dim]).map(|(q, k)| q * k);
            capped(products.sum::<f64>() * scale).exp()
        };
        let weights: Vec<f64> = k.iter().map(score).collect();
        let sum = weights.iter().sum::<f64>() + sinks.get(head).map_or(0.0, |it| it.exp());
        let value =
            |index| weights.iter().zip(v).map(|(w, v)| w * v[of + index]).sum::<f64>() / sum;
        out.extend((0..dim).map(value));
    }
    out
}

/// The oldest key that the row at `position` keeps.
fn oldest(kind: &Kind, position: u32) -> usize {
    let keeps = |key: &u32| {
        let near = match kind.mask {
            Mask::Causal => true,
            Mask::Window { left } => position - *key <= left,
            Mask::Full => unreachable!("no layer of this model sees rows behind its own"),
        };
        near && kind.chunk.is_none_or(|rows| position / rows == *key / rows)
    };
    (0..=position).find(keeps).unwrap() as usize
}

/// Mean loss, naive.
fn reference(config: &Config, stack: &Stack, layout: &Parameters, p: &[f64]) -> f64 {
    let (rows, width) = (rows(config.vocabulary), config.width);
    let at = |range: &std::ops::Range<usize>| &p[range.clone()];
    let embed = |&id: &u32| at(&layout.embedding)[id as usize * width..][..width].to_vec();
    let mut x: Vec<Vec<f64>> = rows.ids.iter().map(embed).collect();
    for (number, layer) in layout.layers.iter().enumerate() {
        let kind = stack.kind_of(number);
        let mut k = Vec::new();
        let mut v = Vec::new();
        for (x, &position) in x.iter_mut().zip(&rows.positions) {
            if position == 0 {
                (k, v) = (Vec::new(), Vec::new());
            }
            if let (Some(kind), Some(own)) = (&kind, &layer.attention) {
                let (h, dim) = (normed(x, at(&own.norm)), kind.heads.dim.into());
                let q = turned(&product(at(&own.q), &h), dim, position);
                k.push(turned(&product(at(&own.k), &h), dim, position));
                v.push(product(at(&own.v), &h));
                let (first, with) = (oldest(kind, position), (kind, at(&own.sinks)));
                let out = product(at(&own.o), &attended(with, &q, &k[first..], &v[first..]));
                x.iter_mut().zip(out).for_each(|(x, out)| *x += out);
            }
            let h = normed(x, at(&layer.feed_norm));
            let gate_up = product(at(&layer.gate_up), &h);
            let (gate, up) = gate_up.split_at(config.feed_forward);
            let silu = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u);
            let out = product(at(&layer.down), &silu.collect::<Vec<_>>());
            x.iter_mut().zip(out).for_each(|(x, out)| *x += out);
        }
    }
    let (mut loss, mut count) = (0.0, 0.0);
    for (x, target) in x.iter().zip(&rows.targets) {
        let Some(target) = target else { continue };
        let logits = product(at(&layout.head), &normed(x, at(&layout.norm)));
        let sum: f64 = logits.iter().map(|it| it.exp()).sum();
        loss += sum.ln() - logits[*target as usize];
        count += 1.0;
    }
    loss / count
}

const PLAIN: Scores = Scores { scale: None, softcap: None, sinks: Sinks::None };

fn factor(text: &str) -> Factor {
    text.parse().unwrap()
}

fn stack(config: &Config, pattern: &str, scores: Scores) -> Stack {
    pattern.parse::<Pattern>().unwrap().over(config.layers, config.heads(), scores).unwrap()
}

#[test]
fn loss_and_gradients_are_those_of_a_naive_f64_model() {
    gradients_are_those_of_a_naive_f64_model("full", PLAIN);
}

#[test]
fn loss_and_gradients_of_windows_are_those_of_a_naive_f64_model() {
    gradients_are_those_of_a_naive_f64_model("window:5,full", PLAIN);
    gradients_are_those_of_a_naive_f64_model("window:9,window:1", PLAIN);
}

#[test]
fn loss_and_gradients_of_chunks_are_those_of_a_naive_f64_model() {
    gradients_are_those_of_a_naive_f64_model("chunk:8,full", PLAIN);
}

#[test]
fn loss_and_gradients_of_a_softcap_and_a_scale_are_those_of_a_naive_f64_model() {
    // Low enough that it bends most scores.
    let scores = Scores { scale: Some(factor("0.3")), softcap: Some(factor("1.5")), ..PLAIN };
    gradients_are_those_of_a_naive_f64_model("full", scores);
}

#[test]
fn loss_and_gradients_of_sinks_are_those_of_a_naive_f64_model() {
    let sinks = Scores { sinks: Sinks::Learnt, ..PLAIN };
    gradients_are_those_of_a_naive_f64_model("window:5,full", sinks);
    let all = Scores { softcap: Some(factor("2")), scale: Some(factor("0.2")), ..sinks };
    gradients_are_those_of_a_naive_f64_model("chunk:7,none", all);
}

#[test]
fn loss_and_gradients_of_other_heads_are_those_of_a_naive_f64_model() {
    let tiny = Config::preset("tiny").unwrap();
    // All query heads read one KV head, each reads its own; dims that are no power of two, and the longest one.
    for (query_heads, kv_heads, head_dim) in [(4, 1, 8), (3, 3, 24), (6, 2, 40), (1, 1, 256)] {
        let config = Config { query_heads, kv_heads, head_dim, layers: 1, ..tiny };
        let sinks = Scores { sinks: Sinks::Learnt, ..PLAIN };
        gradients_of(config, "window:9", sinks);
    }
}

#[test]
fn loss_and_gradients_of_layers_of_different_heads_are_those_of_a_naive_f64_model() {
    let tiny = Config::preset("tiny").unwrap();
    let sinks = Scores { sinks: Sinks::Learnt, ..PLAIN };
    // As Gemma has it: many narrow heads with a window beside few wide ones without.
    gradients_of(tiny, "window:9 heads 4/4 dim 16, full heads 2/1 dim 72", sinks);
}

#[test]
fn loss_and_gradients_of_other_vocabularies_are_those_of_a_naive_f64_model() {
    let tiny = Config { layers: 1, ..Config::preset("tiny").unwrap() };
    for vocabulary in [2, 255, 1_000] {
        gradients_of(Config { vocabulary, ..tiny }, "full", PLAIN);
    }
}

#[test]
fn loss_and_gradients_of_layers_without_attention_are_those_of_a_naive_f64_model() {
    gradients_are_those_of_a_naive_f64_model("none,full", PLAIN);
    gradients_are_those_of_a_naive_f64_model("full,none", PLAIN);
}

/// The same as the stages one by one, whichever layers have attention.
#[test]
fn a_step_goes_through_layers_without_attention_in_their_order() {
    for pattern in ["none,none,full,none,none,none,window:5,none", "full,none,full", "none,full"] {
        let config =
            Config { layers: pattern.split(',').count(), ..Config::preset("tiny").unwrap() };
        let stack = stack(&config, pattern, Scores { sinks: Sinks::Learnt, ..PLAIN });
        let layout = Parameters::new(&config, &stack);
        let parameters = layout.initial(5);
        let (loss, gradients) = stages(config, &stack, &parameters, Threads::ONE);
        let model = Model::new(config, stack.clone(), 4, Threads::ONE);
        let mut attention = InProcess::new(stack.core().clone(), Threads::ONE);
        attention.begin(vec![DOCUMENTS.to_vec()]);
        let hyper = Hyper::new(Schedule { peak: 1.0, warmup: 0, steps: 1 });
        let mut trainer = Trainer::new(model, parameters, AdamW::new(hyper, &layout));
        let (rows, mut ring) = (rows(config.vocabulary), Ring::alone());
        let targets = rows.targets.iter().flatten().count() as u64;
        let at = (0, &crate::tests::accumulated(&trainer, 1, 1));
        let result =
            trainer.step(at, vec![rows], targets, &mut attention, &mut ring, &mut ()).unwrap();
        assert_eq!(result.loss.to_bits(), (loss as f32).to_bits(), "{pattern}");
        let squares: f64 = gradients.iter().map(|it| f64::from(*it).powi(2)).sum();
        let norm = squares.sqrt() as f32;
        assert!((result.update.norm - norm).abs() < 1e-5 * norm, "{pattern}");
    }
}

fn gradients_are_those_of_a_naive_f64_model(pattern: &str, scores: Scores) {
    gradients_of(Config::preset("tiny").unwrap(), pattern, scores);
}

fn gradients_of(config: Config, pattern: &str, scores: Scores) {
    let stack = stack(&config, pattern, scores);
    let layout = Parameters::new(&config, &stack);
    let mut parameters = layout.initial(5);
    // Gains other than 1 and sinks other than 0, so that forgotten ones show.
    for tensor in layout.tensors().iter().filter(|it| it.is_vector()) {
        for (index, gain) in parameters[tensor.range.clone()].iter_mut().enumerate() {
            *gain += 0.01 * (index % 21) as f32 - 0.1;
        }
    }
    let (loss, gradients) = stages(config, &stack, &parameters, Threads::ONE);
    let mut wide: Vec<f64> = parameters.iter().map(|&it| f64::from(it)).collect();
    let expected = reference(&config, &stack, &layout, &wide);
    assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");

    for tensor in layout.tensors() {
        let range = tensor.range.clone();
        let scale = gradients[range.clone()].iter().fold(0.0_f32, |most, it| most.max(it.abs()));
        assert!(scale > 0.0, "{} has no gradient", tensor.name);
        // The embedding has a gradient only where a token occurs: take the greatest there too.
        let greatest =
            range.clone().max_by(|&a, &b| gradients[a].abs().total_cmp(&gradients[b].abs()));
        let places = [range.start + range.len() / 3, range.start + range.len() * 5 / 7];
        for place in places.into_iter().chain(greatest) {
            let step = 1e-4;
            let at = wide[place];
            wide[place] = at + step;
            let above = reference(&config, &stack, &layout, &wide);
            wide[place] = at - step;
            let below = reference(&config, &stack, &layout, &wide);
            wide[place] = at;
            let numeric = (above - below) / (2.0 * step);
            let difference = (numeric - f64::from(gradients[place])).abs();
            assert!(
                difference < 1e-4 * f64::from(scale) + 1e-7,
                "{}: {numeric} {}",
                tensor.name,
                gradients[place]
            );
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let config = Config::preset("tiny").unwrap();
    let stack = stack(&config, "full", PLAIN);
    let parameters = Parameters::new(&config, &stack).initial(5);
    let (loss, gradients) = stages(config, &stack, &parameters, Threads::ONE);
    let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
    for threads in [2, 3] {
        let (again, same) = stages(config, &stack, &parameters, Threads::new(threads));
        assert_eq!(loss.to_bits(), again.to_bits());
        assert!(bits(&gradients) == bits(&same), "{threads} threads");
    }
}
