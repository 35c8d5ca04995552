"""A small Qwen3.5 of transformers, with random weights: three layers of linear attention, then one of full attention,
whose core attention runs on the pool.

    command: [python, examples/pytorch_hybrid.py]

Linear layers keep a state from row to row, so each rank holds whole documents, one a row of its batch, whatever their
lengths are: no rank hands rows to another one before or behind a layer of attention, and the planner evens out what
full attention costs. In: the books in `examples/bible`. Out: a line a step. What is Cadre's here is marked.
"""

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path

import cadre
import cadre.transformers
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

BOOKS = Path(__file__).resolve().parent / "bible"


def hybrid(attention: str) -> Qwen3_5ForCausalLM:
    """Eight layers on bytes, two of them with full attention; every process makes the same weights."""
    torch.manual_seed(1)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        use_cache=False,
        attn_implementation=attention,  # Cadre's name is "cadre"
    )
    return Qwen3_5ForCausalLM(config)


def documents(rank: int, tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `tokens` tokens: one long document, or several short ones of one length."""
    books = [it.read_bytes() for it in sorted(BOOKS.glob("*.txt"))]
    draw = random.Random(rank)
    while True:
        count = 2 ** draw.randrange(6)
        rows, length = [], tokens // count
        for _ in range(count):
            book = draw.choice(books)
            start = draw.randrange(len(book) - length)
            rows.append(torch.tensor(list(book[start : start + length])))
        ids = torch.stack(rows)
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank and step")
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    model = hybrid("cadre")
    # Cadre: joins the job, with the two layers that have core attention.
    cadre.init(model, steps=options.steps)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Cadre: each batch is a step of the pool; a row of it is a document.
    for step, batch in enumerate(cadre.batches(documents(rank, options.tokens))):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if ranks > 1:
            dist.all_reduce(mean)
        cadre.report(loss=mean / ranks)  # Cadre: for the steps' log and the live view
        print(f"step {step} loss {mean.item() / ranks:.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
