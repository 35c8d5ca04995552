//! What a user asks of a model: a preset, sizes in place of its own, the pattern of its layers, their scores.
//!
//! In: a [`Design`]. Out: the sizes and layers of a model, or which option does not fit and what to do. It makes no model.

use cadre_worker::session::Heads;

use super::config::{Config, UnknownModel};
use super::pattern::{Pattern, PatternError, Scores};
use super::stack::Stack;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Design {
    /// Name of the preset.
    pub preset: String,
    /// Sizes that replace those of the preset.
    pub sizes: Sizes,
    /// Kind of each layer.
    pub layers: Pattern,
    /// Scale and bound of the scores, and whether there are sinks.
    pub scores: Scores,
}

/// Sizes that were asked for, each by an option of its name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Sizes {
    /// Width of the residual stream.
    pub width: Option<u32>,
    /// Layers.
    pub depth: Option<u32>,
    /// Query heads.
    pub query_heads: Option<u32>,
    /// KV heads.
    pub kv_heads: Option<u32>,
    /// Dimension of a head.
    pub head_dim: Option<u32>,
    /// Inner width of SwiGLU.
    pub feed_forward: Option<u32>,
    /// Tokens that there are.
    pub vocab_size: Option<u32>,
}

/// Why there is no such model.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DesignError {
    /// No preset.
    #[error("--model: {0}")]
    Preset(#[from] UnknownModel),
    /// A size beyond what there are tensors, kernels and numbers for.
    #[error("--{option} {given} does not fit; give {allowed}")]
    Size {
        /// The option.
        option: &'static str,
        /// Its value.
        given: usize,
        /// What would fit.
        allowed: &'static str,
    },
    /// Query heads that do not divide over the KV heads.
    #[error(
        "{query} query heads are no multiple of {kv} KV heads, which share them evenly; give --query-heads and --kv-heads that fit"
    )]
    Heads {
        /// Query heads.
        query: usize,
        /// KV heads.
        kv: usize,
    },
    /// Layers that do not fit.
    #[error("--layers: {0}")]
    Layers(#[from] PatternError),
}

impl Design {
    /// Sizes and layers.
    ///
    /// # Errors
    ///
    /// [`DesignError`].
    pub fn build(&self) -> Result<(Config, Stack), DesignError> {
        let config = self.sizes.of(Config::preset(&self.preset)?)?;
        let stack = self.layers.over(config.layers, config.heads(), self.scores)?;
        // Heads that all layers share become the model's, whether the pattern or the sizes named
        // them.
        let Heads { query, kv, dim } = stack.heads().unwrap_or(config.heads());
        let [query_heads, kv_heads, head_dim] = [query, kv, dim].map(usize::from);
        Ok((Config { query_heads, kv_heads, head_dim, ..config }, stack))
    }
}

