//! What a container of a trainer or of a server may say to `cadre train` and `cadre serve`.
//!
//! In: words of the command line, or of a manifest's container. Out: [`TrainOptions`], [`ServeOptions`], every number within its
//! range, and what these are to a worker.

use std::num::{NonZeroU16, NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use cadre_trainer::TrainArgs;
use cadre_trainer::corpus::HeldOut;
use cadre_worker::{ServerArgs, Threads};
use clap::{Args, Parser};

use crate::choices::{EngineChoice, ExchangeChoice, HeadsChoice};
use crate::model_options::ModelOptions;

/// What trainers and servers say alike.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProcessOptions {
    /// Threads that compute.
    #[arg(long, default_value = "1")]
    pub(crate) threads: NonZeroUsize,
    /// The number of the GPU that computes, of those that the process may see, from 0; default: processes of a machine take
    /// turns at its GPUs.
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u16>,
    /// What moves rows: from the host's memory by the best path of each pair (auto: shared memory on one machine, RDMA where both
    /// have it, else TCP), by TCP, by shared memory alone (shm), or by UCX alone (ucx: RDMA); or node: copies of one GPU's memory
    /// between processes of one machine.
    #[arg(long, value_enum, default_value_t = ExchangeChoice::Auto)]
    pub(crate) exchange: ExchangeChoice,
}

/// Options of a trainer.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct TrainOptions {
    /// Directory of documents: one a file, or one a line of .jsonl files ("text": a string, or "tokens": a list of bytes).
    #[arg(long, value_name = "DIR")]
    pub(crate) data: PathBuf,
    /// Documents that are held out, and evaluated: a part of those in --data, such as 0.05, or the path of others.
    #[arg(long, value_name = "PART|PATH")]
    pub(crate) validate: Option<HeldOut>,
    /// Steps between evaluations of documents that are held out; 0: after the last step only.
    #[arg(long, default_value = "20")]
    pub(crate) validate_every: u64,
    /// Rows of an evaluation, about; where there are more, it takes pieces from all over the documents.
    #[arg(long, default_value = "65536")]
    pub(crate) validate_tokens: NonZeroU32,
    /// The model.
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// Steps of the job.
    #[arg(long)]
    pub(crate) steps: NonZeroU64,
    /// Rows of each trainer in each nano-batch.
    #[arg(long, default_value = "4096")]
    pub(crate) tokens: NonZeroU32,
    /// Longest document.
    #[arg(long, default_value = "4096")]
    pub(crate) cap: NonZeroU32,
    /// File with the lengths that documents are cut at; default: the list that ships with Cadre.
    #[arg(long, value_name = "FILE")]
    pub(crate) lengths: Option<PathBuf>,
    /// Nano-batches that go through the model together; two hide transfers behind work.
    #[arg(long, default_value = "2")]
    pub(crate) nano_batches: NonZeroU32,
    /// How often in a step so many nano-batches go forward and backward; gradients are summed, and activations are held of one
    /// time alone.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) accumulate: NonZeroU16,
    /// Highest learning rate.
    #[arg(long, default_value = "3e-3", value_parser = learning_rate)]
    pub(crate) lr: f32,
    /// Steps until the learning rate is at its highest.
    #[arg(long, default_value = "10")]
    pub(crate) warmup: u64,
    /// Seed of weights and data.
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,
    /// Threads, and what moves rows.
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
    /// What computes linear layers, and core attention in place: the GPU where there is one (attention: if the rows are bf16;
    /// linear layers: if cuBLASLt is there), the CPU otherwise.
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,
    /// Whether the KV heads of a document may go to different servers; what trainer 0 says counts.
    #[arg(long, value_enum, default_value_t = HeadsChoice::Apart)]
    pub(crate) heads: HeadsChoice,
    /// Memory for rows of others, in place and standing by; default: what the job's spec.attention.inPlaceMemoryMebibytes says.
    #[arg(long, value_name = "MIB")]
    pub(crate) memory_mib: Option<NonZeroU32>,
    /// Steps between checkpoints; 0: at the end only, good or bad.
    #[arg(long, default_value = "20")]
    pub(crate) checkpoint_every: u64,
    /// Start of the text that the trained model goes on with.
    #[arg(long, default_value = "In the beginning")]
    pub(crate) prompt: String,
}

fn learning_rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("write a number above 0, such as 3e-3".into()),
    }
}

