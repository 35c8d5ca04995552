//! Options that say which model a trainer trains.
//!
//! In: words. Out: [`ModelOptions`], and of them a [`Design`]. Whether sizes and layers fit each other is said where the design is
//! built.

use cadre_trainer::model::{Config, Design, Pattern, Scores, Sizes};
use cadre_worker::session::{Factor, Sinks};
use clap::Args;

/// See the module.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ModelOptions {
    /// Size of the model: tiny, small or medium.
    #[arg(long, default_value = "small", value_parser = model)]
    pub(crate) model: String,
    /// Which keys the rows of each layer keep: full (all before them, and their own), window:ROWS (the newest ones, their
    /// own among them), chunk:ROWS (those of their chunk) or none (no core attention); a list with commas repeats over the layers.
    #[arg(long, value_name = "PATTERN", default_value_t)]
    pub(crate) layers: Pattern,
    /// Bound of the scores: they become softcap · tanh(score / softcap).
    #[arg(long, value_name = "NUMBER")]
    pub(crate) softcap: Option<Factor>,
    /// Factor of the scores; default: 1/√dim.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) attention_scale: Option<Factor>,
    /// Give each query head of each layer a learnt sink.
    #[arg(long)]
    pub(crate) sinks: bool,
    /// Width of the residual stream, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) width: Option<u32>,
    /// Layers, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) depth: Option<u32>,
    /// Query heads, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) query_heads: Option<u32>,
    /// KV heads, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) kv_heads: Option<u32>,
    /// Elements of a head, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) head_dim: Option<u32>,
    /// Inner width of SwiGLU, in place of the model's.
    #[arg(long, value_name = "N")]
    pub(crate) feed_forward: Option<u32>,
    /// Tokens that there are; default: the 256 bytes. With another size, documents are lines of .jsonl with "tokens".
    #[arg(long, value_name = "N")]
    pub(crate) vocab_size: Option<u32>,
}

fn model(name: &str) -> Result<String, String> {
    Config::preset(name).map(|_| name.to_owned()).map_err(|error| error.to_string())
}

impl From<ModelOptions> for Design {
    fn from(options: ModelOptions) -> Self {
        let ModelOptions {
            model,
            layers,
            softcap,
            attention_scale,
            sinks,
            width,
            depth,
            query_heads,
            kv_heads,
            head_dim,
            feed_forward,
            vocab_size,
        } = options;
        Self {
            preset: model,
            sizes: Sizes {
                width,
                depth,
                query_heads,
                kv_heads,
                head_dim,
                feed_forward,
                vocab_size,
            },
            layers,
            scores: Scores {
                scale: attention_scale,
                softcap,
                sinks: if sinks { Sinks::Learnt } else { Sinks::None },
            },
        }
    }
}