impl Sizes {
    /// A preset with these sizes.
    fn of(self, preset: Config) -> Result<Config, DesignError> {
        let size = |given: Option<u32>, own: usize| given.map_or(own, |it| it as usize);
        let config = Config {
            width: size(self.width, preset.width),
            layers: size(self.depth, preset.layers),
            query_heads: size(self.query_heads, preset.query_heads),
            kv_heads: size(self.kv_heads, preset.kv_heads),
            head_dim: size(self.head_dim, preset.head_dim),
            feed_forward: size(self.feed_forward, preset.feed_forward),
            vocabulary: size(self.vocab_size, preset.vocabulary),
        };
        let Config { width, layers, query_heads, kv_heads, head_dim, feed_forward, vocabulary } =
            config;
        let dim = (8..=256).contains(&head_dim) && head_dim.is_multiple_of(8);
        for (option, given, fits, allowed) in [
            ("width", width, (8..=65_536).contains(&width), "8 to 65,536"),
            ("depth", layers, (1..=1_024).contains(&layers), "1 to 1,024 layers"),
            ("query-heads", query_heads, (1..=1_024).contains(&query_heads), "1 to 1,024"),
            ("kv-heads", kv_heads, (1..=1_024).contains(&kv_heads), "1 to 1,024"),
            ("head-dim", head_dim, dim, "a multiple of 8 up to 256"),
            ("feed-forward", feed_forward, (8..=262_144).contains(&feed_forward), "8 to 262,144"),
            ("vocab-size", vocabulary, (2..=1_048_576).contains(&vocabulary), "2 to 1,048,576"),
        ] {
            if !fits {
                return Err(DesignError::Size { option, given, allowed });
            }
        }
        if !query_heads.is_multiple_of(kv_heads) {
            return Err(DesignError::Heads { query: query_heads, kv: kv_heads });
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(sizes: Sizes) -> Result<Config, String> {
        let design = Design {
            preset: "tiny".into(),
            sizes,
            layers: Pattern::default(),
            scores: Scores::default(),
        };
        design.build().map(|it| it.0).map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_replace_those_of_a_preset() {
        let preset = Config::preset("tiny").unwrap();
        assert_eq!(tiny(Sizes::default()), Ok(preset));
        let sizes = Sizes { kv_heads: Some(2), head_dim: Some(256), ..Sizes::default() };
        assert_eq!(tiny(sizes), Ok(Config { kv_heads: 2, head_dim: 256, ..preset }));
        let sizes = Sizes { depth: Some(3), width: Some(72), ..Sizes::default() };
        assert_eq!(tiny(sizes), Ok(Config { layers: 3, width: 72, ..preset }));
        let sizes = Sizes { vocab_size: Some(50_304), ..Sizes::default() };
        assert_eq!(tiny(sizes), Ok(Config { vocabulary: 50_304, ..preset }));
    }

    #[test]
    fn heads_that_all_layers_have_are_the_models() {
        let built = |pattern: &str| {
            let (preset, layers) = ("tiny".into(), pattern.parse().unwrap());
            let (sizes, scores) = (Sizes::default(), Scores::default());
            Design { preset, sizes, layers, scores }.build().unwrap()
        };
        let preset = Config::preset("tiny").unwrap();
        let wide = Config { query_heads: 3, kv_heads: 3, head_dim: 40, ..preset };
        assert_eq!(built("full heads 3/3 dim 40").0, wide);
        assert_eq!(built("window:9 heads 3/3 dim 40, none").0, wide);
        let (config, stack) = built("full heads 3/3 dim 40, window:9 dim 64");
        assert_eq!((config, stack.heads()), (preset, None));
        let heads = [0, 1].map(|it| stack.core().kind_of(it).heads);
        let own = Heads { query: 2, kv: 1, dim: 64 };
        assert_eq!(heads, [wide.heads(), own], "what a word leaves out is the model's");
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_by_their_option() {
        let none = Sizes::default();
        for (sizes, expected) in [
            (
                Sizes { head_dim: Some(0), ..none },
                "--head-dim 0 does not fit; give a multiple of 8",
            ),
            (Sizes { head_dim: Some(20), ..none }, "--head-dim 20 does not fit"),
            (Sizes { head_dim: Some(264), ..none }, "--head-dim 264 does not fit"),
            (Sizes { kv_heads: Some(0), ..none }, "--kv-heads 0 does not fit; give 1 to 1,024"),
            (Sizes { query_heads: Some(1_025), ..none }, "--query-heads 1025 does not fit"),
            (Sizes { width: Some(7), ..none }, "--width 7 does not fit"),
            (Sizes { depth: Some(0), ..none }, "--depth 0 does not fit"),
            (Sizes { feed_forward: Some(0), ..none }, "--feed-forward 0 does not fit"),
            (Sizes { vocab_size: Some(1), ..none }, "--vocab-size 1 does not fit; give 2 to"),
            (
                Sizes { kv_heads: Some(4), ..none },
                "2 query heads are no multiple of 4 KV heads, which share them evenly; give --query-heads",
            ),
        ] {
            let refused = tiny(sizes).unwrap_err();
            assert!(refused.starts_with(expected), "{refused}");
        }
    }
}
