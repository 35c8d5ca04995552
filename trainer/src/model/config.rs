//! Sizes of a model, its presets, and where each tensor lies in the flat buffer of parameters.
//!
//! In: a preset's name. Out: a [`Config`]; of it, [`Parameters`], and starting values by seed.
//!
//! Invariant: all tensors lie one after the other in the order of [`Parameters::tensors`], without gap.

use std::ops::Range;

use cadre_worker::session::{Heads, Kind, Sinks};
use rand_chacha::rand_core::Rng;
use serde::{Deserialize, Serialize};

use super::stack::Stack;
use crate::loader::random;

/// Sizes of a model.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Width of the residual stream.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads, a multiple of the KV heads, of layers that say no others.
    pub query_heads: usize,
    /// KV heads, likewise.
    pub kv_heads: usize,
    /// Dimension of a head, likewise: a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Inner width of SwiGLU.
    pub feed_forward: usize,
    /// Tokens that there are; the 256 bytes where nothing else is said.
    #[serde(default = "bytes")]
    pub vocabulary: usize,
}

/// Of checkpoints that know no other vocabulary.
fn bytes() -> usize {
    256
}

impl Config {
    /// The preset of that name: one of [`Config::PRESETS`].
    pub fn preset(name: &str) -> Result<Self, UnknownModel> {
        let found = Self::PRESETS.iter().find(|(it, _)| *it == name);
        found.map(|&(_, config)| config).ok_or_else(|| UnknownModel { name: name.into() })
    }

    /// All presets: `tiny` for tests, `small` for a machine of few cores, `medium` for a larger one.
    pub const PRESETS: &'static [(&'static str, Self)] = &[
        ("tiny", Self::new(64, 2, (2, 1, 32), 176)),
        ("small", Self::new(256, 4, (4, 2, 64), 688)),
        ("medium", Self::new(512, 8, (8, 2, 64), 1376)),
    ];

    const fn new(
        width: usize,
        layers: usize,
        (query_heads, kv_heads, head_dim): (usize, usize, usize),
        feed_forward: usize,
    ) -> Self {
        Self { width, layers, query_heads, kv_heads, head_dim, feed_forward, vocabulary: 256 }
    }

    /// Heads of layers that say no others.
    pub fn heads(&self) -> Heads {
        let [query, kv, dim] = [self.query_heads, self.kv_heads, self.head_dim].map(|it| it as u16);
        Heads { query, kv, dim }
    }

    /// The sizes as transformers reads them of a Llama whose documents have at most `positions` rows.
    pub fn as_llama(&self, positions: u32) -> serde_json::Value {
        let Self { width, layers, query_heads, kv_heads, head_dim, feed_forward, vocabulary } =
            *self;
        serde_json::json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": feed_forward,
            "num_hidden_layers": layers,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "max_position_embeddings": positions,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "bos_token_id": null,
            "eos_token_id": null,
            "pad_token_id": null,
            "torch_dtype": "float32",
        })
    }
}

/// A model that is not a preset.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("there is no model {name:?}; choose tiny, small or medium")]
pub struct UnknownModel {
    /// The name.
    pub name: String,
}

/// A tensor in the flat buffer: `rows × columns`, row-major; a vector has one row.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Matrix {
    /// Name of the tensor in files of the Llama family, by which transformers finds it.
    pub name: String,
    /// Output features; 1 for a vector.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// Range of the tensor in the flat buffer.
    pub range: Range<usize>,
}

impl Matrix {
    /// Vectors are not decayed: gains of norms, which start at 1, and sinks, which start at 0.
    pub fn is_vector(&self) -> bool {
        self.rows == 1
    }

    fn is_sinks(&self) -> bool {
        self.name.ends_with(SINKS)
    }
}

/// End of the name of a layer's sinks, as in gpt-oss.
const SINKS: &str = "self_attn.sinks";

/// Ranges of all tensors in the flat buffer of parameters.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Parameters {
    pub(super) embedding: Range<usize>,
    pub(super) layers: Vec<LayerParameters>,
    pub(super) norm: Range<usize>,
    pub(super) head: Range<usize>,
    tensors: Vec<Matrix>,
}

