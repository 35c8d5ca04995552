"""A small Llama of transformers, with random weights, learns the King James Bible; its core attention runs on the pool.

    make demo-pytorch

In: the books in `examples/bible`, cut at lengths with a long tail and packed. Out: a line a step. `cadre run` starts a
process for each rank; started by hand, it is one rank without a pool. What is Cadre's here is marked.
"""

import argparse
import os
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import cadre
import cadre.transformers
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

BOOKS = Path(__file__).resolve().parent / "bible"


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


def packed(rank: int, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Batches of one row: documents one behind the other, none of them predicts the first byte of the next."""
    books = [it.read_bytes() for it in sorted(BOOKS.glob("*.txt"))]
    draw = random.Random(rank)
    while True:
        lengths, texts = [], []
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, 1 + int(draw.lognormvariate(5.5, 1.2))))
            book = draw.choice(books)
            start = draw.randrange(len(book) - lengths[-1])
            texts.append(book[start : start + lengths[-1]])
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        input_ids = torch.tensor(list(b"".join(texts)))
        labels = input_ids.clone()
        labels[ends[:-1].long()] = -100
        yield {
            "input_ids": input_ids[None],
            "labels": labels[None],
            "position_ids": torch.cat([torch.arange(it) for it in lengths])[None],
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }


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
