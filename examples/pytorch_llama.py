"""A small Llama of transformers, with random weights, learns the King James Bible; its core attention runs on the pool.

    make demo-pytorch

In: the books in `examples/bible`, cut at lengths with a long tail and packed. Out: a line a step. `cadre run` starts a
process for each rank; started by hand, it is one rank without a pool. What is Cadre's here is marked.
"""

import argparse
import os

import cadre
import cadre.transformers
import torch
import torch.distributed as dist
from pytorch_books import packed
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def llama(attention: str) -> LlamaForCausalLM:
    """Four layers on bytes; every process makes the same weights."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation=attention,  # Cadre's name is "cadre"
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward")
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    model = llama("cadre")
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    # Joins the job: who computes, and what all ranks agree on.
    cadre.init(model, steps=options.steps)
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