/// Tensors of the attention part of a layer; layers without core attention have none.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct AttentionParameters {
    pub(super) norm: Range<usize>,
    pub(super) q: Range<usize>,
    pub(super) k: Range<usize>,
    pub(super) v: Range<usize>,
    pub(super) o: Range<usize>,
    /// Empty without sinks.
    pub(super) sinks: Range<usize>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct LayerParameters {
    /// `None` without core attention.
    pub(super) attention: Option<AttentionParameters>,
    pub(super) feed_norm: Range<usize>,
    /// Gate above up, `[2 · feed forward, width]`.
    pub(super) gate_up: Range<usize>,
    pub(super) down: Range<usize>,
}

impl Parameters {
    /// Lays out the tensors of `config` with these layers.
    pub fn new(config: &Config, stack: &Stack) -> Self {
        let mut tensors: Vec<Matrix> = Vec::new();
        let mut place = |name: String, rows: usize, columns: usize| {
            let start = tensors.last().map_or(0, |it| it.range.end);
            let range = start..start + rows * columns;
            tensors.push(Matrix { name, rows, columns, range: range.clone() });
            range
        };
        let Config { width, feed_forward, vocabulary, .. } = *config;
        let embedding = place("model.embed_tokens.weight".into(), vocabulary, width);
        let layers = (0..config.layers)
            .map(|layer| {
                let name = |name: &str| format!("model.layers.{layer}.{name}");
                let mut of = |it: &str, rows, columns| place(name(it) + ".weight", rows, columns);
                let kind = stack.kind_of(layer);
                let mut attention = kind.map(|it| {
                    let [query, kv] = widths(it.heads);
                    AttentionParameters {
                        norm: of("input_layernorm", 1, width),
                        q: of("self_attn.q_proj", query, width),
                        k: of("self_attn.k_proj", kv, width),
                        v: of("self_attn.v_proj", kv, width),
                        o: of("self_attn.o_proj", width, query),
                        sinks: 0..0,
                    }
                });
                let feed_norm = of("post_attention_layernorm", 1, width);
                // Two tensors by name, one matrix to multiply with.
                let gate = of("mlp.gate_proj", feed_forward, width);
                let gate_up = gate.start..of("mlp.up_proj", feed_forward, width).end;
                let down = of("mlp.down_proj", width, feed_forward);
                if let (Some(it), Some(Kind { heads, sinks: Sinks::Learnt, .. })) =
                    (&mut attention, kind)
                {
                    it.sinks = place(name(SINKS), 1, heads.query.into());
                }
                LayerParameters { attention, feed_norm, gate_up, down }
            })
            .collect();
        let norm = place("model.norm.weight".into(), 1, width);
        let head = place("lm_head.weight".into(), vocabulary, width);
        Self { embedding, layers, norm, head, tensors }
    }

    /// Tensors around core attention.
    ///
    /// # Panics
    ///
    /// The layer has none.
    pub(super) fn attention(&self, layer: usize) -> &AttentionParameters {
        self.layers[layer].attention.as_ref().expect("a layer with core attention")
    }

    /// All tensors in the order of the buffer.
    pub fn tensors(&self) -> &[Matrix] {
        &self.tensors
    }

    /// Where the matrices lie that rows are multiplied with: all but the embedding, gate and up as one.
    pub fn weights(&self) -> Vec<Range<usize>> {
        let of = |layer: &LayerParameters| {
            let LayerParameters { attention, feed_norm: _, gate_up, down } = layer.clone();
            let four = |it: AttentionParameters| [it.q, it.k, it.v, it.o];
            attention.map(four).into_iter().flatten().chain([gate_up, down])
        };
        self.layers.iter().flat_map(of).chain([self.head.clone()]).collect()
    }

    /// Numbers in the buffer.
    pub fn len(&self) -> usize {
        self.head.end
    }

