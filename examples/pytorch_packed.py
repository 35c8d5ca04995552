"""Documents that go on in the next rank: all rows of an update are dealt out evenly, whatever the lengths. The model is
that of pytorch_plain.py, under DDP.

    command: [torchrun, examples/pytorch_packed.py]

In: books in `examples/bible`. Out: a line an update; the losses are those of one rank that holds all documents. What is
Cadre's here is marked.
"""

import argparse
import os

import cadre
import torch
import torch.distributed as dist
from pytorch_books import documents
from pytorch_plain import DIM, HEADS, KV_HEADS, LAYERS, Model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Packed(Model):
    """Logits of what a rank holds of packed documents."""

    def forward(self, batch: cadre.Packed) -> Tensor:
        return self.logits(batch.input_ids[0], batch.position_ids[0], batch.cu_seqlens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=2048, help="of all ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=options.steps)
    model = Packed()
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Cadre: what this rank holds of them; positions, labels and weights are those of whole documents.
    updates = (cadre.pack(documents(step, options.rows)) for step in range(options.steps))
    for batch in cadre.batches(updates):
        loss = batch.loss(model(batch))  # Cadre: this rank's part
        (loss * ranks).backward()  # DDP averages gradients, and they are a sum
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        cadre.report(loss=total, gradient_norm=norm)
        if rank == 0:
            print(f"loss {total.item():.6f} norm {norm.item():.6f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
