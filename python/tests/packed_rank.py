"""A rank that packs documents of shapes drawn by seed, and keeps its parts of losses and gradients.

In: the environment of a job; seeds, a step each. Out: `packed-N.pt` in the run's folder, a loss and gradients a seed.
"""

import os
import random
import sys
from pathlib import Path

import cadre
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
from pytorch_packed import Packed
from pytorch_plain import DIM, HEADS, KV_HEADS, LAYERS


def drawn(seed: int) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Documents of which some ask for nothing, or weigh more; rows of two ranks."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(draw.randint(1, 5)):
        rows = draw.choice((1, 2, draw.randint(3, 200)))
        ids = torch.randint(256, (rows,), generator=numbers)
        labels = torch.where(torch.rand(rows, generator=numbers) < 0.2, -100, ids)
        documents.append({"input_ids": ids, "labels": labels, "loss_weights": torch.rand(rows, generator=numbers)})
    documents.append({name: it.repeat(3)[:40] for name, it in documents[0].items()})
    count = sum(len(it["input_ids"]) for it in documents)
    first = draw.choice((1, count - 1, draw.randint(1, count - 1)))
    return documents, [first, count - first]


def main() -> None:
    torch.set_num_threads(1)
    rank, seeds = int(os.environ["RANK"]), [int(it) for it in sys.argv[1:]]
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=len(seeds))
    results, model = [], Packed()

    def updates():
        for seed in seeds:
            documents, rows = drawn(seed)
            yield cadre.pack(documents, rows=rows)

    for batch in cadre.batches(updates()):
        loss = batch.loss(model(batch))
        model.zero_grad()
        loss.backward()
        results.append((loss.item(), [it.grad.clone() for it in model.parameters()]))
    torch.save(results, Path(os.environ["CADRE_OUT"]) / f"packed-{rank}.pt")


if __name__ == "__main__":
    main()
