"""A small Llama of transformers, with random weights, learns the King James Bible; its core attention runs on the pool.

    make demo-pytorch

In: the books in `examples/bible`, cut at lengths with a long tail and packed; `--model` for a Qwen whose last layers
have windows, or a gpt-oss with windows and sinks. Out: a line a step. `cadre run` starts a process for each rank;
started by hand, it is one rank without a pool. What is Cadre's here is marked.
"""

import argparse
import os

import cadre
import cadre.transformers
import torch
import torch.distributed as dist
from pytorch_books import packed
from torch.nn.parallel import DistributedDataParallel
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "use_cache": False,
}


def llama(attention: str) -> LlamaForCausalLM:
    """Four layers on bytes; every process makes the same weights."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention))  # Cadre's name is "cadre"


def qwen(attention: str) -> Qwen2ForCausalLM:
    """The last two layers see 64 rows."""
    torch.manual_seed(1)
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **window, attn_implementation=attention))


def gpt_oss(attention: str) -> GptOssForCausalLM:
    """Heads have sinks, each other layer sees 64 rows, and tokens go to two of four experts."""
    torch.manual_seed(1)
    more = {"head_dim": 32, "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **more, attn_implementation=attention))
    for it in model.model.layers:
        torch.nn.init.normal_(it.self_attn.sinks)
    return model


MODELS = {"llama": llama, "qwen": qwen, "gpt-oss": gpt_oss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile: compile the layers, each for itself")
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    model = MODELS[options.model]("cadre")
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    # Joins the job: who computes, and what all ranks agree on.
    cadre.init(model, steps=options.steps)
    for it in model.model.layers if options.compile else ():
        it.compile(backend=options.compile, fullgraph=True)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # Each batch is a step of the pool; the lengths of the next one are announced meanwhile.
    for step, batch in enumerate(cadre.batches(packed(rank, options.tokens))):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if ranks > 1:
            dist.all_reduce(mean)
        mean /= ranks
        # For the steps' log and the live view.
        cadre.report(loss=mean, gradient_norm=norm, learning_rate=options.lr)
        print(f"step {step} loss {mean.item():.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