    /// Never: every model has parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starting values: gains 1, sinks 0, matrices normal with deviation 1/√columns (embedding 1), what adds to
    /// the residual stream smaller by √(2 · layers).
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = random(seed, *b"parameters");
        let mut values = vec![0.0; self.len()];
        let residual = 1.0 / ((2 * self.layers.len()) as f32).sqrt();
        for tensor in &self.tensors {
            let values = &mut values[tensor.range.clone()];
            if tensor.is_vector() {
                values.fill(if tensor.is_sinks() { 0.0 } else { 1.0 });
                continue;
            }
            let adds = tensor.name.ends_with("o_proj.weight") || tensor.name.contains("down_proj");
            let mut deviation = 1.0 / (tensor.columns as f32).sqrt();
            if tensor.range == self.embedding {
                deviation = 1.0;
            } else if adds {
                deviation *= residual;
            }
            values.fill_with(|| deviation * normal(random.next_u64(), random.next_u64()));
        }
        values
    }
}

/// Numbers in a row of Q, O, dO and dQ, and in one of K, V, dK and dV.
pub(super) fn widths(Heads { query, kv, dim }: Heads) -> [usize; 2] {
    [query, kv].map(|it| usize::from(it) * usize::from(dim))
}

/// Nearly normal, deviation 1: the sum of eight uniform numbers. Only + and ×, so the same bits on
/// every machine; no value is beyond ±4.9.
fn normal(low: u64, high: u64) -> f32 {
    let parts = |word: u64| (0..4).map(move |part| (word >> (16 * part)) & 0xffff);
    let sum: u64 = parts(low).chain(parts(high)).sum();
    // Mean 8 · 32767.5, deviation √(8/12) · 65536.
    (sum as f32 - 262_140.0) * (1.224_744_9 / 65_536.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_follow_one_another_and_start_as_documented() {
        let (_, config) = Config::PRESETS[0];
        let kind = Kind { sinks: Sinks::Learnt, ..Kind::causal(config.heads()) };
        let wide = Heads { query: 3, kv: 1, dim: 40 };
        let wide = Kind { heads: wide, ..kind };
        let stack = Stack::new(vec![None, Some(kind), Some(wide)]).unwrap();
        let parameters = Parameters::new(&Config { layers: 3, ..config }, &stack);
        let mut end = 0;
        for tensor in parameters.tensors() {
            assert_eq!(tensor.range.start, end);
            assert_eq!(tensor.range.len(), tensor.rows * tensor.columns);
            end = tensor.range.end;
        }
        assert_eq!(end, parameters.len());
        let values = parameters.initial(3);
        assert_eq!(values, parameters.initial(3));
        assert_ne!(values, parameters.initial(4));
        let names = parameters.tensors().iter().map(|it| (&it.name[..], it));
        let tensors: std::collections::BTreeMap<_, _> = names.collect();
        let filled = |name: &str, with: f32| {
            let all = &values[tensors[name].range.clone()];
            assert!(
                !all.is_empty() && all.iter().all(|it| it.to_bits() == with.to_bits()),
                "{name}"
            );
        };
        filled("model.layers.1.self_attn.sinks", 0.0);
        filled("model.layers.1.input_layernorm.weight", 1.0);
        filled("model.layers.0.post_attention_layernorm.weight", 1.0);
        for part in ["input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.sinks"] {
            assert!(!tensors.contains_key(&format!("model.layers.0.{part}")[..]), "{part}");
        }
        let shape = |name: &str| (tensors[name].rows, tensors[name].columns);
        for (layer, query, kv, sinks) in [(1, 64, 32, 2), (2, 120, 40, 3)] {
            let name = |it: &str| format!("model.layers.{layer}.self_attn.{it}");
            assert_eq!(shape(&name("q_proj.weight")), (query, 64));
            assert_eq!(shape(&name("v_proj.weight")), (kv, 64));
            assert_eq!(shape(&name("o_proj.weight")), (64, query));
            assert_eq!(shape(&name("sinks")), (1, sinks));
        }
        let embedding = &values[parameters.embedding.clone()];
        let mean = embedding.iter().sum::<f32>() / embedding.len() as f32;
        let variance = embedding.iter().map(|it| it * it).sum::<f32>() / embedding.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn presets_are_found_by_name_only() {
        assert_eq!(Config::preset("small").map(|it| it.width), Ok(256));
        let error = Config::preset("huge").unwrap_err().to_string();
        assert_eq!(error, "there is no model \"huge\"; choose tiny, small or medium");
    }
}