/// Options of a server.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub(crate) struct ServeOptions {
    /// Threads, and what moves rows.
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
    /// What computes core attention: the GPU where there is one and the rows are bf16, the CPU otherwise.
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,
    /// Memory for rows and results.
    #[arg(long, value_name = "MIB", default_value = "1024")]
    pub(crate) memory_mib: NonZeroU64,
}

impl From<TrainOptions> for TrainArgs {
    fn from(options: TrainOptions) -> Self {
        let TrainOptions {
            data,
            validate,
            validate_every,
            validate_tokens,
            model,
            steps,
            tokens,
            cap,
            lengths,
            nano_batches,
            accumulate,
            lr,
            warmup,
            seed,
            process: ProcessOptions { threads, gpu, exchange },
            engine,
            heads,
            memory_mib,
            checkpoint_every,
            prompt,
        } = options;
        Self {
            data,
            validate,
            validate_every,
            validate_tokens,
            design: model.into(),
            steps,
            tokens,
            cap,
            lengths,
            nano_batches,
            accumulate,
            lr,
            warmup,
            seed,
            threads: Threads(threads),
            engine: engine.into(),
            gpu: gpu.map(usize::from),
            exchange: exchange.into(),
            kv_heads: heads.into(),
            memory_mib,
            checkpoint_every,
            prompt,
        }
    }
}

impl From<ServeOptions> for ServerArgs {
    fn from(options: ServeOptions) -> Self {
        let ServeOptions { process, engine, memory_mib } = options;
        let ProcessOptions { threads, gpu, exchange } = process;
        Self {
            threads: Threads(threads),
            engine: engine.into(),
            gpu: gpu.map(usize::from),
            exchange: exchange.into(),
            memory_mib: memory_mib.get(),
        }
    }
}

/// A container's arguments on their own.
#[derive(Debug, Parser)]
#[command(name = "args", no_binary_name = true, args_override_self = true)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct Container<T: Args> {
    #[command(flatten)]
    pub(crate) options: T,
}

/// The complaint of the command line's reader, in one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let said = text.split("\n\nUsage:").next().unwrap_or(&text).trim_start_matches("error: ");
    let said = said.split("\n\nFor more").next().unwrap_or(said);
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(args: &[&str]) -> Result<TrainOptions, String> {
        let parsed = Container::<TrainOptions>::try_parse_from(args);
        parsed.map(|it| it.options).map_err(|error| one_line(&error))
    }

    #[test]
    fn later_arguments_of_a_trainer_win() {
        let options = train(&["--data=a", "--steps", "5", "--data", "b", "--steps=7"]).unwrap();
        assert_eq!((options.data, options.steps.get()), (PathBuf::from("b"), 7));
        assert_eq!(options.lr.to_bits(), 3e-3_f32.to_bits());
        assert_eq!(options.checkpoint_every, 20);
        let never = train(&["--data=a", "--steps=5", "--checkpoint-every=0"]).unwrap();
        assert_eq!(never.checkpoint_every, 0);
    }

    #[test]
    fn bad_arguments_are_refused_in_one_line() {
        for (args, expected) in [
            (
                &["--steps=1"][..],
                "the following required arguments were not provided: --data <DIR>",
            ),
            (
                &["--data=a", "--steps=0"],
                "invalid value '0' for '--steps <STEPS>': number would be zero for non-zero type",
            ),
            (
                &["--data=a", "--steps=1", "--lr=-1"],
                "invalid value '-1' for '--lr <LR>': write a number above 0, such as 3e-3",
            ),
            (
                &["--data=a", "--steps=1", "--layers=full,window:0"],
                "invalid value 'full,window:0' for '--layers <PATTERN>': \"window:0\" is no kind of layers; \
                 write full, window:ROWS, chunk:ROWS (with at least 1 row) or none for each layer of the pattern",
            ),
            (
                &["--data=a", "--steps=1", "--softcap=0"],
                "invalid value '0' for '--softcap <NUMBER>': \"0\" is no number from 2^-20 to 2^20; write one such as \
                 0.0625 or 50",
            ),
            (
                &["--data=a", "--steps=1", "--validate=1.5"],
                "invalid value '1.5' for '--validate <PART|PATH>': \"1.5\" is no part of the documents; write a number above 0 and below 1, such as 0.05, or the path of documents",
            ),
            (&["--data=a", "--steps=1", "--what"], "unexpected argument '--what' found"),
        ] {
            assert_eq!(train(args).unwrap_err(), expected);
        }
        assert!(train(&["--data=a", "--steps=1", "--model=x"]).unwrap_err().contains("tiny"));
    }
}
